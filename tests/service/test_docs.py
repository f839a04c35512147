"""The documentation: links lead somewhere, every page is reached, and what is shown as a file is read."""

import json
import re
from pathlib import Path

import pytest

from automap.validation.published_runs import case_of, load_runs
from service.command.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, heading or nothing) of each link of a page to another file of the project, or inside the page."""
    found = re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", page.read_text())
    return [((page.parent / file).resolve() if file else page, heading) for file, heading in found]


def headings(page: Path) -> set[str]:
    """As links name them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for file, heading in links(page):
        assert file.exists(), f"{page.name} links to {file}"
        assert not heading or heading in headings(file), f"{page.name} links to {file.name}#{heading}"


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
