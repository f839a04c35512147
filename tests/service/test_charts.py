"""Pictures of searches, recommendations and validations: what is drawn is what was found."""

from __future__ import annotations

import json
import tomllib
from html.parser import HTMLParser
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from agents import Budget, search_in_turn, search_offer
from agents.recommend import Goals, recommend
from agents.results.history import MOST_MOMENTS, history
from agents.searcher import SearchResult
from automap.plan import Plan
from automap.problem import Problem
from automap.validation.errors_by_group import Predicted
from automap.validation.published_runs import Run
from ir import notebook, zoo
from ir.graph import Graph
from service.command.main import main
from service.drawing import charts, pictures
from service.drawing.notebook import shown

GPT = "gpt:layers=4,hidden=256,heads=4,vocab_size=512,seq_len=128"


@pytest.fixture(scope="module")
def graph() -> Graph:
    return zoo.build(GPT)


@pytest.fixture(scope="module")
def problem(graph: Graph) -> Problem:
    return Problem.build(graph, "2x4xV100-16GB@25Gbit", {"global_batch": 32})


@pytest.fixture(scope="module")
def result(problem: Problem) -> SearchResult:
    return search_offer(problem, Budget.parse(200), searchers=("expert", "mcmc"))


def test_each_searcher_gets_faster_until_it_reaches_its_best(problem: Problem) -> None:
    found = search_in_turn(problem, Budget.parse(200), searchers=("mcmc", "random"))
    assert found.by_searcher.keys() >= {"mcmc", "random"}
    for name, reached in found.record.searchers.items():
        own = found.by_searcher[name]
        steps = [step for _, _, step in own]
        assert steps == sorted(steps, reverse=True)
        assert steps[-1] == reached
        assert [count for count, _, _ in own] == sorted(count for count, _, _ in own)
        assert max(count for count, _, _ in own) <= found.evaluations
    assert min(steps[-1][2] for steps in found.by_searcher.values()) == found.step_time_s


def test_a_search_is_drawn_against_its_bound(result: SearchResult) -> None:
    (axes,) = charts.search_progress(result).axes
    labels = [line.get_label() for line in axes.lines]
    assert [str(label).partition(",")[0] for label in labels] == [*result.by_searcher, "no plan takes less"]
    *curves, bound = axes.lines
    assert bound.get_ydata()[0] == result.record.lower_bound_s  # type: ignore[index]
    lowest = min(min(curve.get_ydata()) for curve in curves)  # type: ignore[arg-type]
    assert lowest == pytest.approx(result.record.fastest_s or result.step_time_s, rel=1e-9)
    assert lowest >= bound.get_ydata()[0]  # type: ignore[index]


def test_the_ends_of_searches_are_told_apart() -> None:
    """A bad first plan does not press the others together, and the worst searcher is still seen."""
    curves = {"mcmc": [(1.0, 100.0), (20.0, 1.02), (300.0, 1.0)], "expert": [(2.0, 1.1)], "random": [(5.0, 3.0)]}
    for names, most in ((("mcmc", "expert"), 1.7), (("mcmc", "expert", "random"), 3.3)):
        figure = pictures.best_so_far({name: curves[name] for name in names}, 400.0, 0.9, "plans")
        (axes,) = figure.axes
        low, high = axes.get_ylim()
        assert 0.7 < low < 0.9 < max(curves[name][-1][1] for name in names) < high < most
        figure.draw_without_rendering()
        labels = [*axes.get_xticklabels(), *axes.get_xticklabels(minor=True)]
        assert {"1", "2", "5", "10", "20", "50", "100", "200"} <= {label.get_text() for label in labels}
        assert not any("$" in label.get_text() for label in labels)


def test_a_plan_keeps_how_it_was_found(result: SearchResult) -> None:
    record = result.record
    for name, own in result.by_searcher.items():
        assert list(record.history[name]) == [(count, step_s) for count, _, step_s in own]
    (axes,) = pictures.search(Plan.from_json(json.loads(json.dumps(result.plan.to_json())))).axes
    *curves, bound = axes.lines
    for curve, own in zip(curves, record.history.values(), strict=True):
        shown_as = list(zip(curve.get_xdata(), curve.get_ydata(), strict=True))
        assert shown_as == [*own, (record.evaluations, own[-1][1])]
    assert list(bound.get_ydata()) == [record.lower_bound_s] * 2
    many = {"mcmc": [(count, 0.1 * count, 1e3 / count) for count in range(1, 1000)]}
    (kept,) = history(many).values()
    assert len(kept) == MOST_MOMENTS
    assert (kept[0], kept[-1]) == ((1, 1e3), (999, 1e3 / 999))
    assert list(kept) == sorted(set(kept))


