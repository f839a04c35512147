"""Effort: how much is simulated before and after the search, so that all of it keeps to the budget.

After the search, schedules are compared for the plan found, and the plan is compared with simple rules, on volumes that
the search has not seen. For large problems this takes longer than the search itself; then fewer volumes and fewer
schedules are simulated. If the budget is a time, the duration of a simulation is measured. If it is a number of
simulations, the duration is computed from the size of the problem, so that two runs give the same plan. Units: seconds.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from agents.gnn.baselines import BASELINES
from agents.gnn.enumeration import simulation_s
from agents.searcher import Budget
from automap.arrays import Ints
from automap.gnn.plan import Schedule
from automap.gnn.simulator import Simulator

CLOSING_SHARE = 0.3
"""Largest share of a budget in seconds for what follows the search (assumed)."""
PATIENCE_S = 30.0
"""Seconds that this may take, as counted, where the budget is a number of simulations (assumed)."""
STARTS_SHARE = 0.2
"""Share of a budget in seconds after which no further placement to begin with is made (assumed)."""
STEP_SHARE = 0.01
"""Share of a budget in seconds between two looks at it (assumed)."""
FAIR = 10.0
"""Least time of a simulation of fair shares, relative to one by priority (measured: 10 with 1,792 flows)."""
FAIR_BY_FLOW = 1e-3
"""The same ratio for each flow of a large problem (measured: 57 with 61,360 flows)."""
PROPOSAL_S = 5e-8
"""Seconds of a change of a placement without a simulation, for each flow of a task in the mean (measured: 3.6e-6 with
73 flows a task)."""


class Closing(NamedTuple):
    """What is simulated once the search has ended."""

    draws: int
    """Volumes of the estimate."""
    judges: int
    """Volumes by which the schedule, and the placement among those of simple rules, is chosen; 0 = it is not."""
    schedules: tuple[Schedule, ...]
    """Schedules beside `priority` that the plan may have, those that need the least from a transport first."""
    policies: tuple[Schedule, ...]
    """Schedules of the simple rules, of which the fastest counts."""
    rules: tuple[str, ...]
    """Simple rules that the plan is compared with."""

    def seconds(self, one_s: float, num_flows: int) -> float:
        """About how long it takes.

        Args:
            one_s: seconds of a simulation by priority.
            num_flows: flows of the problem.
        """
        fair = max(FAIR, FAIR_BY_FLOW * num_flows)

        def units(names: tuple[Schedule, ...]) -> float:
            return sum(fair if name == "fair" else 1.0 for name in names)

        judged = self.judges * (1 + len(self.rules)) * (2.0 + units(self.schedules))
        return one_s * (judged + self.draws * (1.0 + len(self.rules) * units(self.policies)))


RULES = tuple(BASELINES)
CLOSINGS = (
    Closing(8, 4, ("fair", "fifo", "srpt", "coflow"), ("fifo", "fair", "srpt"), RULES),
    Closing(8, 4, ("fifo", "srpt", "coflow"), ("fifo", "srpt"), RULES),
    Closing(4, 2, ("fifo", "srpt"), ("fifo", "srpt"), RULES[1:]),
    Closing(2, 1, ("fifo",), ("fifo",), RULES[1:2]),
    Closing(1, 0, (), ("fifo",), RULES[1:2]),
)
"""The first that there is time for is taken. Spreads of 30 % average out to 2 % over 8 draws of 20 iterations; fair
shares take the longest by far, and co-location is nearly always the best rule (docs/gnn.md)."""


class Effort(NamedTuple):
    """How much is simulated when."""

    closing: Closing
    closing_s: float
    """About how long that takes; 0 where the budget is a number of simulations."""
    most_starts_s: float
    """Seconds after which no further placement to begin with is made."""
    proposals: int
    """Changes of each placement to begin with, by the loads of interfaces."""
    step: int
    """Most simulations between two looks at the budget."""


def effort_for(simulator: Simulator, place: Ints, budget: Budget, proposals: int, step: int) -> Effort:
    """The effort that a budget leaves time for.

    Args:
        simulator: the problem.
        place: [tasks] any placement with room for all tasks, which is simulated to see how long that takes.
        budget: of the search.
        proposals: changes of a placement to begin with, where there is time.
        step: simulations between two looks at the budget, where there is time.
    """
    flows, limit_s = len(simulator.problem.flows), PATIENCE_S
    one_s = simulation_s(simulator)
    if budget.seconds is not None:
        begin = time.perf_counter()
        simulator.run(place)
        one_s, limit_s = time.perf_counter() - begin, CLOSING_SHARE * budget.seconds
    closing = next((one for one in CLOSINGS if one.seconds(one_s, flows) <= limit_s), CLOSINGS[-1])
    if budget.seconds is None:
        return Effort(closing, 0.0, float("inf"), proposals, step)
    each_s = PROPOSAL_S * flows / max(1, len(simulator.problem.tasks))
    return Effort(
        closing=closing,
        closing_s=min(closing.seconds(one_s, flows), CLOSING_SHARE * budget.seconds),
        most_starts_s=STARTS_SHARE * budget.seconds,
        proposals=max(1, min(proposals, int(STARTS_SHARE / 4 * budget.seconds / max(each_s, 1e-9)))),
        step=max(1, min(step, int(STEP_SHARE * budget.seconds / max(one_s, 1e-9)))),
    )
