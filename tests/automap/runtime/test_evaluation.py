"""Evaluation between the steps of a training; `test_module_trainer` compares it with one process under every plan."""

from __future__ import annotations

from pathlib import Path

import evaluated_ranks
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.fx
import torch.nn.functional as F  # noqa: N812
from returning_ranks import returned
from runtime_ranks import expert_plan, make_problem
from torch import Tensor, nn

from automap.runtime.trainer.evaluation import traced_draw
from automap.runtime.trainer.random_numbers import draws_of


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("zero", [0, 2])
def test_running_statistics_are_those_of_all_replicas(tmp_path: Path, zero: int) -> None:
    """A process that reads the checkpoint evaluates alike, and evaluations before do not change it."""
    plan = expert_plan(make_problem(evaluated_ranks.graph(), 2, evaluated_ranks.BATCH), count=2, zero=zero)
    found = returned(evaluated_ranks.both, 2, tmp_path, plan.to_json(), str(tmp_path))
    states = []
    for often in (False, True):
        state = {f"model.{name}": tensor.clone() for name, tensor in evaluated_ranks.network().state_dict().items()}
        dcp.load(state, checkpoint_id=tmp_path / str(often), no_dist=True)
        states.append({name.removeprefix("model."): tensor for name, tensor in state.items()})
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=0, atol=1e-12, msg=name)
    module = evaluated_ranks.network().eval()
    module.load_state_dict(states[0])
    x, labels = evaluated_ranks.batch(12)
    with torch.no_grad():
        wanted = module(x)
    for rank in found:
        for loss, scores, rows in rank:
            assert float(loss) == pytest.approx(float(F.cross_entropy(wanted, labels)), abs=1e-9)
            torch.testing.assert_close(scores, wanted[rows], rtol=0, atol=1e-9)


class Dropping(nn.Module):
    """Numbers that are drawn in training alone, or in evaluation too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.drop = kind, nn.Linear(2, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        if self.kind == "always":
            return y + torch.randn_like(y)
        if self.kind == "noise" and self.training:
            return y + torch.randn_like(y)
        return self.drop(y) if self.kind == "module" else F.dropout(y, 0.5 * (self.kind == "function"), self.training)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("function", "bernoulli_"), ("none", ""), ("module", ""), ("always", ""), ("noise", "randn_like")],
)
def test_what_a_trace_draws_in_evaluation_too_is_found(kind: str, what: str) -> None:
    module, x = Dropping(kind), torch.ones(100, 2)
    draws = [draws_of(module, lambda: module(x), training=training) for training in (True, False)]
    traced = torch.fx.symbolic_trace(module)
    assert traced_draw([nn.Linear(1, 1), traced], *draws).partition(" in ")[0] == what
    assert traced_draw([module], *draws) == "", "nothing is traced"
    numbers = torch.get_rng_state()
    one = traced.eval()(x)
    torch.set_rng_state(numbers)
    assert torch.equal(one, module.eval()(x)) == (not what)
