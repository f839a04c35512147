"""Lessons: generated problems with the plans that a teacher knows, to learn on; and exams on problems held out."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.labels import Label
from agents.learning.network import ProposalNetwork
from agents.learning.preparation import Preparation, opened
from agents.learning.problems import generate
from agents.learning.proposals import PROPOSALS, SIDE_BY_SIDE, propose
from agents.learning.search_tree import SearchTree
from agents.sampling.expert import Grid
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


def lessons(seeds: Sequence[int], labels: Mapping[int, Label], seed: int, processes: int = 0) -> Iterator[Lesson]:
    """Problems without end, in random order, again and again; those of which nothing fits are left out.

    Where the plans of the opening are faster than the label, the best of these is what is taught.

    Args:
        seeds: seeds of the problems.
        labels: what teachers know of them, by seed.
        seed: seed of the order.
        processes: number of processes that prepare problems ahead of time.
    """
    useless = {number for number, label in labels.items() if not label.fits}
    with Preparation(processes) as preparation:
        for number in preparation.in_order(_order(seeds, useless, seed)):
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
            known = preparation.opened(number, space)
            if label is not None and label.step_time_s is not None:
                best = _faster(known, label.step_time_s) or best
            yield Lesson(seed=number, space=space, known=known, best=best)


def _order(seeds: Sequence[int], useless: Collection[int], seed: int) -> Iterator[int]:
    """The seeds of problems in random order, again and again, without those that have become useless."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(np.array([one for one in seeds if one not in useless], dtype=np.int64)).tolist()


def _faster(grid: Grid, than_s: float) -> Values | None:
    """The fastest plan that fits, if it is faster than a step time in seconds."""
    seconds = np.where(grid.prices[:, 1] <= 0.0, grid.prices[:, 0], np.inf)
    if not len(seconds) or seconds.min() >= than_s:
        return None
    return tuple(grid.values[seconds.argmin()].tolist())


class Exam:
    """Problems on which a network is examined: how far its plans are from the best ones that are known."""

    def __init__(self, labels: Iterable[Label]) -> None:
        """Builds the problems of labels with a plan."""
        self._problems: list[tuple[PlanSpace, Grid, float]] = []
        for label in labels:
            if label.step_time_s is not None:
                space = PlanSpace(generate(label.seed).problem)
                self._problems.append((space, opened(space), label.step_time_s))

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
