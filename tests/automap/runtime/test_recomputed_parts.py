"""Modules whose code runs again in the backward pass, without the layers inside of them."""

import collections

import pytest
import torch
from torch import nn

from automap.errors import PlanError
from automap.runtime.trainer.recomputation import recompute

RAN = collections.Counter[str]()


class Counted(nn.Linear):
    """A layer that counts its passes."""

    def forward(self, x):
        RAN["layer"] += 1
        return super().forward(x)


class Attention(nn.Module):
    """Code between layers, with random numbers, as attention has it."""

    def __init__(self, *, in_place=False):
        super().__init__()
        self.qkv, self.out, self.dropout = Counted(8, 24), Counted(8, 8), nn.Dropout(0.5)
        self.in_place = in_place

    def forward(self, x, scale):
        RAN["code"] += 1
        made = self.qkv(x)
        if self.in_place:
            made.mul_(scale)
        q, k, v = made.chunk(3, -1)
        weights = self.dropout(torch.softmax(q @ k.mT * scale, -1))
        return self.out(weights @ v), weights


def gradients(module, seed):
    """Gradients of two passes that are both open before the first backward pass, as in a pipeline."""
    torch.manual_seed(seed)
    inputs = [torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    losses = [sum(y.square().sum() for y in module(x, 0.3)) for x in inputs]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    return [p.grad for p in (*module.parameters(), *inputs)]


def test_layers_run_once_and_the_code_around_them_twice():
    torch.manual_seed(0)
    module = Attention().double()
    wanted = gradients(module, 1)
    module.zero_grad()
    recompute(nn.ModuleDict({"attn": module}), {"attn": ("attn.qkv", "attn.out")})
    RAN.clear()
    found = gradients(module, 1)
    assert RAN["layer"] == 2 * 2
    assert RAN["code"] > 2
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    with torch.no_grad():
        assert module(torch.ones(1, 2, 8, dtype=torch.float64), 1.0)[0].shape == (1, 2, 8)


def test_layers_that_are_changed_in_place_are_refused():
    module = Attention(in_place=True)
    recompute(nn.ModuleDict({"attn": module}), {"attn": ("attn.qkv", "attn.out")})
    with pytest.raises(PlanError, match="changes in place"):
        module(torch.randn(1, 4, 8, requires_grad=True), 0.3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch._dynamo looks at it
def test_a_compiled_module_runs_again():
    """torch.compile refuses contexts around recomputed code."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), torch.randn(3, 4)
    module(x).square().sum().backward()
    wanted = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    recompute(module, {"1": ()})
    module.compile(backend="eager")
    module(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], wanted)
