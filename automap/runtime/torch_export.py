"""A PyTorch module as an ONNX file of a few MB: the graph without its weights.

The module is built on the meta device, so that a model of any size exports on a laptop. Parameters and buffers become
graph inputs; the exporter's metadata tells them apart (`InputSpec.kind`) and names the module of each operator
(`name_scopes`). Stack traces and all other paths of the exporting machine are removed.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

Build = Callable[[], "tuple[nn.Module, tuple[Tensor, ...]]"]

_SCOPES = "pkg.torch.onnx.name_scopes"
_KEPT_METADATA = frozenset(
    {"pkg.torch.export.graph_signature.InputSpec.kind", _SCOPES, "pkg.torch.onnx.class_hierarchy"}
)
# All other metadata names files of this machine (stack_trace) or repeats what is kept.


def export_onnx(build: Build, path: Path | None = None, *, opset: int = 20, name: str = "") -> bytes:
    """Exports a module without weights.

    Args:
        build: returns the module and example inputs; called under `torch.device("meta")`, so that nothing is
            allocated. The batch is the leading dim of the inputs and may be 1.
        path: the path of the file to be written; None = no file.
        opset: the version of ONNX's operator set.
        name: the name of the graph in the file; empty = the class of the module.

    Returns:
        The bytes of the file. Dropout is off and batch normalisation is one operator, as in evaluation mode: what
        training adds follows from the plan, not from the file.
    """
    import onnx_ir
    import torch
    from onnxscript import optimizer

    with quiet():
        with torch.device("meta"), torch.no_grad():
            module, inputs = build()
        module.eval()
        exported = torch.export.export(module, inputs)
        program: Any = torch.onnx.export(
            exported,
            dynamo=True,
            export_params=False,
            optimize=False,  # folding constants reads values, which meta tensors lack: it runs once they are inputs
            opset_version=opset,
            verbose=False,
        )
        model = program.model
        for key, value in list(model.graph.initializers.items()):
            if _without_values(value.const_value):
                del model.graph.initializers[key]
                value.const_value = None
                model.graph.inputs.append(value)
        optimizer.optimize_ir(model, num_iterations=1)
    model.graph.name = name or type(module).__name__
    _strip(model)
    data: bytes = onnx_ir.to_proto(model).SerializeToString(deterministic=True)
    if path is not None:
        path.write_bytes(data)
    return data


def _without_values(tensor: Any) -> bool:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    raw = getattr(tensor, "raw", None)
    return isinstance(raw, torch.Tensor) and (raw.device.type == "meta" or isinstance(raw, FakeTensor))


def _strip(model: Any) -> None:
    """Removes all metadata that the importer does not read."""
    holders = [model, model.graph, *model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph.all_nodes():
        holders += [node, *node.outputs]
        # A node that the optimiser inserted belongs to the module of its input.
        if _SCOPES not in node.metadata_props:
            sources = [value.producer() for value in node.inputs if value is not None]
            scopes = [
                source.metadata_props[_SCOPES] for source in sources if source and _SCOPES in source.metadata_props
            ]
            if scopes:
                node.metadata_props[_SCOPES] = scopes[0]
    for holder in holders:
        for key in [key for key in holder.metadata_props if key not in _KEPT_METADATA]:
            del holder.metadata_props[key]
        holder.doc_string = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context without the exporter's reports of progress, optional packages and deprecations."""
    loggers = [logging.getLogger("torch.onnx"), logging.getLogger("onnxscript"), logging.getLogger("onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
