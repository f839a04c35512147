"""Loads a function from a Python file that the user names (`FILE.py:FUNCTION`); only the command line does this."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automap.errors import ModelError


def load_function(source: str) -> Callable[[], Any]:
    """Runs the file and returns the function.

    Raises:
        ModelError: there is no such file or function.
    """
    file, _, function = source.rpartition(":")
    path = Path(file)
    if not path.is_file() or not function:
        repair = "Write FILE.py:FUNCTION, as in examples/gpt2.py:gpt2."
        raise ModelError("no such file", field="source", value=source, repair=repair)
    spec = importlib.util.spec_from_file_location(f"automap_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError("not a Python file", field="source", value=source, repair="Write FILE.py:FUNCTION.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and v.__module__ == spec.name and n.islower()]
        repair = "Name one of " + ", ".join(n for n in names if not n.startswith("_")) + "."
        raise ModelError("the file has no such function", field="source", value=function, repair=repair)
    result: Callable[[], Any] = found
    return result
