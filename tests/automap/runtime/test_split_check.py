"""Checks of the code of networks."""

import inspect

import pytest
import torch
from torch import nn

from automap.errors import PlanError
from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.split_check import computes, sizes_of_ranks


class Block(nn.Module):
    """Takes the number of tokens from what it is given, as blocks do that run on a part of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return y.view(2, 3, 4)


def test_code_that_does_not_run_is_named_with_its_module_and_line():
    network = nn.Sequential(nn.Linear(4, 4), Block())
    assert computes(network, [torch.ones(2, 3, 4)], ()).shape == (2, 3, 4)
    lines, first = inspect.getsourcelines(Block.forward)
    line = first + next(number for number, text in enumerate(lines) if "view" in text)
    with pytest.raises(PlanError, match=rf"model in 1, test_split_check.py line {line}: shape .* is invalid"):
        computes(network, [torch.ones(2, 2, 4)], ())


def test_a_forward_that_takes_other_inputs_is_not_named_by_a_line():
    with pytest.raises(PlanError, match=r"of the plan's model: .*positional argument"):
        computes(Block(), [torch.ones(2, 3, 4)] * 2, ())


def test_numbers_of_heads_are_those_of_ranks_and_features_of_a_head_are_not():
    """Attention of StableLM or Persimmon with four heads, of which four features are turned by positions."""
    attention = nn.Module()
    attention.num_heads = attention.num_key_value_groups = attention.rotary_ndims = attention.head_dim = 4
    attention.hidden_size, attention.is_causal = 16, True
    roles = Roles(axis="tp", axis_size=2, modules={}, sizes={"1": {4, 16}})
    assert sizes_of_ranks(nn.Sequential(nn.Linear(4, 16), attention), roles) == ["1.num_heads", "1.hidden_size"]


def test_torch_s_encoder_layers_call_their_modules_in_evaluation_too():
    """Pipeline stages may end inside of them, and look at these modules."""
    layer, called = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), []
    forward = layer.norm1.forward
    layer.norm1.forward = lambda x: called.append(1) or forward(x)
    x = torch.randn(2, 3, 8)
    found = computes(layer, [x], ())
    assert called == [1]
    assert layer.training and torch.backends.mha.get_fastpath_enabled()
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), found)
    assert called == [1], "by itself the layer is one kernel"
