"""Checks of outputs that options name. They run before the work, so that no work is lost because of a wrong path."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from automap.errors import PlanError


def writable(path: Path | None) -> Path | None:
    """The file of an option, after a check that it can be written; None without one.

    Raises:
        PlanError: it cannot be written; says why.
    """
    if path is None:
        return None
    if path.is_dir():
        why = "is a folder"
    elif not path.parent.is_dir():
        why = "there is no such folder"
    elif not os.access(path.parent, os.W_OK):
        why = "you may not write into the folder"
    else:
        return path
    repair = "Name a file in a folder of yours."
    raise PlanError(f"cannot be written: {why}", field="output", value=str(path), repair=repair)


def makable(option: typer.CallbackParam, folder: Path) -> Path:
    """The folder of an option, after a check that it can be written, or made if there is none.

    Raises:
        PlanError: neither is possible.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        repair = "Name a folder of yours, or one that can be made."
        raise PlanError(
            "the folder cannot be made or written", field=str(option.name), value=str(folder), repair=repair
        )
    return folder


def drawable(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """The picture of an option, after a check that it can be written and is of a known kind; None without one.

    Raises:
        PlanError: it cannot be written, or its name ends in none of the known kinds.
    """
    if writable(path) is not None and path is not None:
        from service.drawing.charts import check_kind

        check_kind(path, str(option.name))
    return path
