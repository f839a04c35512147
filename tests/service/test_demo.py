from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from automap.plan import Plan
from service.demo import run_demo

pytestmark = pytest.mark.slow


def test_the_demonstration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(psutil.Process().children(recursive=True))
    assert run_demo(tmp_path, budget="2s") == 0
    assert set(psutil.Process().children(recursive=True)) == before
    shown = capsys.readouterr().out
    assert shown.count("priced again to the same figure") == 3
    for name, parameters in (("resnet50", 25_557_032), ("vgg19", 143_667_240), ("gpt2-xl", 1_557_611_200)):
        plan = Plan.from_json(json.loads((tmp_path / name / "plan.json").read_text()))
        assert (plan.model.name, plan.model.num_parameters) == (name, parameters)
        assert plan.estimate is not None
        assert plan.search is not None
        expert = plan.search.baselines["expert"]
        assert expert is not None
        assert (plan.search.fastest_s or plan.estimate.step_time_s) <= expert
