"""Linear attention and selective scans, token by token."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function
from ir.operators.scans import RULES


@function("LinearAttention", "automap.LinearAttention")
def linear_attention(use: Use) -> list[Tensor]:
    """What the queries of each token read from the state, and the last state."""
    heads, kv_heads = use.integer("q_num_heads"), use.integer("kv_num_heads")

    def of_heads(x: Tensor, count: int) -> Tensor:
        """[samples, length, heads, elements] of a tensor that has the last two in one dim."""
        return x.reshape(*x.shape[:2], count, -1)

    # The state is kept in 32 bits at least: it adds up over the whole sequence.
    wide = torch.promote_types(use.x.dtype, torch.float32)
    q, k, v = (of_heads(use.operand(i).to(wide), n) for i, n in enumerate((heads, kv_heads, kv_heads)))
    update = RULES[use.text("update_rule", "gated_delta")]
    scale = use.attributes.get("scale", 0.0) or 1.0 / sqrt(q.shape[-1])
    # [samples, length, heads, d or 1, 1]
    keep = of_heads(use.operand(4).to(wide), kv_heads).exp()[..., None] if 4 in update else None
    rate = use.operand(5).to(wide)[..., None].expand(*k.shape[:3], 1) if 5 in update else None
    state, found = k.new_zeros(k.shape[0], kv_heads, k.shape[-1], v.shape[-1]), []
    for t in range(k.shape[1]):
        key, value = k[:, t, :, :, None], v[:, t, :, None]
        if keep is not None:
            state = keep[:, t] * state
        if rate is not None:
            value = rate[:, t, :, None] * (value - (key * state).sum(-2, keepdim=True))
        state = state + key * value
        read = state.repeat_interleave(heads // kv_heads, 1)
        found.append(scale * (q[:, t, :, :, None] * read).sum(-2))
    return [torch.stack(found, 1).flatten(2).to(use.x.dtype), state.to(use.x.dtype)]


@function("automap.SelectiveScan")
def selective_scan(use: Use) -> Tensor:
    """What every token reads from the states of its channels."""
    x, step, rates = use.x, use.operand(1), use.operand(2)
    keep = torch.exp(step[:, :, None] * rates[..., None])
    written = (step * x)[:, :, None] * use.operand(3)[:, None]
    state, found = x.new_zeros(*x.shape[:2], rates.shape[1]), []
    for t in range(x.shape[2]):
        state = keep[..., t] * state + written[..., t]
        found.append((state * use.operand(4)[:, None, :, t]).sum(-1))
    return torch.stack(found, -1)
