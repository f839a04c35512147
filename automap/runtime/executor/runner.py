"""A plan on one rank of this host: its stages joined to a pipeline, with synthetic values and an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from automap.errors import PlanError
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.price.local_sgd import replica_axis
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.runtime.executor.action_order import action_lists
from automap.runtime.executor.optimizer import Optimizer
from automap.runtime.executor.pipeline import Data, Pipeline
from automap.runtime.executor.replica_averaging import Replicas, replica_share
from automap.runtime.executor.routes import StageBorder, global_order
from automap.runtime.executor.stage_executor import StageExecutor, loss_scale
from automap.runtime.executor.stage_program import stage_programs
from automap.runtime.executor.synthetic_data import RandomData, RandomValues
from automap.runtime.mesh_groups import Groups, make_meshes
from automap.runtime.number_formats import set_tf32

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision -> the type of parameters, gradients and activations; moments and masters are float32."""


class Runner:
    """A plan on one rank, ready to take steps.

    Attributes:
        losses: the losses of the steps so far, on the ranks that know them; where replicas are trained apart, the
            losses of their own samples.
        period: the number of steps between two averages of replicas, 1 where training is synchronous.
    """

    def __init__(self, problem: Problem, plan: Plan, rank: int, seed: int, device: torch.device) -> None:
        """Builds the stages of this rank.

        Args:
            rank: the number of this process, a device number of the plan.

        Raises:
            PlanError: the plan is illegal, or cannot be executed exactly.
        """
        graph = problem.graph
        if problem.precision not in DTYPES:
            raise PlanError(
                "is not executed", field="plan.training.precision", value=problem.precision,
                repair=f"Use one of {', '.join(DTYPES)}.",
            )  # fmt: skip
        dtype = DTYPES[problem.precision]
        set_tf32(on=problem.precision == "tf32")
        self.pipeline, self.executors = join(
            Evaluator(problem), plan, rank, RandomValues(graph, seed), Groups(), dtype=dtype, device=device
        )
        self._data: Data = RandomData(graph, plan.samples_per_micro_batch, seed, dtype, device)
        leaves = {f"{n}.{name}": leaf for n, e in self.executors.items() for name, leaf in e.parameters.items()}
        self._optimizer = Optimizer(leaves, problem.training.optimizer)
        self._replicas = replicas_of(plan, self.executors, self._optimizer.masters)
        self.period = plan.sync.period or 1
        self.losses: list[float] = []

    def step(self) -> None:
        """Takes one training step."""
        loss = self.pipeline.step(self._data)
        if loss is not None:
            self.losses.append(loss)
        self._optimizer.step()
        if self._replicas is not None and self._replicas.after_step():
            self._optimizer.publish()
        self.pipeline.refresh()

    def round(self) -> None:
        """Takes the steps from one average of replicas to the next; one step where training is synchronous."""
        for _ in range(self.period):
            self.step()

    def finish(self) -> None:
        """Averages replicas that are trained apart, so that all are equal."""
        if self._replicas is not None:
            self._replicas.finish()
            self._optimizer.publish()


def replicas_of(plan: Plan, executors: Mapping[int, StageExecutor], parameters: Sequence[Tensor]) -> Replicas | None:
    """Averages the replicas of a plan; None where training is synchronous or this rank has no part in it.

    Args:
        executors: the stages of this rank, by number.
        parameters: the tensors that the optimizer updates.
    """
    program = next((executor.program for executor in executors.values()), None)
    axis = None if program is None else program.mesh.apart
    if program is None or axis is None:
        return None
    return Replicas(plan.sync, parameters, axis, replica_share(program))


def join(
    evaluator: Evaluator,
    plan: Plan,
    rank: int,
    values: Mapping[str, Tensor],
    groups: Groups,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> tuple[Pipeline, dict[int, StageExecutor]]:
    """The pipeline of a plan, and the executors of the stages that this rank is part of, by number.

    Args:
        rank: the number of this process, a device number of the plan.
        values: whole parameters, buffers and stored constants, under the names of the graph or of its file.
        groups: process groups, kept from plan to plan. All ranks must join the same plans in the same order.
        dtype: the type of floating-point tensors.
        device: the device of this process; None = the CPU.

    Raises:
        PlanError: the plan is illegal, cannot be executed exactly, or its order cannot be finished.
        ModelError: a value is missing or of another shape.
    """
    device = device or torch.device("cpu")
    lowered = lower_plan(plan, evaluator)
    if plan.sync.kind != "synchronous":
        replica_axis(plan, lowered, evaluator)
    programs = stage_programs(plan, lowered, evaluator, make_meshes(plan, lowered.axes, rank, groups), dtype)
    scale = loss_scale(evaluator.problem.graph, plan.num_micro_batches, plan.samples_per_micro_batch)
    executors = {
        program.number: StageExecutor(program, values, plan, scale / replica_share(program), device)
        for program in programs
        if program.mesh.is_mine
    }
    stages = [
        StageBorder(
            ranks=p.mesh.devices, inputs=p.inputs, outputs=p.outputs, parameters=p.parameters, replicas=p.mesh.replicas
        )
        for p in programs
    ]
    order = global_order(action_lists(plan), stages)
    return Pipeline(stages, executors, order, rank, device), executors
