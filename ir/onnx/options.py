"""Options of a request about an ONNX file; also for the parent of the sandbox, which never imports onnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class ReadOptions(TypedDict, total=False):
    """Keyword arguments of every function that reads an ONNX file."""

    name: str
    """Name of the graph; by default the one in the file."""
    dims: Mapping[str, int]
    """Sizes of symbolic dims other than the batch."""
    parameters: Sequence[str]
    """Globs over the names of parameters, for files whose exporter did not mark them."""
    batch_dims: Mapping[str, int | None]
    """Data input -> its dim that is the batch, or None; by default the leading dim."""
    loss: str | None
    """Loss to append (`cross_entropy` or `mse`), see `ir.loss.with_loss`; by default none."""
