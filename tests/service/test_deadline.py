"""A deadline holds against code that never looks at the clock, and leaves every other timer as it was."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from automap.errors import ProblemError
from service.jobs.deadline import in_time
from service.jobs.run_job import JobRequest, ModelOptions, run_job

# The timer of pytest-timeout would be one more that runs.
pytestmark = pytest.mark.timeout(method="thread")
LATE = ProblemError("late", field="budget", value="1s", repair="Give more.")
TINY = "gpt:layers=2,hidden=64,heads=4,seq_len=16,vocab_size=128"


def forever() -> None:
    while True:
        try:
            time.monotonic()
        except Exception:
            continue


def test_it_ends_what_never_ends() -> None:
    began = time.process_time()
    with pytest.raises(ProblemError, match="late"):
        in_time(forever, 0.05, 0.05, LATE)
    assert time.process_time() - began < 5.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_what_ends_in_time_is_left_alone() -> None:
    before = signal.getsignal(signal.SIGALRM)
    assert in_time(lambda: "done", 60.0, 1.0, LATE) == "done"
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_timer_that_ran_before_runs_on() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 500.0)
    try:
        with pytest.raises(ProblemError):
            in_time(forever, 0.02, 0.02, LATE)
        assert 400.0 < signal.getitimer(signal.ITIMER_REAL)[0] < 500.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_that_a_destructor_loses_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.jobs.deadline.AGAIN_S", 0.02)
    lost = []

    class Slow:
        def __del__(self) -> None:
            try:
                forever()
            finally:
                lost.append(True)

    def work() -> None:
        Slow()
        forever()

    with pytest.raises(ProblemError, match="late"):
        in_time(work, 0.02, 0.02, LATE)
    assert lost == [True]


@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGPROF])
def test_a_signal_after_the_end_of_the_work_does_nothing(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives before its timer is stopped."""
    stop, rung = signal.setitimer, []

    def late(timer: int, seconds: float, interval: float = 0.0) -> Any:
        if not seconds:
            rung.append(timer)
            signal.raise_signal(number)
        return stop(timer, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", late)
    assert in_time(lambda: "done", 60.0, 60.0, LATE) == "done"
    assert rung == [signal.ITIMER_REAL, signal.ITIMER_PROF]
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_other_threads_go_without() -> None:
    done = []

    thread = threading.Thread(target=lambda: in_time(lambda: done.append(True), 0.001, 0.001, LATE))
    thread.start()
    thread.join()
    assert done == [True]


def test_a_search_ends_soon_after_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.jobs.run_job.GRACE_S", 0.05)
    request = JobRequest(
        cluster="8xA100",
        training={"global_batch": 8},
        model=ModelOptions(zoo=TINY),
        budget="0.05s",
        searchers=("mcmc",),
    )
    from service.jobs.run_job import import_graph

    graph = import_graph(b"", request)

    def search(*_: Any, **__: Any) -> Any:
        forever()

    with pytest.raises(ProblemError, match="did not end") as caught:
        run_job(request, lambda: graph, on_progress=lambda _: None, should_stop=lambda: False, search=search)
    assert caught.value.field == "budget"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
