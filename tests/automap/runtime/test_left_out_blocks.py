"""Networks that leave out blocks at random are refused where ranks could not follow each other."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from automap.errors import PlanError
from automap.runtime.trainer.left_out_blocks import order_of_blocks
from automap.runtime.trainer.random_numbers import draws_of

DRAWS = {
    "torch": lambda: torch.rand([]),
    "torch for many": lambda: torch.empty(3).uniform_()[0],
    "numpy": lambda: np.random.random(1)[0],
    "numpy for many": lambda: np.random.rand(3)[0],
    "Python": lambda: random.uniform(0, 1),
}


class Layers(nn.Module):
    """Blocks of which one is left out at a rate: by skipping it, or by multiplying what it makes by 0."""

    def __init__(self, rate: float, *, by_code: bool, draws: str = "torch") -> None:
        super().__init__()
        self.rate, self.by_code, self.draws = rate, by_code, draws
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, block in enumerate(self.h):
            draw = DRAWS[self.draws]() if self.training and number == 1 else torch.ones(())
            if not self.by_code:
                x = x + block(x) * (draw >= self.rate)
            elif draw >= self.rate:
                x = x + block(x)
        return x


@pytest.mark.parametrize("draws", DRAWS)
def test_a_block_that_code_skips_is_named(draws: str) -> None:
    units = ["h.0", "h.1", "h.2"]
    x = torch.randn(2, 4)
    for rate, by_code in ((0.0, True), (0.1, False)):
        order_of_blocks(Layers(rate, by_code=by_code, draws=draws), units, [x], (), are_all_needed=True)
    before = random.getstate(), np.random.get_state()
    for rate in (0.01, 0.99):
        with pytest.raises(PlanError, match=r"layerdrop = 0\.0") as refused:
            order_of_blocks(Layers(rate, by_code=True, draws=draws), units, [x], (), are_all_needed=True)
        assert refused.value.field == "module.h.1"
    assert random.getstate() == before[0]
    assert np.array_equal(np.random.get_state()[1], before[1][1])  # type: ignore[index]


def test_the_check_leaves_nothing_behind() -> None:
    module = Layers(0.0, by_code=True)
    before, numbers = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    order_of_blocks(module, ["h.0"], [torch.ones(2, 4)], (), are_all_needed=True)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert module.training and not module.h[0]._forward_pre_hooks


@pytest.mark.parametrize("draws", DRAWS)
@pytest.mark.parametrize("rate", [0.01, 0.5, 0.99])
def test_what_a_block_draws_is_seen_though_code_leaves_it_out(draws: str, rate: float) -> None:
    """Whatever the generators of a rank say: ranks that split a layer would wait for each other for ever."""
    x, found = torch.randn(2, 4), []
    for seed in range(3):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        module = Layers(rate, by_code=True, draws=draws)
        found.append(draws_of(module, lambda module=module: module(x)))  # type: ignore[misc]
    assert all(drawn.keys() - {""} == {"h.0.2", "h.1.2", "h.2.2"} for drawn in found)
    assert found[0] == found[1] == found[2]
