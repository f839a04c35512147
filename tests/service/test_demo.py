"""The demonstration runs, and the README shows what it prints today."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from agents import Budget, search_offer
from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.estimate import price
from automap.problem import Problem
from ir.onnx.sandbox import fork_server, import_model
from service.command.demo import light_model, line_of, run_demo
from service.report import summary

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = {"resnet50": 25_557_032, "vgg19": 143_667_240, "gpt2-xl": 1_557_611_200}
REPAIR = "run `python benchmarks/readme_demo.py` on a quiet host"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the demonstration that `shown` runs."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def shown(folder: Path) -> str:
    """What a short demonstration prints."""
    import contextlib
    import io

    # The process that forks imports stays for those that come later.
    fork_server().start()
    before = set(psutil.Process().children(recursive=True))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run_demo(folder, budget="2s") == 0
    assert set(psutil.Process().children(recursive=True)) == before
    return out.getvalue()


def readme() -> list[str]:
    """The lines of the README's block, the frame left out."""
    _, _, rest = (ROOT / "README.md").read_text().partition("<!-- demo output: begin -->\n```\n")
    block, _, _ = rest.partition("```\n<!-- demo output: end -->")
    return block.splitlines()


def outline(lines: list[str]) -> list[str]:
    """Labels of the lines under a model; the other lines without their numbers.

    Within the short budget of a test the network may not come to its first plan on a busy host, and other plans may
    stand beside the best one; lines that go on with a label have none.
    """
    lines = [line for line in lines if not line.startswith(("  at first ", "   "))]
    labels = [re.match(r"  (\w+(?: \w+)?) +\S", line) for line in lines]
    return [
        label[1].split()[0] if label else re.sub(r"[\d.,]+", "#", line)
        for label, line in zip(labels, lines, strict=True)
    ]


def test_the_demonstration(shown: str, folder: Path) -> None:
    assert shown.count("priced again to the same figure") == 3
    for name, parameters in PARAMETERS.items():
        plan = Plan.from_json(json.loads((folder / name / "plan.json").read_text()))
        assert (plan.model.name, plan.model.num_parameters) == (name, parameters)
        assert plan.estimate is not None
        assert plan.search is not None
        expert = plan.search.baselines["expert"]
        assert expert is not None
        assert (plan.search.fastest_s or plan.estimate.step_time_s) <= expert


def test_the_readme_has_the_lines_that_it_prints(shown: str) -> None:
    _, _, text = shown.partition("\n\n")
    assert outline(readme()) == outline(text.splitlines()), REPAIR


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_readme_shows_its_plans_in_the_words_and_at_the_price_of_today(name: str, shown: str, folder: Path) -> None:
    """Everything but who found them, after how many evaluations, and the bound of the space."""
    assert shown
    data = (folder / name / "model.onnx").read_bytes() if name == "gpt2-xl" else light_model(name)
    graph = import_model(data, name=name)
    plan = Plan.from_json(json.loads((ROOT / "docs" / "plans" / f"{name}.json").read_text()))
    problem = Problem.build(graph, parse_cluster(plan.cluster), plan.training)
    found = search_offer(problem, Budget(evaluations=1), searchers=["expert"]).plan
    assert found.search is not None
    assert plan.search is not None
    # Exporters may write the same model in other bytes.
    plan = replace(plan, model=found.model)
    plan = replace(plan, estimate=price(problem, plan), search=replace(plan.search, baselines=found.search.baselines))
    lines = readme()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{name}: ")) + 2
    wanted = [line_of(label, text) for label, text in summary(plan)]
    assert lines[first : first + len(wanted)] == wanted, REPAIR
