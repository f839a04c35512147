"""Networks that compute something else than the model of their plan, with the same parameters; without processes."""

from __future__ import annotations

import warnings

import changing_buffers
import pytest
import torch
from torch import Tensor, nn

from automap.runtime.trainer.graph_trainer import as_trained
from automap.runtime.trainer.same_code import warn_of_other_code
from ir.graph import Graph
from ir.zoo.net import Net

WIDTH = 8


class Network(nn.Module):
    """Layers with an activation, a norm that has statistics, and a dropout."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act, self.drop = act, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.drop(self.act(self.norm(self.one(x)))))
        return y


def graph() -> Graph:
    net = Net()
    x = net.linear(net.builder.input("x", (1, WIDTH)), "one", WIDTH)
    parameters = [net.parameter(f"norm.{name}", WIDTH) for name in ("weight", "bias")]
    buffers = [net.buffer(f"norm.running_{name}", WIDTH) for name in ("mean", "var")]
    x = net.op("BatchNormalization", [x, *parameters, *buffers], "norm", epsilon=1e-5)
    return net.finish(net.linear(net.op("Tanh", [x], "act"), "two", WIDTH), loss="cross_entropy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_activation_is_noticed(dtype: torch.dtype) -> None:
    for act, is_other in ((nn.Tanh(), False), (nn.Sigmoid(), True)):
        module = Network(act).to(dtype)
        before = {name: value.clone() for name, value in module.state_dict().items()}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warn_of_other_code(module, [as_trained(graph(), module), graph()])
        assert [str(one.message)[:34] for one in told] == ["module: computes something else th"][:is_other]
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        assert all(part.training for part in module.modules())


def test_what_cannot_be_compared_is_not_judged() -> None:
    """A network that does not run on these inputs is refused by what follows, with another reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_other_code(changing_buffers.network(), [graph()])
