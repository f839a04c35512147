"""Temporary folders that are removed even when the process that made them was killed: by the next that begins."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

_FORM = re.compile(r"automap-(?:job|redis)-(\d+)-\w+")


def make(kind: str) -> str:
    """Makes a folder of this process; `kind` is `job` or `redis`."""
    return tempfile.mkdtemp(prefix=f"automap-{kind}-{os.getpid()}-")


def sweep() -> None:
    """Removes the folders of processes that are gone."""
    for path in Path(tempfile.gettempdir()).iterdir():
        owner = _FORM.fullmatch(path.name)
        if owner is not None and _is_ours(path) and not _lives(int(owner[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid() and not path.is_symlink()
    except FileNotFoundError:
        return False


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
