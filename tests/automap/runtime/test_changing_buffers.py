"""Buffers that code changes in training, on real processes: with one micro-batch a step, as in one process."""

from __future__ import annotations

from pathlib import Path

import changing_buffers
import pytest
from returning_ranks import returned
from runtime_ranks import expert_plan, make_problem

from automap.plan import Plan


def plans() -> dict[str, Plan]:
    problem = make_problem(changing_buffers.graph(), 2, changing_buffers.BATCH)
    return {
        "replicas": expert_plan(problem, count=1),
        "ZeRO 3": expert_plan(problem, count=1, zero=3),
        "computed again": expert_plan(problem, count=1, recompute="full"),
        # torch runs stages on any numbers to find the shapes of what they hand on.
        "stages": expert_plan(problem, pp=2, count=1),
    }


@pytest.mark.slow
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    found, wanted = plans(), changing_buffers.of_one_process()
    for losses in returned(changing_buffers.train, 2, tmp_path, [plan.to_json() for plan in found.values()]):
        for name, some in zip(found, losses, strict=True):
            assert some == pytest.approx(wanted, abs=1e-9), name
