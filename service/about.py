"""The version of the package."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """As installed; a checkout that is only on the path has none."""
    try:
        return importlib.metadata.version("automap")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
