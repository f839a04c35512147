"""One task = one child: what it sees, how its end is told, and who ends with whom."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from child_processes import living

from ir.onnx.fork_server import ForkServer

PROGRAM = """
import os, signal, subprocess, sys
from ir.onnx.fork_server import serve
seen = []
def work():
    status = {}
    exec(sys.stdin.readline(), globals(), status)
    sys.stdout.flush()
    return status.get("status", 0)
serve(work)
"""
COMMAND = (sys.executable, "-P", "-c", PROGRAM)
PARENT = """
import json, os, sys
from ir.onnx.fork_server import ForkServer
server = ForkServer(json.loads(sys.argv[1]), dict(os.environ))
server.ask(("os.kill(%d, signal.SIGUSR1); signal.pause()\\n" % os.getppid()).encode(), 60)
"""
SIMPLE = b"print('answered')\n"


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with contextlib.closing(ForkServer(COMMAND, os.environ)) as found:
        yield found


def told(server: ForkServer, task: str) -> str:
    """What the child of a task prints."""
    answer, status = server.ask(task.encode() + b"\n", 60)
    assert status == 0, answer
    return answer.decode().strip()


def test_a_child_reads_the_file_of_its_task_and_no_other(server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_text("contents")
    task = b"print(os.pread(3, 99, 0).decode(), sorted(map(int, os.listdir('/proc/self/fd'))))\n"
    with path.open("rb") as file:
        answer, status = server.ask(task, 60, file.fileno())
        assert file.tell() == 0
    # The last descriptor is that of the listing itself.
    assert (answer, status) == (b"contents [0, 1, 2, 3, 4]\n", 0)
    assert told(server, "print(sorted(map(int, os.listdir('/proc/self/fd'))))") == "[0, 1, 2, 3]"


def test_answers_and_ends(server: ForkServer) -> None:
    assert server.ask(SIMPLE, 60) == (b"answered\n", 0)
    assert server.ask(b"status = 7\n", 60) == (b"", 7)
    assert server.ask(b"os.kill(os.getpid(), signal.SIGKILL)\n", 60) == (b"", -signal.SIGKILL)
    assert server.ask(b"raise ValueError\n", 60) == (b"", 1)
    # More than a socket holds, both ways, and a child that does not read all that it is given.
    assert server.ask(b"sys.stdout.write('x' * 5_000_000)\n" + b"y" * 5_000_000, 60) == (b"x" * 5_000_000, 0)
    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(lambda _: told(server, "print(os.getpid())"), range(8)))) == 8


def test_a_child_knows_nothing_of_others(server: ForkServer) -> None:
    assert told(server, "seen.append(1); print(seen)") == told(server, "seen.append(1); print(seen)") == "[1]"
    assert told(server, "print(os.getsid(0) == os.getpid(), signal.getsignal(signal.SIGCHLD))") == "True 0"
    if sys.platform != "linux":
        return
    with ThreadPoolExecutor() as pool:  # while another task waits, whose files the server has opened
        ours, theirs = os.pipe()
        waiting = pool.submit(server.ask, f"print(open('/proc/{os.getpid()}/fd/{ours}').read(1))\n".encode(), 60)
        files = told(server, "print(sorted(os.listdir('/proc/self/fd')), os.readlink('/proc/self/fd/2'))")
        os.write(theirs, b"x")
        assert waiting.result() == (b"x\n", 0)
        os.close(ours)
        os.close(theirs)
    assert files == "['0', '1', '2', '3'] /dev/null"  # 3 = the folder itself


def test_whoever_asks_for_too_much_time_is_ended(server: ForkServer) -> None:
    assert server.ask(SIMPLE, 60)[1] == 0
    process = server._process
    assert process is not None
    with pytest.raises(TimeoutError):
        server.ask(b"subprocess.Popen(['sleep', '1000']); signal.pause()\n", 0.2)
    with pytest.raises(TimeoutError):  # one that says nothing more, but lives on
        server.ask(b"os.close(0); os.close(1); signal.pause()\n", 0.2)
    left = psutil.Process(process.pid).children(recursive=True)
    psutil.wait_procs(left, timeout=30)
    assert not living(left)
    assert server.ask(SIMPLE, 60)[1] == 0


def test_a_child_that_ends_when_nobody_waits_any_more_takes_no_others_along(server: ForkServer) -> None:
    assert server.ask(SIMPLE, 60)[1] == 0
    process = server._process
    assert process is not None
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.ask, b"signal.pause()\n", 3.0)
        while not (children := psutil.Process(process.pid).children()):
            assert not asked.done()
        # The server hears of both at once, as on a busy host.
        process.send_signal(signal.SIGSTOP)
        children[0].kill()
        with pytest.raises(TimeoutError):
            asked.result(60)
        process.send_signal(signal.SIGCONT)
    assert server.ask(SIMPLE, 60) == (b"answered\n", 0)
    assert server._process is process and process.poll() is None


def test_a_server_that_was_killed_is_started_again(server: ForkServer) -> None:
    assert server.ask(SIMPLE, 60)[1] == 0
    first = server._process
    assert first is not None
    first.kill()
    first.wait()
    assert server.ask(SIMPLE, 60) == (b"answered\n", 0)
    # In the middle of a task, which is asked of the next one: once.
    assert server.ask(b"os.kill(os.getppid(), signal.SIGKILL); signal.pause()\n", 60) == (b"", -signal.SIGKILL)
    assert server.ask(SIMPLE, 60) == (b"answered\n", 0)


def test_a_server_that_cannot_start_answers_like_a_killed_child() -> None:
    with contextlib.closing(ForkServer((sys.executable, "-c", "pass"), {})) as server:
        assert server.ask(SIMPLE, 60) == (b"", -signal.SIGKILL)


def test_all_end_with_whoever_asked() -> None:
    import json

    began = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda *_: began.set())
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    try:
        parent = subprocess.Popen([sys.executable, "-c", PARENT, json.dumps(COMMAND)], env=environment)
        signalled = threading.Thread(target=began.wait, args=(60,))
        signalled.start()
        while signalled.is_alive():
            signalled.join(0.01)  # where the signal is handled
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert began.is_set()
    left = psutil.Process(parent.pid).children(recursive=True)
    assert len(left) == 2
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive
