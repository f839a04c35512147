"""Conversions between placements: the dual is the true gradient, and the price lists the same collectives."""

import itertools

import numpy as np
import pytest
import torch
from virtual_ranks import assemble, collective, convert, letter, place

from automap.price.communication import KIND_COUNT, L_BYTES, L_COUNT, L_KIND
from automap.price.communication import convert as price_conversion
from automap.price.tables import COLLECTIVES
from ir.factors import BROADCAST, PARTIAL, gradient_placement

PLACEMENTS = (0, 1, BROADCAST, PARTIAL)
SHAPE = (12, 24)
DUALS = {
    "S->B": "P->S", "P->S": "S->B", "P->B": "B->B", "B->P": "B->B", "S->S": "S->S", "B->S": "S->B", "B->B": "P->B",
    "S->P": "B->S", "P->P": "B->B",
}  # fmt: skip
"""Forward -> backward, where a whole result is used for a share of the work by each rank; but see P->B.

P->B is followed by work that is the same on all ranks (B) in Megatron's g: the gradient is there already.
B->B followed by shares of work (gradient P) is Megatron's f.
"""


def listed(source, target, ranks):
    """Collectives that the price writes down: [(name, bytes)]."""
    records, cursor = np.full((8, L_COUNT), -1.0), np.zeros(1, dtype=np.int64)
    ones = np.ones(1)
    tag, times = np.zeros(3, dtype=np.int64), np.zeros(KIND_COUNT)
    sizes = np.array([float(ranks)])
    where, to = np.array([source]), np.array([target])
    price_conversion(1024.0, where, to, sizes, ones, ones, times, tag, records, cursor)
    return [(COLLECTIVES[int(r[L_KIND])], r[L_BYTES]) for r in records[: cursor[0]]]


def loss_of(parts, placement, gradient, weights):
    """A loss that all ranks together compute from a tensor in `placement`, and the same of the whole tensor.

    Returns:
        (the losses whose gradients are handed back, the loss of the whole tensor as a function)
    """
    ranks = len(parts)
    if placement >= 0:
        own = [w.chunk(ranks, placement)[r] for r, w in enumerate([weights[0]] * ranks)]
        return sum((torch.sin(p) * w).sum() for p, w in zip(parts, own, strict=True)), lambda x: (
            torch.sin(x) * weights[0]
        ).sum()
    if placement == BROADCAST and gradient == PARTIAL:
        return sum((torch.sin(p) * w).sum() for p, w in zip(parts, weights, strict=True)), lambda x: sum(
            (torch.sin(x) * w).sum() for w in weights
        )
    if placement == BROADCAST:
        return sum((torch.sin(p) * weights[0]).sum() for p in parts), lambda x: (torch.sin(x) * weights[0]).sum()
    return None, lambda x: (torch.sin(x) * weights[0]).sum()


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
        loss, function = loss_of(made, target, gradient, weights)
        x = whole.clone().requires_grad_()
        (wanted,) = torch.autograd.grad(function(x), x)
        if target == PARTIAL:
            # The loss is a function of the sum, whose gradient is the same for every part.
            found = torch.autograd.grad(made, leaves, [wanted] * ranks)
        else:
            found = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(assemble(list(found), gradient_placement(source)), wanted)
        name = f"{letter(gradient)}->{letter(gradient_placement(source))}"
        forward = f"{letter(source)}->{letter(target)}"
        if gradient == PARTIAL or target != BROADCAST:
            expected = "P->B" if forward == "P->B" else DUALS[forward]
        else:
            expected = f"B->{letter(gradient_placement(source))}"
        assert name == expected


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(PLACEMENTS, PLACEMENTS)))
def test_the_price_lists_the_collectives_that_run(source, target, ranks):
    name = collective(source, target)
    found = listed(source, target, ranks)
    assert [n for n, _ in found] == ([] if name is None else [name])
    if found:
        whole = source == PARTIAL or BROADCAST in (source, target) or target == PARTIAL
        assert found[0][1] == (1024.0 if whole else 1024.0 / ranks)
