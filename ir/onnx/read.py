"""A checked model as records: nodes in order and tensors with their roles, after repairs of exporter quirks."""

from __future__ import annotations

import onnx

from ir.onnx.readers.declarations import declared
from ir.onnx.readers.nodes import (
    FROZEN_KEY,
    KIND_KEY,
    MOST_SAID,
    PYTORCH,
    UNREAD_KEY,
    Declared,
    Reader,
    Source,
    Stored,
    dtype_name,
    in_order,
    metadata,
    opsets,
    small_value,
)
from ir.onnx.readers.roles import with_stored_constants
from ir.onnx.rewrites.contributed import standard
from ir.onnx.rewrites.exporter_quirks import folded_parameters, mark_weights, separate, tied, unfolded, unmerged
from ir.onnx.rewrites.masked_writes import chosen_by_masks
from ir.onnx.rewrites.quantisation import in_floats
from ir.onnx.rewrites.turned_keys import turned_apart


def read_model(model: onnx.ModelProto, *, needs_values: bool = True) -> Source:
    """The records of a checked model.

    Args:
        model: parsed file that `ir.onnx.readers.guard` let through.
        needs_values: whether the values of small constants are read; not needed where only roles are of interest.

    Raises:
        ModelError: control flow, cycles, unsupported types.
    """
    graph = model.graph
    reader = Reader(model)
    reader.read(graph.node, opsets(model), None, {}, "", "")
    inner = {v.name: declared(v) for v in graph.value_info if v.type.WhichOneof("value") in (None, "tensor_type")}
    stored: dict[str, Stored] = {}
    for tensor in graph.initializer:
        kind = metadata(tensor).get(KIND_KEY, "") or (inner[tensor.name].kind if tensor.name in inner else "")
        is_read = needs_values and kind not in ("PARAMETER", "BUFFER")
        value = small_value(tensor) if is_read else None
        stored[tensor.name] = Stored(tuple(tensor.dims), dtype_name(tensor.data_type), value, kind)
    made = folded_parameters(graph.value_info, stored)
    tensors = {t.name: t for t in graph.initializer}
    for sparse in graph.sparse_initializer:
        stored[sparse.values.name] = Stored(tuple(sparse.dims), dtype_name(sparse.values.data_type))
    inputs: dict[str, Declared] = {}
    for v in graph.input:
        given = declared(v)
        if v.name in stored:
            stored[v.name].kind = stored[v.name].kind or given.kind
            continue
        inputs[v.name] = given
    marked = any(d.kind in ("PARAMETER", "BUFFER", "USER_INPUT") for d in inputs.values()) or any(
        s.kind in ("PARAMETER", "BUFFER") for s in stored.values()
    )
    nodes, warnings = in_floats(standard(reader.nodes), stored, marked=marked)
    if not marked:
        nodes = with_stored_constants(nodes, stored)
    if model.producer_name == PYTORCH:
        if marked:
            separate(nodes, stored, tensors)
        else:
            nodes = unmerged(nodes, stored, inputs, tensors)
            if not any(s.dtype.startswith(("float", "bfloat")) for s in stored.values()):
                mark_weights(nodes, inputs)
        nodes = turned_apart(unfolded(nodes, stored, inputs, marked=marked), stored)
        if not marked:
            made += tied(nodes, stored, tensors)
    ordered = in_order(nodes, {n for node in made for n in node.outputs} | set(stored) | set(inputs))
    return Source(
        name=graph.name,
        nodes=made + chosen_by_masks(ordered, stored, [v.name for v in graph.output]),
        inputs=inputs,
        stored=stored,
        outputs={v.name: declared(v) for v in graph.output},
        declared=inner,
        has_metadata=marked,
        names_state=model.producer_name == PYTORCH and not marked,
        warnings=(*warnings, *(p.value[:MOST_SAID] for p in model.metadata_props if p.key in (UNREAD_KEY, FROZEN_KEY))),
    )
