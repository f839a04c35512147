"""Lessons: generated problems with the plans that a teacher knows, to learn on; and exams on problems held out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.labels import Label
from agents.learning.network import ProposalNetwork
from agents.learning.preparation import Preparation, opened
from agents.learning.problems import GeneratedProblem, generate
from agents.learning.proposed_skeletons import propose_skeletons
from agents.learning.solved_skeletons import Solved, SolvedSkeletons
from agents.learning.teacher import MAX_SLOWER
from agents.sampling.expert import Grid
from agents.searcher import Budget
from automap.bounds.partial_plans import BoundTable
from automap.errors import UserError
from automap.space.space import PlanSpace, Values

SOLVED = 4
"""Number of proposed skeletons that are solved in an exam, those first of which the network expects most."""


@dataclass
class Taught:
    """The best plan of a problem that is known: a teacher's, until the network finds a better one."""

    values: Values | None = None
    step_time_s: float = math.inf

    def improve(self, values: Values, step_time_s: float) -> None:
        """Takes a plan that fits where it is better by more than what teachers leave out, see `MAX_SLOWER`."""
        if step_time_s < (1.0 - MAX_SLOWER) * self.step_time_s:
            self.values, self.step_time_s = values, step_time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """A problem to learn on."""

    seed: int
    """Seed of the problem."""
    space: PlanSpace
    """Its plan space."""
    known: Grid
    """Plans that are known when its episodes begin: templates, and what a search opens with."""
    taught: Taught
    """The best plan that is known."""
    solved: SolvedSkeletons
    """What the skeletons that the network decides lead to."""

    def solve(self, values: Values) -> Solved:
        """What the skeleton of a plan leads to: what solving it finds, or the best known plan of this skeleton.

        What is found is taught from now on where it is the best.
        """
        found, best, first = self.solved.solve(values), self.taught, self.space.first.signature
        if found.overflow <= 0.0:
            best.improve(found.values, found.step_time_s)
        if best.values is not None and best.values[:first] == values[:first] and best.step_time_s < found.step_time_s:
            return Solved(best.values, best.step_time_s, 0.0)
        return found


def lessons(seeds: Sequence[int], labels: Mapping[int, Label], seed: int, processes: int = 0) -> Iterator[Lesson]:
    """Problems without end, in random order, again and again; those of which nothing fits are left out.

    Where plans of the opening, or what the network finds in a lesson, are faster than the label, the best of these is
    what is taught.

    Args:
        seeds: seeds of the problems.
        labels: what teachers know of them, by seed.
        seed: seed of the order.
        processes: number of processes that prepare problems ahead of time.
    """
    taught: dict[int, Taught] = {}
    useless = {number for number, label in labels.items() if not label.fits}
    with Preparation(processes) as preparation:
        for number in preparation.in_order(_order(seeds, useless, seed)):
            try:
                generated = generate(number)
                space = PlanSpace(generated.problem)
            except UserError:
                useless.add(number)
                continue
            known = preparation.opened(number, space)
            if number not in taught:
                taught[number] = _taught(space, known, labels.get(number), generated)
            solved = SolvedSkeletons(space, known)
            yield Lesson(seed=number, space=space, known=known, taught=taught[number], solved=solved)


def _order(seeds: Sequence[int], useless: Collection[int], seed: int) -> Iterator[int]:
    """The seeds of problems in random order, again and again, without those that have become useless."""
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(np.array([one for one in seeds if one not in useless], dtype=np.int64)).tolist()


def _taught(space: PlanSpace, known: Grid, label: Label | None, generated: GeneratedProblem) -> Taught:
    """The better of a problem's label and of the best known plan; nothing where there is no label of this problem."""
    if label is None or label.values is None or not label.is_of(generated) or len(label.values) != len(space.slots):
        return Taught()
    row = np.array([label.values])
    found = Taught(label.values, float(space.price(row)[0, 0]))
    seconds = np.where(known.prices[:, 1] <= 0.0, known.prices[:, 0], np.inf)
    found.improve(tuple(known.values[seconds.argmin()].tolist()), float(seconds.min()))
    return found


class Exam:
    """Problems on which a network is examined: how far the plans that its skeletons lead to are from the best ones that
    are known."""

    def __init__(self, labels: Iterable[Label]) -> None:
        """Builds the problems of labels with a plan."""
        self._problems: list[tuple[BoundTable, Grid, SolvedSkeletons, float]] = []
        for label in labels:
            if label.step_time_s is not None:
                space = PlanSpace(generate(label.seed).problem)
                known = opened(space)
                self._problems.append((BoundTable(space), known, SolvedSkeletons(space, known), label.step_time_s))

    def grade(self, network: ProposalNetwork, seed: int = 0) -> Grade:
        """Lets a network propose skeletons for every problem, of which the first `SOLVED` are solved."""
        first: list[float] = []
        best: list[float] = []
        for table, known, solved, known_s in self._problems:
            incumbent = Incumbent(table.space, Budget(), searcher="dqn")
            incumbent.table = table
            plans = propose_skeletons(incumbent, known, network, seed)[:SOLVED]
            found = [solved.solve(values) for values in plans]
            seconds = [one.step_time_s if one.overflow <= 0.0 else math.inf for one in found]
            first.append(seconds[0] / known_s - 1.0)
            best.append(min(seconds) / known_s - 1.0)
        return Grade(first=first, best=best)


@dataclass(frozen=True, slots=True)
class Grade:
    """Gaps to the best known plans, as shares of their step times; infinite where nothing that fits was found."""

    first: Sequence[float]
    """Gap of the plan that the first skeleton leads to, for each problem."""
    best: Sequence[float]
    """Gap of the best plan that the first `SOLVED` skeletons lead to."""

    def summary(self) -> dict[str, float]:
        """Means, with at most 1 for each problem, and the worst."""
        return {
            "first_mean": statistics.fmean(min(gap, 1.0) for gap in self.first),
            "first_worst": max(self.first),
            "best_mean": statistics.fmean(min(gap, 1.0) for gap in self.best),
            "best_worst": max(self.best),
        }
