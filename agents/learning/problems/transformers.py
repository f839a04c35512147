"""Models of the zoo's families with random sizes, unlike every model that the zoo names.

Sizes follow from a number of parameters, so that a model can be made to fill a share of a cluster's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from agents.learning.problems.draw import Draw, divisors_up_to
from ir import zoo
from ir.graph import Graph

HEAD_SIZES = (32, 64, 64, 80, 96, 128, 128, 128, 256)
"""Sizes of an attention head, those of published models more than once."""
# Sizes of published models (see `ir.zoo.NAMED`, and the configurations of Qwen, Gemma, DeepSeek), and smaller ones.
VOCABULARIES = (1000, 8192, 30522, 32000, 32000, 32128, 50257, 50304, 51200, 65024, 100352, 128256, 151936, 256000)
SEQUENCES = (64, 128, 256, 512, 512, 1000, 1024, 1024, 1536, 2048, 2048, 4096, 4096, 8192, 16384, 32768)
DEEP = 40
"""Largest number of blocks of a model that is trained on; deeper ones are held out."""
DEEPEST = 120
"""Largest number of blocks of any model; published models have up to 126 (Llama 3.1 405B)."""
ASPECT = (24.0, 256.0)
"""Least and largest width of a block over the number of blocks (assumed): the zoo's models have 21 to 128."""
LARGEST_WIDTH = 20480
"""Largest width of a block (assumed): MT-NLG 530B has this one."""


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A model that has been drawn and not yet been built."""

    family: str
    """Name of the family, by which models are held out."""
    text: str
    """All its sizes, in one line."""
    num_blocks: int
    """Number of its blocks: layers of a transformer (of both stacks), blocks or convolutions of a network of images."""
    build: Callable[[], Graph]
    """Builds the graph with its loss, as an imported model goes through it."""
    tokens: int
    """Number of tokens of a sample; 0 where a sample is an image or a row of features."""


def spec_model(family: str, name: str, sizes: Mapping[str, int | tuple[int, ...]], num_blocks: int) -> RandomModel:
    """A model of the zoo from its family `name` and its keys."""
    values = {key: "-".join(map(str, value)) if isinstance(value, tuple) else value for key, value in sizes.items()}
    spec = f"{name}:" + ",".join(f"{key}={value}" for key, value in values.items())
    tokens = int(str(sizes.get("seq_len", 0)))
    return RandomModel(family=family, text=spec, num_blocks=num_blocks, build=lambda: zoo.build(spec), tokens=tokens)


def is_named(name: str, sizes: Mapping[str, int | tuple[int, ...]]) -> bool:
    """Whether the zoo names a model of this family, depth and width, whatever else differs."""
    keys = ("layers", "hidden") if "layers" in sizes else ("blocks",) if "blocks" in sizes else ("convolutions",)
    alike = [model for model in zoo.NAMED.values() if type(model) is zoo.FAMILIES[name]]
    known = {f.name for f in fields(zoo.FAMILIES[name])}
    return any(all(getattr(model, key) == sizes[key] for key in keys if key in known) for model in alike)


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Depth and width of a stack of blocks."""

    layers: int
    """Number of blocks."""
    hidden: int
    """Width of a block, a multiple of `heads`."""
    heads: int
    """Number of attention heads."""


def draw_stack(draw: Draw, parameters: float, per_layer: float = 12.0) -> Stack:
    """A stack with about the given number of parameters.

    Args:
        draw: random choices.
        parameters: wanted number of parameters.
        per_layer: parameters of a layer, in squares of its width.
    """
    aspect = draw.log_between(*ASPECT)
    layers = max(round((parameters / per_layer / aspect**2) ** (1 / 3)), draw.integer(1, 4))
    # Most deep models become wide instead: those deeper than DEEP are held out.
    low, most = draw.weighted({(12, DEEP): 3, (DEEP + 1, DEEPEST): 1})
    if layers > DEEP:
        layers = draw.integer(low, most)
    size = draw.one(HEAD_SIZES)
    heads = max(1, round(min(math.sqrt(parameters / per_layer / layers), LARGEST_WIDTH) / size))
    if draw.chance(0.7) and heads > 2:
        # Numbers of heads that divide among many ranks are the rule, others the exception.
        step = 2 ** min(draw.integer(1, 4), int(math.log2(heads)))
        heads = round(heads / step) * step
    return Stack(layers=layers, hidden=heads * size, heads=heads)


