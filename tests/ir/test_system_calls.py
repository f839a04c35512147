"""What a process can do that has given up all but computing."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

CHILD = """
import json, os, resource, socket, subprocess, sys
from ir.onnx.system_calls import keep_computing_only

keep_computing_only()
TRIES = {
    "open": lambda: open("/etc/passwd"),
    "rename": lambda: os.rename("/nowhere/a", "/nowhere/b"),
    "remove": lambda: os.unlink("/nowhere/a"),
    "link": lambda: os.symlink("/nowhere/a", "/nowhere/b"),
    "look": lambda: os.stat("/"),
    "fork": os.fork,
    "signal": lambda: os.kill(os.getppid(), 0),
    "trace": lambda: resource.prlimit(os.getppid(), resource.RLIMIT_CORE),
    "socket": socket.socket,
    "directory": lambda: os.chdir("/"),
    "user": lambda: os.setuid(0),
    "execute": lambda: os.execv("/bin/true", ["true"]),
}
found = {}
for name, attempt in TRIES.items():
    try:
        attempt()
        found[name] = 0
    except OSError as fault:
        found[name] = fault.errno
# Computing goes on: memory, time, limits of its own, output.
len(bytearray(1 << 26)), sum(x * x for x in range(1000)), resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print(json.dumps(found))
"""


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"), reason="Linux offers it"
)
def test_nothing_but_computing_is_left() -> None:
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert len(found) == 12
    assert {name: number for name, number in found.items() if number != 1} == {}
