"""Attention and rotary embedding as single operators."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function
from ir.factors import BROADCAST, PARTIAL


def heads_of(x: Tensor, heads: int) -> Tensor:
    """[batch, heads, sequence, head size] of such a tensor, or of [batch, sequence, heads * head size]."""
    return x if x.ndim == 4 else x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


@function("Attention")
def attention(use: Use) -> Tensor:
    """The product softmax(scale Q K^T, capped and masked) V; a query that may see no key gets zeros.

    Where ranks have parts of the queries or the keys, masks depend on the positions in the whole, and the row maximum,
    the row sum and the result are all-reduced over the axes that split the keys.
    """
    rows, dim = use.rows, -2 if use.x.ndim == 4 else 1
    q = heads_of(use.x, use.integer("q_num_heads"))
    k, v = (heads_of(use.operand(i), use.integer("kv_num_heads")) for i in (1, 2))
    first_query, first_key = rows.start(0, dim), rows.start(1, dim)
    scores, v = _scores(q, k, v, use.optional(3), use.attributes, first_query=first_query, first_key=first_key)
    if rows.is_split:
        top = rows.largest(scores.amax(-1, keepdim=True))
        powers = torch.exp(scores - torch.where(top == -torch.inf, torch.zeros_like(top), top))
        total = rows.total(powers.sum(-1, keepdim=True), PARTIAL)
        found = rows.total(powers / torch.where(total == 0, torch.ones_like(total), total) @ v, BROADCAST)
    else:
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        found = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0) @ v
    return found if use.x.ndim == 4 else found.transpose(1, 2).reshape(use.shapes[0])


def _scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, attributes: Mapping[str, Any], *,
    first_query: int, first_key: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The scores before the softmax, minus infinity where a key is hidden, and the values of each query head.

    Several query heads may share a head of keys and values.

    Args:
        q: [batch, heads, queries, head size].
        k: [batch, heads of keys, keys, head size].
        v: [batch, heads of keys, keys, head size].
        mask: the mask operand, of booleans or added to the scores.
        first_query: the position of the first query in the sequence.
        first_key: the position of the first key in the sequence.
    """
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scale = attributes.get("scale", 0.0) or 1.0 / sqrt(q.shape[-1])
    scores = scale * (q @ k.transpose(-1, -2))
    cap = attributes.get("softcap", 0.0)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    left = attributes.get("left_window_size", -1)
    right = 0 if attributes.get("is_causal") else attributes.get("right_window_size", -1)
    if left < 0 and right < 0:
        return scores, v
    keys = torch.arange(scores.shape[-1], device=scores.device) + first_key
    queries = torch.arange(scores.shape[-2], device=scores.device) + first_query
    ahead = keys - queries[:, None]
    if right >= 0:
        scores = scores.masked_fill(ahead > right, -torch.inf)
    return (scores.masked_fill(ahead < -left, -torch.inf) if left >= 0 else scores), v


@function("RotaryEmbedding")
def rotary(use: Use) -> Tensor:
    """Rotated pairs of elements: of the two halves of a head, or of neighbours if `interleaved`.

    With `rotary_embedding_dim`, only that number of first elements of a head is rotated.
    """
    x = heads_of(use.x, use.integer("num_heads"))
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
