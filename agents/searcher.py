"""What every searcher has in common: `Budget`, `SearchTask`, `Progress`, `SearchResult`; and `search`, which runs one.

One evaluation is one complete plan that is priced. A searcher can be stopped at any time and then returns the best plan
so far; for a budget in evaluations its result is deterministic on one machine and version. Independent of HTTP,
queues and files. Units: seconds, evaluations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from automap.errors import ProblemError, one_of
from automap.plan import Plan
from automap.problem import Problem
from automap.search_record import SearchRecord
from ir.notebook import shown

if TYPE_CHECKING:
    from agents.results.plainest import Offer
    from automap.space.space import PlanSpace

MAX_EVALUATIONS = 10**12
"""Largest amount that a budget may state, in evaluations or in seconds: 10^12 evaluations of a microsecond each take 12
days."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When a search stops: after some seconds or after some evaluations, whichever of the two is given."""

    seconds: float | None = None
    evaluations: int | None = None

    @staticmethod
    def parse(text: str | int) -> Budget:
        """The budget that a text states: `30s`, `2m`, `1h` or a number of evaluations.

        Raises:
            ProblemError: the text is not a budget.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", str(text).strip())
        amount = float(match[1]) if match else 0.0
        if match is None or amount <= 0 or (match[2] is None and not amount.is_integer()):
            raise _not_a_budget(text, "Give a time as in 30s, 2m or 1h, or a whole number of evaluations as in 2000.")
        if amount > MAX_EVALUATIONS:
            raise ProblemError("too long", field="budget", value=str(text), repair=f"Give at most {MAX_EVALUATIONS}.")
        if match[2] is None:
            return Budget(evaluations=int(amount))
        return Budget(seconds=amount * {"s": 1, "m": 60, "h": 3600}[match[2]])

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds is not None else str(self.evaluations)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """How far one searcher of a search has come."""

    evaluations: int = 0
    """Number of plans that it has priced."""
    best_step_time_s: float | None = None
    """Step time of its best plan; None where none of its plans fits into memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a search has come."""

    searcher: str
    """Name of the searcher at work."""
    evaluations: int
    """Number of plans priced so far."""
    seconds: float
    """Time since the start of the search."""
    best_step_time_s: float | None
    """Step time of the best plan so far; None until a plan fits into memory."""
    lower_bound_s: float
    """Step time that no plan of the problem goes below."""
    fraction: float
    """Share of the budget that is spent, from 0 to 1."""
    members: Mapping[str, Reached] = field(default_factory=dict)
    """Each searcher that has taken part so far, such as the members of a portfolio."""
    best: Callable[[int], Plan] | None = field(default=None, compare=False, repr=False)
    """Makes the best plan so far, in full and verified, with a seed for its record; to be called before the report
    returns. None until the searcher at work has one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plan that a search found, and what the search took."""

    plan: Plan
    """The best plan, with `estimate`, `search` and `why` filled in."""
    unlike: Callable[[int], tuple[Plan, ...]] = field(compare=False)
    """Returns the given number of best plans that differ from each other in more than details, or fewer where there are
    no more; the first one is `plan`. See `agents.results.diverse_top_k`."""
    others: Callable[[int], tuple[Plan, ...]] = field(compare=False)
    """Returns the given number of best plans, or fewer, each with other degrees of parallelism, the fastest first. They
    are to be listed: priced, without reasons, and not verified. See `agents.results.side_by_side`."""
    evaluations: int
    """Number of plans that were priced."""
    seconds: float
    """Duration of the search."""
    plainest: Callable[[float], Offer] | None = field(default=None, compare=False)
    """Returns the plainest plan whose step time is at most the given seconds, see `agents.results.plainest`; None where
    `plan` has been chosen in this way already."""
    proven: bool = False
    """Whether it is proven that no plan of the space that fits into memory is faster."""
    improvements: Sequence[tuple[int, float, float]] = ()
    """(evaluations, seconds, step time in seconds) at each moment when a faster plan that fits was found."""
    by_searcher: Mapping[str, Sequence[tuple[int, float, float]]] = field(default_factory=dict)
    """The same of each searcher by itself: the moments when it found a faster plan than it had."""

    @property
    def step_time_s(self) -> float:
        """Predicted step time of the best plan, in seconds."""
        return self.plan.step_time_s

    @property
    def record(self) -> SearchRecord:
        """What the best plan says of the search."""
        assert self.plan.search is not None
        return self.plan.search

    def __repr__(self) -> str:
        return f"SearchResult({self.plan!r}, {self.evaluations:,} plans priced in {self.seconds:.3g} s)"

    def _repr_html_(self) -> str | None:
        return shown(self)


OnProgress = Callable[[Progress], None]
ShouldStop = Callable[[], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchTask:
    """What a searcher is asked to do; see `search` for the meaning of the fields."""

    problem: Problem
    budget: Budget
    space: PlanSpace | None = None
    """The plans of the problem, if they are known."""
    seed: int = 0
    on_progress: OnProgress = lambda progress: None
    should_stop: ShouldStop = lambda: False
    start: Sequence[Plan] = ()


Searcher = Callable[[SearchTask], SearchResult]
"""The shape of every agent: it returns the fastest plan that fits into memory, found within the budget of the task.

