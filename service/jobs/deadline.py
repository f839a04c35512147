"""A deadline that ends a block of code from outside, by a signal.

Searchers check the clock themselves, but on a problem that is far too large the next check may come too late. Works
only in the main thread, where signals arrive; in other threads it does nothing. Units: seconds.
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
"""Processor time after which the exception of a deadline is raised again, in case it was lost: in a destructor or a
callback of C code, Python prints an exception and ignores it. Clean-up after the exception takes far less time."""


class _Late(BaseException):
    """The deadline has passed. It is no `Exception`, so that no handler on the way catches it."""


def in_time(work: Callable[[], T], seconds: float, grace_s: float, fault: UserError) -> T:
    """The result of `work`, in which `fault` is raised after some time.

    A timer that ran before, such as that of the whole job, is set again afterwards to the time that is left of it. A
    context manager would not do: where the signal arrives between the end of its block and the first line of
    `__exit__`, nothing catches what the handler raises.

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
            # If the outer timer has expired meanwhile, its signal is sent at once.
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer_s - (time.monotonic() - began)))
