"""Stages of networks that are run whole, with modules that do nothing; without processes."""

import pytest
import torch
from torch import nn

from automap.errors import PlanError
from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.skipping_stages import cut_untraced, drop_weights

STAGES = {"embed": 0, "first": 0, "second": 1, "head": 1}


class Network(nn.Module):
    def __init__(self, *, skips=False, own=False):
        super().__init__()
        torch.manual_seed(0)
        for name in STAGES:
            self.add_module(name, nn.Linear(4, 4))
        self.skips = skips
        if own:
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        embedded = self.embed(x)
        # The addition is code between modules, and what it makes is read by the code of both stages.
        y = self.first(embedded) + 1.0
        z = self.second(y)
        return self.head(z + embedded if self.skips else z)


def data(samples):
    return [torch.randn(samples, 4, generator=torch.Generator().manual_seed(samples))]


def stages_of(network, last="first"):
    return cut_untraced(network, Roles(stages=STAGES, ends=STAGES), [(last, "second")], data, ("x",))


@pytest.mark.parametrize("last", ["first", ""])
def test_stages_hold_their_modules_and_compute_the_whole(last):
    """The tensor that crosses is that of a module, or that of the code in front of one."""
    network, (x,) = Network(), data(3)
    wanted = Network()(x)
    wanted.sum().backward()
    stages = stages_of(network, last)
    for number, stage in enumerate(stages):
        assert {n.partition(".")[0] for n, _ in stage.named_parameters()} == {
            n for n, s in STAGES.items() if s == number
        }
    crossing = stages[0](x=x)
    arrived = crossing.detach().requires_grad_()
    scores = stages[1](arrived, x=x)
    assert torch.equal(scores, wanted)
    scores.sum().backward()
    crossing.backward(arrived.grad)
    oracle = Network()
    oracle(x).sum().backward()
    for (name, parameter), (_, other) in zip(network.named_parameters(), oracle.named_parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)


def test_weights_of_other_stages_are_dropped():
    network, (x,) = Network(), data(2)
    wanted = network(x)
    stages = stages_of(network)
    drop_weights(network, stages[1:])
    assert {n.partition(".")[0] for n, _ in network.named_parameters()} == {"second", "head"}
    assert network.first.weight.shape == (4, 4), "code may ask for it"
    torch.testing.assert_close(stages[1](Network().first(Network().embed(x)), x=x), wanted)


def test_networks_that_cannot_skip_stages_are_refused():
    for network in (Network(skips=True), Network(own=True)):
        with pytest.raises(PlanError, match=r"plan\.stages"):
            stages_of(network)
    # The code between modules is in neither of them.
    with pytest.raises(PlanError, match="between modules"):
        cut_untraced(Network(), Roles(stages=STAGES, ends=STAGES), [("", "")], data, ("x",))


def test_a_module_that_only_names_a_weight_of_others_is_in_no_stage():
    """BART's embedding of tokens, which encoder and decoder have modules of their own for."""

    class Named(Network):
        def __init__(self):
            super().__init__()
            self.shared = nn.Linear(4, 4)
            self.first.weight = self.second.weight = self.shared.weight
            self.first.bias = self.shared.bias

    network, (x,) = Named(), data(2)
    wanted = network(x)
    stages = stages_of(network)
    torch.testing.assert_close(stages[1](stages[0](x=x), x=x), wanted)
    assert not any(name.startswith("shared") for stage in stages for name, _ in stage.named_parameters())
    other = Named()
    other.shared.bias = nn.Parameter(torch.zeros(4))
    with pytest.raises(PlanError, match="shared has parameters of its own"):
        stages_of(other)


def test_a_border_that_data_leave_out_is_named():
    """The tensor that crosses would be another one, or none; a block inside of a stage may be left out."""

    class Gated(Network):
        def forward(self, x):
            y = self.embed(x)
            y = self.first(y) if x.max() < 1e6 else y
            y = self.second(y) if x.max() < 1e3 else y
            return self.head(y)

    stages = stages_of(Gated())
    (x,) = data(2)
    for some in (x, x + 1e4):
        torch.testing.assert_close(stages[1](stages[0](x=some), x=some), Gated()(some))
    for given in ([], [stages[0](x=x)]):
        with pytest.raises(PlanError, match=r"left out by the code for these samples.*pp 1") as refused:
            stages[len(given)](*given, x=x + 1e7)
        assert refused.value.field == "module.first"


def test_a_cut_inside_of_torch_s_encoder_layer():
    """In evaluation, in which the stages are checked, the layer by itself calls none of its modules."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    network = nn.Sequential(nn.Linear(4, 4), layer)
    places = {"0": 0, "1.self_attn": 0, **{f"1.{name}": 1 for name in ("norm1", "linear1", "linear2", "norm2")}}
    roles = Roles(stages={**places, "1": 0}, ends={**places, "1": 1})

    def tokens(samples):
        return [torch.randn(samples, 3, 4, generator=torch.Generator().manual_seed(samples))]

    (x,) = tokens(3)
    wanted = network(x)
    one, two = cut_untraced(network, roles, [("1", "1.norm1")], tokens, ("input",))
    assert {name for name, _ in two.named_parameters()} == {
        name for name, _ in network.named_parameters() if name.split(".")[1] in ("norm1", "linear1", "linear2", "norm2")
    }
    assert torch.equal(two(one(input=x), input=x), wanted)
