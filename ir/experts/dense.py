"""Recognises experts that all run on every token, with weights that are zero for the experts that were not chosen.

The search starts at the TopK of the router and goes forward to the weights of each expert (`ir.experts.routing`). From
the weighted results it goes backward, for all experts in parallel, to the tokens that all of them read. The results of
the experts are either added one by one, or stacked and summed. In Llama 4, which chooses one expert per token, the
tokens are weighted instead, before their experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from math import prod

from ir.experts.emit import BINARY, UNARY, VIEWS, Layer
from ir.experts.repeated import copied_tokens, is_by_choice, weighted_sum
from ir.experts.routing import Mark, Routing, Use
from ir.graph import Operator, Tensor


class Dense:
    """The rewrite of one layer: a router and the experts that it weights."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.graph = layer.graph
        self.chosen, self.k, self.tokens = layer.chosen, layer.k, layer.tokens
        self.experts = layer.experts = layer.among
        self.routing = Routing(layer)
        self.home: Operator | None = None
        self.runs = 1
        self.lifted: dict[tuple[str, ...], str | None] = {}

    def follow(self) -> bool:
        """Rewrites the layer if all operators of its experts are recognised, and returns whether it did."""
        if self.k >= self.experts:
            return False
        uses = self.routing.uses()
        separate = {u.mark.expert: u for u in uses if u.mark.kind == "gate"}
        if len(separate) == self.experts == sum(u.mark.kind == "gate" for u in uses):
            return self._separate([separate[i] for i in range(self.experts)], uses)
        if len(separate) == self.experts and is_by_choice(self.routing, uses):
            self.runs = self.k
            return self._separate([separate[i] for i in range(self.experts)], uses)
        copied = {u.mark.expert: u for u in uses if u.mark.kind == "mask"}
        if len(copied) == self.experts == len(uses):
            return self._copied([copied[i] for i in range(self.experts)])
        whole = [u for u in uses if u.mark.kind == "table"]
        return len(whole) == 1 and (self._stacked(whole[0]) or self._weighted_first(whole[0]))

    # The experts

    def _copied(self, uses: Sequence[Use]) -> bool:
        """Rewrites experts that each compute some of `k` copies of every token, which are weighted and added at last.

        Args:
            uses: the multiplication by each expert's mask of the copies, in the order of experts.

        Returns:
            whether the layer was rewritten.
        """
        graph = self.graph
        terms = [self._term(u.index) for u in sorted(uses, key=lambda u: u.index)]
        found = self._sum(terms[-1], set(terms))
        ahead = None if found is None or found[1] else weighted_sum(graph, self.routing, found[0])
        slots = self._layer(uses[0], tuple(u.value for u in uses)) if ahead is not None else None
        if ahead is None or slots is None:
            return False
        at, weights = ahead
        result = graph.tensors[graph.operators[at].outputs[0]]
        return self._combine(at, slots, Mark("gate", weights=weights), result)

    def _separate(self, uses: Sequence[Use], terms_of: Sequence[Use]) -> bool:
        """Rewrites experts whose results are weighted one by one and then added.

        Args:
            uses: the multiplication by each expert's weight, in the order of experts.
            terms_of: all multiplications whose results are added: several for an expert that is run for each choice.

        Returns:
            whether the layer was rewritten.
        """
        graph = self.graph
        if len({(u.mark.weights, u.mark.table) for u in uses}) != 1:
            return False
        terms = [self._term(u.index) for u in sorted(terms_of, key=lambda u: u.index) if u.mark.kind == "gate"]
        found = self._sum(terms[-1], set(terms))
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

    def _term(self, index: int) -> str:
        """The result of a multiplication by a weight as it is summed, behind casts and views of its own."""
        graph = self.graph
        name = graph.operators[index].outputs[0]
        while len(readers := graph.consumers[name]) == 1 and graph.operators[readers[0]].kind in (*VIEWS, "Cast"):
            name = graph.operators[readers[0]].outputs[0]
        return name

    def _sum(self, name: str, products: set[str]) -> tuple[int, list[str]] | None:
        """Finds the sum of the weighted results.

        Args:
            name: the last weighted result.
            products: all of them.

        Returns:
            index of the Add that completes the sum, and the terms of the sum that are not weighted results and are not
            zero; None if there is no such Add.
        """
        graph = self.graph
        while True:
            readers = graph.consumers[name]
            if len(readers) != 1 or graph.operators[readers[0]].kind not in ("Add", "Sum"):
                return None
            leaves = self._leaves(readers[0], products)
            if products <= set(leaves):
                extra = [n for n in leaves if n not in products and self.routing.fill(n) != 0.0]
                return readers[0], extra
            name = graph.operators[readers[0]].outputs[0]

    def _leaves(self, root: int, products: set[str]) -> list[str]:
        """The terms of the nested sums that end at operator `root`, in order."""
        graph = self.graph
        leaves: list[str] = []
        stack = list(reversed(graph.operators[root].inputs))
        while stack:
            name = stack.pop()
            op = graph.maker(name)
            inner = op is not None and op.kind in ("Add", "Sum") and len(graph.consumers[name]) == 1
            if op is not None and inner and not op.is_constant and name not in products and self._holds(op, products):
                stack.extend(reversed(op.inputs))
            else:
                leaves.append(name)
        return leaves

    def _holds(self, op: Operator, products: set[str]) -> bool:
        """Whether an Add is part of the nested sums: one of its terms is a weighted result or another Add."""
        is_term = not products.isdisjoint(op.inputs)
        return is_term or any(m is not None and m.kind in ("Add", "Sum") for m in map(self.graph.maker, op.inputs))

    def _stacked(self, use: Use) -> bool:
        """Rewrites experts whose results are in one tensor, which is weighted and summed; returns whether it did."""
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

    def _weighted_first(self, use: Use) -> bool:
        """Rewrites a layer that weights the tokens before their experts and sums the results.

        With one expert per token, this is equivalent to dispatching the weighted tokens and combining results with
        weight 1.

        Returns:
            whether the layer was rewritten.
        """
        graph, layer = self.graph, self.layer
        op = graph.operators[use.index]
        at = next((i for i in range(use.index + 1, len(graph.operators)) if self._sums(graph.operators[i])), None)
        source: str | None = use.value
        while source is not None and self._shared((source,)) is None:
            maker = graph.maker(source)
            source = maker.inputs[0] if maker is not None and maker.kind in (*VIEWS, "Expand") else None
        weights = self._weights(op, use.mark)
        if self.k != 1 or at is None or source is None or not weights:
            return False
        tokens = layer.reshaped(op, source, (*self.chosen.shape[:-1], graph.tensors[source].shape[-1]), "tokens")
        (weighted,) = layer.make("Mul", op, [tokens, weights], [f"{op.outputs[0]}#weighted"], is_new=True)
        slots = layer.dispatch(op, weighted)
        self.lifted[op.outputs] = slots
        found = self._lift((graph.operators[at].inputs[0],))
        if slots is None or found is None:
            return False
        ones = self._ones(op)
        result = graph.operators[at]
        if not layer.combine(result, found, ones, graph.tensors[result.outputs[0]]):
            return False
        layer.put(at)
        return True

    def _sums(self, op: Operator) -> bool:
        """Whether an operator adds the results of all experts."""
        axes: tuple[int, ...] = dict(op.attributes).get("axes", ()) if op.kind == "ReduceSum" else ()
        return len(axes) == 1 and self.graph.tensors[op.inputs[0]].shape[axes[0]] == self.experts

    def _members(self, name: str) -> tuple[str, ...]:
        """The result of each expert, if tensor `name` concatenates one per expert; otherwise `name` alone."""
        op = self.graph.maker(name)
        while op is not None and op.kind in VIEWS:
            op = self.graph.maker(op.inputs[0])
        if op is None or op.kind != "Concat" or len(op.inputs) != self.experts:
            return (name,)
        joined = [self.graph.tensors[n].shape[dict(op.attributes)["axis"]] for n in op.inputs]
        return op.inputs if set(joined) == {1} else (name,)

    def _combine(self, at: int, slots: str, mark: Mark, result: Tensor, *, put: bool = True) -> bool:
        """Combines `slots` into `result` and, with `put`, replaces operator `at`; returns False if sizes differ."""
        op = self.graph.operators[at]
        weights = self._weights(op, mark)
        if not weights or not self.layer.combine(op, slots, weights, result):
            return False
        if put:
            self.layer.put(at)
        return True

    def _weights(self, op: Operator, mark: Mark) -> str:
        """Name of the routing weights of a mark, `[tokens ..., k]`, looked up in its table if no tensor has them.

        Returns:
            the name; empty if the table is not of shape `[tokens ..., experts]`.
        """
        if mark.is_bare:
            return self._ones(op)
        table = mark.table
        if mark.weights or self.graph.tensors[table].shape[:-1] != self.chosen.shape[:-1]:
            return mark.weights
        name = f"{table}#weights"
        self.layer.make("GatherElements", op, [table, self.layer.choices(op)], [name], {"axis": -1}, is_new=True)
        return name

    def _ones(self, op: Operator) -> str:
        """Name of routing weights `[tokens ..., k]` that are all one, of the type of the result of `op`."""
        chosen, dtype = self.layer.choices(op), {"to": self.graph.tensors[op.outputs[0]].dtype}
        (same,) = self.layer.make("Equal", op, [chosen, chosen], [f"{op.outputs[0]}#same"], is_new=True)
        return self.layer.make("Cast", op, [same], [f"{op.outputs[0]}#ones"], dtype, is_new=True)[0]

    def _layer(self, use: Use, results: tuple[str, ...]) -> str | None:
        """Name of the slots that replace `results`; None if an operator is not recognised.

        New operators without a counterpart in the file get the scope that the producers of `results` share.
        """
        makers = [m for m in map(self.graph.maker, results) if m is not None]
        parts = zip(*(m.scope.split(".") for m in makers), strict=False)
        shared = [p[0] for p in takewhile(lambda p: len(set(p)) == 1, parts)]
        self.home = replace(self.graph.operators[use.index], scope=".".join(shared)) if shared else None
        return self._lift(results)

    # From results back to tokens, for all experts at once (or for one tensor of all)

    def _lift(self, names: tuple[str, ...]) -> str | None:
        """Replaces tensors of the experts by one tensor of slots, together with the operators that compute them.

        Args:
            names: one tensor per expert, or a single tensor for all experts.

        Returns:
            name of the slots; None if an operator is not recognised.
        """
        if names not in self.lifted:
            self.lifted[names] = self._lifted(names)
        return self.lifted[names]

    def _lifted(self, names: tuple[str, ...]) -> str | None:
        """`_lift` without its cache."""
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
        """The producers of `names` if they differ in their operands only, otherwise None."""
        graph = self.graph
        ops = [op for op in map(graph.maker, names) if op is not None]
        if len(ops) < len(names):
            return None
        same = {(o.kind, o.attributes, len(o.inputs), o.outputs.index(n)) for o, n in zip(ops, names, strict=True)}
        plain = all(o.is_live for o in ops)
        return ops if len(same) == 1 and plain else None

    def _shared(self, names: tuple[str, ...]) -> str | None:
        """Name of the tensor of tokens, if `names` is one that all experts read; otherwise None."""
        name = names[0]
        tensor = self.graph.tensors[name]
        if len(set(names)) != 1 or tensor.role != "activation" or tensor.batch_dim is None:
            return None
        if len(names) == 1 and tensor.num_elements == self.experts * self.tokens * tensor.shape[-1]:
            return None  # results of all experts, or copies of tokens for them
        if prod(tensor.shape[:-1]) == self.tokens * self.k > self.tokens:
            name = copied_tokens(self.graph, name, self.tokens, self.k)
            tensor = self.graph.tensors[name]
        fits = prod(tensor.shape[:-1]) == self.tokens and tensor.batch_dim is not None
        return name if fits and tensor.batch_dim != len(tensor.shape) - 1 else None

    def _operand(self, op: Operator, names: tuple[str, ...], features: int) -> str | None:
        """Name of an operand of an elementwise operator on slots: a bias of each expert, a constant, or slots."""
        tensors = [self.graph.tensors[n] for n in names]
        if all(self.graph.is_weight(n) for n in names) and (len(names) == 1 or len(set(names)) > 1):
            stack = self._stack(names)
            return None if stack is None else self.layer.bias(op, stack, features)
        fills = {self.routing.fill(n) if t.num_elements == 1 else None for n, t in zip(names, tensors, strict=True)}
        if len(fills) == 1 and None not in fills:
            names = names[:1] * len(names)  # the same number, stored as a separate constant for each expert
        if len(set(names)) == 1 and tensors[0].batch_dim is None and tensors[0].num_elements in (1, features):
            return names[0] if tensors[0].shape[-1:] in ((), (1,), (features,)) else None
        return self._lift(names)

    def _cut(
        self, op: Operator, source: tuple[str, ...], ops: Sequence[Operator], names: tuple[str, ...]
    ) -> str | None:
        """Splits or slices the features of slots, as the experts' operators `ops` do with tensors `source`."""
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
        """Name of a weight with a leading dim of experts: `names` stacked, or the one name if it has that dim already.

        Returns:
            the name; None if the weights cannot be stacked.
        """
        graph = self.graph
        if not all(self.graph.is_weight(n) for n in names):
            return None
        if len(names) == 1:
            return self._whole(names[0])
        if len(set(names)) != len(names):
            return None
        if all(graph.tensors[n].role == "parameter" for n in names):
            shapes = {(graph.tensors[n].shape, graph.tensors[n].dtype) for n in names}
            alone = all(len(graph.consumers[n]) in (1, self.runs) and n not in graph.outputs for n in names)
            return self._stacked_parameter(names) if len(shapes) == 1 and alone else None
        views = [op for op in map(graph.maker, names) if op is not None]
        if len(views) != len(names) or {(v.kind, v.attributes) for v in views} != {("Transpose", views[0].attributes)}:
            return None
        inner = self._stack(tuple(v.inputs[0] for v in views))
        if inner is None:
            return None
        perm = (0, *(p + 1 for p in dict(views[0].attributes)["perm"]))
        outputs = [f"{names[0]}#experts"]
        return self.layer.make("Transpose", _merged(views), [inner], outputs, {"perm": perm}, is_view=True)[0]

    def _whole(self, name: str) -> str | None:
        """A weight `[experts, ...]`; for a bias `[experts, 1, n]`, the tensor `[experts, n]` of which it is a view."""
        tensor = self.graph.tensors[name]
        while tensor.shape[:1] == (self.experts,) and len(tensor.shape) == 3 and tensor.shape[1] == 1:
            op = self.graph.maker(name)
            if op is None or op.kind not in VIEWS:
                return None
            name = op.inputs[0]
            tensor = self.graph.tensors[name]
        return name if tensor.shape[:1] == (self.experts,) else None

    def _stacked_parameter(self, names: tuple[str, ...]) -> str:
        """Adds the parameter that stacks parameters `names`, and returns its name."""
        first = self.graph.tensors[names[0]]
        parts = [n.split(".") for n in names]
        columns = list(zip(*parts, strict=False)) if len({len(p) for p in parts}) == 1 else []
        shared = [c[0] if len(set(c)) == 1 else "*" for c in columns]
        # Names without a common part, such as those that an exporter generates, do not identify the layer.
        fresh = ".".join(shared) if set(shared) - {"*"} else f"{names[0]}#stack"
        shape = (self.experts, *first.shape)
        self.layer.tensors[fresh] = Tensor(name=fresh, shape=shape, dtype=first.dtype, role="parameter")
        for number, name in enumerate(names):
            self.layer.pieces[name] = (fresh, 0, number, number + 1)
        return fresh


def _merged(ops: Sequence[Operator]) -> Operator:
    """The first of the experts' equal operators, with the common parts of their scopes (without the expert's index)."""
    scopes = [op.scope.split(".") for op in ops]
    if len({len(s) for s in scopes}) != 1:
        return ops[0]
    scope = ".".join(parts[0] for parts in zip(*scopes, strict=True) if len(set(parts)) == 1)
    return replace(ops[0], scope=scope, name=scope + ops[0].name.removeprefix(ops[0].scope))
