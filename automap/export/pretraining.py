"""Which of Megatron-LM's pretraining scripts trains a model: that of decoders, of encoders, or of one with both.

They are told apart by their attention. In a decoder, no token sees later tokens. In a decoder that follows an encoder,
each layer has two attentions. The masks of the latter need not be known: in T5 each mask is added to a bias of
parameters, so that they cannot be computed. Scripts: pretrain_gpt.py, pretrain_bert.py and pretrain_t5.py in the root
of Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.attention_windows import Mask, attention_masks
from ir.blocks import Blocks
from ir.graph import Graph
from ir.layers import layer_spans


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """An encoder and the decoder behind it."""

    encoder: int
    """Layers of the encoder."""
    decoder: int
    """Layers of the decoder."""
    encoder_length: int
    """Tokens of a sample in the encoder."""
    decoder_length: int
    """Tokens of a sample in the decoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretraining:
    """The script that trains a model, and what it must be told about the model."""

    script: str | None
    """The file; None where Megatron-LM has none for such a model, or the graph does not tell."""
    stacks: Stacks | None = None
    """The two stacks that pretrain_t5.py asks for; None for the other scripts."""


def pretraining_of(graph: Graph, blocks: Blocks) -> Pretraining:
    """The script that trains a model.

    Args:
        blocks: the units of the graph.
    """
    found = attention_masks(graph)
    layers = [
        [mask for index, mask in found.items() if start <= index < stop]
        for start, stop in ((blocks.units[s[0]].start, blocks.units[s[-1]].stop) for s in layer_spans(graph, blocks))
    ]
    layers = [masks for masks in layers if masks]
    every = [mask for masks in layers for mask in masks]
    if len(every) < len(found):
        return Pretraining(script=None)  # Its layers are not those that attend.
    if every and all(_is_causal(mask) for mask in every):
        return Pretraining(script="pretrain_gpt.py")
    if not every or not _has_tokens(graph) or _has_given_masks(graph, every):
        return Pretraining(script=None)
    counts = [len(masks) for masks in layers]
    encoder = counts.index(2) if 2 in counts else len(counts)
    sees_all = not any(_is_causal(mask) for masks in layers[:encoder] for mask in masks)
    if not sees_all or encoder == 0 or counts != [1] * encoder + [2] * (len(counts) - encoder):
        return Pretraining(script=None)
    if encoder == len(counts):
        return Pretraining(script="pretrain_bert.py")
    lengths = layers[0][0].queries, layers[encoder][0].queries
    stacks = Stacks(
        encoder=encoder, decoder=len(layers) - encoder, encoder_length=lengths[0], decoder_length=lengths[1]
    )
    return Pretraining(script="pretrain_t5.py", stacks=stacks)


def _is_causal(mask: Mask) -> bool:
    return mask.window.right == 0


def _has_tokens(graph: Graph) -> bool:
    """Whether samples are tokens of a vocabulary, and no images or sounds."""
    inputs = [tensor for tensor in graph.tensors.values() if tensor.role == "input"]
    return not any(tensor.is_float and len(tensor.shape) > 2 for tensor in inputs)


def _has_given_masks(graph: Graph, masks: list[Mask]) -> bool:
    """Whether an input has a number for each pair of a query and a key: what that hides is known with data alone."""
    pairs = {(mask.queries, mask.keys) for mask in masks}
    inputs = (tensor for tensor in graph.tensors.values() if tensor.role == "input" and len(tensor.shape) > 2)
    return any(tensor.shape[-2:] in pairs for tensor in inputs)
