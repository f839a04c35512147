"""Labelling: several processes label generated problems side by side and write to one folder.

What is labelled already is skipped, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from agents.learning.labels import Label, LabelWriter, read_labels
from agents.learning.problems import Split, generate, outline
from agents.learning.teacher import label
from agents.searcher import Budget
from ir.lifetime import die_with_parent

LOG = logging.getLogger("automap.search")


def chosen_seeds(first: int, count: int, split: Split | None) -> list[int]:
    """The first `count` seeds from `first` on whose problems belong to a split; None = to any."""
    found: list[int] = []
    seed = first
    while len(found) < count:
        if split is None or outline(seed).split == split:
            found.append(seed)
        seed += 1
    return found


def label_problems(folder: Path, seeds: Sequence[int], budget: Budget, processes: int) -> Iterator[Label | None]:
    """Labels all problems that have no label in the folder yet, in processes of one core each.

    Args:
        folder: where the labels are kept; made if it does not exist.
        seeds: seeds of the problems; each search has the seed of its problem.
        budget: of each search.
        processes: number of processes.

    Yields:
        each label once it is written, in any order; first those that the folder holds already. None stands for a
        problem that could not be labelled, about which there is a warning.

    Raises:
        ProblemError: the folder cannot be written.
    """
    # Whether the folder can be written is found out before processes are started.
    with LabelWriter(folder):
        known = read_labels(folder)
    yield from (known[seed] for seed in seeds if seed in known)
    left = [seed for seed in seeds if seed not in known]
    if not left:
        return
    context = multiprocessing.get_context("spawn")
    arguments = (folder, budget, os.getpid(), context.Value("i", 0))
    with context.Pool(min(processes, len(left)), _Worker.begin, arguments) as pool:
        yield from pool.imap_unordered(_Worker.label, left)


class _Worker:
    """What a process knows from its beginning on."""

    writer: LabelWriter
    budget: Budget

    @classmethod
    def begin(cls, folder: Path, budget: Budget, parent: int, started: Synchronized[int]) -> None:
        """Prepares a process: a core and a file of its own. It ends with its parent."""
        die_with_parent(signal.SIGKILL, parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with started.get_lock():
            number = started.value
            started.value += 1
        if hasattr(os, "sched_setaffinity"):
            # The portfolio uses every core that it may, and the other processes search too.
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[number % len(cores)]})
        cls.writer, cls.budget = LabelWriter(folder), budget

    @classmethod
    def label(cls, seed: int) -> Label | None:
        """Labels the problem of a seed."""
        try:
            found = label(generate(seed), cls.budget, seed)
        except Exception:
            # One problem that fails must not end the labelling of thousands.
            LOG.warning("the problem of seed %d could not be labelled", seed, exc_info=True)
            return None
        cls.writer.write(found)
        return found
