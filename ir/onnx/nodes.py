"""Protobuf to plain records: nodes in canonical order with local functions expanded, values, metadata."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from ir.build import MAX_VALUE_ELEMENTS
from ir.onnx.control import Branch, bags, free_names, graphs
from ir.onnx.costs import stated_costs
from ir.onnx.guard import refuse
from ir.operators import Value

BAGS = "#Bags"
"""Kind of the loop of an embedding bag: rows, offsets and, where the rows are places, the table."""

DTYPES: Mapping[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 16: "bfloat16", 17: "float8",
    18: "float8", 19: "float8", 20: "float8",
}  # fmt: skip
"""`TensorProto.DataType` -> name."""

PYTORCH = "pytorch"
"""Name of the producer whose exporters' habits are known: what they merge, fold and rename is given back."""
KIND_KEY = "pkg.torch.export.graph_signature.InputSpec.kind"
SCOPE_KEY = "pkg.torch.onnx.name_scopes"
COMMON_BUFFERS = frozenset(
    {"inv_freq", "original_inv_freq", "position_ids", "token_type_ids", "relative_position_index",
     "relative_coords_table", "running_mean", "running_var", "num_batches_tracked"}
)  # fmt: skip
"""Names that modules give to tensors that are not trained, where the exporter no longer says so."""
FILLED_KEY, CONTENT_KEY, TURNED_KEY = "automap.filled", "automap.content", "automap.turned"
"""On a weight that was stripped: "1" if all its elements were equal; a number that weights of equal elements share; the
one that a weight equal to its transpose has."""
FOLDED_KEY = "pkg.onnxscript.optimizer.folded_from"
"""On a value that the exporter's optimiser computed: the names of what it was computed from."""


STATE_POSITIONS: Mapping[str, tuple[int, ...]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2), "LayerNormalization": (1, 2), "Gather": (0,),
    "BatchNormalization": (1, 2, 3, 4), "InstanceNormalization": (1, 2), "GroupNormalization": (1, 2), "PRelu": (1,),
    "LSTM": (1, 2, 3), "GRU": (1, 2, 3), "RNN": (1, 2, 3), "MatMul": (1,), "Transpose": (0,),
}  # fmt: skip
"""Operands that only what a module holds can be, where they are graph inputs with a name of their own."""


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
    label: str = ""
    """What the exporter called the node inside its module."""


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
    names_state: bool = False
    """Whether stored tensors bear the names of the module's parameters and buffers, all but those called `onnx::`
    (PyTorch's older exporter)."""


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


def scope_of(names: list[str]) -> str:
    """Module path from the exporter's list of name scopes; its last entry is the node itself."""
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
    if count and dtype_name(tensor.data_type).startswith(("float", "bfloat")) and not has_data(tensor):
        return None
    try:
        value: Value = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, RuntimeError) as error:
        raise refuse("a stored tensor does not match its dims", f"{tensor.name}: {error}", "Export again.") from None
    return value


DATA_FIELDS = ("float_data", "int32_data", "string_data", "int64_data", "raw_data", "double_data", "uint64_data")


