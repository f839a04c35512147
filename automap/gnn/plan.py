"""The plan document `automap.gnn-plan/1`: the machine of each task, the order of the flows, and the predicted time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np

from automap.arrays import Ints
from automap.errors import PlanError, one_of
from automap.gnn.problem import Bound, GnnProblem
from automap.records import Range, from_json, json_schema, to_json

if TYPE_CHECKING:
    from automap.gnn.simulator import Simulator

SCHEMA: Final = "automap.gnn-plan/1"
Seconds = Annotated[float, Range(0.0, 1e18)]
Schedule = Literal["priority", "fifo", "fair", "srpt", "coflow"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemRef:
    """The problem that the plan is for."""

    name: str
    """Name of the problem; the digest decides."""
    sha256: str
    """SHA-256 of the problem document, written with sorted keys and without blanks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GnnEstimate:
    """The predicted time of an iteration, simulated with other volumes than those of the search."""

    iteration_s: Seconds
    """Makespan over the number of iterations, mean over the draws."""
    low_s: Seconds
    """The same of the fastest draws: 5th percentile."""
    high_s: Seconds
    """The same of the slowest draws: 95th percentile."""
    lower_bound_s: Seconds
    """Lower bound for this placement under any order of the flows; mean over the draws."""
    bound_by: Bound
    """The cause of the lower bound."""
    iterations: int
    """Iterations of a draw."""
    draws: int
    """Number of draws."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GnnSearch:
    """How the plan was found."""

    searcher: str
    """The part of the search that found the placement."""
    evaluations: int
    """Number of simulated placements."""
    seconds: float
    """Length of the search."""
    seed: int
    """Seed of all random choices."""
    is_optimal: bool
    """Whether all feasible placements were compared, with the volumes of the search and flows by critical path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GnnPlan:
    """A placement and an order of flows."""

    schema: Literal["automap.gnn-plan/1"] = SCHEMA
    """Name and version of this form."""
    problem: ProblemRef
    """The problem that the plan is for."""
    placement: Mapping[str, str]
    """Task -> machine."""
    schedule: Schedule = "priority"
    """How flows share interfaces, see `automap.gnn.kernels.simulation.POLICIES`."""
    priorities: tuple[tuple[str, str], ...]
    """Source and target of the flows, the most urgent first; a flow of an earlier iteration is served before."""
    estimate: GnnEstimate
    """The predicted time of an iteration."""
    against: Mapping[str, Seconds]
    """Name of a simple rule for placements -> seconds of an iteration with it and its best schedule, for the same
    volumes."""
    search: GnnSearch
    """How the plan was found."""
    why: tuple[str, ...] = ()
    """Sentences about the parts of the time of an iteration."""

    @staticmethod
    def from_json(document: object, *, path: str = "plan") -> GnnPlan:
        """Reads a document.

        Raises:
            PlanError: names the field, the value and the repair.
        """
        return from_json(GnnPlan, document, path=path, error=PlanError)

    def to_json(self) -> dict[str, Any]:
        """The document."""
        found: dict[str, Any] = to_json(self)
        return found

    def places(self, simulator: Simulator) -> Ints:
        """[tasks] machine of each task.

        Args:
            simulator: of the problem that the plan is for.

        Raises:
            PlanError: the plan is for another problem, leaves a task out, or fills a machine too far.
        """
        problem = simulator.problem
        if self.problem.sha256 != digest(problem):
            raise PlanError(
                "the plan is for another problem",
                field="plan.problem.sha256",
                value=self.problem.sha256[:12],
                repair=f"Search again; the problem given is {digest(problem)[:12]}.",
            )
        numbers = {machine.name: number for number, machine in enumerate(problem.machines)}
        found = np.empty(len(problem.tasks), dtype=np.int64)
        for at, task in enumerate(problem.tasks):
            name = self.placement.get(task.name, "nothing")
            if name not in numbers:
                field = f"plan.placement.{task.name}"
                raise PlanError("unknown machine", field=field, value=name, repair=one_of(numbers, name))
            found[at] = numbers[name]
        if not simulator.fits(found):
            raise PlanError(
                "the placement breaks a limit of the problem",
                field="plan.placement",
                value="more than a machine has room for, or a pinned task elsewhere",
                repair="Search again.",
            )
        return found

    def ranks(self, problem: GnnProblem) -> Ints:
        """[flows] place of each flow of the problem in `priorities`.

        Raises:
            PlanError: a flow is missing or unknown.
        """
        flows = [(flow.source, flow.target) for flow in problem.flows]
        if sorted(flows) != sorted(self.priorities):
            raise PlanError(
                "these are not the flows of the problem",
                field="plan.priorities",
                value=f"{len(self.priorities)} flows",
                repair=f"Name each of the {len(flows)} flows of the problem once.",
            )
        at = {flow: number for number, flow in enumerate(self.priorities)}
        return np.array([at[flow] for flow in flows], dtype=np.int64)


def digest(problem: GnnProblem) -> str:
    """SHA-256 of a problem, see `ProblemRef`."""
    return hashlib.sha256(json.dumps(problem.to_json(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def gnn_plan_schema() -> dict[str, Any]:
    """JSON Schema of plans."""
    return json_schema(GnnPlan, title=SCHEMA)
