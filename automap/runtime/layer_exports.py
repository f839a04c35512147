"""Layers of transformers' models that cannot be exported as they are, in a form that can.

Loops over the experts that got tokens depend on values, and a graph cannot express them. What stands here for them
computes the same for a router that keeps every token; the price assumes that experts get equal numbers of tokens
anyway. Most mixtures need nothing of this: transformers has a kernel for them that can be exported.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


def switch(layer: Any, hidden_states: Tensor) -> Tensor:
    """A layer of Switch Transformers: each token goes to its best expert, and none is dropped for want of capacity.

    Args:
        layer: `SwitchTransformersSparseMLP`.
        hidden_states: [batch, length, width].
    """
    return _each(layer, hidden_states, 1, is_normal=False)


def nllb(layer: Any, hidden_states: Tensor, padding_mask: Tensor | None = None) -> Tensor:
    """A layer of NLLB-MoE: each token goes to its two best experts, whose weights have the sum 1 (arXiv 2207.04672).

    Args:
        layer: `NllbMoeSparseMLP`.
        hidden_states: [batch, length, width].
        padding_mask: not read, since samples have their full length.
    """
    return _each(layer, hidden_states, 2, is_normal=True)


def longcat(layer: Any, hidden_states: Tensor) -> Tensor:
    """A layer of LongCat-Flash, of whose experts some return their tokens as they are (arXiv 2509.01322).

    A token goes to as many of the others as it does on average where all experts are chosen equally often, and the
    share of the rest of the weights is returned.

    Args:
        layer: `LongcatFlashMoE`.
        hidden_states: [batch, length, width].
    """
    import torch

    experts, router = layer.experts, layer.router
    count = experts.num_routed_experts
    k = max(1, round(router.top_k * count / experts.total_experts))
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores = torch.softmax(router.classifier(tokens), dim=-1)
    weights, chosen = torch.topk(scores[:, :count], k, dim=-1)
    ids, copies = chosen.reshape(-1), tokens.repeat_interleave(k, dim=0)
    gate, up = torch.bmm(experts.gate_up_proj[:count][ids], copies.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
    made = torch.bmm(experts.down_proj[ids], (experts.act_fn(gate) * up).unsqueeze(-1)).squeeze(-1)
    kept = tokens * scores[:, count:].sum(-1, keepdim=True)
    mixed = (made * weights.reshape(-1, 1)).view(len(tokens), k, -1).sum(dim=1) + kept
    found: Tensor = (mixed * router.routed_scaling_factor).view(hidden_states.shape)
    return found


def informer(
    layer: Any, hidden_states: Tensor, *others: Any, attention_mask: Tensor | None = None, **more: Any
) -> tuple[Tensor, None]:
    """The self-attention of Informer, in which few queries look at the keys (arXiv 2012.07436).

    Queries that look at one key more than at the others are found with some of the keys: random ones in a training, the
    first ones here. All other queries get the mean of the values, or of those before them.

    Args:
        layer: `InformerProbSparseAttention`.
        hidden_states: [batch, length, width].
        others, more: not read: keys and values of other sequences or of earlier tokens.
        attention_mask: [batch, 1, length, length] of the decoder. In an export, transformers gives the encoder's layers
            one that shows all keys, with the length of the first of them.
    """
    import torch

    length, depth = hidden_states.shape[1], layer.head_dim
    linears = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (linear(hidden_states).unflatten(2, (-1, depth)).transpose(1, 2) for linear in linears)
    near = layer.factor * math.ceil(math.log1p(length))
    found = (q * layer.scaling) @ k[:, :, : min(near * length, length)].transpose(2, 3)
    best = (found.max(dim=-1)[0] - found.sum(dim=-1) / length).topk(min(near, length))[1][..., None]
    rows = best.expand(*best.shape[:3], depth)
    scores = (torch.gather(q, 2, rows) * layer.scaling) @ k.transpose(2, 3)
    if layer.is_decoder and attention_mask is not None:
        shown = attention_mask.expand(*q.shape[:3], length)
        scores = scores + torch.gather(shown, 2, best.expand(*best.shape[:3], length))
    others_get = v.cumsum(dim=2) if layer.is_decoder else v.mean(dim=2, keepdim=True).expand_as(v)
    made = torch.scatter(others_get, 2, rows, torch.softmax(scores, dim=-1) @ v)
    return layer.out_proj(made.transpose(1, 2).flatten(2)), None


def _each(layer: Any, hidden_states: Tensor, k: int, *, is_normal: bool) -> Tensor:
    """What the experts of a layer, modules of their own, make of the tokens that a router gives them.

    Args:
        layer: has the experts, and a router with a linear classifier.
        hidden_states: [batch, length, width].
        k: experts of each token.
        is_normal: whether the weights of a token's experts have the sum 1.
    """
    import torch

    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    weights, chosen = torch.topk(torch.softmax(layer.router.classifier(tokens), dim=-1), k, dim=-1)
    if is_normal:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    mixed = torch.zeros_like(tokens)
    for number in range(layer.experts.num_experts):
        mine = torch.where(chosen == number, weights, 0.0).sum(dim=-1, keepdim=True)
        mixed = mixed + layer.experts[f"expert_{number}"](tokens) * mine
    return mixed.view(hidden_states.shape)


_LAYERS: Mapping[str, Callable[..., Any]] = {
    "SwitchTransformersSparseMLP": switch,
    "NllbMoeSparseMLP": nllb,
    "LongcatFlashMoE": longcat,
    "InformerProbSparseAttention": informer,
}
"""Class of transformers: what stands for its forward in an export."""


@contextlib.contextmanager
def layers_for_export(module: nn.Module) -> Iterator[None]:
    """A context in which layers of transformers' models run the functions here."""
    parts = [part for part in module.modules() if type(part).__module__.startswith("transformers.")]
    found = [part for part in parts if type(part).__name__ in _LAYERS and "forward" not in vars(part)]
    for part in found:
        part.forward = _LAYERS[type(part).__name__].__get__(part)
    try:
        yield
    finally:
        for part in found:
            del part.forward
