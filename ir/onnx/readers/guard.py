"""Pre-flight on raw bytes, before any ONNX utility sees them.

The ONNX checker is no guard: it accepts cycles, functions that double at every level, and dims of 2^62. This walk is
linear in the size of the upload, counts before it looks, and stops at the first bound that is crossed. Of operators it
knows nothing; of what their results would weigh, `ir.operators.base` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ir.errors import ModelTooExpensive, refuse

MIB = 1 << 20
MIN_OPSET = 7
"""Older operators broadcast by an attribute and mean other things by the same names."""
MAX_OPSET: int = onnx.defs.onnx_opset_version()

FunctionKey = tuple[str, str, str]
"""Domain, name, overload."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds on an upload; the defaults admit a 70-billion-parameter transformer (10 MB, 5,700 nodes) eight times."""

    max_bytes: int = 64 * MIB
    max_nodes: int = 50_000
    """Subgraphs included, functions expanded."""
    max_tensors: int = 200_000
    """Inputs, initializers, results and declared values."""
    max_items: int = 1_000_000
    """Operands, attributes and their numbers, dims and metadata entries, after expansion of functions."""
    max_depth: int = 8
    """Of subgraphs."""
    max_calls: int = 64
    """Of functions within functions."""
    max_operands: int = 4096
    """Inputs or outputs of one node, and outputs of the graph."""
    max_values: int = 65_536
    """Numbers or texts in one attribute."""
    max_rank: int = 32
    max_elements: int = 1 << 48
    """Of one tensor."""
    max_dim: int = 1 << 40
    max_name_bytes: int = 4096


@dataclass
class _Counter:
    limits: Limits
    nodes: int = 0
    tensors: int = 0
    items: int = 0

    def add(self, *, nodes: int = 0, tensors: int = 0, items: int = 0) -> None:
        self.nodes += nodes
        self.tensors += tensors
        self.items += items
        limits = self.limits
        if self.nodes > limits.max_nodes:
            raise too_large(f"more than {limits.max_nodes} nodes", self.nodes)
        if self.tensors > limits.max_tensors:
            raise too_large(f"more than {limits.max_tensors} tensors", self.tensors)
        if self.items > limits.max_items:
            raise too_large(f"more than {limits.max_items} operands, attribute values and dims", self.items)


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
        ModelError: not an ONNX model, external data, undefined or doubled names, unknown operator sets.
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
    except MemoryError:
        raise _needs_memory(data) from None
    except (DecodeError, ValueError, RuntimeError) as error:
        if "alloc" in str(error):  # protobuf's own words for memory that it was not given
            raise _needs_memory(data) from None
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


def _needs_memory(data: bytes) -> ModelTooExpensive:
    return ModelTooExpensive(
        "the file unpacks to many times its size",
        field="model",
        value=f"{len(data)} bytes",
        repair="Send the file as the exporter wrote it, without its weights (`automap strip model.onnx`).",
    )


def check(model: onnx.ModelProto, limits: Limits) -> None:
    """The walk itself; see `parse`."""
    if len(model.training_info):
        raise refuse(
            "the file holds training graphs",
            f"{len(model.training_info)} training_info",
            "Export the forward graph only.",
        )
    counter = _Counter(limits)
    counter.add(items=len(model.opset_import) + len(model.metadata_props), nodes=len(model.functions))
    _check_opsets(model)
    graph = model.graph
    if max(len(graph.node), *(len(f.node) for f in model.functions), 0) > limits.max_nodes:
        raise too_large(f"more than {limits.max_nodes} nodes", len(graph.node))
    if len(model.functions):
        _check_functions(model, limits)
    _walk_graph(graph, counter)
    for function in model.functions:
        _walk_function(function, counter)
    if len(graph.output) > limits.max_operands:
        raise too_large(f"more than {limits.max_operands} outputs", len(graph.output))
    given = [t.name for t in graph.initializer] + [s.values.name for s in graph.sparse_initializer]
    _check_unique(given, "an initializer")
    _check_unique([i.name for i in graph.input], "an input")
    _check_defined({*given, *(i.name for i in graph.input)}, graph.node, [o.name for o in graph.output])


