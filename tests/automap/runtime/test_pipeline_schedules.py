"""Backward passes of pipeline stages; without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automap.runtime.trainer.pipeline_schedules import _comes_apart, _Stage


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


class Decoder(nn.Module):
    """A decoder, of which the first layer reads tokens and the results of an encoder."""

    def __init__(self, ties: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.queries, self.keys, self.up = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        if ties:
            self.head.weight = self.embed.weight

    def forward(self, encoded: Tensor) -> Tensor:
        x = self.embed(torch.arange(3))
        x = x + torch.softmax(self.queries(x) @ self.keys(encoded).T, -1) @ encoded
        scores: Tensor = self.head(x + torch.tanh(self.up(x)))
        return scores


@pytest.mark.parametrize("ties", [False, True])
def test_the_pass_of_a_decoder_behind_an_encoder_is_done_at_once(ties: bool) -> None:
    """Torch would pass some of its nodes twice, and refuse it."""
    torch.manual_seed(0)
    stage = _Stage.__new__(_Stage)
    stage.submod = Decoder(ties)
    x = torch.randn(3, 4, requires_grad=True)
    found: Any = {"stage_output": (stage.submod(x),), "output_grads": (torch.ones(3, 5),), "input_values": [x]}
    assert not _comes_apart(stage.submod, found)
    (of_input,), groups = stage.backward_maybe_with_nosync("input", found)
    stage.backward_maybe_with_nosync("weight", {"stage_output": found["stage_output"], "param_groups": groups})
    gradients = {name: parameter.grad for name, parameter in stage.submod.named_parameters()}
    stage.submod.zero_grad()
    y = x.detach().requires_grad_()
    stage.submod(y).sum().backward()
    torch.testing.assert_close(gradients, {name: p.grad for name, p in stage.submod.named_parameters()})
    torch.testing.assert_close(of_input, y.grad)


def test_the_pass_of_layers_in_a_row_comes_apart() -> None:
    """Weights of a normalisation and of a residual branch are used once each."""
    layers = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert _comes_apart(layers, {"stage_output": (layers(x),), "input_values": [x]})
