"""A child process that does not outlive its parent.

Linux tells a process when its parent has died (`prctl(PR_SET_PDEATHSIG)`); elsewhere the call does nothing. Run as a
program, `python ir/lifetime.py SIGNAL PARENT COMMAND...` asks for the signal and becomes the command: the request stays
(prctl(2)). So a process with several threads needs no `preexec_fn`, which may deadlock there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

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


def command(sig: signal.Signals, words: Sequence[str]) -> list[str]:
    """The command line of a child of this process that gets `sig` when the thread that starts it ends.

    Args:
        sig: the signal to send.
        words: the child's own command line; the first word is the path of a program.
    """
    return [sys.executable, "-I", "-S", __file__, str(int(sig)), str(os.getpid()), *words]


def main() -> None:
    """Becomes the command that the arguments name."""
    number, parent, *words = sys.argv[1:]
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a command would inherit that
    die_with_parent(signal.Signals(int(number)), int(parent))
    os.execv(words[0], words)  # noqa: S606


if __name__ == "__main__":
    main()
