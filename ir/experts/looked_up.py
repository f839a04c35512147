"""Recognises experts whose weights are looked up for each routed token.

The search goes forward from the TopK of the router. Every operator on the way is replaced by a counterpart on the slots
of the experts; the layer ends with the sum over the `k` chosen experts of each token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ir.experts.emit import BINARY, UNARY, VIEWS, Layer
from ir.graph import Operator, Tensor


@dataclass(frozen=True)
class _Stack:
    """Weights or biases looked up for each routed token."""

    name: str
    """Name of the stacked parameter, or of a view of it: `[e, ...]`."""
    transposed: bool = False
    """Whether the last two dims were transposed after the look-up."""


@dataclass(frozen=True)
class _Slots:
    """The slots of experts that replace a tensor of routed tokens."""

    name: str
    """Name of the new tensor, `[e, (b c), features]`."""
    features: int
    """Size of the last dim."""
    weights: str = ""
    """Name of the routing weights by which it was multiplied; empty if it was not."""
    by_feature: bool = False
    """Whether the features precede the k choices in the dims of the file's tensor."""


class LookedUp:
    """The rewrite of one layer: a router and the look-ups of the weights of its experts."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.graph = layer.graph
        self.chosen, self.k, self.tokens, self.routed = layer.chosen, layer.k, layer.tokens, layer.routed
        self.indices = {self.chosen.name}
        self.values: dict[str, _Stack | _Slots] = {}

    def follow(self) -> bool:
        """Rewrites the layer if all operators from the chosen experts to the sum over them are recognised.

        Returns:
            whether the layer was rewritten.
        """
        graph = self.graph
        queue = list(graph.consumers[self.chosen.name])
        seen = set(queue)
        heapq.heapify(queue)
        while queue:
            index = heapq.heappop(queue)
            op = graph.operators[index]
            if self._sums(op):
                self.layer.put(index)
                return True
            if not self._step(op):
                continue
            for name in op.outputs:
                for reader in graph.consumers[name]:
                    if reader not in seen:
                        seen.add(reader)
                        heapq.heappush(queue, reader)
        return False

    # One operator

    def _step(self, op: Operator) -> bool:
        """Adds the counterpart of `op`, and returns whether it has one."""
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
        """Registers a view of the indices of experts, or a look-up of weights by them; returns whether `op` is one."""
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
        if (
            not self.graph.is_weight(stack.name)
            or len(stack.shape) not in (2, 3)
            or self.layer.experts not in (0, stack.shape[0])
        ):
            return False
        self.layer.experts = stack.shape[0]
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
        """Whether a transpose only exchanges choices and features, the last two dims of size greater than 1."""
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
        # Each routed token must be a matrix of one column or one row.
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
        given = self.values.get(operand)
        if given is None:
            source = self._tokens(operand)
            tokens = None if source is None else self.layer.dispatch(op, source)
        else:
            tokens = given.name if isinstance(given, _Slots) and not given.weights and not given.by_feature else None
        if tokens is None:
            return False
        # In the file the weight is the left operand, [f, h] @ [h, 1], or the right one, [1, h] @ [h, f].
        result = self.layer.product(op, tokens, stack.name, transposed=contracts_last != stack.transposed)
        if result is not None:
            self.values[op.outputs[0]] = _Slots(result, self.layer.tensor(result).shape[2])
        return result is not None

    def _tokens(self, name: str) -> str | None:
        """Name of the tensor of tokens, `[..., h]`, that `name` repeats `k` times per token; None if there is none."""
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
        for old, new in zip(op.outputs, self.layer.make(op.kind, op, [slots.name], names, attributes), strict=True):
            self.values[old] = _Slots(new, self.layer.tensor(new).shape[2])
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
            bias = self.layer.bias(op, value.name, slots[0].features)
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

    def _elementwise(self, op: Operator, operands: Sequence[str], slots: _Slots) -> bool:
        if slots.weights or slots.by_feature:
            # After the multiplication by the routing weights, only casts are allowed.
            if op.kind == "Cast":
                self.values[op.outputs[0]] = slots
            return op.kind == "Cast"
        attributes = dict(op.attributes)
        (result,) = self.layer.make(op.kind, op, operands, [self._name(op.outputs[0])], attributes)
        self.values[op.outputs[0]] = _Slots(result, slots.features)
        return True

    # The sum over choices

    def _sums(self, op: Operator) -> bool:
        """Adds the combining operator if `op` sums the weighted results of each token; returns whether it does."""
        slots = next((s for n in op.inputs if isinstance(s := self.values.get(n), _Slots)), None)
        if slots is None:
            return False
        weights = self._reduced(op, slots) or self._contracted(op, slots)
        return bool(weights) and self.layer.combine(op, slots.name, weights, self.graph.tensors[op.outputs[0]])

    def _reduced(self, op: Operator, slots: _Slots) -> str:
        """Name of the routing weights if `op` is a ReduceSum over the choices, otherwise empty."""
        if op.kind != "ReduceSum" or not slots.weights:
            return ""
        source = self.graph.tensors[op.inputs[0]]
        axes = dict(op.attributes)["axes"]
        over_k = len(axes) == 1 and source.shape[axes[0]] == self.k and prod(source.shape[: axes[0]]) == self.tokens
        return slots.weights if over_k else ""

    def _contracted(self, op: Operator, slots: _Slots) -> str:
        """Name of the routing weights if `op` is a product that sums over the choices, otherwise empty."""
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

    def _trailing(self, tensor: Tensor) -> tuple[int, ...] | None:
        """Sizes greater than 1 of the dims after those of routed tokens; None if no leading dims are routed tokens."""
        for stop in range(len(tensor.shape) + 1):
            if prod(tensor.shape[:stop]) == self.routed:
                return tuple(s for s in tensor.shape[stop:] if s != 1)
        return None

    def _is_routed(self, tensor: Tensor, features: tuple[int, ...]) -> bool:
        """Whether the dims of a tensor are routed tokens followed by `features`."""
        return self._trailing(tensor) == tuple(f for f in features if f != 1)

    def _name(self, name: str) -> str:
        return f"{name}#experts"
