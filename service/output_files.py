"""Files that users name as outputs. Each is written whole or not at all: a full disk leaves what stood there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from automap.errors import PlanError


def replace_file(path: Path, data: str | bytes) -> None:
    """Writes a file, a text as UTF-8; a pipe or a device is written as it is.

    Raises:
        OSError: it cannot be written. What stood there before stays.
    """
    written = data.encode() if isinstance(data, str) else data
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(written)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(written)
        if path.exists():
            shutil.copymode(path, part)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_output(path: Path, data: str | bytes, *, repair: str = "Name another file.") -> None:
    """Writes the file of the option `--output`, see `replace_file`.

    Args:
        path, data: see `replace_file`.
        repair: what the user can do where the file cannot be written.

    Raises:
        PlanError: it cannot be written. What stood there before stays.
    """
    try:
        replace_file(path, data)
    except OSError as fault:
        raise PlanError(
            f"cannot be written ({fault.strerror})", field="output", value=str(path), repair=repair
        ) from None
