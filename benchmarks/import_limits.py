"""Measures what it costs to refuse each hostile file: seconds and peak memory of the import's child process.

    python benchmarks/import_limits.py [WORD]

Every bomb of tests/ir/hostile.py, or each with WORD in its name, goes through the sandbox. Times include the start of
the interpreter and its imports, which is printed first. The committed figures are in benchmarks/results/.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from ir.onnx import sandbox

MIB = 1 << 20
HOSTILE = Path(__file__).resolve().parents[1] / "tests" / "ir" / "hostile.py"

CHILD = (sys.executable, "-P", "-c", "import sys, ir.onnx.sandbox as s; s.answer(sys.stdin.buffer, sys.stdout.buffer)")
"""The command of a child that is not forked, so that all its memory and time are its own."""
# A process starts its life with its parent's peak memory: the child is started by a small one.
MEASURE = """
import json, os, subprocess, sys, time
command, upload, options = json.loads(sys.argv[1])
began = time.perf_counter()
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
child.stdin.write(json.dumps(options).encode() + b"\\n")
with open(upload, "rb") as file:
    while part := file.read(1 << 16):
        try:
            child.stdin.write(part)
        except BrokenPipeError:
            break
try:
    child.stdin.close()
except BrokenPipeError:
    pass
answer = child.stdout.readline().decode()
while child.stdout.read(1 << 20):
    pass
_, status, usage = os.wait4(child.pid, 0)
wall, processor = time.perf_counter() - began, usage.ru_utime + usage.ru_stime
print(json.dumps([wall, processor, usage.ru_maxrss * 1024, status, answer]))
"""


def measure(data: bytes) -> tuple[float, float, float, int, dict]:
    """Imports `data` in the sandbox's child.

    Returns:
        wall seconds; of the child: processor seconds, peak resident bytes, exit status, answer.
    """
    options = {"options": {}, "limits": dataclasses.asdict(sandbox.SandboxLimits()), "size": len(data)}
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        out = subprocess.run(
            [sys.executable, "-S", "-c", MEASURE, json.dumps([CHILD, file.name, options])],
            env=os.environ | sandbox.environment(),
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
    seconds, cpu, peak, status, answer = json.loads(out)
    return seconds, cpu, peak, status, json.loads(answer) if answer else {}


def hostile():
    """The module of the hostile files."""
    spec = importlib.util.spec_from_file_location("automap_hostile", HOSTILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """Prints one line for each hostile file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="only bombs with this word in their name")
    word = parser.parse_args().word
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    module = hostile()
    measure(b"")
    seconds, cpu, peak, _, _ = measure(b"")
    print(f"{seconds:5.2f} s wall {cpu:5.2f} s processor {peak / MIB:4.0f} MiB  nothing: start and imports only")
    worst = (0.0, 0.0, 0.0)
    for name, build in module.bombs():
        if word not in name:
            continue
        data = build()
        seconds, cpu, peak, status, answer = measure(data)
        worst = (max(worst[0], seconds), max(worst[1], cpu), max(worst[2], peak))
        said = answer.get("message", f"status {status}" if status else "imported")
        text = f"{seconds:5.2f} s wall {cpu:5.2f} s processor {peak / MIB:4.0f} MiB"
        print(f"{text}  {name} ({len(data):,} bytes): {said[:70]}", flush=True)
    print(f"worst: {worst[0]:.2f} s wall, {worst[1]:.2f} s processor, {worst[2] / MIB:.0f} MiB")


if __name__ == "__main__":
    main()
