"""Converts protobuf to plain records: nodes with expanded local functions, values and metadata."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx
from onnx import numpy_helper

from ir.build import MAX_VALUE_ELEMENTS
from ir.errors import refuse
from ir.onnx.readers.annotations import stated_annotations
from ir.onnx.readers.control_flow import Body, Branch, all_graphs, bags, free_names, graphs, written
from ir.onnx.readers.stated_costs import stated_costs
from ir.operators import Value

BAGS = "#Bags"
"""Kind of the loop of an embedding bag; its operands are rows, offsets and, if the rows are indices, the table."""

DTYPES: Mapping[int, str] = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 16: "bfloat16", 17: "float8",
    18: "float8", 19: "float8", 20: "float8", 21: "uint4", 22: "int4", 23: "float4", 24: "float8", 25: "uint2",
    26: "int2",
}  # fmt: skip
"""`TensorProto.DataType` -> name."""
SMALL_INTEGERS = ("int16", "uint16", "int8", "uint8", "int4", "uint4", "int2", "uint2")
"""Dtypes of quantised weights; wider integers are counts and indices."""
WITHOUT_VALUES = ("string", "float8", "float4", "complex64", "uint4", "int4", "uint2", "int2")
"""Dtypes of stored tensors whose values are never read."""

UNKNOWN_DIM = -1
"""Size that TensorFlow and PaddlePaddle write for unknown dims; the standard leaves the size out."""
PYTORCH = "pytorch"
"""Producer whose exporters' quirks are known (`ir.onnx.rewrites.exporter_quirks`)."""
KIND_KEY = "pkg.torch.export.graph_signature.InputSpec.kind"
"""Metadata key of the kind of an input or initializer: PARAMETER, BUFFER, USER_INPUT ..."""
SCOPE_KEY = "pkg.torch.onnx.name_scopes"
"""Metadata key of the module path of a node."""
COMMON_BUFFERS = frozenset(
    {"cos_cached", "sin_cached", "freqs_cis", "position_ids", "token_type_ids", "relative_position_index",
     "relative_coords_table", "final_logits_bias", "e_score_correction_bias", "running_mean", "running_var",
     "num_batches_tracked"}
)  # fmt: skip
"""Names that are common for tensors that are not trained, for files whose exporter did not mark them."""


def is_common_buffer(name: str) -> bool:
    """Whether a tensor's name is common for tensors that are not trained.

    These are `COMMON_BUFFERS`, masks, and frequencies of rotary embeddings (of which Gemma has two, with prefixes).
    """
    # Copies of a tensor for single consumers have a number as suffix.
    own = name.rpartition(".")[2].partition("#")[0]
    return own in COMMON_BUFFERS or own.endswith(("mask", "inv_freq"))


FILLED_KEY = "automap.filled"
"""Metadata key of a stripped weight: "1" if all its elements were equal."""
CONTENT_KEY = "automap.content"
"""Metadata key of a stripped weight: a number that is the same for equal weights."""
TURNED_KEY = "automap.turned"
"""Metadata key of a stripped weight: the number of the weight that equals its transpose."""
COMPUTED_KEY = "automap.computed"
"""Metadata key of a stripped tensor: "1" if it was a mask or a table of cosines and sines."""
BAND_KEY = "automap.band"
"""Metadata key of a stripped tensor that was a mask: see `ir.onnx.rewrites.stored_bands.Band`, as a JSON list."""
REPEATS_KEY = "automap.repeats"
"""Metadata key of a stripped tensor that repeated itself: the numbers of `ir.onnx.rewrites.repeated_samples.periods`,
separated by blanks."""
ROWS_KEY = "automap.rows"
"""Metadata key of a stripped tensor that was the result of a look-up: number of rows of its table, see
`ir.onnx.rewrites.stored_rows`."""
RANK_KEY = "automap.rank"
"""Metadata key of a stripped product of a table and a weight: its rank, see `ir.onnx.rewrites.folded_products`."""
COMPUTED = "COMPUTED"
"""`Stored.kind` of a mask or a table of cosines and sines."""
UNREAD_KEY = "automap.unread_parameters"
"""Metadata key of a file: a warning about parameters of the network that its graph does not read."""
QUANTISED_KEY = "automap.quantised_weights"
"""Metadata key of a file: a warning about weights that are quantised according to the model's configuration."""
FROZEN_KEY = "automap.frozen_parameters"
"""Metadata key of a file: the names of parameters that are not trained, as a JSON list."""
MOST_SAID = 1000
"""Largest number of characters of such a warning; longer ones are cut (those that AutoMAP writes have some 300)."""
SIGNATURE_KEY = "pkg.torch.export.ExportedProgram.graph_signature"
"""Metadata key of a graph: what each input of the exported program is, one a line, such as `b_w: BUFFER target='w'`."""
FOLDED_KEY = "pkg.onnxscript.optimizer.folded_from"
"""Metadata key of a value that the exporter's optimiser folded: names of the tensors from which it was computed."""


