"""Processes that begin with something else than others are told so before any of them waits for another."""

from __future__ import annotations

from pathlib import Path

import partly_reached
import pytest
import unlike_ranks
from returning_ranks import returned
from runtime_ranks import expert_plan, make_problem

WANTED = {
    "plan": ("plan.stages", "process 2 has"),
    "batch": ("plan.training", '"global_batch": 24, process 2 has "global_batch": 16'),
    "network": ("module", "process 2 has last.weight: (7, 8) of torch.float64, trained"),
    "frozen": ("module", "process 2 has first.bias: (8,) of torch.float64, frozen"),
    "version": ("version", "process 2 has automap 0.0"),
}


@pytest.mark.slow
def test_all_processes_say_what_one_of_them_has_otherwise(tmp_path: Path) -> None:
    problem = make_problem(partly_reached.graph(), 3, 6 * 4)
    plans = [expert_plan(problem, count=2, zero=zero).to_json() for zero in (0, 3)]
    found = returned(unlike_ranks.all_cases, 3, tmp_path, plans)
    for number, case in enumerate(unlike_ranks.CASES):
        of_ranks = [rank[number] for rank in found]
        if case == "model":
            assert of_ranks[2] == ["ModelError", "model", "cannot be read (No such file or directory)"]
            assert of_ranks[0] == of_ranks[1]
            assert of_ranks[0] == ["UserError", "model", f"process 2 cannot begin: {of_ranks[2][2]}"]
        else:
            field, words = WANTED[case]
            assert of_ranks[0] == of_ranks[1] == of_ranks[2], case
            kind, where, message = of_ranks[0]
            assert (kind, where) == ("PlanError", field)
            assert words in message, message
