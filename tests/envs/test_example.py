"""The example of an agent that is not AutoMAP's own runs as docs/examples.md says."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_dqn.py"


def test_an_agent_of_stable_baselines3_decides_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """The run has fewer decisions than its agent collects before it learns, so that nothing is trained."""
    runpy.run_path(str(EXAMPLE))["main"](40)
    told = capsys.readouterr().out
    found = re.fullmatch(r"decided: ([\d.]+) ms a step, (fits|does not fit); best template: ([\d.]+) ms\n", told)
    assert found is not None, told
    assert float(found[1]) > 0.0 and float(found[3]) > 0.0
