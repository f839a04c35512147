"""Random numbers of ranks: alike where a layer is split, of their own where samples are others."""

import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer import random_numbers

ALONE = Axis(name="", number=0, size=1, index=0, group=None)
CPU = torch.device("cpu")


def drawn(rank, ranks):
    """What a rank draws in a step, and behind it; scripts seed all processes alike."""
    seed()
    with (
        mock.patch.object(random_numbers.dist, "get_rank", return_value=rank),
        mock.patch.object(random_numbers.dist, "get_world_size", return_value=ranks),
        random_numbers.alike(ALONE, CPU),
    ):
        inside = numbers()
    return inside, numbers()


def seed():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def numbers():
    """Numbers of the common generators of torch, Python and numpy."""
    return torch.cat([torch.rand(8), torch.tensor([random.random(), np.random.rand()])])


def test_replicas_that_are_seeded_alike_draw_numbers_of_their_own():
    (one, behind), (two, behind_too) = drawn(0, 2), drawn(1, 2)
    assert (one != two).all()
    assert torch.equal(behind, behind_too), "a script goes on alike on all ranks"
    assert torch.equal(drawn(1, 2)[0], two), "a run can be repeated"


def test_a_process_that_is_alone_draws_what_it_would_draw_without_a_plan():
    seed()
    wanted = numbers()
    assert torch.equal(drawn(0, 1)[0], wanted)


class Noisy(nn.Module):
    """Numbers for what the layer makes, some of them by the heads, and for the samples."""

    def __init__(self, width, draw):
        super().__init__()
        self.layer, self.draw, self.drop, self.whole = nn.Linear(4, width), draw, nn.Dropout(0.5), Whole()

    def forward(self, x):
        y = self.draw(self.layer(x)) if self.training else self.layer(x)
        return self.whole(self.drop(y).sum(1, keepdim=True)) + F.dropout(y, 0.0)


class Whole(nn.Module):
    def forward(self, x):
        self.noise = torch.rand(len(x), 1)
        return x + self.noise


DRAWING = {
    "bernoulli": lambda y: y * torch.bernoulli(torch.full_like(y, 0.5)),
    "rand": lambda y: y + torch.rand(y.shape),
    "randn_like": lambda y: y + torch.randn_like(y),
    "normal_": lambda y: y + torch.empty(y.shape).normal_(),
    "dropout": lambda y: F.dropout(y, 0.5),
    "gumbel_softmax": F.gumbel_softmax,
    "for each head": lambda y: y + torch.cat([torch.rand(len(y), 2) for _ in range(y.shape[1] // 2)], 1),
    "attention": lambda y: F.scaled_dot_product_attention(*3 * [y[None, :, :, None]], dropout_p=0.5)[0, :, :, 0],
}


@pytest.mark.parametrize("what", DRAWING)
def test_what_is_drawn_for_parts_differs_on_ranks_and_the_rest_does_not(what):
    x = torch.randn(6, 4)
    whole = Noisy(8, DRAWING[what])
    before = torch.get_rng_state()
    drawn = random_numbers.draws_of(whole, lambda: whole(x))
    assert torch.equal(torch.get_rng_state(), before)
    assert set(drawn) == {"", "drop", "whole"}, "a dropout that drops nothing draws nothing"
    assert not random_numbers.draws_of(whole, lambda: whole(x), training=False).keys() & {"", "drop"}
    assert whole.training
    found, inner = [], []
    for rank in range(2):
        part = Noisy(4, DRAWING[what])
        part.load_state_dict({name: value[:4] for name, value in whole.state_dict().items()})
        split = random_numbers.draws_of(part, lambda part=part: part(x))
        axis = Axis(name="tp", number=0, size=2, index=rank, group=None)
        random_numbers.draw_independently(part, drawn, split, axis)
        part.whole.register_forward_hook(lambda module, args, y: inner.append(module.noise))
        part.drop.register_forward_hook(lambda module, args, y: found.append((args[0], y != 0)))
        for _ in range(2):
            torch.manual_seed(1)
            part(x)
    (one, dropped), again, (two, dropped_there), _ = found
    assert torch.equal(one, again[0]) and torch.equal(dropped, again[1]), "what runs again has other numbers"
    assert not torch.equal(one, two) and not torch.equal(dropped, dropped_there), "parts have the same numbers"
    assert all(torch.equal(noise, inner[0]) for noise in inner), "what is whole has other numbers on each rank"


def test_code_that_draws_for_whole_tensors_and_for_parts_is_refused():
    def both(y):
        return y + torch.rand(y.shape) + torch.bernoulli(torch.full((len(y), 1), 0.5))

    whole, part, x = Noisy(8, both), Noisy(4, both), torch.randn(6, 4)
    drawn, split = (random_numbers.draws_of(module, lambda module=module: module(x)) for module in (whole, part))
    axis = Axis(name="tp", number=0, size=2, index=0, group=None)
    with pytest.raises(PlanError, match=r"whole tensors \(bernoulli .*for parts of split ones \(rand in .* line \d+"):
        random_numbers.draw_independently(part, drawn, split, axis)


def test_a_generator_that_code_gives_is_refused():
    generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), Noisy(4, lambda y: y + torch.rand(y.shape, generator=generator)))
    with pytest.raises(PlanError, match=r"rand in test_random_numbers.py line \d+ draws from a generator") as refused:
        random_numbers.draws_of(module, lambda: module(torch.randn(2, 4)))
    assert refused.value.field == "module.1"
    assert refused.value.value == "Noisy"
