"""Processes that share tasks: every task has its result or an error, and nobody waits for what never comes."""

import gc
import signal
import time

import pytest

from agents.worker_processes import ProcessKilled, WorkerProcesses

pytestmark = pytest.mark.slow


def test_each_task_has_its_result():
    with WorkerProcesses(2, gc.collect) as workers:
        assert dict(workers.each(abs, range(-5, 0))) == {-n: n for n in range(1, 6)}
        assert list(workers.each(abs, [-7])) == [(-7, 7)]


def test_a_process_that_is_killed_is_an_error():
    with WorkerProcesses(1, gc.collect) as workers:
        # `raise_signal(0)` does nothing.
        found = workers.each(signal.raise_signal, [0, signal.SIGKILL])
        assert next(found) == (0, None) and not workers.is_lost
        with pytest.raises(ProcessKilled):
            next(found)
        assert workers.is_lost
        with pytest.raises(ProcessKilled):
            next(workers.each(abs, [1]))


def test_processes_that_are_killed_as_they_begin_are_an_error():
    with WorkerProcesses(2, signal.raise_signal, signal.SIGKILL) as workers, pytest.raises(ProcessKilled):
        list(workers.each(abs, range(5)))


def test_what_a_task_raises_is_raised():
    with pytest.raises(ValueError, match="must be non-negative"), WorkerProcesses(1, gc.collect) as workers:
        list(workers.each(time.sleep, [-1]))


def test_tasks_under_way_are_not_waited_for():
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), WorkerProcesses(2, gc.collect) as workers:
        for _ in workers.each(time.sleep, [0, 600, 600, 600]):
            raise KeyboardInterrupt
    assert time.monotonic() - began < 300


def test_tasks_that_are_begun_one_by_one():
    with WorkerProcesses(1) as workers:
        first, killed = workers.begin(abs, -3), workers.begin(signal.raise_signal, signal.SIGKILL)
        assert first() == 3
        with pytest.raises(ProcessKilled):
            killed()
        assert workers.is_lost
        with pytest.raises(ProcessKilled):
            workers.begin(abs, 1)


def test_what_is_ended_is_not_waited_for():
    began = time.monotonic()
    with WorkerProcesses(1) as workers:
        waits = workers.begin(time.sleep, 600)
        workers.end()
        with pytest.raises(ProcessKilled):
            waits()
    assert time.monotonic() - began < 300
