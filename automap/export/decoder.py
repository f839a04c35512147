"""The architecture of the layers of a transformer, as far as it can be read from the graph without doubt.

Trainers need more arguments than sizes: the kinds of norm, activation and positions, and the number of query groups.
Without these arguments a trainer takes its defaults, and may train another model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from ir.blocks import Blocks
from ir.graph import Graph, Operator
from ir.group_kinds import CURVES, REDUCTIONS
from ir.groups import fused_groups
from ir.layers import layer_spans
from ir.operators.experts import DISPATCH, PRODUCT

T = TypeVar("T")
Curve = Literal["swiglu", "gelu", "relu"]
Positions = Literal["rope", "learned_absolute", "relative"]
NORMS: dict[str, Literal["LayerNorm", "RMSNorm"]] = {
    "LayerNormalization": "LayerNorm",
    "RMSNormalization": "RMSNorm",
    "SimplifiedLayerNormalization": "RMSNorm",
}
"""Kind of operator -> the norm that it is."""
SILU, GELU = {"Sigmoid", "Swish"}, {"Erf", "Tanh", "Gelu"}
"""Kinds of operators with which graphs write SiLU and GELU."""
CLIPS = {"Clip", "Min", "Max"}
"""Kinds that make another activation of a gate, such as that of GPT-OSS."""
DIVIDES = {"Split", "Slice"}
"""Operators that take the two halves of a gate from one product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """The architecture of layers. None = the graph leaves it in doubt, or layers differ."""

    ffn: int | None
    """Inner width of the MLP of layers without experts."""
    expert_ffn: int | None
    """Inner width of an expert."""
    shared_ffn: int | None
    """Inner width of the MLP that all tokens take beside the experts."""
    activation: Curve | None
    """Activation function of the MLPs."""
    norm: Literal["LayerNorm", "RMSNorm"] | None
    """Norm over the hidden dim."""
    positions: Positions | None
    """Kind of position embedding."""
    distances: int | None
    """Rows of the tables of relative positions; None where there are none."""
    head_size: int | None
    """Width of a head of queries and keys."""
    kv_heads: int | None
    """Heads of keys and values."""
    is_tied: bool | None
    """Whether the last product has the parameter of the embedding."""
    has_qk_norm: bool
    """Whether each head of queries and keys has a norm."""
    has_qkv_biases_alone: bool
    """Whether queries, keys and values have biases and no other product of a layer has."""
    is_parallel: bool
    """Whether attention and MLP of a layer read the same input (parallel layers)."""


class _Mlp(NamedTuple):
    """An MLP, by its last product."""

    width: int
    is_expert: bool
    has_experts: bool
    """Whether its layer has experts."""
    activation: Curve | None


def decoder_of(graph: Graph, blocks: Blocks, hidden: int | None, heads: int | None) -> Decoder:
    """Reads the architecture of the layers of a graph.

    Args:
        blocks: the units of the graph.
        hidden: width of what passes from layer to layer; None = not known.
        heads: heads of queries; None = not known.
    """
    units = blocks.units
    spans = [range(units[span[0]].start, units[span[-1]].stop) for span in layer_spans(graph, blocks)]
    mlps = [mlp for span in spans for mlp in _mlps(graph, span)]
    attention = [found for span in spans for found in _attention(graph, span, heads)]
    head_size = _only(size for size, _ in attention)
    tables = distance_tables(graph, heads)
    biases = [_feeds_attention(graph, op) for span in spans for op in map(graph.operators.__getitem__, span)
              if _adds_bias(graph, op)]  # fmt: skip
    return Decoder(
        ffn=_only(mlp.width for mlp in mlps if not mlp.is_expert and not mlp.has_experts),
        expert_ffn=_only(mlp.width for mlp in mlps if mlp.is_expert),
        shared_ffn=_only(mlp.width for mlp in mlps if mlp.has_experts and not mlp.is_expert),
        activation=_only(mlp.activation for mlp in mlps),
        norm=_only(_norms(graph, spans, hidden)),
        has_qk_norm=head_size not in (None, hidden) and any(True for _ in _norms(graph, spans, head_size)),
        has_qkv_biases_alone=bool(biases) and all(biases),
        is_parallel=bool(spans) and all(_is_parallel(graph, span) for span in spans),
        positions=_positions(graph, spans, hidden, head_size) or ("relative" if tables else None),
        distances=_only(graph.tensors[name].shape[0] for name in tables),
        head_size=head_size,
        kv_heads=_only(count for _, count in attention),
        is_tied=_is_tied(graph, spans),
    )


