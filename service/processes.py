"""Child processes that never outlive their parent.

Linux tells a process when its parent has died (`prctl(PR_SET_PDEATHSIG)`); elsewhere the calls do nothing.
Knows nothing of what the processes do.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(sig: signal.Signals, parent: int) -> None:
    """Has the kernel send `sig` to this process when its parent dies.

    Args:
        sig: what to send.
        parent: process id of the parent; when it is gone already, `sig` is raised at once.
    """
    if _LIBC is None:
        return
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), sig)


def dying_with_parent(sig: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` that calls `die_with_parent`. Start the child from the main thread: the kernel watches threads."""
    parent = os.getpid()
    return lambda: die_with_parent(sig, parent)


def stop(process: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> None:
    """Ends a child: SIGTERM, then SIGKILL after `grace_s` seconds. Returns once it is gone."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