def has_data(tensor: Any) -> bool:
    """Whether the numbers of a tensor stand in the file."""
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
            "a node with a subgraph is not supported",
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
            inputs = [renamed(n) for n in proto.input]
            outputs = [renamed(n) for n in proto.output]
            metadata = _metadata(proto)
            path = _names(metadata.get(SCOPE_KEY, ""))
            own_scope, label = scope_of(path) or scope or path_scope(proto.name), path[-1] if path else ""
            if proto.op_type in ("If", "Loop", "Scan") and proto.domain in ("", "ai.onnx"):
                self._control(proto, inputs, outputs, renamed, (opsets, names, local, given, prefix, own_scope))
                continue
            attributes = {a.name: _attribute(a, given) for a in proto.attribute}
            attributes = {k: v for k, v in attributes.items() if v is not None}
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
                    label=label,
                )
            )

    def _control(
        self, proto: Any, inputs: list[str], outputs: list[str], renamed: Callable[[str], str], around: tuple[Any, ...]
    ) -> None:
        """An If is kept with its branches, the loop of an embedding bag as what it computes; others are refused."""
        opsets, *_, prefix, scope = around
        name = (prefix + proto.name) if proto.name else ""
        if proto.op_type == "If":
            captured = [renamed(n) for sub in graphs(proto) for n in free_names(sub)]
            branches = {a.name: self._branch(a.g, around, renamed) for a in proto.attribute}
            self.nodes.append(
                Node("If", [inputs[0], *dict.fromkeys(captured)], outputs, branches, name, scope, opsets.get("", 0))
            )
            return
        found = bags(proto) if proto.op_type == "Loop" else None
        if found is not None:
            read = [renamed(found.rows), renamed(found.offsets), renamed(found.table)]
            attributes = {"reduction": found.reduction, "keepdims": int(found.keeps_dim)}
            self.nodes.append(Node(BAGS, read, outputs[-1:], attributes, name, scope, opsets.get("", 0)))
            return
        raise refuse(
            f"control flow is not supported: a {proto.op_type} that cannot be resolved",
            proto.name or (outputs[0] if outputs else proto.op_type),
            "Export with the loop written out, as torch.export does: a training graph is a straight line.",
        )

    def _branch(self, graph: Any, around: tuple[Any, ...], renamed: Callable[[str], str]) -> Branch:
        opsets, names, local, given, prefix, scope = around

        def read() -> tuple[list[Node], dict[str, Stored]]:
            inner = _Reader.__new__(_Reader)
            inner.functions, inner.nodes, inner.fresh = self.functions, [], self.fresh
            inner.read(graph.node, opsets, None if names is None else local, given, prefix, scope)
            self.fresh = inner.fresh
            stored = {
                renamed(t.name): Stored(tuple(t.dims), dtype_name(t.data_type), small_value(t))
                for t in graph.initializer
            }
            return inner.nodes, stored

        return Branch(read, [renamed(v.name) for v in graph.output])

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
    copies: dict[tuple[str, tuple[int, ...]], str] = {}
    for value in values:
        given = stored.get(value.name)
        names = _names(_metadata(value).get(FOLDED_KEY, "")) if given is not None else []
        # Parameters have dotted names, the exporter's own values have not.
        sources = [n for n in names if "." in n and n.rpartition(".")[2] not in COMMON_BUFFERS]
        if given is None or given.kind or not sources or not given.dtype.startswith(("float", "bfloat")):
            continue
        source = stored.get(sources[0])
        if len(names) == 1 and source is not None and source.shape == given.shape[::-1] and len(given.shape) == 2:
            nodes.append(Node("Transpose", [sources[0]], [value.name], {"perm": (1, 0)}))
            del stored[value.name]
            continue
        # A layer that runs several times has its weight transposed once a run.
        original = copies.setdefault((",".join(names), given.shape), value.name)
        if original != value.name and len(names) == 1 and len(given.shape) == 2:
            nodes.append(Node("Identity", [original], [value.name], {}))
            del stored[value.name]
            continue
        given.kind, given.value = "PARAMETER", None
    return nodes


def _is_sibling(a: str, b: str) -> bool:
    """Whether two module paths differ by numbers only: copies of one layer, whose fresh weights are equal."""
    return a != b and re.sub(r"\d+", "#", a) == re.sub(r"\d+", "#", b)


def _reader_scopes(nodes: Iterable[Node]) -> dict[str, str]:
    """The module of the first reader of each tensor."""
    found: dict[str, str] = {}
    for node in nodes:
        for name in node.inputs:
            found.setdefault(name, node.scope)
    return found


def _unmerged(
    nodes: list[Node], stored: dict[str, Stored], inputs: dict[str, Declared], tensors: Mapping[str, Any]
) -> list[Node]:
    """PyTorch's older exporter stores equal tensors once and reads the others through an Identity of their name.

    A tied parameter has one name only, so that each such Identity is a parameter of its own (two fresh biases of
    zeros, say).

    Returns:
        the nodes without those; `stored` and `inputs` hold the parameters again.
    """
    kept = []
    scopes = _reader_scopes(n for n in nodes if not n.name.startswith("Identity_"))
    for node in nodes:
        source, name = node.inputs[0] if node.inputs else "", node.outputs[0] if node.outputs else ""
        # A transposed copy (`onnx::MatMul_7`) that equals another is the same weight again, unless it is fresh.
        is_copy = (
            name.startswith("onnx::")
            and source in tensors
            and not is_filled(tensors[source])
            and not _is_sibling(scopes.get(source, ""), scopes.get(name, ""))
        )
        if node.kind != "Identity" or node.scope or not node.name.startswith("Identity_") or is_copy:
            kept.append(node)
        elif source in stored:
            stored[name] = replace(stored[source])
        elif source in inputs:
            inputs[name] = replace(inputs[source])
        else:
            kept.append(node)
    return kept


