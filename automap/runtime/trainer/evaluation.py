"""Evaluation between two steps of a training: forward passes that have no effect on the training.

Two side effects of forward passes are undone. Under ZeRO, gathered weights are freed: after the next step of the
optimizer they would be out of date. Gradients get back their values, because torch's pipelines add zeros to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer.common_generators import generators_of
from automap.runtime.trainer.random_numbers import Draws
from automap.runtime.trainer.split_check import evaluating
from ir.loss import class_dim_of


@contextlib.contextmanager
def between_steps(module: nn.Module, stages: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """A context for forward passes in evaluation mode, without gradients and without any effect on the training.

    Args:
        module: the modules of this rank.
        stages: its stages, which hold them.
        device: the device that they are on.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        with evaluating(module), torch.no_grad(), torch.random.fork_rng(devices=generators_of(device)):
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


def traced_draw(stages: Sequence[nn.Module], training: Draws, evaluation: Draws) -> str:
    """Finds code between modules that draws random numbers in training only: traced stages would also draw them in
    evaluation.

    Args:
        stages: all stages of a pipeline.
        training: what the network draws in training.
        evaluation: what it draws in evaluation.

    Returns:
        The operator and its line of code; "" where there is none.
    """
    leaves = {
        str(node.target)
        for stage in stages
        for node in (stage.graph.nodes if isinstance(stage, torch.fx.GraphModule) else ())
        if node.op == "call_module"
    }
    for path, draws in training.items() if leaves else ():
        if not any(f"{path}.".startswith(f"{leaf}.") for leaf in leaves) and draws != evaluation.get(path):
            return draws[0].what
    return ""


def refuse_draw(place: str) -> PlanError:
    """The error for an evaluation of such stages."""
    return PlanError(
        "code between modules draws random numbers in training alone, and was traced as it trains", field="module",
        value=place,
        repair="Put it into a module, such as nn.Dropout, or evaluate by a plan without a pipeline.",
    )  # fmt: skip