def _only(found: Iterable[T | None]) -> T | None:
    """The value that all have."""
    values = set(found)
    return values.pop() if len(values) == 1 else None


def _weight(graph: Graph, op: Operator) -> str | None:
    """The operand of a product of matrices that is a weight; None where there is none."""
    if op.kind not in ("MatMul", "Gemm", PRODUCT):
        return None
    return next((name for name in op.inputs[:2] if graph.is_weight(name)), None)


def _size(op: Operator, name: str) -> int | None:
    """The size of a factor of an operator."""
    return next((factor.size for factor in op.rule.factors if factor.name == name), None)


def _behind(graph: Graph, name: str) -> tuple[list[Operator], list[Operator]]:
    """The operators that a tensor depends on, back to the nearest products with weights, and these products."""
    passed, products, left, seen = list[Operator](), list[Operator](), [name], {name}
    while left:
        op = graph.maker(left.pop())
        if op is None:
            continue
        if _weight(graph, op) is not None:
            products.append(op)
            continue
        passed.append(op)
        fresh = [one for one in op.inputs if one not in seen and not graph.is_weight(one)]
        seen.update(fresh)
        left += fresh
    return passed, [op for number, op in enumerate(products) if op not in products[:number]]


def _mlps(graph: Graph, span: range) -> Iterator[_Mlp]:
    """The MLPs of a layer: products behind a curve, with no norm and no attention between."""
    ops = [graph.operators[index] for index in span]
    has_experts = any(op.kind == DISPATCH for op in ops)
    for op in ops:
        weight = _weight(graph, op)
        if weight is None:
            continue
        data = next(name for name in op.inputs if name != weight)
        passed, products = _behind(graph, data)
        kinds = {one.kind for one in passed}
        width = _size(op, "k")
        is_other = kinds & ({"Softmax", "Attention"} | set(NORMS) | REDUCTIONS)
        if width is None or not products or is_other or not kinds & CURVES:
            continue
        is_gated = "Mul" in kinds and (len(products) > 1 or bool(kinds & DIVIDES))
        activation: Curve | None = None
        if is_gated and kinds & SILU and not kinds & (GELU | CLIPS):
            activation = "swiglu"
        elif not is_gated and kinds & GELU and not kinds & SILU:
            activation = "gelu"
        elif not is_gated and kinds & CURVES == {"Relu"}:
            activation = "relu"
        yield _Mlp(width, op.kind == PRODUCT, has_experts, activation)


