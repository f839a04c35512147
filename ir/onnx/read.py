"""Reads a checked model into plain records: ordered nodes and tensors, with known exporter quirks repaired."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import onnx

from ir.errors import refuse
from ir.onnx.readers.declarations import declared
from ir.onnx.readers.nodes import (
    COMPUTED,
    FROZEN_KEY,
    KIND_KEY,
    MOST_SAID,
    PYTORCH,
    QUANTISED_KEY,
    UNREAD_KEY,
    Declared,
    Node,
    Reader,
    Source,
    Stored,
    dtype_name,
    metadata,
    opsets,
    small_value,
)
from ir.onnx.readers.order import in_order, needed
from ir.onnx.readers.roles import holds_weights, with_stored_constants
from ir.onnx.rewrites.caches import without_cache_branch, without_caches
from ir.onnx.rewrites.class_names import without_class_names
from ir.onnx.rewrites.computed_tables import computed_tables
from ir.onnx.rewrites.contributed import standard
from ir.onnx.rewrites.dropped_biases import restore_biases
from ir.onnx.rewrites.empty_parts import without_empty_parts
from ir.onnx.rewrites.equal_weights import separate_fresh, tied_heads
from ir.onnx.rewrites.exporter_quirks import folded_parameters, mark_weights, separate, tied, unfolded, unmerged
from ir.onnx.rewrites.folded_norms import restored_norms, seem_folded
from ir.onnx.rewrites.folded_products import folded_products, folded_sources, lost_layers
from ir.onnx.rewrites.masked_rows import all_rows
from ir.onnx.rewrites.masked_writes import Places, chosen_by_masks
from ir.onnx.rewrites.quantisation import dequantised, in_floats
from ir.onnx.rewrites.repeated_samples import note_periods
from ir.onnx.rewrites.routed_tokens import all_tokens
from ir.onnx.rewrites.stored_bands import stored_bands
from ir.onnx.rewrites.stored_rows import stored_rows
from ir.onnx.rewrites.training_graphs import without_gradients
from ir.onnx.rewrites.transposed_keys import separate_batch_and_heads
from ir.onnx.rewrites.unpooling import with_unpooling
from ir.onnx.rewrites.weights_as_inputs import mark_read_weights


def read_model(model: onnx.ModelProto, *, needs_values: bool = True) -> Source:
    """Reads a checked model into records.

    Args:
        model: parsed file that `ir.onnx.readers.guard` has checked.
        needs_values: whether the values of small constants are read; roles can be determined without them.

    Raises:
        ModelError: the model has unsupported control flow or types, or a cycle.
    """
    graph, is_pytorch = model.graph, model.producer_name == PYTORCH
    reader = Reader(model)
    reader.read(graph.node, opsets(model), None, {}, "", "")
    inner = {v.name: declared(v) for v in graph.value_info if v.type.WhichOneof("value") in (None, "tensor_type")}
    stored = _stored(graph, inner, needs_values=needs_values)
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    unmarked = {name for name in tensors if not stored[name].kind}
    results = {v.name for v in graph.input} | {name for node in graph.node for name in node.output}
    sources = folded_sources(graph.value_info)
    made = folded_products(sources, stored, tensors) if needs_values else []
    made += folded_parameters(graph, stored, results - stored.keys())
    if needs_values:
        made += stored_bands(stored, tensors)
    for sparse in graph.sparse_initializer:
        stored[sparse.values.name] = Stored(tuple(sparse.dims), dtype_name(sparse.values.data_type))
    inputs = _inputs(graph, stored)
    marked = _is_marked(inputs, stored)
    read, held, written, branches = without_cache_branch(reader.nodes, inputs, [v.name for v in graph.output])
    stored |= held
    read, written, caches = without_caches(read, inputs, written)
    written, forward = without_gradients(read, written)
    written, unnamed = without_class_names(read, written)
    read = needed(read, written)
    tensors |= dequantised(read, tensors) if needs_values else {}
    nodes, warnings = in_floats(standard(read), stored, marked=marked)
    nodes = with_unpooling(needed(without_empty_parts(nodes, stored), written), stored, inner, written)
    if needs_values:
        note_periods(nodes, stored, {name: tensors[name] for name in unmarked & stored.keys()})
    if not marked:
        nodes = restored_norms(with_stored_constants(nodes, stored), stored)
    reads = ((node.kind, i, name) for node in nodes for i, name in enumerate(node.inputs))
    for name in computed_tables(reads, {n: t for n, t in tensors.items() if n in stored and n in unmarked}):
        stored[name].kind = COMPUTED
    made += stored_rows(nodes, stored, {name: tensors[name] for name in unmarked & stored.keys()})
    if marked:
        separate(nodes, stored, tensors)
        restore_biases(graph, nodes, stored)
    elif is_pytorch:
        nodes = unmerged(nodes, stored, inputs, tensors)
        if not any(map(_is_float, stored.values())):
            warnings += mark_weights(nodes, inputs)
    elif not holds_weights(nodes, stored):
        mark_read_weights(nodes, inputs)
    if is_pytorch or marked:
        nodes = separate_batch_and_heads(unfolded(nodes, stored, inputs), stored)
    if not marked:
        made += tied(nodes, stored, tensors) if is_pytorch else []
        made += tied_heads(nodes, stored, tensors)
        separate_fresh(nodes, stored, tensors)
        warnings += () if is_pytorch else seem_folded(nodes, stored)
    warnings += lost_layers(sources, stored)
    said, frozen = _stated(model)
    ordered = in_order(nodes, {n for node in made for n in node.outputs} | set(stored) | set(inputs))
    if any(node.kind == "NonZero" for node in ordered):
        ordered, whole = _without_places(ordered, stored, tensors, written)
        warnings += whole
    return Source(
        name=graph.name,
        nodes=made + ordered,
        inputs=inputs,
        stored=stored,
        outputs=_outputs(graph, inner, written),
        declared=inner,
        has_metadata=marked,
        names_state=is_pytorch and not marked,
        warnings=(*branches, *caches, *forward, *unnamed, *warnings, *said),
        frozen=frozen,
    )


def _without_places(
    nodes: list[Node], stored: Mapping[str, Stored], tensors: Mapping[str, onnx.TensorProto], outputs: Sequence[str]
) -> tuple[list[Node], tuple[str, ...]]:
    """The nodes without the places of masks that are recognised, and warnings about what is priced instead."""
    nodes = chosen_by_masks(nodes, Places(nodes, stored, tensors), outputs)
    nodes, warnings = all_rows(nodes, Places(nodes, stored, tensors), outputs)
    return all_tokens(nodes, Places(nodes, stored, tensors), outputs), warnings


def _stored(graph: onnx.GraphProto, inner: Mapping[str, Declared], *, needs_values: bool) -> dict[str, Stored]:
    """The initializers of a graph by name; values of parameters and buffers are not read.

    Args:
        graph: the graph.
        inner: declarations of the graph's inner tensors, which may mark initializers as parameters or buffers.
        needs_values: see `read_model`.
    """
    stored: dict[str, Stored] = {}
    for tensor in graph.initializer:
        kind = metadata(tensor).get(KIND_KEY, "") or (inner[tensor.name].kind if tensor.name in inner else "")
        is_read = needs_values and kind not in ("PARAMETER", "BUFFER")
        value = small_value(tensor) if is_read else None
        stored[tensor.name] = Stored(tuple(tensor.dims), dtype_name(tensor.data_type), value, kind)
    return stored


def _inputs(graph: onnx.GraphProto, stored: Mapping[str, Stored]) -> dict[str, Declared]:
    """The inputs of a graph without initializers, which old files also list as inputs and may mark there."""
    inputs: dict[str, Declared] = {}
    for v in graph.input:
        given = declared(v)
        if v.name in stored:
            stored[v.name].kind = stored[v.name].kind or given.kind
        else:
            inputs[v.name] = given
    return inputs


def _outputs(graph: onnx.GraphProto, inner: Mapping[str, Declared], written: Sequence[str]) -> dict[str, Declared]:
    """The declarations of the outputs that are read; of inner tensors that became outputs, as far as there are any."""
    given = {v.name: declared(v) for v in graph.output if v.name in written}
    return {name: given.get(name) or inner.get(name) or Declared(None, "float32") for name in written}


def _is_float(tensor: Stored) -> bool:
    return tensor.dtype.startswith(("float", "bfloat"))


def _is_marked(inputs: Mapping[str, Declared], stored: Mapping[str, Stored]) -> bool:
    """Whether the exporter's marks of parameters are still in a file.

    The marks of weights are in the declarations of inner tensors, which other tools may drop or replace. The marks of
    inputs may then remain, but do not identify the weights.
    """
    kinds = {d.kind for d in inputs.values()} | {s.kind for s in stored.values()}
    if kinds & {"PARAMETER", "BUFFER"}:
        return True
    return "USER_INPUT" in kinds and not any(map(_is_float, stored.values()))


def _stated(model: onnx.ModelProto) -> tuple[tuple[str, ...], frozenset[str]]:
    """Warnings about parameters in the metadata of a file, and the names of its frozen parameters.

    Raises:
        ModelError: the names are not a JSON list of strings.
    """
    said, frozen = [], set[str]()
    for entry in model.metadata_props:
        # Files from AutoMAP versions without support for frozen parameters contain a warning about them.
        is_sentence = entry.key in (UNREAD_KEY, QUANTISED_KEY)
        if is_sentence or (entry.key == FROZEN_KEY and not entry.value.lstrip().startswith("[")):
            said.append(entry.value[:MOST_SAID])
        elif entry.key == FROZEN_KEY:
            try:
                names = json.loads(entry.value)
            except (ValueError, RecursionError):
                names = None
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                repair = 'Write the names of the parameters as a JSON list, such as ["encoder.weight"].'
                raise refuse(f"the metadata {FROZEN_KEY} cannot be read", entry.value[:MOST_SAID], repair)
            frozen.update(names)
    return tuple(said), frozenset(frozen)
