"""Quantised files read as the float models that they came from: training computes in floats.

A weight that is stored as integers and dequantised is a float weight. A value that is quantised and dequantised was
rounded, nothing more (training with such roundings passes gradients straight through them), and both stay so where
operators move the integers in between, as look-ups and views do. Operators that compute with integers have no gradient,
and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ir.errors import refuse
from ir.onnx.readers.nodes import Node, Stored

INTEGER_KINDS = ("QLinear", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear", "MatMulNBits", "MatMulBnb4",
                 "QAttention", "QGemm", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM", "MatMulIntegerToFloat",
                 "QMoE", "GatherBlockQuantized", "QEmbedLayerNormalization", "QOrdered")  # fmt: skip
"""Beginnings of the names of kinds that compute with integers (onnx operator set 28, ONNX Runtime's contrib operators
1.23)."""
ROUNDING_KINDS = tuple(
    f"{domain}.{kind}"
    for domain in ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general")
    for kind in ("Quant", "IntQuant", "FloatQuant", "BipolarQuant", "Trunc")
)
"""Kinds that round floats to floats, which Brevitas and QONNX write for training with quantisation."""
MOVING_KINDS = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Split", "Gather", "GatherND",
     "GatherElements", "Expand", "Tile", "Pad", "MaxPool", "DepthToSpace", "SpaceToDepth", "Concat"}
)  # fmt: skip
"""Kinds whose results hold numbers of their first operand, or of all operands (Concat), as they are."""


def in_floats(nodes: list[Node], stored: dict[str, Stored], *, marked: bool) -> tuple[list[Node], tuple[str, ...]]:
    """Takes quantisation out of a file.

    Args:
        nodes: nodes of the file.
        stored: stored tensors; those that are dequantised become floats.
        marked: whether the exporter marked parameters.

    Returns:
        the nodes, with an Identity in place of each DequantizeLinear whose operand holds stored or quantised numbers,
        of the QuantizeLinear that made them, and of each node that rounds floats to floats; and a warning if there was
        any.

    Raises:
        ModelError: an operator computes with integers.
    """
    made = {name: node for node in nodes for name in node.outputs}
    weights, pairs, kept = 0, 0, []
    rounded, known = set[str](), dict[str, set[str]]()
    for node in nodes:
        plain = _plain(node)
        if plain.startswith(INTEGER_KINDS):
            raise refuse(
                f"operator {node.name or node.outputs[0]} computes with integers, which cannot be trained",
                node.kind,
                "Hand in the model as it was before it was quantised.",
            )
        if node.kind in ROUNDING_KINDS and node.inputs:
            kept.append(_left_out(node))
            is_weight = node.inputs[0] in stored
            weights, pairs = weights + is_weight, pairs + (not is_weight)
            continue
        origins = _origins(node.inputs[0], made, known) if plain == "DequantizeLinear" and node.inputs else set()
        quantised = {name for name in origins if name in made and _plain(made[name]) == "QuantizeLinear"}
        if not origins or not origins - quantised <= stored.keys():
            kept.append(node)
            continue
        scale = stored.get(node.inputs[1]) if len(node.inputs) > 1 else None
        dtype = scale.dtype if scale is not None else "float32"
        for name in sorted(origins - quantised):
            given = stored[name]
            if not given.dtype.startswith(("float32", "float16", "bfloat", "float64")):
                kind = "PARAMETER" if marked and prod(given.shape) > 1 else given.kind
                stored[name] = replace(given, dtype=dtype, value=None, kind=kind)
                weights += 1
        rounded |= quantised
        pairs += bool(quantised)
        kept.append(_left_out(node))
    if not weights and not pairs:
        return nodes, ()
    kept = [_left_out(node) if not rounded.isdisjoint(node.outputs) else node for node in kept]
    warning = f"the file is quantised ({weights} weights, {pairs} other values): it is read as floats"
    return kept, (warning,)


def _plain(node: Node) -> str:
    return node.kind.removeprefix("com.microsoft.")


def _left_out(node: Node) -> Node:
    return Node("Identity", node.inputs[:1], node.outputs[:1], {})


def _origins(name: str, made: Mapping[str, Node], known: dict[str, set[str]]) -> set[str]:
    """The tensors whose numbers a tensor holds, in front of operators that only move them.

    Args:
        name: name of the tensor.
        made: tensor name -> the node that makes it.
        known: results of earlier calls, to which this one is added.
    """
    found, pending, seen = set[str](), [name], set[str]()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        node = made.get(current)
        if current in known:
            found |= known[current]
        elif node is None or node.kind not in MOVING_KINDS:
            found.add(current)
        else:
            pending += node.inputs if node.kind == "Concat" else node.inputs[:1]
    known[name] = found
    return found
