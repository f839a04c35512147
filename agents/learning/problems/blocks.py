"""Stacks of random blocks that no published model has: branches in sequence or side by side, with or without attention.

Every block of a stack is equal, as in real models, so a deep stack is as quickly built as a shallow one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agents.learning.problems.draw import Draw, divisors_up_to
from agents.learning.problems.transformers import SEQUENCES, VOCABULARIES, RandomModel, Stack, draw_stack
from ir.graph import Graph
from ir.zoo.net import Net
from ir.zoo.stretch import stretch

BUILT = 2
"""Number of blocks of a stack that are built operator by operator; the others are copies of the last of them."""
LONGEST = 4096
"""Longest sequence of a random block: a token MLP has a parameter for each pair of positions."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of a stack: its branches, one after the other or side by side."""

    branches: tuple[str, ...]
    """Kinds of its branches, keys of `_BRANCHES`."""
    is_parallel: bool
    """Whether all branches read the block's input and are added; otherwise each reads what the one before gives."""
    norm: str
    """Kind of its norms: `layer`, `rms`, or `none`."""
    is_behind: bool
    """Whether norms follow the residuals (post-norm) instead of preceding the branches."""
    heads: int
    """Number of attention heads."""
    kv_heads: int
    """Number of heads of keys and values, which divides the number of heads."""
    ffn: int
    """Width of its MLPs, and of each expert."""
    experts: int
    """Number of experts of its mixtures."""
    top_k: int
    """Number of experts that each token sees."""
    act: str
    """Kind of the activation of its MLPs."""
    hides_later: bool
    """Whether attention hides later positions."""
    mask: str = ""
    """Name of the mask that hides them; empty before it is built, and where nothing is hidden."""

    def masked(self, net: Net, tokens: int) -> Block:
        """The block with its mask for the tokens of a sample, which all blocks of a stack share."""
        return replace(self, mask=net.causal_mask(tokens)) if self.hides_later else self


def _normed(net: Net, x: str, scope: str, kind: str) -> str:
    if kind == "none":
        return x
    return net.layer_norm(x, scope) if kind == "layer" else net.rms_norm(x, scope)


def _self_attention(net: Net, x: str, scope: str, block: Block) -> str:
    return attend(net, x, x, scope, block, block.mask)


def attend(net: Net, x: str, source: str, scope: str, block: Block, mask: str = "") -> str:
    """Attention from `x` to `source`, which is `x` itself or the memory of an encoder."""
    width = net.shape(x)[-1]
    size = width // block.heads
    narrow = block.kv_heads * size
    q = net.heads(net.linear(x, f"{scope}.q", width, bias=False), scope, block.heads)
    k, v = (net.linear(source, f"{scope}.{name}", narrow, bias=False) for name in "kv")
    k, v = (net.heads(t, scope, block.kv_heads) for t in (k, v))
    k, v = (net.repeated(t, scope, block.heads) for t in (k, v))
    k = net.op("Transpose", [k], scope, perm=(0, 1, 3, 2))
    return net.linear(net.attend(q, k, v, scope, masks=[mask] if mask else []), f"{scope}.out", width, bias=False)


def _mlp(net: Net, x: str, scope: str, block: Block) -> str:
    y = net.op(block.act, [net.linear(x, f"{scope}.up", block.ffn)], scope)
    return net.linear(y, f"{scope}.down", net.shape(x)[-1])


def _gated_mlp(net: Net, x: str, scope: str, block: Block) -> str:
    gate, up = (net.linear(x, f"{scope}.{name}", block.ffn, bias=False) for name in ("gate", "up"))
    return net.linear(net.silu_gate(gate, up, scope), f"{scope}.down", net.shape(x)[-1], bias=False)


def _gate(net: Net, x: str, scope: str, block: Block) -> str:
    """A linear layer that is gated by another one, through a sigmoid."""
    width = net.shape(x)[-1]
    opened = net.op("Sigmoid", [net.linear(x, f"{scope}.gate", width)], scope)
    return net.op("Mul", [net.linear(x, f"{scope}.value", width), opened], scope)


def _token_mlp(net: Net, x: str, scope: str, block: Block) -> str:
    """An MLP over the positions of each channel, as in the MLP-Mixer (arXiv 2105.01601)."""
    length = net.shape(x)[1]
    x = net.op("Transpose", [x], scope, perm=(0, 2, 1))
    x = net.op(block.act, [net.linear(x, f"{scope}.up", 2 * length)], scope)
    return net.op("Transpose", [net.linear(x, f"{scope}.down", length)], scope, perm=(0, 2, 1))


