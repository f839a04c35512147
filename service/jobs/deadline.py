"""A deadline that holds whatever the code under it does.

Searchers look at the clock themselves; on a problem that is far too large they may not come to it in time. Works in
the main thread alone, where signals arrive; elsewhere it does nothing. Units: seconds.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from automap.errors import UserError

T = TypeVar("T")
AGAIN_S = 1.0
"""Processor time after which a deadline that was lost is raised again: where Python runs a destructor or a callback of
C code, an exception ends that alone and is printed as ignored. Clean-up on the way out takes far less."""


class _Late(BaseException):
    """The deadline has passed. It is no `Exception`, so that no handler on the way catches it."""


def in_time(work: Callable[[], T], seconds: float, grace_s: float, fault: UserError) -> T:
    """The result of `work`, which is ended at a deadline; a timer that ran before, as of a whole job, runs on after it.

    It is no context manager: a signal may arrive between the end of a block and the first line of `__exit__`, and what
    its handler raises there nobody catches.

    Args:
        work: what to do.
        seconds: time from now, by the clock.
        grace_s: processor time beyond it, so that nearly finished work is not lost on a busy host.
        fault: the error to raise.

    Raises:
        UserError: `fault`.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    is_over = False

    def ring(*_: object) -> None:
        if not is_over:
            raise _Late

    def begin_grace(*_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, grace_s, AGAIN_S)

    began = time.monotonic()
    handlers = signal.signal(signal.SIGALRM, begin_grace), signal.signal(signal.SIGPROF, ring)
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    except _Late:
        raise fault from None
    finally:
        is_over = True
        # In this order: the first timer may be the one that starts the second one.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), handlers, strict=True):
            signal.signal(number, handler)
        if outer_s:
            # One that came due meanwhile rings at once.
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer_s - (time.monotonic() - began)))
