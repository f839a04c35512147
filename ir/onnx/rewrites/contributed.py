"""Replaces fused operators of ONNX Runtime (com.microsoft), SwiGLU and Scaler (ai.onnx.ml) by standard operators.

Files written by the optimisers of ONNX Runtime contain them: attention with its projections, embeddings with their
norm, products with their activations. The order of operands is that of ONNX Runtime's ContribOperators.md, version
1.23. Key padding masks and scales are left out, since their cost is negligible compared to the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from ir.errors import refuse
from ir.onnx.readers.nodes import Node

DOMAIN = "com.microsoft."
PROCESSOR_LAYOUT = "com.microsoft.nchwc."
"""Domain of kinds whose weights are padded with channels of zeros, so that their sizes are not those of the model."""
ATTENTION_VERSION = 23
"""Version of the standard operator set that has Attention, RMSNormalization and RotaryEmbedding."""
TURNS = ("transA", "transBatchA", "transB", "transBatchB")
"""Attributes of FusedMatMul: for each operand, whether its last two dims are swapped, and whether its first dim comes
after the batch dims."""

SCALER_DEFAULTS = (("offset", 0.0), ("scale", 1.0))
"""Attributes of Scaler and what they are if the file does not state them (ONNX's Operators-ml.md)."""


class _Written:
    """The standard nodes that replace one fused node."""

    def __init__(self, node: Node, products: Set[str], precision: Mapping[str, int]) -> None:
        self.node = node
        self.precision = precision
        """Attribute of the file's norms that states the dtype of their statistics; empty if they have none."""
        self.products = products
        """Names of the results of matrix products in the file."""
        self.nodes: list[Node] = []

    def operand(self, index: int) -> str:
        """Name of an operand; empty if it is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else ""

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute of the fused node."""
        return self.node.attributes.get(name, default)

    def add(self, kind: str, inputs: Iterable[str], output: str = "", **attributes: Any) -> str:
        """Appends a node; returns the name of its result."""
        return self.add_many(kind, inputs, [output or f"{self.node.outputs[0]}#{len(self.nodes)}"], **attributes)[0]

    def add_many(self, kind: str, inputs: Iterable[str], outputs: list[str], **attributes: Any) -> list[str]:
        """Appends a node with these results."""
        node, label = self.node, f"{self.node.name}/{kind}" if self.node.name else ""
        self.nodes.append(Node(kind, list(inputs), outputs, attributes, label, node.scope, ATTENTION_VERSION))
        return outputs

    def integer(self, value: int) -> str:
        """Appends a constant."""
        return self.add("Constant", (), value_int=value)

    def integers(self, *values: int) -> str:
        """Appends a constant of one dim."""
        return self.add("Constant", (), value_ints=tuple(values))

    def attributes_of(self, *names: str) -> dict[str, Any]:
        """The attributes of these names, as far as the fused node has them."""
        return {name: self.node.attributes[name] for name in names if name in self.node.attributes}

    def sum(self, *names: str) -> str:
        """Appends the sum of the operands that are present; returns its name."""
        present = [name for name in names if name]
        total = present[0]
        for name in present[1:]:
            total = self.add("Add", [total, name])
        return total

    def attend(self, q: str, k: str, v: str, mask: str = "", *, kv_heads: int = 0, is_causal: bool = False) -> None:
        """Appends attention of `[b, s, h]` operands, whose result is that of the fused node."""
        heads = int(self.attribute("num_heads", 0))
        self._refuse_cache()
        # Mistral's window of 4,096 positions includes the query's own.
        window = int(self.attribute("local_window_size", -1))
        self.add(
            "Attention", [q, k, v, *([mask] if mask else [])], self.node.outputs[0], q_num_heads=heads,
            kv_num_heads=kv_heads or heads, is_causal=int(is_causal),
            **({"left_window_size": window - 1} if window > 0 else {}),
        )  # fmt: skip

    def unpacked(self, name: str, parts: str) -> list[str]:
        """Appends the separation of an operand `[b, s, heads, parts, head size]` into its parts, each `[b, s, h]`."""
        outputs = [f"{self.node.outputs[0]}#{part}" for part in parts]
        self.add_many("Split", [name], outputs, axis=3, num_outputs=len(parts))
        return [self.add("Reshape", [part, self.integers(0, 0, -1)]) for part in outputs]

    def _refuse_cache(self) -> None:
        if any(self.node.outputs[1:]):
            raise refuse(
                f"operator {self.node.name or self.node.outputs[0]} ({self.node.kind}) keeps keys and values",
                self.node.outputs[1],
                "A cache is for generation: hand in the model as it is trained.",
            )


def _attention(to: _Written) -> None:
    """Input, weights `[h, 3 h]`, bias, mask index, past, attention bias."""
    merged = to.sum(to.add("MatMul", [to.operand(0), to.operand(1)]), to.operand(2))
    sizes = to.attribute("qkv_hidden_sizes")
    parts = [f"{to.node.outputs[0]}#{part}" for part in "qkv"]
    to.add_many("Split", [merged], parts, axis=-1, **({"split": tuple(sizes)} if sizes else {"num_outputs": 3}))
    q, k, v = parts
    to.attend(q, k, v, to.operand(5), is_causal=bool(to.attribute("unidirectional")))


def _multi_head(to: _Written) -> None:
    """Queries, keys, values, of which the last two or all may be packed, bias of all three, key padding mask, attention
    bias."""
    q, k, v, bias = (to.operand(i) for i in range(4))
    if not k and not v:
        q, k, v = to.unpacked(q, "qkv")
    elif not v:
        k, v = to.unpacked(k, "kv")
    if bias:
        parts = to.add_many("Split", [bias], [f"{to.node.outputs[0]}#{n}" for n in ("bq", "bk", "bv")], num_outputs=3)
        q, k, v = (to.add("Add", pair) for pair in zip((q, k, v), parts, strict=True))
    to.attend(q, k, v, to.operand(5), is_causal=bool(to.attribute("unidirectional")))


def _grouped(to: _Written) -> None:
    """Queries, keys, values, past keys and values, lengths, tables of cosines and sines, positions, attention bias, a
    sink of each head, which costs what a bias of the head's scores costs."""
    q, k, v = (to.operand(i) for i in range(3))
    heads, kv_heads = int(to.attribute("num_heads", 0)), int(to.attribute("kv_num_heads", 0))
    if not k and not v:
        # One operand contains all heads, those of the queries first.
        packed = to.add("Reshape", [q, to.integers(0, 0, heads + 2 * kv_heads, -1)])
        parts = [f"{to.node.outputs[0]}#{part}" for part in "qkv"]
        to.add_many("Split", [packed, to.integers(heads, kv_heads, kv_heads)], parts, axis=2)
        q, k, v = (to.add("Reshape", [part, to.integers(0, 0, -1)]) for part in parts)
    if to.attribute("do_rotary") and to.operand(8):
        tables = [to.operand(7), to.operand(8)]
        q = to.add("RotaryEmbedding", [q, *tables], num_heads=heads)
        k = to.add("RotaryEmbedding", [k, *tables], num_heads=kv_heads)
    sink = to.add("Reshape", [to.operand(11), to.integers(1, heads, 1, 1)]) if to.operand(11) else ""
    bias = to.sum(to.operand(10), sink) if to.operand(10) or sink else ""
    to.attend(q, k, v, bias, kv_heads=kv_heads, is_causal=True)


def _rotary(to: _Written) -> None:
    """Input, positions, tables of cosines and sines."""
    to.add("RotaryEmbedding", [to.operand(0), to.operand(2), to.operand(3), to.operand(1)], to.node.outputs[0],
           num_heads=int(to.attribute("num_heads", 0)))  # fmt: skip


def _embedding(to: _Written) -> None:
    """Ids, segments, tables of words, positions and segments, scale, bias, mask, positions."""
    words = to.add("Gather", [to.operand(2), to.operand(0)])
    segments = to.add("Gather", [to.operand(4), to.operand(1)]) if to.operand(1) and to.operand(4) else ""
    places = to.operand(8)
    if not places:
        length = to.add("Gather", [to.add("Shape", [to.operand(0)]), to.integer(1)])
        places = to.add("Range", [to.integer(0), length, to.integer(1)])
    total = to.sum(words, to.add("Gather", [to.operand(3), places]), segments)
    outputs = to.node.outputs
    to.add("LayerNormalization", [total, to.operand(5), to.operand(6)], outputs[0], axis=-1)


def _skip_norm(kind: str, bias: int) -> Callable[[_Written], None]:
    """A norm of the sum of two operands and a bias (operand `bias`); the sum is the fourth result."""

    def write(to: _Written) -> None:
        # The bias is added to the result of the product first, before the residual stream.
        first, second = sorted((to.operand(0), to.operand(1)), key=lambda name: name not in to.products)
        outputs = [*to.node.outputs, "", "", ""][:4]
        biased = to.sum(first, to.operand(bias))
        total = to.add("Add", [biased, second], outputs[3])
        scales = [name for name in to.node.inputs[2 : min(bias, 4)] if name]
        written = [n for n in outputs[:3] if n]
        to.add_many(kind, [total, *scales], written, axis=-1, **to.attributes_of("epsilon"), **to.precision)

    return write


def _gelu(approximate: str) -> Callable[[_Written], None]:
    """GELU of the sum of an operand and an optional bias."""

    def write(to: _Written) -> None:
        to.add("Gelu", [to.sum(to.operand(0), to.operand(1))], to.node.outputs[0], approximate=approximate)

    return write


def _gemm_gelu(to: _Written) -> None:
    """GELU of a product and an optional bias."""
    product = to.sum(to.add("MatMul", [to.operand(0), to.operand(1)]), to.operand(2))
    to.add("Gelu", [product], to.node.outputs[0], approximate="tanh")


def _bias_softmax(to: _Written) -> None:
    """Softmax of the sum of scores and a mask."""
    to.add("Softmax", [to.sum(to.operand(0), to.operand(1))], to.node.outputs[0], axis=to.attribute("axis", 1))


def _bias_dropout(to: _Written) -> None:
    """Operands: a tensor, its bias, and an optional residual stream. The Dropout itself is left out, as all are."""
    to.add("Identity", [to.sum(*(to.operand(i) for i in range(3)))], to.node.outputs[0])


def _same(kind: str) -> Callable[[_Written], None]:
    """A standard operator of the same operands and attributes."""

    def write(to: _Written) -> None:
        to.add(kind, to.node.inputs, to.node.outputs[0], **to.node.attributes)

    return write


def _cross_entropy(to: _Written) -> None:
    """Scores, labels, weights of classes, and the label that is ignored, which costs nothing."""
    outputs = [name for name in to.node.outputs if name]
    to.add_many("SoftmaxCrossEntropyLoss", to.node.inputs[:3], outputs, **to.attributes_of("reduction"))


def _swiglu(to: _Written) -> None:
    """Operands: a gate, and the values that it multiplies."""
    to.add("Mul", [to.add("Swish", [to.operand(0)], **to.attributes_of("alpha")), to.operand(1)], to.node.outputs[0])


def _scaler(to: _Written) -> None:
    """Features less their offsets, times their scales, as scikit-learn's StandardScaler computes them."""
    offset, scale = (to.add("Constant", (), value_floats=tuple(to.attribute(n, (d,)))) for n, d in SCALER_DEFAULTS)
    to.add("Mul", [to.add("Sub", [to.operand(0), offset]), scale], to.node.outputs[0])


def _bias_add(to: _Written) -> None:
    """Operands: a tensor, its bias, and a residual stream."""
    to.add("Add", [to.sum(to.operand(0), to.operand(1)), to.operand(2)], to.node.outputs[0])


def _split_gelu(to: _Written) -> None:
    """The first half of the sum of a tensor and its bias, multiplied by GELU of the second half."""
    halves = [f"{to.node.outputs[0]}#{part}" for part in ("up", "gate")]
    to.add_many("Split", [to.sum(to.operand(0), to.operand(1))], halves, axis=-1, num_outputs=2)
    to.add("Mul", [halves[0], to.add("Gelu", [halves[1]])], to.node.outputs[0])


def _group_norm(skip: int) -> Callable[[_Written], None]:
    """Images with channels last, scale and shift; a residual stream and a bias (operands from `skip` on), SiLU."""

    def write(to: _Written) -> None:
        outputs = [*to.node.outputs, ""][:2]
        total = to.sum(to.operand(0), *(to.operand(i) for i in range(skip, skip + 2)) if skip else ())
        if outputs[1]:
            to.add("Identity", [total], outputs[1])
        first = to.add("Transpose", [total], perm=(0, 3, 1, 2)) if to.attribute("channels_last", 1) else total
        groups = {"num_groups": to.attribute("groups"), **to.attributes_of("epsilon")}
        norm = to.add("GroupNormalization", [first, to.operand(1), to.operand(2)], **groups)
        active = to.add("Swish", [norm]) if to.attribute("activation") else norm
        if to.attribute("channels_last", 1):
            to.add("Transpose", [active], outputs[0], perm=(0, 2, 3, 1))
        else:
            to.add("Identity", [active], outputs[0])

    return write


def _product(to: _Written) -> None:
    """A scaled product of operands that may be transposed, followed by an activation if the node has one; `with_turns`
    adds the transposes once ranks are known."""
    turns = {name: 1 for name in TURNS if to.attribute(name)}
    alpha, activation = float(to.attribute("alpha", 1.0)), str(to.attribute("activation", ""))
    last = "" if activation else to.node.outputs[0]
    result = to.add("FusedMatMul" if turns else "MatMul", to.node.inputs, last * (alpha == 1.0), **turns)
    if alpha != 1.0:
        result = to.add("Mul", [result, to.add("Constant", (), value_float=alpha)], last)
    if activation:
        to.add(activation, [result], to.node.outputs[0])


def with_turns(node: Node, ranks: Sequence[int]) -> list[Node]:
    """Replaces a product of transposed operands by Transposes and a MatMul.

    Args:
        node: a FusedMatMul, with those attributes of `TURNS` that are not 0.
        ranks: number of dims of each operand.
    """
    found: list[Node] = []
    operands = list(node.inputs)
    for i, rank in enumerate(ranks):
        inner, outer = (node.attributes.get(name, 0) for name in TURNS[2 * i : 2 * i + 2])
        perm = [*range(1, rank - 1), 0, rank - 1] if outer else [*range(rank)]
        if inner:
            perm[-2:] = perm[:-3:-1]
        if perm != [*range(rank)]:
            operands[i] = f"{node.outputs[0]}#{'ab'[i]}"
            found.append(replace(node, kind="Transpose", inputs=[node.inputs[i]], outputs=[operands[i]],
                                 attributes={"perm": tuple(perm)}, name=f"{node.name}/Transpose_{i}"))  # fmt: skip
    return [*found, replace(node, kind="MatMul", inputs=operands, attributes={})]


def _activated(kind: str, num_operands: int) -> Callable[[_Written], None]:
    """A standard operator, followed by the addition of another operand and an activation."""

    def write(to: _Written) -> None:
        own = {k: v for k, v in to.node.attributes.items() if not k.startswith("activation")}
        result = to.add(kind, to.node.inputs[:num_operands], **own)
        result = to.sum(result, to.operand(num_operands))
        to.add(str(to.attribute("activation", "Identity")), [result], to.node.outputs[0])

    return write


def _last_channels(to: _Written) -> None:
    """A convolution with channels last in images and weight, followed by a bias, a residual stream, an activation."""
    first = (0, 3, 1, 2)
    image = to.add("Transpose", [to.operand(0)], perm=first)
    operands = [image, to.add("Transpose", [to.operand(1)], perm=first), *([to.operand(2)] if to.operand(2) else [])]
    own = {k: v for k, v in to.node.attributes.items() if not k.startswith("activation")}
    result = to.add("Transpose", [to.add("Conv", operands, **own)], perm=(0, 2, 3, 1))
    to.add(str(to.attribute("activation", "Identity")), [to.sum(result, to.operand(3))], to.node.outputs[0])


STANDARD: dict[str, Callable[[_Written], None]] = {
    "Attention": _attention, "MultiHeadAttention": _multi_head, "GroupQueryAttention": _grouped,
    "RotaryEmbedding": _rotary, "EmbedLayerNormalization": _embedding, "FusedMatMul": _product,
    "TransposeMatMul": _product, "FusedMatMulActivation": _product, "GemmFastGelu": _gemm_gelu, "Trilu": _same("Trilu"),
    "SoftmaxCrossEntropyLossInternal": _cross_entropy, "BiasSoftmax": _bias_softmax, "BiasDropout": _bias_dropout,
    "BiasAdd": _bias_add, "BiasSplitGelu": _split_gelu,
    "GroupNorm": _group_norm(0), "SkipGroupNorm": _group_norm(3),
    "NhwcConv": _last_channels, "NhwcFusedConv": _last_channels,
    "FusedConv": _activated("Conv", 3), "FusedGemm": _activated("Gemm", 3),
    "SkipLayerNormalization": _skip_norm("LayerNormalization", 4),
    "SkipSimplifiedLayerNormalization": _skip_norm("SimplifiedLayerNormalization", 3),
    "Gelu": _gelu("none"), "BiasGelu": _gelu("none"), "FastGelu": _gelu("tanh"),
}  # fmt: skip
"""Kind in the domain com.microsoft -> function that appends the standard nodes."""
WRITERS = {f"{DOMAIN}{kind}": write for kind, write in STANDARD.items()} | {
    "SwiGLU": _swiglu, "ai.onnx.ml.Scaler": _scaler,
}  # fmt: skip
"""Kind with its domain -> function that appends the standard nodes; includes kinds of the standard domain."""


def _precision(node: Node) -> dict[str, int]:
    return {name: value for name, value in node.attributes.items() if name == "stash_type"}


def standard(nodes: list[Node]) -> list[Node]:
    """The nodes, with fused operators replaced by standard ones.

    Raises:
        ModelError: a fused operator is for generation only, or images are in a blocked layout for CPUs.
    """
    found: list[Node] = []
    products = {name for node in nodes if node.kind in ("MatMul", "Gemm") for name in node.outputs}
    precision = next((_precision(node) for node in nodes if node.kind.endswith("LayerNormalization")), {})
    for node in nodes:
        if node.kind.startswith(PROCESSOR_LAYOUT):
            raise refuse(
                f"operator {node.name or node.outputs[0]} has images in a layout for processors",
                node.kind,
                "Save the optimised file with graph_optimization_level=ORT_ENABLE_EXTENDED, or hand in the one that the"
                " exporter wrote.",
            )
        write = WRITERS.get(node.kind)
        if write is None or not node.outputs:
            found.append(node)
            continue
        to = _Written(node, products, precision)
        write(to)
        found += to.nodes
    return found
