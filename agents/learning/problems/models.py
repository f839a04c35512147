"""The families of models that problems are drawn from, and how often each is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from agents.learning.problems.blocks import draw_blocks, draw_encoder_decoder
from agents.learning.problems.draw import Draw
from agents.learning.problems.networks import draw_convolutions, draw_pyramid, draw_resnet, draw_towers, draw_vgg
from agents.learning.problems.transformers import RandomModel, draw_zoo_transformer

TRANSFORMERS: Mapping[str, float] = {
    "gpt": 13, "llama": 16, "moe": 9, "t5": 6, "vit": 6, "decoder": 9, "encoder-decoder": 4,
    "bert": 4, "encoder": 3, "shared-experts": 6,
}  # fmt: skip
"""Families of transformers, with the weight of each."""
OTHERS: Mapping[str, float] = {
    "blocks": 5, "resnet": 4, "vgg": 3, "convolutions": 5, "towers": 4, "pyramid": 4,
}  # fmt: skip
"""Families of other models, with the weight of each."""
UNSEEN_FAMILIES = frozenset(("bert", "encoder", "shared-experts", "pyramid"))
"""Families that are held out of the training."""
_IMAGES: Mapping[str, Callable[[Draw], RandomModel]] = {
    "resnet": draw_resnet, "vgg": draw_vgg, "convolutions": draw_convolutions, "pyramid": draw_pyramid,
}  # fmt: skip


def draw_model(draw: Draw, family: str, parameters: float) -> RandomModel:
    """A model of a family with about the given number of parameters; models of images have sizes of their own."""
    if family in _IMAGES:
        return _IMAGES[family](draw)
    if family == "towers":
        return draw_towers(draw, parameters)
    if family == "encoder-decoder":
        return draw_encoder_decoder(draw, parameters)
    if family in ("decoder", "encoder", "blocks"):
        return draw_blocks(draw, family, parameters)
    return draw_zoo_transformer(draw, family, parameters)