STATE_POSITIONS: Mapping[str, tuple[int, ...]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2), "LayerNormalization": (1, 2), "Gather": (0,),
    "BatchNormalization": (1, 2, 3, 4), "InstanceNormalization": (1, 2), "GroupNormalization": (1, 2), "PRelu": (1,),
    "LSTM": (1, 2, 3), "GRU": (1, 2, 3), "RNN": (1, 2, 3), "MatMul": (1,), "Transpose": (0,),
}  # fmt: skip
"""Kind -> operand positions in which a graph input with a dotted name is a parameter or buffer of a module."""


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
    """Costs that the file states; see `ir.onnx.readers.stated_costs`."""
    annotations: tuple[tuple[str, int], ...] = ()
    """Constraints of the file's author on plans; see `ir.onnx.readers.annotations`."""
    label: str = ""
    """Name that the exporter gave the node inside its module."""


@dataclass
class Stored:
    """A tensor stored in the file: its declaration, and its value if it is small."""

    shape: tuple[int, ...]
    dtype: str
    value: Value | None = None
    kind: str = ""
    """PARAMETER or BUFFER, as marked by the exporter; empty if it is not marked."""
    origin: str = ""
    """Name of the parameter from which the exporter's optimiser computed it; empty if there is none."""
    periods: tuple[int, ...] = ()
    """Rows after which it repeats itself, see `ir.onnx.rewrites.repeated_samples`; empty if that is not known."""


@dataclass
class Declared:
    """An input, an output or an inner value with a declared type."""

    shape: tuple[int | str, ...] | None
    """Sizes of the dims, symbolic ones as strings; None if no shape is declared."""
    dtype: str
    kind: str = ""
    """PARAMETER, BUFFER, USER_INPUT ... as marked by the exporter; empty if it is not marked."""
    is_read_as_weight: bool = False
    """Whether `kind` follows from the operators that read an input; what the user states of it goes first."""


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
    """Whether stored tensors have the names of the module's parameters and buffers, except those called `onnx::`
    (PyTorch's older exporter)."""
    warnings: tuple[str, ...] = ()
    """Assumptions made while the file was read."""
    frozen: frozenset[str] = frozenset()
    """Names of parameters that are not trained; some may not be in the file."""

    @property
    def is_pytorch(self) -> bool:
        """Whether one of PyTorch's exporters wrote the file."""
        return self.has_metadata or self.names_state


def dtype_name(number: int) -> str:
    """Name of a `TensorProto.DataType`.

    Raises:
        ModelError: the type is not supported.
    """
    if number not in DTYPES:
        raise refuse("a tensor has an unsupported type", number, "Export with ordinary numeric types.")
    return DTYPES[number]


def metadata(proto: Any) -> dict[str, str]:
    """The key-value pairs of a message."""
    pairs = proto.metadata_props
    return {p.key: p.value for p in pairs} if pairs else {}


def scope_of(names: list[str]) -> str:
    """Module path from the exporter's list of name scopes; its last entry is the node itself."""
    return names[-2] if len(names) > 1 else ""


_TEXTS = re.compile(r"""\[(?:'[^'\\]*'|"[^"\\]*"|, )*\]""")
_TEXT = re.compile(r"""'([^'\\]*)'|"([^"\\]*)\"""")


def text_list(text: str) -> list[str]:
    """The strings in a list as Python prints it; empty if the text is no such list."""
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
    if count > MAX_VALUE_ELEMENTS or dtype_name(tensor.data_type) in WITHOUT_VALUES:
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
    """Whether the numbers of a tensor are stored in the file."""
    return any(len(getattr(tensor, name)) for name in DATA_FIELDS)


