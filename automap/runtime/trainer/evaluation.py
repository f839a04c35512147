"""Evaluation between steps of a training: forward passes alone, after which the training goes on as if none had been.

What forward passes leave behind is put back: gathered weights of ZeRO, which would be those of before the next step of
the optimizer, and gradients, to which torch's pipelines add zeros.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.fx
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer.split_check import evaluating
from ir.loss import class_dim_of

DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}
"""Functions that drop in evaluation too, once a trace has written down that they are called in training."""


@contextlib.contextmanager
def between_steps(module: nn.Module, stages: Sequence[nn.Module]) -> Iterator[None]:
    """A context of forward passes in evaluation mode, without gradients, that a training does not notice.

    Args:
        module: the modules of this rank.
        stages: its stages, which hold them.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        with evaluating(module), torch.no_grad():
            yield
    finally:
        for unit in (part for stage in stages for part in stage.modules()):
            if isinstance(unit, FSDPModule):
                unit.reshard()
        for parameter, gradient in gradients:
            parameter.grad = gradient


def gather_classes(scores: Tensor, axis: Axis) -> Tensor:
    """Scores of all classes, from the equal parts that ranks have. A collective."""
    parts = [torch.empty_like(scores) for _ in range(axis.size)]
    dist.all_gather(parts, scores.contiguous(), group=axis.group)
    return torch.cat(parts, class_dim_of(scores.ndim))


def traced_dropout(stages: Sequence[nn.Module]) -> str:
    """The place in code between modules where a traced stage calls a dropout, which it does in evaluation as well."""
    for stage in stages:
        for node in stage.graph.nodes if isinstance(stage, torch.fx.GraphModule) else ():
            if node.op == "call_function" and node.target in DROPOUTS:
                given = {**dict(zip(("p", "training"), node.args[1:3], strict=False)), **node.kwargs}
                if given.get("p", 0.5) and given.get("training", given.get("train", True)):
                    return str(node.name)
    return ""


def refuse_dropout(place: str) -> PlanError:
    """The error for an evaluation of such stages."""
    return PlanError(
        "code between modules calls a dropout, which was traced as it trains", field="module", value=place,
        repair="Make it a module, nn.Dropout, or evaluate by a plan without a pipeline.",
    )  # fmt: skip
