"""Look-ups and writes within each sample, whose exported indices contain the index of the sample.

Taken literally, indices such as `arange(b)[:, None]` would be look-ups along the batch, which could not be split. They
are converted to look-ups along dims of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ir.build import GraphBuilder
from ir.onnx.readers.nodes import Node
from ir.operators import Value

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Cast", "Identity")
"""Kinds that leave the order of the elements of an index as it is."""


@dataclass
class SampleLookups:
    """The look-ups of one import.

    Attributes:
        builder: builder of the import.
        nodes: nodes of the file.
        resolve: function from a name in the file to the name that the builder knows.
        emit: function that imports a node, given the names of all tensors that are read.
    """

    builder: GraphBuilder
    nodes: Sequence[Node]
    resolve: Callable[[str], str]
    emit: Callable[[Node, set[str]], None]

    def add(self, node: Node, inputs: Sequence[str]) -> bool:
        """Adds operators for a look-up or write within samples; returns whether `node` is one.

        `inputs` are the names of its operands in the builder.
        """
        if node.kind == "Gather":
            return self._gather_samples(node, inputs) or self._gather_own(node, inputs)
        if node.kind == "GatherND":
            return self._gather_pairs(node, inputs) or self._gather_own(node, inputs)
        return node.kind == "ScatterND" and self._scatter_samples(node, inputs)

    def _gather_samples(self, node: Node, inputs: Sequence[str]) -> bool:
        """A look-up along `(b s)` by known places that stay within each sample: a look-up along `s` of `[b, s]`.

        Indexing by `[arange(b)[:, None], places]` and `as_strided` are exported like that.
        """
        builder = self.builder
        data, value = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
        if data is None or value is None or data.batch_dim is None or not value.ndim:
            return False
        axis = int(node.attributes.get("axis", 0)) % len(data.shape)
        batch, rows = builder.export_batch, data.shape[axis]
        if axis != data.batch_dim or value.shape[0] != batch:
            return False
        value = np.where(value < 0, value + rows * batch, value)
        own = value[:1]
        samples = np.arange(batch).reshape(-1, *[1] * (value.ndim - 1))
        if own.min(initial=0) < 0 or own.max(initial=0) >= rows or not np.array_equal(value, own + samples * rows):
            return False
        lead, tail = data.shape[:axis], data.shape[axis + 1 :]
        kept = own.reshape(-1)
        entry, made, result = f"{node.outputs[0]}#apart", f"{node.outputs[0]}#rows", node.outputs[0]

        self._reshape(node, inputs[0], entry, [*lead, batch, rows, *tail])
        if not np.array_equal(kept, np.arange(rows)):
            places = builder.constant(f"{made}#places", kept)
            builder.add("Gather", [entry, places], [made], scope=node.scope, attributes={"axis": axis + 1})
            entry = made
        self._reshape(node, entry, result, [*lead, own.shape[0] * batch, *own.shape[1:], *tail])
        return True

    def _reshape(self, node: Node, source: str, target: str, shape: Sequence[int]) -> None:
        """Adds a Reshape to `shape`, which is at the exported batch."""
        given = self.builder.constant(f"{target}#shape", np.asarray(shape))
        self.builder.add("Reshape", [source, given], [target], scope=node.scope, name=node.name)

    def _is_by_sample(self, value: Value) -> bool:
        """Whether index tuples are `(sample, places...)`, with the same places for each sample in turn."""
        if value.ndim < 2 or value.shape[-1] < 2 or value.shape[0] != self.builder.export_batch:
            return False
        samples = np.arange(len(value)).reshape(-1, *[1] * (value.ndim - 2))
        own = value[:1, ..., 1:]
        return bool((value[..., 0] == samples).all() and (value[..., 1:] == own).all())

    def _gather_pairs(self, node: Node, inputs: Sequence[str]) -> bool:
        """`x[arange(b)[:, None], places]` with known places: a look-up along dim 1, the same for each sample.

        Masks of transformers are exported like that.
        """
        builder = self.builder
        data, value = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
        if data is None or data.batch_dim != 0 or data.shape[0] != 1 or value is None or value.shape[-1:] != (2,):
            return False
        if node.attributes.get("batch_dims") or not self._is_by_sample(value):
            return False
        places, out = value[0, ..., 1], node.outputs[0]
        if np.array_equal(places.reshape(-1), np.arange(data.shape[1])):
            self._reshape(node, inputs[0], out, [builder.export_batch, *places.shape, *data.shape[2:]])
        else:
            known, along = builder.constant(f"{out}#places", np.ascontiguousarray(places)), {"axis": 1}
            builder.add("Gather", [inputs[0], known], [out], name=node.name, scope=node.scope, attributes=along)
        return True

    def _scatter_samples(self, node: Node, inputs: Sequence[str]) -> bool:
        """`x[arange(b), places] = y` with known places: the batch is moved after the dims that are looked into."""
        builder = self.builder
        value = builder.values.get(inputs[1])
        if value is None or not self._is_by_sample(value) or node.attributes.get("reduction", "none") != "none":
            return False
        operands = [builder.tensors.get(n) or builder.values.get(n) for n in (inputs[0], inputs[2])]
        if any(o is None for o in operands):
            return False
        out, depth, lead = node.outputs[0], value.shape[-1], value.ndim - 1
        ranks = [len(o.shape) for o in operands if o is not None]
        names = []
        for name, rank, place, label in (
            (inputs[0], ranks[0], depth - 1, "data"),
            (inputs[2], ranks[1], lead - 1, "new"),
        ):
            perm = (*range(1, place + 1), 0, *range(place + 1, rank))
            turned = Node("Transpose", [name], [f"{out}#{label}"], {"perm": perm}, node.name, node.scope, node.opset)
            self.emit(turned, set())
            names.append(f"{out}#{label}")
        builder.constant(f"{out}#places", np.ascontiguousarray(value[0, ..., 1:]))
        made = Node("ScatterND", [names[0], f"{out}#places", names[1]], [f"{out}#moved"], {}, node.name, node.scope)
        self.emit(made, set())
        back = (depth - 1, *range(depth - 1), *range(depth, ranks[0]))
        self.emit(Node("Transpose", [f"{out}#moved"], [out], {"perm": back}, node.name, node.scope), set())
        return True

    def _gather_own(self, node: Node, inputs: Sequence[str]) -> bool:
        """`x[arange(b)[:, None], places]`: a look-up by each sample in its own rows, at places that depend on the data.

        The older exporter adds `arange(b) * rows` to the places and looks up in `[(b rows), ...]`, as DGCNN does itself
        to find neighbours. The newer one joins `arange(b)` and the places to pairs.
        """
        builder = self.builder
        data, index = builder.tensors.get(inputs[0]), builder.tensors.get(inputs[1])
        if data is None or index is None or data.batch_dim != 0 or index.batch_dim != 0:
            return False
        rows, result, is_nd = data.shape[0], node.outputs[0], node.kind == "GatherND"
        if int(node.attributes.get("batch_dims" if is_nd else "axis", 0)):
            return False
        shape = index.shape_at(builder.export_batch)
        source, last = inputs[0], f"{result}#places"
        if is_nd and shape[-1] == 2:
            pairs = self._producers.get(inputs[1])
            if rows != 1 or pairs is None or pairs.kind != "Concat" or len(pairs.inputs) != 2:
                return False
            found = self._other_than_samples(pairs, 1)
            if found is None or self.resolve(pairs.inputs[1]) != found:
                return False
            last, depth = found, len(shape)
        else:
            total = None if is_nd and shape[-1] != 1 else self._behind_views(inputs[1])
            found = None if total is None else self._other_than_samples(total, rows)
            if found is None:
                return False
            source = f"{result}#rows"
            self._reshape(node, inputs[0], source, [builder.export_batch, rows, *data.shape[1:]])
            axes = builder.constant(f"{result}#axis", np.asarray([-1]))
            builder.add("Unsqueeze", [found, axes], [last], name=node.name, scope=node.scope)
            depth = len(builder.tensors[last].shape)
        places = builder.tensors[last].shape_at(builder.export_batch)[: depth - 1]
        wanted = shape[:-1] if is_nd else shape
        made = result if places == wanted else f"{result}#found"
        builder.add(
            "GatherND",
            [source, last],
            [made],
            name=node.name,
            scope=node.scope,
            attributes={"batch_dims": 1},
            opset=node.opset,
        )
        if made != result:
            self._reshape(node, made, result, [*wanted, *data.shape[1:]])
        return True

    def _behind_views(self, name: str) -> Node | None:
        """The sum of which a tensor is a view; None if it is none."""
        maker = self._producers.get(name)
        while maker is not None and maker.kind in VIEWS:
            maker = self._producers.get(self.resolve(maker.inputs[0]))
        return maker if maker is not None and maker.kind == "Add" else None

    @cached_property
    def _producers(self) -> Mapping[str, Node]:
        return {name: node for node in self.nodes for name in node.outputs}

    def _other_than_samples(self, maker: Node, rows: int) -> str | None:
        """The operand of a node of two, the other of which is `arange(b) * rows`; None where that is not so."""
        names = [self.resolve(n) for n in maker.inputs]
        for i, name in enumerate(names):
            value = self.builder.values.get(name)
            if value is None or names[1 - i] not in self.builder.tensors:
                continue
            # When the sum was computed, a constant that held all samples was cut to the first.
            rank, samples = len(self.builder.tensors[names[1 - i]].shape), range(self.builder.export_batch)
            if value.size == 1 or (value.ndim == rank and len(value) in (1, len(samples))):
                own = np.asarray(samples[: len(value) if value.ndim else 1]).reshape(-1, *[1] * (value.ndim - 1))
                if (value == own * rows).all():
                    return names[1 - i]
        return None
