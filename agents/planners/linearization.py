"""The interface of planners that find the best signatures of a skeleton, all other decisions of a plan.

A planner gets the cost graph of the skeleton, made linear at one of its plans, and returns plans with exact prices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agents.incumbent import Incumbent
from automap.arrays import Floats
from automap.cost_graph.graph import CostGraph
from automap.cost_graph.sensitivities import Sensitivities

Worth = tuple[bool, float]
"""Key that sorts plans, the best first: (False, step time in seconds) of a plan that fits, (True, overflow of memory)
of one that does not."""


def worth_of(step_time_s: float, overflow: float) -> Worth:
    """The worth of a plan with this price."""
    return (overflow > 0.0, step_time_s if overflow <= 0.0 else overflow)


MUCH_BETTER = 0.95
"""A skeleton is solved a second time if the plan found takes at most this share of the step time of the plan at which
the costs were linear (assumed). On the skeletons of four models a second solve gained up to a third, a third one
nothing."""
NEAR_ENOUGH = 1.3
"""Largest step time of the plan found, as a multiple of that of the best plan of the search, for a second solve
(assumed)."""
ROUNDS_TO_FIT = 2
"""Number of further solves if no plan of the last one fits (assumed): memory may be fullest at another moment with the
plan found, so that its sensitivities differ. For a mixture of experts on 368 devices the first solve, at a plan that
overflows by 0.02, found plans that overflow by 0.27 and more. The solve at these found one that fits and is 1.2 times
faster than the best plan of other skeletons."""


def leads_on(found: Worth, given: Worth, best_s: float) -> bool:
    """Whether another solve, at the plan that the last one has found, is expected to gain more.

    The sensitivities of a bad plan say little about a good one. So another solve is expected to gain if the plan found
    fits and is not far from the best one, and the plan at which the costs were linear is much slower or does not fit.

    Args:
        found: worth of the plan found.
        given: worth of the plan at which the costs were linear.
        best_s: step time of the best plan of the search, in seconds.
    """
    is_over, seconds = found
    gains = given[0] or seconds <= MUCH_BETTER * given[1]
    return not is_over and gains and seconds <= NEAR_ENOUGH * best_s


def misled(found: Candidate, given_s: float, best_s: float) -> bool:
    """Whether the sensitivities of a given plan led to a plan that fits but is much slower, though the given plan is
    not far from the best one of the search.

    Such sensitivities hold only near the given plan: for instance, its slowest rank is not that of the plan found. A
    solve at the plan found knows the sensitivities of both. On a decoder with experts on 512 devices, the first solve
    made the step of 326 s 1.4 times longer, and the second one 10 % shorter.

    Args:
        found: the plan found.
        given_s: step time of the plan at which the costs were linear, in seconds.
        best_s: step time of the best plan of the search, in seconds.
    """
    is_slower = found.overflow <= 0.0 and MUCH_BETTER * found.seconds > given_s
    return is_slower and given_s <= NEAR_ENOUGH * best_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan of a skeleton with its exact price."""

    picked: tuple[int, ...]
    """[nodes] number of the value of each node of the cost graph."""
    seconds: float
    """Step time."""
    overflow: float
    """Overflow of memory as a share of a device's capacity; at most 0 where the plan fits."""

    @property
    def worth(self) -> Worth:
        """The worth of the plan."""
        return worth_of(self.seconds, self.overflow)


@dataclass(frozen=True, kw_only=True)
class Linearization:
    """What a planner is given: the cost graph of a skeleton, linear at one of its plans, and a way to price plans."""

    graph: CostGraph
    """Cost graph of the skeleton."""
    picked: tuple[int, ...]
    """[nodes] number of the value of each node in the plan at which the costs are linear."""
    at: Sensitivities
    """Sensitivities at that plan."""
    time: Floats
    """[rows, columns] sensitivities of the step time, averaged over the plans of this solve and those before it."""
    incumbent: Incumbent

    def price(self, picked: tuple[int, ...]) -> Candidate:
        """Prices a plan exactly; the incumbent keeps it if it is the best."""
        ((seconds, overflow),) = self.incumbent.price([self.graph.values(picked)]).tolist()
        return Candidate(picked=picked, seconds=seconds, overflow=overflow)


Propose = Callable[[Linearization], list[Candidate]]
"""A planner: it prices the plans that it finds best under the given sensitivities, at least one."""
