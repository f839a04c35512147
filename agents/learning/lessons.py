"""Lessons and exams: generated problems for training a network, and for evaluating it.

A lesson is a problem to learn from, with the plan that a teacher knows for it. An exam is a set of held-out problems on
which the proposals of the network are compared with the best known plans.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.labels import Label
from agents.learning.network import ProposalNetwork
from agents.learning.preparation import Preparation, known_at_first
from agents.learning.problems import generate
from agents.learning.proposed_skeletons import SKELETONS, by_promise, proposals, solve_first
from agents.planners.descents import descend
from agents.planners.elimination import propose
from agents.planners.skeletons import SkeletonSearch
from agents.sampling.expert import Grid
from agents.searcher import Budget
from automap.errors import UserError
from automap.space.space import PlanSpace, Values

TAUGHT = 0.002
"""Least share of the step time by which a teacher's plan is faster than all plans known before, so that there is
something to learn (assumed). On two of three generated problems there is not."""

EASY = 0.15
"""Share of the problems with nothing to learn that come again in a round (assumed)."""
EXAMINED_SKELETONS = 8
"""Number of skeletons that are solved for each problem of an exam (assumed)."""
LOOKED_AT = 4
"""Number of labels, for each problem of an exam, that are looked at for problems with something to learn (assumed)."""


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
    """Problems without end, in random order, again and again.

    Those of which nothing fits are left out. Those whose label is no faster than what is known before come again less
    often (`EASY`): completions lead there without a network.

    Args:
        seeds: seeds of the problems.
        labels: what teachers know of them, by seed.
        seed: seed of the order.
        processes: number of processes that prepare problems ahead of time.
    """
    useless = {number for number, label in labels.items() if not label.fits}
    easy: set[int] = set()
    with Preparation(processes) as preparation:
        for number in preparation.in_order(_order(seeds, useless, easy, seed)):
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
            known = preparation.known(number, space)
            label_s = label.step_time_s if label is not None else None
            if label_s is not None and fastest_s(known) <= (1.0 + TAUGHT) * label_s:
                easy.add(number)
            yield Lesson(seed=number, space=space, known=known, best=best)


def _order(seeds: Sequence[int], useless: Collection[int], easy: Collection[int], seed: int) -> Iterator[int]:
    """The seeds of problems in random order, again and again, without those that have become useless, and with a part
    of those that have become easy."""
    rng = np.random.default_rng(seed)
    while True:
        left = [one for one in seeds if one not in useless]
        hard = [one for one in left if one not in easy]
        some = [one for one in left if one in easy and (not hard or rng.random() < EASY)]
        yield from rng.permutation(np.array(hard + some, dtype=np.int64)).tolist()


def fastest_s(grid: Grid) -> float:
    """Step time of the fastest plan that fits; infinite where none does."""
    return float(np.where(grid.prices[:, 1] <= 0.0, grid.prices[:, 0], np.inf).min(initial=np.inf))


class Exam:
    """Problems on which a network is examined: how far from the best plans that are known its skeletons lead.

    Attributes:
        count: number of the problems.
    """

    def __init__(self, labels: Iterable[Label], most: int) -> None:
        """Builds the problems of labels with a plan.

        Args:
            labels: the labels; those are taken first whose plans are faster than what is known without a network.
            most: number of problems; they are chosen from `LOOKED_AT` times as many labels at most.
        """
        some = itertools.islice((label for label in labels if label.step_time_s is not None), LOOKED_AT * most)
        hard: list[tuple[PlanSpace, Grid, float]] = []
        easy: list[tuple[PlanSpace, Grid, float]] = []
        for label in some:
            space, best_s = PlanSpace(generate(label.seed).problem), label.step_time_s or math.inf
            known = known_at_first(space)
            is_easy = fastest_s(known) <= (1.0 + TAUGHT) * best_s
            (easy if is_easy else hard).append((space, known, best_s))
            if len(hard) == most:
                break
        self._problems = [*hard, *easy][:most]
        self.count = len(self._problems)

    def grade(self, network: ProposalNetwork) -> Grade:
        """Lets a network propose skeletons for every problem and solves the first one, and then the best ones."""
        first: list[float] = []
        best: list[float] = []
        for space, known, known_s in self._problems:
            incumbent = Incumbent(space, Budget(), searcher="dqn")
            search = SkeletonSearch(incumbent, propose)
            skeletons = proposals(incumbent, known, network, seed=0, decided=space.first.signature)
            skeletons.go_on(1)
            solve_first(search, skeletons)
            first.append(incumbent.best_s / known_s - 1.0)
            skeletons.go_on(SKELETONS - 1)
            for values in by_promise(skeletons)[:EXAMINED_SKELETONS]:
                descend(search, values)
            best.append(incumbent.best_s / known_s - 1.0)
        return Grade(first=first, best=best)


@dataclass(frozen=True, slots=True)
class Grade:
    """Gaps to the best known plans, as shares of their step times; infinite where nothing that fits was found."""

    first: Sequence[float]
    """Gap of the first plan for each problem."""
    best: Sequence[float]
    """Gap of the best plan."""

    def summary(self) -> dict[str, float]:
        """Means, with at most 1 for each problem, and the worst."""
        return {
            "first_mean": statistics.fmean(min(gap, 1.0) for gap in self.first),
            "first_worst": max(self.first),
            "best_mean": statistics.fmean(min(gap, 1.0) for gap in self.best),
            "best_worst": max(self.best),
        }
