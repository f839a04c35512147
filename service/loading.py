"""Models that the command line alone takes, because they run code on this machine: a function of a Python file
(`FILE.py:FUNCTION`), and a configuration of transformers (`hf:FOLDER`)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from automap.errors import ModelError


def export_source(source: str, path: Path | None = None, *, opset: int = 20, name: str = "") -> tuple[bytes, str]:
    """The ONNX file of what `source` names, without weights, and the name of its model; empty = that of its class.

    Args:
        source: a function of a Python file, or a configuration (`automap.runtime.transformers_models.from_config`).
        path, opset, name: see `automap.runtime.torch_export.export_onnx`.

    Raises:
        ModelError: there is no such file, function or configuration, its model cannot be exported, or transformers is
            not installed.
    """
    from automap.runtime.torch_export import export_config, export_onnx
    from automap.runtime.transformers_models import PREFIX, name_of

    if source.startswith(PREFIX):
        name = name or name_of(source)
        return export_config(source, path, opset=opset, name=name), name
    return export_onnx(load_function(source), path, opset=opset, name=name), name


def load_function(source: str) -> Callable[[], Any]:
    """Runs the file and returns the function.

    Raises:
        ModelError: there is no such file or function, or the file fails.
        ModuleNotFoundError: PyTorch is not installed.
    """
    file, _, function = source.rpartition(":")
    path = Path(file)
    if not path.is_file():
        repair = "Write FILE.py:FUNCTION, as in examples/gpt2.py:gpt2."
        text = "names no function" if Path(source).is_file() else "no such file"
        raise ModelError(text, field="source", value=source, repair=repair)
    spec = importlib.util.spec_from_file_location(f"automap_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError("not a Python file", field="source", value=source, repair="Write FILE.py:FUNCTION.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    # The file may import what lies beside it, now or when the function runs, as it may where Python runs it.
    if (folder := str(path.parent.resolve())) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as fault:
        if isinstance(fault, ModuleNotFoundError) and fault.name == "torch":
            raise  # no fault of the file: the command line names the extra that installs it
        repair = f"Correct the file: `python {file}` shows where it fails."
        text = f"the file fails: {type(fault).__name__}: {fault}"
        raise ModelError(text, field="source", value=source, repair=repair) from None
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and v.__module__ == spec.name and n.islower()]
        repair = "Name one of " + ", ".join(n for n in names if not n.startswith("_")) + "."
        raise ModelError("the file has no such function", field="source", value=function, repair=repair)
    result: Callable[[], Any] = found
    return result
