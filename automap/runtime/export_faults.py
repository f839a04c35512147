"""Failures of modules and of torch's exporters as one sentence that names the module at fault."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from automap.errors import ModelError
from automap.runtime.transformers_models import is_transformers

if TYPE_CHECKING:
    from torch import nn

_DETECTION = "torchvision.models.detection"
"""The package of torchvision's detectors, which pick as many boxes as the data has."""
_MOST = 240
"""Characters of a foreign message that are kept (assumed); those of torch run over pages."""
_TARGET = re.compile(r"target=(?:torch\.ops\.)?([\w.]+)")
_COMPLEX = re.compile(r"complex(-valued|32|64|128)")
_NO_FUNCTION = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)'")


def while_building(build: Callable[[], Any], fault: Exception) -> ModelError:
    """The error of a function that raised before it returned a module."""
    line = fault.__traceback__
    file = getattr(getattr(build, "__code__", None), "co_filename", None)
    own = [frame for frame in _frames(line) if frame.tb_frame.f_code.co_filename == file]
    where = f" in line {own[-1].tb_lineno}" if own else ""
    return ModelError(
        f"the function fails{where}: {_first_line(fault)}",
        field="source",
        value=getattr(build, "__name__", str(build)),
        repair="Correct it; it is called with torch's meta device as the default, where tensors have no values.",
    )


def while_exporting(module: nn.Module, exported: Any, fault: Exception) -> ModelError:
    """The error of an export that failed.

    Args:
        module: the whole module.
        exported: the `torch.export.ExportedProgram`; None if that could not be made.
        fault: what the exporter raised.
    """
    chain = [fault]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        assert isinstance(cause, Exception)
        chain.append(cause)
    text = "\n".join(str(link) for link in chain)
    if exported is not None:
        return _untranslated(module, exported, text, chain[-1])
    path, where = innermost(module, chain)
    inside = type(module.get_submodule(path)).__name__
    if "data-dependent" in text or "DataDependent" in "".join(type(link).__name__ for link in chain):
        what = "branches or loops on the values of a tensor, which a graph cannot express"
        repair = _without_branch(type(module.get_submodule(path)))
    else:
        what = f"cannot be exported: {_first_line(chain[-1])}"
        repair = "Make its forward run under torch.export.export with the example inputs"
        repair += _or_other_inputs(module)
    named = f"{path} ({inside}{where})" if path else f"{inside}{where}"
    return ModelError(f"{named} {what}", field="module", value=path or inside, repair=repair)


def _or_other_inputs(module: nn.Module) -> str:
    """The end of a repair: of a model of transformers, whose example inputs were made for it, another way."""
    if not is_transformers(module):
        return "."
    return ", or return it with other ones from a function: automap export-onnx FILE.py:FUNCTION."


def _without_branch(kind: type[nn.Module]) -> str:
    """How to export a model of which a module of this class branches on values: the class may be that of a package."""
    if kind.__module__.startswith(_DETECTION):
        return "Export backbone and heads alone: docs/models.md has the module (Detectors)."
    package = kind.__module__.partition(".")[0]
    if package in importlib.metadata.packages_distributions():
        return (
            f"This is code of the package {package}. Write a function that builds the model and gives its modules of "
            f"the class {kind.__name__} a forward without the branch, and export it: automap export-onnx "
            "FILE.py:FUNCTION. docs/models.md has an example (Branches on values)."
        )
    return "Write it with operators on whole tensors (torch.where, masks), or export a model without it."


def _untranslated(module: nn.Module, exported: Any, text: str, fault: Exception) -> ModelError:
    """The error of an operator that torch's exporter cannot write as ONNX."""
    if _COMPLEX.search(text):
        what = "computes with complex numbers (view_as_complex, polar, fft), which ONNX does not have"
        repair = "Write it with real numbers, such as a rotary embedding with cosines and sines."
        return ModelError(what, field="module", value=type(module).__name__, repair=repair)
    found = _NO_FUNCTION.search(text) or _TARGET.search(text)
    if found is None:
        value, repair = type(module).__name__, "Send the message to the developers of torch.onnx."
        return ModelError(f"torch.onnx fails: {_first_line(fault)}", field="module", value=value, repair=repair)
    operator = found.group(1).replace("::", ".")
    # What is missing may be a part of what the module calls.
    value = _caller(exported, operator) or _caller(exported.run_decompositions(), operator) or type(module).__name__
    repair = "Use operators that ONNX has in its place, or leave this module out."
    text = f"{value} uses {operator}, which torch.onnx cannot write"
    return ModelError(text, field="module", value=value, repair=repair)


def _caller(exported: Any, operator: str) -> str:
    """The path of the first module that calls an operator; empty where none below the whole module does."""
    for node in exported.graph.nodes:
        # Functions of Python that take results apart, such as getitem, have no dot in their names.
        name = str(node.target).rpartition(".")[0]
        if node.op == "call_function" and name and f"{operator}.".startswith(f"{name}."):
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            return str(stack[-1][0]) if stack else ""
    return ""


def innermost(module: nn.Module, chain: list[Exception]) -> tuple[str, str]:
    """The path of the module whose forward raised, and the line of code where it did; both empty if none is known."""
    paths = {id(child): path for path, child in module.named_modules()}
    for link in reversed(chain):
        for frame in reversed(list(_frames(link.__traceback__))):
            held = frame.tb_frame.f_locals.get("self")
            # Frames of nn.Module itself (calls, hooks) hold the module too, and say nothing of it.
            if id(held) in paths and frame.tb_frame.f_code.co_name == "forward":
                line = f", {Path(frame.tb_frame.f_code.co_filename).name} line {frame.tb_lineno}"
                return paths[id(held)], line
    return "", ""


def _frames(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _first_line(fault: BaseException) -> str:
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    text = f"{type(fault).__name__}: {lines[0]}" if lines else type(fault).__name__
    return text if len(text) <= _MOST else text[: _MOST - 1] + "…"
