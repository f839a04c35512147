"""What a process can reach that has namespaces of its own, and what becomes of an import where there are none."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from ir.onnx import sandbox
from ir.onnx.fork_server import ForkServer

ENTER = """
import ctypes, json, os, resource, signal, socket, sys, threading
from ir.lifetime import die_with_parent
from ir.onnx.namespaces import leave_others

die_with_parent(signal.SIGKILL, os.getppid())
KINDS = ("user", "net", "ipc", "uts", "mnt")

def spaces():
    return {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in KINDS}

before = spaces()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""
CHILD = f"""{ENTER}
if not leave_others():
    print("null")
    sys.exit()
found = {{"new": [kind for kind in KINDS if spaces()[kind] != before[kind]]}}
found["user"] = os.geteuid()
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=5)
    found["network"] = 0
except OSError as fault:
    found["network"] = fault.errno
try:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 1))  # as root may
    found["rights"] = 0
except (OSError, ValueError):
    found["rights"] = 1
signal_of_death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(signal_of_death))
found["dies with its parent"] = signal_of_death.value == signal.SIGKILL
print(json.dumps(found))
"""
REFUSED = f"""{ENTER}
ended = threading.Event()
threading.Thread(target=ended.wait).start()  # a process of several threads may not
print(leave_others(), spaces() == before)
ended.set()
"""


def run(program: str, *words: str) -> str:
    """What a child prints."""
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Linux offers it")
def test_the_child_is_no_user_and_reaches_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = json.loads(run(CHILD, str(server.getsockname()[1])))
    if found is None:
        pytest.skip("not run: the import's namespaces (this kernel or container refuses them)")
    assert found["new"] == ["user", "net", "ipc", "uts"]
    assert found["user"] == 65534, "no user is mapped"
    assert found["network"], "the service itself is not reached"
    assert found["rights"], "nothing that only root may do"
    assert found["dies with its parent"]


@pytest.mark.skipif(sys.platform != "linux", reason="Linux offers it")
def test_refused_namespaces_change_nothing() -> None:
    assert run(REFUSED).split() == ["False", "True"]


@pytest.mark.slow
def test_an_import_without_namespaces_is_read_and_logged_once(
    light: Callable[[str], bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A second thread makes the kernel refuse: the same answer as of one without namespaces.
    program = """
import threading
from ir.onnx import sandbox
from ir.onnx.fork_server import ForkServer
leave_others = sandbox.leave_others
def beside_a_thread():
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return leave_others()
sandbox.leave_others = beside_a_thread
sandbox.forbid_opening = lambda: None  # which would keep the thread from starting
sandbox.main()
"""
    server = ForkServer((sys.executable, "-P", "-c", program), sandbox.environment())
    monkeypatch.setattr(sandbox, "fork_server", lambda: server)
    sandbox._tell.cache_clear()
    with contextlib.closing(server), caplog.at_level(logging.INFO, logger="automap.import"):
        graphs = [sandbox.import_model(light("squeezenet")) for _ in range(2)]
    assert graphs[0] == graphs[1]
    if sys.platform == "linux":
        assert [record.message for record in caplog.records] == [
            "files are read with limits and without namespaces: the system refuses it"
        ]
