"""Portfolio: the best of all searchers within one budget.

In this order: the grid of templates and the plans given; branch and bound over small spaces, whose proof ends the
search, or, of larger spaces and a budget in evaluations, what the pretrained network proposes; annealing; then, of
larger budgets, annealing here and other members in processes of their own (`PLACES`), planners and a DQN among them,
that begin from the best plans so far. Of a budget in evaluations every member has a fixed share and hears of the others
only where a share ends: cores change nothing but the time. The plan says who found it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agents.incumbent import Incumbent
from agents.portfolio.members import Kind, Member, Task, wait
from agents.sampling.exhaustive import run_exhaustive
from agents.sampling.expert import grid
from agents.sampling.mcmc import best_of_meshes, run_mcmc
from agents.searcher import Budget, OnProgress, SearchResult, ShouldStop
from automap.plan import Plan
from automap.problem import Problem
from automap.space.space import Ints, PlanSpace

PROVABLE_DECADES = 7.0
"""Of larger spaces no proof is tried."""
PROOF_NODES = 200_000
"""Beginnings that branch and bound looks at: a few seconds' worth."""
PROOF_SHARE = 0.5
"""Of what is left of a budget: a proof ends the search."""
PROPOSED_SHARE, MOST_PROPOSED = 0.25, 500
"""Of a budget in evaluations and where no proof is tried: the pretrained network's share of what is left, and its plans
at most. Chosen by hand; `benchmarks/pretrained_gap.py` prints what its plans are worth beside those of others."""
WARM_UP_S, WARM_UP_SHARE = 1.0, 0.1
"""Annealing before members are started: seconds at most, and share of a budget in seconds."""
LEAST_S, LEAST_EVALUATIONS = 4.0, 2000
"""What must be left for members to be started: a process takes a second to begin."""
MOST_MEMBERS = 8
LISTEN_S = 0.05
"""Between two looks at whether the caller wants an end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """When a kind of member takes part, and with what."""

    kind: Kind
    least_s: float
    """Seconds that must be left."""
    least_cores: int
    """Processors, of a budget in seconds."""
    share: float
    """Of the evaluations that are left; 0 = only budgets in seconds have it."""
    most: int
    """Evaluations at most."""
    shown: int
    """Plans that it begins from or learns from."""


PLACES: tuple[Place, ...] = (
    Place(kind="elimination", least_s=LEAST_S, least_cores=1, share=0.1, most=2_000, shown=1_000),
    # It takes 100 times as long for a plan as annealing, and some seconds to import its library.
    Place(kind="dqn", least_s=12.0, least_cores=1, share=0.25, most=10_000, shown=16),
    Place(kind="ilp", least_s=12.0, least_cores=4, share=0.0, most=0, shown=1_000),
)
"""Who searches beside annealing."""
FURTHER: tuple[Kind, ...] = ("mcmc", "dqn")
"""Who takes further processors, in turn, each with a seed of its own."""


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
    if not incumbent.finished and _provable(space, incumbent):
        proven = _prove(space, incumbent)
    elif not incumbent.finished and incumbent.left is not None:
        _propose(space, incumbent, seed)
    known = best_of_meshes(space, templates.values, templates.prices)
    try:
        if not proven and not incumbent.finished:
            _search(space, incumbent, crew, known, seed, templates.baselines["expert"])
    finally:
        crew.end()
    return incumbent.result(seed=seed, baselines=templates.baselines, proven=proven)


def _provable(space: PlanSpace, incumbent: Incumbent) -> bool:
    """Whether a space is so small that its optimum may be proven."""
    best = incumbent.best or incumbent.nearest
    assert best is not None
    # Ways along one plan are about as many as there are plans, and quickly counted.
    ways = sum(math.log10(space.legal(best[:slot]).sum()) for slot in range(len(best)))
    return ways <= PROVABLE_DECADES + 2.0 and space.decades <= PROVABLE_DECADES


def _prove(space: PlanSpace, incumbent: Incumbent) -> bool:
    """Tries to prove the optimum of a small space."""
    incumbent.searcher = "exhaustive"
    left, left_s = incumbent.left, incumbent.left_s
    with incumbent.share(
        evaluations=None if left is None else int(PROOF_SHARE * left),
        seconds=None if left_s is None else PROOF_SHARE * left_s,
    ):
        return run_exhaustive(space, incumbent, max_nodes=PROOF_NODES)


def _propose(space: PlanSpace, incumbent: Incumbent, seed: int) -> None:
    """Prices what the pretrained network proposes; annealing goes on from the best of all."""
    assert incumbent.left is not None
    share = min(MOST_PROPOSED, int(PROPOSED_SHARE * incumbent.left))
    if not share:
        return
    # It brings torch, which budgets in seconds do without.
    from agents.learning.pretrained import run_pretrained

    incumbent.searcher = "dqn-pretrained"
    with incumbent.share(evaluations=share):
        run_pretrained(space, incumbent, seed=seed)


def _search(
    space: PlanSpace, incumbent: Incumbent, crew: _Crew, known: Ints, seed: int, reference_s: float | None
) -> None:
    """Annealing alone, then with others, until the budget ends."""
    left, left_s = incumbent.left, incumbent.left_s
    if (left is not None and left < LEAST_EVALUATIONS) or (left_s is not None and left_s < LEAST_S):
        _anneal(space, incumbent, known, seed)
        return
    warm_up_s = None if left_s is None else min(WARM_UP_S, WARM_UP_SHARE * left_s)
    with incumbent.share(evaluations=None if left is None else left // 2, seconds=warm_up_s):
        known = np.concatenate([_anneal(space, incumbent, known, seed), known])
    processors = cores()
    handed = 0
    for place in PLACES:
        quota = None if left is None else min(place.most, int(place.share * left))
        enough = (left_s is None or left_s >= place.least_s) and (left is not None or processors >= place.least_cores)
        if enough and quota != 0:
            incumbent.reached[place.kind] = None
            crew.start(space.problem, _task(place.kind, seed, quota, known[: place.shown], reference_s))
            handed += quota or 0
    if left is None:
        for task in _further(processors - 1 - crew.size, left_s, seed, known, reference_s):
            crew.start(space.problem, task)
        crew.listening = incumbent
    with incumbent.share(evaluations=None if left is None else left - left // 2 - handed):
        _anneal(space, incumbent, known, seed + 1)
    crew.join(incumbent)


def _further(count: int, left_s: float | None, seed: int, known: Ints, reference_s: float | None) -> list[Task]:
    """What further processors do in a budget in seconds."""
    allowed = {place.kind: place for place in PLACES if left_s is None or left_s >= place.least_s}
    kinds = [kind for kind in FURTHER if kind == "mcmc" or kind in allowed]
    tasks = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        shown = allowed[kind].shown if kind in allowed else len(known)
        tasks.append(_task(kind, seed + 2 + number, None, known[:shown], reference_s))
    return tasks


def _anneal(space: PlanSpace, incumbent: Incumbent, known: Ints, seed: int) -> Ints:
    incumbent.searcher = "mcmc"
    if incumbent.best is not None:
        known = np.concatenate([[incumbent.best], known])
    return run_mcmc(space, incumbent, seed=seed, known=known, prices=space.price(known))


def _task(kind: Kind, seed: int, evaluations: int | None, known: Ints, reference_s: float | None) -> Task:
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

    @property
    def size(self) -> int:
        """Members."""
        return len(self._members)

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
