"""Portfolio: the best plan of several searchers within one budget.

The searchers work in this order:

1. the grid of templates, and the plans given;
2. elimination around the best templates (`agents.planners.template_improvement`);
3. the pretrained network: it proposes skeletons, of which elimination solves the best, and whole plans;
4. refinement of the best plans of some meshes, without random numbers (`agents.planners.template_improvement`);
5. the programs of Piper, Alpa, Galvatron and SPP, for the best pipelines (`agents.planners.pipeline_division`);
6. branch and bound in small spaces, whose proof ends the search;
7. annealing, from the best plans so far;
8. in larger budgets, annealing in this process, and at the same time other members in their own processes (`PLACES`):
   planners and a DQN, which begin with the best plans so far.

With a budget in evaluations, every member has a fixed share and gets plans of others only when a share ends. So the
number of cores changes only the duration of a search, and not its result. The plan says which searcher found it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.proposals import NETWORK, readable
from agents.learning.proposed_skeletons import propose_and_solve, solve_further
from agents.planners.pipeline_division import divide_pipelines
from agents.planners.promising_templates import like_the_best, promising_meshes
from agents.planners.recompute_less import lightened_templates
from agents.planners.template_improvement import improve_templates, refine
from agents.portfolio.members import Kind, Member, MemberTask, wait
from agents.sampling.exhaustive import run_exhaustive
from agents.sampling.expert import Grid, price_grid
from agents.sampling.mcmc import best_of_meshes, run_mcmc
from agents.searcher import SearchResult, SearchTask, ShouldStop
from automap.problem import Problem
from automap.space.space import Ints, Values

PROVABLE_DECADES = 7.0
"""log10 of the largest number of plans of a space in which a proof is tried (assumed)."""
PROOF_NODES = 200_000
"""Largest number of partial plans that branch and bound looks at, which takes a few seconds."""
PROOF_SHARE = 0.5
"""Share of the remaining budget that is spent on a proof at most (assumed)."""
SHOWN_PROPOSALS = 16
"""Number of the best proposals with which annealing and members begin (assumed)."""
WARM_UP_S, WARM_UP_SHARE = 1.0, 0.1
"""Length of the annealing before members are started (assumed): seconds at most, and share of a budget in seconds."""
LEAST_S, LEAST_EVALUATIONS = 4.0, 2000
"""Budget that must be left for members to be started: a process takes a second to begin."""
MOST_MEMBERS = 8
"""Largest number of processes (assumed)."""
LISTEN_S = 0.05
"""Seconds between two checks whether the caller wants the search to end (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """When a kind of member takes part in a portfolio, and with what."""

    kind: Kind
    """Searcher that the member runs."""
    least_s: float
    """Seconds of a budget that must be left for the member to be started."""
    least_cores: int
    """Number of processors from which it takes part in a budget in seconds."""
    share: float
    """Share of the remaining evaluations that the member has; 0 = it takes part in budgets in seconds only."""
    most: int
    """Largest number of evaluations of the member."""
    shown: int
    """Number of plans that the member begins with or learns from."""


PLACES: tuple[Place, ...] = (
    Place(kind="elimination", least_s=LEAST_S, least_cores=1, share=0.1, most=2_000, shown=2_000),
    # The DQN takes 100 times as long for a plan as annealing, and some seconds to import its library.
    Place(kind="dqn", least_s=12.0, least_cores=1, share=0.25, most=10_000, shown=16),
    Place(kind="ilp", least_s=12.0, least_cores=4, share=0.0, most=0, shown=2_000),
)
"""Members beside annealing."""
PLANNERS: frozenset[Kind] = frozenset(("elimination", "ilp"))
"""Members that solve skeletons."""
FURTHER: tuple[Kind, ...] = ("mcmc", "dqn")
"""Kinds of members that use further processors, in turn, each with a seed of its own."""


def search_portfolio(task: SearchTask) -> SearchResult:
    """The best plan of all parts of a portfolio, see the text of this module; see also `Searcher`."""
    incumbent = Incumbent.begin(task, "expert")
    crew = _Crew(incumbent.should_stop)
    incumbent.should_stop = crew.should_stop
    grid = price_grid(incumbent)
    incumbent.price_start(task, credit="start")
    proposed: list[Values] = []
    if not incumbent.finished:
        grid = grid.joined(lightened_templates(incumbent, grid))
    if not incumbent.finished:
        skeletons = improve_templates(incumbent, grid)
        if not incumbent.finished:
            incumbent.searcher = "dqn"
            if (network := readable(NETWORK)) is not None:
                proposed = propose_and_solve(skeletons, grid, network, seed=task.seed)
        if not incumbent.finished:
            solve_further(skeletons, grid)
        grid = grid.joined(skeletons.plans())
        if not incumbent.finished:
            grid = grid.joined(refine(skeletons, _known(incumbent, grid, proposed)))
            divide_pipelines(incumbent, grid)
    proven = not incumbent.finished and _is_provable(incumbent) and _prove(incumbent)
    try:
        if not proven and not incumbent.finished:
            known = _known(incumbent, grid, proposed)
            _search(incumbent, crew, known, functools.partial(_wide, incumbent, grid, known), task.seed)
    finally:
        crew.end()
    return incumbent.result(seed=task.seed, proven=proven)


def _wide(incumbent: Incumbent, grid: Grid, known: Ints) -> Ints:
    """[n, slots] plans of many meshes, with which planners begin, because they need few evaluations for each mesh."""
    promising = promising_meshes(incumbent.space, grid)
    alike = like_the_best(incumbent.space, grid, known, lambda: incumbent.finished)
    return np.concatenate([known[:SHOWN_PROPOSALS], _alternating(alike.values, promising)])


def _alternating(one: Ints, other: Ints) -> Ints:
    """[n, slots] two lists of plans merged alternately: the first of each list, then the second of each, and so on."""
    rank = np.concatenate([np.arange(len(one)), np.arange(len(other))])
    merged: Ints = np.concatenate([one, other])[np.argsort(rank, kind="stable")]
    return merged


def _known(incumbent: Incumbent, grid: Grid, proposed: Sequence[Values]) -> Ints:
    """[n, slots] the best proposals, the best first, followed by the best plans of each mesh."""
    known = best_of_meshes(incumbent.space, grid.values, grid.prices)
    return np.concatenate([np.array(proposed[::-1][:SHOWN_PROPOSALS]), known]) if proposed else known


def _is_provable(incumbent: Incumbent) -> bool:
    """Whether the space is so small that its optimum may be proven."""
    best, space = incumbent.best or incumbent.nearest, incumbent.space
    assert best is not None
    # The product of the numbers of legal values along one plan approximates the number of plans, and is fast to
    # compute.
    ways = sum(math.log10(space.legal(best[:slot]).sum()) for slot in range(len(best)))
    return ways <= PROVABLE_DECADES + 2.0 and space.decades <= PROVABLE_DECADES


def _prove(incumbent: Incumbent) -> bool:
    """Tries to prove the optimum of a small space; returns whether it is proven."""
    incumbent.searcher = "exhaustive"
    left, left_s = incumbent.left, incumbent.left_s
    with incumbent.share(
        evaluations=None if left is None else int(PROOF_SHARE * left),
        seconds=None if left_s is None else PROOF_SHARE * left_s,
    ):
        return run_exhaustive(incumbent, max_nodes=PROOF_NODES)


def _search(incumbent: Incumbent, crew: _Crew, known: Ints, wide: Callable[[], Ints], seed: int) -> None:
    """Annealing alone, then beside members, until the budget ends; planners begin with the plans that `wide` makes."""
    left, left_s = incumbent.left, incumbent.left_s
    if (left is not None and left < LEAST_EVALUATIONS) or (left_s is not None and left_s < LEAST_S):
        _anneal(incumbent, known, seed)
        return
    warm_up_s = None if left_s is None else min(WARM_UP_S, WARM_UP_SHARE * left_s)
    with incumbent.share(evaluations=None if left is None else left // 2, seconds=warm_up_s):
        known = np.concatenate([_anneal(incumbent, known, seed), known])

    tasks = member_tasks(left, left_s, cores(), seed=seed, known=known, wide=wide())
    for member in tasks:
        incumbent.reached.setdefault(member.kind, None)
        crew.start(incumbent.space.problem, member)
    if left is None:
        crew.listener = incumbent
    given = sum(member.evaluations or 0 for member in tasks)
    with incumbent.share(evaluations=None if left is None else left - left // 2 - given):
        _anneal(incumbent, known, seed + 1)
    crew.join(incumbent)


@functools.cache
def can_learn() -> bool:
    """Whether the extra `learning` is installed, without which no DQN goes on learning."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "stable_baselines3"))


def member_tasks(
    left: int | None, left_s: float | None, processors: int, *, seed: int, known: Ints, wide: Ints
) -> list[MemberTask]:
    """What members do beside annealing in this process.

    Args:
        left: evaluations that are left; None in a budget in seconds.
        left_s: seconds that are left; None in a budget in evaluations.
        processors: number of processors.
        seed: seed of the search.
        known: [n, slots] the best plans so far, the best first.
        wide: [n, slots] plans of many meshes with which planners begin.
    """
    tasks: list[MemberTask] = []

    def add(kind: Kind, member_seed: int, evaluations: int | None, shown: int) -> None:
        plans = wide if kind in PLANNERS else known
        start = tuple(tuple(row) for row in plans[:shown].tolist())
        task = MemberTask(kind=kind, seed=member_seed, evaluations=evaluations, start=start)
        tasks.append(task)

    possible = [place for place in PLACES if place.kind != "dqn" or can_learn()]
    in_time = [place for place in possible if left_s is None or left_s >= place.least_s]
    for place in in_time:
        quota = None if left is None else min(place.most, int(place.share * left))
        if quota != 0 and (left is not None or processors >= place.least_cores):
            add(place.kind, seed, quota, place.shown)
    if left is None:
        shown = {place.kind: place.shown for place in in_time} | {"mcmc": len(known)}
        kinds = [kind for kind in FURTHER if kind in shown]
        for number in range(processors - 1 - len(tasks)):
            kind = kinds[number % len(kinds)]
            add(kind, seed + 2 + number, None, shown[kind])
    return tasks


def _anneal(incumbent: Incumbent, known: Ints, seed: int) -> Ints:
    incumbent.searcher = "mcmc"
    if incumbent.best is not None:
        known = np.concatenate([[incumbent.best], known])
    return run_mcmc(incumbent, seed=seed, start=known)


class _Crew:
    """The members of a search.

    Attributes:
        listener: the incumbent that takes what the members find while they run; None: it is taken at the end.
    """

    def __init__(self, should_stop: ShouldStop) -> None:
        self.listener: Incumbent | None = None
        self._members: list[Member] = []
        self._counted: list[int] = []
        self._caller_wants_end = should_stop

    def start(self, problem: Problem, task: MemberTask) -> None:
        """Starts a member."""
        self._members.append(Member(problem, task))
        self._counted.append(0)

    def should_stop(self) -> bool:
        """Whether the caller wants the search to end; on the way, the listener learns what the members have found."""
        if self.listener is not None:
            self._collect(self.listener)
        return self._caller_wants_end()

    def join(self, incumbent: Incumbent) -> None:
        """Waits for members that have a number of evaluations, and takes their plans in the order of their start."""
        while not self._caller_wants_end():
            running = [m for m in self._members if m.task.evaluations is not None and not m.finished]
            if not running:
                break
            wait(running, LISTEN_S)
            for member in running:
                member.listen()
        self._collect(incumbent)

    def end(self) -> None:
        """Ends all members that still run."""
        for member in self._members:
            member.end()

    def _collect(self, incumbent: Incumbent) -> None:
        for number, member in enumerate(self._members):
            report = member.listen()
            incumbent.count(report.evaluations - self._counted[number], member.task.kind)
            self._counted[number] = report.evaluations
            if report.best is not None and report.best_s is not None:
                incumbent.add_from(member.task.kind, report.best, report.best_s, 0.0)
            elif report.nearest is not None and report.overflow is not None:
                incumbent.add_from(member.task.kind, report.nearest, float("inf"), report.overflow)


def cores() -> int:
    """Number of processors that this process may use, at most `MOST_MEMBERS`."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = Path("/sys/fs/cgroup/cpu.max")
    if limit.exists():
        quota, period = limit.read_text("utf-8").split()
        count = count if quota == "max" else min(count, -(-int(quota) // int(period)))
    return max(1, min(count, MOST_MEMBERS))