def draw_zoo_transformer(draw: Draw, family: str, parameters: float) -> RandomModel:
    """A transformer of the zoo with about the given number of parameters, unlike every named model.

    Args:
        draw: random choices.
        family: a family of the zoo, or `shared-experts`, mixtures of experts with a shared dense branch.
        parameters: wanted number of parameters.
    """
    name = "moe" if family == "shared-experts" else family
    for _ in range(100):
        sizes = _SIZES[name](draw, parameters)
        if family == "shared-experts":
            sizes["shared_ffn"] = draw.log_integer(256, 4 * sizes["hidden"], 128)
            sizes["dense_layers"] = min(draw.integer(0, 3), max(1, sizes["layers"] - 1))
        sizes = {key: value for key, value in sizes.items() if value}
        if not is_named(name, sizes):
            break
    layers = sizes["layers"]
    return spec_model(family, name, sizes, 2 * layers if name == "t5" else layers)


def _gpt(draw: Draw, parameters: float) -> dict[str, int]:
    stack = draw_stack(draw, parameters)
    ffn = draw.one((0, 0, 0, 2, 3, 6)) * stack.hidden
    return {
        "layers": stack.layers,
        "hidden": stack.hidden,
        "heads": stack.heads,
        "ffn": ffn,
        "seq_len": draw.one(SEQUENCES),
        "vocab_size": draw.one(VOCABULARIES),
        "dropout_percent": draw.one((0, 0, 0, 10)),
    }


def _bert(draw: Draw, parameters: float) -> dict[str, int]:
    return {**_gpt(draw, parameters), "seq_len": draw.one((64, 128, 128, 256, 384, 512, 512, 1024, 2048))}


def _llama(draw: Draw, parameters: float) -> dict[str, int]:
    stack = draw_stack(draw, parameters)
    shared = [d for d in divisors_up_to(stack.heads, 64) if d >= 2] or [1]
    return {
        "layers": stack.layers,
        "hidden": stack.hidden,
        "heads": stack.heads,
        "kv_heads": draw.one(shared) if draw.chance(0.6) else 0,
        "ffn": draw.log_integer(2 * stack.hidden, 6 * stack.hidden, 128) if draw.chance(0.5) else 0,
        "mlp_matrices": 2 if draw.chance(0.1) else 3,
        "seq_len": draw.one(SEQUENCES),
        "vocab_size": draw.one(VOCABULARIES),
    }


def _moe(draw: Draw, parameters: float) -> dict[str, int]:
    experts = draw.one((2, 4, 6, 8, 8, 16, 16, 32, 64, 128))
    # Narrow experts come in large numbers.
    ratio = draw.log_between(1.0, 4.0) / max(1.0, experts / 16)
    stack = draw_stack(draw, parameters, 4.0 + 3.0 * experts * ratio)
    sizes = {**_llama(draw, parameters), "layers": stack.layers, "hidden": stack.hidden, "heads": stack.heads}
    shared = [d for d in divisors_up_to(stack.heads, 64) if d >= 2] or [1]
    sizes.pop("mlp_matrices")
    seq_len = sizes["seq_len"]
    return {
        **sizes,
        "kv_heads": draw.one(shared),
        "ffn": max(64, round(ratio * stack.hidden / 64) * 64),
        "experts": experts,
        "top_k": min(draw.one((1, 2, 2, 2, 4, 8)), experts),
        "groups": draw.one((1, 1, 1, 2, 4)) if seq_len % 4 == 0 else 1,
    }


def _vit(draw: Draw, parameters: float) -> dict[str, int]:
    stack = draw_stack(draw, parameters)
    patch = draw.one((8, 14, 16, 16, 32))
    return {
        "layers": stack.layers,
        "hidden": stack.hidden,
        "heads": stack.heads,
        "ffn": draw.one((0, 0, 0, 2, 3)) * stack.hidden,
        "image_size": patch * draw.integer(4, 28),
        "patch_size": patch,
        "num_classes": draw.one((10, 100, 1000, 1000, 21841)),
    }


def _t5(draw: Draw, parameters: float) -> dict[str, int]:
    # An encoder and a decoder layer have 4, 8 and twice 8 squares of the width.
    stack = draw_stack(draw, parameters, 28.0)
    size = draw.one((32, 64, 64, 128))
    return {
        "layers": draw.integer(DEEP // 4, DEEP // 2) if stack.layers > DEEP // 2 and draw.chance(0.8) else stack.layers,
        "hidden": stack.hidden,
        "heads": draw.one((4, 8, 12, 16, 24, 32)) if draw.chance(0.3) else max(1, stack.hidden // size),
        "head_size": size,
        "ffn": draw.one((0, 0, 2, 3, 8)) * stack.hidden,
        "seq_len": draw.one((64, 128, 512, 512, 1024, 2048)),
        "target_len": draw.one((0, 0, 64, 128, 512)),
        "vocab_size": draw.one(VOCABULARIES),
    }


_SIZES: Mapping[str, Callable[[Draw, float], dict[str, int]]] = {
    "gpt": _gpt, "llama": _llama, "moe": _moe, "bert": _bert, "vit": _vit, "t5": _t5,
}  # fmt: skip
