"""Preparation: templates and improved templates of training problems, computed ahead of time by other processes.

Preparing a problem takes up to some seconds, much longer than a network learns on it. The results are small and are
sent to the process that learns.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterator
from multiprocessing.pool import AsyncResult, Pool
from types import TracebackType

import numpy as np

from agents.incumbent import Incumbent
from agents.learning.problems import generate
from agents.learning.proposed_skeletons import known_before
from agents.planners.promising import like_the_best
from agents.planners.template_improvement import improve_templates
from agents.sampling.expert import Grid, grid_of
from agents.searcher import Budget
from automap.errors import UserError
from automap.space.space import PlanSpace
from ir.lifetime import die_with_parent

AHEAD = 4
"""Number of problems that each process prepares ahead of those asked for: some take ten times as long as others."""
PATIENCE_S = 120.0
"""Seconds that are waited for a problem; the slowest take 20 (assumed, as is the number above)."""


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
        """Starts the processes."""
        self._ahead = AHEAD * processes
        self._kept: dict[int, Grid] = {}
        self._pool: Pool | None = None
        if processes:
            context = multiprocessing.get_context("spawn")
            self._pool = context.Pool(processes, _begin, (os.getpid(),))

    def __enter__(self) -> Preparation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.terminate()

    def in_order(self, seeds: Iterator[int]) -> Iterator[int]:
        """The same seeds, each once its problem is prepared.

        Args:
            seeds: seeds of the problems; some more are taken from it than are asked for.
        """
        waiting: deque[tuple[int, AsyncResult[Grid | None] | None]] = deque()
        while True:
            for seed in itertools.islice(seeds, max(1, self._ahead) - len(waiting)):
                is_new = self._pool is not None and seed not in self._kept
                waiting.append((seed, self._pool.apply_async(_prepare, (seed,)) if is_new and self._pool else None))
            if not waiting:
                return
            seed, result = waiting.popleft()
            if result is not None:
                # What a process that was killed has begun never comes; then it is found when it is asked for.
                with contextlib.suppress(multiprocessing.TimeoutError):
                    found = result.get(PATIENCE_S)
                    if found is not None:
                        self._keep(seed, found)
            yield seed

    def known(self, seed: int, space: PlanSpace) -> Grid:
        """What is known of the problem of a seed, see `known_at_first`."""
        if seed not in self._kept:
            self._keep(seed, known_at_first(space))
        values, prices = self._kept[seed]
        return Grid(values.astype(np.int64), prices)

    def _keep(self, seed: int, found: Grid) -> None:
        # Decisions have few values: mostly one byte is enough for each.
        self._kept[seed] = Grid(found.values.astype(np.min_scalar_type(int(found.values.max()))), found.prices)


def _begin(parent: int) -> None:
    """Prepares a process, which ends with its parent."""
    die_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _prepare(seed: int) -> Grid | None:
    try:
        return known_at_first(PlanSpace(generate(seed).problem))
    except UserError:
        return None
