"""An independent check of a plan: what the document says, against the problem and nothing that found or priced it.

Written without the space, the price, their translator and the templates, so that a mistake in one of them shows. What
is shared is the graph (`ir`: factor rules, fused groups, units between legal cuts), the plan and problem documents, and
the meaning of names. Rules stand in `structure` (operators, devices, cuts, samples), `reading` (placements), `actions`
(the schedule), `obeyed` (hints), `replicas` (those that are averaged) and `memory`; `traffic` counts what parameters
and their gradients send, which no plan states, but which price and runtime must agree with.
"""

from __future__ import annotations

from automap.plan import DeviceMemory, Plan
from automap.problem import Problem
from automap.verify.hints import check_hints
from automap.verify.memory import Activations, Recount, check_memory
from automap.verify.reading import Chunk, Model, Violation, place, read_chunks, uneven
from automap.verify.replicas import check_replicas
from automap.verify.schedule import check_order
from automap.verify.structure import check_structure
from automap.verify.traffic import Traffic, count_traffic, exchanged

__all__ = ["Verifier", "Violation", "verify"]


class Verifier:
    """Checks plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self._model = Model(problem)

    def violations(self, plan: Plan) -> tuple[Violation, ...]:
        """See `verify`."""
        model = self._model
        found = check_structure(plan, model)
        if found:
            return found
        chunks = read_chunks(plan, model)
        found = tuple(v for chunk in chunks for v in place(chunk, model)) or tuple(
            v for chunk in chunks for v in uneven(chunk, model)
        )
        order = tuple(check_order(plan))
        if found or order:
            return (*found, *order)
        return (
            *check_hints(plan, chunks, model),
            *check_replicas(plan, chunks, model),
            *check_memory(plan, chunks, model),
        )

    def memory(self, plan: Plan) -> tuple[tuple[DeviceMemory, Activations], ...]:
        """Memory of the devices of each pipeline rank, and the bounds on an estimate of its activations.

        Args:
            plan: one that `violations` finds no other fault in.
        """
        return Recount(plan, self._chunks(plan), self._model).devices()

    def traffic(self, plan: Plan) -> dict[Traffic, float]:
        """Elements of parameters and gradients that each device of each pipeline rank sends, see `verify.traffic`.

        Args:
            plan: one that `violations` finds no fault in.
        """
        return count_traffic(self._chunks(plan), self._model)

    def exchanged(self, plan: Plan) -> dict[tuple[int, int], float]:
        """Elements of gradients that two pipeline ranks exchange, see `verify.traffic`.

        Args:
            plan: one that `violations` finds no fault in.
        """
        return exchanged(self._chunks(plan), self._model)

    def _chunks(self, plan: Plan) -> tuple[Chunk, ...]:
        chunks = read_chunks(plan, self._model)
        for chunk in chunks:
            assert not tuple(place(chunk, self._model)), "the plan has other faults"
        return chunks


def verify(problem: Problem, plan: Plan) -> tuple[Violation, ...]:
    """Everything that is wrong with a plan; empty if nothing is.

    Whether the plan is legal, obeys the hints, states the memory that it needs, and fits. Step times are not checked.
    Rules that rest on a broken one are left out.

    Args:
        problem: what the plan is for.
        plan: any plan document, with or without estimate.
    """
    return Verifier(problem).violations(plan)