def _check_opsets(model: onnx.ModelProto) -> None:
    """Versions of the standard operator set: there, known, and one only."""
    for holder in (model, *model.functions):
        versions = {o.version for o in holder.opset_import if o.domain in ("", "ai.onnx")}
        if len(versions) > 1:
            raise refuse("the file names two versions of the operator set", sorted(versions), "Export again.")
        for version in versions:
            if not MIN_OPSET <= version <= MAX_OPSET:
                raise refuse(
                    "the version of the operator set is not known",
                    f"opset {version}",
                    f"Export with an opset from {MIN_OPSET} to {MAX_OPSET} (`onnx.version_converter.convert_version`).",
                )
    if not any(o.domain in ("", "ai.onnx") for o in model.opset_import):
        used = next((n for n in model.graph.node if n.domain in ("", "ai.onnx")), None)
        if used is not None:
            raise refuse(
                "the file does not say which version of the operator set it uses",
                used.op_type or "no opset_import",
                f"Write opset_import, with a version from {MIN_OPSET} to {MAX_OPSET}.",
            )


def _walk_function(function: Any, counter: _Counter) -> None:
    counter.add(nodes=len(function.node), items=len(function.input) + len(function.output) + len(function.opset_import))
    names = [function.domain, function.name, function.overload, *function.input, *function.output]
    _check_texts(names, counter.limits)
    _walk_values(function.value_info, counter)
    for node in function.node:
        _walk_node(node, counter, 1)
    counter.add(items=len(function.attribute_proto))
    for attribute in function.attribute_proto:
        _walk_attribute(attribute, counter, 1)
    _check_unique(function.input, "an input of a function")
    _check_defined(set(function.input), function.node, function.output)


def _walk_graph(graph: Any, counter: _Counter, depth: int = 0) -> None:
    if depth > counter.limits.max_depth:
        raise too_large(f"subgraphs nested deeper than {counter.limits.max_depth}", depth)
    counter.add(
        nodes=len(graph.node),
        tensors=len(graph.initializer) + len(graph.sparse_initializer),
        items=len(graph.quantization_annotation) + len(graph.metadata_props),
    )
    _check_texts([graph.name], counter.limits)
    for tensor in graph.initializer:
        _check_tensor(tensor, counter)
    for sparse in graph.sparse_initializer:
        _check_sparse(sparse, counter)
    for values in (graph.input, graph.output, graph.value_info):
        _walk_values(values, counter)
    for node in graph.node:
        _walk_node(node, counter, depth)


def _walk_values(values: Any, counter: _Counter) -> None:
    counter.add(tensors=len(values))
    for value in values:
        _check_texts([value.name], counter.limits)
        if value.HasField("type"):
            _walk_type(value.type, value.name, counter)


def _walk_type(declared: Any, name: str, counter: _Counter) -> None:
    """Shapes of tensors, also within sequences, optionals and maps (their nesting is bounded by protobuf's own)."""
    kind = declared.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        dims = getattr(declared, kind).shape.dim
        counter.add(items=len(dims))
        _check_texts([d.dim_param for d in dims], counter.limits)
        _check_dims([d.dim_value for d in dims], name, counter.limits)
    elif kind in ("sequence_type", "optional_type"):
        counter.add(items=1)
        _walk_type(getattr(declared, kind).elem_type, name, counter)
    elif kind == "map_type":
        counter.add(items=1)
        _walk_type(declared.map_type.value_type, name, counter)


