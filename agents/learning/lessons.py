"""Lessons: generated problems with the plans that a teacher knows, to learn on; and exams on problems held out."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.labels import Label
from agents.learning.network import ProposalNetwork
from agents.learning.problems import generate
from agents.learning.proposals import PROPOSALS, SIDE_BY_SIDE, propose
from agents.learning.search_tree import SearchTree
from agents.planners.opening import work_out
from agents.sampling.expert import Grid, grid_of
from agents.searcher import Budget
from automap.errors import UserError
from automap.space.space import PlanSpace, Values
from envs.decision import Episodes
from envs.hybrid import HybridDecisions


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """A problem to learn on."""

    seed: int
    """Seed of the problem."""
    space: PlanSpace
    """Its plan space."""
    known: Grid
    """Plans that are known when its episodes begin: templates, and what a search opens with."""
    best: Values | None
    """The best plan that a teacher knows, or None."""


def opened(space: PlanSpace, worked_out: Grid | None = None) -> tuple[Grid, Grid]:
    """The plans that are known when episodes begin, and those of them that were worked out from templates.

    Args:
        space: plan space of the problem.
        worked_out: what `agents.planners.opening.work_out` found before; None = it is called.
    """
    grid = grid_of(space)
    if worked_out is None:
        worked_out = work_out(Incumbent(space, Budget(), searcher="elimination"), grid)
    return grid.joined(worked_out), worked_out


def lessons(seeds: Sequence[int], labels: Mapping[int, Label], seed: int) -> Iterator[Lesson]:
    """Problems without end, in random order, again and again; those of which nothing fits are left out.

    Args:
        seeds: seeds of the problems.
        labels: what teachers know of them, by seed.
        seed: seed of the order.
    """
    rng = np.random.default_rng(seed)
    useless = {number for number, label in labels.items() if not label.fits}
    worked_out: dict[int, Grid] = {}
    while True:
        for number in rng.permutation(np.array([one for one in seeds if one not in useless])).tolist():
            try:
                generated = generate(number)
                space = PlanSpace(generated.problem)
            except UserError:
                useless.add(number)
                continue
            label = labels.get(number)
            best = label.values if label is not None and label.is_of(generated) else None
            if best is not None and len(best) != len(space.slots):
                best = None
            grid, worked_out[number] = opened(space, worked_out.get(number))
            yield Lesson(seed=number, space=space, known=grid, best=best)


class Exam:
    """Problems on which a network is examined: how far its plans are from the best ones that are known."""

    def __init__(self, labels: Iterable[Label]) -> None:
        """Builds the problems of labels with a plan."""
        self._problems: list[tuple[PlanSpace, Grid, float]] = []
        for label in labels:
            if label.step_time_s is not None:
                space = PlanSpace(generate(label.seed).problem)
                self._problems.append((space, opened(space)[0], label.step_time_s))

    def grade(self, network: ProposalNetwork, most: int = PROPOSALS, seed: int = 0) -> Grade:
        """Lets a network propose `most` plans for every problem."""
        first: list[float] = []
        best: list[float] = []
        for space, grid, known_s in self._problems:
            incumbent = Incumbent(space, Budget(), searcher="dqn")
            episodes = Episodes(HybridDecisions(space), SIDE_BY_SIDE, incumbent.table, known=grid)
            tree = SearchTree(episodes, functools.partial(getattr, incumbent, "best_s"))
            propose(incumbent, episodes, tree, network, seed=seed, most=most)
            reached = [seconds for count, _, seconds in incumbent.improvements if count == 1]
            first.append(min(reached, default=math.inf) / known_s - 1.0)
            best.append(incumbent.best_s / known_s - 1.0)
        return Grade(first=first, best=best)


@dataclass(frozen=True, slots=True)
class Grade:
    """Gaps to the best known plans, as shares of their step times; infinite where nothing that fits was found."""

    first: Sequence[float]
    """Gap of the first plan for each problem."""
    best: Sequence[float]
    """Gap of the best of all proposals."""

    def summary(self) -> dict[str, float]:
        """Means, with at most 1 for each problem, and the worst."""
        return {
            "first_mean": statistics.fmean(min(gap, 1.0) for gap in self.first),
            "first_worst": max(self.first),
            "best_mean": statistics.fmean(min(gap, 1.0) for gap in self.best),
            "best_worst": max(self.best),
        }
