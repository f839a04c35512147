"""Gradients of replicas are added up while the last backward pass still goes on."""

import pytest
import torch
from torch import nn

from automap.runtime.trainer import gradients as trainer_gradients
from automap.runtime.trainer.gradients import Earlier, OverlappedSums, shorten, square_of


class Done:
    """A collective that has ended."""

    def wait(self):
        pass


@pytest.fixture
def sent(monkeypatch):
    """All-reduces over two replicas that are alike: [elements]."""
    sizes = []

    def all_reduce(flat, *, group, async_op):
        assert async_op
        sizes.append(flat.numel())
        flat.mul_(2.0)
        return Done()

    monkeypatch.setattr(trainer_gradients.dist, "all_reduce", all_reduce)
    return sizes


def test_buckets_set_out_under_the_last_backward_pass(sent):
    torch.manual_seed(0)
    # Each weight alone is more than the first bucket holds.
    network = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 600))
    idle = nn.Parameter(torch.ones(3))
    sums = OverlappedSums({**dict.fromkeys(network.parameters(), 2), idle: 2}, group=None)
    seen = []
    network[0].register_full_backward_hook(lambda *_: seen.append(len(sent)))
    x = torch.randn(4, 600, requires_grad=True)
    for _ in range(2):  # steps
        sent.clear()
        seen.clear()
        network.zero_grad()
        idle.grad = None
        sums.begin()
        for part in x.split(2):
            network(part).square().sum().backward()
        early = len(sent)
        sums.finish()
        # The parameter that no pass reached comes first, and holds up nothing but the order.
        assert sum(sent) == 3 * (600 * 600 + 600) + 3
        assert seen[0] == 0, "nothing is complete before the last pass"
        assert early == 0, "buckets wait for the one before them"
    found = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    network(x).square().sum().backward()
    for gradient, parameter in zip(found, network.parameters(), strict=True):
        torch.testing.assert_close(gradient, 2.0 * parameter.grad, rtol=1e-4, atol=1e-4)
    assert (idle.grad == 0.0).all()


def test_the_last_layers_go_first(sent):
    network = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    sums = OverlappedSums(dict.fromkeys(network.parameters(), 1), group=None)
    seen = []
    network[0].register_full_backward_hook(lambda *_: seen.append(len(sent)))
    sums.begin()
    network(torch.randn(2, 600, requires_grad=True)).sum().backward()
    assert seen[0] > 0, "the last layer is on its way before the first one has its gradients"
    sums.finish()
    network(torch.randn(2, 600, requires_grad=True)).sum().backward()
    assert sum(sent) == 2 * (600 * 600 + 600), "outside of a step nothing is sent"


def test_steps_that_an_optimizer_does_not_follow_add_up(sent):
    weight = nn.Parameter(torch.ones(3))
    sums = OverlappedSums({weight: 1}, group=None)
    for factor, to_all in ((1.0, True), (2.0, True), (4.0, False), (8.0, True)):
        earlier = Earlier([weight])
        sums.begin()
        (weight * factor).sum().backward()
        sums.finish()
        if not to_all:
            weight.grad = None
        earlier.add(to_all=to_all)
        # Two replicas add up to twice the factor; what they have added up once, they do not add up again.
        wanted = {1.0: 2.0, 2.0: 6.0, 8.0: 16.0}.get(factor)
        assert (weight.grad is None) if wanted is None else weight.grad.tolist() == [wanted] * 3


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_gradients_are_clipped_as_by_torch(max_norm):
    torch.manual_seed(0)
    one, two = ([nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(7))] for _ in range(2))
    for mine, theirs in zip(one, two, strict=True):
        mine.grad = torch.randn_like(mine)
        theirs.grad = mine.grad.clone()
    wanted = torch.nn.utils.clip_grad_norm_(two, max_norm).item()
    # Two ranks that hold the same gradients: each counts half of them.
    norm = float(2.0 * square_of(((p.grad, 2) for p in one), torch.device("cpu"))) ** 0.5
    assert norm == pytest.approx(wanted)
    shorten((p.grad for p in one), norm, max_norm)
    for mine, theirs in zip(one, two, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_parameters_may_be_frozen_and_trained_again_between_steps(sent):
    one, two = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    two.requires_grad_(False)
    sums = OverlappedSums({one: 1, two: 1}, group=None)
    for is_trained, other, elements in ((False, True, 3), (True, True, 5), (True, False, 2)):
        two.requires_grad_(is_trained)
        one.requires_grad_(other)
        one.grad = two.grad = None
        sent.clear()
        sums.begin()
        ((3.0 * one).sum() + (5.0 * two).sum()).backward()
        sums.finish()
        # Two replicas add up to twice the factors; what is frozen has no gradient, which would be decayed.
        found = [None if p.grad is None else p.grad.tolist() for p in (one, two)]
        assert found == [[6.0] * 3 if other else None, [10.0] * 2 if is_trained else None]
        assert sum(sent) == elements


def test_a_stage_without_parameters_has_nothing_to_sum(sent):
    """Such as the loss alone, which two replicas compute."""
    sums = OverlappedSums({}, group=None)
    sums.begin()
    sums.finish()
    assert not sent
