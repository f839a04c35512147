"""Shapes: which kernel runs an operator, and the extents that its time depends on.

A product of two operands has four classes of loops: batch (in both operands and the result), m (left operand and
result), n (right operand and result) and k (summed). The factors of the operator's rule fall into them, so a split of
one factor divides one extent. Knows no plan. Units: elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from automap.problem import Problem
from ir.graph import Graph, Operator
from ir.groups import PRODUCTS, FusedGroup, fused_groups
from ir.operators.experts import COMBINE, DISPATCH
from ir.operators.experts import PRODUCT as EXPERT_PRODUCT

# Columns of Tables.shapes: kind of kernel; extents of its loops at one sample; which of these grows with the samples,
# or -1; share of a product that several operators make up; whether the operands need gradients; whether a mask hides
# later keys; whether it is a loss; operand whose leading dims are samples and heads, or -1; whether it moves tokens to
# experts or back; share of the backward pass that makes gradients of weights.
(
    X_KIND,
    X_BATCH,
    X_M,
    X_N,
    X_K,
    X_SAMPLED,
    X_SHARE,
    X_LEFT_GRADIENT,
    X_RIGHT_GRADIENT,
    X_CAUSAL,
    X_LOSS,
    X_HEADS,
    X_ROUTED,
    X_WEIGHT,
) = range(14)
X_COUNT = 14

MEMORY, PRODUCT, BATCHED_PRODUCT, ATTENTION, ROOFLINE, MEASURED, INSIDE = range(7)
"""Kinds of kernels: bound by memory; product with a weight; product of two activations; fused attention; convolutions
and what else has arithmetic; timed by the user; part of another operator's kernel."""

BATCH, M, N, K = range(4)
"""Classes of loops."""

_ATTENTION_CLASSES = {"h": BATCH, "g": BATCH, "s": M, "t": N, "d": K}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One operator's row of `Tables.shapes`."""

    kind: int
    classes: tuple[int, ...]
    """factor of the rule -> class of loops, or -1."""
    extents: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    """Of each class, at one sample."""
    sampled: int = -1
    """The class that grows with the samples, or -1."""
    share: float = 1.0
    """Of one product that several operators make up: the part that is this operator's."""
    gradients: tuple[bool, bool] = (False, False)
    """Whether left and right operand need a gradient; right is the weight, if there is one."""
    causal: bool = False
    loss: bool = False
    heads: int = -1
    """Operand of a softmax between two products whose dims before the last two are samples and heads, or -1."""
    routed: bool = False
    """Whether tokens are moved to experts or back."""
    weight: float = 0.0
    """Share of the backward pass that makes gradients of weights: of its time, or, of products, of its kernels."""

    def row(self) -> list[float]:
        """The columns of `Tables.shapes`."""
        flags = (*self.gradients, self.causal, self.loss)
        return [
            float(self.kind),
            *self.extents,
            float(self.sampled),
            self.share,
            *(float(flag) for flag in flags),
            float(self.heads),
            float(self.routed),
            self.weight,
        ]


