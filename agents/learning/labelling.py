"""Labelling: several processes label generated problems side by side and write to one folder.

What is labelled already is skipped, so an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from agents.learning.labels import Label, LabelWriter, read_labels, seeds_of
from agents.learning.problems import Split, generate, outline
from agents.learning.teacher import Proposer, label
from agents.searcher import Budget
from agents.worker_processes import ProcessKilled, WorkerProcesses

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


def label_problems(
    folder: Path, seeds: Sequence[int], budget: Budget, processes: int, network: Path | None = None
) -> Iterator[Label | None]:
    """Labels all problems that have no label in the folder yet, in processes of one core each.

    With a network, all are searched that have not been searched from its proposals, those that have a label too; the
    faster plan counts. This is expert iteration (arXiv 1705.08439): what a network has learnt from its teachers, and
    finds, becomes the beginning of what they teach the next one.

    Args:
        folder: where the labels are kept; made if it does not exist.
        seeds: seeds of the problems; each search has the seed of its problem.
        budget: of each search.
        processes: number of processes.
        network: folder of a network, see `agents.learning.checkpoint`; None = searches begin as all searches do.

    Yields:
        each label once it is written, in any order; first those that the folder holds already. None stands for a
        problem that could not be labelled, about which there is a warning.

    Raises:
        ProblemError: the folder cannot be written, or the network cannot be read.
    """
    # Whether the folder can be written is found out before processes are started.
    with LabelWriter(folder):
        known = read_labels(folder)
    done = set(known) if network is None else seeds_of(folder, Proposer.read(network).digest) & set(known)
    yield from (known[seed] for seed in seeds if seed in done)
    left = {seed: known.get(seed) for seed in seeds if seed not in done}
    while left:
        count, started = len(left), multiprocessing.get_context("spawn").Value("i", 0)
        with WorkerProcesses(min(processes, count), _Worker.begin, folder, budget, network, started) as workers:
            try:
                for (seed, _), found in workers.each(_Worker.label, list(left.items())):
                    del left[seed]
                    yield found
            except ProcessKilled:
                # What others had begun is lost too, and is begun again as long as some of it is done.
                if len(left) == count:
                    LOG.warning("processes were killed before they could label the problems of seeds %s", [*left])
                    yield from (None for _ in left)
                    return


class _Worker:
    """What a process knows from its beginning on."""

    writer: LabelWriter
    budget: Budget
    proposer: Proposer | None

    @classmethod
    def begin(cls, folder: Path, budget: Budget, network: Path | None, started: Synchronized[int]) -> None:
        """Prepares a process: a core and a file of its own."""
        with started.get_lock():
            number = started.value
            started.value += 1
        if hasattr(os, "sched_setaffinity"):
            # The portfolio uses every core that it may, and the other processes search too.
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[number % len(cores)]})
        cls.writer, cls.budget = LabelWriter(folder), budget
        cls.proposer = None if network is None else Proposer.read(network)

    @classmethod
    def label(cls, asked: tuple[int, Label | None]) -> Label | None:
        """Labels the problem of a seed, of which a label may be known."""
        seed, before = asked
        try:
            found = label(generate(seed), cls.budget, seed, cls.proposer, before)
        except Exception:
            # One problem that fails must not end the labelling of thousands.
            LOG.warning("the problem of seed %d could not be labelled", seed, exc_info=True)
            return None
        cls.writer.write(found)
        return found
