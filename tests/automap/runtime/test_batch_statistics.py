"""Which statistics batch normalisation takes under a plan, on real processes, against one process."""

from __future__ import annotations

from pathlib import Path

import normalised_images
import pytest
from normalised_images import FIXED
from returning_ranks import returned
from runtime_ranks import expert_plan, make_problem

CASES = ("batch statistics", FIXED)


@pytest.mark.slow
def test_statistics_are_all_that_replicas_change(tmp_path: Path) -> None:
    """Each normalises its own samples of a micro-batch by themselves; by running statistics nothing differs."""
    problem = make_problem(normalised_images.graph(), 2, normalised_images.BATCH, batch_norm="local")
    # The parts of a batch that have statistics of their own: replicas times micro-batches.
    plans = {
        2: expert_plan(problem, count=1),
        4: expert_plan(problem, count=2, zero=2),
        1: expert_plan(problem, pp=2, count=1),
    }
    documents = [plan.to_json() for plan in plans.values()]
    for losses in returned(normalised_images.train, 2, tmp_path, documents, CASES):
        for number, parts in enumerate(plans):
            for case, some in zip(CASES, losses[2 * number :], strict=False):
                assert some == pytest.approx(normalised_images.of_one_process(case, parts), abs=1e-9), (parts, case)
    by_halves, whole = (normalised_images.of_one_process(CASES[0], parts) for parts in (2, 1))
    assert abs(by_halves[0] - whole[0]) > 1e-3
