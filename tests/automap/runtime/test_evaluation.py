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

from automap.runtime.trainer.evaluation import traced_dropout


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
    def __init__(self, rate: float, *, by_function: bool) -> None:
        super().__init__()
        self.rate, self.layer, self.drop = rate, nn.Linear(2, 2), None if by_function else nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return F.dropout(y, self.rate, self.training) if self.drop is None else self.drop(y)


def test_a_dropout_that_is_traced_is_found() -> None:
    """It drops in evaluation too."""
    for rate, by_function, training, place in (
        (0.5, True, True, "dropout"),
        (0.5, True, False, ""),
        (0.0, True, True, ""),
        (0.5, False, True, ""),
    ):
        module = Dropping(rate, by_function=by_function).train(training)
        traced = torch.fx.symbolic_trace(module)
        assert traced_dropout([nn.Linear(1, 1), traced]) == place
        x = torch.ones(100, 2)
        assert torch.equal(traced.eval()(x), module.eval()(x)) == (not place)