class Shapes:
    """The shapes of a problem's operators.

    Args:
        problem: graph and trainer.
        trained: tensors that depend on parameters.
    """

    def __init__(self, problem: Problem, trained: AbstractSet[str]) -> None:
        self.graph = problem.graph
        self.trained = trained
        self.is_fused = problem.trainer.fused_attention

    def host(self, group: FusedGroup) -> int:
        """The member in whose place the kernel of a group is priced: of attention, the product that makes scores."""
        if group.kind == "attention":
            for index in group.members:
                op = self.graph.operators[index]
                if op.forward_flops.at(1) > 0 and (op.kind in PRODUCTS or op.kind == "Attention"):
                    return index
        return group.members[0]

    def of(self, index: int, group: FusedGroup | None, unit: range) -> Shape:
        """The shape of one operator.

        Args:
            index: of the operator.
            group: what runs as one kernel with it, or None.
            unit: operators of its unit.
        """
        op = self.graph.operators[index]
        none = (-1,) * len(op.rule.factors)
        if op.measured_s is not None:
            return Shape(kind=MEASURED, classes=none, weight=self._weight(op))
        if group is not None and group.kind == "attention" and self.is_fused:
            if index != self.host(group):
                return Shape(kind=INSIDE, classes=none)
            found = self._product(op, group.members)
            if found is not None:
                return found
        if op.stated_bytes is None:
            found = self._product(op, () if op.kind != "Attention" else (index,))
            if found is not None:
                return self._piece(found, op, unit)
        if op.forward_flops.at(1) > 0 or self._is_written_out:
            return Shape(kind=ROOFLINE, classes=none, weight=self._weight(op) if op.forward_flops.at(1) > 0 else 0.0)
        is_loss = "Loss" in op.kind or (group is not None and group.kind == "loss")
        return Shape(
            kind=MEMORY,
            classes=none,
            loss=is_loss,
            heads=self._heads(index, op),
            routed=op.kind in (DISPATCH, COMBINE),
        )

    @functools.cached_property
    def _is_written_out(self) -> bool:
        """Whether memory-bound operators run as the graph has them: no trainer fuses convolutional networks."""
        return any(op.kind == "BatchNormalization" for op in self.graph.operators)

    def _weight(self, op: Operator) -> float:
        """Half of a backward pass makes gradients of weights where the other operands need theirs too."""
        weights = {name for name in op.inputs if name in self.trained and self._is_weight(name)}
        if not weights:
            return 0.0
        return 0.5 if any(name in self.trained and name not in weights for name in op.inputs) else 1.0

    def _heads(self, index: int, op: Operator) -> int:
        """Operand 0 of the first operator of an attention that is not fused, if it has dims before the scores'."""
        for group in fused_groups(self.graph):
            if group.kind == "attention" and group.unfused is not None and not self.is_fused:
                is_first = group.unfused.members[0] == index
                if is_first and len(self.graph.tensors[op.inputs[0]].shape) > 2:
                    return 0
        return -1

    def _product(self, op: Operator, attention: tuple[int, ...]) -> Shape | None:
        """A product of two operands; `attention` = members of the attention kernel whose scores it makes."""
        flops = op.forward_flops.at(1)
        kinds = PRODUCTS | {EXPERT_PRODUCT} | ({"Attention"} if attention else set())
        if flops <= 0.0 or op.kind not in kinds or len(op.inputs) < 2:
            return None
        weight = next((i for i in (0, 1) if not attention and self._is_weight(op.inputs[i])), None)
        left, right = (1, 0) if weight == 0 else (0, 1)
        rule = op.rule
        a, b, out = ({f for dim in dims for f in dim} for dims in (rule.inputs[left], rule.inputs[right],
                                                                   rule.outputs[0]))  # fmt: skip
        classes = []
        extents = [1.0, 1.0, 1.0, 1.0]
        sampled = -1
        for number, factor in enumerate(rule.factors):
            if op.kind == "Attention":
                found = BATCH if factor.is_batch else _ATTENTION_CLASSES.get(factor.name, -1)
            else:
                found = -1 if number not in a | b else K if number not in out else (N, M)[number in a]
                if number in a and number in b and number in out:
                    found = BATCH
            classes.append(found)
            if found >= 0:
                extents[found] *= factor.size
                sampled = found if factor.is_batch else sampled
        both = op.backward_flops.at(1) >= 2.0 * flops
        gradients = (both or op.inputs[left] in self.trained, both or op.inputs[right] in self.trained)
        if attention:
            return Shape(
                kind=ATTENTION,
                classes=tuple(classes),
                extents=(extents[0], extents[1], extents[2], extents[3]),
                sampled=sampled,
                gradients=gradients,
                causal=self._is_causal(attention),
            )
        # Slots that stay empty, costs that the user states: the rows are those that the FLOPs stand for.
        whole = 2.0 * math.prod(extents)
        if not math.isclose(flops, whole):
            extents[M] *= flops / whole
        return Shape(
            kind=BATCHED_PRODUCT if weight is None else PRODUCT,
            classes=tuple(classes),
            extents=(extents[0], extents[1], extents[2], extents[3]),
            sampled=sampled,
            gradients=gradients,
            weight=0.0 if weight is None else gradients[1] / max(1, sum(gradients)),
        )

    def _is_weight(self, name: str) -> bool:
        return self._parameter(name) is not None

    def _parameter(self, name: str) -> str | None:
        """The parameter that a tensor is, or is a view of."""
        while self.graph.tensors[name].role != "parameter":
            index = self.graph.producer.get(name)
            if index is None or not self.graph.operators[index].is_view:
                return None
            name = self.graph.operators[index].inputs[0]
        return name

    def _piece(self, shape: Shape, op: Operator, unit: range) -> Shape:
        """Products of one input with the pieces of one fused weight run as one: each takes its part of the time."""
        if shape.kind != PRODUCT:
            return shape
        graph, mine = self.graph, self._source(op)
        if mine is None:
            return shape
        others = [graph.operators[i] for i in unit]
        alike = [
            other
            for other in others
            if other.kind == op.kind and other.forward_flops.at(1) > 0 and self._source(other) == mine
        ]
        share = op.forward_flops.at(1) / sum(other.forward_flops.at(1) for other in alike)
        extents = shape.extents
        return Shape(
            kind=shape.kind,
            classes=shape.classes,
            extents=(extents[BATCH], extents[M], extents[N] / share, extents[K]),
            sampled=shape.sampled,
            share=share,
            gradients=shape.gradients,
            weight=shape.weight,
        )

    def _source(self, op: Operator) -> tuple[str, str] | None:
        """Data input and fused weight of a product with a piece."""
        for weight, data in ((1, 0), (0, 1)):
            name = self._parameter(op.inputs[weight]) if len(op.inputs) > 1 else None
            if name is not None and name in self.graph.pieces:
                return op.inputs[data], self.graph.pieces[name][0]
        return None

    def _is_causal(self, members: tuple[int, ...]) -> bool:
        graph = self.graph
        return any(
            dict(graph.operators[i].attributes).get("is_causal") or any(_is_triangle(graph, n) for n in
                                                                        graph.operators[i].inputs)
            for i in members
        )  # fmt: skip


def _is_triangle(graph: Graph, name: str) -> bool:
    """Whether a tensor is made of a constant triangle."""
    pending, seen = [name], set[str]()
    while pending:
        index = graph.producer.get(pending.pop())
        if index is None or not graph.operators[index].is_constant:
            continue
        op = graph.operators[index]
        if op.kind == "Trilu":
            return True
        fresh = [n for n in op.inputs if n not in seen]
        seen.update(fresh)
        pending += fresh
    return False
