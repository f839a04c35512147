"""Attention whose queries or keys are split over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from automap.runtime.operators.attention import heads_of, scores_of
from automap.runtime.sharded_operators.call import Call
from ir.factors import BROADCAST, PARTIAL


def attention(call: Call) -> list[Tensor]:
    """Attention of this rank's queries to this rank's keys, combined over the axes that split the keys.

    Masks depend on the positions in the whole. The row maximum, the row sum and the result are all-reduced.
    """
    attributes, axes = call.operator.attributes, call.operator.axes("attention")
    dim = -2 if call.x.ndim == 4 else 1
    q = heads_of(call.x, attributes.get("q_num_heads", 0))
    k, v = (heads_of(x, attributes.get("kv_num_heads", 0)) for x in call.operands[1:3])
    mask = call.operands[3] if len(call.operands) > 3 else None
    scores, v = scores_of(q, k, v, mask, attributes, first_query=call.start(0, dim), first_key=call.start(1, dim))
    top = call.largest(scores.amax(-1, keepdim=True), axes)
    powers = torch.exp(scores - torch.where(top == -torch.inf, torch.zeros_like(top), top))
    total = call.total(powers.sum(-1, keepdim=True), axes, PARTIAL)
    # A query that may see no key gets zeros.
    found = call.total(powers / torch.where(total == 0, torch.ones_like(total), total) @ v, axes, BROADCAST)
    return [found if call.x.ndim == 4 else found.transpose(1, 2).reshape(call.operator.shapes[0])]
