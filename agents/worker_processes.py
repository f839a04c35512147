"""Processes that share tasks, and end with the process that started them.

`multiprocessing.Pool` replaces a process that was killed, for instance because the host ran out of memory, and then
waits for ever for the result of the task that it had begun. Here the loss of a process is an error.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Any, TypeVar

from ir.lifetime import die_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")


class ProcessKilled(Exception):
    """A process ended before it had done its task, and all processes beside it were ended."""


class WorkerProcesses:
    """Fresh processes that take one task after another. They ignore SIGINT and end when their parent ends."""

    def __init__(self, count: int, begin: Callable[..., None] | None = None, *arguments: Any) -> None:
        """Takes what the processes need; they start at the first tasks.

        Args:
            count: number of processes.
            begin: prepares a process; called in each with `arguments`. None = nothing needs to be prepared.
            arguments: what `begin` takes; it must be possible to pickle them.
        """
        self._executor = ProcessPoolExecutor(
            count, multiprocessing.get_context("spawn"), _begin, (os.getpid(), begin, arguments)
        )
        self.is_lost = False
        """Whether a process was killed, after which no tasks are taken any more."""

    def __enter__(self) -> WorkerProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end()  # nobody waits for the tasks under way
        self._executor.shutdown(cancel_futures=True)

    def end(self) -> None:
        """Ends the processes at once; tasks without a result have none."""
        # Public names for this exist since Python 3.14.
        for process in list((self._executor._processes or {}).values()):
            process.kill()
        self._executor.shutdown(cancel_futures=True)

    def begin(self, work: Callable[[Task], Result], task: Task) -> Callable[[], Result]:
        """Begins a task.

        Args:
            work: does the task in one of the processes; a function of a module or a class.
            task: the task.

        Returns:
            A function that waits for the result. It raises `ProcessKilled` if a process was killed meanwhile.

        Raises:
            ProcessKilled: a process was killed before.
        """
        with self._noticing():
            future = self._executor.submit(work, task)

        def result() -> Result:
            with self._noticing():
                return future.result()

        return result

    def each(self, work: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[tuple[Task, Result]]:
        """Each task with its result, in the order in which they are done.

        Args:
            work: does a task in one of the processes; a function of a module or a class.
            tasks: the tasks.

        Raises:
            ProcessKilled: a process was killed; the tasks that were not yielded have no result.
        """
        with self._noticing():
            waiting = {self._executor.submit(work, task): task for task in tasks}
            for done in as_completed(waiting):
                yield waiting[done], done.result()

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except BrokenProcessPool as fault:
            self.is_lost = True
            raise ProcessKilled(str(fault)) from fault


def _begin(parent: int, begin: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    die_with_parent(signal.SIGKILL, parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if begin is not None:
        begin(*arguments)
