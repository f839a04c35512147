"""The mesh of the processes that train."""

from __future__ import annotations

import pytest
import torch
import trainer_ranks
from runtime_ranks import expert_plan, make_problem

from automap.errors import PlanError
from automap.runtime.trainer import process_mesh
from ir import zoo


@pytest.mark.parametrize(("planned", "started"), [(1, 2), (2, 1), (4, 8)])
def test_another_number_of_processes_is_refused_with_the_number_to_start(
    planned: int, started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search may leave devices idle, and torchrun starts one process for each."""
    problem = make_problem(zoo.build(trainer_ranks.MODEL), planned, trainer_ranks.BATCH, {"fix": {"pp": 1}})
    monkeypatch.setattr(process_mesh.dist, "get_world_size", lambda: started)
    with pytest.raises(PlanError, match=rf"the {started} processes that .* Start {planned} in all, .*={planned} on"):
        process_mesh.make_mesh(expert_plan(problem, tp=1), torch.device("cpu"))
