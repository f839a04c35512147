"""Conversions between placements: the dual is the true gradient, and the price lists the same collectives."""

import itertools

import numpy as np
import pytest
import torch
from price_cases import stage_of
from virtual_ranks import assemble, collective, convert, letter, place

from automap.fitted_curves import COLLECTIVES
from automap.price.kernels.collectives import Reason
from automap.price.kernels.collectives import convert as price_conversion
from automap.price.kernels.cost_records import COLLECTIVE_DTYPE, Recorder
from ir.factors import BROADCAST, PARTIAL, gradient_placement

PLACEMENTS = (0, 1, BROADCAST, PARTIAL)
SHAPE = (12, 24)
DUALS = {
    ("S->B", "P"): "P->S", ("P->S", "S"): "S->B", ("P->B", "B"): "B->B", ("P->B", "P"): "P->B", ("B->P", "B"): "B->B",
    ("B->B", "P"): "P->B", ("B->B", "B"): "B->B", ("S->S", "S"): "S->S", ("B->S", "S"): "S->B", ("S->B", "B"): "B->S",
    ("S->P", "B"): "B->S", ("P->P", "B"): "B->B",
}  # fmt: skip
"""(forward, placement in which the users hand the gradient back) -> backward.

A whole result (B) has gradient P where each rank uses it for its own share of the work, and B where all do the same
with it: so B->B with P is Megatron's f, P->B with B its g.
"""


def listed(source, target, ranks):
    """Collectives that the price writes down: [(name, bytes)]."""
    recorder = Recorder(np.empty(8, dtype=COLLECTIVE_DTYPE), np.zeros(1, dtype=np.int64))
    times, where, to = np.zeros(len(COLLECTIVES)), np.array([source]), np.array([target])
    price_conversion(1024.0, where, to, 0, stage_of([ranks]), times, Reason(0, 0, 0, 0.0), recorder)
    return [(COLLECTIVES[row.kind], row.data_bytes) for row in recorder.rows[: recorder.num_rows[0]]]


def users(placement, gradient, weights, ranks):
    """What the users of a tensor compute: (loss on each rank of what it holds, loss of the whole tensor)."""

    def loss(x, weight):
        return (torch.sin(x) * weight).sum()

    if placement >= 0:
        shares = weights[0].chunk(ranks, placement)
        return [lambda x, w=w: loss(x, w) for w in shares], lambda x: loss(x, weights[0])
    if gradient == PARTIAL:
        return [lambda x, w=w: loss(x, w) for w in weights], lambda x: loss(x, sum(weights))
    return [lambda x: loss(x, weights[0])] * ranks, lambda x: loss(x, weights[0])


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACEMENTS, PLACEMENTS)))
def test_the_dual_is_the_true_gradient(source, target, ranks):
    generator = torch.Generator().manual_seed(ranks)
    whole = torch.randn(SHAPE, dtype=torch.float64, generator=generator)
    weights = [torch.randn(SHAPE, dtype=torch.float64, generator=generator) for _ in range(ranks)]
    for gradient in (BROADCAST, PARTIAL) if target == BROADCAST else (gradient_placement(target),):
        leaves = [part.requires_grad_() for part in place(whole, source, ranks, generator)]
        made = convert(leaves, source, target, gradient)
        torch.testing.assert_close(assemble([m.detach() for m in made], target), whole)
        losses, loss = users(target, gradient, weights, ranks)
        x = whole.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(loss(x), x)
        if target == PARTIAL:
            # The loss is a function of the sum of the parts: each part has the gradient of the sum.
            given = [wanted] * ranks
        else:
            given = [torch.autograd.grad(f(m), m, retain_graph=True)[0] for f, m in zip(losses, made, strict=True)]
        found = torch.autograd.grad(made, leaves, given)
        torch.testing.assert_close(assemble(list(found), gradient_placement(source)), wanted)
        forward = f"{letter(source)}->{letter(target)}"
        backward = f"{letter(gradient)}->{letter(gradient_placement(source))}"
        assert backward == DUALS[forward, letter(gradient)]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACEMENTS, PLACEMENTS)))
def test_the_price_lists_the_collectives_that_run(source, target, ranks):
    name = collective(source, target)
    found = listed(source, target, ranks)
    assert [n for n, _ in found] == ([] if name is None else [name])
    if found:
        whole = source == PARTIAL or BROADCAST in (source, target)
        assert found[0][1] == (1024.0 if whole else 1024.0 / ranks)
