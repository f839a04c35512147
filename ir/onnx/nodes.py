"""Protobuf to plain records: nodes in canonical order with local functions expanded, values, metadata."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from onnx import numpy_helper

from ir.build import MAX_VALUE_ELEMENTS
from ir.onnx.costs import stated_costs
from ir.onnx.guard import refuse
from ir.operators import Value

DTYPES: Mapping[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 16: "bfloat16", 17: "float8",
    18: "float8", 19: "float8", 20: "float8",
}  # fmt: skip
"""`TensorProto.DataType` -> name."""

KIND_KEY = "pkg.torch.export.graph_signature.InputSpec.kind"
SCOPE_KEY = "pkg.torch.onnx.name_scopes"
FOLDED_KEY = "pkg.onnxscript.optimizer.folded_from"
"""On a value that the exporter's optimiser computed: the names of what it was computed from."""


@dataclass
class Node:
    """One node of the file."""

    kind: str
    """Operator type; `domain.Type` outside the standard domain."""
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]
    name: str = ""
    scope: str = ""
    opset: int = 0
    costs: dict[str, float] = field(default_factory=dict)
    """What the file states; see `ir.onnx.costs`."""


@dataclass
class Stored:
    """A tensor that stands in the file: its declaration, and its value where it is small."""

    shape: tuple[int, ...]
    dtype: str
    value: Value | None = None
    kind: str = ""
    """PARAMETER, BUFFER or empty: what the exporter said."""


@dataclass
class Declared:
    """An input, an output or an inner value with a declared type; symbolic dims are strings."""

    shape: tuple[int | str, ...] | None
    dtype: str
    kind: str = ""


@dataclass
class Source:
    """A parsed file."""

    name: str
    nodes: list[Node]
    inputs: dict[str, Declared]
    """Graph inputs that are not initializers."""
    stored: dict[str, Stored]
    outputs: dict[str, Declared]
    declared: dict[str, Declared] = field(default_factory=dict)
    has_metadata: bool = False
    """Whether the exporter marked parameters."""


def dtype_name(number: int) -> str:
    """Name of a `TensorProto.DataType`.

    Raises:
        ModelError: the type is not supported.
    """
    if number not in DTYPES:
        raise refuse("a tensor has an unsupported type", number, "Export with ordinary numeric types.")
    return DTYPES[number]


def _metadata(proto: Any) -> dict[str, str]:
    return {p.key: p.value for p in proto.metadata_props}


def scope_of(text: str) -> str:
    """Module path from the exporter's list of name scopes; its last entry is the node itself."""
    names = _names(text)
    return names[-2] if len(names) > 1 else ""


_TEXTS = re.compile(r"""\[(?:'[^'\\]*'|"[^"\\]*"|, )*\]""")
_TEXT = re.compile(r"""'([^'\\]*)'|"([^"\\]*)\"""")


def _names(text: str) -> list[str]:
    """A list of plain strings written as Python writes it; empty if it is none."""
    if not isinstance(text, str) or len(text) > 20_000 or not _TEXTS.fullmatch(text):
        return []
    return [single or double for single, double in _TEXT.findall(text)]


def path_scope(name: str) -> str:
    """Module path from a node name of PyTorch's older exporter: `/h.0/attn/c_attn/MatMul`.

    Children of an nn.Sequential repeat its name, as in `/features/features.0/features.0.1/Relu`.
    """
    if not name.startswith("/"):
        return ""
    parts: list[str] = []
    for part in name.split("/")[1:-1]:
        if parts and part.startswith(parts[-1] + "."):
            parts.pop()
        parts.append(part)
    return ".".join(parts)


def small_value(tensor: Any) -> Value | None:
    """The value of a tensor of at most `MAX_VALUE_ELEMENTS` elements; larger ones are never read.

    A float tensor without any data is a weight that was stripped: it has no value either.

    Raises:
        ModelError: the stored bytes do not match the dims.
    """
    count = 1
    for size in tensor.dims:
        count *= size
    if count > MAX_VALUE_ELEMENTS or dtype_name(tensor.data_type) in ("string", "float8", "complex64"):
        return None
    if count and dtype_name(tensor.data_type).startswith(("float", "bfloat")) and not _has_data(tensor):
        return None
    try:
        value: Value = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, RuntimeError) as error:
        raise refuse("a stored tensor does not match its dims", f"{tensor.name}: {error}", "Export again.") from None
    return value


DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")


def _has_data(tensor: Any) -> bool:
    return any(len(getattr(tensor, name)) for name in DATA_FIELDS)


def _attribute(proto: Any, given: Mapping[str, Any]) -> Any:
    """A plain value; tensors stay protobuf, references take the caller's value."""
    if proto.ref_attr_name:
        return given.get(proto.ref_attr_name)
    kind = proto.type
    if kind == onnx.AttributeProto.INT:
        return proto.i
    if kind == onnx.AttributeProto.FLOAT:
        return proto.f
    if kind == onnx.AttributeProto.STRING:
        return proto.s.decode("utf-8", "replace")
    if kind == onnx.AttributeProto.INTS:
        return tuple(proto.ints)
    if kind == onnx.AttributeProto.FLOATS:
        return tuple(proto.floats)
    if kind == onnx.AttributeProto.STRINGS:
        return tuple(s.decode("utf-8", "replace") for s in proto.strings)
    if kind == onnx.AttributeProto.TENSOR:
        return proto.t
    if kind in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        raise refuse(
            "control flow (If, Loop, Scan) is not supported",
            proto.name,
            "Export with the branch or loop resolved: a training graph is a straight line.",
        )
    raise refuse("an attribute has an unsupported type", proto.name, "Export with standard operators.")


class _Reader:
    def __init__(self, model: onnx.ModelProto) -> None:
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.nodes: list[Node] = []
        self.fresh = 0

    def read(
        self,
        protos: Iterable[Any],
        opsets: Mapping[str, int],
        names: Mapping[str, str] | None,
        given: Mapping[str, Any],
        prefix: str,
        scope: str,
    ) -> None:
        """Appends nodes; inside a function `names` maps formal to actual names and `given` holds attributes."""
        local = dict(names or {})

        def renamed(name: str) -> str:
            if names is None or not name:
                return name
            return local.setdefault(name, f"{prefix}{name}")

        for proto in protos:
            attributes = {a.name: _attribute(a, given) for a in proto.attribute}
            attributes = {k: v for k, v in attributes.items() if v is not None}
            inputs = [renamed(n) for n in proto.input]
            outputs = [renamed(n) for n in proto.output]
            metadata = _metadata(proto)
            own_scope = scope_of(metadata.get(SCOPE_KEY, "")) or scope or path_scope(proto.name)
            key = (proto.domain, proto.op_type, proto.overload)
            function = self.functions.get(key)
            if function is not None:
                self._expand(function, inputs, outputs, attributes, own_scope)
                continue
            standard = proto.domain in ("", "ai.onnx")
            self.nodes.append(
                Node(
                    kind=proto.op_type if standard else f"{proto.domain}.{proto.op_type}",
                    inputs=inputs,
                    outputs=outputs,
                    attributes=attributes,
                    name=(prefix + proto.name) if proto.name else "",
                    scope=own_scope,
                    opset=opsets.get("" if standard else proto.domain, 0),
                    costs=stated_costs(metadata, proto.name or proto.op_type),
                )
            )

    def _expand(
        self, function: Any, inputs: list[str], outputs: list[str], attributes: dict[str, Any], scope: str
    ) -> None:
        given = {a.name: _attribute(a, {}) for a in function.attribute_proto}
        given.update(attributes)
        actual = inputs + [""] * (len(function.input) - len(inputs))
        names = dict(zip(function.input, actual, strict=False))
        names.update(zip(function.output, outputs, strict=False))
        names = {k: v for k, v in names.items() if v or k in function.input}
        self.fresh += 1
        self.read(function.node, _opsets(function), names, given, f"{function.name}_{self.fresh}/", scope)


