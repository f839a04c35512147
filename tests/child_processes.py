"""Children of a process, some of which may end while one looks at them."""

import contextlib
from collections.abc import Iterable

import psutil


def called(word: str, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those processes that still run and have a word in their name or among the words of their command line."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in process.name() or word in process.cmdline():
                found.append(process)
    return found


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those processes that have not ended. A zombie, whose new parent has not waited for it yet, has ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
