"""The keys that a trainer's attention kernel reads: all keys, those of a causal mask, or those of a window.

They do not depend on the plan: however heads, queries or keys are split over ranks, each rank reads the same share of
its keys. Units: shares of the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from automap.price.kernels.attention import ALL_KEYS, EARLIER_KEYS, Visible
from automap.problem import Problem
from ir.attention_windows import CAUSAL, EVERYTHING, Mask, Window, attention_masks
from ir.groups import fused_groups


def visible_keys(problem: Problem) -> Mapping[int, Visible]:
    """The keys that the kernel of each attention reads, by the index of its `Softmax` or `Attention` operator."""
    skips = problem.trainer.skips_windows
    return {index: _visible(mask, skips) for index, mask in attention_masks(problem.graph).items()}


def visible_shares(problem: Problem) -> Mapping[int, float]:
    """`Visible.share` by the index of every operator of an attention."""
    visible = visible_keys(problem)
    shares = {index: found.share for index, found in visible.items()}
    for group in fused_groups(problem.graph):
        share = next((visible[i].share for i in group.members if i in visible), None)
        if group.kind == "attention" and share is not None:
            shares.update(dict.fromkeys(group.members, share))
    return shares


def has_ring(problem: Problem) -> bool:
    """Whether the trainer sends keys and values of a split sequence round a ring. It does not if the kernel skips keys
    outside windows, since Transformer Engine does not support both together (context_parallel.py,
    attn_forward_func_with_cp)."""
    known = (ALL_KEYS, EARLIER_KEYS)
    return problem.trainer.ring_attention and all(found in known for found in visible_keys(problem).values())


def mean_of(found: list[Visible]) -> Visible:
    """The mean of several attentions."""
    return Visible(*(sum(numbers) / len(found) for numbers in zip(*found, strict=True)))


@functools.cache
def _visible(mask: Mask, skips_windows: bool) -> Visible:
    """The keys that a kernel reads under a mask. If it skips no windows, it reads all keys, or all that a causal mask
    allows."""
    window = mask.window
    if not skips_windows:
        window = CAUSAL if window.right == 0 else EVERYTHING
    if window in (EVERYTHING, CAUSAL):
        return ALL_KEYS if window == EVERYTHING else EARLIER_KEYS
    return _in_window(window, mask.queries, mask.keys)


def _in_window(window: Window, queries: int, keys: int) -> Visible:
    """The keys that queries at positions 0, 1, … see in a window, without those before the first key and behind the
    last."""
    rows = np.arange(queries)
    first = rows * 0 if window.left is None else rows - window.left
    last = rows * 0 + keys - 1 if window.right is None else rows + window.right
    edges = (first > 0) + 1.0 * (last < keys - 1)
    seen = np.minimum(last, keys - 1) - np.maximum(first, 0) + 1.0 - 0.5 * edges
    return Visible(float(seen.mean()) / keys, float(edges.mean()), float(seen.max()) / keys)
