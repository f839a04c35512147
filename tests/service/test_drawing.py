from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from automap.plan import Plan
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from ir import zoo
from service.command.main import main
from service.drawing.page import report
from service.drawing.pictures import COLOURS, MOST_ROWS, MOST_SHAPES, PICTURES, in_flight, pictures_of, short
from service.drawing.trace import read_action, trace
from service.priced_plans import hand_made_plan, priced_anew
from service.report import time_parts

GPT = "gpt:layers=8,hidden=256,heads=4,vocab_size=1024,seq_len=128"
DEGREES = {
    "pipeline": ["--pp", "4", "--tp", "2", "--recompute", "full"],
    "gpipe": ["--pp", "4", "--schedule", "gpipe"],
    "interleaved": ["--pp", "4", "--virtual", "2"],
    "zero-bubble": ["--pp", "4", "--schedule", "zb1p"],
    "replicas": ["--zero", "1"],
}


@pytest.fixture(scope="module", params=list(DEGREES))
def kind(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def file(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    words = ["--cluster", "8xA100-80GB", "--global-batch", "64", *DEGREES[kind]]
    assert main(["estimate", f"zoo:{GPT}", *words, "-o", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def plan(file: Path) -> Plan:
    plan = Plan.from_json(json.loads(file.read_text()))
    problem = Problem.build(zoo.build(GPT), plan.cluster, plan.training)
    return replace(plan, estimate=price(problem, plan, with_timeline=True))


def actions(plan: Plan) -> Any:
    assert plan.estimate is not None
    assert plan.estimate.timeline is not None
    return plan.estimate.timeline


def test_a_trace_holds_every_action(plan: Plan) -> None:
    document = json.loads(json.dumps(trace("gpt", actions(plan))))
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(events) == sum(map(len, actions(plan)))
    for event in events:
        begin, end = next((b, e) for word, b, e in actions(plan)[event["pid"]] if word == event["name"])
        assert event["ts"] == pytest.approx(begin * 1e6)
        assert event["dur"] == pytest.approx((end - begin) * 1e6)
    assert plan.estimate is not None
    assert max(event["ts"] + event["dur"] for event in events) <= plan.estimate.step_time_s * 1e6 * (1 + 1e-9)


def test_micro_batches_come_and_go(plan: Plan, kind: str) -> None:
    ranks = len(actions(plan))
    for rank, own in enumerate(actions(plan)):
        times, kept = in_flight(own)
        assert (np.diff(times) >= 0).all()
        assert kept[-1] == 0
        assert kept.min() >= 0
        if kind == "gpipe":
            assert kept.max() == plan.num_micro_batches
        if kind == "pipeline":
            # 1F1B: rank r of p has p - r micro-batches under way (Narayanan et al., arXiv 2006.09503).
            assert kept.max() == min(ranks - rank, plan.num_micro_batches)


@pytest.mark.parametrize("name", [name for name in PICTURES if name != "search"])
def test_every_picture_is_drawn(plan: Plan, name: str) -> None:
    figure = pictures_of(plan)[name](plan)
    (axes,) = figure.axes
    assert axes.get_title(loc="left")
    if name == "breakdown":
        assert plan.estimate is not None
        widths = [bar.get_width() for bar in axes.containers[0]]
        assert sum(widths) == pytest.approx(plan.estimate.step_time_s)
        assert sum(time_parts(plan.estimate).values()) == pytest.approx(plan.estimate.step_time_s)
    if name == "placement":
        assert len(axes.patches) == len(plan.stages)
    if name == "memory":
        assert plan.estimate is not None
        right = [max(bar.get_x() + bar.get_width() for bar in group) for group in axes.containers]
        assert max(right) == pytest.approx(max(row.total for row in plan.estimate.memory_bytes) / 2**30)


@pytest.fixture(scope="module", params=["2xA100-80GB", "8x8xA100-80GB"], ids=["few ranks", "many ranks"])
def large(request: Any) -> Plan:
    graph = zoo.build("gpt:layers=64,hidden=64,heads=4,vocab_size=256,seq_len=32")
    evaluator = Evaluator(Problem.build(graph, request.param, {"global_batch": 512}))
    plan = hand_made_plan(evaluator, {"pp": evaluator.problem.cluster.num_devices})
    return priced_anew(plan, evaluator, with_timeline=True)


def test_many_passes_are_pixels_with_the_mean_colour_of_their_time(large: Plan) -> None:
    assert large.estimate is not None
    of_ranks, end_s = actions(large), large.estimate.step_time_s
    assert sum(map(len, of_ranks)) > MOST_SHAPES
    (axes,) = PICTURES["timeline"](large).axes
    assert len(axes.get_yticks()) <= MOST_ROWS
    (image,) = axes.images
    pixels = np.asarray(image.get_array())
    missing = {letter: 1.0 - np.array(to_rgb(colour)) for letter, colour in COLOURS.items()}
    height = pixels.shape[0] // len(of_ranks)
    for rank in {0, 1, len(of_ranks) // 2, len(of_ranks) - 1}:
        wanted = np.ones((pixels.shape[1], 3))
        for word, begin, end in of_ranks[rank]:
            first, last = (time / end_s * len(wanted) for time in (begin, end))
            for pixel in range(int(first), min(int(last) + 1, len(wanted))):
                share = min(last, pixel + 1) - max(first, pixel)
                wanted[pixel] -= share * missing[read_action(word)[1]]
        assert pixels[rank * height] == pytest.approx(wanted, abs=1e-6)
        assert height == 1 or (pixels[rank * height + height - 1] == 1.0).all()


def test_texts_beside_many_rows_do_not_touch(large: Plan) -> None:
    for name in ("timeline", "memory", "placement"):
        figure = PICTURES[name](large)
        figure.draw_without_rendering()
        (axes,) = figure.axes
        for group in (axes.get_yticklabels(), axes.get_xticklabels(), axes.texts):
            boxes = [text.get_window_extent() for text in group if text.get_text()]
            assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2)), name


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_report_needs_no_network_and_names_its_pictures(plan: Plan) -> None:
    text = report(replace(plan, model=replace(plan.model, name="<script>alert(1)</script>")))
    parser = Elements()
    parser.feed(text)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in parser.tags}
    for _, attributes in parser.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    figures = [attributes["id"] for tag, attributes in parser.tags if tag == "figure"]
    assert sorted(map(str, figures)) == sorted(pictures_of(plan))
    drawn = [attributes for tag, attributes in parser.tags if tag == "svg"]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in drawn)
    assert text == report(replace(plan, model=replace(plan.model, name="<script>alert(1)</script>")))


def test_names_of_operators_are_cut_to_their_layer() -> None:
    assert short("layers.9.mlp.up_proj/MatMul") == "layers.9"
    assert short("embed_tokens/Gather") == "embed_tokens"
    assert short("conv1") == "conv1"


def test_files_of_every_kind_are_written(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begin in (("r.html", b"<!doctype html>"), ("t.svg", b"<svg"), ("t.png", b"\x89PNG"), ("t.json", b"{")):
        path = tmp_path / name
        assert main(["draw", str(file), f"zoo:{GPT}", "-o", str(path)]) == 0
        assert path.read_bytes().startswith(begin)
    path = tmp_path / "memory.svg"
    assert main(["draw", str(file), f"zoo:{GPT}", "-o", str(path), "--picture", "memory"]) == 0
    assert re.search("parameters", path.read_text())
    capsys.readouterr()
    assert main(["draw", str(file), f"zoo:{GPT}", "-o", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"output": str(path)}
    for words, part in (
        (["-o", str(tmp_path / "x.gif")], ".html, .svg, .png or .json"),
        (["-o", str(tmp_path / "x.svg"), "--picture", "memoryy"], "Did you mean memory?"),
        (["-o", str(tmp_path / "x.html"), "--picture", "memory"], "Leave --picture out"),
        (["-o", str(tmp_path / "x.svg"), "--picture", "search"], "that `automap search` has found"),
    ):
        assert main(["draw", str(file), f"zoo:{GPT}", *words]) == 2
        assert part in capsys.readouterr().err
