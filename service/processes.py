"""Child processes that never outlive their parent.

Knows nothing of what the processes do.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

from ir.lifetime import die_with_parent


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
