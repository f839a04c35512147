"""Sizes of symbolic dims as users write them."""

from __future__ import annotations

from collections.abc import Sequence

from automap.errors import ModelError


def parse_dims(texts: Sequence[str]) -> dict[str, int]:
    """Reads `name=size` texts.

    Raises:
        ModelError: not such a text.
    """
    dims = {}
    for text in texts:
        key, _, size = text.partition("=")
        if not key or not size.isdecimal() or int(size) < 1:
            raise ModelError(
                "not a dim", field="dims", value=text, repair="Write name=size, as in batch=1 or sequence=1024."
            )
        dims[key] = int(size)
    return dims