def _walk_node(node: Any, counter: _Counter, depth: int) -> None:
    limits = counter.limits
    operands = max(len(node.input), len(node.output))
    if operands > limits.max_operands:
        raise too_large(f"a node of more than {limits.max_operands} operands", operands)
    counter.add(
        tensors=len(node.output),
        items=len(node.input) + len(node.output) + len(node.attribute) + len(node.metadata_props),
    )
    _check_texts([*node.input, *node.output, node.name, node.op_type, node.domain, node.overload], limits)
    if not node.op_type:
        raise refuse("a node has no operator type", node.name or list(node.output), "Export again.")
    if len(node.attribute) > 1:
        _check_unique([a.name for a in node.attribute], "an attribute of a node")
    for attribute in node.attribute:
        _walk_attribute(attribute, counter, depth)


_REPEATED = ("ints", "floats", "strings", "tensors", "sparse_tensors", "graphs", "type_protos")
_TENSORS = ("tensors", "sparse_tensors", "graphs", "type_protos", "t", "sparse_tensor", "g", "tp")


def _walk_attribute(attribute: Any, counter: _Counter, depth: int) -> None:
    """Whatever the attribute holds is looked at, also what its `type` denies."""
    limits = counter.limits
    _check_texts([attribute.name, attribute.ref_attr_name], limits)
    for descriptor, held in attribute.ListFields():
        name = descriptor.name
        if name in _REPEATED:
            if len(held) > limits.max_values:
                raise too_large(f"an attribute of more than {limits.max_values} values", attribute.name)
            counter.add(items=len(held))
        if name not in _TENSORS:
            continue
        for one in held if name in _REPEATED else (held,):
            if name in ("t", "tensors"):
                counter.add(tensors=1)
                _check_tensor(one, counter)
            elif name in ("sparse_tensor", "sparse_tensors"):
                _check_sparse(one, counter)
            elif name in ("g", "graphs"):
                _walk_graph(one, counter, depth + 1)
            else:
                _walk_type(one, attribute.name, counter)


def _check_sparse(sparse: Any, counter: _Counter) -> None:
    counter.add(tensors=2, items=len(sparse.dims))
    _check_tensor(sparse.values, counter)
    _check_tensor(sparse.indices, counter)
    _check_dims(sparse.dims, sparse.values.name or "a sparse tensor", counter.limits)


_DATA = ("float_data", "int32_data", "string_data", "int64_data", "double_data", "uint64_data")


def _check_tensor(tensor: Any, counter: _Counter) -> None:
    counter.add(items=len(tensor.dims))
    _check_texts([tensor.name], counter.limits)
    if tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.external_data):
        raise refuse(
            "the file refers to external data",
            tensor.name or "a tensor",
            "Send the graph without weights (`automap strip model.onnx`); they are never needed.",
        )
    count = _check_dims(tensor.dims, tensor.name, counter.limits)
    for name in _DATA:
        # Two numbers an element hold complex ones.
        if len(getattr(tensor, name)) > 2 * count:
            raise refuse("a stored tensor holds more values than its dims say", tensor.name, "Export again.")


def _check_dims(dims: Sequence[int], name: str, limits: Limits) -> int:
    """The number of elements, an unknown dim (0) counted as 1: it must not hide the others."""
    if len(dims) > limits.max_rank:
        raise refuse("a tensor has an absurd rank", f"{name}: rank {len(dims)}", "Check the exporter.")
    count = 1
    for size in dims:
        if not 0 <= size < limits.max_dim:
            raise refuse("a tensor has an absurd dim", f"{name}: {size}", "Check the exporter: dims must be sizes.")
        count *= size or 1
    if count > limits.max_elements:
        raise refuse(
            "a tensor is absurdly large",
            f"{name}: {list(dims)[:8]}",
            "Check the exporter: no real tensor is that large.",
        )
    return count


def _check_texts(texts: Sequence[str], limits: Limits) -> None:
    for text in texts:
        if not isinstance(text, str):  # protobuf hands out bytes where a string is no UTF-8
            raise refuse("a name is not text", repr(text)[:40], "Export again, with names in UTF-8.")
        if len(text) > limits.max_name_bytes:
            raise too_large(f"a name longer than {limits.max_name_bytes} characters", text[:40])


