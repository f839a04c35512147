"""Pre-flight on raw bytes, before any ONNX utility sees them.

The ONNX checker is no guard: it accepts cycles, functions that double at every level, and dims of 2^62. This walk is
linear in the size of the upload and stops at the first bound that is crossed. It knows nothing of operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ir.errors import ModelError, ModelTooExpensive

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on an upload; the defaults admit a 70-billion-parameter transformer (10 MB, 5,699 nodes) with room."""

    max_bytes: int = 64 * MIB
    max_nodes: int = 100_000
    """After expansion of functions."""
    max_tensors: int = 400_000
    max_attributes: int = 2_000_000
    max_depth: int = 8
    """Of subgraphs."""
    max_elements: int = 1 << 48
    """Of one tensor."""
    max_dim: int = 1 << 40
    max_name_bytes: int = 4096


class _Counter:
    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.nodes = 0
        self.tensors = 0
        self.attributes = 0

    def add(self, *, nodes: int = 0, tensors: int = 0, attributes: int = 0) -> None:
        self.nodes += nodes
        self.tensors += tensors
        self.attributes += attributes
        for count, bound, what in (
            (self.nodes, self.limits.max_nodes, "nodes"),
            (self.tensors, self.limits.max_tensors, "tensors"),
            (self.attributes, self.limits.max_attributes, "attributes"),
        ):
            if count > bound:
                raise too_large(f"more than {bound} {what}", count)


def refuse(message: str, value: object, repair: str) -> ModelError:
    """A refusal of the model file."""
    return ModelError(message, field="model", value=value, repair=repair)


def too_large(message: str, value: object) -> ModelTooExpensive:
    """A refusal for size."""
    return ModelTooExpensive(
        f"the model has {message}",
        field="model",
        value=value,
        repair="Submit a smaller graph, or ask the operator of the service to raise the limit.",
    )


def parse(data: bytes, limits: Limits | None = None) -> onnx.ModelProto:
    """Parses and checks an upload.

    Raises:
        ModelError: not an ONNX model, external data, cycles, undefined names.
        ModelTooExpensive: a bound is crossed.
    """
    limits = limits or Limits()
    if not data:
        raise refuse("the file is empty", "0 bytes", "Send the bytes of an ONNX file.")
    if len(data) > limits.max_bytes:
        raise ModelTooExpensive(
            f"the file is larger than {limits.max_bytes // MIB} MiB",
            field="model",
            value=f"{len(data)} bytes",
            repair="Strip the weights first: only shapes are needed (`automap strip model.onnx`).",
        )
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, ValueError, RuntimeError) as error:
        raise refuse(
            "the file is not an ONNX model or is truncated",
            f"{len(data)} bytes, {str(error)[:80]}",
            "Send the complete file as the exporter wrote it.",
        ) from None
    if not model.HasField("graph") or not (model.ir_version or len(model.opset_import)):
        raise refuse(
            "the file is not an ONNX model", f"{len(data)} bytes without a graph", "Send the bytes of an ONNX file."
        )
    check(model, limits)
    return model


def check(model: onnx.ModelProto, limits: Limits) -> None:
    """The walk itself; see `parse`."""
    if len(model.training_info):
        raise refuse(
            "the file holds training graphs",
            f"{len(model.training_info)} training_info",
            "Export the forward graph only.",
        )
    counter = _Counter(limits)
    _walk_graph(model.graph, counter, limits)
    for function in model.functions:
        counter.add(nodes=len(function.node))
        for node in function.node:
            _walk_node(node, counter, limits, 1)
        for attribute in function.attribute_proto:
            _walk_attribute(attribute, counter, limits, 1)
    if len(model.functions):
        _check_functions(model, limits)
    _check_names(model.graph)


def _walk_graph(graph: Any, counter: _Counter, limits: Limits, depth: int = 0) -> None:
    if depth > limits.max_depth:
        raise too_large(f"subgraphs nested deeper than {limits.max_depth}", depth)
    counter.add(nodes=len(graph.node), tensors=len(graph.initializer) + len(graph.input) + len(graph.value_info))
    for tensor in graph.initializer:
        _check_tensor(tensor, limits)
    for sparse in graph.sparse_initializer:
        counter.add(tensors=1)
        _check_sparse(sparse, limits)
    for values in (graph.input, graph.output, graph.value_info):
        for value in values:
            if value.type.HasField("tensor_type"):
                _check_dims([d.dim_value for d in value.type.tensor_type.shape.dim], value.name, limits)
    for node in graph.node:
        _walk_node(node, counter, limits, depth)


