"""How long a person waits for quick commands: help, a model's summary, the price of a plan.

    python benchmarks/start_up.py [--rounds 11] [--only WORD]

Prints the median and the range of processor time (user and system, threads included) and of wall time, with kernels and
bytecode cached. Each limit is one of the median processor time, because a busy host adds to this only a quarter
(measured) and no waiting. If a limit is exceeded, the exit status is 1.
"""

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time

LIMITS = {
    "--help": 0.4,
    "inspect zoo:gpt2": 1.0,
    "estimate zoo:gpt2 --cluster 8xA100 --global-batch 64 --tp 2": 0.6,
}
"""Command -> seconds."""


def run(command: str) -> tuple[float, float]:
    """Seconds of processor time and of wall time that one command takes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, began = os.times(), time.monotonic()
    words = [sys.executable, "-m", "service.command", *shlex.split(command)]
    subprocess.run(words, env=environment, capture_output=True, check=True)
    now = os.times()
    used = now.children_user + now.children_system - before.children_user - before.children_system
    return used, time.monotonic() - began


def main() -> int:
    """Runs each command once to fill caches, then measures it; 1 where a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", default="", help="only commands with this word in them")
    options = parser.parse_args()
    print(f"{time.strftime('%Y-%m-%d %H:%M')}, Python {platform.python_version()}, {options.rounds} rounds, ", end="")
    print(f"{len(os.sched_getaffinity(0))} cores, on which {os.getloadavg()[0]:.1f} processes run")
    print(f"{'limit':>6} {'processor':>10} {'from':>6} {'to':>6} {'wall':>6} {'from':>6} {'to':>6}  command, seconds")
    within = True
    for command, limit_s in LIMITS.items():
        if options.only not in command:
            continue
        run(command)
        columns = zip(*(run(command) for _ in range(options.rounds)), strict=True)
        figures = [(statistics.median(times), min(times), max(times)) for times in columns]
        within &= figures[0][0] <= limit_s
        shown = "".join(f" {value:>{width}.2f}" for row, first in zip(figures, (10, 6), strict=True)
                        for value, width in zip(row, (first, 6, 6), strict=True))  # fmt: skip
        print(f"{limit_s:>6}{shown}  automap {command}", flush=True)
    print("Every limit is kept." if within else "A limit is exceeded.")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
