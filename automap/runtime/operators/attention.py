"""Attention and rotary embedding as single operators."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function


def _heads(x: Tensor, heads: int) -> Tensor:
    """[b, h, s, d] of either layout."""
    return x if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


@function("Attention")
def attention(use: Use) -> Tensor:
    """softmax(scale Q K^T, capped, masked) V; several query heads may share a head of keys and values."""
    q = _heads(use.x, use.integer("q_num_heads"))
    k, v = (_heads(use.operand(i), use.integer("kv_num_heads")) for i in (1, 2))
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scale = use.number("scale", 0.0) or 1.0 / sqrt(q.shape[-1])
    scores = masked(use, scale * (q @ k.transpose(-1, -2)))
    found = weights(scores) @ v
    return found if use.x.ndim == 4 else found.transpose(1, 2).reshape(use.shapes[0])


def masked(use: Use, scores: Tensor) -> Tensor:
    """Scores [b, h, s, t] with the cap, the mask operand and the causal mask."""
    cap = use.number("softcap", 0.0)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    mask = use.optional(3)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask
    left, right = use.integer("left_window_size", -1), use.integer("right_window_size", -1)
    if use.integer("is_causal"):
        right = 0
    ahead = (
        torch.arange(scores.shape[-1], device=use.device) - torch.arange(scores.shape[-2], device=use.device)[:, None]
    )
    if right >= 0:
        scores = scores.masked_fill(ahead > right, -torch.inf)
    return scores.masked_fill(ahead < -left, -torch.inf) if left >= 0 else scores


def weights(scores: Tensor) -> Tensor:
    """Softmax over keys; a query that may see none gets zeros."""
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)


@function("RotaryEmbedding")
def rotary(use: Use) -> Tensor:
    """Rotates pairs: halves of the head size, or neighbours when interleaved; only its first part if so told."""
    x = _heads(use.x, use.integer("num_heads"))
    cos, sin = use.operand(1), use.operand(2)
    positions = use.optional(3)
    if positions is not None:
        cos, sin = cos[positions], sin[positions]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    width = use.integer("rotary_embedding_dim") or x.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    if use.integer("interleaved"):
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    found = torch.cat([turned, rest], -1) if rest.shape[-1] else turned
    return found if use.x.ndim == 4 else found.transpose(1, 2).reshape(use.x.shape)