def _walk_node(node: Any, counter: _Counter, limits: Limits, depth: int) -> None:
    counter.add(attributes=len(node.attribute), tensors=len(node.output))
    for name in (*node.input, *node.output, node.name, node.op_type, node.domain):
        if not isinstance(name, str):  # protobuf hands out bytes where a string is no UTF-8
            raise refuse("a name is not text", repr(name)[:40], "Export again.")
        if len(name) > limits.max_name_bytes:
            raise too_large(f"a name longer than {limits.max_name_bytes} characters", name[:40])
    for attribute in node.attribute:
        _walk_attribute(attribute, counter, limits, depth)


def _walk_attribute(attribute: Any, counter: _Counter, limits: Limits, depth: int) -> None:
    kind = attribute.type
    if kind in (onnx.AttributeProto.INT, onnx.AttributeProto.FLOAT, onnx.AttributeProto.STRING):
        return
    if attribute.HasField("t"):
        _check_tensor(attribute.t, limits)
    for tensor in attribute.tensors:
        counter.add(tensors=1)
        _check_tensor(tensor, limits)
    if attribute.HasField("sparse_tensor"):
        _check_sparse(attribute.sparse_tensor, limits)
    for sparse in attribute.sparse_tensors:
        counter.add(tensors=1)
        _check_sparse(sparse, limits)
    if attribute.HasField("g"):
        _walk_graph(attribute.g, counter, limits, depth + 1)
    for graph in attribute.graphs:
        _walk_graph(graph, counter, limits, depth + 1)


def _check_sparse(sparse: Any, limits: Limits) -> None:
    _check_tensor(sparse.values, limits)
    _check_tensor(sparse.indices, limits)
    _check_dims(sparse.dims, "a sparse tensor", limits)


def _check_tensor(tensor: Any, limits: Limits) -> None:
    if tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.external_data):
        raise refuse(
            "the file refers to external data",
            tensor.name or "a tensor",
            "Send the graph without weights (`automap strip model.onnx`); they are never needed.",
        )
    _check_dims(tensor.dims, tensor.name, limits)


def _check_dims(dims: Sequence[int], name: str, limits: Limits) -> None:
    count = 1
    for size in dims:
        if not 0 <= size < limits.max_dim:
            raise refuse("a tensor has an absurd dim", f"{name}: {size}", "Check the exporter: dims must be sizes.")
        # An unknown dim is stored as 0; it must not hide the others.
        count *= size or 1
        if count > limits.max_elements:
            raise refuse(
                "a tensor is absurdly large",
                f"{name}: {list(dims)[:8]}",
                "Check the exporter: no real tensor is that large.",
            )


def _subgraph_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _subgraph_nodes(attribute.g.node)
            for graph in attribute.graphs:
                yield from _subgraph_nodes(graph.node)


def _check_functions(model: onnx.ModelProto, limits: Limits) -> None:
    """Expanded size by dynamic programming over the calls, each function once, without recursion."""
    bodies = {(f.domain, f.name, f.overload): f for f in model.functions}
    calls: dict[tuple[str, str, str], list[tuple[str, str, str]]] = {}
    own: dict[tuple[str, str, str], int] = {}
    for key, function in bodies.items():
        found = [(n.domain, n.op_type, n.overload) for n in _subgraph_nodes(function.node)]
        own[key] = len(found)
        calls[key] = [c for c in found if c in bodies]
    size: dict[tuple[str, str, str], int] = {}
    for root in bodies:
        stack = [(root, iter(calls[root]))]
        open_keys = {root}
        while stack:
            key, rest = stack[-1]
            step = next((c for c in rest if c not in size), None)
            if step is None:
                stack.pop()
                open_keys.discard(key)
                size[key] = own[key] + sum(size[c] for c in calls[key])
            elif step in open_keys:
                raise refuse("a function calls itself", step[1], "Export without recursive functions.")
            else:
                open_keys.add(step)
                stack.append((step, iter(calls[step])))
    total = 0
    for node in _subgraph_nodes(model.graph.node):
        total += 1 + size.get((node.domain, node.op_type, node.overload), 0)
        if total > limits.max_nodes:
            raise too_large(f"more than {limits.max_nodes} nodes once its functions are expanded", "functions")


def _check_names(graph: Any) -> None:
    """Every name that a node of the main graph reads must be written or given somewhere, once."""
    defined = {i.name for i in graph.input} | {t.name for t in graph.initializer}
    defined |= {s.values.name for s in graph.sparse_initializer}
    for node in graph.node:
        for name in node.output:
            if name and name in defined:
                raise refuse("a tensor is written twice", name, "Check the exporter: names must be unique.")
            defined.add(name)
    for node in graph.node:
        for name in node.input:
            if name and name not in defined:
                raise refuse(
                    "a node reads a tensor that nothing defines",
                    name,
                    "Send the complete graph, with every input and initializer declared.",
                )
    for value in graph.output:
        if value.name not in defined:
            raise refuse("an output is computed by nothing", value.name, "Send the complete graph.")
