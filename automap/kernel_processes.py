"""The processes that compile kernels on the other processor cores, and what is told while kernels are compiled."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from functools import cache
from typing import Any

from automap.phases import is_listened, phase

MOST_PROCESSES = 8
"""Largest number of processes that compile kernels at once (assumed: each takes some hundreds of MB)."""
ALL_KERNELS_S = 110.0
"""Seconds of processor time in which one process compiles all kernels (measured on a shared core of an AMD EPYC with
numba 0.68: 111 s)."""

LOG = logging.getLogger("automap.kernels")


@cache
def num_processes() -> int:
    """Number of processes that compile kernels at once on this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_PROCESSES)


@cache
def start_others() -> list[subprocess.Popen[bytes]]:
    """Has the other processor cores compile kernels too: who misses one kernel soon needs most of them."""
    count = num_processes()
    # -P: folders of the user may have the names of ours.
    program = [sys.executable, "-P", "-m", "automap.compile_all", str(os.getpid())]
    quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return [subprocess.Popen([*program, str(number), str(count)], **quiet) for number in range(1, count)]


def compiling(about: str, *, is_ours: bool) -> contextlib.AbstractContextManager[None]:
    """A phase in which kernels are compiled.

    Where nobody listens to phases, as in a script that calls `agents.search`, it is logged as a warning, once: Python
    shows warnings by default.

    Args:
        about: where the kernels are kept, and how often they are compiled.
        is_ours: whether they are kernels of AutoMAP, so that the time for all of them is known.
    """
    text = f"compiling kernels, {about}"
    if is_ours:
        count = num_processes()
        text += f", up to {ALL_KERNELS_S / count:.0f} s on {count} free core{'s' * (count > 1)}"
        if not is_listened():
            _log_once(text)
    return phase(text)


@cache
def _log_once(text: str) -> None:
    LOG.warning("%s", text)