def _attention(graph: Graph, span: range, heads: int | None) -> Iterator[tuple[int | None, int | None]]:
    """The width of a head and the heads of keys of each attention of a layer."""
    for op in (graph.operators[index] for index in span):
        if op.kind == "Attention":
            about, keys = dict(op.attributes), graph.tensors[op.inputs[1]].shape
            if len(keys) == 4:
                yield keys[3], keys[1]
            else:
                count = about.get("kv_num_heads")
                yield (keys[-1] // count, count) if isinstance(count, int) and count else (None, None)
        elif op.kind == "Softmax":
            scores = _scores(graph, op)
            # A softmax over the experts of a token has no product of two activations in front.
            if scores is not None:
                yield _heads_of_keys(graph, scores, heads)


def _scores(graph: Graph, softmax: Operator) -> Operator | None:
    """The product of queries and keys in front of a softmax."""
    passed, _ = _behind(graph, softmax.inputs[0])
    found = [op for op in passed if op.kind == "MatMul"]
    return found[0] if found else None


def _heads_of_keys(graph: Graph, scores: Operator, heads: int | None) -> tuple[int | None, int | None]:
    """The width of a head and the heads of keys behind a product of queries and keys."""
    size = _size(scores, "k")
    (_, queries), (_, keys) = (_behind(graph, name) for name in scores.inputs[:2])
    width = _size(keys[0], "n") if len(keys) == 1 else None
    if size is None or width is None or heads is None:
        return size, None
    if keys == queries and width > heads * size:
        # Queries, keys and values are one product.
        return (size, (width // size - heads) // 2) if (width // size - heads) % 2 == 0 else (size, None)
    return size, width // size


def _adds_bias(graph: Graph, op: Operator) -> bool:
    """Whether an operator adds a parameter of one dim."""
    return op.kind in ("Add", "Gemm") and any(
        graph.is_weight(name) and len(graph.tensors[name].shape) == 1 for name in op.inputs
    )


def _feeds_attention(graph: Graph, op: Operator) -> bool:
    """Whether a product of two activations reads what an operator makes, with no product with a weight between."""
    left, seen = [op], set[int]()
    while left:
        readers = {index for name in left.pop().outputs for index in graph.consumers[name]} - seen
        seen |= readers
        for reader in map(graph.operators.__getitem__, readers):
            if reader.kind == "Attention" or (reader.kind == "MatMul" and _weight(graph, reader) is None):
                return True
            if _weight(graph, reader) is None:
                left.append(reader)
    return False


def _is_parallel(graph: Graph, span: range) -> bool:
    """Whether no product of a layer is in front of its MLP, though it has attention."""
    ops = [graph.operators[index] for index in span]
    if not any(op.kind in ("Softmax", "Attention") for op in ops):
        return False
    inside = {op.name for op in ops}
    for op in ops:
        weight = _weight(graph, op)
        if weight is None:
            continue
        passed, products = _behind(graph, next(name for name in op.inputs if name != weight))
        kinds = {one.kind for one in passed}
        if products and kinds & CURVES and not kinds & ({"Softmax", "Attention"} | set(NORMS) | REDUCTIONS):
            first = products[0]
            data = next(name for name in first.inputs if name != _weight(graph, first))
            return inside.isdisjoint(each.name for each in _behind(graph, data)[1])
    return False


def _norms(graph: Graph, spans: Iterable[range], hidden: int | None) -> Iterator[Literal["LayerNorm", "RMSNorm"]]:
    """The norms of layers over a dim of this size, the hidden one or that of a head."""
    inside = {index for span in spans for index in span}
    for index in sorted(inside):
        op = graph.operators[index]
        if op.kind in NORMS and graph.tensors[op.outputs[0]].shape[-1] == hidden:
            yield NORMS[op.kind]
    for group in fused_groups(graph):
        ops = [graph.operators[index] for index in group.members if index in inside]
        if group.kind == "norm" and ops and not any(op.kind in NORMS for op in ops):
            count = sum(op.kind in REDUCTIONS for op in ops)
            if count and graph.tensors[ops[-1].outputs[0]].shape[-1] == hidden:
                yield "RMSNorm" if count == 1 else "LayerNorm"


def _positions(graph: Graph, spans: Iterable[range], hidden: int | None, head_size: int | None) -> Positions | None:
    """How tokens know their places, but for tables of distances."""
    inside = {index for span in spans for index in span}
    if any(group.kind == "rotary" and inside & set(group.members) for group in fused_groups(graph)):
        return "rope"
    turned = [op for op in map(graph.operators.__getitem__, inside) if op.kind == "RotaryEmbedding"]
    if any(graph.tensors[op.outputs[0]].shape[-1] == head_size for op in turned):
        return "rope"
    for index, op in enumerate(graph.operators):
        if index in inside or op.kind not in ("Gather", "Add"):
            continue
        for name in op.inputs:
            # A table that is the same for all samples, taken whole or by places.
            shape = graph.tensors[name].shape
            is_table = graph.is_weight(name) and len(shape) > 1 and shape[-1] == hidden
            if is_table and (op.kind == "Add" or graph.tensors[op.outputs[0]].batch_dim is None):
                return "learned_absolute"
    return None


def distance_tables(graph: Graph, heads: int | None) -> set[str]:
    """The parameters that are added to scores of attention by how far two tokens are apart, a number for each head.

    Layers share them, as those of an encoder do in T5.
    """
    return {
        graph.viewed(op.inputs[0])
        for op in graph.operators
        if op.kind == "Gather"
        and graph.is_weight(op.inputs[0])
        and heads is not None
        and graph.tensors[op.inputs[0]].shape[1:] == (heads,)
        and graph.tensors[op.outputs[0]].batch_dim is None
    }


def _is_tied(graph: Graph, spans: Iterable[range]) -> bool | None:
    """Whether the product with the vocabulary has the parameter of the embedding."""
    inside = {index for span in spans for index in span}
    outside = [op for index, op in enumerate(graph.operators) if index not in inside]
    tables = {
        graph.viewed(op.inputs[0]): graph.tensors[op.inputs[0]].shape[0]
        for op in outside
        if op.kind == "Gather" and graph.is_weight(op.inputs[0]) and graph.tensors[op.outputs[0]].batch_dim is not None
    }
    heads = [(op, weight) for op in outside if (weight := _weight(graph, op)) is not None]
    vocabularies = [(op, weight) for op, weight in heads if _size(op, "n") in tables.values()]
    return _only(graph.viewed(weight) in tables for _, weight in vocabularies)
