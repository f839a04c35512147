"""Pipelines of torch that run the schedules of plans, with ZeRO of every stage inside.

1F1B, GPipe and interleaved schedules are torch's classes. All others, and 1F1B of fewer micro-batches than stages, are
given to torch's runtime as lists of actions, in the words that plans use (`automap.schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining._backward import (
    construct_reverse_graph,
    get_param_groups,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, _Action, _PipelineScheduleRuntime

from automap.plan import Plan
from automap.runtime.trainer.running_statistics import StatisticsKept
from automap.schedule import write_order

SINGLE = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class _Stage(PipelineStage):
    """A stage with two corrections of torch's own.

    Running statistics do not count the random samples with which torch finds the shapes of tensors. And zero-bubble
    schedules divide a backward pass into the gradients of the stage's input and those of its weights. If the input has
    no gradient, because all stages before are frozen, torch would compute no gradients of weights at all; and the
    backward pass of compiled code, or of weights that are used in several places, cannot be divided. In these cases the
    first part is the whole pass, and the second part does nothing.
    """

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Runs a backward pass, or a part of one."""
        if backward_type == "input" and not _comes_apart(self.submod, bwd_kwargs):
            found, _ = super().backward_maybe_with_nosync("full", _as_whole(bwd_kwargs), last_backward)
            return found, []
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def _forward_metadata_inference(self, *args: Any, **kwargs: Any) -> Any:
        with StatisticsKept(self.submod):
            return super()._forward_metadata_inference(*args, **kwargs)


def _as_whole(first_part: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of torch's whole backward pass, made from those of its first part.

    In the last stage these contain the loss, which torch has in a tuple for the first part only.
    """
    outputs = first_part["stage_output"]
    return {**first_part, "stage_output": outputs[0] if first_part["output_grads"] is None else outputs}


def _pass(given: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """The outputs of a stage, their gradients, and its inputs."""
    return given["stage_output"], given["output_grads"], given["input_values"]


def _comes_apart(stage: nn.Module, first_part: Mapping[str, Any]) -> bool:
    """Whether torch can divide a backward pass of a stage into gradients of its inputs and of its weights.

    Torch computes the gradient of a weight from the nodes in which the weight's graph meets that of the inputs, and
    frees what is behind these. If there are several nodes, such as the first and the last product of a decoder whose
    embedding is tied to its head, then whole layers are behind one of them, with the nodes of other weights.

    Args:
        stage: the modules of the stage.
        first_part: the arguments of the first part of the pass.
    """
    # What `nn.Module.compile` makes has no public name.
    is_compiled = any(part._compiled_call_impl is not None for part in stage.modules())
    read = _nodes(first_part["input_values"])
    if is_compiled or not read:
        return False
    graph = construct_reverse_graph(_nodes(first_part["stage_output"]))
    groups = get_param_groups(read, _nodes(stage.parameters()), graph)
    return all(len(group["intermediates"]) == 1 for group in groups)


def _nodes(values: Iterable[Any]) -> list[Any]:
    """The nodes of the backward graph that have made some tensors, or in which their gradients are added up."""
    return [get_gradient_edge(x).node for x in values if isinstance(x, Tensor) and x.requires_grad]


class _ScatteringStage(_Stage):
    """A stage under ZeRO 2 or 3 that scatters gradients after every micro-batch; torch's own keeps them whole until the
    last one."""

    def __init__(self, *args: Any, frees_weights: bool, **kwargs: Any) -> None:
        """Takes what `PipelineStage` takes.

        Args:
            frees_weights: whether the weights of other ranks are freed after each pass (ZeRO 3).
        """
        super().__init__(*args, **kwargs)
        self._frees_weights = frees_weights

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Runs a backward pass as without a pipeline; if it is divided, gradients are scattered in the second part."""
        assert isinstance(self.submod, FSDPModule)
        is_first_part = backward_type == "input"
        self.submod.set_is_last_backward(not is_first_part)
        self.submod.set_reshard_after_backward(self._frees_weights)
        self.submod.set_requires_gradient_sync(not is_first_part)
        if backward_type == "full":
            return stage_backward(*_pass(bwd_kwargs)), None
        for unit in self.submod.modules():
            if isinstance(unit, FSDPModule):
                # Both parts need the weights: they look for them in the graph, and recompute with them.
                unit.unshard()
        if is_first_part and not _comes_apart(self.submod, bwd_kwargs):
            return stage_backward(*_pass(_as_whole(bwd_kwargs))), []
        if is_first_part:
            return stage_backward_input(*_pass(bwd_kwargs), self.submod.parameters())
        found = stage_backward_weight(self.submod.parameters(), bwd_kwargs["param_groups"])
        # No hook of FSDP2 runs in a backward pass from the middle of the graph; `perform_reduce_grad` does the same.
        state = fully_shard.state(self.submod)  # type: ignore[attr-defined]
        for each in state._state_ctx.all_states:
            for group in each._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()
        return found, None


class _Runtime(_PipelineScheduleRuntime):
    """torch's runtime for any order of actions."""

    def __init__(self, order: Sequence[Sequence[str]], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._prepare_schedule_with_comms(
            {rank: [_Action.from_str(text) for text in actions] for rank, actions in enumerate(order)}
        )


def make_schedule(
    plan: Plan,
    stages: dict[int, nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    zero: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Any:
    """The schedule of a plan's pipeline on this rank.

    Args:
        plan: a plan of several stages.
        stages: the number of each stage of this rank, and its modules.
        loss: (outputs, labels) of a micro-batch -> its term of the loss.
        zero: the ZeRO stage of the modules.
        device: the device of this process.
        group: the pipeline ranks.
    """
    number, count, kind = len(plan.stages), plan.num_micro_batches, plan.schedule.kind
    make: Any = _Stage
    if zero > 1:
        make = lambda *args, **kwargs: _ScatteringStage(*args, frees_weights=zero == 3, **kwargs)  # noqa: E731
    made = [make(stage, n, number, device, group=group) for n, stage in stages.items()]
    settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
    # torch's 1F1B needs at least one micro-batch for each stage.
    if kind in SINGLE and (kind == "gpipe" or count >= number):
        return SINGLE[kind](made[0], count, **settings)
    if kind == "interleaved":
        schedule: Any = ScheduleInterleaved1F1B(made, count, **settings)
    else:
        order = plan.schedule.order or write_order(kind, group.size(), number, count)
        schedule = _Runtime(order, made, count, **settings)
    if zero == 3:
        # Weights are gathered module by module in each pass, not all of them around all passes.
        for action in (UNSHARD, RESHARD):
            schedule.register_custom_function(action, lambda action, context: None)
        schedule._assert_unsharded = lambda stage: None
    return schedule
