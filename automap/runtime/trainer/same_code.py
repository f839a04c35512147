"""Whether the code of a network computes what the graph computes that a plan was searched for.

Names and sizes of parameters do not tell: code with another activation, mask or order of its layers has the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from automap.runtime.operators.apply import run
from automap.runtime.trainer.running_statistics import StatisticsKept
from automap.runtime.trainer.split_check import PROBE_ULPS, evaluating, probe_inputs
from automap.runtime.trainer.training_graph import input_names, scores_of
from ir.errors import ModelError
from ir.graph import Graph

PROBED = 2
"""The samples on which graph and network are compared: two, so that one can leak into the other."""


def difference(
    graph: Graph, values: Mapping[str, Tensor], inputs: Sequence[Tensor], scores: Tensor
) -> tuple[float, float]:
    """By how much the scores of a graph differ from those of a network, in float32, and what rounding explains.

    Args:
        graph: a graph with a loss.
        values: the parameters and buffers of the network under all of their names.
        inputs: inputs of `PROBED` samples.
        scores: what the network computes of them.

    Raises:
        RuntimeError: of an operator that holds at the exported batch alone.
        ModelError: an operator or a constant cannot be computed.
    """
    narrow = {n: t.detach().float() if t.is_floating_point() else t for n, t in values.items()}
    names = [tensor.name for tensor in graph.data_inputs]
    given = {n: x.float() if x.is_floating_point() else x for n, x in zip(names, inputs, strict=True)}
    labels = graph.tensors[graph.operators[-1].inputs[1]]
    given[labels.name] = torch.zeros(labels.shape_at(PROBED), dtype=torch.int64, device=scores.device)
    with torch.no_grad():
        found = run(graph, {**narrow, **given}, PROBED)[graph.outputs[0]]
    eps = max(torch.finfo(scores.dtype).eps, torch.finfo(torch.float32).eps)
    limit = PROBE_ULPS * eps * float(scores.abs().max())
    return float((found - scores).abs().max()) if found.shape == scores.shape else torch.inf, limit


def warn_of_other_code(module: nn.Module, graphs: Sequence[Graph]) -> None:
    """Warns where a network computes something else than each of some graphs, for random samples.

    Args:
        module: the network before anything of it is changed; without dropout, and with the statistics of the samples.
        graphs: the graph of the plan, and what may stand for it.
    """
    if any(op.kind in ("Dropout", "Bernoulli") or op.kind.startswith("Random") for op in graphs[0].operators):
        return
    inputs = probe_inputs(graphs[0], module, PROBED)
    values = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    try:
        scores = _scores(module, inputs, input_names(graphs[0], module))
        found = [difference(graph, values, inputs, scores) for graph in graphs]
    except (ModelError, RuntimeError, TypeError, ValueError, IndexError):
        return  # What reads the network says what is wrong with it; graphs of old files may lack values of constants.
    error, limit = min(found)
    if error > limit:
        warnings.warn(
            f"module: computes something else than the model of the plan: scores differ by {error:.1e} where "
            f"{limit:.1e} is rounding. It is trained as it is, but prices and memory are those of the other code. "
            "Export the module again, and search with that.",
            stacklevel=3,
        )


def _scores(module: nn.Module, inputs: list[Tensor], names: tuple[str, ...]) -> Tensor:
    """The scores as a graph computes them: without dropout, and normalised by the statistics of the samples."""
    with evaluating(module), torch.no_grad():
        for part in module.modules():
            part.training = isinstance(part, _BatchNorm)
        with StatisticsKept(module):
            return scores_of(module, inputs, names)
