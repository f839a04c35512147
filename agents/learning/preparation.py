"""Preparation: templates and improved templates of training problems, computed ahead of time by other processes.

Preparing a problem takes up to some seconds, much longer than a network learns on it. The results are small and are
sent to the process that learns.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.problems import generate
from agents.learning.proposed_skeletons import known_before
from agents.planners.promising_templates import like_the_best
from agents.planners.template_improvement import improve_templates
from agents.sampling.expert import Grid, grid_of
from agents.searcher import Budget
from agents.worker_processes import ProcessKilled, WorkerProcesses
from automap.errors import UserError
from automap.space.space import PlanSpace

LOG = logging.getLogger(__name__)
AHEAD = 4
"""Number of problems that each process prepares ahead of those asked for (assumed): some take ten times as long as
others."""


def opened(space: PlanSpace) -> Grid:
    """The templates, and what a search works out from them before a network proposes anything."""
    templates = grid_of(space)
    return templates.joined(improve_templates(Incumbent(space, Budget(), searcher="elimination"), templates).plans())


def known_at_first(space: PlanSpace) -> Grid:
    """The plans that a network knows when it proposes skeletons, see `agents.learning.proposed_skeletons`."""
    templates = grid_of(space)
    search = improve_templates(Incumbent(space, Budget(), searcher="elimination"), templates)
    return known_before(search, templates, like_the_best(space, templates, search.plans(None).values))


class Preparation:
    """Prepares generated problems in processes of one core each; without any, when they are asked for.

    What was found of a problem is kept: it may be visited again and again.
    """

    def __init__(self, processes: int) -> None:
        """Takes the number of processes; they start when the first problems are asked for."""
        self._processes = processes
        self._kept: dict[int, Grid] = {}
        self._workers = WorkerProcesses(processes) if processes else None
        self._is_useful = False
        """Whether these processes have prepared a problem."""

    def __enter__(self) -> Preparation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._workers is not None:
            self._workers.end()

    def in_order(self, seeds: Iterator[int]) -> Iterator[int]:
        """The same seeds, each once its problem is prepared.

        Args:
            seeds: seeds of the problems; some more are taken from it than are asked for.
        """
        waiting: deque[tuple[int, Callable[[], Grid | None] | None]] = deque()
        while True:
            for seed in itertools.islice(seeds, max(1, AHEAD * self._processes) - len(waiting)):
                waiting.append((seed, self._begun(seed)))
            if not waiting:
                return
            seed, result = waiting.popleft()
            if result is not None:
                try:
                    found = result()
                except ProcessKilled:
                    # What the processes had begun never comes; it is found when it is asked for.
                    self._replace()
                else:
                    self._is_useful = True
                    if found is not None:
                        self._keep(seed, found)
            yield seed

    def _begun(self, seed: int) -> Callable[[], Grid | None] | None:
        """Waits for the problem of a seed, which another process begins to prepare; None where none does."""
        if self._workers is None or seed in self._kept:
            return None
        try:
            return self._workers.begin(_prepare, seed)
        except ProcessKilled:
            self._replace()
            return None

    def _replace(self) -> None:
        """Starts other processes in place of those that were lost, unless these were of no use."""
        if self._workers is None or not self._workers.is_lost:
            return
        self._workers.end()
        LOG.warning("a process that prepared problems was killed%s", "" if self._is_useful else ": no other is started")
        self._workers = WorkerProcesses(self._processes) if self._is_useful else None
        self._is_useful = False

    def known(self, seed: int, space: PlanSpace) -> Grid:
        """What is known of the problem of a seed, see `known_at_first`."""
        if seed not in self._kept:
            self._keep(seed, known_at_first(space))
        values, prices = self._kept[seed]
        return Grid(values.astype(np.int64), prices)

    def _keep(self, seed: int, found: Grid) -> None:
        # Decisions have few values: mostly one byte is enough for each.
        self._kept[seed] = Grid(found.values.astype(np.min_scalar_type(int(found.values.max()))), found.prices)


def _prepare(seed: int) -> Grid | None:
    try:
        return known_at_first(PlanSpace(generate(seed).problem))
    except UserError:
        return None