def _low_rank(net: Net, x: str, scope: str, block: Block) -> str:
    """Two linear layers with a narrow tensor between them."""
    width = net.shape(x)[-1]
    return net.linear(net.linear(x, f"{scope}.down", max(8, width // 4), bias=False), f"{scope}.up", width, bias=False)


def _experts(net: Net, x: str, scope: str, block: Block) -> str:
    scores = net.op("Softmax", [net.linear(x, f"{scope}.gate", block.experts, bias=False)], scope, axis=-1)
    weights, chosen = net.ops("TopK", [scores], scope, 2, k=block.top_k, axis=-1, largest=1, sorted=1)
    return net.experts(x, f"{scope}.experts", (chosen, weights), num_experts=block.experts, ffn=block.ffn)


_BRANCHES: Mapping[str, Callable[[Net, str, str, Block], str]] = {
    "attention": _self_attention, "mlp": _mlp, "gated": _gated_mlp, "gate": _gate, "tokens": _token_mlp,
    "narrow": _low_rank, "experts": _experts,
}  # fmt: skip
WEIGHTS = {"attention": 4.0, "mlp": 8.0, "gated": 12.0, "gate": 2.0, "tokens": 1.0, "narrow": 0.5, "experts": 12.0}
"""Parameters of each kind of branch, in squares of the block's width, where an MLP is four times as wide;
for a mixture, those of one expert."""


def build_block(net: Net, x: str, scope: str, block: Block) -> str:
    """Adds a block and returns its result, which has the shape of `x`."""
    results = []
    for number, kind in enumerate(block.branches):
        inner = f"{scope}.{kind}{number}"
        y = x if block.is_behind else _normed(net, x, f"{inner}.norm", block.norm)
        y = _BRANCHES[kind](net, y, inner, block)
        if block.is_parallel:
            results.append(y)
            continue
        x = net.add(x, y, scope)
        if block.is_behind:
            x = _normed(net, x, f"{inner}.norm", block.norm)
    for y in results:
        x = net.add(x, y, scope)
    return _normed(net, x, f"{scope}.norm", block.norm) if block.is_behind and block.is_parallel else x


def draw_block(draw: Draw, stack: Stack, branches: Sequence[str], *, hides_later: bool, experts: int = 1) -> Block:
    """Random sizes and arrangement of a block with the given branches."""
    shared = divisors_up_to(stack.heads, 64)
    return Block(
        branches=tuple(branches),
        is_parallel=draw.chance(0.35),
        norm=draw.weighted({"layer": 4, "rms": 4, "none": 1}),
        is_behind=draw.chance(0.3),
        heads=stack.heads,
        kv_heads=draw.one(shared) if draw.chance(0.4) else stack.heads,
        ffn=max(64, round(draw.one((1, 2, 3, 4, 4, 4, 6)) * stack.hidden / 64) * 64),
        experts=experts,
        top_k=min(draw.one((1, 2, 2)), experts),
        act=draw.one(("Relu", "Gelu", "Tanh")),
        hides_later=hides_later,
    )


def draw_blocks(draw: Draw, family: str, parameters: float) -> RandomModel:
    """A stack of equal random blocks over tokens, with about the given number of parameters.

    Args:
        draw: random choices.
        family: `decoder`: transformers with attention, MLP and more, in unusual arrangements; `encoder`: the same
            without a mask; `blocks`: any branches, on tokens or on rows of features.
        parameters: wanted number of parameters.
    """
    if family == "blocks":
        branches = [draw.weighted(dict.fromkeys(_BRANCHES, 1.0)) for _ in range(draw.integer(1, 4))]
    else:
        branches = ["attention", draw.one(("mlp", "gated"))]
        branches += [draw.one(("gate", "narrow", "mlp", "experts")) for _ in range(draw.integer(0, 2))]
        branches = branches[:: -1 if draw.chance(0.2) else 1]
    experts = draw.one((2, 4, 8, 8, 16))
    stack = draw_stack(draw, parameters, sum(WEIGHTS[k] * (experts if k == "experts" else 1) for k in branches))
    block = draw_block(draw, stack, branches, hides_later=family != "encoder", experts=experts)
    tokens = draw.one([length for length in SEQUENCES if length <= LONGEST])
    vocabulary = 0 if family == "blocks" and draw.chance(0.3) else draw.one(VOCABULARIES)
    features = draw.one((16, 64, 80, 256, 1024))
    is_tied, is_classifier = draw.chance(0.4), draw.chance(0.5 if family == "blocks" else 0.2)
    classes = draw.one((2, 10, 100, 1000))

    def build() -> Graph:
        net = Net()
        if vocabulary:
            x = net.embedding(net.builder.input("ids", (1, tokens), "int64"), "embed", vocabulary, stack.hidden)
        else:
            x = net.linear(net.builder.input("features", (1, tokens, features)), "project", stack.hidden)
        masked = block.masked(net, tokens)
        for number in range(min(stack.layers, BUILT)):
            x = build_block(net, x, f"blocks.{number}", masked)
        x = _normed(net, x, "norm", block.norm)
        if is_classifier or not vocabulary:
            x = net.linear(net.op("ReduceMean", [x], "pool", axes=(1,), keepdims=0), "head", classes)
        elif is_tied:
            x = net.product(x, "embed.weight", "head")
        else:
            x = net.linear(x, "head", vocabulary, bias=False)
        return stretch(net.finish(x), "blocks", BUILT - 1, stack.layers)

    head = f"{classes} classes" if is_classifier or not vocabulary else "tied head" if is_tied else "own head"
    text = (
        f"{family}: {stack.layers} x [{_described(block)}], hidden {stack.hidden}, {tokens} tokens, "
        f"{f'vocabulary {vocabulary}' if vocabulary else f'{features} features'}, {head}"
    )
    return RandomModel(family=family, text=text, num_blocks=stack.layers, build=build, tokens=tokens)


def _described(block: Block) -> str:
    joined = ("|" if block.is_parallel else "+").join(block.branches)
    norm = f"{'post' if block.is_behind else 'pre'}-{block.norm}"
    heads = f"heads {block.heads}/{block.kv_heads}" if "attention" in block.branches else "no heads"
    experts = f" experts {block.experts}/{block.top_k}" if "experts" in block.branches else ""
    return f"{joined} {norm} {heads} ffn {block.ffn} {block.act}{experts}"


def draw_encoder_decoder(draw: Draw, parameters: float) -> RandomModel:
    """An encoder of features and a decoder of tokens of unlike depth, as for speech (Whisper, arXiv 2212.04356)."""
    stack = draw_stack(draw, parameters, 14.0)
    encoders = max(1, round(stack.layers * draw.between(0.2, 0.8)))
    decoders = max(1, stack.layers - encoders)
    encoder = draw_block(draw, stack, ("attention", draw.one(("mlp", "gated"))), hides_later=False)
    decoder = draw_block(draw, stack, (), hides_later=True)
    source, target = draw.one((64, 256, 512, 1500)), draw.one((32, 128, 448, 512))
    features, vocabulary = draw.one((80, 128, 768)), draw.one(VOCABULARIES)

    def build() -> Graph:
        net = Net()
        memory = net.linear(net.builder.input("features", (1, source, features)), "project", stack.hidden)
        for number in range(min(encoders, BUILT)):
            memory = build_block(net, memory, f"encoder.{number}", encoder)
        memory = net.layer_norm(memory, "encoder_norm")
        x = net.embedding(net.builder.input("ids", (1, target), "int64"), "embed", vocabulary, stack.hidden)
        masked = decoder.masked(net, target)
        for number in range(min(decoders, BUILT)):
            scope = f"decoder.{number}"
            y = net.layer_norm(x, f"{scope}.norm1")
            x = net.add(x, attend(net, y, y, f"{scope}.own", masked, masked.mask), scope)
            y = net.layer_norm(x, f"{scope}.norm2")
            x = net.add(x, attend(net, y, memory, f"{scope}.cross", decoder), scope)
            x = net.add(x, _mlp(net, net.layer_norm(x, f"{scope}.norm3"), f"{scope}.mlp", decoder), scope)
        x = net.product(net.layer_norm(x, "decoder_norm"), "embed.weight", "head")
        graph = stretch(net.finish(x), "encoder", BUILT - 1, encoders)
        return stretch(graph, "decoder", BUILT - 1, decoders)

    text = (
        f"encoder-decoder: {encoders} x [{_described(encoder)}], "
        f"{decoders} x [heads {decoder.heads}/{decoder.kv_heads} ffn {decoder.ffn} {decoder.act}], "
        f"hidden {stack.hidden}, {source} x {features} features, {target} tokens, "
        f"vocabulary {vocabulary}"
    )
    return RandomModel(
        family="encoder-decoder", text=text, num_blocks=encoders + decoders, build=build, tokens=source + target
    )
