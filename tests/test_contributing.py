"""The recipes of CONTRIBUTING.md do what they say: each is followed to the letter in a copy of the project.

A recipe is a `###` heading with fenced blocks below it. The line above a block says what to do with it: "New file
`PATH`" writes it, "Edit `PATH`" applies it as a diff without line numbers, "Check" runs it on the copy.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from long_cases import long_but

from automap import jit

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("ir", "automap", "envs", "agents", "service", "tests")
STEP = re.compile(
    r"^(New file|Edit|Check)(?: `([^`]+)`)?(?:[^\n]|\n(?!\n))*:\n\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Step:
    """One fenced block of a recipe."""

    what: str
    """`New file`, `Edit` or `Check`."""
    path: str
    """The file that is written or edited, from the root of the project; empty for a check."""
    language: str
    text: str


def recipes() -> dict[str, list[Step]]:
    """Heading -> steps, of every heading that has some."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    parts = re.split(r"^### (.*)$", page, flags=re.MULTILINE)[1:]
    found = {
        title: [Step(*step) for step in STEP.findall(body)] for title, body in zip(parts[::2], parts[1::2], strict=True)
    }
    return {title: steps for title, steps in found.items() if steps}


RECIPES = recipes()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packages and their tests. Recipes touch different lines, so all of them share one."""
    folder = tmp_path_factory.mktemp("house")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def edited(text: str, diff: str) -> str:
    """`text` with one change: the unmarked and `-` lines of `diff` give way to its unmarked and `+` lines."""
    lines = [line for line in diff.splitlines() if not line.startswith("@@")]
    old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    assert text.count(old) == 1, f"{text.count(old)} places in the file read:\n{old}"
    return text.replace(old, new)


def apply(step: Step, house: Path) -> None:
    """Writes or edits a file of the copy."""
    path = house / step.path
    if step.what == "New file":
        assert not path.exists(), f"{step.path} is there already"
        path.write_text(step.text)
    else:
        text = path.read_text()
        for change in re.split(r"^@@.*\n", step.text, flags=re.MULTILINE):
            if change:
                text = edited(text, change)
        path.write_text(text)


@pytest.fixture(scope="module")
def kernels() -> Path:
    """A cache of kernels for the copy, with those that are compiled already.

    Kernels that a recipe changes are compiled without optimisation, in a third of the time. They compute the same, as
    no fast-math is allowed, but slowly: nobody else should find them.
    """
    common = jit._cache_folder().path
    folder = common.parent / "recipes" / common.name
    folder.mkdir(parents=True, exist_ok=True)
    for kind in ("code", "link"):
        for path in common.glob(f"*.{kind}"):
            with contextlib.suppress(FileExistsError):
                os.link(path, folder / path.name)
    return folder.parent


def check(step: Step, house: Path, kernels: Path) -> None:
    """Runs commands, or a script, on the copy."""
    programs = {"automap": [sys.executable, "-m", "service.command"], "python": [sys.executable]}
    commands = [[sys.executable, "-c", step.text]]
    if step.language == "sh":
        lines = [line.split() for line in step.text.replace("\\\n", " ").splitlines()]
        commands = [[*programs[program], *arguments] for program, *arguments in lines]
    environment = {**os.environ, "PYTHONPATH": str(house), "NUMBA_CACHE_DIR": str(kernels), "NUMBA_OPT": "0"}
    for command in commands:
        ran = subprocess.run(
            command, cwd=house, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_block_of_a_recipe_is_a_step_of_it() -> None:
    _, _, page = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Recipes\n")
    assert sum(len(steps) for steps in RECIPES.values()) == len(re.findall(r"^```\w+$", page, re.MULTILINE))


def test_there_is_a_recipe_for_each_thing_that_newcomers_add() -> None:
    assert [title.split()[-1] for title in RECIPES] == ["operator", "device", "searcher", "environment", "decision"]


@pytest.mark.slow
@pytest.mark.parametrize("title", long_but([*RECIPES][:2], RECIPES))
def test_a_recipe_does_what_it_says_and_passes_the_linter(title: str, house: Path, kernels: Path) -> None:
    steps = RECIPES[title]
    assert steps[-1].what == "Check"
    for step in steps:
        if step.what == "Check":
            check(step, house, kernels)
        else:
            apply(step, house)
    # What was followed passes the linter, `ruff format` included.
    paths = sorted({step.path for step in steps if step.path.endswith(".py")})
    for command in (["check"], ["format", "--check"]) if paths else ():
        ran = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), *paths],
            cwd=house,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
