"""Problems that other processes prepare are the same as those that are prepared when they are asked for."""

import itertools
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
from template_labels import template_label

from agents.learning import preparation
from agents.learning.labels import Label, drawn_version
from agents.learning.lessons import fastest_s, lessons
from agents.learning.preparation import Preparation
from agents.learning.problems import generate
from agents.sampling.expert import grid_of
from agents.worker_processes import WorkerProcesses
from automap.space.space import PlanSpace

SEEDS = (9, 10, 17)


def never(space):
    raise AssertionError("it has been prepared")


@pytest.mark.slow
def test_problems_come_in_order_and_prepared(monkeypatch):
    spaces = {seed: PlanSpace(generate(seed).problem) for seed in SEEDS}
    with Preparation(1) as others, monkeypatch.context() as patched:
        patched.setattr(preparation, "known_at_first", never)
        for seed, expected in zip(others.in_order(iter(SEEDS * 2)), SEEDS * 2, strict=True):
            assert seed == expected
            found, templates = others.known(seed, spaces[seed]), grid_of(spaces[seed])
            # What is worked out behind the templates depends on the time that it took.
            np.testing.assert_array_equal(found.prices, spaces[seed].price(found.values))
            assert fastest_s(found) <= fastest_s(templates) and found.values.dtype == np.int64


@pytest.mark.slow
def test_where_processes_are_killed_at_once_problems_are_found_when_they_are_asked_for(monkeypatch, caplog):
    def killed(count):
        return WorkerProcesses(count, signal.raise_signal, signal.SIGKILL)

    monkeypatch.setattr(preparation, "WorkerProcesses", killed)
    with Preparation(1) as others:
        assert list(others.in_order(iter(SEEDS))) == list(SEEDS)
        space = PlanSpace(generate(10).problem)
        assert fastest_s(others.known(10, space)) <= fastest_s(grid_of(space))
    assert [record.getMessage() for record in caplog.records] == [
        "a process that prepared problems was killed: no other is started"
    ]


@pytest.mark.slow
def test_processes_that_are_killed_in_between_are_replaced(monkeypatch, caplog):
    """What they had begun is found when it is asked for, and what comes later is prepared again."""
    monkeypatch.setattr(preparation, "AHEAD", 1)
    with Preparation(1) as others:
        order = others.in_order(iter(SEEDS))
        assert next(order) == SEEDS[0]
        (process,) = others._workers._executor._processes
        os.kill(process, signal.SIGKILL)
        assert tuple(order) == SEEDS[1:]
        assert sorted(others._kept) == [SEEDS[0], SEEDS[2]]
    assert [record.getMessage() for record in caplog.records] == ["a process that prepared problems was killed"]


def test_without_processes_problems_are_prepared_once(monkeypatch):
    asked = []
    monkeypatch.setattr(preparation, "known_at_first", lambda space: asked.append(space) or grid_of(space))
    with Preparation(0) as alone:
        for seed in alone.in_order(iter((10, 10))):
            alone.known(seed, PlanSpace(generate(seed).problem))
    assert len(asked) == 1


def test_problems_of_which_nothing_fits_are_left_out(monkeypatch):
    monkeypatch.setattr(preparation, "known_at_first", grid_of)
    useless = Label(seed=10, version=drawn_version(10), digest="", fits=False, seconds=0.0)
    found = [lesson.seed for lesson in itertools.islice(lessons(SEEDS, {10: useless}, seed=0), 6)]
    assert sorted(found) == sorted((9, 17) * 3)


def test_problems_with_nothing_to_learn_come_less_often(monkeypatch):
    monkeypatch.setattr(preparation, "known_at_first", grid_of)
    known = {seed: template_label(seed) for seed in SEEDS}
    # A plan that is faster than all that is known before.
    taught = {**known, 9: replace(known[9], step_time_s=0.9 * known[9].step_time_s)}
    found = list(itertools.islice(lessons(SEEDS, taught, seed=0), 60))
    assert found[-1].seed in SEEDS and sum(lesson.seed == 9 for lesson in found) > 40
    assert all(lesson.best == known[lesson.seed].values for lesson in found)
    easy = [lesson.seed for lesson in itertools.islice(lessons(SEEDS, known, seed=0), 6)]
    assert sorted(easy) == sorted(SEEDS * 2)
