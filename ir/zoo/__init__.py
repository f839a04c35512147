"""Known models by name, and their families in any size, built as Graphs in milliseconds without a file.

    build("gpt2-xl")   build("gpt2-xl:seq_len=512")   build("zoo:llama:layers=80,hidden=8192,heads=64,kv_heads=8")

A family is a dataclass: its fields are the keys of the free form and are overridden likewise for a named model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from ir.errors import one_of, refuse
from ir.graph import Graph
from ir.zoo.convolutions import EfficientNet, ResNet, Vgg
from ir.zoo.pyramids import AmoebaNet, UNet
from ir.zoo.transformers import T5, Bert, Gpt, Llama, Moe, Vit

PREFIX = "zoo:"

Model = Gpt | Llama | Moe | Bert | Vit | T5 | ResNet | EfficientNet | Vgg | UNet | AmoebaNet

FAMILIES: Mapping[str, type[Model]] = {
    "gpt": Gpt, "llama": Llama, "moe": Moe, "bert": Bert, "vit": Vit, "t5": T5, "resnet": ResNet, "vgg": Vgg,
    "efficientnet": EfficientNet, "unet": UNet, "amoebanet": AmoebaNet,
}  # fmt: skip

# Sources: the configurations published with the models (Hugging Face `config.json`, torchvision, timm; GPT-3, arXiv
# 2005.14165; Nemotron-4, arXiv 2402.16819). Routers of all mixtures are priced as a softmax, and no model predicts
# several tokens at once.
NAMED: Mapping[str, Model] = {
    "gpt2": Gpt(layers=12, hidden=768, heads=12, positions=1024),
    "gpt2-medium": Gpt(layers=24, hidden=1024, heads=16, positions=1024),
    "gpt2-large": Gpt(layers=36, hidden=1280, heads=20, positions=1024),
    "gpt2-xl": Gpt(layers=48, hidden=1600, heads=25, positions=1024),
    "gpt3-175b": Gpt(layers=96, hidden=12288, heads=96, seq_len=2048),
    "llama-7b": Llama(layers=32, hidden=4096, heads=32),
    "llama-13b": Llama(layers=40, hidden=5120, heads=40),
    "llama-70b": Llama(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
    "llama3-8b": Llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, seq_len=8192, vocab_size=128256),
    "llama3-70b": Llama(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, seq_len=8192, vocab_size=128256),
    "llama3-405b": Llama(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, seq_len=8192, vocab_size=128256),
    "nemotron4-15b": Llama(layers=32, hidden=6144, heads=48, kv_heads=8, ffn=24576, mlp_matrices=2, vocab_size=256000),
    "nemotron4-340b": Llama(
        layers=96, hidden=18432, heads=96, kv_heads=8, ffn=73728, mlp_matrices=2, vocab_size=256000,
    ),
    "mistral-7b": Llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336),
    "mixtral-8x7b": Moe(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, experts=8),
    "mixtral-8x22b": Moe(layers=56, hidden=6144, heads=48, kv_heads=8, ffn=16384, experts=8),
    "deepseek-v3": Moe(
        layers=61, hidden=7168, heads=128, head_dim=128, kv_rank=512, q_rank=1536, ffn=18432, dense_layers=3,
        experts=256, top_k=8, moe_ffn=2048, shared_ffn=2048, vocab_size=129280,
    ),
    "kimi-k2": Moe(
        layers=61, hidden=7168, heads=64, head_dim=128, kv_rank=512, q_rank=1536, ffn=18432, dense_layers=1,
        experts=384, top_k=8, moe_ffn=2048, shared_ffn=2048, vocab_size=163840,
    ),
    "grok-1": Moe(layers=64, hidden=6144, heads=48, kv_heads=8, ffn=32768, experts=8, seq_len=8192, vocab_size=131072),
    "qwen3-30b-a3b": Moe(
        layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, qk_norm=1, ffn=6144, experts=128, top_k=8,
        moe_ffn=768, vocab_size=151936,
    ),
    "qwen3-235b-a22b": Moe(
        layers=94, hidden=4096, heads=64, kv_heads=4, head_dim=128, qk_norm=1, ffn=12288, experts=128, top_k=8,
        moe_ffn=1536, vocab_size=151936,
    ),
    "bert-base": Bert(layers=12, hidden=768, heads=12, positions=512),
    "bert-large": Bert(layers=24, hidden=1024, heads=16, positions=512),
    "vit-b": Vit(layers=12, hidden=768, heads=12),
    "vit-l": Vit(layers=24, hidden=1024, heads=16),
    "vit-h": Vit(layers=32, hidden=1280, heads=16, patch_size=14),
    "t5-small": T5(layers=6, hidden=512, heads=8),
    "t5-base": T5(layers=12, hidden=768, heads=12),
    "t5-large": T5(layers=24, hidden=1024, heads=16),
    "t5-3b": T5(layers=24, hidden=1024, heads=32, head_size=128, ffn=16384),
    "t5-11b": T5(layers=24, hidden=1024, heads=128, head_size=128, ffn=65536),
    "resnet50": ResNet(blocks=(3, 4, 6, 3)),
    "resnet101": ResNet(blocks=(3, 4, 23, 3)),
    "resnet152": ResNet(blocks=(3, 8, 36, 3)),
    "resnext50": ResNet(blocks=(3, 4, 6, 3), groups=32, group_width=4),
    "resnext101": ResNet(blocks=(3, 4, 23, 3), groups=32, group_width=8),
    "se-resnext101": ResNet(blocks=(3, 4, 23, 3), groups=32, group_width=4, squeeze=16),
    "wide-resnet50": ResNet(blocks=(3, 4, 6, 3), group_width=128),
    "wide-resnet101": ResNet(blocks=(3, 4, 23, 3), group_width=128),
    "vgg16": Vgg(convolutions=(2, 2, 3, 3, 3)),
    "vgg19": Vgg(convolutions=(2, 2, 4, 4, 4)),
    "efficientnet-b0": EfficientNet(),
    "efficientnet-b1": EfficientNet(depth_percent=110, image_size=240),
    "efficientnet-b2": EfficientNet(width_percent=110, depth_percent=120, image_size=260),
    "efficientnet-b3": EfficientNet(width_percent=120, depth_percent=140, image_size=300),
    "efficientnet-b4": EfficientNet(width_percent=140, depth_percent=180, image_size=380),
    "efficientnet-b5": EfficientNet(width_percent=160, depth_percent=220, image_size=456),
    "efficientnet-b6": EfficientNet(width_percent=180, depth_percent=260, image_size=528),
    "efficientnet-b7": EfficientNet(width_percent=200, depth_percent=310, image_size=600),
    "unet-5-64": UNet(convolutions=5, width=64),
    "amoebanet-d": AmoebaNet(layers=18, width=256),
}  # fmt: skip

SPELLINGS: Mapping[str, str] = {
    "vit-base": "vit-b", "vit-large": "vit-l", "vit-huge": "vit-h", "resnet-50": "resnet50",
    "resnet-101": "resnet101", "resnet-152": "resnet152", "vgg-16": "vgg16", "vgg-19": "vgg19",
    "llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3.1-405b": "llama3-405b",
}  # fmt: skip
"""The same models as papers spell them; the names above are those of the published code."""

MAX_VALUE = 2**24
"""Largest value of any key (assumed): a larger one is a slip, or meant to exhaust the service."""
MAX_PARAMETERS = 10**15
"""Largest number of parameters (assumed): a thousand times that of the largest known models."""
MAX_LAYERS = 2000
"""Largest number of layers, blocks and convolutions together (assumed); each becomes operators."""
MAX_STAGES = 8
"""Largest number of stages of a convolutional network (assumed); each doubles the channels."""

_DIVIDED = (("hidden", "heads"), ("heads", "kv_heads"), ("image_size", "patch_size"))
_DEPTHS = ("layers", "blocks", "convolutions")


def names() -> tuple[str, ...]:
    """Names of all named models."""
    return tuple(NAMED)


def check_known(spec: str) -> None:
    """Refuses a name that no model has; sizes are not checked.

    Raises:
        ModelError: names all that there are.
    """
    name = spec.removeprefix(PREFIX).partition(":")[0]
    if SPELLINGS.get(name, name) not in NAMED and name not in FAMILIES:
        repair = f"{one_of(NAMED, name)} Or a family with its sizes: {', '.join(FAMILIES)}."
        raise refuse("unknown name", name, repair)


def build(spec: str, *, loss: str | None = None) -> Graph:
    """The graph of a model, with its loss.

    Args:
        spec: `[zoo:]NAME[:key=value,...]`, NAME being a named model or a family; lists are written `3-4-6-3`.
        loss: see `ir.loss.with_loss`.

    Raises:
        ModelError: unknown name or key, or values that do not fit each other.
    """
    check_known(spec)
    text = spec.removeprefix(PREFIX)
    name, _, rest = text.partition(":")
    model = _model(name, _pairs(rest))
    graph = model.build(loss)
    if graph.num_parameters > MAX_PARAMETERS:
        value = f"{graph.num_parameters:.1e}"
        raise refuse("too many parameters", value, f"Give sizes of at most {MAX_PARAMETERS:.0e} parameters together.")
    return replace(graph, name=text)


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for part in text.split(",") if text else ():
        key, is_pair, value = part.partition("=")
        if not is_pair or key in pairs:
            raise refuse("expected each key once, as key=value", part, "Write it as in gpt2:seq_len=512.")
        pairs[key.strip()] = value.strip()
    return pairs


def _model(name: str, pairs: Mapping[str, str]) -> Model:
    known = NAMED.get(SPELLINGS.get(name, name))
    family = type(known) if known is not None else FAMILIES[name]
    types = {f.name: "list" if str(f.type).startswith("tuple") else "int" for f in fields(family)}
    unknown = [key for key in pairs if key not in types]
    if unknown:
        raise refuse(f"{name} has no such key", unknown[0], f"Use {', '.join(types)}.")
    missing = [f.name for f in fields(family) if f.default is MISSING and f.name not in pairs]
    if known is None and missing:
        raise refuse("sizes are missing", name, f"Give {', '.join(missing)} as in {name}:{missing[0]}=...")
    values: dict[str, Any] = {key: _value(key, text, is_list=types[key] == "list") for key, text in pairs.items()}
    model = replace(known, **values) if known is not None else family(**values)
    _check(model)
    return model


def _value(key: str, text: str, *, is_list: bool) -> int | tuple[int, ...]:
    parts = text.split("-") if is_list else [text]
    if len(parts) > MAX_STAGES or not all(map(_is_size, parts)):
        form = f"a whole number between 1 and {MAX_VALUE}"
        if is_list:
            form = f"at most {MAX_STAGES} numbers joined by -, as in 3-4-6-3"
        raise refuse(f"{key} cannot be {text!r}", f"{key}={text}", f"Give {form}.")
    return tuple(map(int, parts)) if is_list else int(text)


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 8 and 0 < int(text) <= MAX_VALUE


def _check(model: Model) -> None:
    """Refuses sizes that do not fit each other, in the words of the model's keys."""
    values = {f.name: getattr(model, f.name) for f in fields(model)}
    for whole, part in _DIVIDED if not isinstance(model, T5) else ():
        if part == "heads" and values.get("head_dim"):
            continue
        if values.get(part) and values[whole] % values[part]:
            repair = f"Make {whole} a multiple of {part}."
            raise refuse(f"{part} does not divide {whole}", f"{whole}={values[whole]},{part}={values[part]}", repair)
    if isinstance(model, Llama) and model.rotated % 2:
        value = f"head_dim={model.head_dim}" if model.head_dim else f"hidden={model.hidden},heads={model.heads}"
        value = f"rope_dim={model.rope_dim}" if model.kv_rank else value
        raise refuse("rotary positions need heads of an even size", value, "Choose another number of heads.")
    if isinstance(model, Moe) and model.top_k > model.experts:
        value = f"experts={model.experts},top_k={model.top_k}"
        raise refuse("a token cannot have more experts than there are", value, "Make top_k at most experts.")
    if isinstance(model, Moe) and model.seq_len % model.groups:
        value = f"seq_len={model.seq_len},groups={model.groups}"
        raise refuse("groups does not divide seq_len", value, "Make seq_len a multiple of groups.")
    depth = sum(sum(v) if isinstance(v, tuple) else v for k, v in values.items() if k in _DEPTHS)
    if depth > MAX_LAYERS:
        raise refuse("too deep", str(depth), f"Give at most {MAX_LAYERS} layers.")
