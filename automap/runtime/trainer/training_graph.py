"""The graph that a network is trained by, and how data goes into the network and scores come out of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from automap.errors import ModelError, PlanError
from automap.plan import Plan
from automap.runtime import transformers_models
from automap.runtime.torch_export import export_config
from automap.stated_model import frozen_as_stated
from ir import zoo
from ir.graph import Graph
from ir.loss import with_loss
from ir.onnx.load import load_model


def training_graph(model: str | Path | Graph, plan: Plan) -> Graph:
    """The graph of a plan's model, with the loss of the plan.

    Args:
        model: the ONNX file that was searched, `zoo:NAME`, `hf:FOLDER`, which is exported again, or a graph:
            `ir.onnx.load.load_model` reads a file about which something is to be said, as `--dim` does.
        plan: a plan of the model.

    Raises:
        ModelError: the file or the configuration cannot be read.
        ProblemError: the plan freezes parameters that the model does not have.
    """
    return frozen_as_stated(_whole_graph(model, plan), plan.training.frozen)


def _whole_graph(model: str | Path | Graph, plan: Plan) -> Graph:
    """The graph of a model with its loss, before the parameters that only the plan freezes are marked."""
    if isinstance(model, Graph):
        return with_loss(model, plan.training.loss)
    if str(model).startswith(zoo.PREFIX):
        return zoo.build(str(model), loss=plan.training.loss)
    if str(model).startswith(transformers_models.PREFIX):
        data = export_config(str(model), name=plan.model.name)
    else:
        data = _read(Path(model))
    return with_loss(load_model(data, name=plan.model.name), plan.training.loss)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        repair = "Give what was searched: the ONNX file, zoo:NAME or hf:FOLDER."
        text = f"cannot be read ({fault.strerror})"
        raise ModelError(text, field="model", value=str(path), repair=repair) from None


def input_names(graph: Graph, module: nn.Module) -> tuple[str, ...]:
    """The names by which a network takes its inputs; empty = it takes them in the order of the graph.

    Files have the names of the arguments of `forward`, which need not be its first ones.
    """
    # A buffer or a parameter may have the name of an argument, and its input another one then (`torch_export`).
    names = tuple(tensor.argument for tensor in graph.data_inputs)
    return names if set(names) <= inspect.signature(module.forward).parameters.keys() else ()


def scores_of(module: nn.Module, inputs: tuple[Tensor, ...] | list[Tensor], names: tuple[str, ...]) -> Tensor:
    """The scores that a network computes.

    Args:
        module: it returns them alone, first in a tuple, or as `logits` of a mapping, as models of transformers do, or
            of a dataclass.
        inputs: its inputs in the order of the graph.
        names: see `input_names`.

    Raises:
        PlanError: the network returns no scores.
    """
    found: Any = module(**dict(zip(names, inputs, strict=True))) if names else module(*inputs)
    if isinstance(found, Mapping):
        found = found.get("logits")
    elif dataclasses.is_dataclass(found):
        found = getattr(found, "logits", None)
    elif isinstance(found, tuple | list) and found:
        found = found[0]
    if not isinstance(found, Tensor):
        raise PlanError(
            "returns no scores", field="module", value=type(found).__name__,
            repair="Return the scores alone, first in a tuple, or as `logits` of a dictionary or a dataclass.",
        )  # fmt: skip
    return found
