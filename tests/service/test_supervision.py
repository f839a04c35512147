"""What `automap serve` starts is started again whatever went wrong, and ends with it."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from automap.errors import UserError
from service import serve

SLEEPS = [sys.executable, "-c", "import signal; signal.pause()"]


class Stub:
    """In place of the private Redis: dead until a start of it raises nothing."""

    def __init__(self, faults: list[Exception]) -> None:
        self._faults, self._runs = faults, False

    def is_alive(self) -> bool:
        """Whether it was started."""
        return self._runs

    def start(self) -> None:
        """Raises its next fault, if one is left."""
        if self._faults:
            raise self._faults.pop(0)
        self._runs = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[bytes]]]:
    """All workers that were started, which do nothing."""
    found: list[subprocess.Popen[bytes]] = []

    def start(url: str) -> subprocess.Popen[bytes]:
        found.append(subprocess.Popen(SLEEPS))
        return found[-1]

    monkeypatch.setattr(serve, "_start_worker", start)
    monkeypatch.setattr(serve, "_LOOK_S", 0.001)
    monkeypatch.setattr(serve, "_MAX_PAUSE_S", 0.01)
    yield found
    for worker in found:
        worker.kill()
        worker.wait()


@pytest.mark.parametrize(
    ("fault", "shows_where"),
    [
        (redis.ResponseError("MISCONF Errors writing to the AOF file"), True),
        (RuntimeError("can't start new thread"), True),
        (UserError("the private redis-server did not start", field="data_dir", value="x", repair="See x."), False),
        (OSError(11, "Resource temporarily unavailable"), False),
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_start_that_fails_is_told_and_tried_again(
    started: list[subprocess.Popen[bytes]],
    until: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    shows_where: bool,
) -> None:
    stub: Any = Stub([fault, fault])
    with caplog.at_level(logging.ERROR, "automap.serve"), serve._supervised("redis://", 2, stub):
        until(stub.is_alive)
        until(lambda: len(started) == 2)
        started[0].kill()
        until(lambda: len(started) == 3)  # workers are watched over as before
    told = [record for record in caplog.records if "the next attempt follows" in record.getMessage()]
    assert [str(fault) in record.getMessage() for record in told] == [True, True]
    assert {bool(record.exc_info) for record in told} == {shows_where}
    assert all(worker.poll() is not None for worker in started)


def test_a_worker_that_cannot_be_started_is_tried_again(
    started: list[subprocess.Popen[bytes]], until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = serve._start_worker, [OSError(12, "Cannot allocate memory")] * 2

    def sometimes(url: str) -> subprocess.Popen[bytes]:
        if refused:
            raise refused.pop()
        return start(url)

    monkeypatch.setattr(serve, "_start_worker", sometimes)
    with serve._supervised("redis://", 1, None):
        until(lambda: started)
    assert [worker.poll() for worker in started] == [-signal.SIGTERM]


def test_workers_end_though_the_block_fails(started: list[subprocess.Popen[bytes]], until: Callable[..., Any]) -> None:
    with pytest.raises(redis.ResponseError), serve._supervised("redis://", 2, None):
        until(lambda: len(started) == 2)
        raise redis.ResponseError("NOPERM")
    assert all(worker.poll() is not None for worker in started)
