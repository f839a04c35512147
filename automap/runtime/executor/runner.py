"""A plan on one rank of this host: its stages joined to a pipeline, with made-up values and an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from automap.errors import PlanError
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.runtime.executor.optimizer import Optimizer
from automap.runtime.executor.pipeline import Data, Ends, Pipeline, action_lists, global_order
from automap.runtime.executor.replica_averaging import Replicas, replica_share
from automap.runtime.executor.stage import Sharded, build_programs
from automap.runtime.executor.synthetic_data import RandomData, RandomValues
from automap.runtime.mesh_groups import Groups, Mesh

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision -> type of parameters, gradients and activations; moments and masters are float32."""


class Runner:
    """A plan on one rank, ready to take steps.

    Attributes:
        losses: of the steps so far, on the ranks that know them; where replicas are apart, of their own samples.
        period: steps of a round, after which the same collectives come again.
    """

    def __init__(self, problem: Problem, plan: Plan, rank: int, seed: int, device: torch.device) -> None:
        """Builds the stages of this rank.

        Args:
            problem: what the plan is for.
            plan: to be executed.
            rank: of this process, a device number of the plan.
            seed: of parameters and data.
            device: of this process.

        Raises:
            PlanError: the plan is illegal, or cannot be executed exactly.
        """
        graph = problem.graph
        if problem.precision not in DTYPES:
            raise PlanError(
                "is not executed",
                field="plan.training.precision",
                value=problem.precision,
                repair=f"Use one of {', '.join(DTYPES)}.",
            )
        dtype = DTYPES[problem.precision]
        torch.backends.cuda.matmul.allow_tf32 = problem.precision == "tf32"
        self.pipeline, self.programs = join(
            Evaluator(problem), plan, rank, RandomValues(graph, seed), Groups(), dtype=dtype, device=device
        )
        self._data: Data = RandomData(graph, plan.samples_per_micro_batch, seed, dtype, device)
        leaves = {f"{n}.{name}": leaf for n, p in self.programs.items() for name, leaf in p.parameters.items()}
        self._optimizer = Optimizer(leaves, problem.training.optimizer)
        self._replicas = replicas_of(plan, self.programs, self._optimizer.masters)
        self.period = plan.sync.period or 1
        self.losses: list[float] = []

    def step(self) -> None:
        """One training step."""
        loss = self.pipeline.step(self._data)
        if loss is not None:
            self.losses.append(loss)
        self._optimizer.step()
        if self._replicas is not None and self._replicas.after_step():
            self._optimizer.publish()
        self.pipeline.refresh()

    def round(self) -> None:
        """The steps from one averaging of replicas to the next; a single one where they are synchronous."""
        for _ in range(self.period):
            self.step()

    def finish(self) -> None:
        """Makes replicas equal that are apart."""
        if self._replicas is not None:
            self._replicas.finish()
            self._optimizer.publish()


def replicas_of(plan: Plan, programs: Mapping[int, Sharded], parameters: Sequence[Tensor]) -> Replicas | None:
    """What keeps the replicas of a plan together, None where they are synchronous or this rank has no part in it.

    Args:
        plan: to be executed.
        programs: of this rank, by number of the stage.
        parameters: that the optimizer works on.
    """
    stage = next((program.stage for program in programs.values()), None)
    axis = None if stage is None else stage.mesh.apart
    return None if stage is None or axis is None else Replicas(plan.sync, parameters, axis, replica_share(stage))


def join(
    evaluator: Evaluator,
    plan: Plan,
    rank: int,
    values: Mapping[str, Tensor],
    groups: Groups,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> tuple[Pipeline, dict[int, Sharded]]:
    """The pipeline of a plan and the programs of this rank in it.

    Args:
        evaluator: of the problem that the plan is for.
        plan: to be executed.
        rank: of this process, a device number of the plan.
        values: parameters, buffers and stored constants, see `build_programs`.
        groups: see `build_programs`.
        dtype: of floating-point tensors.
        device: of this process; None = the CPU.

    Raises:
        PlanError: the plan is illegal, cannot be executed exactly, or its order cannot be finished.
        ModelError: a value is missing or of another shape.
    """
    device = device or torch.device("cpu")
    outlines, programs = build_programs(plan, evaluator, rank, values, groups, dtype=dtype, device=device)
    stages = [
        Ends(
            ranks=o.mesh.devices,
            inputs=o.inputs,
            outputs=o.outputs,
            parameters=o.parameters,
            replicas=replicas_on(o.mesh),
        )
        for o in outlines
    ]
    order = global_order(action_lists(plan), stages)
    return Pipeline(stages, programs, order, rank, device), programs


def replicas_on(mesh: Mesh) -> tuple[int, ...]:
    """Of each rank the number of its replica; empty where none are apart."""
    axis = mesh.apart
    return () if axis is None else tuple(mesh.coordinates(i)[axis.number] for i in range(len(mesh.devices)))
