"""Follows the router of a mixture forward, from its TopK to the weights that multiply the results of experts.

Every recognised tensor after the router gets a mark, which states its role; a multiplication by a marked weight is a
use. `ir.experts.dense` goes on from the uses to the experts.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from ir.experts.emit import VIEWS, Layer
from ir.graph import Graph, Operator, Tensor

LOW = -1e4
"""Numbers up to this one count as minus infinity before a Softmax (exporters write -inf or the lowest float)."""
_RESHAPED = ("Expand", "Slice", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose")


@dataclass(frozen=True)
class Mark:
    """The role of a tensor after the router."""

    kind: Literal["index", "mask", "hot", "table", "low", "gate"]
    """`index`: chosen experts; `mask`: where expert `expert` was chosen; `hot`: a mask for every expert, in the last
    dim; `table`: the weight of every expert; `low`: a table before its Softmax or Sigmoid; `gate`: the weight of
    `expert`."""
    expert: int = -1
    """Number of the expert of a mask or gate."""
    weights: str = ""
    """Name of the routing weights `[tokens ..., k]` that multiply a mask or table; "" if it contains 0 and 1 only."""
    table: str = ""
    """Name of the table in which the routing weights are looked up if no tensor contains them; otherwise ""."""
    slot: int = -1
    """Number of the choice, from 0 to k - 1, that an index, mask or gate is of; -1 for all choices of a token."""

    @property
    def is_bare(self) -> bool:
        """Whether it contains 0 and 1 only, no weights."""
        return not (self.weights or self.table)


@dataclass(frozen=True)
class Use:
    """A multiplication of results by a weight."""

    index: int
    """Index of the operator that multiplies."""
    value: str
    """Name of the tensor of results."""
    mark: Mark
    """The role of the weight."""


class Routing:
    """The marks of the tensors after one router."""

    def __init__(self, layer: Layer) -> None:
        self.graph = layer.graph
        self.chosen, self.k, self.tokens = layer.chosen, layer.k, layer.tokens
        self.experts = layer.experts
        self.marks: dict[str, Mark] = {self.chosen.name: Mark("index")}

    def uses(self) -> list[Use]:
        """All multiplications of results by the router's weights, in the order of operators; fills `marks`."""
        graph = self.graph
        queue = list(graph.consumers[self.chosen.name])
        seen = set(queue)
        heapq.heapify(queue)
        uses: list[Use] = []
        while queue:
            index = heapq.heappop(queue)
            op = graph.operators[index]
            use = self._use(op, index)
            if use is not None:
                uses.append(use)
                continue
            self._mark(op)
            for name in op.outputs:
                for reader in graph.consumers[name] if name in self.marks else ():
                    if reader not in seen:
                        seen.add(reader)
                        heapq.heappush(queue, reader)
        return uses

    def _use(self, op: Operator, index: int) -> Use | None:
        """The use that an operator is; None if it is not a multiplication of results by a marked weight."""
        if op.kind not in ("Mul", "MatMul") or len(op.inputs) != 2:
            return None
        side = 0 if op.inputs[0] in self.marks else 1
        mark, other = self.marks[op.inputs[side]], op.inputs[1 - side]
        own, value = self.graph.tensors[op.inputs[side]], self.graph.tensors[other]
        if mark.kind == "mask" and self.k == 1:
            mark = replace(mark, kind="gate")
        if other in self.marks or not self._multiplies(mark, value):
            return None
        if op.kind == "MatMul" and (mark.kind != "table" or own.shape[-1] != self.experts or side == 1):
            return None
        # Routing weights, one number per token or expert, multiply features; a tensor without them is another weight.
        wide = value.num_elements > own.num_elements and value.batch_dim is not None
        return Use(index, other, mark) if wide else None

    def _multiplies(self, mark: Mark, value: Tensor) -> bool:
        """Whether a tensor of a mark may be what results are multiplied by."""
        if mark.kind == "mask":  # of copies of the tokens, one for each choice, which are weighted behind their experts
            return mark.is_bare and mark.slot < 0 and prod(value.shape[:-1]) == self.tokens * self.k
        # Results of one expert for each token may have no weights.
        return mark.kind in ("gate", "table") and (not mark.is_bare or (mark.kind == "gate" and self.k == 1))

    def _mark(self, op: Operator) -> None:
        """Marks the results of an operator that reads a marked tensor, if their role is recognised."""
        marked = [n for n in op.inputs if n in self.marks]
        mark = self.marks[marked[0]]
        found: Mark | None = None
        if len(op.inputs) == 1 and (op.kind in VIEWS or op.kind in ("Cast", "Transpose")):
            found = self._viewed(op, mark)
        elif op.kind == "Equal" and mark.kind == "index":
            found = self._compared(op)
        elif op.kind == "OneHot" and mark.kind == "index":
            attributes = dict(op.attributes)
            last = attributes.get("axis", -1) in (-1, len(self.graph.tensors[op.outputs[0]].shape) - 1)
            found = Mark("hot") if last and attributes["depth"] == self.experts else None
        elif op.kind == "ScatterElements" and mark.kind == "index":
            found = self._scattered(op)
        elif op.kind in ("Mul", "Div", "Where"):
            found = self._weighted(op, mark)
        elif op.kind in ("ReduceSum", "ReduceMax"):
            found = self._summed(op, mark)
        elif op.kind == "Greater" and mark.kind == "gate" and mark.is_bare:
            found = mark if op.inputs[0] in self.marks and self.fill(op.inputs[1]) == 0.0 else None
        elif op.kind in ("Softmax", "Sigmoid") and mark.kind == "low":
            found = Mark("table", table=op.outputs[0])
        elif op.kind in ("Slice", "Gather", "Split") and mark.kind in ("table", "index"):
            for name, number in self._columns(op, self.experts if mark.kind == "table" else self.k):
                fresh = {"kind": "gate", "expert": number} if mark.kind == "table" else {"slot": number}
                self.marks[name] = replace(mark, **fresh)
        if found is not None:
            self.marks[op.outputs[0]] = found

    def _viewed(self, op: Operator, mark: Mark) -> Mark | None:
        source, result = self.graph.tensors[op.inputs[0]], self.graph.tensors[op.outputs[0]]
        if mark.kind in ("table", "hot", "low") and op.kind != "Cast":
            # Only a table may move its dim of experts: the operators after it multiply or select by expert.
            return mark if mark.kind == "table" or source.shape[-1] == result.shape[-1] == self.experts else None
        return mark if op.kind != "Transpose" else None

    def _compared(self, op: Operator) -> Mark | None:
        index, other = op.inputs if op.inputs[0] in self.marks else op.inputs[::-1]
        slot = self.marks[index].slot
        if self.graph.tensors[index].num_elements != self.tokens * (self.k if slot < 0 else 1):
            return None
        value = self.fill(other)
        if value is not None and 0 <= value < self.experts:
            return Mark("mask", expert=int(value), slot=slot)
        if slot >= 0:
            return None
        result = self.graph.tensors[op.outputs[0]]
        counts = self._values(other) == tuple(range(self.experts))
        fits = result.shape[-1] == self.experts and result.num_elements == self.tokens * self.k * self.experts
        return Mark("hot") if counts and fits else None

    def _scattered(self, op: Operator) -> Mark | None:
        if op.inputs[1] not in self.marks or self.graph.tensors[op.inputs[1]].shape != self.chosen.shape:
            return None
        result, updates = self.graph.tensors[op.outputs[0]], self.graph.tensors[op.inputs[2]]
        axis = dict(op.attributes).get("axis", 0)
        if axis not in (-1, len(result.shape) - 1) or result.shape[-1] != self.experts:
            return None
        fill = self.fill(op.inputs[0])
        if fill is None or (fill and fill > LOW):
            return None
        if fill:
            return Mark("low")
        return Mark("table") if updates.role == "constant" else Mark("table", weights=updates.name)

    def _weighted(self, op: Operator, mark: Mark) -> Mark | None:
        result = self.graph.tensors[op.outputs[0]]
        if op.kind == "Where":
            if op.inputs[0] not in self.marks or self.fill(op.inputs[2]) != 0.0:
                return None
            other = op.inputs[1]
        else:
            other = op.inputs[1] if op.inputs[0] in self.marks else op.inputs[0]
            if op.kind == "Div" and op.inputs[0] not in self.marks:
                return None
        if other in self.marks:
            return self._owned(op, mark)
        if mark.is_bare and (mark.kind == "gate" or mark.slot >= 0):
            return self._of_column(mark, other)
        size = self.graph.tensors[other].num_elements
        if mark.kind == "table":
            # Zeros remain zero; the weights of chosen experts are looked up in the product.
            return Mark("table", table=result.name) if result.shape[-1] == self.experts else None
        if mark.kind in ("mask", "hot") and not mark.weights and size == self.tokens * self.k:
            return replace(mark, weights=other)
        return None

    def _summed(self, op: Operator, mark: Mark) -> Mark | None:
        if (
            not self.is_over_choices(op)
            or mark.kind not in ("mask", "hot")
            or (op.kind == "ReduceMax" and not mark.is_bare)
        ):
            return None
        return replace(mark, kind="gate" if mark.kind == "mask" else "table")

    def is_over_choices(self, op: Operator) -> bool:
        """Whether a reduction is over the choices of each token, the dim behind those of tokens."""
        shape, axes = self.graph.tensors[op.inputs[0]].shape, dict(op.attributes)["axes"]
        return len(axes) == 1 and shape[axes[0]] == self.k and prod(shape[: axes[0]]) == self.tokens

    def _owned(self, op: Operator, mark: Mark) -> Mark | None:
        """The product of an expert's weights, which are zero for other tokens, and the mask of its tokens."""
        marks = [self.marks[name] for name in op.inputs if name in self.marks]
        weighted = [m for m in marks if not m.is_bare]
        is_own = op.kind == "Mul" and {(m.kind, m.expert) for m in marks} == {("gate", mark.expert)}
        return weighted[0] if is_own and len(marks) == 2 and len(weighted) == 1 else None

    def _of_column(self, mark: Mark, name: str) -> Mark | None:
        """The mask of an expert's tokens times a column of a table of weights, `[tokens ..., experts or k]`."""
        op = self.graph.maker(name)
        while op is not None and op.kind in (*VIEWS, "Cast"):
            name, op = op.inputs[0], self.graph.maker(op.inputs[0])
        num, own = (self.experts, mark.expert) if mark.slot < 0 else (self.k, mark.slot)
        if op is None or (name, own) not in self._columns(op, num):
            return None
        table = op.inputs[0]
        while self.graph.tensors[table].shape[:-1] != self.chosen.shape[:-1]:
            maker = self.graph.maker(table)
            if maker is None or maker.kind not in VIEWS:
                return None
            table = maker.inputs[0]
        if self.graph.tensors[table].shape[-1] != num:
            return None
        return replace(mark, kind="gate", weights="" if mark.slot < 0 else table, table=table if mark.slot < 0 else "")

    def _columns(self, op: Operator, num: int) -> list[tuple[str, int]]:
        """The results of an operator that picks single columns of a table `[..., num]`, each with its number."""
        source = self.graph.tensors[op.inputs[0]]
        attributes, last = dict(op.attributes), len(source.shape) - 1
        if not source.shape or source.shape[-1] != num or len(op.inputs) != 1:
            return []
        if op.kind == "Split" and attributes["axis"] % len(source.shape) == last:
            picked = list(range(num)) if set(attributes["split"]) == {1} else []
        elif op.kind == "Slice" and attributes["axes"] == (last,):
            start, stop = attributes["starts"][0], attributes["ends"][0]
            picked = [start] if stop == start + 1 else []
        elif op.kind == "Gather" and attributes["axis"] % len(source.shape) == last:
            picked = [attributes["indices"]]
        else:
            picked = []
        return list(zip(op.outputs, picked, strict=False))

    def fill(self, name: str) -> float | None:
        """The value of all elements of a constant; None if they differ, or if the tensor is not a constant."""
        values = self._values(name)
        return values[0] if values is not None and len(set(values)) == 1 else None

    def _values(self, name: str) -> tuple[float, ...] | None:
        """The numbers of a constant, regardless of its shape; None if it is not constant, or unknown."""
        op = self.graph.maker(name)
        if op is None or not op.is_constant:
            return None
        attributes = dict(op.attributes)
        if op.kind in ("Constant", "ConstantOfShape"):
            value = attributes["value"]
            return tuple(value) if isinstance(value, tuple) else (float(value),)
        if op.kind == "Range":
            return tuple(range(int(attributes["start"]), int(attributes["limit"]), int(attributes["delta"])))
        values = self._values(op.inputs[0]) if op.kind in _RESHAPED else None
        return values if values is None or op.kind not in ("Expand", "Slice") or len(set(values)) == 1 else None


