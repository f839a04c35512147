"""An independent check of a plan document against its problem.

It shares no code with the plan space, the price, their reader of plans and the templates, so that it finds mistakes in
them. It shares with them the graph (`ir`: factor rules, fused groups, units between legal cuts), the plan and problem
documents, and the meaning of names. Rules are in `structure` (operators, devices, cuts, samples), `reading`
(placements), `schedule`, `hints`, `target` (plans that its configuration can express), `replicas` (that are averaged)
and `memory`.
"""

from __future__ import annotations

from dataclasses import replace

from automap.plan import DeviceMemory, Plan
from automap.problem import Problem
from automap.verify.hints import check_hints
from automap.verify.memory import Recount
from automap.verify.model import Model
from automap.verify.moments import Moment
from automap.verify.reading import Violation, place_chunks, place_operators, read_chunks, uneven
from automap.verify.replicas import check_replicas
from automap.verify.schedule import check_order
from automap.verify.stated_memory import check_memory
from automap.verify.structure import check_structure
from automap.verify.target import check_target

__all__ = ["Verifier", "Violation", "verify"]


class Verifier:
    """Checks plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._model = Model(problem)

    def violations(self, plan: Plan, *, memory: bool = True) -> tuple[Violation, ...]:
        """All faults of a plan, see `verify`.

        Args:
            plan: the plan.
            memory: whether its memory is counted too, which takes longer than all other rules.
        """
        model = self._model
        found = check_structure(plan, model)
        if found:
            return found
        chunks = read_chunks(plan, model)
        found = tuple(v for chunk in chunks for v in place_operators(chunk, model)) or tuple(
            v for chunk in chunks for v in uneven(chunk, model)
        )
        order = tuple(check_order(plan))
        if found or order:
            return (*found, *order)
        return (
            *check_hints(plan, chunks, model),
            *check_target(plan, chunks, model),
            *check_replicas(plan, chunks, model),
            *(check_memory(plan, chunks, model) if memory else ()),
        )

    def beyond(self, plan: Plan, target: str) -> tuple[Violation, ...]:
        """The parts of a plan that the configuration of a target cannot express.

        Args:
            plan: a plan in which `violations` finds no fault, but for memory.
            target: a target, whatever the plan was searched for.
        """
        problem = self._model.problem
        model = Model(replace(problem, training=replace(problem.training, target=target)))
        return tuple(check_target(plan, place_chunks(plan, model), model))

    def memory(self, plan: Plan) -> tuple[tuple[DeviceMemory, Moment], ...]:
        """The memory of the devices of each pipeline rank in its fullest moment, and the bounds on an estimate of it.

        Args:
            plan: a plan in which `violations` finds no other fault.
        """
        return Recount(plan, place_chunks(plan, self._model), self._model).devices()


def verify(problem: Problem, plan: Plan) -> tuple[Violation, ...]:
    """All faults of a plan; empty if it has none.

    A sound plan is legal, obeys the hints, states the memory that it needs, and fits. Step times are not checked. Rules
    that depend on a broken rule are left out.

    Args:
        problem: the problem of the plan.
        plan: any plan document, with or without an estimate.
    """
    return Verifier(problem).violations(plan)
