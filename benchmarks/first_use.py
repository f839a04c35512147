"""The tutorial as a new user follows it, with what it prints and how long each command takes.

    python benchmarks/first_use.py [--installed]

Without --installed it clones this checkout, and the tutorial's own commands make a clean environment there and install
AutoMAP into it: first what planning needs, later what a model of one's own and its training need. The first plan is for
a model that AutoMAP knows, the second for one's own. The kernels are compiled anew. With --installed the commands of
this environment are used and the installation is left out, as the tests do. Each line that the tutorial shows must be
printed; it may end in `…`, and the tutorial may leave out lines. The transcript goes to the standard output.
"""

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from service.command.main import main as main_of_automap

ROOT = Path(__file__).resolve().parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"


def steps(page: str) -> list[tuple[str, str, str]]:
    """(kind, what, text) of each block of a page: a file, its name and content; or commands and what they show."""
    found = []
    for before, language, block in re.findall(r"([^\n]*)\n\n```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        name = re.search(r"Write `([^`]+)`", before)
        if language and name is not None:
            found.append(("file", name[1], block))
        elif not language:
            commands, _, shown = block.partition("\n\n")
            found.append(("commands", commands.strip(), shown))
    return found


def lacking(shown: str, printed: str) -> list[str]:
    """The lines that are shown but not printed."""
    printed = " ".join(printed.split())
    return [line for line in shown.splitlines() if " ".join(line.split()).removesuffix("…").rstrip() not in printed]


def in_shell(commands: str, folder: Path) -> str:
    """What commands print in the environment that the tutorial makes; ends the script where one fails."""
    environment = {**os.environ, "COLUMNS": "120", "PIP_QUIET": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    environment.pop("PYTHONPATH", None)
    activate = "source .venv/bin/activate 2> /dev/null || true\n"
    ran = subprocess.run(
        ["bash", "-euc", activate + commands], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        raise SystemExit(f"{commands}\n{ran.stdout}\n{ran.stderr}")
    return ran.stdout


def in_process(commands: str, folder: Path) -> str:
    """What commands print here: those of `automap` are called, and torchrun is that of this environment."""
    printed = io.StringIO()
    for words in (shlex.split(line) for line in commands.replace("\\\n", " ").splitlines()):
        if words[0] == "automap":
            with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
                status = main_of_automap(words[1:])
            if status != 0:
                raise SystemExit(f"{words} ends with {status}")
        else:
            program = [sys.executable, "-m", "torch.distributed.run"] if words[0] == "torchrun" else words[:1]
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            ran = subprocess.run(
                [*program, *words[1:]], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
            )
            printed.write(ran.stdout)
    return printed.getvalue()


def main() -> int:
    """Follows the tutorial; 1 if it shows what is not printed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--installed", action="store_true", help="use this environment")
    options = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "automap"
        if options.installed:
            folder.mkdir()
        else:
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        load = f"{len(os.sched_getaffinity(0))} cores, on which {os.getloadavg()[0]:.1f} processes run"
        print(f"{time.strftime('%Y-%m-%d %H:%M')}, {load}\n")
        began, planned = time.monotonic(), []
        for kind, what, text in steps(TUTORIAL.read_text()):
            if kind == "file":
                (folder / what).parent.mkdir(exist_ok=True)
                (folder / what).write_text(text)
                continue
            if options.installed and "pip install" in what:
                continue
            start = time.monotonic()
            printed = (in_process if options.installed else in_shell)(what, folder)
            wrong += [f"not printed: {line}" for line in lacking(text, printed)]
            print("\n".join(f"$ {line}" for line in what.splitlines()))
            print(printed.rstrip())
            now = time.monotonic()
            print(f"[{now - start:.1f} s, {now - began:.0f} s since the beginning]\n", flush=True)
            planned += [f"{now - began:.0f} s"] if "automap search" in what else []
        print(f"Plans after {' and '.join(planned)}, a training after {time.monotonic() - began:.0f} s, ", end="")
        print(f"{sum(os.times()[:4]):.0f} s of processor time.")
    print("\n".join(wrong) or "All that the tutorial shows is printed.")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