Raises `NothingFits` where no plan of the space fits into memory; the error names the nearest plan and what would help.
"""

_SEARCHERS = {
    "portfolio": "portfolio.portfolio.search_portfolio",
    "dqn": "learning.dqn.search_dqn",
    "dqn-from-scratch": "learning.dqn.search_from_scratch",
    "sharding": "learning.paradigms.search_sharding",
    "replication": "learning.paradigms.search_replication",
    "pipeline": "learning.paradigms.search_pipeline",
    "mcmc": "sampling.mcmc.search_mcmc",
    "hill-climbing": "sampling.mcmc.search_hill_climbing",
    "elimination": "planners.elimination.search_elimination",
    "ilp": "planners.ilp.search_ilp",
    "pipedream": "planners.pipedream.search_pipedream",
    "dapple": "planners.dapple.search_dapple",
    "spp": "planners.spp.search_spp",
    "whale": "planners.whale.search_whale",
    "aceso": "planners.aceso.search_aceso",
    "galvatron": "planners.galvatron.search_galvatron",
    "piper": "planners.piper.search_piper",
    "alpa": "planners.alpa.search_alpa",
    "expert": "sampling.expert.search_expert",
    "random": "sampling.random_plans.search_random",
    "exhaustive": "sampling.exhaustive.search_exhaustive",
}
"""Path of each searcher below the package `agents`. It is imported on first use: the DQN brings torch, which nobody
else needs."""
SEARCHERS = tuple(_SEARCHERS)
"""Names of all searchers."""


def search(
    problem: Problem | PlanSpace,
    budget: Budget,
    *,
    searcher: str = "portfolio",
    seed: int = 0,
    on_progress: OnProgress = lambda progress: None,
    should_stop: ShouldStop = lambda: False,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The fastest plan that fits into memory, found within `budget`.

    Args:
        problem: graph, cluster, training and hints for which a plan is searched, or all plans of these.
        budget: seconds or evaluations.
        searcher: one of `SEARCHERS`.
        seed: seed of every random choice.
        on_progress: called a few times a second.
        should_stop: called often; once it returns true, the best plan so far is returned.
        start: plans from which the search begins. Those that are not in the plan space are left out.

    Raises:
        NothingFits: no plan of the space fits into memory; the error names the nearest plan and what would help.
        ProblemError: the searcher is unknown, or the space is too large for an exhaustive search.
    """
    if searcher not in SEARCHERS:
        raise unknown_searcher(searcher, field="searcher")
    module, _, function = _SEARCHERS[searcher].rpartition(".")
    found: Searcher = getattr(import_module(f"agents.{module}"), function)
    space = None if isinstance(problem, Problem) else problem
    task = SearchTask(
        problem=problem if isinstance(problem, Problem) else problem.problem,
        space=space,
        budget=budget,
        seed=seed,
        on_progress=on_progress,
        should_stop=should_stop,
        start=start,
    )
    return found(task)


def unknown_searcher(name: str, *, field: str) -> ProblemError:
    """The error for a name that is not one of `SEARCHERS`, given in `field`."""
    return ProblemError("unknown searcher", field=field, value=name, repair=one_of(SEARCHERS, name))


def _not_a_budget(value: object, repair: str) -> ProblemError:
    return ProblemError("not a budget", field="budget", value=str(value), repair=repair)


def check_budget(budget: Budget) -> None:
    """Refuses a budget that has not been read yet, such as the text `30s`, and one without an end.

    Raises:
        ProblemError: it is no `Budget`, or has neither seconds nor evaluations.
    """
    if not isinstance(budget, Budget) or budget == Budget():
        raise _not_a_budget(
            budget, "Write Budget.parse('30s') for a time, or Budget.parse(1000) for a number of plans."
        )


def check_tie(tie: float) -> None:
    """Refuses a tie out of bounds.

    Raises:
        ProblemError: the tie is not from 0 to 1.
    """
    if not 0.0 <= tie <= 1.0:
        raise ProblemError(
            "is not a share of the error band",
            field="tie",
            value=f"{tie:g}",
            repair="Give 0, for the fastest plan by the estimate, to 1; the default is 0.1.",
        )
