"""Gradients of replicas are added up while the last backward pass still goes on."""

import pytest
import torch
from torch import nn

from automap.runtime.trainer import gradients as trainer_gradients
from automap.runtime.trainer.gradients import OverlappedSums


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