def test_the_front_of_a_recommendation_is_drawn(graph: Graph) -> None:
    clusters = ["1x2xA100", "1x4xA100", "1x8xA100", "1x8xV100"]
    for prices in (None, {"A100": 2.0, "V100": 1.0}):
        found = recommend(graph, clusters, {"global_batch": 64}, Goals(prices=prices))
        (axes,) = charts.front(found).axes
        assert [text.get_text() for text in axes.texts] == [one.cluster for one in found.front]
        assert list(axes.lines[0].get_ydata()) == [one.step_time_s for one in found.front]
        assert len(axes.collections[0].get_offsets()) == sum(one.step_time_s is not None for one in found.candidates)
        assert axes.get_xlabel() == ("devices" if prices is None else "price of an hour")


def test_predictions_are_drawn_over_measurements() -> None:
    def row(group: str, measured: float, predicted: float, why: str | None = None) -> Predicted:
        run = object.__new__(Run)
        for name, value in {"id": f"{group}-{measured}", "group": group, "iteration_s": measured}.items():
            object.__setattr__(run, name, value)
        return Predicted(run=run, step_time_s=predicted, error_band_s=(0.9 * predicted, 1.1 * predicted), why=why)

    rows = [row("one", 1.0, 1.1), row("one", 4.0, 3.0), row("two", 2.0, 2.0), row("two", 9.0, 9.0, why="no price")]
    (axes,) = charts.predicted_against_measured(rows).axes
    assert [points.get_offsets().tolist() for points in axes.collections] == [[[1.0, 1.1], [4.0, 3.0]], [[2.0, 2.0]]]
    assert [run["predicted_s"] for run in charts.validation_numbers(rows)["runs"]] == [1.1, 3.0, 2.0]


def test_files_of_every_kind_are_written(
    result: SearchResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, begin in (("t.html", b"<!doctype html>"), ("t.svg", b"<svg"), ("t.png", b"\x89PNG"), ("t.json", b"{")):
        charts.write(tmp_path / name, "a search", {"searchers": {}}, lambda: charts.search_progress(result))
        assert (tmp_path / name).read_bytes().startswith(begin)
    words = ["search", f"zoo:{GPT}", "--cluster", "2xA100-80GB", "--global-batch", "16", "--budget", "1"]
    assert main([*words, "--searcher", "expert", "--progress", str(tmp_path / "s.json")]) == 0
    numbers = json.loads((tmp_path / "s.json").read_text())
    assert numbers["searchers"]["expert"][-1][2] >= numbers["lower_bound_s"]
    capsys.readouterr()
    assert main([*words, "--progress", str(tmp_path / "s.gif")]) == 2
    assert ".html, .svg, .png or .json" in capsys.readouterr().err


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)


def tags(text: str | None) -> list[str]:
    assert text is not None
    parser = Elements()
    parser.feed(text)
    return parser.tags


def test_notebooks_show_tables_and_pictures(
    graph: Graph, result: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tags(shown(graph)).count("tr") >= 5
    assert tags(shown(result.plan)).count("svg") == 3
    text = shown(result)
    assert tags(text).count("svg") == 1
    assert "others" in str(text)
    assert shown(object()) is None
    monkeypatch.setattr("service.drawing.notebook.find_spec", lambda name: None)
    assert "svg" not in tags(shown(result.plan))
    assert "table" in tags(shown(result.plan))


def test_drawing_functions_are_found_by_the_entry_points_of_the_package(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).resolve().parents[2]
    named = tomllib.loads((root / "pyproject.toml").read_text())["project"]["entry-points"][notebook.GROUP]
    points = [EntryPoint(name, value, notebook.GROUP) for name, value in named.items()]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == notebook.GROUP else [])
    assert graph._repr_html_() == shown(graph)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    assert graph._repr_html_() is None
