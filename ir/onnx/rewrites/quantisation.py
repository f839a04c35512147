"""Converts quantised files to the float models from which they were made, since training computes in floats.

A weight that is stored as integers and then dequantised, or converted and scaled, becomes a float weight. Quantisation
followed by dequantisation only rounds a value and is removed (quantisation-aware training passes gradients through it
unchanged), even if operators that only move elements, such as look-ups and views, are in between. Operators that
compute with integers are converted by `ir.onnx.rewrites.integer_arithmetic`; some fused ones are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.errors import ModelError, refuse
from ir.onnx.readers.nodes import DTYPES, SMALL_INTEGERS, Node, Stored, has_data
from ir.onnx.readers.roles import MATRIX_POSITIONS
from ir.onnx.rewrites.integer_arithmetic import left_out, on_floats, plain
from ir.operators import Value

REFUSED_KINDS = ("QLinear", "QAttention", "DynamicQuantizeLSTM", "QEmbedLayerNormalization", "QOrdered", "QNBitsMoE")
"""Beginnings of the names of rejected kinds, which compute with integers (ONNX Runtime's contrib operators 1.23)."""
ROUNDING_KINDS = tuple(
    f"{domain}.{kind}"
    for domain in ("qonnx.custom_op.general", "onnx.brevitas", "finn.custom_op.general")
    for kind in ("Quant", "IntQuant", "FloatQuant", "BipolarQuant", "Trunc")
)
"""Kinds that round floats to floats, which Brevitas and QONNX write for quantisation-aware training."""
MOVING_KINDS = frozenset(
    {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Slice", "Split", "Gather", "GatherND",
     "GatherElements", "Expand", "Tile", "Pad", "MaxPool", "DepthToSpace", "SpaceToDepth", "Concat"}
)  # fmt: skip
"""Kinds whose results contain elements of their first operand (for Concat, of all operands) unchanged."""

SCALING_KINDS = frozenset({"Cast", "BitCast", "Mul", "Div", "Sub", "Add", "Constant"})
"""Kinds that compute float weights from integers: conversion, subtraction of the zero point, scaling."""
LOOK_UPS = ("Gather", "GatherND", "GatherElements")
"""Kinds that look up rows of a table, which may be converted to floats after the look-up."""
UNPACKING_KINDS = frozenset({"BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"})
"""Kinds that unpack several weights from one integer."""
MAX_ELEMENTS = 1 << 24
"""Elements of the largest tensor that is dequantised (assumed): a mask or table of 4,096 positions."""


def in_floats(nodes: list[Node], stored: dict[str, Stored], *, marked: bool) -> tuple[list[Node], tuple[str, ...]]:
    """Removes quantisation from a file.

    Args:
        nodes: nodes of the file.
        stored: stored tensors; those that are dequantised become floats.
        marked: whether the exporter marked parameters.

    Returns:
        the nodes, and a warning if there was any quantisation. An Identity replaces each DequantizeLinear of stored or
        quantised numbers, each QuantizeLinear whose result is dequantised, each node that rounds floats to floats, each
        Cast that converts stored integers to a weight, and each BitCast of integers to floats. Readers of such an
        Identity of a stored tensor read the tensor itself.

    Raises:
        ModelError: an operator computes with integers.
    """
    made = {name: node for node in nodes for name in node.outputs}
    known = dict[str, set[str]]()
    nodes, weights = on_floats(nodes, stored, lambda name: _origins(name, made, known), marked=marked)
    made = {name: node for node in nodes for name in node.outputs}
    pairs, plain_bits, kept = 0, 0, list[Node]()
    rounded, known = set[str](), dict[str, set[str]]()
    scaled = _scaled_weights(nodes, made, stored)
    for node in nodes:
        kind = plain(node)
        if kind.startswith(REFUSED_KINDS):
            raise _computes_with_integers(node)
        if node.kind in ROUNDING_KINDS and node.inputs:
            kept.append(left_out(node))
            is_weight = node.inputs[0] in stored
            weights, pairs = weights + is_weight, pairs + (not is_weight)
            continue
        if node.outputs[0] in scaled.kept:
            kept.append(replace(left_out(node), inputs=[scaled.kept[node.outputs[0]]]))
            continue
        same_bits = _read_as_floats(node)
        dequantises = kind == "DequantizeLinear" or node.outputs[0] in scaled.casts or bool(same_bits)
        origins = _origins(node.inputs[0], made, known) if dequantises and node.inputs else set()
        quantised = {name for name in origins if name in made and plain(made[name]) == "QuantizeLinear"}
        if not origins or not origins - quantised <= stored.keys():
            kept.append(node)
            continue
        scale = stored.get(node.inputs[1]) if len(node.inputs) > 1 else None
        dtype = same_bits or scaled.casts.get(node.outputs[0], "float32") if scale is None else scale.dtype
        for name in sorted(origins - quantised):
            given = stored[name]
            if not given.dtype.startswith(("float32", "float16", "bfloat", "float64")):
                role = "PARAMETER" if marked and prod(given.shape) > 1 else given.kind
                stored[name] = replace(given, dtype=dtype, value=None, kind=role)
                weights += not same_bits
                plain_bits += bool(same_bits)
        rounded |= quantised
        pairs += bool(quantised)
        kept.append(left_out(node))
    if not weights and not pairs:
        return (kept if plain_bits else nodes), ()
    kept = [left_out(node) if not rounded.isdisjoint(node.outputs) else node for node in kept]
    # Nodes read the stored tensors directly, as in a file of floats.
    same = {n.outputs[0]: n.inputs[0] for n in kept if n.kind == "Identity" and n.inputs[0] in stored}
    kept = [replace(n, inputs=[same.get(name, name) for name in n.inputs]) for n in kept]
    warning = f"the file is quantised ({weights} weights, {pairs} other values): it is read as floats"
    return kept, (warning,)


def dequantised(nodes: Sequence[Node], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The float values of stored tensors that are dequantised, directly or after nodes that only move elements.

    Args:
        nodes: nodes of the file.
        tensors: stored tensors by name (protobuf).

    Returns:
        name of the stored tensor -> a tensor of float32 (protobuf) of the same name and shape; without tensors whose
        numbers are not in the file, those of more than `MAX_ELEMENTS` elements, and weights of products: nothing
        depends on the size of their numbers.
    """
    same = {node.outputs[0]: node.inputs[0] for node in nodes if plain(node) == "DequantizeLinear"}
    reads = [(node.kind, i, same.get(name, name)) for node in nodes for i, name in enumerate(node.inputs)]
    matrices = {name for kind, i, name in reads if i in MATRIX_POSITIONS.get(kind, ())}
    made = {name: node for node in nodes for name in node.outputs}
    known = dict[str, set[str]]()
    found = dict[str, Any]()
    for node in nodes:
        by = [tensors.get(name) for name in node.inputs[1:] if name]
        if plain(node) != "DequantizeLinear" or not by or not all(t is not None and has_data(t) for t in by):
            continue
        scales = [np.asarray(numpy_helper.to_array(t)).astype(np.float32) for t in by]
        # If rows were moved before the dequantisation, the table can be scaled only if all rows have the same scale.
        is_whole = all(each.size == 1 for each in scales)
        names = _origins(node.inputs[0], made, known) if is_whole else {node.inputs[0]}
        for name in sorted((names & tensors.keys()) - found.keys() - matrices):
            if has_data(tensors[name]) and prod(tensors[name].dims) <= MAX_ELEMENTS:
                value = _scaled(numpy_helper.to_array(tensors[name]), scales, node.attributes)
                if value is not None:
                    found[name] = numpy_helper.from_array(value, name)
                    found[name].metadata_props.extend(tensors[name].metadata_props)
    return found


def _scaled(integers: Value, scales: Sequence[Value], attributes: Mapping[str, Any]) -> Value | None:
    """The dequantised values of integers, as float32; None if a scale or a zero point has an unsuitable shape.

    Args:
        integers: the stored tensor.
        scales: its scale, and its zero point if there is one.
        attributes: those of its `DequantizeLinear`.
    """
    spread = [found for each in scales if (found := _spread(each, integers.shape, attributes)) is not None]
    if len(spread) < len(scales):
        return None
    value = integers.astype(np.float32)
    if len(spread) > 1:
        value = value - spread[1]
    with np.errstate(over="ignore"):  # of masks of the lowest number
        return np.asarray(value * spread[0], np.float32)


def _spread(given: Value, shape: tuple[int, ...], attributes: Mapping[str, Any]) -> Value | None:
    """Brings a scale or zero point into a shape that broadcasts to that of the quantised tensor.

    Returns:
        the scale or zero point; None if its shape is unsuitable.
    """
    if given.size == 1:
        return given.reshape(())
    axis, block = int(attributes.get("axis", 1)), int(attributes.get("block_size", 0))
    if not -len(shape) <= axis < len(shape):
        return None
    axis %= len(shape)
    if given.ndim == 1 and given.size == shape[axis]:
        return given.reshape([-1 if i == axis else 1 for i in range(len(shape))])
    if block < 1 or given.ndim != len(shape):
        return None
    spread = np.repeat(given, block, axis)
    spread = spread[(slice(None),) * axis + (slice(shape[axis]),)]
    return spread if spread.shape == shape else None


def _computes_with_integers(node: Node) -> ModelError:
    return refuse(
        f"operator {node.name or node.outputs[0]} computes with integers, which cannot be trained",
        node.kind,
        "Hand in the model as it was before it was quantised.",
    )


def _read_as_floats(node: Node) -> str:
    """The float dtype to which a BitCast reinterprets its operand; empty for any other node."""
    dtype = DTYPES.get(int(node.attributes.get("to", 0)), "") if node.kind == "BitCast" else ""
    return dtype if dtype.startswith(("float", "bfloat")) else ""


@dataclass(frozen=True, slots=True)
class _Scaled:
    """The weights that a file computes from stored integers by conversion and scaling."""

    casts: Mapping[str, str]
    """Result of a Cast to floats -> its dtype."""
    kept: Mapping[str, str]
    """Result of a node that scales such a weight or subtracts its zero point -> the operand that is the weight."""


def _scaled_weights(nodes: list[Node], made: Mapping[str, Node], stored: Mapping[str, Stored]) -> _Scaled:
    """The scaled weights of a file: operands of products that are computed from stored tensors only, and tables."""
    known: dict[str, bool] = {}
    pending = [
        node.inputs[i]
        for node in nodes
        for i in MATRIX_POSITIONS.get(node.kind, ())
        if i < len(node.inputs) and _is_stored(node.inputs[i], made, stored, known)
    ]
    pending += _scaled_rows(nodes, made, stored)
    casts, sizes, readers = dict[str, str](), dict[str, int](), dict[str, list[str]]()
    while pending:
        name = pending.pop()
        node = made.get(name)
        if node is None:
            continue
        if node.kind in UNPACKING_KINDS:
            raise _computes_with_integers(node)
        for given in node.inputs[: 1 if node.kind in LOOK_UPS else None]:
            if given not in readers:
                pending.append(given)
            readers.setdefault(given, []).append(name)
        weights = [stored[n] for n in _origins(node.inputs[0], made, {}) & stored.keys()] if node.kind == "Cast" else []
        dtype = DTYPES.get(int(node.attributes.get("to", 0)), "") if weights else ""
        if dtype.startswith(("float", "bfloat")) and all(
            w.dtype in SMALL_INTEGERS and len(w.shape) > 1 and prod(w.shape) > 1 for w in weights
        ):
            casts[name], sizes[name] = dtype, max(prod(w.shape) for w in weights)
    kept: dict[str, str] = {}
    reached = set[str]()
    # Zero points are stored integers, too: the weight is the operand that is computed from the largest tensor.
    for cast in sorted(casts, key=lambda name: (-sizes[name], name)):
        pending = [cast]
        while pending:
            given = pending.pop()
            for name in readers.get(given, ()):
                if made[name].kind in ("Mul", "Div", "Sub", "Add"):
                    kept.setdefault(name, given)
                if name not in reached:
                    reached.add(name)
                    pending.append(name)
    weights_alone = {n: d for n, d in casts.items() if any(kept.get(r, n) == n for r in readers.get(n, [n]))}
    return _Scaled(weights_alone, kept)


def _scaled_rows(nodes: list[Node], made: Mapping[str, Node], stored: Mapping[str, Stored]) -> list[str]:
    """Results of scaling rows that are looked up in stored matrices of small integers."""
    tables = {
        name
        for name, given in stored.items()
        if given.dtype in SMALL_INTEGERS and len(given.shape) > 1 and given.kind != "BUFFER"
    }
    found = [node for node in nodes if node.kind in LOOK_UPS and node.inputs[0] in tables]
    places = {name for node in found for name in node.inputs[1:2]}
    # Each row may have its own scale, which is looked up at the same indices.
    known = {
        node.outputs[0]: True
        for node in nodes
        if node.kind in LOOK_UPS and node.inputs[0] in stored and places.intersection(node.inputs[1:])
    }
    rows, scaled = {node.outputs[0] for node in found}, []
    for node in nodes if rows else ():
        if (
            node.kind in MOVING_KINDS | SCALING_KINDS
            and not rows.isdisjoint(node.inputs)
            and all(_is_stored(name, made, stored, known) for name in node.inputs if name)
        ):
            rows.update(node.outputs)
            scaled += node.outputs if node.kind in ("Mul", "Div") else []
    return scaled


def _is_stored(name: str, made: Mapping[str, Node], stored: Mapping[str, Stored], known: dict[str, bool]) -> bool:
    """Whether a tensor is computed from stored tensors only, by kinds that convert integers to weights.

    Args:
        name: name of the tensor.
        made: tensor name -> the node that computes it.
        stored: the stored tensors.
        known: results of earlier calls, to which those of this one are added.
    """
    pending, begun = [name], set[str]()
    while pending:
        current = pending[-1]
        node = made.get(current)
        if current in known:
            pending.pop()
        elif current in stored or node is None or node.kind not in MOVING_KINDS | SCALING_KINDS | UNPACKING_KINDS:
            known[current] = current in stored
        elif current not in begun:
            begun.add(current)
            pending += [n for n in node.inputs if n and n not in begun]
        else:
            known[current] = all(known.get(n, False) for n in node.inputs if n)
    return known[name]


def _origins(name: str, made: Mapping[str, Node], known: dict[str, set[str]]) -> set[str]:
    """The tensors from which a tensor's elements come, through operators that only move elements.

    Args:
        name: name of the tensor.
        made: tensor name -> the node that computes it.
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
