"""Unrolls loops of known length: each iteration of a `Loop` or `Scan` becomes separate operators.

All iterations share the same weights. Loops whose length depends on data are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ir.build import GraphBuilder
from ir.errors import ModelError, refuse, too_expensive
from ir.onnx.readers.control_flow import Body
from ir.onnx.readers.nodes import Node, Stored
from ir.onnx.rewrites.merged_views import MergedViews

MAX_NODES = 20_000
"""Largest number of nodes of all unrolled loops (assumed): a recurrence of 12 nodes over 1,500 positions fits."""

SCAN_OF_SEQUENCES = 9
"""First operator set in which `Scan` has no dim of samples of its own (ONNX, Operators.md)."""


@dataclass
class Loops:
    """The loops of one import."""

    builder: GraphBuilder
    merged: MergedViews
    """The deferred views of the import."""
    alias: dict[str, str]
    """Name in the file -> another name of the same tensor."""
    emit: Callable[[Node, set[str]], None]
    """Function that imports a node, given the names of all tensors that are read."""
    declare: Callable[[dict[str, Stored]], None]
    """Function that adds stored tensors to the builder."""
    resolve: Callable[[str], str]
    """Function from a name in the file to the name of the tensor in the builder."""
    written: int = 0
    """Number of nodes unrolled so far, which is limited because nested loops multiply it."""

    def add(self, node: Node, inputs: Sequence[str], uses: set[str]) -> None:
        """Adds the operators of all iterations.

        Args:
            node: node of kind Loop or Scan.
            inputs: names of its operands in the builder.
            uses: names of all tensors that are read.

        Raises:
            ModelError: the number of iterations depends on data, the unrolled loops have too many nodes, or a Scan is
                of operator set 8, where a body sees one sample and not all.
        """
        if node.kind == "Scan" and node.opset < SCAN_OF_SEQUENCES:
            text = f"Scan of operator set {node.opset} runs its body for each sample"
            repair = f"Export with operator set {SCAN_OF_SEQUENCES} or newer, or with an LSTM, GRU or RNN."
            raise refuse(text, node.name or node.outputs[0], repair)
        body: Body = node.attributes["body"]
        self.declare(body.stored)
        own = [*inputs, *[""] * len(body.operands)][: len(body.operands)]
        run = self._scan if node.kind == "Scan" else self._loop
        carried, stacked = run(node, own, uses)
        for outer, name in zip(node.outputs, carried, strict=False):
            self.alias[outer] = name
        axes = node.attributes.get("scan_output_axes", ())
        for number, (outer, names) in enumerate(zip(node.outputs[len(carried) :], stacked, strict=True)):
            if outer:
                self._stack(node, outer, names, int(axes[number]) if axes else 0, uses)

    def _loop(self, node: Node, own: Sequence[str], uses: set[str]) -> tuple[list[str], list[list[str]]]:
        """Imports all iterations of a Loop; returns the final states, and the parts of each stacked result."""
        count = self.builder.values.get(own[0]) if own[0] else np.asarray(np.iinfo(np.int64).max)
        if count is None:
            raise _of_data(node, "length")
        carried = list(own[2:])
        stacked: list[list[str]] = [[] for _ in node.outputs[len(own) - 2 :]]
        goes_on = own[1] or self.builder.constant(f"{node.outputs[0]}#on", np.asarray(True))
        for number in range(int(count.reshape(-1)[0])):
            known = self.builder.values.get(goes_on)
            if known is None:
                raise _of_data(node, "end")
            if not known.reshape(-1)[0]:
                break
            at = self.builder.constant(f"{node.outputs[0]}#at{number}", np.asarray(number, dtype=np.int64))
            goes_on, *results = self._iterate(node, [at, goes_on, *carried], number, uses)
            carried, parts = results[: len(carried)], results[len(carried) :]
            for names, part in zip(stacked, parts, strict=True):
                names.append(part)
        return carried, stacked

    def _scan(self, node: Node, own: Sequence[str], uses: set[str]) -> tuple[list[str], list[list[str]]]:
        """Imports all iterations of a Scan; returns the same as `_loop`."""
        num_scanned = int(node.attributes.get("num_scan_inputs", 0))
        carried, scanned = list(own[: len(own) - num_scanned]), own[len(own) - num_scanned :]
        axes = node.attributes.get("scan_input_axes", (0,) * num_scanned)
        lengths = []
        for name, axis in zip(scanned, axes, strict=True):
            self.merged.make(name)
            lengths.append(self.builder.operand(name).shape_at(self.builder.export_batch)[axis])
        backwards = node.attributes.get("scan_input_directions", (0,) * num_scanned)
        written = node.attributes.get("scan_output_directions", (0,) * len(node.outputs))
        stacked: list[list[str]] = [[] for _ in node.outputs[len(carried) :]]
        for number in range(min(lengths, default=0)):
            slices = []
            for i, (name, axis) in enumerate(zip(scanned, axes, strict=True)):
                at = lengths[i] - 1 - number if backwards[i] else number
                place = self.builder.constant(f"{node.outputs[0]}#at{i}.{number}", np.asarray(at, dtype=np.int64))
                slices.append(f"{node.outputs[0]}#in{i}.{number}")
                gather = Node("Gather", [name, place], slices[-1:], {"axis": int(axis)}, "", node.scope, node.opset)
                self.emit(gather, uses | set(slices))
            results = self._iterate(node, [*carried, *slices], number, uses)
            carried, parts = results[: len(carried)], results[len(carried) :]
            for i, part in enumerate(parts):
                stacked[i].insert(0 if written[i] else number, part)
        return carried, stacked

    def _iterate(self, node: Node, operands: Sequence[str], number: int, uses: set[str]) -> list[str]:
        """Imports one iteration; returns its results."""
        body: Body = node.attributes["body"]
        nodes, outputs = body.read(operands, number)
        self.written += max(len(nodes), 1)
        if self.written > MAX_NODES:
            repair = "Export with a shorter sequence, or with the recurrence as LSTM, GRU or one operator of your own."
            raise too_expensive(f"loops of more than {MAX_NODES} nodes in all", node.name or node.outputs[0], repair)
        inner = uses | {n for each in nodes for n in each.inputs} | set(outputs)
        for each in nodes:
            self.emit(each, inner)
        return [self.resolve(name) for name in outputs]

    def _stack(self, node: Node, out: str, names: Sequence[str], axis: int, uses: set[str]) -> None:
        """Stacks the parts of one result, one per iteration, in a new dim."""
        self.builder.constant(f"{out}#axis", np.asarray([axis]))
        parts = [f"{out}#{i}" for i in range(len(names))]
        for name, part in zip(names, parts, strict=True):
            self.emit(Node("Unsqueeze", [name, f"{out}#axis"], [part], {}, "", node.scope, 13), uses | set(parts))
        self.emit(Node("Concat", parts, [out], {"axis": axis}, "", node.scope, 13), uses)


def _of_data(node: Node, what: str) -> ModelError:
    return refuse(
        f"control flow is not supported: the {what} of a {node.kind} depends on data",
        node.name or node.outputs[0],
        "Export with a loop of constant length: a training graph is a straight line.",
    )