def _mark_weights(nodes: Iterable[Node], inputs: dict[str, Declared]) -> None:
    """Tells weights from data in a file of PyTorch's older exporter without stored parameters.

    It lists the data first, then what the module holds; the first input that is read as a weight ends the data.
    """
    read: dict[str, set[tuple[str, int]]] = {}
    for node in nodes:
        for i, name in enumerate(node.inputs):
            if name in inputs:
                read.setdefault(name, set()).add((node.kind, i))
    names = list(inputs)
    first = next(
        (
            k
            for k, name in enumerate(names)
            if inputs[name].dtype.startswith(("float", "bfloat"))
            and ("." in name or "::" in name)
            and any(i in STATE_POSITIONS.get(kind, ()) for kind, i in read.get(name, ()))
        ),
        len(names),
    )
    for name in names[first:]:
        is_float = inputs[name].dtype.startswith(("float", "bfloat"))
        is_statistic = any(kind == "BatchNormalization" and i > 2 for kind, i in read.get(name, ()))
        inputs[name].kind = "PARAMETER" if is_float and not is_statistic else "BUFFER"
    if first < len(names):
        for name in names[:first]:
            inputs[name].kind = "USER_INPUT"


def is_filled(tensor: Any) -> bool:
    """Whether all elements are equal (a fresh bias or scale); a stripped file says it in metadata."""
    if not has_data(tensor):
        return _metadata(tensor).get(FILLED_KEY) == "1"
    raw = tensor.raw_data
    if not raw:
        value = numpy_helper.to_array(tensor).reshape(-1)
        return bool((value == value[:1]).all())
    width = len(raw) // max(prod(tensor.dims), 1)
    return bool(raw == raw[:width] * (len(raw) // max(width, 1)))


def content(tensor: Any, *, turned: bool = False) -> object:
    """What is equal for tensors of equal numbers (of the transposed matrix, if `turned`); None where it is unknown."""
    if not has_data(tensor):
        return _metadata(tensor).get(TURNED_KEY if turned else CONTENT_KEY)
    value = numpy_helper.to_array(tensor)
    return np.ascontiguousarray(value.T if turned else value).tobytes()


def _separate(nodes: list[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> None:
    """PyTorch's newer exporter stores equal tensors once: fresh scales and biases of several modules are one.

    A filled parameter that several modules read is given back to each of them under its own name, any other to copies
    of the layer that it belongs to (`layers.0.fc`, `layers.1.fc`): one that is really tied holds random numbers and
    has readers of different kinds, or is read by one module again.
    """
    readers: dict[str, list[tuple[Node, int]]] = {}
    for node in nodes:
        for i, name in enumerate(node.inputs):
            if name in stored and stored[name].kind == "PARAMETER":
                readers.setdefault(name, []).append((node, i))
    for name, places in readers.items():
        if len({node.scope for node, _ in places}) < 2 or name not in tensors:
            continue
        fresh = is_filled(tensors[name])
        owner, _, leaf = name.rpartition(".")
        first = owner if any(node.scope == owner for node, _ in places) else places[0][0].scope
        for node, i in places:
            if node.scope != first and (fresh or _is_sibling(node.scope, first)):
                own = f"{node.scope}.{leaf}"
                while own in stored and stored[own].shape != stored[name].shape:
                    own += "_"
                stored.setdefault(own, replace(stored[name]))
                node.inputs[i] = own


def _alias_copies(nodes: list[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> None:
    """A layer that runs several times has its weight transposed at export once a run: the copies are one."""
    first: dict[tuple[int, tuple[int, ...], object], str] = {}
    alias: dict[str, str] = {}
    scopes = _reader_scopes(nodes)
    for name, given in stored.items():
        if not name.startswith("onnx::") or len(given.shape) < 2 or name not in tensors:
            continue
        same = content(tensors[name])
        if same is None:
            continue
        key = (tensors[name].data_type, given.shape, same)
        other = first.setdefault(key, name)
        siblings = _is_sibling(scopes.get(name, ""), scopes.get(other, ""))
        if other != name and not siblings and not is_filled(tensors[name]):
            alias[name] = first[key]
    for node in nodes if alias else ():
        node.inputs[:] = [alias.get(n, n) for n in node.inputs]
    for name in alias:
        del stored[name]


def _channels(node: Node, weight: tuple[int | str, ...] | None) -> tuple[int | str, ...] | None:
    """The shape of what has one number an output channel."""
    if weight is None or len(weight) < 2:
        return None
    if node.kind == "ConvTranspose":
        return (int(weight[1]) * int(node.attributes.get("group", 1)),)
    return (weight[0] if node.kind == "Conv" or node.attributes.get("transB") else weight[1],)


def _unfolded(
    nodes: list[Node], stored: dict[str, Stored], inputs: Mapping[str, Declared], *, marked: bool
) -> list[Node]:
    """Gives back the batch normalisations that PyTorch's exporters fold into convolutions in evaluation mode.

    The older one renames weight and bias to `onnx::Conv_N` (and only then); whether the convolution had a bias of its
    own cannot be seen: none is assumed. The newer one leaves the name of the normalisation's operator on the node and
    calls a bias that was not there before `WEIGHT_bias`.
    """
    found = []
    for node in nodes:
        weight, bias = ([*node.inputs[1:], "", ""])[:2]
        if marked:
            is_folded = node.kind in ("Conv", "ConvTranspose", "Gemm") and "batch_norm" in node.label
            has_bias = bool(bias) and not bias.endswith("weight_bias")
        else:
            is_folded = node.kind == "Conv" and all(n.startswith("onnx::Conv_") for n in (weight, bias))
            has_bias = False
        # A bias of zeros is dropped: the channels are then those of the weight.
        known = bias or weight
        if not is_folded or not all(n in stored or n in inputs for n in (weight, known)):
            found.append(node)
            continue
        norm = node.scope if marked else f"{weight}.norm"
        held = stored[known] if known in stored else inputs[known]
        shape = _channels(node, held.shape) if not bias else held.shape
        if shape is None or any(isinstance(s, str) for s in shape):
            found.append(node)
            continue
        names = [f"{norm}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
        for name in names:
            kind = "BUFFER" if "running" in name else "PARAMETER"
            stored[name] = Stored(tuple(int(s) for s in shape), held.dtype, None, kind)
        for name in (weight, bias) if has_bias else (weight,):
            if name in stored:
                stored[name].kind, stored[name].value = "PARAMETER", None
        before = f"{node.outputs[0]}#folded"
        scope = weight.rpartition(".")[0] if marked else node.scope
        found.append(
            replace(node, inputs=node.inputs[: 3 if has_bias else 2], outputs=[before], scope=scope or node.scope)
        )
        found.append(
            Node(
                "BatchNormalization",
                [before, *names],
                node.outputs[:1],
                {},
                f"{node.name}#norm",
                node.scope,
                node.opset,
            )
        )
    return found


def _tied(nodes: list[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> list[Node]:
    """Weights that are stored once more, transposed (a tied head): PyTorch's older exporter does that.

    Returns:
        Transposes of the weights in place of the copies, which leave `stored`.
    """
    _alias_copies(nodes, stored, tensors)
    matrices = [n for n, s in stored.items() if len(s.shape) == 2 and s.dtype.startswith("float") and n in tensors]
    copies = {n: stored[n].shape for n in matrices if n.startswith("onnx::")}
    wanted = set(copies.values())
    originals: dict[tuple[tuple[int, ...], object], str] = {}
    for name in matrices:
        if name not in copies and stored[name].shape[::-1] in wanted and not is_filled(tensors[name]):
            turned = content(tensors[name], turned=True)
            if turned is not None:
                originals[(stored[name].shape[::-1], turned)] = name
    made: list[Node] = []
    for name, shape in copies.items() if originals else ():
        original = originals.get((shape, content(tensors[name])))
        if original is not None:
            made.append(Node("Transpose", [original], [name], {"perm": (1, 0)}))
            del stored[name]
    return made


def read_model(model: onnx.ModelProto, *, needs_values: bool = True) -> Source:
    """The records of a checked model; without values where only the roles of tensors are asked.

    Raises:
        ModelError: control flow, cycles, unsupported types.
    """
    graph = model.graph
    reader = _Reader(model)
    reader.read(graph.node, _opsets(model), None, {}, "", "")
    inner = {v.name: declared(v) for v in graph.value_info if v.type.WhichOneof("value") in (None, "tensor_type")}
    stored: dict[str, Stored] = {}
    for tensor in graph.initializer:
        kind = _metadata(tensor).get(KIND_KEY, "") or (inner[tensor.name].kind if tensor.name in inner else "")
        is_read = needs_values and kind not in ("PARAMETER", "BUFFER")
        value = small_value(tensor) if is_read else None
        stored[tensor.name] = Stored(tuple(tensor.dims), dtype_name(tensor.data_type), value, kind)
    made = _folded_parameters(graph.value_info, stored)
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
    nodes = reader.nodes
    if model.producer_name == PYTORCH:
        if marked:
            _separate(nodes, stored, tensors)
        else:
            nodes = _unmerged(nodes, stored, inputs, tensors)
            if not any(s.dtype.startswith(("float", "bfloat")) for s in stored.values()):
                _mark_weights(nodes, inputs)
        nodes = _unfolded(nodes, stored, inputs, marked=marked)
        if not marked:
            made += _tied(nodes, stored, tensors)
    return Source(
        name=graph.name,
        nodes=made + in_order(nodes, {n for node in made for n in node.outputs} | set(stored) | set(inputs)),
        inputs=inputs,
        stored=stored,
        outputs={v.name: declared(v) for v in graph.output},
        declared=inner,
        has_metadata=marked,
        names_state=model.producer_name == PYTORCH and not marked,
    )
