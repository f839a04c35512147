"""Portfolio: the best of all searchers within one budget.

In this order: the plans given and the grid of templates; planners, which are quick and may prove the optimum, whereupon
the search ends; annealing; then, of larger budgets, annealing here and other members in processes of their own, a DQN
among them that learns from the best plans so far. Of a budget in evaluations every member has a fixed share and hears
of the others only where a share ends: cores change nothing but the time. The plan says who found it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np

from agents.elimination import run_elimination
from agents.exhaustive import run_exhaustive
from agents.expert import Grid, grid
from agents.incumbent import Incumbent
from agents.mcmc import best_of_meshes, run_mcmc
from agents.members import Member, Task, wait
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space import Ints, PlanSpace, Values

PROVABLE_DECADES = 7.0
"""Of larger spaces no proof is tried."""
PROOF_NODES = 200_000
"""Beginnings that branch and bound looks at: a few seconds' worth."""
PROOF_SHARE = 0.5
"""Of what is left of a budget: a proof ends the search."""
PLANNER_SHARE, PLANNER_S = 0.1, 5.0
"""Of what is left of a budget, and seconds at most, for each other planner."""
WARM_UP_S, WARM_UP_SHARE = 1.0, 0.1
"""Annealing before members are started: seconds at most, and share of a budget in seconds."""
LEAST_S, LEAST_EVALUATIONS = 4.0, 2000
"""What must be left for members to be started: a process takes a second to begin."""
DQN_LEAST_S = 12.0
"""What must be left for a DQN: its library takes some seconds to import."""
DQN_SHARE, DQN_MOST = 0.25, 10_000
"""Of a budget in evaluations that is left, and evaluations at most: it takes 100 times as long as annealing."""
MOST_MEMBERS = 8
DEMONSTRATED = 16
"""Plans that the DQN learns from."""
LISTEN_S = 0.05
"""Between two looks at whether the caller wants an end."""


class _Limits(TypedDict):
    evaluations: int | None
    seconds: float | None


def _prove(space: PlanSpace, incumbent: Incumbent, start: Sequence[Values]) -> bool:
    if space.decades > PROVABLE_DECADES:
        return False
    incumbent.searcher = "exhaustive"
    with incumbent.share(**_part(incumbent, PROOF_SHARE)):
        return run_exhaustive(space, incumbent, max_nodes=PROOF_NODES)


def _eliminate(space: PlanSpace, incumbent: Incumbent, start: Sequence[Values]) -> bool:
    incumbent.searcher = "elimination"
    with incumbent.share(**_part(incumbent, PLANNER_SHARE, most_s=PLANNER_S)):
        run_elimination(space, incumbent, start=start)
    return False


PLANNERS: tuple[Callable[[PlanSpace, Incumbent, Sequence[Values]], bool], ...] = (_prove, _eliminate)
"""Run one after the other before all else, with the plans that fit so far, the best first; each says whether it has
proven the best plan to be the optimum."""


def _part(incumbent: Incumbent, share: float, most_s: float = float("inf")) -> _Limits:
    """A share of what is left of a budget."""
    left, left_s = incumbent.left, incumbent.left_s
    return {
        "evaluations": None if left is None else int(share * left),
        "seconds": None if left_s is None else min(most_s, share * left_s),
    }


def search_portfolio(
    problem: Problem,
    budget: Budget,
    *,
    seed: int,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    start: Sequence[Plan] = (),
) -> SearchResult:
    """The best of `start`, templates, planners, annealing and a DQN; see `Searcher`."""
    space = PlanSpace(problem)
    crew = _Crew(should_stop)
    incumbent = Incumbent(space, budget, searcher="expert", on_progress=on_progress, should_stop=crew.should_stop)
    templates = grid(space, incumbent)
    given = [values for values in map(space.encode, start) if values is not None]
    if given:
        incumbent.searcher = "start"
        incumbent.price(given)
    proven = False
    ranked = _ranked(incumbent, templates)
    for run in PLANNERS:
        if not proven and not incumbent.finished:
            proven = run(space, incumbent, ranked)
    known = best_of_meshes(space, templates.values, templates.prices)
    try:
        if not proven and not incumbent.finished:
            _anneal(space, incumbent, crew, known, seed, templates.baselines["expert"])
    finally:
        crew.end()
    return incumbent.result(seed=seed, baselines=templates.baselines, proven=proven)


