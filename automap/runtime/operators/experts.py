"""Mixture of experts: tokens to the slots of their experts, the experts' products, and back.

Experts are counted from the first one that the operator holds. A choice of another expert takes no slot: a rank that
holds some of the experts subtracts the number of its first expert from the choices.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from automap.runtime.operators.base import Use, function
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT


def _by_group(x: Tensor, samples: int, groups: int, batch_dim: int) -> Tensor:
    """[samples groups, tokens of one group, last dim] of `[tokens ..., last dim]`.

    Samples are the major part of `batch_dim`, groups are runs of the other token dims.
    """
    shape = (*x.shape[:batch_dim], samples, -1, *x.shape[batch_dim + 1 :])
    return x.reshape(shape).movedim(batch_dim, 0).reshape(samples * groups, -1, x.shape[-1])


def _slots(chosen: Tensor, experts: int, capacity: int) -> Tensor:
    """[runs, tokens k]: the slot that each choice takes in its run of tokens; `experts * capacity` = none."""
    flat = chosen.flatten(1)
    mine = flat[..., None] == torch.arange(experts, device=chosen.device)
    place = (mine.cumsum(1) * mine).sum(-1) - 1
    return torch.where((place >= 0) & (place < capacity), flat * capacity + place, experts * capacity)


@function(DISPATCH)
def dispatch(use: Use) -> Tensor:
    """Slots [experts, groups, (samples capacity), hidden] of tokens [..., hidden] by choices [..., k], else zeros."""
    capacity, batch_dim = use.integer("capacity"), use.integer("batch_dim")
    experts, *group, slots, width = use.shapes[0]
    samples, groups = slots // capacity, math.prod(group)
    chosen = _by_group(use.operand(1), samples, groups, batch_dim)
    rows = _by_group(use.x, samples, groups, batch_dim).repeat_interleave(chosen.shape[-1], 1)
    index = _slots(chosen, experts, capacity)[..., None].expand_as(rows)
    taken = rows.new_zeros(samples * groups, experts * capacity + 1, width).scatter(1, index, rows)
    taken = taken[:, :-1].reshape(samples, groups, experts, capacity, width)
    return taken.permute(2, 1, 0, 3, 4).reshape(use.shapes[0])


@function(PRODUCT)
def grouped_matmul(use: Use) -> Tensor:
    """The matrix product of each expert's slots and its weight."""
    weight = use.operand(1)
    return use.x @ (weight if use.x.dim() == weight.dim() else weight[:, None])


@function(COMBINE)
def combine(use: Use) -> Tensor:
    """Tokens [..., hidden]: the sum of the slots of each token's experts, times their weights."""
    capacity, batch_dim = use.integer("capacity"), use.integer("batch_dim")
    experts, *group, slots, width = use.x.shape
    samples, groups = slots // capacity, math.prod(group)
    chosen, weights = (_by_group(use.operand(i), samples, groups, batch_dim) for i in (1, 2))
    rows = use.x.reshape(experts, groups, samples, capacity, width).permute(2, 1, 0, 3, 4)
    rows = rows.reshape(samples * groups, experts * capacity, width)
    rows = functional.pad(rows, (0, 0, 0, 1))
    index = _slots(chosen, experts, capacity)[..., None].expand(-1, -1, width)
    found = (rows.gather(1, index).reshape(*weights.shape, width) * weights[..., None]).sum(-2)
    lead = list(use.shapes[0][:-1])
    lead[batch_dim] //= samples
    return found.reshape(samples, *lead, width).movedim(0, batch_dim).reshape(use.shapes[0])
