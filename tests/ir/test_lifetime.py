"""Child processes that end with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from ir import lifetime

SLEEP = "import signal; signal.pause()"


def test_a_command_ends_with_the_process_that_started_it() -> None:
    """Its parent is killed while the pipe that both have is open: its end is the end of both."""
    shows = f"import os, signal; print(os.getpid(), flush=True); {SLEEP}"
    parent = (
        f"import signal, subprocess; from ir import lifetime\n"
        f"subprocess.Popen(lifetime.command(signal.SIGKILL, {[sys.executable, '-c', shows]!r})); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None
        child = int(started.stdout.readline())
        assert os.getpgid(child) == os.getpgid(started.pid)
        started.kill()
        assert started.stdout.read() == b""


def test_a_command_whose_parent_is_gone_does_not_begin() -> None:
    words = lifetime.command(signal.SIGTERM, [sys.executable, "-c", "print('it runs')"])
    words[words.index(str(os.getpid()))] = "1"
    found = subprocess.run(words, capture_output=True, check=False)
    assert (found.returncode, found.stdout) == (-signal.SIGTERM, b"")


def test_a_command_has_the_signals_of_a_new_process() -> None:
    """Python ignores SIGPIPE, and its children would too."""
    code = "print(open('/proc/self/status').read())"
    own = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    under = lifetime.command(signal.SIGTERM, ["/bin/sh", "-c", "cat /proc/self/status"])
    cat = subprocess.run(under, capture_output=True, text=True, check=True).stdout

    def ignored(status: str) -> int:
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")), 16)

    pipe = 1 << (signal.SIGPIPE - 1)
    assert ignored(own) & pipe and not ignored(cat) & pipe
