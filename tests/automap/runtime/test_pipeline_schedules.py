"""Backward passes of pipeline stages; without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automap.runtime.trainer.pipeline_schedules import _Stage


@pytest.mark.parametrize("has_gradient", [False, True])
def test_a_pass_that_is_taken_apart_reaches_all_weights(has_gradient: bool) -> None:
    """It does so too after frozen stages, whose results have no gradient."""
    torch.manual_seed(0)
    stage = _Stage.__new__(_Stage)
    stage.submod = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=has_gradient)
    wanted: list[Tensor] = []
    for parts in (("full",), ("input", "weight")):
        stage.submod.zero_grad()
        found: Any = {"stage_output": (stage.submod(x),), "output_grads": (torch.ones(3, 4),), "input_values": [x]}
        for part in parts:
            given = stage.backward_maybe_with_nosync(part, found)
            found = {"stage_output": found["stage_output"], "param_groups": given[1]}
        gradients = [parameter.grad for parameter in stage.submod.parameters()]
        assert all(gradient is not None for gradient in gradients), parts
        wanted = wanted or [gradient.clone() for gradient in gradients if gradient is not None]
        torch.testing.assert_close(gradients, wanted)
