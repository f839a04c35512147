"""Every picture and page in a real browser: no error in its console, and what is drawn are the data."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

from agents import Budget, search_offer
from automap.problem import Problem
from ir import zoo
from service.command.main import main
from service.drawing.notebook import shown
from service.drawing.pictures import PICTURES

pytestmark = pytest.mark.slow

GPT = "gpt:layers=4,hidden=256,heads=4,vocab_size=1024,seq_len=128"
CLUSTERS = ("1x1xA100-80GB", "1x4xA100-80GB", "1x8xA100-80GB", "1x8xV100-16GB")
BLUE, SKY, GREEN, ORANGE, RED, GREY = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#999999"

MARKS = """([root, colour]) => {
  const figure = document.querySelector(root).getBoundingClientRect();
  return [...document.querySelectorAll(`${root} path, ${root} use`)].filter((mark) => {
    const { fill, stroke } = getComputedStyle(mark), box = mark.getBoundingClientRect();
    return [fill, stroke].includes(colour) && !mark.closest('[id^=legend], defs, clipPath')
      && box.width + box.height > 0 && box.right > figure.left && box.left < figure.right
      && box.bottom > figure.top && box.top < figure.bottom;
  }).map((mark) => mark.getBoundingClientRect().toJSON());
}"""
"""The boxes of all marks of a colour of which a figure shows at least a part, without those of its legend."""


class Page:
    """A page of the browser with one file."""

    def __init__(self, page: Any, path: Path) -> None:
        self.page, self.faults = page, []
        page.on("console", lambda line: self.faults.append(line.text))
        page.on("pageerror", lambda fault: self.faults.append(str(fault)))
        page.on("requestfailed", lambda request: self.faults.append(request.url))
        page.goto(path.as_uri())

    def marks(self, colour: str, root: str = "svg") -> list[dict[str, float]]:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        found: list[dict[str, float]] = self.page.evaluate(MARKS, [root, f"rgb({red}, {green}, {blue})"])
        return found

    def words(self, root: str = "svg") -> list[str]:
        found: list[str] = self.page.locator(f"{root} text").all_text_contents()
        return found


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1000, "height": 900})
    yield context
    context.close()


def ran(*words: str) -> str:
    """What a command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(words) == 0
    return printed.getvalue()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What the command line draws, and the numbers that it gives for it."""
    folder = tmp_path_factory.mktemp("drawn")
    hints, plan = folder / "hints.json", folder / "plan.json"
    hints.write_text('{"fix": {"pp": 4}}')
    words = ["--cluster", "8xA100-80GB", "--global-batch", "64", "--hints", str(hints), "--budget", "200"]
    words += ["--searcher", "expert", "--searcher", "mcmc", "--progress", str(folder / "search.html")]
    ran("search", f"zoo:{GPT}", *words, "-o", str(plan))
    for name in ("report.html", "timeline.png", *(f"{picture}.svg" for picture in PICTURES)):
        picture = [] if name == "report.html" else ["--picture", name.partition(".")[0]]
        ran("draw", str(plan), f"zoo:{GPT}", "-o", str(folder / name), *picture)
    ran("draw", str(plan), f"zoo:{GPT}", "-o", str(folder / "trace.json"))
    words = ["--global-batch", "64", "--clusters", ",".join(CLUSTERS), "-o", str(folder / "front.html"), "--json"]
    rated = json.loads(ran("recommend", f"zoo:{GPT}", *words))
    return SimpleNamespace(
        folder=folder,
        plan=json.loads(plan.read_text()),
        trace=[one for one in json.loads((folder / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"],
        rated=rated,
    )


def in_shares(amounts: Any) -> list[float]:
    """Amounts as shares of the largest."""
    return [amount / max(amounts) for amount in amounts]


def check_plan(page: Page, files: SimpleNamespace, picture: str, root: str) -> None:
    """What one of the pictures of a plan shows."""
    plan, estimate, words = files.plan, files.plan["estimate"], page.words(root)
    rows = estimate["memory_bytes"]
    if picture == "timeline":
        for kind, colour in (("forward", BLUE), ("backward", ORANGE)):
            wide = [one["dur"] for one in files.trace if one["cat"] == kind]
            boxes = page.marks(colour, root)
            assert len(boxes) == len(wide) > 0
            assert in_shares([box["width"] for box in boxes]) == pytest.approx(in_shares(wide), abs=0.05)
        assert {f"rank {rank}" for rank in range(4)} <= set(words)
    elif picture == "memory-over-time":
        assert len(page.marks(RED, root)) == 1
        assert {f"rank {rank}" for rank in range(4)} <= set(words)
    elif picture == "memory":
        assert {f"devices {row['devices']}" for row in rows} <= set(words)
        boxes = page.marks(BLUE, root)
        widths = in_shares([box["width"] for box in boxes])
        assert widths == pytest.approx(in_shares([row["parameters"] for row in rows]), abs=0.05)
    elif picture == "breakdown":
        spent = {**estimate["breakdown_s"], **estimate["breakdown_s"]["exposed_communication"]}
        parts = [value for value in spent.values() if isinstance(value, float) and value > 0.0]
        boxes = page.marks(BLUE, root)
        assert sorted(in_shares([box["width"] for box in boxes])) == pytest.approx(sorted(in_shares(parts)), abs=0.01)
    elif picture == "placement":
        shares = [len([word for word in words if word == f"stage {n}"]) for n in range(len(plan["stages"]))]
        assert shares == [1] * len(plan["stages"])
        assert all(stage["devices"] in words for stage in plan["stages"])
    else:
        check_search(page, files, root)


def check_search(page: Page, files: SimpleNamespace, root: str) -> None:
    """A curve for each searcher, and the bound below them."""
    history = files.plan["search"]["history"]
    assert set(history) == {"expert", "mcmc"}
    curves = [page.marks(colour, root) for colour in (BLUE, SKY)]
    (bound,) = page.marks(RED, root)
    assert [len(boxes) for boxes in curves] == [1, 1]
    assert all(box["bottom"] <= bound["top"] + 1 for (box,) in curves)
    words = page.words(root)
    assert all(any(word.startswith(f"{name}, ") for word in words) for name in (*history, "no plan takes less"))


@pytest.mark.parametrize("picture", PICTURES)
def test_pictures_of_a_plan(tab: Any, files: SimpleNamespace, picture: str) -> None:
    with contextlib.closing(tab.new_page()) as opened:
        page = Page(opened, files.folder / f"{picture}.svg")
        check_plan(page, files, picture, "svg")
        assert page.faults == []


def test_the_report_shows_every_picture_and_reason(tab: Any, files: SimpleNamespace, tmp_path: Path) -> None:
    with contextlib.closing(tab.new_page()) as opened:
        page = Page(opened, files.folder / "report.html")
        assert page.page.locator("figure").count() == len(PICTURES)
        for picture in PICTURES:
            check_plan(page, files, picture, f"figure#{picture} > svg")
        # The three largest costs; what a search adds to them is about its other plans.
        for line in files.plan["why"][:3]:
            assert page.page.get_by_role("listitem").filter(has_text=line).count() == 1
        # What the figures say is also on the screen: the colours of forward and backward passes, parameters and limits.
        page.page.screenshot(path=tmp_path / "shown.png", full_page=True)
        pixels = imread(tmp_path / "shown.png")[..., :3]
        for colour in (BLUE, ORANGE, GREEN, RED):
            wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255.0
            assert (np.abs(pixels - wanted).max(axis=2) < 0.02).sum() > 5, colour
        assert page.faults == []


def test_a_picture_of_pixels(tab: Any, files: SimpleNamespace) -> None:
    with contextlib.closing(tab.new_page()) as opened:
        page = Page(opened, files.folder / "timeline.png")
        width, height = page.page.evaluate("[document.images[0].naturalWidth, document.images[0].naturalHeight]")
        assert width > 1000 > height > 100
        assert page.faults == []


def test_how_a_search_went(tab: Any, files: SimpleNamespace) -> None:
    with contextlib.closing(tab.new_page()) as opened:
        page = Page(opened, files.folder / "search.html")
        check_search(page, files, "svg")
        assert "seconds since the beginning of the search" in page.words()
        assert page.faults == []


def test_clusters_that_are_compared(tab: Any, files: SimpleNamespace) -> None:
    rated = {one["cluster"]: one for one in files.rated["candidates"] if one["step_time_s"] is not None}
    front = [rated[name] for name in files.rated["front"]]
    with contextlib.closing(tab.new_page()) as opened:
        page = Page(opened, files.folder / "front.html")
        grey, *line = page.marks(GREY), *page.marks(BLUE)
        assert len(grey) == len(rated)
        points = [box for box in line if box["width"] < 20]
        assert len(points) == len(front)
        # The cheapest first, each one further right and higher up, which is faster.
        lefts, tops = [box["left"] for box in points], [box["top"] for box in points]
        assert lefts == sorted(lefts) and tops == sorted(tops)
        assert set(files.rated["front"]) <= set(page.words())
        assert page.faults == []


def test_predictions_beside_measurements(tab: Any, files: SimpleNamespace, tmp_path: Path) -> None:
    pages = Path(__file__).resolve().parents[2] / "docs" / "measured-runs.md"
    example = re.search(r"^```json\n(.*?)^```$", pages.read_text(), re.MULTILINE | re.DOTALL)
    assert example is not None
    ((run,), path, picture) = json.loads(example[1]), tmp_path / "runs.json", tmp_path / "runs.html"
    runs = [
        {**run, "id": f"{group}-{time_s}", "group": group, "measured": {"iteration_s": time_s}}
        for group, times in (("one", (1.0, 2.0, 5.0)), ("two", (1.5,)))
        for time_s in times
    ]
    path.write_text(json.dumps(runs))
    ran("validate", str(path), "-o", str(picture))
    with contextlib.closing(tab.new_page()) as opened:
        page = Page(opened, picture)
        one, two = page.marks(BLUE), page.marks(SKY)
        assert (len(one), len(two)) == (3, 1)
        # All are predicted alike; what was measured to be longer stands further right.
        assert len({round(box["top"]) for box in one}) == 1
        lefts = [box["left"] for box in one]
        assert lefts[0] < two[0]["left"] < lefts[1] < lefts[2]
        assert {"one (3)", "two (1)"} <= set(page.words())
        assert page.faults == []


def test_what_a_notebook_shows(tab: Any, tmp_path: Path) -> None:
    graph = zoo.build(GPT)
    problem = Problem.build(graph, "2xA100-80GB", {"global_batch": 16})
    result = search_offer(problem, Budget.parse(8), searchers=("expert",))
    path = tmp_path / "cells.html"
    cells = [graph, result.plan, result]
    body = "".join(f"<section id='cell{n}'>{shown(cell)}</section>" for n, cell in enumerate(cells))
    path.write_text(f"<!doctype html><meta charset='utf-8'><title>Cells</title>{body}")
    with contextlib.closing(tab.new_page()) as opened:
        page = Page(opened, path)
        pictures: Mapping[int, int] = {0: 0, 1: 3, 2: 1}
        for number, count in pictures.items():
            assert page.page.locator(f"#cell{number} table").count() == 1
            figures = page.page.locator(f"#cell{number} svg")
            assert figures.count() == count
            assert all(figures.nth(k).bounding_box()["height"] > 100 for k in range(count))
        assert page.faults == []