def _check_unique(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise refuse(f"{what} is given twice", name, "Check the exporter: names must be unique.")
        seen.add(name)


def _subgraph_nodes(nodes: Any) -> Iterator[Any]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _subgraph_nodes(attribute.g.node)
            for graph in attribute.graphs:
                yield from _subgraph_nodes(graph.node)


@dataclass
class _Expanded:
    """What a function becomes once every call in it is expanded."""

    nodes: int = 0
    items: int = 0
    depth: int = 0


def _items(node: Any) -> int:
    values = sum(len(a.ints) + len(a.floats) + len(a.strings) for a in node.attribute)
    return len(node.input) + len(node.output) + len(node.attribute) + values


def _check_functions(model: onnx.ModelProto, limits: Limits) -> None:
    """Expanded size by dynamic programming over the calls, each function once, without recursion.

    A function's size is its own nodes plus the sizes of those it calls: linear in the file, whatever it would grow to.
    """
    bodies: dict[FunctionKey, Any] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in bodies:
            raise refuse("a function is defined twice", function.name, "Check the exporter: names must be unique.")
        bodies[key] = function
    known: dict[FunctionKey, _Expanded] = {}
    for root in bodies:
        for key in _callees_first(root, bodies, known):
            known[key] = _expand(_subgraph_nodes(bodies[key].node), known, limits)
    _expand(_subgraph_nodes(model.graph.node), known, limits)


def _callees_first(
    root: FunctionKey, bodies: dict[FunctionKey, Any], known: dict[FunctionKey, _Expanded]
) -> Iterator[FunctionKey]:
    """`root` and all that it calls, each after those that it calls itself; `known` ones are left out."""

    def calls(key: FunctionKey) -> Iterator[FunctionKey]:
        for node in _subgraph_nodes(bodies[key].node):
            callee = (node.domain, node.op_type, node.overload)
            if callee in bodies:
                yield callee

    if root in known:
        return
    stack = [(root, calls(root))]
    is_open = {root}
    while stack:
        key, rest = stack[-1]
        step = next((c for c in rest if c not in known), None)
        if step is None:
            stack.pop()
            is_open.discard(key)
            yield key
        elif step in is_open:
            raise refuse("a function calls itself", step[1], "Export without recursive functions.")
        else:
            is_open.add(step)
            stack.append((step, calls(step)))


def _expand(nodes: Iterable[Any], known: dict[FunctionKey, _Expanded], limits: Limits) -> _Expanded:
    total, nothing = _Expanded(), _Expanded()
    for node in nodes:
        callee = known.get((node.domain, node.op_type, node.overload), nothing)
        total.nodes += 1 + callee.nodes
        total.items += _items(node) + callee.items
        total.depth = max(total.depth, 1 + callee.depth)
        if total.nodes > limits.max_nodes:
            raise too_large(f"more than {limits.max_nodes} nodes once its functions are expanded", "functions")
        if total.items > limits.max_items:
            raise too_large(f"more than {limits.max_items} operands once its functions are expanded", "functions")
        if total.depth > limits.max_calls:
            raise too_large(f"functions nested deeper than {limits.max_calls}", "functions")
    return total


def _check_defined(given: set[str], nodes: Any, outputs: Iterable[str]) -> None:
    """Every name that a node or the result reads must be written or given, and written once."""
    defined = given - {""}
    for node in nodes:
        for name in node.output:
            if name and name in defined:
                raise refuse("a tensor is written twice", name, "Check the exporter: names must be unique.")
            defined.add(name)
    defined.add("")
    for node in nodes:
        for name in node.input:
            if name not in defined:
                raise refuse(
                    "a node reads a tensor that nothing defines",
                    name,
                    "Send the complete graph, with every input and initializer declared.",
                )
    for name in outputs:
        if not name or name not in defined:
            raise refuse("an output is computed by nothing", name or "an output without name", "Send the whole graph.")
