"""Defers reshapes that merge the batch with another dim, and avoids them if possible.

Models with the sequence as first dim reshape `[s, b, h]` to `[(s b), h]` for a product and `[s, b, h d]` to
`[s, (b h), d]` for attention, and reshape the results back. In `(s b)` the batch is the minor part and could not be
split; if the file was exported at a batch of 1, the batch cannot even be identified in such a view. A `Reshape` that
merges a batch that is not the leading dim is therefore deferred: following operators that treat the merged dims
alike are added on the separate dims, until a `Reshape` separates them again. The view is emitted only before another
operator.

Products of attention are often written with operands `[(b h), s, d]`. There the batch is the major part and can be
identified, but the heads, as the minor part, could not be split. Such a view is deferred if it is an operand of a
product with another such view.

A `Tile` that repeats all samples one after the other, as for experts that each read all tokens (`[(e b s), h]`), is
also a view, of `[e, (b s), h]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import numpy as np

from ir.batch import resolve
from ir.build import GraphBuilder
from ir.errors import refuse
from ir.graph import Tensor
from ir.onnx.readers.nodes import Node
from ir.onnx.rewrites.joined_samples import JoinedSamples
from ir.onnx.rewrites.merging_shapes import Side, merges, merges_heads, of_copies

# Kinds through which a merged view can be put off further.
UNARY = frozenset(
    {
        "Relu", "Sigmoid", "Tanh", "Exp", "Sqrt", "Reciprocal", "Elu", "Selu", "HardSigmoid", "Softplus", "LeakyRelu",
        "Gelu", "Erf", "Erfc", "Cos", "Sin", "Log", "Abs", "HardSwish", "Swish", "Mish", "Celu", "Neg", "Cast", "Clip",
        "Not", "IsNaN", "IsInf", "Floor", "Round", "Sign", "Softsign", "ThresholdedRelu", "Dropout",
    }
)  # fmt: skip
BINARY = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Equal", "Less", "Greater", "And", "Or", "PRelu"}
)
SCALES = frozenset({"Mul", "Div"})
# Kinds that read samples in their first dim and channels in the second.
OF_IMAGES = frozenset(
    {
        "Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "MaxPool",
        "AveragePool", "LpPool", "GlobalMaxPool", "GlobalAveragePool",
    }
)  # fmt: skip
ROWS = frozenset({"Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization"})


@dataclass(frozen=True)
class Merged:
    """A deferred view."""

    whole: str
    """Name of the tensor in which the batch is a separate dim."""
    place: int
    """Index of the batch dim in that tensor; in the view it is merged with its left or right neighbour."""
    side: Side
    """The neighbour with which it is merged; `any` if the exported sizes do not determine it."""
    shape: tuple[int, ...]
    """Shape of the view, at the exported batch."""
    repeats: bool = False
    """Whether the view repeats samples: it cannot be emitted."""
    heads: Literal["", "operand", "product"] = ""
    """Whether a leading batch is merged with heads, in an operand or in the result of a product of attention."""
    made_by: tuple[Node, Sequence[str]] | None = None
    """The node that is emitted in place of the view, with the names of its operands; None: a Reshape of `whole`."""


@dataclass
class MergedViews:
    """The deferred views of one import."""

    builder: GraphBuilder
    joined: JoinedSamples
    views: dict[str, Merged] = field(default_factory=dict)
    """Name -> view that is not emitted yet."""

    def __contains__(self, name: str) -> bool:
        return name in self.views

    def make(self, name: str, reader: str = "") -> str:
        """Emits view `name` if it is deferred, for an operator of kind `reader`, and returns the name."""
        view = self.views.pop(name, None)
        if view is not None and self._is_stacked(view, reader) and self.joined.stack(view.whole, name, view.shape):
            return name
        if view is not None and view.repeats:
            repair = (
                "View what is repeated as [copies, samples, ...] before other operators read it. "
                f"{self.builder.batch_question}"
            )
            raise refuse(f"operator {name} cannot be read: samples are repeated", view.shape, repair)
        if view is not None and view.made_by is not None:
            node, inputs = view.made_by
            self._add(node, node.kind, inputs, [name], node.attributes)
        elif view is not None:
            self.builder.add("Reshape", [view.whole], [name], name=name, attributes={"shape": view.shape})
        return name

    def _is_stacked(self, view: Merged, reader: str) -> bool:
        """Whether the samples of a view come after another dim, for instance of several stacked inputs.

        If the sizes do not determine it, the kind of operator that reads the view does.
        """
        is_left = view.side == "left" or (view.side == "any" and reader in OF_IMAGES)
        return view.place == 1 and is_left and not view.heads and view.made_by is None

    def put_off(self, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any]) -> bool:
        """Handles a node that creates or reads a deferred view.

        Args:
            node: the node.
            inputs: names of its operands in the builder.
            attributes: its attributes in the form of the table of kinds.

        Returns:
            whether the node was handled; if not, it must be imported as it is.
        """
        if node.kind == "Reshape":
            return self._reshape(node, inputs)
        if node.kind == "Tile":
            return self._tile(node, inputs)
        given = [n for n in inputs if n in self.views]
        if not given:
            return False
        view = self.views[given[0]]
        if view.heads == "operand" and not self._is_of_attention(node, inputs):
            return False
        if node.kind == "Transpose":
            return self._transpose(node, view, attributes)
        if node.kind in ("MatMul", "Gemm"):
            return self._product(node, inputs, attributes)
        if node.kind in UNARY or node.kind in BINARY:
            return self._elementwise(node, inputs, attributes, view)
        axis = int(attributes.get("axis", -1))
        last = len(view.shape) - 1
        if node.kind in ROWS and axis in (-1, last) and self._leaves_last(view) and inputs[0] in self.views:
            attributes = {**attributes, "axis": -1}
            return self._emit(node, [view.whole, *inputs[1:]], attributes, view, view.shape)
        if node.kind == "Split" and axis in (-1, last) and self._leaves_last(view):
            return self._split(node, inputs, attributes, view)
        return False

    def _is_of_attention(self, node: Node, inputs: Sequence[str]) -> bool:
        """Whether a node that reads a view of samples and heads is part of attention, before a product."""
        if node.kind in SCALES and len(inputs) == 2:
            values = [self.builder.values.get(n) for n in inputs if n not in self.views]
            return len(values) == 1 and values[0] is not None and values[0].size == 1
        if node.kind == "MatMul":
            return all(n in self.views and self.views[n].heads for n in inputs) or self._is_by_position(inputs)
        return node.kind in ("Transpose", "Cast", "Softmax", "Dropout")

    def _leaves_last(self, view: Merged) -> bool:
        """Whether the last dim of the view is also a dim of the tensor with a separate batch."""
        rank = len(view.shape)
        return view.place < rank - 1 or (view.place == rank - 1 and view.side != "right")

    def _emit(
        self, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any], view: Merged, shape: tuple[int, ...]
    ) -> bool:
        name = node.outputs[0]
        whole = f"{name}#apart"
        self._add(node, node.kind, inputs, [whole], attributes)
        self.views[name] = replace(view, whole=whole, shape=shape, made_by=None)
        return True

    def _add(
        self,
        node: Node,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Any],
        suffix: str = "",
    ) -> None:
        label = f"{node.name}{suffix}" if node.name else ""
        self.builder.add(kind, inputs, outputs, name=label, scope=node.scope, attributes=attributes, opset=node.opset)

    def _reshape(self, node: Node, inputs: Sequence[str]) -> bool:
        builder = self.builder
        view = self.views.get(inputs[0])
        name = view.whole if view else inputs[0]
        tensor, value = builder.tensors.get(name), builder.values.get(inputs[1]) if len(inputs) > 1 else None
        if tensor is None or value is None or tensor.batch_dim is None:
            return False
        exported = view.shape if view else tensor.shape_at(builder.export_batch)
        target = resolve(
            exported, [int(v) for v in value.reshape(-1)], allow_zero=bool(node.attributes.get("allowzero", 0))
        )
        if target is None:
            return False
        if view is not None and view.heads and target == view.shape:
            self.views[node.outputs[0]] = view
            return True
        found = merges(tensor.shape, tensor.batch_dim, target, builder.export_batch)
        found = found or of_copies(tensor.shape, tensor.batch_dim, target, builder.export_batch)
        if found is None:
            if view is None:
                if not merges_heads(tensor.shape, tensor.batch_dim, target, builder.export_batch):
                    return False
                given = (node, list(inputs))
                if len(tensor.shape) > 4:
                    shape = (builder.export_batch, tensor.shape[1], *target[1:])
                    name = f"{node.outputs[0]}#apart"
                    self._add(node, "Reshape", inputs[:1], [name], {"shape": shape})
                self.views[node.outputs[0]] = Merged(name, 0, "right", target, heads="operand", made_by=given)
                return True
            if target == tensor.shape_at(builder.export_batch) and not view.heads:
                self._add(node, "Identity", [name], node.outputs[:1], {})
            else:
                self._add(node, "Reshape", [name], node.outputs[:1], {"shape": target})
            return True
        place, side, apart = found
        if apart != tensor.shape:
            whole = f"{node.outputs[0]}#apart"
            shape = tuple(s * builder.export_batch if d == place else s for d, s in enumerate(apart))
            self._add(node, "Reshape", [name], [whole], {"shape": shape})
            if builder.tensors[whole].batch_dim != place:
                return False
            name = whole
        self.views[node.outputs[0]] = Merged(name, place, side, target)
        return True

    def _tile(self, node: Node, inputs: Sequence[str]) -> bool:
        builder = self.builder
        tensor = builder.tensors.get(inputs[0])
        value = builder.values.get(inputs[1]) if len(inputs) > 1 else None
        if tensor is None or value is None or tensor.batch_dim != 0:
            return False
        times, *others = (int(v) for v in value.reshape(-1))
        if times < 2 or others != [1] * (len(tensor.shape) - 1):
            return False
        name = node.outputs[0]
        samples, *rest = tensor.shape_at(builder.export_batch)
        once = builder.constant(f"{name}#times", np.asarray([times, 1, *[1] * len(rest)]))
        self._add(node, "Unsqueeze", inputs[:1], [f"{name}#once"], {"axes": (0,)}, "#once")
        self._add(node, "Expand", [f"{name}#once", once], [f"{name}#apart"], {})
        self.views[name] = Merged(f"{name}#apart", 1, "left", (times * samples, *rest), repeats=True)
        return True

    def _transpose(self, node: Node, view: Merged, attributes: Mapping[str, Any]) -> bool:
        rank = len(view.shape)
        # The batch and its neighbour are transposed together. If the side is unknown, it must be the right one, since
        # models reshape a merged `(s b)` back and never transpose it.
        if view.side == "left" or view.place >= rank:
            return False
        perm = tuple(attributes.get("perm") or reversed(range(rank)))
        whole = [p if p < view.place else p + 1 for p in perm]
        at = whole.index(view.place + 1)
        whole.insert(at, view.place)
        name = node.outputs[0]
        self._add(node, "Transpose", [view.whole], [f"{name}#apart"], {"perm": tuple(whole)})
        shape = tuple(view.shape[p] for p in perm)
        self.views[name] = Merged(f"{name}#apart", at, "right", shape, heads=view.heads)
        return True

    def _product(self, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any]) -> bool:
        builder = self.builder
        a, b = self.views.get(inputs[0]), self.views.get(inputs[1])
        alone = b if a is None else a if b is None else None
        if alone is a and a is not None and node.kind == "MatMul" and self._is_by_position(inputs):
            return self._product_by_position(node, inputs, a)
        if alone is not None and alone.heads:
            return False
        if alone is not None and node.kind == "MatMul" and self._with_samples(node, inputs, alone):
            return True
        if a is None or attributes.get("transA") or {"alpha", "beta"} & set(attributes):
            return False
        rank = len(a.shape)
        if b is not None:
            fits = a.place == b.place < rank - 2 and rank == len(b.shape) and "left" not in (a.side, b.side)
            if not fits or node.kind != "MatMul" or a.shape[:-2] != b.shape[:-2]:
                return False
            both = replace(a, heads="product" if a.heads else "")
            return self._emit(node, [a.whole, b.whole], {}, both, (*a.shape[:-1], b.shape[-1]))
        weight = builder.tensors.get(inputs[1])
        if weight is None or weight.batch_dim is not None or len(weight.shape) != 2 or not self._leaves_last(a):
            return False
        right = inputs[1]
        if attributes.get("transB"):
            right = f"{node.outputs[0]}#transposed"
            self._add(node, "Transpose", [inputs[1]], [right], {"perm": (1, 0)}, "#transpose")
        columns = builder.tensors[right].shape[1]
        side: Side = "left" if a.place == rank - 1 else a.side
        shape = (*a.shape[:-1], columns)
        name = node.outputs[0]
        product = f"{name}#product"
        self._add(node, "MatMul", [a.whole, right], [product], {})
        if len(inputs) > 2 and inputs[2]:
            bias = builder.tensors.get(inputs[2])
            if bias is None or bias.batch_dim is not None or len(bias.shape) > 1:
                return False
            self._add(node, "Add", [product, inputs[2]], [f"{name}#apart"], {}, "#bias")
            product = f"{name}#apart"
        self.views[name] = Merged(product, a.place, side, shape, a.repeats)
        return True

    def _with_samples(self, node: Node, inputs: Sequence[str], view: Merged) -> bool:
        """Handles a product of a view `(b h) s d` and a tensor `h s d` that has no samples, such as learned queries."""
        builder, rank = self.builder, len(view.shape)
        i = int(inputs[0] in self.views)
        tensor = builder.tensors.get(inputs[i])
        if tensor is None or tensor.batch_dim is not None or view.side == "left" or view.place >= rank - 2:
            return False
        whole = builder.tensors[view.whole].shape
        lead = (*whole[: view.place], *whole[view.place + 1 : -2])
        if tensor.shape[:-2] not in (lead, view.shape[:-2]):
            return False
        # The exporter may have repeated the tensor for each sample; the product reads a single copy.
        times = 1 if tensor.shape[:-2] == lead else builder.export_batch
        name = node.outputs[0]
        shape = (*whole[: view.place], times, *whole[view.place + 1 : -2], *tensor.shape[-2:])
        self._add(node, "Reshape", [inputs[i]], [f"{name}#shared"], {"shape": shape}, "#shared")
        operands = [f"{name}#shared", view.whole] if i == 0 else [view.whole, f"{name}#shared"]
        rows, columns = (tensor.shape[-2], view.shape[-1]) if i == 0 else (view.shape[-2], tensor.shape[-1])
        return self._emit(node, operands, {}, view, (*view.shape[:-2], rows, columns))

    def _is_by_position(self, inputs: Sequence[str]) -> bool:
        """Whether operands are queries `s (b h) d` and keys of relative positions `s d k`, which have no samples."""
        view, keys = self.views.get(inputs[0]), self.builder.tensors.get(inputs[1])
        if view is None or keys is None or not view.heads or keys.batch_dim is not None:
            return False
        leads = view.place == 1 and view.side == "right" and len(view.shape) == len(keys.shape) == 3
        return leads and view.shape[0] == keys.shape[0] > 1

    def _product_by_position(self, node: Node, inputs: Sequence[str], view: Merged) -> bool:
        keys, name = self.builder.tensors[inputs[1]], node.outputs[0]
        self._add(node, "Unsqueeze", inputs[1:2], [f"{name}#keys"], {"axes": (1,)}, "#keys")
        made = replace(view, heads="product")
        return self._emit(node, [view.whole, f"{name}#keys"], {}, made, (*view.shape[:2], keys.shape[2]))

    def _elementwise(self, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any], view: Merged) -> bool:
        rank = len(view.shape)
        operands = []
        for i, name in enumerate(inputs):
            other = self.views.get(name)
            if other is not None:
                lead = view.place + (view.side != "left")
                if other.place != view.place or other.shape[:lead] != view.shape[:lead] or len(other.shape) != rank:
                    return False
                operands.append(other.whole)
                continue
            if not name or (node.kind in UNARY and i):
                operands.append(name)
                continue
            tensor, value = self.builder.tensors.get(name), self.builder.values.get(name)
            shape = tensor.shape if tensor is not None else value.shape if value is not None else None
            if tensor is not None and tensor.batch_dim is not None and self._merges_alike(tensor, view):
                operands.append(self._taken_apart(node, tensor, view.place, i))
                continue
            if shape is None or (tensor is not None and tensor.batch_dim is not None):
                return False
            # Only dims to the right of the batch's neighbour may differ from one, or from the heads after the batch.
            free = rank - view.place - (0 if view.side == "left" or view.place == rank - 1 else 1)
            heads = self.builder.tensors[view.whole].shape[1] if view.heads and len(shape) == rank else 0
            of_heads = bool(heads) and shape[0] in (heads, heads * self.builder.export_batch)
            if of_heads:
                free = rank
            if prod(shape[: max(len(shape) - max(free, 0), 0)]) != 1 or len(shape) > rank - view.place:
                return False
            operands.append(self._of_one_sample(node, name, heads, shape[0]) if of_heads else name)
        sides = {self.views[n].side for n in inputs if n in self.views} - {"any"}
        if len(sides) > 1:
            return False
        side: Side = sides.pop() if sides else "any"
        views = [self.views[n] for n in inputs if n in self.views]
        shape = tuple(max(sizes) for sizes in zip(*(v.shape for v in views), strict=True))
        made = replace(view, side=side, repeats=any(v.repeats for v in views))
        return self._emit(node, operands, attributes, made, shape)

    def _merges_alike(self, tensor: Tensor, view: Merged) -> bool:
        """Whether a tensor has batch and heads merged in the same dim as a view, such as a mask `(b h) t s`."""
        if view.side == "left" or tensor.batch_dim != view.place or len(tensor.shape) != len(view.shape):
            return False
        given = enumerate(zip(tensor.shape_at(self.builder.export_batch), view.shape, strict=True))
        return all(size == whole or (size == 1 and d != view.place) for d, (size, whole) in given)

    def _taken_apart(self, node: Node, tensor: Tensor, place: int, number: int) -> str:
        """Reshapes operand `number`, in which the batch is the major part of dim `place`, so that it is separate."""
        name = f"{node.outputs[0]}#{number}"
        shape = (*tensor.shape[:place], self.builder.export_batch, *tensor.shape[place:])
        self._add(node, "Reshape", [tensor.name], [name], {"shape": shape}, f"#{number}")
        return name

    def _of_one_sample(self, node: Node, name: str, heads: int, size: int) -> str:
        """Name of a single copy of a tensor that is added to all samples, which may be repeated for each of them."""
        if size == heads:
            return name
        fresh = f"{name}#sample"
        value = self.builder.values.get(name)
        if value is not None:
            return self.builder.constant(fresh, np.ascontiguousarray(value[:heads]))
        part = {"axes": (0,), "starts": (0,), "ends": (heads,), "steps": (1,)}
        if fresh not in self.builder.tensors:
            self._add(node, "Slice", [name], [fresh], part, "#sample")
        return fresh

    def _split(self, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any], view: Merged) -> bool:
        names = [f"{n}#apart" for n in node.outputs]
        self._add(node, "Split", [view.whole, *inputs[1:]], names, {**attributes, "axis": -1})
        for name, whole in zip(node.outputs, names, strict=True):
            size = self.builder.tensors[whole].shape[-1]
            self.views[name] = replace(view, whole=whole, shape=(*view.shape[:-1], size), made_by=None)
        return True
