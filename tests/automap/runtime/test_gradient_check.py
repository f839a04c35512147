"""Gradients of split layers are compared with those of the whole network before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trainer_ranks
from returning_ranks import returned
from runtime_ranks import expert_plan, make_problem

from automap.records import to_json
from automap.runtime.trainer import gradient_check
from ir import zoo


@pytest.mark.slow
@pytest.mark.parametrize(("sequence_parallel", "wrong"), [(True, "summed"), (False, "moves")])
def test_wrong_gradients_are_refused_where_the_scores_are_right(
    sequence_parallel: bool, wrong: str, tmp_path: Path
) -> None:
    problem = make_problem(zoo.build(trainer_ranks.MODEL), 2, trainer_ranks.BATCH, {"fix": {"pp": 1}})
    plan = expert_plan(problem, tp=2, sequence_parallel=sequence_parallel)
    for right, refused in returned(trainer_ranks.refusals, 2, tmp_path, to_json(plan), ["nothing", wrong]):
        assert right == [""]
        assert "has other gradients on split layers than whole, for instance that of" in refused[0]


def test_without_memory_for_them_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = zoo.build(trainer_ranks.MODEL)
    network = trainer_ranks.build()
    ids = torch.zeros(2, trainer_ranks.SIZES["seq_len"], dtype=torch.int64)
    monkeypatch.setattr(gradient_check.dist, "all_reduce", lambda x: None)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(gradient_check.os, "sysconf", lambda name: 1)
    gradient_check.GradientCheck(graph, network, [ids], (), network(ids)).check(None)
    assert all(p.grad is None for p in network.parameters())


@pytest.mark.parametrize("sparse", [False, True])
def test_norms_are_those_of_torch(sparse: bool) -> None:
    network = trainer_ranks.build()
    network.wpe.sparse = sparse
    ids = torch.randint(24, (2, 8), generator=torch.Generator().manual_seed(3))
    scores = network(ids)
    found = gradient_check._gradient_norms(network, [ids], (), scores.detach())
    scores.backward(torch.randn(scores.shape, generator=torch.Generator().manual_seed(0)).to(scores))
    assert found == pytest.approx({n: float(p.grad.to_dense().norm()) for n, p in network.named_parameters()}, rel=1e-9)