_PLAIN: Mapping[int, Callable[[Any], Any]] = {
    onnx.AttributeProto.INT: lambda proto: proto.i,
    onnx.AttributeProto.FLOAT: lambda proto: proto.f,
    onnx.AttributeProto.STRING: lambda proto: proto.s.decode("utf-8", "replace"),
    onnx.AttributeProto.INTS: lambda proto: tuple(proto.ints),
    onnx.AttributeProto.FLOATS: lambda proto: tuple(proto.floats),
    onnx.AttributeProto.STRINGS: lambda proto: tuple(s.decode("utf-8", "replace") for s in proto.strings),
    onnx.AttributeProto.TENSOR: lambda proto: proto.t,
}
"""Type of an attribute -> function that returns its plain value; tensors stay protobuf."""


def _attribute(proto: Any, given: Mapping[str, Any]) -> Any:
    """The plain value of an attribute; references to attributes of a function are looked up in `given`."""
    if proto.ref_attr_name:
        return given.get(proto.ref_attr_name)
    if proto.type in _PLAIN:
        return _PLAIN[proto.type](proto)
    if proto.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
        repair = "Export with the branch or loop resolved: a training graph is a straight line."
        raise refuse("a node with a subgraph is not supported", proto.name, repair)
    raise refuse("an attribute has an unsupported type", proto.name, "Export with standard operators.")


