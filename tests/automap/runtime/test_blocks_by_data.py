"""Blocks that samples or random numbers leave out on some ranks only."""

from __future__ import annotations

from pathlib import Path

import left_out_blocks
import pytest
from returning_ranks import returned
from runtime_ranks import expert_plan, make_problem

from automap.plan import Plan


def plans() -> dict[str, Plan]:
    problem = make_problem(left_out_blocks.graph(), 2, left_out_blocks.BATCH)
    return {
        "replicas": expert_plan(problem, count=2),
        **{f"ZeRO {zero}": expert_plan(problem, count=2, zero=zero) for zero in (1, 2, 3)},
    }


@pytest.mark.slow
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    """Ranks that leave out a block take part in what the others do for it."""
    found = plans()
    wanted = left_out_blocks.of_one_process()
    for losses in returned(left_out_blocks.train, 2, tmp_path, [plan.to_json() for plan in found.values()]):
        for number, name in enumerate(found):
            by_data, at_random = losses[2 * number : 2 * number + 2]
            assert by_data == pytest.approx(wanted, abs=1e-9), name
            assert all(0.0 < loss < 10.0 for loss in at_random), name


@pytest.mark.slow
def test_losses_by_the_loader_of_plain_pytorch_are_those_of_one_process(tmp_path: Path) -> None:
    wanted = left_out_blocks.of_one_process()
    for losses in returned(left_out_blocks.load, 2, tmp_path, str(tmp_path)):
        for number in range(3):
            by_data, at_random = losses[2 * number : 2 * number + 2]
            assert by_data == pytest.approx(wanted, abs=1e-5), number
            assert all(0.0 < loss < 10.0 for loss in at_random), number
