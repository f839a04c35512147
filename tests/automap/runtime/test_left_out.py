"""Networks that leave out blocks at random are refused where ranks could not follow each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from automap.errors import PlanError
from automap.runtime.trainer.left_out import order_of_blocks


class Layers(nn.Module):
    """Blocks of which one is left out at a rate: by skipping it, or by multiplying what it makes by 0."""

    def __init__(self, rate: float, *, by_code: bool) -> None:
        super().__init__()
        self.rate, self.by_code = rate, by_code
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for number, block in enumerate(self.h):
            draw = torch.rand([]) if self.training and number == 1 else torch.ones(())
            if not self.by_code:
                x = x + block(x) * (draw >= self.rate)
            elif draw >= self.rate:
                x = x + block(x)
        return x


def test_a_block_that_code_skips_is_named() -> None:
    units = ["h.0", "h.1", "h.2"]
    x = torch.randn(2, 4)
    for rate, by_code in ((0.0, True), (0.1, False)):
        order_of_blocks(Layers(rate, by_code=by_code), units, [x], (), are_all_needed=True)
    for rate in (0.01, 0.99):
        with pytest.raises(PlanError, match=r"layerdrop = 0\.0") as refused:
            order_of_blocks(Layers(rate, by_code=True), units, [x], (), are_all_needed=True)
        assert refused.value.field == "module.h.1"


def test_the_check_leaves_nothing_behind() -> None:
    module = Layers(0.0, by_code=True)
    before, numbers = {name: value.clone() for name, value in module.state_dict().items()}, torch.get_rng_state()
    order_of_blocks(module, ["h.0"], [torch.ones(2, 4)], (), are_all_needed=True)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers)
    assert module.training and not module.h[0]._forward_pre_hooks
