"""Options for reading an ONNX file; a separate module, because the parent of the sandbox must not import onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class ReadOptions(TypedDict, total=False):
    """Keyword arguments of the functions that read an ONNX file."""

    name: str
    """Name of the graph; by default the one in the file."""
    dims: Mapping[str, int]
    """Sizes of symbolic dims other than the batch."""
    parameters: Sequence[str]
    """Globs that match the names of parameters, for files whose exporter did not mark them."""
    batch_dims: Mapping[str, int | None]
    """Data input -> its batch dim, or None if it has none; by default the leading dim."""
    loss: str | None
    """Loss to append (`cross_entropy` or `mse`), see `ir.loss.with_loss`; by default none."""
