"""Mixtures of experts as exporters write them become dispatch, grouped products and combine.

Two forms are known (the operators they become are in `ir.operators.experts`):

1. *Gathered weights* (transformers' `batched_mm`): for each routed token the weights of its expert are looked up
   (`[tokens * k, f, h]`, 30 GB for 1,024 tokens of Mixtral) and multiplied in a batched product.
2. *Dense loop*: every expert runs on every token and the router's weights, zero for most, pick what counts. Trainers
   run the routed tokens only, and so they are priced: FLOPs are those of `k` experts a token, not of all.
   Parameters of the experts, alike one by one, become one stacked parameter; `Graph.pieces` says which slice of it
   each parameter of the file is.

Both are followed forward from the router's TopK: every operator on the way must have a meaning on the slots of
experts, else the layer is left as it is. The new operators keep names and scopes of those they stand for.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ir.build import arrange, make_graph
from ir.graph import Graph, Operator, Tensor
from ir.operators import make_operator
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT

VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity")
UNARY = (
    "Relu", "Sigmoid", "Tanh", "Exp", "Gelu", "Erf", "Softplus", "LeakyRelu", "Elu", "Celu", "Selu", "HardSwish",
    "HardSigmoid", "Swish", "Mish", "Softsign", "Neg", "Abs", "Sqrt", "Reciprocal", "Clip", "Cast", "ThresholdedRelu",
)  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum")


def recognise_experts(graph: Graph) -> Graph:
    """The graph with its mixtures of experts rewritten; unchanged where there are none. See the module."""
    rewrite = _Rewrite(graph)
    for index, op in enumerate(graph.operators):
        if op.kind == "TopK" and len(op.outputs) == 2 and not op.is_constant:
            _Gathered(rewrite, index).follow()
    return rewrite.finish()


@dataclass
class _Rewrite:
    """New operators at the places of old ones."""

    graph: Graph
    tensors: dict[str, Tensor] = field(default_factory=dict)
    made: dict[int, list[Operator]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tensors = dict(self.graph.tensors)

    def finish(self) -> Graph:
        graph = self.graph
        if not self.made:
            return graph
        operators: list[Operator] = []
        for i, op in enumerate(graph.operators):
            operators.extend(self.made.get(i, [op]))
        kept = arrange(operators, graph.outputs)
        return make_graph(
            _distinct(kept),
            self.tensors,
            graph.outputs,
            name=graph.name,
            warnings=(*graph.warnings, BALANCED_LOAD),
            pieces=graph.pieces,
            sha256=graph.sha256,
        )


def _distinct(operators: Sequence[Operator]) -> list[Operator]:
    """Operators whose names repeat are numbered."""
    seen: dict[str, int] = {}
    found = []
    for op in operators:
        number = seen.get(op.name, 0)
        seen[op.name] = number + 1
        found.append(replace(op, name=f"{op.name}_{number}") if number else op)
    return found


@dataclass
class _Emitter:
    """Operators of one layer, put at the place of its last one once all of it was understood."""

    rewrite: _Rewrite
    operators: list[Operator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def tensor(self, name: str) -> Tensor:
        return self.tensors.get(name) or self.rewrite.tensors[name]

    def make(
        self,
        kind: str,
        like: Operator,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Any] | None = None,
        *,
        is_view: bool = False,
        is_new: bool = False,
    ) -> tuple[str, ...]:
        """One operator in the scope of `like`, with its name unless it stands for more than that one."""
        base = f"{like.scope}/{kind}" if like.scope else f"{outputs[0]}"
        built = make_operator(
            kind,
            name=base if is_new else like.name,
            inputs=[self.tensor(n) for n in inputs],
            outputs=outputs,
            attributes=attributes,
            opset=like.opset,
            scope=like.scope,
            is_view=is_view,
        )
        self.operators.append(built.operator)
        for tensor in built.outputs:
            self.tensors[tensor.name] = tensor
        return built.operator.outputs

    def put(self, at: int) -> None:
        self.rewrite.made[at] = self.operators
        self.rewrite.tensors.update(self.tensors)


@dataclass(frozen=True)
class _Stack:
    """Weights or biases looked up for each routed token."""

    name: str
    """The stacked parameter, or a view of it: `[e, ...]`."""
    transposed: bool = False


@dataclass(frozen=True)
class _Slots:
    """What a tensor of routed tokens is on the slots of experts."""

    name: str
    """New tensor, `[e, (b c), features]`."""
    features: int
    weights: str = ""
    """Routing weights that it was multiplied by."""
    by_feature: bool = False
    """In the file features stand before the k choices."""


class _Gathered:
    """One router followed through looked-up weights."""

    def __init__(self, rewrite: _Rewrite, index: int) -> None:
        self.rewrite = rewrite
        self.graph = rewrite.graph
        self.emit = _Emitter(rewrite)
        self.start = index
        self.chosen = self.graph.tensors[self.graph.operators[index].outputs[1]]
        self.k = self.chosen.shape[-1]
        self.tokens = prod(self.chosen.shape[:-1])
        self.indices = {self.chosen.name}
        self.values: dict[str, _Stack | _Slots] = {}
        self.experts = 0
        self.dispatched: dict[str, str] = {}

    @property
    def routed(self) -> int:
        """Routed tokens of one sample."""
        return self.tokens * self.k

    def follow(self) -> None:
        """Rewrites the layer if everything behind the chosen experts is understood up to the sum over them."""
        graph = self.graph
        queue = list(graph.consumers[self.chosen.name])
        seen = set(queue)
        heapq.heapify(queue)
        while queue:
            index = heapq.heappop(queue)
            op = graph.operators[index]
            if self._sums(op):
                self.emit.put(index)
                return
            if not self._step(op):
                continue
            for name in op.outputs:
                for reader in graph.consumers[name]:
                    if reader not in seen:
                        seen.add(reader)
                        heapq.heappush(queue, reader)

    # One operator

    def _step(self, op: Operator) -> bool:
        """Whether the results of `op` have a meaning."""
        if any(n in self.indices for n in op.inputs):
            return self._indices(op)
        if op.kind in VIEWS or op.kind == "Transpose":
            return self._view(op)
        if op.kind == "MatMul":
            return self._product(op)
        if op.kind == "Einsum" and len(op.inputs) == 2:
            return self._einsum(op)
        if op.kind in ("Split", "Slice"):
            return self._cut(op)
        if op.kind in UNARY and len(op.inputs) == 1:
            slots = self.values[op.inputs[0]]
            if not isinstance(slots, _Slots):
                return False
            return self._elementwise(op, [slots.name], slots)
        if op.kind in BINARY and len(op.inputs) == 2:
            return self._binary(op)
        return False

    def _indices(self, op: Operator) -> bool:
        """Views of the chosen experts, and look-ups by them."""
        graph = self.graph
        if op.inputs[0] in self.indices and len(op.inputs) == 1:
            result = graph.tensors[op.outputs[0]]
            if op.kind not in (*VIEWS, "Cast", "Clip") or result.num_elements != self.routed:
                return False
            self.indices.add(result.name)
            return True
        attributes = dict(op.attributes)
        if op.kind not in ("Gather", "GatherND") or attributes.get("axis", 0) or attributes.get("batch_dims", 0):
            return False
        stack, indices = graph.tensors[op.inputs[0]], graph.tensors[op.inputs[1]]
        if op.kind == "GatherND" and indices.shape[-1] != 1:
            return False
        is_weight = stack.role == "parameter" or self._is_view(stack.name)
        if not is_weight or len(stack.shape) not in (2, 3) or self.experts not in (0, stack.shape[0]):
            return False
        self.experts = stack.shape[0]
        self.values[op.outputs[0]] = _Stack(stack.name)
        return True

    def _view(self, op: Operator) -> bool:
        value = self.values[op.inputs[0]]
        source, result = self.graph.tensors[op.inputs[0]], self.graph.tensors[op.outputs[0]]
        if op.kind == "Transpose":
            return self._transpose(op, value, source)
        if isinstance(value, _Slots):
            kept = not value.by_feature and self._is_routed(result, (value.features,))
        else:
            features = self._trailing(source)
            kept = features is not None and self._is_routed(result, features)
        if kept:
            self.values[result.name] = value
        return kept

    def _transpose(self, op: Operator, value: _Stack | _Slots, source: Tensor) -> bool:
        perm = dict(op.attributes)["perm"]
        moved = [p for p in perm if source.shape[p] > 1 or source.batch_dim == p]
        rank = len(source.shape)
        if moved == sorted(moved):
            self.values[op.outputs[0]] = value
        elif isinstance(value, _Stack) and perm == (*range(rank - 2), rank - 1, rank - 2):
            self.values[op.outputs[0]] = replace(value, transposed=not value.transposed)
        elif isinstance(value, _Slots) and not value.by_feature and self._choices_last(moved, source):
            self.values[op.outputs[0]] = replace(value, by_feature=True)
        else:
            return False
        return True

    def _choices_last(self, moved: Sequence[int], source: Tensor) -> bool:
        """Whether only features and choices, the last two dims of more than one, change places."""
        order = sorted(moved)
        if len(order) < 2 or self.k == 1:
            return False
        return source.shape[order[-2]] == self.k and list(moved) == [*order[:-2], order[-1], order[-2]]

    def _product(self, op: Operator) -> bool:
        left, right = (self.values.get(n) for n in op.inputs)
        side = 0 if isinstance(left, _Stack) else 1
        stack = right if side else left
        if not isinstance(stack, _Stack) or isinstance(left, _Stack) == isinstance(right, _Stack):
            return False
        vector = self.graph.tensors[op.inputs[1 - side]]
        # One column or one row for each routed token.
        if len(vector.shape) < 2 or vector.shape[-2 if side else -1] != 1:
            return False
        return self._multiply(op, stack, op.inputs[1 - side], contracts_last=side == 0)

    def _einsum(self, op: Operator) -> bool:
        terms, _, out = str(dict(op.attributes)["equation"]).replace(" ", "").partition("->")
        sides = terms.split(",")
        place = next((i for i in (0, 1) if isinstance(self.values.get(op.inputs[i]), _Stack)), None)
        if place is None or isinstance(self.values.get(op.inputs[1 - place]), _Stack):
            return False
        stack = self.values[op.inputs[place]]
        own, other = sides[place], sides[1 - place]
        summed = [c for c in own if c not in out]
        if (
            len(summed) != 1
            or summed[0] not in other[-1:]
            or summed[0] not in own[-2:]
            or not isinstance(stack, _Stack)
        ):
            return False
        kept = next(c for c in own[-2:] if c != summed[0])
        if out[-1:] != kept or out[:-1] != own[:-2]:
            return False
        return self._multiply(op, stack, op.inputs[1 - place], contracts_last=own[-1] == summed[0])

    def _multiply(self, op: Operator, stack: _Stack, operand: str, *, contracts_last: bool) -> bool:
        shape = self.emit.tensor(stack.name).shape
        if len(shape) != 3:
            return False
        given = self.values.get(operand)
        if given is None:
            tokens = self._dispatch(op, operand)
        else:
            tokens = given.name if isinstance(given, _Slots) and not given.weights and not given.by_feature else None
        if tokens is None:
            return False
        # As in the file a weight stands left, [f, h] @ [h, 1], or right, [1, h] @ [h, f], of its token.
        flipped = contracts_last != stack.transposed
        width, out = (shape[2], shape[1]) if flipped else (shape[1], shape[2])
        if self.emit.tensor(tokens).shape[2] != width:
            return False
        weight = stack.name
        if flipped:
            weight = f"{op.outputs[0]}#weight"
            self.emit.make("Transpose", op, [stack.name], [weight], {"perm": (0, 2, 1)}, is_view=True, is_new=True)
        (result,) = self.emit.make(
            PRODUCT, op, [tokens, weight], [self._name(op.outputs[0])], {"num_tokens": self.routed}, is_new=True
        )
        self.values[op.outputs[0]] = _Slots(result, out)
        return True

    def _dispatch(self, op: Operator, operand: str) -> str | None:
        """The slots of the tokens behind `operand`, in which each stands once for each of its experts."""
        source = self._tokens(operand)
        if source is None:
            return None
        if source not in self.dispatched:
            wanted = (*self.chosen.shape[:-1], self.graph.tensors[source].shape[-1])
            x = source
            if self.graph.tensors[source].shape != wanted:
                x = f"{source}#tokens"
                self.emit.make("Reshape", op, [source], [x], {"shape": wanted}, is_new=True)
            if self.emit.tensor(x).batch_dim != self.chosen.batch_dim:
                return None
            capacity = -(-self.routed // self.experts)
            (self.dispatched[source],) = self.emit.make(
                DISPATCH,
                op,
                [x, self.chosen.name],
                [f"{source}#slots"],
                {"num_experts": self.experts, "capacity": capacity},
                is_new=True,
            )
        return self.dispatched[source]

    def _tokens(self, name: str) -> str | None:
        """The tensor of tokens, `[..., h]`, that `name` repeats for the choices of each."""
        graph = self.graph
        width = graph.tensors[name].num_elements
        repeats = width != 0 and width % self.routed == 0
        best: str | None = None
        while True:
            tensor = graph.tensors[name]
            if tensor.role != "activation" or tensor.batch_dim is None:
                break
            lead = prod(tensor.shape[:-1])
            if lead == self.tokens and tensor.batch_dim < len(tensor.shape) - 1:
                best = name
            op = graph.operators[graph.producer[name]]
            if op.kind == "Expand" and repeats and best is None:
                before = graph.tensors[op.inputs[0]]
                if not self._repeats_choices(before, tensor):
                    return None
            elif op.kind not in VIEWS or (
                best is not None and tensor.shape == (*self.chosen.shape[:-1], tensor.shape[-1])
            ):
                break
            name = op.inputs[0]
        return best

    def _repeats_choices(self, before: Tensor, after: Tensor) -> bool:
        """Whether an Expand turns `[tokens, 1, h]` into `[tokens, k, h]`."""
        if len(before.shape) != len(after.shape):
            return False
        grown = [d for d, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b]
        return len(grown) == 1 and after.shape[grown[0]] == self.k and prod(before.shape[: grown[0]]) == self.tokens

    def _cut(self, op: Operator) -> bool:
        slots = self.values[op.inputs[0]]
        source = self.graph.tensors[op.inputs[0]]
        attributes = dict(op.attributes)
        if not isinstance(slots, _Slots) or slots.by_feature or slots.weights:
            return False
        axes = (attributes["axis"] % len(source.shape),) if op.kind == "Split" else attributes["axes"]
        if len(axes) != 1 or source.shape[axes[0]] != slots.features or prod(source.shape[: axes[0]]) != self.routed:
            return False
        attributes |= {"axis": 2} if op.kind == "Split" else {"axes": (2,)}
        names = [self._name(n) for n in op.outputs]
        for old, new in zip(op.outputs, self.emit.make(op.kind, op, [slots.name], names, attributes), strict=True):
            self.values[old] = _Slots(new, self.emit.tensor(new).shape[2])
        return True

    def _binary(self, op: Operator) -> bool:
        sides = [self.values.get(n) for n in op.inputs]
        slots = [s for s in sides if isinstance(s, _Slots)]
        if not slots or any(s.by_feature for s in slots):
            return False
        if len(slots) == 2:
            fits = slots[0].features == slots[1].features and not any(s.weights for s in slots)
            return fits and self._elementwise(op, [s.name for s in slots], slots[0])
        side = 0 if isinstance(sides[0], _Slots) else 1
        other, value = op.inputs[1 - side], sides[1 - side]
        tensor = self.graph.tensors[other]
        if isinstance(value, _Stack):
            bias = self._bias(op, value, slots[0])
        elif op.kind == "Mul" and not slots[0].weights and self._is_routed(tensor, ()) and tensor.batch_dim is not None:
            self.values[op.outputs[0]] = replace(slots[0], weights=other)
            return True
        else:
            row = self.graph.tensors[op.inputs[side]].shape[-1:] == (slots[0].features,)
            is_row = row and tensor.shape[-1:] == (slots[0].features,) and tensor.num_elements == slots[0].features
            fits = tensor.batch_dim is None and len(tensor.shape) <= 3 and (tensor.num_elements == 1 or is_row)
            bias = other if fits else None
        if bias is None or slots[0].weights:
            return False
        operands = [slots[0].name, bias]
        return self._elementwise(op, operands[::-1] if side else operands, slots[0])

    def _bias(self, op: Operator, stack: _Stack, slots: _Slots) -> str | None:
        shape = self.emit.tensor(stack.name).shape
        if len(shape) != 2 or shape[1] != slots.features:
            return None
        name = f"{op.outputs[0]}#bias"
        self.emit.make("Unsqueeze", op, [stack.name], [name], {"axes": (1,)}, is_view=True, is_new=True)
        return name

    def _elementwise(self, op: Operator, operands: Sequence[str], slots: _Slots) -> bool:
        if slots.weights or slots.by_feature:
            # Behind the weights only types may change.
            if op.kind == "Cast":
                self.values[op.outputs[0]] = slots
            return op.kind == "Cast"
        attributes = dict(op.attributes)
        (result,) = self.emit.make(op.kind, op, operands, [self._name(op.outputs[0])], attributes)
        self.values[op.outputs[0]] = _Slots(result, slots.features)
        return True

    # The sum over choices

    def _sums(self, op: Operator) -> bool:
        """Whether `op` adds up the weighted results of each token; the combining operator is made then."""
        slots = next((s for n in op.inputs if isinstance(s := self.values.get(n), _Slots)), None)
        if slots is None:
            return False
        result = self.graph.tensors[op.outputs[0]]
        weights = self._reduced(op, slots) or self._contracted(op, slots)
        if not weights or result.num_elements != self.tokens * slots.features:
            return False
        weights = self._weights(op, weights)
        if self.emit.tensor(weights).batch_dim != self.chosen.batch_dim:
            return False
        shape = (*self.chosen.shape[:-1], slots.features)
        is_whole = result.shape == shape and result.batch_dim == self.chosen.batch_dim
        name = result.name if is_whole else f"{result.name}#tokens"
        self.emit.make(COMBINE, op, [slots.name, self.chosen.name, weights], [name], is_new=True)
        if not is_whole:
            self.emit.make("Reshape", op, [name], [result.name], {"shape": result.shape}, is_new=True)
        made = self.emit.tensor(result.name)
        return made.shape == result.shape and made.batch_dim == result.batch_dim

    def _reduced(self, op: Operator, slots: _Slots) -> str:
        """Weights of a ReduceSum over the choices."""
        if op.kind != "ReduceSum" or not slots.weights:
            return ""
        source = self.graph.tensors[op.inputs[0]]
        axes = dict(op.attributes)["axes"]
        over_k = len(axes) == 1 and source.shape[axes[0]] == self.k and prod(source.shape[: axes[0]]) == self.tokens
        return slots.weights if over_k else ""

    def _contracted(self, op: Operator, slots: _Slots) -> str:
        """Weights of a product that sums over the choices."""
        if op.kind not in ("MatMul", "Einsum") or len(op.inputs) != 2 or slots.weights:
            return ""
        side = 0 if isinstance(self.values.get(op.inputs[0]), _Slots) else 1
        source, other = self.graph.tensors[op.inputs[side]], self.graph.tensors[op.inputs[1 - side]]
        if other.name in self.values or other.num_elements != self.routed or other.batch_dim is None:
            return ""
        if op.kind == "MatMul":
            dim = len(source.shape) - 2 if side else len(source.shape) - 1
            fits = source.shape[dim] == self.k and bool(side) != slots.by_feature
        else:
            terms, _, out = str(dict(op.attributes)["equation"]).replace(" ", "").partition("->")
            own, weighing = terms.split(",")[side], terms.split(",")[1 - side]
            dim = next((i for i, c in enumerate(own) if c not in out), 0)
            fits = weighing == own[:-1] and out == own[:-2] + own[-1] and dim == len(own) - 2 and not slots.by_feature
        return other.name if fits else ""

    # Helpers

    def _weights(self, op: Operator, name: str) -> str:
        """Routing weights in the shape of the chosen experts."""
        graph = self.graph
        root = name
        while graph.tensors[root].shape != self.chosen.shape:
            index = graph.producer.get(root)
            if index is None or graph.operators[index].kind not in VIEWS:
                break
            root = graph.operators[index].inputs[0]
        if graph.tensors[root].shape == self.chosen.shape:
            return root
        made = f"{name}#weights"
        self.emit.make("Reshape", op, [name], [made], {"shape": self.chosen.shape}, is_new=True)
        return made

    def _trailing(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Dims of more than one behind those of routed tokens."""
        for stop in range(len(tensor.shape) + 1):
            if prod(tensor.shape[:stop]) == self.routed:
                return tuple(s for s in tensor.shape[stop:] if s != 1)
        return None

    def _is_routed(self, tensor: Tensor, features: tuple[int, ...]) -> bool:
        """Whether dims are those of routed tokens, then `features`."""
        return self._trailing(tensor) == tuple(f for f in features if f != 1)

    def _is_view(self, name: str) -> bool:
        index = self.graph.producer.get(name)
        return index is not None and self.graph.operators[index].is_view

    def _name(self, name: str) -> str:
        return f"{name}#experts"
