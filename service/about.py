"""The version of the package."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The version as installed; `0+unknown` for a checkout that is only on the path."""
    try:
        return importlib.metadata.version("automap")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