def choice(graph: Graph, op: Operator) -> tuple[Tensor, int] | None:
    """The choice of experts by operator `op`: a TopK or an ArgMax over the last dim, or a Concat of such.

    The Concat is for routers that choose one expert after another, excluding those already chosen (Phi-3.5-MoE).

    Returns:
        indices of the chosen experts, `[tokens ..., k]`, and the number of scores per token. None if it chooses none.
    """
    if op.kind != "Concat" or op.is_constant:
        return _one_choice(graph, op)
    chosen = graph.tensors[op.outputs[0]]
    found = [_one_choice(graph, maker) for maker in map(graph.maker, op.inputs) if maker is not None]
    among = {one[1] for one in found if one is not None}
    is_choice = len(among) == 1 and None not in found and len(found) == len(op.inputs)
    along = dict(op.attributes)["axis"] in (-1, len(chosen.shape) - 1)
    return (chosen, among.pop()) if is_choice and along else None


def _one_choice(graph: Graph, op: Operator) -> tuple[Tensor, int] | None:
    """`choice` of a TopK or an ArgMax."""
    attributes = dict(op.attributes)
    if op.is_constant or not (op.kind == "ArgMax" or (op.kind == "TopK" and len(op.outputs) == 2)):
        return None
    scores = graph.tensors[op.inputs[0]]
    is_last = attributes.get("axis", -1 if op.kind == "TopK" else 0) in (-1, len(scores.shape) - 1)
    chosen = graph.tensors[op.outputs[-1]]
    if op.kind == "ArgMax" and not attributes.get("keepdims", 1):
        chosen = replace(chosen, shape=(*chosen.shape, 1))
    return (chosen, scores.shape[-1]) if is_last else None
