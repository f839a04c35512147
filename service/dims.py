"""Sizes of symbolic dims, and places of the batch, as users write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from automap.errors import ModelError

MAX_SIZE = 2**31 - 1
"""Largest size of a dim (assumed): far beyond the largest sequence and the largest vocabulary."""


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Reads `name=size` texts.

    Raises:
        ModelError: not such a text.
    """
    dims: dict[str, int] = {}
    for text in texts:
        key, _, size = text.partition("=")
        if not key or not re.fullmatch("-?[0-9]+", size):
            repair = "Write name=size, as in batch=1 or sequence=1024."
            raise ModelError("not a dim", field="dims", value=text, repair=repair)
        if len(size) > len(str(MAX_SIZE)) or not 1 <= int(size) <= MAX_SIZE:
            repair = f"Give a number from 1 to {MAX_SIZE}."
            raise ModelError("out of range", field=f"dims.{key}", value=size, repair=repair)
        if dims.setdefault(key, int(size)) != int(size):
            raise ModelError("two sizes", field=f"dims.{key}", value=f"{dims[key]} and {size}", repair="Give one.")
    return dims


def parse_batch_dims(texts: Sequence[str]) -> dict[str, int | None]:
    """Reads `input=dim` texts; `none` for an input without a batch.

    Raises:
        ModelError: not such a text.
    """
    dims: dict[str, int | None] = {}
    for text in texts:
        name, _, place = text.rpartition("=")
        if not name or not re.fullmatch("[0-9]{1,2}|none", place):
            repair = "Write input=dim, as in tokens=1, or input=none."
            raise ModelError("not a place of the batch", field="batch_dims", value=text, repair=repair)
        dim = None if place == "none" else int(place)
        if dims.setdefault(name, dim) != dim:
            found = "none" if dims[name] is None else dims[name]
            raise ModelError("two places", field=f"batch_dims.{name}", value=f"{found} and {place}", repair="Give one.")
    return dims
