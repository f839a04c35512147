"""Limits on the size of an uploaded model file, and counters that enforce them."""

from __future__ import annotations

from dataclasses import dataclass

from ir.errors import ModelTooExpensive, too_expensive

MIB = 1 << 20
LARGEST_FILE = 2047 * MIB
"""Largest number of bytes of a file whose weights can be taken out; protobuf reads messages of less than 2 GiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits on an upload (assumed): eight times a transformer of 70 billion parameters (10 MB, 5,700 nodes)."""

    max_bytes: int = 64 * MIB
    """Bytes of the file."""
    max_nodes: int = 50_000
    """Nodes, those of subgraphs included, after expansion of functions."""
    max_tensors: int = 200_000
    """Inputs, initializers, results and declared values."""
    max_items: int = 1_000_000
    """Operands, attributes and their numbers, dims and metadata entries, after expansion of functions."""
    max_depth: int = 8
    """Nesting of subgraphs."""
    max_calls: int = 64
    """Nesting of calls of functions."""
    max_operands: int = 4096
    """Inputs or outputs of one node, and outputs of the graph."""
    max_values: int = 65_536
    """Numbers or texts in one attribute."""
    max_rank: int = 32
    """Dims of one tensor."""
    max_elements: int = 1 << 48
    """Elements of one tensor."""
    max_dim: int = 1 << 40
    """Size of one dim."""
    max_name_bytes: int = 4096
    """Characters of one name."""


@dataclass
class Counter:
    """Counts the nodes, tensors and items of a file, and stops at the first limit that is exceeded."""

    limits: Limits
    nodes: int = 0
    tensors: int = 0
    items: int = 0

    def add(self, *, nodes: int = 0, tensors: int = 0, items: int = 0) -> None:
        """Adds to the counts.

        Raises:
            ModelTooExpensive: a limit is exceeded.
        """
        self.nodes += nodes
        self.tensors += tensors
        self.items += items
        limits = self.limits
        if self.nodes > limits.max_nodes:
            raise too_large(f"more than {limits.max_nodes} nodes", self.nodes)
        if self.tensors > limits.max_tensors:
            raise too_large(f"more than {limits.max_tensors} tensors", self.tensors)
        if self.items > limits.max_items:
            raise too_large(f"more than {limits.max_items} operands, attribute values and dims", self.items)


def too_large(message: str, value: object) -> ModelTooExpensive:
    """The error for a model that is too large, to be raised by the caller."""
    repair = "Submit a smaller graph, or ask the operator of the service to raise the limit."
    return too_expensive(f"the model has {message}", value, repair)


def check_size(num_bytes: int, most: int) -> None:
    """Checks the size of a file.

    Raises:
        ModelTooExpensive: it has more than `most` bytes.
    """
    if num_bytes > most:
        repair = "Strip the weights first: only shapes are needed (`automap strip model.onnx`)."
        raise too_expensive(f"the file is larger than {most:,} bytes", f"{num_bytes} bytes", repair)
