"""Experts that all run on every token, and are weighted by a table that is zero for those not chosen.

First the router is followed forward, from its TopK to the weights of each expert; then each weighted result is
followed back, all experts at once, to the tokens they share. Results are added one by one, or stacked and summed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import prod

from ir.experts.emit import BINARY, UNARY, VIEWS, Layer
from ir.graph import Operator, Tensor

LOW = -1e4
"""What stands for no weight before a Softmax."""
CONSTANTS = ("Expand", "Slice", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose")


@dataclass(frozen=True)
class _Mark:
    """What a tensor behind the router is."""

    kind: str
    """`index`: chosen experts; `mask`: where expert `expert` was chosen; `hot`: a mask for every expert, in the last
    dim; `table`: the weight of every expert; `low`: likewise before a Softmax; `gate`: the weight of `expert`."""
    expert: int = -1
    weights: str = ""
    """Routing weights `[tokens ..., k]` behind a mask or table; "" while it is but 0 and 1."""
    table: str = ""
    """The table whose look-up gives the weights where they are in no tensor of their own."""


@dataclass(frozen=True)
class _Use:
    """Results that a weight multiplies."""

    index: int
    """Operator that multiplies."""
    value: str
    mark: _Mark


class Dense:
    """One router followed through weights to all experts."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.graph = layer.graph
        self.chosen, self.k, self.tokens = layer.chosen, layer.k, layer.tokens
        router = self.graph.operators[layer.router]
        self.experts = layer.experts = self.graph.tensors[router.inputs[0]].shape[-1]
        self.marks: dict[str, _Mark] = {self.chosen.name: _Mark("index")}
        self.home: Operator | None = None
        self.lifted: dict[tuple[str, ...], str | None] = {}

    def follow(self) -> bool:
        """Rewrites the layer if its experts are found and understood."""
        if self.k >= self.experts:
            return False
        uses = self._uses()
        separate = {u.mark.expert: u for u in uses if u.mark.kind == "gate"}
        if len(separate) == self.experts == sum(u.mark.kind == "gate" for u in uses):
            return self._separate([separate[i] for i in range(self.experts)])
        whole = [u for u in uses if u.mark.kind == "table"]
        return len(whole) == 1 and self._stacked(whole[0])

    # The router's weights

    def _uses(self) -> list[_Use]:
        graph = self.graph
        queue = list(graph.consumers[self.chosen.name])
        seen = set(queue)
        heapq.heapify(queue)
        uses: list[_Use] = []
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

    def _use(self, op: Operator, index: int) -> _Use | None:
        if op.kind not in ("Mul", "MatMul") or len(op.inputs) != 2:
            return None
        side = 0 if op.inputs[0] in self.marks else 1
        mark, other = self.marks[op.inputs[side]], op.inputs[1 - side]
        own, value = self.graph.tensors[op.inputs[side]], self.graph.tensors[other]
        if other in self.marks or mark.kind not in ("gate", "table") or not (mark.weights or mark.table):
            return None
        if op.kind == "MatMul" and (mark.kind != "table" or own.shape[-1] != self.experts or side == 1):
            return None
        # A weight of one number a token or expert multiplies features; what else it multiplies is a weight too.
        wide = value.num_elements > own.num_elements and value.batch_dim is not None
        return _Use(index, other, mark) if wide else None

    def _mark(self, op: Operator) -> None:
        marked = [n for n in op.inputs if n in self.marks]
        mark = self.marks[marked[0]]
        found: _Mark | None = None
        if len(op.inputs) == 1 and (op.kind in VIEWS or op.kind in ("Cast", "Transpose")):
            found = self._viewed(op, mark)
        elif op.kind == "Equal" and mark.kind == "index":
            found = self._compared(op)
        elif op.kind == "OneHot" and mark.kind == "index":
            attributes = dict(op.attributes)
            last = attributes.get("axis", -1) in (-1, len(self.graph.tensors[op.outputs[0]].shape) - 1)
            found = _Mark("hot") if last and attributes["depth"] == self.experts else None
        elif op.kind == "ScatterElements" and mark.kind == "index":
            found = self._scattered(op)
        elif op.kind in ("Mul", "Div", "Where"):
            found = self._weighted(op, mark)
        elif op.kind == "ReduceSum":
            found = self._summed(op, mark)
        elif op.kind == "Softmax" and mark.kind == "low":
            found = _Mark("table", table=op.outputs[0])
        elif op.kind in ("Slice", "Gather", "Split") and mark.kind == "table":
            self._picked(op, mark)
        if found is not None:
            self.marks[op.outputs[0]] = found

    def _viewed(self, op: Operator, mark: _Mark) -> _Mark | None:
        source, result = self.graph.tensors[op.inputs[0]], self.graph.tensors[op.outputs[0]]
        if mark.kind in ("table", "hot", "low") and op.kind != "Cast":
            # Tables may be turned (experts in front) only where nothing but their product with results follows.
            return mark if mark.kind == "table" or source.shape[-1] == result.shape[-1] == self.experts else None
        return mark if op.kind != "Transpose" else None

    def _compared(self, op: Operator) -> _Mark | None:
        index, other = op.inputs if op.inputs[0] in self.marks else op.inputs[::-1]
        if self.graph.tensors[index].num_elements != self.tokens * self.k:
            return None
        value = self._fill(other)
        if value is not None and 0 <= value < self.experts:
            return _Mark("mask", expert=int(value))
        result = self.graph.tensors[op.outputs[0]]
        counts = self._values(other) == tuple(range(self.experts))
        fits = result.shape[-1] == self.experts and result.num_elements == self.tokens * self.k * self.experts
        return _Mark("hot") if counts and fits else None

    def _scattered(self, op: Operator) -> _Mark | None:
        if op.inputs[1] not in self.marks or self.graph.tensors[op.inputs[1]].shape != self.chosen.shape:
            return None
        result, updates = self.graph.tensors[op.outputs[0]], self.graph.tensors[op.inputs[2]]
        axis = dict(op.attributes).get("axis", 0)
        if axis not in (-1, len(result.shape) - 1) or result.shape[-1] != self.experts:
            return None
        fill = self._fill(op.inputs[0])
        if fill is None or (fill and fill > LOW):
            return None
        if fill:
            return _Mark("low")
        return _Mark("table") if updates.role == "constant" else _Mark("table", weights=updates.name)

    def _weighted(self, op: Operator, mark: _Mark) -> _Mark | None:
        result = self.graph.tensors[op.outputs[0]]
        if op.kind == "Where":
            if op.inputs[0] not in self.marks or self._fill(op.inputs[2]) != 0.0:
                return None
            other = op.inputs[1]
        else:
            other = op.inputs[1] if op.inputs[0] in self.marks else op.inputs[0]
            if op.kind == "Div" and op.inputs[0] not in self.marks:
                return None
        if other in self.marks:
            return None
        size = self.graph.tensors[other].num_elements
        if mark.kind == "table":
            # Zero stays zero; what was chosen is looked up in the product.
            return _Mark("table", table=result.name) if result.shape[-1] == self.experts else None
        if mark.kind in ("mask", "hot") and not mark.weights and size == self.tokens * self.k:
            return replace(mark, weights=other)
        return None

    def _summed(self, op: Operator, mark: _Mark) -> _Mark | None:
        source = self.graph.tensors[op.inputs[0]]
        axes = dict(op.attributes)["axes"]
        over_k = len(axes) == 1 and source.shape[axes[0]] == self.k and prod(source.shape[: axes[0]]) == self.tokens
        if not over_k or mark.kind not in ("mask", "hot"):
            return None
        if mark.kind == "mask":
            return replace(mark, kind="gate") if mark.weights else None
        return replace(mark, kind="table")

    def _picked(self, op: Operator, mark: _Mark) -> None:
        source = self.graph.tensors[op.inputs[0]]
        attributes, last = dict(op.attributes), len(source.shape) - 1
        if source.shape[-1] != self.experts or len(op.inputs) != 1:
            return
        if op.kind == "Split" and attributes["axis"] % len(source.shape) == last:
            picked = list(range(self.experts)) if set(attributes["split"]) == {1} else []
        elif op.kind == "Slice" and attributes["axes"] == (last,):
            start, stop = attributes["starts"][0], attributes["ends"][0]
            picked = [start] if stop == start + 1 else []
        elif op.kind == "Gather" and attributes["axis"] % len(source.shape) == last:
            picked = [attributes["indices"]]
        else:
            return
        for name, expert in zip(op.outputs, picked, strict=False):
            self.marks[name] = replace(mark, kind="gate", expert=expert)

    def _fill(self, name: str) -> float | None:
        """The number that a constant is filled with."""
        values = self._values(name)
        return values[0] if values is not None and len(set(values)) == 1 else None

    def _values(self, name: str) -> tuple[float, ...] | None:
        """Numbers of a small constant, in any shape."""
        index = self.graph.producer.get(name)
        if index is None or not self.graph.operators[index].is_constant:
            return None
        op = self.graph.operators[index]
        attributes = dict(op.attributes)
        if op.kind in ("Constant", "ConstantOfShape"):
            value = attributes["value"]
            return tuple(value) if isinstance(value, tuple) else (float(value),)
        if op.kind == "Range":
            return tuple(range(int(attributes["start"]), int(attributes["limit"]), int(attributes["delta"])))
        values = self._values(op.inputs[0]) if op.kind in CONSTANTS else None
        return values if values is None or op.kind not in ("Expand", "Slice") or len(set(values)) == 1 else None

    # The experts

    def _separate(self, uses: Sequence[_Use]) -> bool:
        """Results weighted one by one and added."""
        graph = self.graph
        if len({(u.mark.weights, u.mark.table) for u in uses}) != 1:
            return False
        products = {graph.operators[u.index].outputs[0] for u in uses}
        found = self._sum(max(u.index for u in uses), products)
        slots = self._layer(uses[0], tuple(u.value for u in uses)) if found is not None else None
        if found is None or slots is None:
            return False
        root, extra = found
        op = graph.operators[root]
        result = graph.tensors[op.outputs[0]]
        if not extra:
            return self._combine(root, slots, uses[0].mark, result)
        part = replace(result, name=f"{result.name}#mixture")
        if not self._combine(root, slots, uses[0].mark, part, put=False):
            return False
        total = part.name
        for number, name in enumerate(extra):
            output = result.name if number == len(extra) - 1 else f"{result.name}#{number}"
            (total,) = self.layer.make("Add", op, [name, total], [output], is_new=True)
        self.layer.put(root)
        return True

    def _sum(self, last: int, products: set[str]) -> tuple[int, list[str]] | None:
        """The Add behind operator `last` that completes the sum of `products`, and what else it adds up."""
        graph = self.graph
        name = graph.operators[last].outputs[0]
        while True:
            readers = graph.consumers[name]
            if len(readers) != 1 or graph.operators[readers[0]].kind not in ("Add", "Sum"):
                return None
            leaves = self._leaves(readers[0], products)
            if products <= set(leaves):
                extra = [n for n in leaves if n not in products and self._fill(n) != 0.0]
                return readers[0], extra
            name = graph.operators[readers[0]].outputs[0]

    def _leaves(self, root: int, products: set[str]) -> list[str]:
        graph = self.graph
        leaves: list[str] = []
        stack = list(reversed(graph.operators[root].inputs))
        while stack:
            name = stack.pop()
            index = graph.producer.get(name)
            op = None if index is None else graph.operators[index]
            inner = op is not None and op.kind in ("Add", "Sum") and len(graph.consumers[name]) == 1
            if op is not None and inner and not op.is_constant and name not in products and self._holds(op, products):
                stack.extend(reversed(op.inputs))
            else:
                leaves.append(name)
        return leaves

    def _holds(self, op: Operator, products: set[str]) -> bool:
        """Whether an Add lies on the chain: a term of it is a weighted result, or an Add that has one."""
        graph = self.graph
        return any(
            n in products or (n in graph.producer and graph.operators[graph.producer[n]].kind in ("Add", "Sum"))
            for n in op.inputs
        )

    def _stacked(self, use: _Use) -> bool:
        """Results of all experts in one tensor, weighted and summed."""
        graph = self.graph
        op = graph.operators[use.index]
        index = use.index
        if op.kind == "Mul":
            while op.kind != "ReduceSum":
                readers = graph.consumers[op.outputs[0]]
                if len(readers) != 1 or graph.operators[readers[0]].kind not in (*VIEWS, "ReduceSum", "Cast"):
                    return False
                index, op = readers[0], graph.operators[readers[0]]
            axes = dict(op.attributes)["axes"]
            if len(axes) != 1 or graph.tensors[op.inputs[0]].shape[axes[0]] != self.experts:
                return False
        slots = self._layer(use, self._members(use.value))
        return slots is not None and self._combine(index, slots, use.mark, graph.tensors[op.outputs[0]])

    def _members(self, name: str) -> tuple[str, ...]:
        """Results that were joined to `name`, one an expert, else itself."""
        index = self.graph.producer.get(name)
        while index is not None and self.graph.operators[index].kind in VIEWS:
            index = self.graph.producer.get(self.graph.operators[index].inputs[0])
        op = None if index is None else self.graph.operators[index]
        if op is None or op.kind != "Concat" or len(op.inputs) != self.experts:
            return (name,)
        joined = [self.graph.tensors[n].shape[dict(op.attributes)["axis"]] for n in op.inputs]
        return op.inputs if set(joined) == {1} else (name,)

    def _combine(self, at: int, slots: str, mark: _Mark, result: Tensor, *, put: bool = True) -> bool:
        op = self.graph.operators[at]
        weights = mark.weights
        if not weights:
            table = mark.table
            if self.graph.tensors[table].shape[:-1] != self.chosen.shape[:-1]:
                return False
            weights = f"{table}#weights"
            self.layer.make("GatherElements", op, [table, self.chosen.name], [weights], {"axis": -1}, is_new=True)
        if not self.layer.combine(op, slots, weights, result):
            return False
        if put:
            self.layer.put(at)
        return True

    def _layer(self, use: _Use, results: tuple[str, ...]) -> str | None:
        """The slots that `results` are; what has no place of its own in the file is put in the scope they share."""
        makers = [self.graph.operators[i] for i in (self.graph.producer.get(n) for n in results) if i is not None]
        parts = zip(*(m.scope.split(".") for m in makers), strict=False)
        shared = [p[0] for p in takewhile(lambda p: len(set(p)) == 1, parts)]
        self.home = replace(self.graph.operators[use.index], scope=".".join(shared)) if shared else None
        return self._lift(results)

    # From results back to tokens, for all experts at once (or for one tensor of all)

    def _lift(self, names: tuple[str, ...]) -> str | None:
        """The slots that results `names` are, one an expert or all in one; None where that is not understood."""
        if names not in self.lifted:
            self.lifted[names] = self._lifted(names)
        return self.lifted[names]

    def _lifted(self, names: tuple[str, ...]) -> str | None:
        graph = self.graph
        ops = self._alike(names)
        shared = self._shared(names)
        if shared is not None:
            return self.layer.dispatch(self.home or graph.operators[graph.producer[shared]], shared)
        if ops is None:
            return None
        op = _merged(ops)
        columns = [tuple(o.inputs[i] for o in ops) for i in range(len(op.inputs))]
        result = graph.tensors[names[0]]
        if op.kind in VIEWS or op.kind == "Expand":
            kept = graph.tensors[columns[0][0]].shape[-1] == result.shape[-1]
            return self._lift(columns[0]) if kept else None
        if op.kind in ("MatMul", "Gemm") and len(op.inputs) == 2:
            weight = self._stack(columns[1])
            tokens = self._lift(columns[0]) if weight is not None else None
            if tokens is None or weight is None:
                return None
            return self.layer.product(op, tokens, weight, transposed=bool(dict(op.attributes).get("transB")))
        if op.kind in ("Split", "Slice"):
            return self._cut(op, columns[0], ops, names)
        if op.kind in UNARY and len(op.inputs) == 1:
            operands = [self._lift(columns[0])]
        elif op.kind in BINARY and len(op.inputs) == 2:
            operands = [self._operand(op, c, result.shape[-1]) for c in columns]
        else:
            return None
        given = [n for n in operands if n is not None]
        if len(given) != len(operands):
            return None
        return self.layer.make(op.kind, op, given, [f"{names[0]}#experts"], dict(op.attributes))[0]

    def _alike(self, names: tuple[str, ...]) -> list[Operator] | None:
        """Producers that differ by their operands only."""
        graph = self.graph
        if any(n not in graph.producer for n in names):
            return None
        ops = [graph.operators[graph.producer[n]] for n in names]
        same = {(o.kind, o.attributes, len(o.inputs), o.outputs.index(n)) for o, n in zip(ops, names, strict=True)}
        plain = not any(o.is_view or o.is_constant for o in ops)
        return ops if len(same) == 1 and plain else None

    def _shared(self, names: tuple[str, ...]) -> str | None:
        """The tokens that all experts read."""
        name = names[0]
        tensor = self.graph.tensors[name]
        if len(set(names)) != 1 or tensor.role != "activation" or tensor.batch_dim is None:
            return None
        if len(names) == 1 and self._is_expert_wise(name):
            return None
        fits = prod(tensor.shape[:-1]) == self.tokens and tensor.batch_dim < len(tensor.shape) - 1
        return name if fits else None

    def _is_expert_wise(self, name: str) -> bool:
        """Whether a tensor holds results of all experts, or copies of tokens for them."""
        tensor = self.graph.tensors[name]
        return tensor.num_elements == self.experts * self.tokens * tensor.shape[-1]

    def _operand(self, op: Operator, names: tuple[str, ...], features: int) -> str | None:
        tensors = [self.graph.tensors[n] for n in names]
        if all(self.layer.is_weight(n) for n in names) and (len(names) == 1 or len(set(names)) > 1):
            stack = self._stack(names)
            return None if stack is None else self.layer.bias(op, stack, features)
        if len(set(names)) == 1 and tensors[0].batch_dim is None and tensors[0].num_elements in (1, features):
            return names[0] if tensors[0].shape[-1:] in ((), (1,), (features,)) else None
        return self._lift(names)

    def _cut(
        self, op: Operator, source: tuple[str, ...], ops: Sequence[Operator], names: tuple[str, ...]
    ) -> str | None:
        attributes = dict(op.attributes)
        rank = len(self.graph.tensors[source[0]].shape)
        last = attributes["axis"] % rank == rank - 1 if op.kind == "Split" else attributes["axes"] == (rank - 1,)
        slots = self._lift(source) if last else None
        if slots is None:
            return None
        attributes |= {"axis": 2} if op.kind == "Split" else {"axes": (2,)}
        outputs = [f"{n}#experts" for n in op.outputs]
        made = self.layer.make(op.kind, op, [slots], outputs, attributes)
        for number, result in enumerate(made):
            self.lifted[tuple(o.outputs[number] for o in ops) if len(names) > 1 else (op.outputs[number],)] = result
        return self.lifted[names]

    def _stack(self, names: tuple[str, ...]) -> str | None:
        """One tensor with a leading dim of experts for weights `names`, or the one tensor that already has it."""
        graph = self.graph
        if not all(self.layer.is_weight(n) for n in names):
            return None
        if len(names) == 1:
            return self._whole(names[0])
        if len(set(names)) != len(names):
            return None
        if all(graph.tensors[n].role == "parameter" for n in names):
            shapes = {(graph.tensors[n].shape, graph.tensors[n].dtype) for n in names}
            alone = all(len(graph.consumers[n]) == 1 and n not in graph.outputs for n in names)
            return self._stacked_parameter(names) if len(shapes) == 1 and alone else None
        views = [graph.operators[graph.producer[n]] for n in names if n in graph.producer]
        if len(views) != len(names) or {(v.kind, v.attributes) for v in views} != {("Transpose", views[0].attributes)}:
            return None
        inner = self._stack(tuple(v.inputs[0] for v in views))
        if inner is None:
            return None
        perm = (0, *(p + 1 for p in dict(views[0].attributes)["perm"]))
        outputs = [f"{names[0]}#experts"]
        return self.layer.make("Transpose", _merged(views), [inner], outputs, {"perm": perm}, is_view=True)[0]

    def _whole(self, name: str) -> str | None:
        """A parameter of all experts, or a view of it; a bias without the dim that it is broadcast along."""
        tensor = self.graph.tensors[name]
        while tensor.shape[:1] == (self.experts,) and len(tensor.shape) == 3 and tensor.shape[1] == 1:
            index = self.graph.producer.get(name)
            if index is None or self.graph.operators[index].kind not in VIEWS:
                return None
            name = self.graph.operators[index].inputs[0]
            tensor = self.graph.tensors[name]
        return name if tensor.shape[:1] == (self.experts,) else None

    def _stacked_parameter(self, names: tuple[str, ...]) -> str:
        first = self.graph.tensors[names[0]]
        parts = [n.split(".") for n in names]
        if len({len(p) for p in parts}) == 1:
            fresh = ".".join(c[0] if len(set(c)) == 1 else "*" for c in zip(*parts, strict=True))
        else:
            fresh = f"{names[0]}#stack"
        shape = (self.experts, *first.shape)
        self.layer.tensors[fresh] = Tensor(name=fresh, shape=shape, dtype=first.dtype, role="parameter")
        for number, name in enumerate(names):
            self.layer.pieces[name] = (fresh, 0, number, number + 1)
        return fresh


def _merged(ops: Sequence[Operator]) -> Operator:
    """The first of operators that are alike, in the scope of all: without the number of the expert."""
    scopes = [op.scope.split(".") for op in ops]
    if len({len(s) for s in scopes}) != 1:
        return ops[0]
    scope = ".".join(parts[0] for parts in zip(*scopes, strict=True) if len(set(parts)) == 1)
    return replace(ops[0], scope=scope, name=scope + ops[0].name.removeprefix(ops[0].scope))
