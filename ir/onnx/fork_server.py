"""A server process that has imported all modules and forks a child for every task, which takes milliseconds.

Tasks are isolated from each other: each has its own child, and the server never reads the contents of a task. A child
inherits the socket of its task, the file of its task if there is one, and no other open file of the server. It is
killed, together with the processes that it started, when the client gives up or dies. Server and children end when the
process that started the server ends, for whatever reason. The server does not depend on the kind of tasks.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ir.lifetime import die_with_parent

_MOST_READ = 1 << 20
"""Bytes that are read from a socket at a time."""
TASK_FILE = 3
"""Descriptor under which a child has the file of its task: the first one behind the standard streams."""
_END_S = 5.0
"""Seconds that a server is given to end before it is killed."""


class ForkServer:
    """The client of a server process, which it starts at the first task, and again if the server has died.

    Args:
        command: command of a program that calls `serve`.
        environment: environment of that program.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = tuple(command), dict(environment)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        atexit.register(self.close)

    def start(self) -> None:
        """Starts the server unless it is running; does not wait until it is ready."""
        with self._lock:
            self._start()

    def close(self) -> None:
        """Ends the server and its children."""
        with self._lock:
            self._close()

    def ask(self, task: bytes, within_s: float, file: int | None = None) -> tuple[bytes, int]:
        """Runs a task in a child.

        Args:
            task: bytes that the child reads from its socket.
            within_s: seconds after which the child is killed.
            file: descriptor of an open file that the child gets as its descriptor `TASK_FILE`.

        Returns:
            the bytes that the child writes, and its exit status; a negative status is the signal that ended it.

        Raises:
            TimeoutError: the child took longer than `within_s`.
        """
        ends_at = time.monotonic() + within_s
        answer, status = self._asked(task, ends_at, file)
        if status is None:  # the server itself was killed, not because of the task
            answer, status = self._asked(task, ends_at, file)
        return answer, -signal.SIGKILL if status is None else status

    def _asked(self, task: bytes, ends_at: float, file: int | None) -> tuple[bytes, int | None]:
        """The answer of a child and its exit status; status None: the server has died."""
        ours, theirs = socket.socketpair()
        ended, end = os.pipe()
        with ours, os.fdopen(ended, "rb", buffering=0) as told:
            try:
                self._hand_over(theirs.fileno(), end, *(() if file is None else (file,)))
            finally:
                theirs.close()
                os.close(end)
            answer = _exchange(ours, task, ends_at)
            # The status follows at once, unless a child closes its socket and continues to run.
            if not _is_readable(told, ends_at):
                raise TimeoutError
            status = told.read(4)
        return answer, int.from_bytes(status, "little", signed=True) if status else None

    def _hand_over(self, *files: int) -> None:
        """Passes the open files of a task to the server."""
        with self._lock:
            for _ in range(2):
                control = self._start()
                try:
                    socket.send_fds(control, [b"\0"], files)
                    return
                except (BrokenPipeError, ConnectionResetError):
                    self._close()
        raise RuntimeError(f"{self._command[-1]} does not start")

    def _start(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._close()
        if self._control is None:
            self._control, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._environment,
                    start_new_session=True,
                    close_fds=True,
                )
        return self._control

    def _close(self) -> None:
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_END_S)  # it ends with its input
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _is_readable(file: IO[bytes], ends_at: float) -> bool:
    """Waits until a file is readable or at its end; returns False after `ends_at`.

    Unlike `select.select`, it supports file descriptors of any size.
    """
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(max(ends_at - time.monotonic(), 0.0) * 1000))


def _exchange(ours: socket.socket, task: bytes, ends_at: float) -> bytes:
    """Sends a task over a socket, and returns all bytes that the other end writes, whether it reads the task or not."""
    ours.setblocking(False)
    rest, answer, poll = memoryview(task), bytearray(), select.poll()
    poll.register(ours, select.POLLIN | select.POLLOUT)
    while True:
        found = poll.poll(max(ends_at - time.monotonic(), 0.0) * 1000)
        if not found:
            raise TimeoutError
        ((_, events),) = found
        if rest and events & select.POLLOUT:
            try:
                rest = rest[ours.send(rest) :]
            except (BrokenPipeError, ConnectionResetError):  # it has ended
                rest = rest[:0]
            if not rest:
                poll.modify(ours, select.POLLIN)
        if events & (select.POLLIN | select.POLLHUP | select.POLLERR):
            try:
                part = ours.recv(_MOST_READ)
            except ConnectionResetError:  # it ended before it had read all
                part = b""
            if not part:
                return bytes(answer)
            answer += part


# The server


def serve(work: Callable[[], int]) -> None:
    """Forks a child for every task that arrives on standard input, until that is closed.

    Args:
        work: function that performs a task in a single-threaded child: it reads the task from standard input, writes
            the answer to standard output, and returns the exit status.
    """
    server = _Server(work)
    try:
        server.run()
    finally:
        server.end()


class _Server:
    def __init__(self, work: Callable[[], int]) -> None:
        self._work = work
        self._control = socket.socket(fileno=os.dup(0))
        self._poll = select.poll()
        self._children: dict[int, int] = {}
        """Process -> the pipe to which its exit status is written."""
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def run(self) -> None:
        while True:
            for file, _ in self._poll.poll():
                if file == self._control.fileno():
                    data, files, _, _ = socket.recv_fds(self._control, 1, 3)
                    if not data:
                        return
                    self._fork(*files)
                elif file == self._woken:
                    os.read(self._woken, 512)
                    self._reap()
                else:  # the client has given up; the child may have ended in the meantime
                    for child, end in self._children.items():
                        if end == file:
                            self._poll.unregister(file)
                            _kill(child)

    def end(self) -> None:
        """Kills the children."""
        for child in self._children:
            _kill(child)

    def _fork(self, task: int, end: int, file: int | None = None) -> None:
        parent = os.getpid()
        child = os.fork()
        if not child:
            self._be_child(task, file, parent)
        os.close(task)
        if file is not None:
            os.close(file)
        self._children[child] = end
        self._poll.register(end, 0)  # an event mask of 0 still reports that the reader has closed the pipe

    def _be_child(self, task: int, file: int | None, parent: int) -> None:
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            die_with_parent(signal.SIGKILL, parent)
            os.dup2(task, 0)
            os.dup2(task, 1)
            if file is not None:
                os.dup2(file, TASK_FILE)
            os.closerange(TASK_FILE + (file is not None), os.sysconf("SC_OPEN_MAX"))
            status = self._work()
        finally:
            os._exit(status)

    def _reap(self) -> None:
        while self._children:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            end = self._children.pop(child)
            with contextlib.suppress(KeyError):
                self._poll.unregister(end)
            with contextlib.suppress(BrokenPipeError):
                os.write(end, os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
            os.close(end)


def _kill(child: int) -> None:
    """Kills a child that has not been waited for, and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    # In case the child has not yet created its process group.
    os.kill(child, signal.SIGKILL)
