"""Concatenations along the batch, as in siamese networks, whose parts are separated again after shared layers.

`cat([a, b])` of two images per sample places all first images before all second ones, so that a split by samples would
separate the pairs. It is therefore imported in another order, in which the images of a sample are adjacent: two tensors
`[b, ...]` become `[b, 2, ...]`, viewed as `[(b 2), ...]`. This does not affect operators that treat all rows alike.
Where a Split, a Slice or a Reshape to `[2, b, ...]` separates the parts again, each part is read from every sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

from ir.batch import resolve
from ir.build import GraphBuilder
from ir.graph import Operator, Tensor
from ir.onnx.readers.nodes import Node


@dataclass
class JoinedSamples:
    """The concatenations along the batch of one import."""

    builder: GraphBuilder
    parts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Concatenated or separated tensor -> rows per sample of each of its parts, in the order of the file."""
    _makers: dict[str, Operator] = field(default_factory=dict)
    _seen: int = 0
    """Operators of the builder whose results `_makers` has."""

    def add(self, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any]) -> bool:
        """Adds the operators of a node that concatenates along the batch, or separates the parts again.

        Args:
            node: the node.
            inputs: names of its operands in the builder.
            attributes: its attributes in the form of the table of kinds.

        Returns:
            whether the node is one of these.
        """
        if node.kind not in ("Concat", "Split", "Slice", "Reshape"):
            return False
        tensor = self.builder.tensors.get(inputs[0])
        if tensor is None or tensor.batch_dim is None or prod(tensor.shape[: tensor.batch_dim]) != 1:
            return False
        if node.kind == "Concat":
            return self._join(node, inputs, int(attributes.get("axis", 0)))
        if node.kind == "Reshape":
            return self._view(node, inputs, tensor)
        return self._take_apart(node, inputs, attributes, tensor)

    def _join(self, node: Node, inputs: Sequence[str], axis: int) -> bool:
        tensors = [self.builder.tensors.get(n) for n in inputs]
        first = tensors[0]
        if first is None or first.batch_dim is None or axis % len(first.shape) != first.batch_dim:
            return False
        dim = first.batch_dim
        if any(t is None or t.batch_dim != dim or len(t.shape) != len(first.shape) for t in tensors):
            return False
        rows = [t.shape[dim] for t in tensors if t is not None]
        name, rest = node.outputs[0], first.shape[dim + 1 :]
        apart = []
        for i, (given, count) in enumerate(zip(inputs, rows, strict=True)):
            apart.append(f"{name}#part{i}")
            own = self.builder.tensors[given].shape[dim + 1 :]
            self._reshape(node, given, apart[-1], dim, (1, count, *own))
        self._emit(node, "Concat", apart, [f"{name}#joined"], {"axis": dim + 1})
        self._reshape(node, f"{name}#joined", name, dim, (sum(rows), *rest))
        self.parts[name] = tuple(part for n in inputs for part in self._parts(n) or (self._rows(n),))
        return True

    def stack(self, whole: str, name: str, shape: Sequence[int]) -> bool:
        """Adds the view `name` of `[n, b, ...]` as `[(n b), ...]`, of this shape at the exported batch.

        False where the view is another one.
        """
        batch, tensor = self.builder.export_batch, self.builder.tensors[whole]
        if tensor.batch_dim != 1 or tensor.shape[0] < 2:
            return False
        count, rows, *rest = tensor.shape
        if tuple(shape) != (count * rows * batch, *rest):
            return False
        node, rank = Node("Reshape", [whole], [name], {}, name, ""), len(tensor.shape)
        self._emit(node, "Transpose", [whole], [f"{name}#turned"], {"perm": (1, 0, *range(2, rank))})
        entry = f"{name}#turned"
        if rows > 1:
            self._reshape(node, entry, f"{name}#rows", 0, (1, rows, count, *rest))
            entry = f"{name}#apart"
            self._emit(node, "Transpose", [f"{name}#rows"], [entry], {"perm": (0, 2, 1, *range(3, rank + 1))})
        self._reshape(node, entry, name, 0, (count * rows, *rest))
        self.parts[name] = (rows,) * count
        return True

    def _take_apart(self, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any], tensor: Tensor) -> bool:
        """A Split or a Slice of samples whose bounds are those of parts."""
        batch, dim = self.builder.export_batch, tensor.batch_dim
        assert dim is not None
        size = tensor.shape[dim] * batch
        if node.kind == "Split":
            axis, given = int(attributes.get("axis", 0)), self._integers(inputs, 1, attributes, "split")
            count = int(attributes.get("num_outputs", len(node.outputs)))
            if count != len(node.outputs):
                return False  # to be refused as a Split
            chunk = -(-size // max(count, 1))
            sizes = given or [max(min(chunk, size - chunk * i), 0) for i in range(count)]
            bounds = [0, *accumulate(sizes)]
        else:
            starts, ends = (self._integers(inputs, i, attributes, key) for i, key in ((1, "starts"), (2, "ends")))
            axes, steps = (self._integers(inputs, i, attributes, key) for i, key in ((3, "axes"), (4, "steps")))
            if starts is None or ends is None or len(starts) != 1 or len(ends) != 1 or (steps or [1]) != [1]:
                return False
            axis = axes[0] if axes else 0
            start, stop, _ = slice(starts[0], ends[0]).indices(size)
            if stop <= start or stop - start == size:
                return False
            bounds = [start, stop]
        if axis % len(tensor.shape) != dim:
            return False
        joined = self._parts(inputs[0]) or ()
        parts = joined or self._own_rows(node, tensor.shape[dim], bounds)
        edges = [0, *accumulate(parts)]
        if any(bound % batch or bound // batch not in edges for bound in bounds):
            return False
        places = [edges.index(bound // batch) for bound in bounds]
        name, rest = node.outputs[0], tensor.shape[dim + 1 :]
        self._reshape(node, inputs[0], f"{name}#apart", dim, (1, tensor.shape[dim], *rest))
        pieces = [n and f"{n}#piece" for n in node.outputs]
        if node.kind == "Split":
            split = tuple(bound // batch for bound in sizes)
            self._emit(node, "Split", [f"{name}#apart"], pieces, {"axis": dim + 1, "split": split})
        else:
            cut = {"axes": (dim + 1,), "starts": (edges[places[0]],), "ends": (edges[places[1]],), "steps": (1,)}
            self._emit(node, "Slice", [f"{name}#apart"], pieces, cut)
        for output, piece, first, last in zip(node.outputs, pieces, places, places[1:], strict=False):
            if not output:
                continue
            self._reshape(node, piece, output, dim, (edges[last] - edges[first], *rest))
            if joined:
                self.parts[output] = parts[first:last]
        return True

    def _own_rows(self, node: Node, rows: int, bounds: Sequence[int]) -> tuple[int, ...]:
        """Parts of one row each, where a Split or a Slice of `[(b rows), ...]` takes rows of one sample.

        In a file of one sample, all rows are those of that sample. In a file of more, as many leading rows as there are
        samples are taken where all rows are equal, as the class tokens of the frames of TimeSformer are. Empty
        elsewhere.
        """
        batch = self.builder.export_batch
        if rows < 2 or (batch > 1 and (node.kind != "Slice" or list(bounds) != [0, batch])):
            return ()
        if batch > 1:
            self.builder.warnings.append(
                f"{node.name or node.outputs[0]}: the first {batch} of {rows * batch} rows of a batch are read as the "
                "first row of each sample, which is right if these rows are equal"
            )
        return (1,) * rows

    def _view(self, node: Node, inputs: Sequence[str], tensor: Tensor) -> bool:
        """A Reshape of `[(n b), ...]` to `[n, b, ...]`."""
        batch, dim = self.builder.export_batch, tensor.batch_dim
        assert dim is not None
        value = self.builder.values.get(inputs[1]) if len(inputs) > 1 else None
        if value is None:
            return False
        sizes = [int(v) for v in value.reshape(-1)]
        target = resolve(tensor.shape_at(batch), sizes, allow_zero=bool(node.attributes.get("allowzero", 0)))
        if target is None or len(target) != len(tensor.shape) + 1:
            return False
        count = target[dim]
        wanted = (*tensor.shape[:dim], count, tensor.shape[dim] * batch // count, *tensor.shape[dim + 1 :])
        parts = self._parts(inputs[0]) or ()
        edges = [0, *accumulate(parts)]
        rows = tensor.shape[dim] // count
        if (
            count < 2
            or rows * count != tensor.shape[dim]
            or target != wanted
            or any(rows * i not in edges for i in range(count + 1))
        ):
            return False
        if batch == 1 and rows > 1:
            return False  # of one sample, `[(n b), s]` looks the same and is more usual
        name, rest = node.outputs[0], tensor.shape[dim + 1 :]
        one = (rows,) if rows > 1 else ()
        self._reshape(node, inputs[0], f"{name}#apart", dim, (1, count, *one, *rest))
        turned = name if rows == 1 else f"{name}#turned"
        perm = (*range(dim), dim + 1, dim, *range(dim + 2, len(tensor.shape) + 1 + len(one)))
        self._emit(node, "Transpose", [f"{name}#apart"], [turned], {"perm": perm})
        if rows > 1:
            self._emit(node, "Reshape", [turned], [name], {"shape": target})
        return True

    def _rows(self, name: str) -> int:
        tensor = self.builder.tensors[name]
        return tensor.shape[tensor.batch_dim] if tensor.batch_dim is not None else 0

    def _parts(self, name: str) -> tuple[int, ...] | None:
        """Rows of each part of a tensor in one sample; None where it does not come from a join.

        Operators keep the order of rows, and each keeps or multiplies their number, as a view `[(b 2 s), h]` does.
        """
        for operator in self.builder.operators[self._seen :]:
            self._makers.update(dict.fromkeys(operator.outputs, operator))
        self._seen = len(self.builder.operators)
        rows = self._rows(name)
        waiting, seen = [name], {name}
        while waiting:
            found = waiting.pop()
            parts = self.parts.get(found)
            if parts is not None:
                total = sum(parts)
                if any(part * rows % total for part in parts):
                    return None
                return tuple(part * rows // total for part in parts)
            maker = self._makers.get(found)
            for operand in maker.inputs if maker is not None else ():
                if operand not in seen and self._rows(operand) > 1:
                    seen.add(operand)
                    waiting.append(operand)
        return None

    def _integers(
        self, inputs: Sequence[str], index: int, attributes: Mapping[str, Any], name: str
    ) -> list[int] | None:
        """Integers from attribute `name`, else from operand `index`; None where they are not known."""
        if name in attributes:
            return [int(v) for v in attributes[name]]
        value = self.builder.values.get(inputs[index]) if index < len(inputs) else None
        return None if value is None else [int(v) for v in value.reshape(-1)]

    def _reshape(self, node: Node, source: str, result: str, dim: int, shape: Sequence[int]) -> None:
        """Adds a view with `shape` at one sample from `dim`, which carries the batch, on."""
        lead = self.builder.tensors[source].shape[:dim]
        target = (*lead, shape[0] * self.builder.export_batch, *shape[1:])
        self._emit(node, "Reshape", [source], [result], {"shape": target})

    def _emit(
        self, node: Node, kind: str, inputs: Sequence[str], outputs: Sequence[str], attributes: Mapping[str, Any]
    ) -> None:
        self.builder.add(
            kind, inputs, outputs, name=node.name, scope=node.scope, attributes=attributes, opset=node.opset
        )
