"""Sequences of tensors of known length: at import these are lists of names, without operators in the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ir.build import GraphBuilder
from ir.errors import ModelError, refuse
from ir.onnx.readers.nodes import Node
from ir.onnx.rewrites.merged_views import MergedViews


@dataclass
class Sequences:
    """The sequences of one import.

    Attributes:
        builder: builder of the import.
        merged: the deferred views of the import.
        alias: name in the file -> another name of the same tensor; extended if the result of a node is an operand.
        emit: function that imports a node that replaces one on sequences, given the names of all tensors read.
        lists: name of a sequence -> names of its tensors. The result of an embedding bag is a tensor already.
    """

    builder: GraphBuilder
    merged: MergedViews
    alias: dict[str, str]
    emit: Callable[[Node, set[str]], None]
    lists: dict[str, list[str]] = field(default_factory=dict)

    def add(self, node: Node, inputs: Sequence[str], uses: set[str]) -> None:
        """Adds the operators of a node on sequences.

        Args:
            node: node of a kind in `ir.onnx.readers.control_flow.SEQUENCES`.
            inputs: names of its operands in the builder.
            uses: names of all tensors that are read.

        Raises:
            ModelError: the length or an index depends on data.
        """
        lists = self.lists
        out = node.outputs[0]
        if node.kind == "SequenceEmpty":
            lists[out] = []
        elif node.kind == "SequenceConstruct":
            lists[out] = list(inputs)
        elif node.kind == "SplitToSequence":
            self._split_to_sequence(node, inputs, uses)
        elif inputs[0] in lists:
            self._on_sequence(node, inputs, uses)
        elif node.kind == "ConcatFromSequence" and inputs[0] in self.builder.tensors:
            self.alias[out] = inputs[0]
        else:
            raise _unknown_sequence(node)

    def check_tensors(self, names: Sequence[str], reader: str) -> None:
        """Refuses a sequence where a tensor is needed.

        Args:
            names: names in the builder.
            reader: what needs them, for the message.
        """
        for name in names:
            if name in self.lists:
                raise refuse(
                    f"{reader} is a sequence of {len(self.lists[name])} tensors",
                    name,
                    "Export with tensors only: give each of them a name of its own, or stack them.",
                )

    def _on_sequence(self, node: Node, inputs: Sequence[str], uses: set[str]) -> None:
        out, items = node.outputs[0], self.lists[inputs[0]]
        at = self.builder.values.get(inputs[-1]) if len(inputs) > 1 else None
        if node.kind == "SequenceInsert":
            if len(inputs) > 2 and at is None:
                raise _unknown_sequence(node)
            place = int(at.reshape(-1)[0]) if len(inputs) > 2 and at is not None else len(items)
            self.lists[out] = [*items[:place], inputs[1], *items[place:]]
        elif node.kind == "SequenceLength":
            self.builder.constant(out, np.asarray(len(items), dtype=np.int64))
        elif node.kind == "SequenceAt":
            if at is None or not -len(items) <= int(at.reshape(-1)[0]) < len(items):
                raise _unknown_sequence(node)
            self.alias[out] = items[int(at.reshape(-1)[0])]
        else:
            axis = int(node.attributes.get("axis", 0))
            if node.attributes.get("new_axis"):
                self.builder.constant(f"{out}#axis", np.asarray([axis]))
                fresh = [f"{out}#{i}" for i in range(len(items))]
                for name, item in zip(fresh, items, strict=True):
                    self.emit(Node("Unsqueeze", [item, f"{out}#axis"], [name], {}, node.name, node.scope, 13), uses)
                items = fresh
            self.emit(Node("Concat", items, [out], {"axis": axis}, node.name, node.scope, node.opset), uses)

    def _split_to_sequence(self, node: Node, inputs: Sequence[str], uses: set[str]) -> None:
        for name in inputs:
            self.merged.make(name)
        tensor, out = self.builder.tensors.get(inputs[0]), node.outputs[0]
        given = self.builder.values.get(inputs[1]) if len(inputs) > 1 else np.asarray(1)
        if tensor is None or given is None:
            raise _unknown_sequence(node)
        axis = int(node.attributes.get("axis", 0)) % len(tensor.shape)
        size = tensor.shape_at(self.builder.export_batch)[axis]
        sizes = [int(v) for v in given.reshape(-1)]
        if not given.ndim:
            sizes = [min(sizes[0], size - at) for at in range(0, size, max(sizes[0], 1))]
        drops = len(inputs) < 2 and not node.attributes.get("keepdims", 1)
        names = [f"{out}#{i}" for i in range(len(sizes))]
        self.builder.constant(f"{out}#sizes", np.asarray(sizes, dtype=np.int64))
        split = Node("Split", [inputs[0], f"{out}#sizes"], names, {"axis": axis}, node.name, node.scope, 13)
        self.emit(split, uses | set(names))
        if drops:
            self.builder.constant(f"{out}#axis", np.asarray([axis]))
            for name in names:
                self.emit(Node("Squeeze", [name, f"{out}#axis"], [f"{name}s"], {}, node.name, node.scope, 13), uses)
            names = [f"{name}s" for name in names]
        self.lists[out] = names


def _unknown_sequence(node: Node) -> ModelError:
    return refuse(
        f"a sequence of tensors is not known at import: {node.kind}",
        node.name or node.outputs[0],
        "Export with tensors only: stack or split them by constant sizes.",
    )