class Reader:
    """Collects the nodes of a model, with local functions expanded."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self.nodes: list[Node] = []
        self.fresh = 0
        self.loop = ""
        """Prefix of the names of tensors stored in the loop body that is being read; empty outside of loops."""

    def read(
        self,
        protos: Iterable[Any],
        opsets: Mapping[str, int],
        names: Mapping[str, str] | None,
        given: Mapping[str, Any],
        prefix: str,
        scope: str,
    ) -> None:
        """Appends nodes.

        Args:
            protos: nodes of a graph or of a function's body.
            opsets: domain -> version of its operator set.
            names: formal -> actual names inside a function; None outside of functions.
            given: attributes of the call, inside a function.
            prefix: prefix of the names that a function's body defines.
            scope: module path of the call, inside a function.
        """
        local = dict(names or {})

        def renamed(name: str) -> str:
            if names is None or not name:
                return name
            return local.setdefault(name, f"{prefix}{name}")

        for proto in protos:
            inputs, outputs = list(proto.input), list(proto.output)
            if names is not None:
                inputs, outputs = [renamed(n) for n in inputs], [renamed(n) for n in outputs]
            name, domain, kind = proto.name, proto.domain, proto.op_type
            notes = metadata(proto)
            path = text_list(notes.get(SCOPE_KEY, "")) if notes else []
            own_scope, label = scope_of(path) or scope or path_scope(name), path[-1] if path else ""
            standard = domain in ("", "ai.onnx")
            if standard and kind in ("If", "Loop", "Scan"):
                self._control(proto, inputs, outputs, renamed, (opsets, names, local, given, prefix, own_scope))
                continue
            attributes = {a.name: _attribute(a, given) for a in proto.attribute}
            attributes = {k: v for k, v in attributes.items() if v is not None}
            function = self.functions.get((domain, kind, proto.overload)) if self.functions else None
            if function is not None:
                self._expand(function, inputs, outputs, attributes, own_scope)
                continue
            self.nodes.append(
                Node(
                    kind=kind if standard else f"{domain}.{kind}",
                    inputs=inputs,
                    outputs=outputs,
                    attributes=attributes,
                    name=(prefix + name) if name else "",
                    scope=own_scope,
                    opset=opsets.get("" if standard else domain, 0),
                    costs=stated_costs(notes, name or kind) if notes else {},
                    annotations=stated_annotations(notes, name or kind) if notes else (),
                    label=label,
                )
            )

    def _control(
        self, proto: Any, inputs: list[str], outputs: list[str], renamed: Callable[[str], str], around: tuple[Any, ...]
    ) -> None:
        """Appends a control flow node: an If with its branches, a loop with its body, or an embedding bag."""
        opsets, *_, prefix, scope = around
        name = (prefix + proto.name) if proto.name else ""
        if proto.op_type == "If":
            captured = [renamed(n) for sub in graphs(proto) for n in free_names(sub)]
            branches = {a.name: self._branch(a, around, outputs[0]) for a in proto.attribute}
            self.nodes.append(
                Node("If", [inputs[0], *dict.fromkeys(captured)], outputs, branches, name, scope, opsets.get("", 0))
            )
            return
        found = bags(proto) if proto.op_type == "Loop" else None
        if found is not None:
            read = [renamed(found.rows), renamed(found.offsets), renamed(found.table)]
            attributes = {"reduction": found.reduction, "keepdims": int(found.keeps_dim)}
            self.nodes.append(Node(BAGS, read, [outputs[found.result]], attributes, name, scope, opsets.get("", 0)))
            return
        body = next(graphs(proto), None)
        if body is None or not outputs:
            raise refuse("a loop has no body or no result", proto.name or proto.op_type, "Export again.")
        outer_names = {n: renamed(n) for n in free_names(body)}
        attributes = {a.name: _attribute(a, {}) for a in proto.attribute if not a.HasField("g")}
        attributes["body"] = self._body(body, around, outer_names, proto.output[0])
        operands = [*inputs, *[""] * (len(body.input) - len(inputs)), *outer_names.values()]
        self.nodes.append(Node(proto.op_type, operands, outputs, attributes, name, scope, opsets.get("", 0)))

    def _body(self, graph: Any, around: tuple[Any, ...], captured: Mapping[str, str], label: str) -> Body:
        """The body of the loop that writes tensor `label`.

        Args:
            graph: protobuf of the body.
            around: arguments of `read` for the enclosing graph.
            captured: names that the body reads from the enclosing graph -> their actual names.
            label: first result of the loop, from which names inside the body are derived.
        """
        opsets, _, _, given, prefix, scope = around
        # All iterations of nested loops share the stored tensors of the inner body, hence names without a number.
        base = f"{self.loop or prefix}{label}/"
        own = {t.name: f"{base}{t.name}" for t in graph.initializer}
        stored = {
            own[t.name]: Stored(tuple(t.dims), dtype_name(t.data_type), small_value(t)) for t in graph.initializer
        }

        def read(operands: Sequence[str], number: int) -> tuple[list[Node], list[str]]:
            outer, self.nodes, around_loop, self.loop = self.nodes, [], self.loop, base
            here = f"{prefix}{label}/{number}/"
            names = {**captured, **own, **{v.name: n for v, n in zip(graph.input, operands, strict=True)}}
            self.read(graph.node, opsets, names, given, here, scope)
            nodes, self.nodes, self.loop = self.nodes, outer, around_loop
            return nodes, [names.get(v.name, f"{here}{v.name}") for v in graph.output]

        return Body(read, stored, [v.name for v in graph.input])

    @cached_property
    def shared(self) -> set[str]:
        """Names that several tensors of the file share, which is possible in different branches."""
        counted = Counter(v.name for v in self.model.graph.input)
        for graph in all_graphs(self.model):
            counted.update(written(graph))
        return {name for name, count in counted.items() if count > 1}

    def _branch(self, attribute: Any, around: tuple[Any, ...], label: str) -> Branch:
        """The branch in an attribute of the If node that writes tensor `label`."""
        opsets, _, local, given, prefix, scope = around
        graph, names = attribute.g, dict(local)
        for name in written(graph):
            names[name] = f"{label}/{attribute.name}/{name}" if name in self.shared else f"{prefix}{name}"

        def read() -> tuple[list[Node], dict[str, Stored]]:
            outer, self.nodes = self.nodes, []
            self.read(graph.node, opsets, names, given, prefix, scope)
            nodes, self.nodes = self.nodes, outer
            stored = {
                names[t.name]: Stored(tuple(t.dims), dtype_name(t.data_type), small_value(t)) for t in graph.initializer
            }
            return nodes, stored

        return Branch(read, [names.get(v.name, f"{prefix}{v.name}") for v in graph.output])

    def _expand(
        self, function: Any, inputs: list[str], outputs: list[str], attributes: dict[str, Any], scope: str
    ) -> None:
        given = {a.name: _attribute(a, {}) for a in function.attribute_proto}
        given.update(attributes)
        actual = inputs + [""] * (len(function.input) - len(inputs))
        given_names = dict(zip(function.input, actual, strict=False))
        results = list(zip(function.output, outputs, strict=False))
        # A result of the function that is one of its operands becomes an Identity.
        self.nodes += [Node("Identity", [given_names[k]], [v], {}) for k, v in results if v and k in given_names]
        names = {k: v for k, v in results if v} | given_names
        self.fresh += 1
        self.read(function.node, opsets(function), names, given, f"{function.name}_{self.fresh}/", scope)


def opsets(proto: Any) -> dict[str, int]:
    """Domain -> version of its operator set; the standard domain is empty."""
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}
