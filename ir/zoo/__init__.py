"""Models by name, and model families of any size, built as graphs in milliseconds without a file.

    build("gpt2-xl")   build("gpt2-xl:seq_len=512")   build("zoo:llama:layers=80,hidden=8192,heads=64,kv_heads=8")

A family is a dataclass, whose fields are the keys of a specification. Keys of a named model override its sizes.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from typing import Any

from ir.errors import refuse
from ir.graph import Graph
from ir.zoo.convolutions import EfficientNet, ResNet, Vgg
from ir.zoo.parallel import Parallel
from ir.zoo.pyramids import AmoebaNet, UNet
from ir.zoo.transformers import T5, Bert, Gpt, Llama, Moe, Vit

PREFIX = "zoo:"

Model = Gpt | Llama | Moe | Parallel | Bert | Vit | T5 | ResNet | EfficientNet | Vgg | UNet | AmoebaNet

FAMILIES: Mapping[str, type[Model]] = {
    "gpt": Gpt, "llama": Llama, "moe": Moe, "parallel": Parallel, "bert": Bert, "vit": Vit, "t5": T5,
    "resnet": ResNet, "vgg": Vgg, "efficientnet": EfficientNet, "unet": UNet, "amoebanet": AmoebaNet,
}  # fmt: skip

# Sources: the configurations published with the models (Hugging Face `config.json`, torchvision, timm; GPT-3, arXiv
# 2005.14165; Megatron-Turing NLG, arXiv 2201.11990; PaLM, arXiv 2204.02311; Nemotron-4, arXiv 2402.16819; ViT-g and
# ViT-G, arXiv 2106.04560; ViT-22B, arXiv 2302.05442). The routers of all mixtures of experts are modelled as a softmax,
# and multi-token prediction is left out.
NAMED: Mapping[str, Model] = {
    "gpt2": Gpt(layers=12, hidden=768, heads=12, positions=1024),
    "gpt2-medium": Gpt(layers=24, hidden=1024, heads=16, positions=1024),
    "gpt2-large": Gpt(layers=36, hidden=1280, heads=20, positions=1024),
    "gpt2-xl": Gpt(layers=48, hidden=1600, heads=25, positions=1024),
    "gpt3-2.7b": Gpt(layers=32, hidden=2560, heads=32, seq_len=2048),
    "gpt3-6.7b": Gpt(layers=32, hidden=4096, heads=32, seq_len=2048),
    "gpt3-175b": Gpt(layers=96, hidden=12288, heads=96, seq_len=2048),
    "mt-nlg-530b": Gpt(layers=105, hidden=20480, heads=128, seq_len=2048),
    "opt-1.3b": Gpt(layers=24, hidden=2048, heads=32, relu=1, seq_len=2048, positions=2050, vocab_size=50272),
    "opt-2.7b": Gpt(layers=32, hidden=2560, heads=32, relu=1, seq_len=2048, positions=2050, vocab_size=50272),
    "opt-6.7b": Gpt(layers=32, hidden=4096, heads=32, relu=1, seq_len=2048, positions=2050, vocab_size=50272),
    "opt-13b": Gpt(layers=40, hidden=5120, heads=40, relu=1, seq_len=2048, positions=2050, vocab_size=50272),
    "opt-30b": Gpt(layers=48, hidden=7168, heads=56, relu=1, seq_len=2048, positions=2050, vocab_size=50272),
    "opt-66b": Gpt(layers=64, hidden=9216, heads=72, relu=1, seq_len=2048, positions=2050, vocab_size=50272),
    "opt-175b": Gpt(layers=96, hidden=12288, heads=96, relu=1, seq_len=2048, positions=2050, vocab_size=50272),
    "bloom-7b": Gpt(layers=30, hidden=4096, heads=32, alibi=1, seq_len=2048, vocab_size=250880),
    "bloom-176b": Gpt(layers=70, hidden=14336, heads=112, alibi=1, seq_len=2048, vocab_size=250880),
    "pythia-6.9b": Parallel(layers=32, hidden=4096, heads=32, rope_dim=32, norms=2, biases=1, vocab_size=50432),
    "pythia-12b": Parallel(layers=36, hidden=5120, heads=40, rope_dim=32, norms=2, biases=1, vocab_size=50688),
    "gpt-neox-20b": Parallel(layers=44, hidden=6144, heads=64, rope_dim=24, norms=2, biases=1, vocab_size=50432),
    "falcon-7b": Parallel(layers=32, hidden=4544, heads=71, kv_heads=1, tied=1),
    "falcon-40b": Parallel(layers=60, hidden=8192, heads=128, kv_heads=8, norms=2, tied=1),
    "falcon-180b": Parallel(layers=80, hidden=14848, heads=232, kv_heads=8, norms=2, tied=1),
    "palm-540b": Parallel(
        layers=118, hidden=18432, heads=48, kv_heads=1, head_dim=256, ffn=73728, mlp_matrices=3, tied=1,
        vocab_size=256000,
    ),
    "llama-7b": Llama(layers=32, hidden=4096, heads=32),
    "llama-13b": Llama(layers=40, hidden=5120, heads=40),
    "llama-33b": Llama(layers=60, hidden=6656, heads=52, seq_len=2048),
    "llama-65b": Llama(layers=80, hidden=8192, heads=64, seq_len=2048),
    "llama-70b": Llama(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672),
    "codellama-34b": Llama(layers=48, hidden=8192, heads=64, kv_heads=8, ffn=22016, seq_len=16384),
    "llama3-8b": Llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, seq_len=8192, vocab_size=128256),
    "llama3-70b": Llama(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, seq_len=8192, vocab_size=128256),
    "llama3-405b": Llama(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, seq_len=8192, vocab_size=128256),
    "llama3.2-1b": Llama(
        layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, tied=1, seq_len=8192, vocab_size=128256,
    ),
    "llama3.2-3b": Llama(
        layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192, tied=1, seq_len=8192, vocab_size=128256,
    ),
    "tinyllama-1.1b": Llama(layers=22, hidden=2048, heads=32, kv_heads=4, ffn=5632, seq_len=2048),
    "yi-34b": Llama(layers=60, hidden=7168, heads=56, kv_heads=8, ffn=20480, vocab_size=64000),
    "phi-3-mini": Llama(layers=32, hidden=3072, heads=32, ffn=8192, vocab_size=32064),
    "phi-4": Llama(layers=40, hidden=5120, heads=40, kv_heads=10, ffn=17920, vocab_size=100352),
    "nemotron4-15b": Llama(layers=32, hidden=6144, heads=48, kv_heads=8, ffn=24576, mlp_matrices=2, vocab_size=256000),
    "nemotron4-340b": Llama(
        layers=96, hidden=18432, heads=96, kv_heads=8, ffn=73728, mlp_matrices=2, vocab_size=256000,
    ),
    "mistral-7b": Llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336),
    "mistral-nemo-12b": Llama(
        layers=40, hidden=5120, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab_size=131072,
    ),
    "mistral-small-24b": Llama(
        layers=40, hidden=5120, heads=32, kv_heads=8, head_dim=128, ffn=32768, vocab_size=131072,
    ),
    "mistral-large-123b": Llama(layers=88, hidden=12288, heads=96, kv_heads=8, ffn=28672, vocab_size=32768),
    "qwen2-7b": Llama(layers=28, hidden=3584, heads=28, kv_heads=4, qkv_bias=1, ffn=18944, vocab_size=152064),
    "qwen2-72b": Llama(layers=80, hidden=8192, heads=64, kv_heads=8, qkv_bias=1, ffn=29568, vocab_size=152064),
    "qwen2.5-0.5b": Llama(
        layers=24, hidden=896, heads=14, kv_heads=2, qkv_bias=1, ffn=4864, tied=1, vocab_size=151936,
    ),
    "qwen2.5-1.5b": Llama(
        layers=28, hidden=1536, heads=12, kv_heads=2, qkv_bias=1, ffn=8960, tied=1, vocab_size=151936,
    ),
    "qwen2.5-3b": Llama(
        layers=36, hidden=2048, heads=16, kv_heads=2, qkv_bias=1, ffn=11008, tied=1, vocab_size=151936,
    ),
    "qwen2.5-14b": Llama(layers=48, hidden=5120, heads=40, kv_heads=8, qkv_bias=1, ffn=13824, vocab_size=152064),
    "qwen2.5-32b": Llama(layers=64, hidden=5120, heads=40, kv_heads=8, qkv_bias=1, ffn=27648, vocab_size=152064),
    "qwen3-8b": Llama(
        layers=36, hidden=4096, heads=32, kv_heads=8, head_dim=128, qk_norm=1, ffn=12288, vocab_size=151936,
    ),
    "qwen3-14b": Llama(
        layers=40, hidden=5120, heads=40, kv_heads=8, head_dim=128, qk_norm=1, ffn=17408, vocab_size=151936,
    ),
    "qwen3-32b": Llama(
        layers=64, hidden=5120, heads=64, kv_heads=8, head_dim=128, qk_norm=1, ffn=25600, vocab_size=151936,
    ),
    "deepseek-67b": Llama(layers=95, hidden=8192, heads=64, kv_heads=8, ffn=22016, vocab_size=102400),
    "dbrx-132b": Moe(
        layers=40, hidden=6144, heads=48, kv_heads=8, ffn=10752, experts=16, top_k=4, vocab_size=100352,
    ),
    "mixtral-8x7b": Moe(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, experts=8),
    "mixtral-8x22b": Moe(layers=56, hidden=6144, heads=48, kv_heads=8, ffn=16384, experts=8),
    "deepseek-v2-lite": Moe(
        layers=27, hidden=2048, heads=16, head_dim=128, kv_rank=512, ffn=10944, dense_layers=1, experts=64, top_k=6,
        moe_ffn=1408, shared_ffn=2816, vocab_size=102400,
    ),
    "deepseek-v2": Moe(
        layers=60, hidden=5120, heads=128, head_dim=128, kv_rank=512, q_rank=1536, ffn=12288, dense_layers=1,
        experts=160, top_k=6, moe_ffn=1536, shared_ffn=3072, vocab_size=102400,
    ),
    "deepseek-v3": Moe(
        layers=61, hidden=7168, heads=128, head_dim=128, kv_rank=512, q_rank=1536, ffn=18432, dense_layers=3,
        experts=256, top_k=8, moe_ffn=2048, shared_ffn=2048, vocab_size=129280,
    ),
    "kimi-k2": Moe(
        layers=61, hidden=7168, heads=64, head_dim=128, kv_rank=512, q_rank=1536, ffn=18432, dense_layers=1,
        experts=384, top_k=8, moe_ffn=2048, shared_ffn=2048, vocab_size=163840,
    ),
    "gpt-oss-20b": Moe(
        layers=24, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, experts=32, top_k=4, clipped=1,
        vocab_size=201088,
    ),
    "gpt-oss-120b": Moe(
        layers=36, hidden=2880, heads=64, kv_heads=8, head_dim=64, ffn=2880, experts=128, top_k=4, clipped=1,
        vocab_size=201088,
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
    "qwen3-coder-480b-a35b": Moe(
        layers=62, hidden=6144, heads=96, kv_heads=8, head_dim=128, qk_norm=1, ffn=8192, experts=160, top_k=8,
        moe_ffn=2560, vocab_size=151936,
    ),
    "bert-base": Bert(layers=12, hidden=768, heads=12, positions=512),
    "bert-large": Bert(layers=24, hidden=1024, heads=16, positions=512),
    "vit-b": Vit(layers=12, hidden=768, heads=12),
    "vit-l": Vit(layers=24, hidden=1024, heads=16),
    "vit-h": Vit(layers=32, hidden=1280, heads=16, patch_size=14),
    "vit-giant": Vit(layers=40, hidden=1408, heads=16, ffn=6144, patch_size=14),
    "vit-gigantic": Vit(layers=48, hidden=1664, heads=16, ffn=8192, patch_size=14),
    "vit-22b": Vit(layers=48, hidden=6144, heads=48, ffn=24576, patch_size=14, parallel=1),
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
    "vit-base": "vit-b", "vit-large": "vit-l", "vit-huge": "vit-h", "vit-g": "vit-giant", "vit-bigg": "vit-gigantic",
    "resnet-50": "resnet50", "resnet-101": "resnet101", "resnet-152": "resnet152", "vgg-16": "vgg16",
    "vgg-19": "vgg19", "llama-30b": "llama-33b", "llama2-7b": "llama-7b", "llama2-13b": "llama-13b",
    "llama2-70b": "llama-70b", "llama-2-7b": "llama-7b", "llama-2-13b": "llama-13b", "llama-2-70b": "llama-70b",
    "llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3.1-405b": "llama3-405b",
    "llama3.3-70b": "llama3-70b", "llama-3-8b": "llama3-8b", "llama-3-70b": "llama3-70b", "llama-3-405b": "llama3-405b",
    "llama-3.1-8b": "llama3-8b", "llama-3.1-70b": "llama3-70b", "llama-3.1-405b": "llama3-405b",
    "llama-3.2-1b": "llama3.2-1b", "llama-3.2-3b": "llama3.2-3b", "llama-3.3-70b": "llama3-70b",
    "gpt-3": "gpt3-175b", "gpt-3-175b": "gpt3-175b", "megatron-turing-530b": "mt-nlg-530b", "neox-20b": "gpt-neox-20b",
    "bloom": "bloom-176b", "bloom-7b1": "bloom-7b", "qwen2.5-7b": "qwen2-7b", "qwen2.5-72b": "qwen2-72b",
    "mistral-large": "mistral-large-123b", "mistral-nemo": "mistral-nemo-12b", "dbrx": "dbrx-132b",
    "deepseek-r1": "deepseek-v3",
}  # fmt: skip
"""Spelling of a model in papers -> its name in `NAMED`, which is that of the published code."""

NEAR, ALIKE = 4, 0.5
"""Largest number of similar names suggested for an unknown name, and their least similarity (`difflib`; assumed)."""
MAX_VALUE = 2**24
"""Largest value of any key (assumed): a larger one is a typing error, or an attempt to exhaust the service."""
MAX_PARAMETERS = 10**15
"""Largest number of parameters (assumed): a thousand times that of the largest known models."""
MAX_LAYERS = 2000
"""Largest sum of the numbers of layers, blocks and convolutions (assumed), which bounds the number of operators."""
MAX_STAGES = 8
"""Largest number of stages of a convolutional network (assumed); each doubles the channels."""

_DIVIDED = (("hidden", "heads"), ("heads", "kv_heads"), ("image_size", "patch_size"))
_DEPTHS = ("layers", "blocks", "convolutions")


def names() -> tuple[str, ...]:
    """Names of all named models."""
    return tuple(NAMED)


def check_known(spec: str) -> None:
    """Checks that the name of a specification is known; its sizes are not checked.

    Raises:
        ModelError: the name is unknown; the message suggests similar names.
    """
    name = spec.removeprefix(PREFIX).partition(":")[0]
    if SPELLINGS.get(name, name) not in NAMED and name not in FAMILIES:
        near = difflib.get_close_matches(name.lower(), [*NAMED, *SPELLINGS], n=NEAR, cutoff=ALIKE)
        # Of several spellings of one model, the first one is enough.
        near = list({SPELLINGS.get(one, one): one for one in reversed(near)}.values())[::-1]
        meant = f"Did you mean {near[0]}? " if near else ""
        others = f", such as {', '.join(near[1:])}" if near[1:] else ""
        kinds = f"a family with its sizes: {', '.join(FAMILIES)}"
        raise refuse("unknown name", name, f"{meant}Use a name of docs/models.md{others}, or {kinds}.")


def build(spec: str, *, loss: str | None = None) -> Graph:
    """The graph of a model, with its loss.

    Args:
        spec: `[zoo:]NAME[:key=value,...]`, NAME being a named model or a family; lists are written `3-4-6-3`.
        loss: see `ir.loss.with_loss`.

    Raises:
        ModelError: the name or a key is unknown, or values are invalid or inconsistent.
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
    """Checks that the sizes of a model are consistent.

    Raises:
        ModelError: they are not; the message names the keys.
    """
    values = {f.name: getattr(model, f.name) for f in fields(model)}
    for whole, part in _DIVIDED if not isinstance(model, T5) else ():
        if part == "heads" and values.get("head_dim"):
            continue
        if values.get(part) and values[whole] % values[part]:
            repair = f"Make {whole} a multiple of {part}."
            raise refuse(f"{part} does not divide {whole}", f"{whole}={values[whole]},{part}={values[part]}", repair)
    if isinstance(model, Parallel) and model.rope_dim > model.size:
        value = f"hidden={model.hidden},heads={model.heads},rope_dim={model.rope_dim}"
        raise refuse("rope_dim is larger than a head", value, f"Make rope_dim at most {model.size}.")
    if isinstance(model, Llama | Parallel) and model.rotated % 2:
        value = f"head_dim={model.head_dim}" if model.head_dim else f"hidden={model.hidden},heads={model.heads}"
        is_stated = model.rope_dim if isinstance(model, Parallel) else model.kv_rank
        value = f"rope_dim={model.rope_dim}" if is_stated else value
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
