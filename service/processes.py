"""The end of child processes.

Knows nothing of what the processes do.
"""

from __future__ import annotations

import subprocess


def stop(process: subprocess.Popen[bytes], *, grace_s: float = 10.0) -> None:
    """Ends a child: SIGTERM, then SIGKILL after `grace_s` seconds. Returns once it is gone."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
