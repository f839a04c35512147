"""Runs the demonstration, writes what it shows into the README and its plans to docs/plans.

    python benchmarks/readme_demo.py [--budget 25s]

A test (`tests/service/test_demo.py`) prices the plans of docs/plans again and compares every line with the README. If
it fails because the price or the words of a report have changed, run this script on a quiet host.
"""

import argparse
import contextlib
import io
import shutil
import sys
from pathlib import Path

from service.command.demo import run_demo

ROOT = Path(__file__).resolve().parents[1]
README, PLANS = ROOT / "README.md", ROOT / "docs" / "plans"
BEGIN, END = "<!-- demo output: begin -->\n```\n", "```\n<!-- demo output: end -->"


class Both(io.StringIO):
    """A stream that keeps what is written to it and also writes it to the standard output of its creation."""

    def __init__(self) -> None:
        super().__init__()
        self._shown = sys.stdout

    def write(self, text: str) -> int:
        self._shown.write(text)
        self._shown.flush()
        return super().write(text)


def main() -> None:
    """Runs the demonstration, and writes README and plans if every plan passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--budget", default="25s")
    budget = parser.parse_args().budget
    folder, shown = Path("demo"), Both()
    with contextlib.redirect_stdout(shown):
        failed = run_demo(folder, budget=budget)
    if failed:
        raise SystemExit("nothing is written")
    # The first paragraph says where the service runs.
    _, _, text = shown.getvalue().partition("\n\n")
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + BEGIN + text + END + after)
    PLANS.mkdir(exist_ok=True)
    for plan in sorted(folder.glob("*/plan.json")):
        shutil.copy(plan, PLANS / f"{plan.parent.name}.json")


if __name__ == "__main__":
    main()