def _opsets(proto: Any) -> dict[str, int]:
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}


def in_order(nodes: list[Node], known: set[str]) -> list[Node]:
    """Nodes so that each reads only what is known or written before; ties go by position in the file (Kahn).

    Raises:
        ModelError: the graph has a cycle.
    """
    producer = {name: i for i, node in enumerate(nodes) for name in node.outputs if name}
    waiting = [0] * len(nodes)
    readers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for name in {n for n in node.inputs if n and n in producer and n not in known}:
            waiting[i] += 1
            readers[producer[name]].append(i)
    ready = [i for i, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[Node] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(nodes[index])
        for reader in readers[index]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        stuck = next(node for i, node in enumerate(nodes) if waiting[i] > 0)
        raise refuse(
            "the graph has a cycle",
            stuck.name or stuck.outputs[0] if stuck.outputs else stuck.kind,
            "Export again: a forward graph has no cycle.",
        )
    return order


def declared(value: Any) -> Declared:
    """The type of a value; a dim without size or name is named after its place.

    Raises:
        ModelError: it is no tensor.
    """
    if not value.type.HasField("tensor_type"):
        if value.type.WhichOneof("value") is None:
            return Declared(None, "float32")
        raise refuse("a value is not a tensor", value.name, "Export with tensors only (no sequences or maps).")
    tensor = value.type.tensor_type
    shape: tuple[int | str, ...] | None = None
    if tensor.HasField("shape"):
        shape = tuple(
            d.dim_param or f"{value.name}.{i}" if d.WhichOneof("value") != "dim_value" else int(d.dim_value)
            for i, d in enumerate(tensor.shape.dim)
        )
    dtype = dtype_name(tensor.elem_type) if tensor.elem_type else "float32"
    return Declared(shape, dtype, _metadata(value).get(KIND_KEY, ""))


def _folded_parameters(values: Iterable[Any], stored: dict[str, Stored]) -> list[Node]:
    """Weights that the exporter's optimiser transposed or looked up at export lost their mark: gives it back.

    Returns:
        Transposes of parameters that are stored as well (a tied head), so that they count once.
    """
    nodes = []
    for value in values:
        given = stored.get(value.name)
        names = _names(_metadata(value).get(FOLDED_KEY, "")) if given is not None else []
        # Parameters have dotted names, the exporter's own values have not.
        sources = [n for n in names if "." in n]
        if given is None or given.kind or not sources or not given.dtype.startswith(("float", "bfloat")):
            continue
        source = stored.get(sources[0])
        if len(names) == 1 and source is not None and source.shape == given.shape[::-1] and len(given.shape) == 2:
            nodes.append(Node("Transpose", [sources[0]], [value.name], {"perm": (1, 0)}))
            del stored[value.name]
            continue
        given.kind, given.value = "PARAMETER", None
    return nodes


def read_model(model: onnx.ModelProto, *, needs_values: bool = True) -> Source:
    """The records of a checked model; without values where only the roles of tensors are asked.

    Raises:
        ModelError: control flow, cycles, unsupported types.
    """
    graph = model.graph
    reader = _Reader(model)
    reader.read(graph.node, _opsets(model), None, {}, "", "")
    inner = {v.name: declared(v) for v in graph.value_info}
    stored: dict[str, Stored] = {}
    for tensor in graph.initializer:
        kind = _metadata(tensor).get(KIND_KEY, "") or (inner[tensor.name].kind if tensor.name in inner else "")
        is_read = needs_values and kind not in ("PARAMETER", "BUFFER")
        value = small_value(tensor) if is_read else None
        stored[tensor.name] = Stored(tuple(tensor.dims), dtype_name(tensor.data_type), value, kind)
    made = _folded_parameters(graph.value_info, stored)
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
    return Source(
        name=graph.name,
        nodes=made + in_order(reader.nodes, {n for node in made for n in node.outputs} | set(stored) | set(inputs)),
        inputs=inputs,
        stored=stored,
        outputs={v.name: declared(v) for v in graph.output},
        declared=inner,
        has_metadata=marked,
    )