def _ranked(incumbent: Incumbent, templates: Grid) -> list[Values]:
    """The best plan and all templates that fit, the best first; what comes nearest if none does."""
    fitting = np.flatnonzero(templates.prices[:, 1] <= 0.0)
    ranked = templates.values[fitting[np.argsort(templates.prices[fitting, 0], kind="stable")]]
    first = incumbent.best or incumbent.nearest
    assert first is not None
    return [first, *(tuple(row) for row in ranked.tolist())]


def _anneal(
    space: PlanSpace, incumbent: Incumbent, crew: _Crew, known: Ints, seed: int, reference_s: float | None
) -> None:
    """Annealing alone, then with others, until the budget ends."""
    left, left_s = incumbent.left, incumbent.left_s
    crewed = (left is None or left >= LEAST_EVALUATIONS) and (left_s is None or left_s >= LEAST_S)
    if crewed:
        warm_up_s = None if left_s is None else min(WARM_UP_S, WARM_UP_SHARE * left_s)
        with incumbent.share(evaluations=None if left is None else left // 2, seconds=warm_up_s):
            best = _chains(space, incumbent, known, seed)
        known = np.concatenate([best, known])
        dqn = None if left is None else min(DQN_MOST, int(DQN_SHARE * left))
        if left_s is None or left_s >= DQN_LEAST_S:
            crew.start(space.problem, _task("dqn", seed, dqn, known[:DEMONSTRATED], reference_s))
        if left is None:
            for number in range(2, cores()):
                crew.start(space.problem, _task("mcmc", seed + number, None, known, reference_s))
            crew.listening = incumbent
        with incumbent.share(evaluations=None if left is None else left - left // 2 - (dqn or 0)):
            _chains(space, incumbent, known, seed + 1)
        crew.join(incumbent)
    else:
        _chains(space, incumbent, known, seed)


def _chains(space: PlanSpace, incumbent: Incumbent, known: Ints, seed: int) -> Ints:
    incumbent.searcher = "mcmc"
    if incumbent.best is not None:
        known = np.concatenate([[incumbent.best], known])
    return run_mcmc(space, incumbent, seed=seed, known=known, prices=space.price(known))


def _task(
    kind: Literal["mcmc", "dqn"], seed: int, evaluations: int | None, known: Ints, reference_s: float | None
) -> Task:
    plans = tuple(tuple(row) for row in known.tolist())
    return Task(kind=kind, seed=seed, evaluations=evaluations, known=plans, reference_s=reference_s)


class _Crew:
    """The members of a search.

    Attributes:
        listening: takes what the members find while they run; None = nobody does before the end.
    """

    def __init__(self, should_stop: ShouldStop) -> None:
        self.listening: Incumbent | None = None
        self._members: list[Member] = []
        self._counted: list[int] = []
        self._caller_wants_end = should_stop

    def start(self, problem: Problem, task: Task) -> None:
        """Starts a member."""
        self._members.append(Member(problem, task))
        self._counted.append(0)

    def should_stop(self) -> bool:
        """Asks the caller, and hears the members where somebody listens."""
        if self.listening is not None:
            self._hear(self.listening)
        return self._caller_wants_end()

    def join(self, incumbent: Incumbent) -> None:
        """Waits for members with a share of their own, and takes what they found in the order of their start."""
        while not self._caller_wants_end():
            running = [m for m in self._members if m.task.evaluations is not None and not m.finished]
            if not running:
                break
            wait(running, LISTEN_S)
            for member in running:
                member.listen()
        self._hear(incumbent)

    def end(self) -> None:
        """Ends all that still run."""
        for member in self._members:
            member.end()

    def _hear(self, incumbent: Incumbent) -> None:
        for number, member in enumerate(self._members):
            report = member.listen()
            incumbent.count(report.evaluations - self._counted[number])
            self._counted[number] = report.evaluations
            if report.best is not None and report.best_s is not None:
                incumbent.adopt(member.task.kind, report.best, report.best_s, 0.0)
            elif report.nearest is not None and report.overflow is not None:
                incumbent.adopt(member.task.kind, report.nearest, float("inf"), report.overflow)


def cores() -> int:
    """Processors that this process may use, at most `MOST_MEMBERS`."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.exists():
        quota, period = limit.read_text().split()
        count = count if quota == "max" else min(count, -(-int(quota) // int(period)))
    return max(1, min(count, MOST_MEMBERS))
