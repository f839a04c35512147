"""A child process that does not outlive its parent.

Linux tells a process when its parent has died (`prctl(PR_SET_PDEATHSIG)`); elsewhere the call does nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(sig: signal.Signals, parent: int) -> None:
    """Has the kernel send `sig` to this process when its parent dies.

    Args:
        sig: the signal to send.
        parent: process id of the parent; when it is gone already, `sig` is raised at once.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)
