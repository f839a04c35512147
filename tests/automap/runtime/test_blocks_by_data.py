"""Blocks that samples or random numbers leave out on some ranks only."""

from __future__ import annotations

from pathlib import Path

import left_out_blocks
import pytest
import trainer_ranks
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
def test_ranks_that_split_layers_leave_out_the_same_blocks(tmp_path: Path) -> None:
    problem = make_problem(trainer_ranks.graph_of(""), 2, trainer_ranks.BATCH, {"fix": {"pp": 1}})
    documents = [
        expert_plan(problem, tp=2, recompute=recompute, sequence_parallel=parallel).to_json()
        for recompute, parallel in (("none", True), ("full", False))
    ]
    one, two = returned(left_out_blocks.train_split, 2, tmp_path, documents)
    assert one == two
    calls = {called for found in one for called in found[1 : 2 * left_out_blocks.STEPS : 2]}
    assert len(calls) > 1, "nothing was left out at random"


@pytest.mark.slow
def test_losses_by_the_loader_of_plain_pytorch_are_those_of_one_process(tmp_path: Path) -> None:
    wanted = left_out_blocks.of_one_process()
    for losses in returned(left_out_blocks.load, 2, tmp_path, str(tmp_path)):
        for number in range(3):
            by_data, at_random = losses[2 * number : 2 * number + 2]
            assert by_data == pytest.approx(wanted, abs=1e-5), number
            assert all(0.0 < loss < 10.0 for loss in at_random), number
