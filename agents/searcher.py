"""Searcher, Budget, Progress, SearchResult, and `search`, the one way in.

One evaluation is one complete plan priced. A searcher is anytime, and deterministic for a budget in evaluations on
one machine and version. Knows nothing of HTTP, queues or files. Units: seconds, evaluations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from automap.errors import ProblemError
from automap.plan import Plan
from automap.problem import Problem

if TYPE_CHECKING:
    from agents.results.plainest import Offer

MAX_EVALUATIONS = 10**12
"""Of a budget, or seconds: at a microsecond each, 12 days."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """When to stop: after some seconds or some evaluations, whichever is named."""

    seconds: float | None = None
    evaluations: int | None = None

    @staticmethod
    def parse(text: str | int) -> Budget:
        """`30s`, `2m` or a number of evaluations.

        Raises:
            ProblemError: not a budget.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)?", str(text).strip())
        amount = float(match[1]) if match else 0.0
        if match is None or amount <= 0 or (match[2] is None and not amount.is_integer()):
            raise ProblemError(
                "not a budget",
                field="budget",
                value=str(text),
                repair="Give seconds as in 30s, minutes as in 2m, or a whole number of evaluations as in 2000.",
            )
        if amount > MAX_EVALUATIONS:
            raise ProblemError("too long", field="budget", value=str(text), repair=f"Give at most {MAX_EVALUATIONS}.")
        if match[2] is None:
            return Budget(evaluations=int(amount))
        return Budget(seconds=amount * {"s": 1, "m": 60, "h": 3600}[match[2]])

    def __str__(self) -> str:
        return f"{self.seconds:g}s" if self.seconds is not None else str(self.evaluations)


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a search is."""

    searcher: str
    evaluations: int
    seconds: float
    best_step_time_s: float | None
    """None until a plan fits."""
    lower_bound_s: float
    fraction: float
    """Share of the budget that is spent, 0..1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plan found and what it took."""

    plan: Plan
    """With `estimate`, `search` and `why` filled in."""
    unlike: Callable[[int], tuple[Plan, ...]] = field(compare=False)
    """Of a number, so many of the best plans that are unlike each other, or fewer where there are no more; the first is
    `plan`. See `agents.results.diverse_top_k`."""
    evaluations: int
    seconds: float
    plainest: Callable[[float], Offer] | None = field(default=None, compare=False)
    """Of a step time in seconds, the plainest plan that takes no longer, see `agents.results.plainest`; None where
    the plan has been chosen so."""
    proven: bool = False
    """Whether no plan of the space that fits is faster."""
    improvements: Sequence[tuple[int, float, float]] = ()
    """(evaluations, seconds, step time in seconds) whenever a faster plan that fits was found."""


def check_tie(tie: float) -> None:
    """Refuses ties out of bounds.

    Raises:
        ProblemError: not from 0 to 1.
    """
    if not 0.0 <= tie <= 1.0:
        raise ProblemError(
            "is no share of the error band",
            field="tie",
            value=f"{tie:g}",
            repair="Give 0, for the fastest plan by the estimate, to 1; the default is 0.1.",
        )


OnProgress = Callable[[Progress], None]
ShouldStop = Callable[[], bool]

_AGENTS = {
    "portfolio": "portfolio.portfolio.search_portfolio",
    "dqn": "learning.dqn.search_dqn",
    "dqn-pretrained": "learning.pretrained.search_pretrained",
    "mcmc": "sampling.mcmc.search_mcmc",
    "hill-climbing": "sampling.mcmc.search_hill_climbing",
    "elimination": "planners.elimination.search_elimination",
    "ilp": "planners.ilp.search_ilp",
    "expert": "sampling.expert.search_expert",
    "random": "sampling.random_plans.search_random",
    "exhaustive": "sampling.exhaustive.search_exhaustive",
}
SEARCHERS = tuple(_AGENTS)


class Searcher(Protocol):
    """The shape of every agent."""

    def __call__(
        self,
        problem: Problem,
        budget: Budget,
        *,
        seed: int,
        on_progress: OnProgress,
        should_stop: ShouldStop,
        start: Sequence[Plan] = (),
    ) -> SearchResult:
        """See `search`."""
        ...


def search(
    problem: Problem,
    budget: Budget,
    *,
    searcher: str = "portfolio",
    seed: int = 0,
    on_progress: OnProgress = lambda progress: None,
    should_stop: ShouldStop = lambda: False,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The fastest plan that fits in memory, found within `budget`.

    Args:
        problem: what is searched.
        budget: seconds or evaluations.
        searcher: one of `SEARCHERS`.
        seed: of every random choice.
        on_progress: called a few times a second.
        should_stop: asked often; once true, the best plan so far is returned.
        start: plans to begin from.

    Raises:
        NothingFits: no plan of the space fits into memory; names the nearest and what would make it fit.
        ProblemError: unknown searcher, or the space is too large for an exhaustive search.
    """
    if searcher not in SEARCHERS:
        raise unknown_searcher(searcher, field="searcher")
    return _agent(searcher)(problem, budget, seed=seed, on_progress=on_progress, should_stop=should_stop, start=start)


def unknown_searcher(name: str, *, field: str) -> ProblemError:
    """Says who could be asked instead."""
    return ProblemError("unknown searcher", field=field, value=name, repair="Use one of " + ", ".join(SEARCHERS) + ".")


def _agent(name: str) -> Searcher:
    # Imported when asked for: the DQN brings torch, which nobody else needs.
    module, _, function = _AGENTS[name].rpartition(".")
    found: Searcher = getattr(import_module(f"agents.{module}"), function)
    return found
