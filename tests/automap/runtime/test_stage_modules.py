"""Stages of networks that are traced and cut between modules; without processes."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.stage_modules import arguments, cut
from automap.runtime.trainer.supported_plans import FinerThanModules
from ir import zoo

MODEL = "gpt:layers=2,hidden=16,heads=4,seq_len=8,vocab_size=24"


class Inner(nn.Module):
    """Two layers, and what else may be read: a parameter of its own, a layer once more, or the weight of a layer."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first, self.second, self.shared = (nn.Linear(4, 4) for _ in range(3))
        self.own = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = self.second(self.shared(self.first(x)) if self.kind == "shared" else self.first(x))
        match self.kind:
            case "shared":
                return self.shared(y)
            case "own":
                return y * self.own
            case "weight":
                return F.linear(y, self.first.weight)
        return y


class Outer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.inner, self.head = Inner(kind), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.inner(x))


ONCE = {"inner.first": 0, "inner.second": 1, "head": 1}


def stages_of(kind):
    more = {"shared": ({"inner.shared": 0}, {"inner.shared": 1}), "own": ({"inner": 1}, {"inner": 1})}
    first, last = more.get(kind, ({"inner": 1}, {"inner": 1}) if kind == "weight" else ({}, {}))
    return cut(Outer(kind), Roles(stages=ONCE | first, ends=ONCE | last), 2, ["x"])


def test_each_stage_has_its_modules():
    found = [{name.rpartition(".")[0] for name, _ in stage.named_parameters()} for stage in stages_of("")]
    assert found == [{"inner.first"}, {"inner.second", "head"}]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shared", r"several stages run inner\.shared"),
        ("weight", r"inner\.first, or code between modules reads its weight"),
        ("own", r"the parameter inner\.own belongs to no module"),
    ],
)
def test_parameters_that_cut_code_reads_are_finer_than_modules(kind, said):
    """A stage would hold them apart from the network, and neither optimizer nor checkpoint would see their changes."""
    with pytest.raises(FinerThanModules, match=said):
        stages_of(kind)


class Several(Outer):
    """A network that returns more than scores: results of layers of the first stage, and of one of its own."""

    def __init__(self, kind):
        super().__init__("")
        self.kind, self.beside = kind, nn.Linear(4, 4)

    def forward(self, x):
        first = self.inner.first(x)
        y = self.inner.second(first)
        more = (self.beside(first) + y, first)
        return {"hidden": more, "logits": self.head(y)} if self.kind == "mapping" else (self.head(y), *more)


@pytest.mark.parametrize("kind", ["mapping", "tuple"])
def test_what_a_network_returns_beside_its_scores_is_left_out(kind):
    torch.manual_seed(0)
    network, x = Several(kind), torch.randn(2, 4)
    found = network(x)
    wanted = found["logits"] if kind == "mapping" else found[0]
    stages = cut(network, Roles(stages=ONCE, ends=ONCE), 2, ["x"])
    assert torch.equal(stages[1](stages[0](x=x), x=x), wanted)
    assert {name.rpartition(".")[0] for stage in stages for name, _ in stage.named_parameters()} == ONCE.keys()


def test_a_network_without_scores_is_refused():
    class Named(Outer):
        def forward(self, x):
            return {"scores": super().forward(x)}

    with pytest.raises(FinerThanModules, match="returns no scores"):
        cut(Named(""), Roles(stages=ONCE, ends=ONCE), 2, ["x"])


class Arguments(Outer):
    """A network whose forward has more arguments than its model has inputs, in another order than these."""

    def forward(self, mask=None, x=None, scale=2.0, *more, shift=None, **others):
        assert not more and not others and (mask is None) != (shift is None)
        y = self.head(self.inner(x)) * scale
        return y + (mask if shift is None else shift)


@pytest.mark.parametrize("inputs", [("x", "mask"), ("shift", "x")])
def test_arguments_that_are_no_inputs_have_their_defaults(inputs):
    torch.manual_seed(0)
    network, data = Arguments(""), {name: torch.randn(2, 4) for name in inputs}
    stages = cut(network, Roles(stages=ONCE, ends=ONCE), 2, inputs)
    assert torch.equal(stages[1](stages[0](**data), **data), network(**data))


def test_inputs_without_a_name_are_refused():
    class Star(Outer):
        def forward(self, *inputs):
            return super().forward(inputs[0])

    graph = zoo.build(MODEL)
    with pytest.raises(FinerThanModules, match=r"forward\(\*inputs\) does not name each of its inputs.*each: ids"):
        arguments(graph, Star(""))


class Noisy(Outer):
    """A network whose outermost code draws random numbers."""

    def forward(self, x):
        if self.inner.kind == "constant":
            return self.head(self.inner(x) + torch.rand(4))
        if self.inner.kind == "twice":
            noise = torch.rand_like(x)
            return self.head(self.inner(x + noise)) + noise
        y = self.inner(x)
        return self.head(y + torch.rand_like(y))


@pytest.mark.parametrize(
    ("kind", "said"),
    [("constant", r"a trace keeps the numbers of rand in .* line"), ("twice", "2 tensors cross.*rand_like")],
)
def test_random_numbers_that_stages_would_not_share_are_refused(kind, said):
    """Traced code would have those of the trace in every step, or each stage would draw its own."""
    with pytest.raises(FinerThanModules, match=said):
        cut(Noisy(kind), Roles(stages=ONCE, ends=ONCE), 2, ["x"])


def test_random_numbers_of_one_stage_are_drawn_in_every_step():
    torch.manual_seed(0)
    network, x = Noisy(""), torch.randn(2, 4)
    first, last = cut(network, Roles(stages=ONCE, ends=ONCE), 2, ["x"])
    found = []
    for run in (lambda: network(x), lambda: last(first(x=x), x=x)):
        torch.manual_seed(1)
        found.append((run(), run()))
    assert all(map(torch.equal, *found))
    assert not torch.equal(*found[0])
