"""The documentation: links, files and modules that it names are there, and what it shows is what a command prints."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
from long_cases import long_but

import envs  # noqa: F401  # registers the environments
from automap.validation.published_cases import case_of
from automap.validation.published_runs import load_runs
from service.command.main import main
from service.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
PACKAGES = ("ir", "automap", "envs", "agents", "service")
FOLDERS = (*PACKAGES, "benchmarks", "tests", "docs", "docker", "examples")
OF_ONNX_NODES = {"forward_s", "backward_s", "flops", "bytes", "replicate", "split", "stage", "frozen_parameters"}
"""What follows `automap.` in the metadata of an ONNX file and of its nodes; not modules."""


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, heading or nothing) of each link of a page to another file of the project, or inside the page."""
    found = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text())
    return [((page.parent / file).resolve() if file else page, heading) for file, heading in found]


def headings(page: Path) -> set[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def label(page: Path) -> str:
    """How a test names a page."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", ALL, ids=label)
def test_links_lead_somewhere(page: Path) -> None:
    for file, heading in links(page):
        assert file.exists(), f"{page.name} links to {file}"
        assert not heading or heading in headings(file), f"{page.name} links to {file.name}#{heading}"


@pytest.mark.parametrize("page", ALL, ids=label)
def test_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text))
    made = set(re.findall(r"^New file `([^`]+)`", text, re.MULTILINE))
    environments = set(gymnasium.registry)
    assert {name for name in named - made - environments if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("page", ALL, ids=label)
def test_modules_that_are_named_are_there(page: Path) -> None:
    """`package.module.name`: the module is a file, and the name stands in it."""
    # Recipes name what they write; `tests/test_contributing.py` runs them.
    text = re.sub(r"^```(python|diff)\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name in sorted(
        set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(PACKAGES)})(?:\.[a-zA-Z_]\w*)+)(?![\w/.(-]*/)", text))
    ):
        parts, path = name.split("."), ROOT
        if parts[1] in OF_ONNX_NODES or name.endswith((".py", ".json", ".md")):
            continue
        while parts and (path / parts[0]).is_dir():
            path /= parts.pop(0)
        path = (path / parts.pop(0)).with_suffix(".py") if parts and (path / f"{parts[0]}.py").exists() else path
        source = (path if path.is_file() else path / "__init__.py").read_text()
        assert all(re.search(rf"\b{part}\b", source) for part in parts), f"{page.name} names {name}"


def tree() -> list[Path]:
    """The folders and files of the tree in the README, from the root of the project."""
    block = re.search(r"^## Where things are.*?^```\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert block is not None
    found: list[Path] = []
    above: list[tuple[int, Path]] = []
    for line in block[1].splitlines():
        names = re.match(r" *((?:[\w/]+(?:/|\.py)(?: +|$))+)", line)
        assert names is not None, line
        indent = len(line) - len(line.lstrip())
        above = [(depth, folder) for depth, folder in above if depth < indent]
        parent = above[-1][1] if above else ROOT
        found += [parent / name for name in names[1].split()]
        above.append((indent, found[-1]))
    return found


def test_the_tree_of_the_readme_is_the_real_one() -> None:
    """What it names is there, and no room is missing."""
    shown = tree()
    assert [path for path in shown if not path.exists()] == []
    rooms = {path.parent for package in PACKAGES for path in (ROOT / package).glob("*/__init__.py")}
    assert {str(room.relative_to(ROOT)) for room in rooms - set(shown)} == set()


def shown_commands() -> list[tuple[Path, str, str]]:
    """(page, command, output) of each block that begins with a command and shows what it prints below a blank line."""
    # `benchmarks/first_use.py` runs the tutorial as a whole: its commands need the files of those before them.
    blocks = [
        (page, *block)
        for page in ALL
        if page.name != "tutorial.md"
        for block in re.findall(r"^```\n(automap [^`]*?)\n\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    return [
        (page, command.replace("\\\n", " "), output) for page, command, output in blocks if "\nautomap" not in command
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "command", "output"),
    long_but([block for block in shown_commands() if block[0].name != "exports.md"], shown_commands()),
    ids=[f"{label(p)}: {c[:40]}" for p, c, _ in shown_commands()],
)
def test_what_is_shown_is_what_a_command_prints(
    page: Path,
    command: str,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Line by line, but for the width of the terminal; a line may end in `…`, and others may be left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in shlex.split(command)]
    assert main(words[1:]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for line in output.splitlines():
        assert " ".join(line.split()).removesuffix("…").rstrip() in printed, f"{page.name} shows {line}"


@pytest.mark.slow
def test_the_alternatives_that_are_shown_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of docs/comparing.md, for the plan whose degrees it states."""
    page = (ROOT / "docs" / "comparing.md").read_text()
    shown = re.findall(r"^instead .*$", page, re.MULTILINE)
    stated = re.search(r"section above with `([^`]*)`, which takes ([\d.]+ s)", " ".join(page.split()))
    command = re.search(r"automap sweep (zoo:.*?) --over", page)
    assert command is not None and stated is not None and len(shown) == 4
    plan = str(tmp_path / "plan.json")
    model, *words = shlex.split(command[1].replace("\\\n", " "))
    assert main(["estimate", model, *words, *shlex.split(stated[1]), "-o", plan]) == 0
    assert f"step {stated[2]} " in " ".join(capsys.readouterr().out.split())
    assert main(["explain", plan, model]) == 0
    assert set(shown) <= set(capsys.readouterr().out.splitlines())


@pytest.mark.slow
def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert code is not None
    exec(code[1].replace('"1000"', '"1"'), {})
    assert capsys.readouterr().out.endswith("s a step\n")


def test_every_page_is_reached_from_the_readme() -> None:
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in reached:
            reached.add(page)
            left += [file for file, _ in links(page) if file.suffix == ".md"]
    assert set(PAGES) <= reached


def test_help_names_pages_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--help"]) == 0
    named = re.findall(r"docs/[\w-]+\.md", re.sub(r"[\s│]", "", capsys.readouterr().out))
    assert named == ["docs/measured-runs.md"]
    assert (ROOT / named[0]).exists()


def test_the_measured_run_that_is_shown_is_priced(tmp_path: Path) -> None:
    shown = re.search(r"```json\n(.*?)```", (ROOT / "docs" / "measured-runs.md").read_text(), re.DOTALL)
    assert shown is not None
    (tmp_path / "runs.json").write_text(json.dumps(json.loads(shown[1])))
    (run,) = load_runs(tmp_path / "runs.json")
    case = case_of(run)
    assert case.assumed == ()
    assert case.problem.trainer.name == "megatron-lm"
    assert case.problem.cluster.num_devices == 8


@pytest.mark.slow
@pytest.mark.long
def test_the_site_is_built_and_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    """`make docs`, with one link too many: it is all that Sphinx complains about."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "broken.md").write_text("# Broken\n\n[No such heading](search.md#no-such-heading)\n")
    command = [sys.executable, "-m", "sphinx", "-q", "-c", "docs", ".", "site"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    complaints = re.findall(r"^.*/docs/(.*?\.md).*WARNING: (.*)$", ran.stderr, re.MULTILINE)
    assert [page for page, _ in complaints] == ["broken.md", "broken.md"], ran.stderr
    assert any("no-such-heading" in text for _, text in complaints)
    page = (tmp_path / "site" / "docs" / "README.html").read_text()
    parts = re.findall(r'<span class="caption-text">(.*?)</span>', page)
    assert parts == ["Tutorial", "How to", "Reference", "Background", "The project"]
    # Each page is in the contents.
    assert all(f'href="{path.stem}.html"' in page for path in PAGES if path.stem != "README")


def test_every_setting_of_the_service_is_in_its_table() -> None:
    rows = re.findall(
        r"^\| `AUTOMAP_(\w+)`(?: \*)? \| `?([^|`]*)`? \|", (ROOT / "docs" / "service.md").read_text(), re.MULTILINE
    )
    assert sorted(name.lower() for name, _ in rows) == sorted(Settings.model_fields)
    units = {"MiB": 1 << 20, "GiB": 1 << 30}
    for name, shown in rows:
        default = Settings.model_fields[name.lower()].default
        number, _, unit = shown.strip().partition(" ")
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert default == float(number.replace("10⁹", "1e9")) * units.get(unit, 1), name
