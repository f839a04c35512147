"""A deadline that holds whatever the code under it does.

Searchers look at the clock themselves; on a problem that is far too large they may not come to it in time. Works in
the main thread alone, where signals arrive; elsewhere it does nothing. Units: seconds.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from automap.errors import UserError


class _Late(BaseException):
    """No `Exception`: nobody who repairs errors on the way may take it for one of theirs."""


@contextlib.contextmanager
def deadline(seconds: float, fault: UserError) -> Iterator[None]:
    """Raises `fault` in its block after so many seconds; a timer that ran before, as of RQ, runs on behind it.

    Args:
        seconds: from now.
        fault: what to say then.

    Raises:
        UserError: `fault`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> None:
        raise _Late

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    outer_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _Late:
        raise fault from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if outer_s:
            # One that came due meanwhile rings at once.
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, outer_s - (time.monotonic() - began)))
