"""Quantised files read as the float models that they came from: training computes in floats.

A weight that is stored as integers and dequantised is a float weight. A value that is quantised and dequantised at once
was rounded, nothing more (training with such roundings passes gradients straight through them). Operators that compute
with integers have no gradient, and are refused.
"""

from __future__ import annotations

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


def in_floats(nodes: list[Node], stored: dict[str, Stored], *, marked: bool) -> tuple[list[Node], tuple[str, ...]]:
    """Takes quantisation out of a file.

    Args:
        nodes: nodes of the file.
        stored: stored tensors; those that are dequantised become floats.
        marked: whether the exporter marked parameters.

    Returns:
        the nodes, with an Identity in place of each DequantizeLinear whose operand is stored or was just quantised, and
        of each node that rounds floats to floats; and a warning if there was any.

    Raises:
        ModelError: an operator computes with integers.
    """
    made = {name: node for node in nodes for name in node.outputs}
    weights, pairs, kept = 0, 0, []
    for node in nodes:
        plain = node.kind.removeprefix("com.microsoft.")
        if plain.startswith(INTEGER_KINDS):
            raise refuse(
                f"operator {node.name or node.outputs[0]} computes with integers, which cannot be trained",
                node.kind,
                "Hand in the model as it was before it was quantised.",
            )
        if node.kind in ROUNDING_KINDS and node.inputs:
            kept.append(Node("Identity", node.inputs[:1], node.outputs[:1], {}))
            is_weight = node.inputs[0] in stored
            weights, pairs = weights + is_weight, pairs + (not is_weight)
            continue
        source = node.inputs[0] if plain == "DequantizeLinear" and node.inputs else ""
        origin = made.get(source)
        if source in stored:
            scale = stored.get(node.inputs[1]) if len(node.inputs) > 1 else None
            dtype = scale.dtype if scale is not None else "float32"
            given = stored[source]
            if not given.dtype.startswith(("float32", "float16", "bfloat", "float64")):
                kind = "PARAMETER" if marked and prod(given.shape) > 1 else given.kind
                stored[source] = replace(given, dtype=dtype, value=None, kind=kind)
                weights += 1
            kept.append(Node("Identity", [source], node.outputs[:1], {}))
        elif origin is not None and origin.kind.removeprefix("com.microsoft.") == "QuantizeLinear":
            kept.append(Node("Identity", origin.inputs[:1], node.outputs[:1], {}))
            pairs += 1
        else:
            kept.append(node)
    if not weights and not pairs:
        return nodes, ()
    warning = f"the file is quantised ({weights} weights, {pairs} other values): it is read as floats"
    return kept, (warning,)
