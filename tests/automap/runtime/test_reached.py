"""Parameters that no pass of a step reaches stay as they are in one process of torch."""

from __future__ import annotations

from pathlib import Path

import partly_reached
import pytest
import torch
import torch.distributed.checkpoint as dcp
from returning_ranks import returned
from runtime_ranks import expert_plan, make_problem
from torch import nn

from automap.errors import PlanError
from automap.plan import Plan
from automap.runtime.trainer.split_check import trained_ones
from automap.runtime.trainer.supported_plans import check_parameters


def plans() -> dict[str, Plan]:
    problem = make_problem(partly_reached.graph(), 2, partly_reached.BATCH)
    return {
        "replicas": expert_plan(problem, count=2),
        **{f"ZeRO {zero}": expert_plan(problem, count=2, zero=zero) for zero in (1, 2, 3)},
        "two stages": expert_plan(problem, pp=2, count=2),
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_unreached_parameters_have_no_gradient(tmp_path: Path) -> None:
    """AdamW neither lets them decay nor moves them; state that is absent is no fault of a checkpoint."""
    found = plans()
    returned(partly_reached.train, 2, tmp_path, [plan.to_json() for plan in found.values()], str(tmp_path))
    wanted, before = partly_reached.of_one_process(), dict(partly_reached.network().named_parameters())
    still = [name for name, parameter in before.items() if torch.equal(parameter, wanted[name])]
    assert still == ["unused.weight", "unused.bias", "routed.still.weight", "routed.still.bias"]
    for number, name in enumerate(found):
        for way in ("trained", "resumed"):
            after = {f"model.{n}": torch.full_like(p, torch.nan) for n, p in wanted.items()}
            dcp.load(after, checkpoint_id=tmp_path / f"{way} {number}", no_dist=True)
            for n, p in wanted.items():
                torch.testing.assert_close(after[f"model.{n}"], p, rtol=0, atol=1e-9, msg=f"{name}, {way}: {n}")


def test_parameters_beside_the_graph_are_those_that_scores_do_not_depend_on() -> None:
    module, graph = partly_reached.network(), partly_reached.graph()
    names = {"unused.weight", "routed.still.weight", "first.weight"}
    module.first.weight.requires_grad_(False)
    assert trained_ones(module, graph, names) == {"first.weight"}
    assert [n for n, p in module.named_parameters() if not p.requires_grad] == ["first.weight"]
    check_parameters(graph, module)
    module.last = nn.Sequential(module.last, nn.Linear(partly_reached.CLASSES, partly_reached.CLASSES))
    with pytest.raises(PlanError, match=r"module\.last"):
        check_parameters(graph, module)
