"""Parses and checks uploads, before any other code reads them.

The checker of ONNX does not suffice: it accepts cycles, functions whose expansion grows exponentially, and dims of
2^62. The checks here take time linear in the size of the upload, and stop at the first limit that is exceeded. They do
not depend on operators; `ir.operators.make` limits the sizes of operator results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from ir.errors import ModelError, ModelTooExpensive, refuse, too_expensive
from ir.onnx.readers.expansion import check_functions
from ir.onnx.readers.limits import Counter, Limits, check_size, too_large
from ir.onnx.readers.nodes import DATA_FIELDS, UNKNOWN_DIM

MIN_OPSET = 7
"""First supported version of the operator set; operators of older versions broadcast by an attribute."""
MAX_OPSET: int = onnx.defs.onnx_opset_version()
"""Last version of the operator set that the installed onnx knows."""

_EXPORT = "Export the model itself: `automap export-onnx FILE.py:FUNCTION -o model.onnx`."
OTHER_FILES = (
    (rb"version https://git-lfs", "a pointer of Git LFS", "Fetch the file itself: `git lfs pull`."),
    (rb"PK\x03\x04|\x80[\x02-\x05]", "a file of PyTorch's, or another archive or pickle", _EXPORT),
    (rb".{8}\{\"", "weights in the format safetensors", _EXPORT),
    (rb"GGUF", "weights in the format GGUF", _EXPORT),
    (rb".{4}TFL3", "a model of TensorFlow Lite", "Convert the model with tf2onnx."),
    (rb".{4}ORTM", "ONNX Runtime's own format", "Send the ONNX file that it was converted from."),
    (rb"\x89HDF", "HDF5, as Keras writes it", "Convert the model with tf2onnx."),
    (rb"\x1f\x8b", "a file that gzip has packed", "Unpack it with gunzip."),
    (
        rb"-{2,}[\w'()+,./:=?-]{1,70}\r\n",
        "a form",
        "Send the bytes of the file alone: curl --data-binary @FILE, not -F.",
    ),
    (rb"\s*<\s*ir_version\b", "ONNX as text", "Write it as ONNX: onnx.save(onnx.parser.parse_model(text), PATH)."),
    (rb"\s*<", "a page of HTML or XML", "Download the file itself."),
    (rb"\s*\{", "JSON", "Send the ONNX file in its binary form."),
)
"""Other file formats: pattern that the beginning of the file matches, description of the format, repair."""


def parse(data: bytes, limits: Limits | None = None) -> onnx.ModelProto:
    """Parses and checks an upload.

    Raises:
        ModelError: the bytes are no ONNX model, or the model has external data, undefined or duplicate names, or an
            unknown operator set.
        ModelTooExpensive: a limit is exceeded.
    """
    limits = limits or Limits()
    if not data:
        raise refuse("the file is empty", "0 bytes", "Send the bytes of an ONNX file.")
    check_size(len(data), limits.max_bytes)
    model = message(data)
    if not model.HasField("graph") or not (model.ir_version or len(model.opset_import)):
        repair = "Send the bytes of an ONNX file."
        raise refuse("the file is not an ONNX model", f"{len(data)} bytes without a graph", repair)
    check(model, limits)
    return model


def message(data: bytes) -> onnx.ModelProto:
    """The message that protobuf reads from the bytes of a file, unchecked.

    Raises:
        ModelError: the bytes are no such message.
        ModelTooExpensive: the message takes more memory than there is.
    """
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except MemoryError:
        raise _needs_memory(data) from None
    except (DecodeError, ValueError, RuntimeError) as error:
        if "alloc" in str(error):  # in protobuf's message for a failed allocation
            raise _needs_memory(data) from None
        raise not_onnx(data, str(error)) from None
    return model


def not_onnx(data: bytes | memoryview, why: str = "") -> ModelError:
    """The error for bytes that are no ONNX model; it names their format if their beginning identifies it.

    Args:
        data: the bytes.
        why: protobuf's error message.
    """
    size = f"{len(data)} bytes"
    for beginning, what, repair in OTHER_FILES:
        if re.match(beginning, bytes(data[:64]), re.DOTALL):
            return refuse(f"the file is not an ONNX model but {what}", size, repair)
    value = f"{size}, {why[:80]}" if why else size
    return refuse(
        "the file is not an ONNX model or is truncated", value, "Send the complete file as the exporter wrote it."
    )


def _needs_memory(data: bytes) -> ModelTooExpensive:
    repair = "Send the file as the exporter wrote it, without its weights (`automap strip model.onnx`)."
    return too_expensive("the file unpacks to many times its size", f"{len(data)} bytes", repair)


def check(model: onnx.ModelProto, limits: Limits) -> None:
    """Checks a parsed model; see `parse` for the errors raised."""
    if len(model.training_info):
        repair = "Export the forward graph only."
        raise refuse("the file holds training graphs", f"{len(model.training_info)} training_info", repair)
    counter = Counter(limits)
    counter.add(items=len(model.opset_import) + len(model.metadata_props), nodes=len(model.functions))
    _check_opsets(model)
    graph = model.graph
    if max(len(graph.node), *(len(f.node) for f in model.functions), 0) > limits.max_nodes:
        raise too_large(f"more than {limits.max_nodes} nodes", len(graph.node))
    if len(model.functions):
        check_functions(model, limits)
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
    """Checks that a model states exactly one version of the standard operator set, and a supported one."""
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


def _walk_function(function: Any, counter: Counter) -> None:
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


def _walk_graph(graph: Any, counter: Counter, depth: int = 0) -> None:
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


def _walk_values(values: Any, counter: Counter) -> None:
    counter.add(tensors=len(values))
    for value in values:
        _check_texts([value.name], counter.limits)
        if value.HasField("type"):
            _walk_type(value.type, value.name, counter)


def _walk_type(declared: Any, name: str, counter: Counter) -> None:
    """Checks the shapes of tensors, including those in sequences, optionals and maps (protobuf limits the nesting)."""
    kind = declared.WhichOneof("value")
    if kind in ("tensor_type", "sparse_tensor_type"):
        dims = list(getattr(declared, kind).shape.dim)
        counter.add(items=len(dims))
        _check_texts([d.dim_param for d in dims], counter.limits)
        _check_dims([d.dim_value if d.dim_value != UNKNOWN_DIM else 0 for d in dims], name, counter.limits)
    elif kind in ("sequence_type", "optional_type"):
        counter.add(items=1)
        _walk_type(getattr(declared, kind).elem_type, name, counter)
    elif kind == "map_type":
        counter.add(items=1)
        _walk_type(declared.map_type.value_type, name, counter)


def _walk_node(node: Any, counter: Counter, depth: int) -> None:
    limits = counter.limits
    read, written, attributes, kind = node.input, node.output, node.attribute, node.op_type
    operands = max(len(read), len(written))
    if operands > limits.max_operands:
        raise too_large(f"a node of more than {limits.max_operands} operands", operands)
    counter.add(tensors=len(written), items=len(read) + len(written) + len(attributes) + len(node.metadata_props))
    _check_texts([*read, *written, node.name, kind, node.domain, node.overload], limits)
    if not kind:
        raise refuse("a node has no operator type", node.name or list(written), "Export again.")
    if len(attributes) > 1:
        _check_unique([a.name for a in attributes], "an attribute of a node")
    for attribute in attributes:
        _walk_attribute(attribute, counter, depth)


_REPEATED = ("ints", "floats", "strings", "tensors", "sparse_tensors", "graphs", "type_protos")
_TENSORS = ("tensors", "sparse_tensors", "graphs", "type_protos", "t", "sparse_tensor", "g", "tp")


def _walk_attribute(attribute: Any, counter: Counter, depth: int) -> None:
    """Checks every field of an attribute, including those that do not belong to its stated `type`."""
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


def _check_sparse(sparse: Any, counter: Counter) -> None:
    counter.add(tensors=2, items=len(sparse.dims))
    _check_tensor(sparse.values, counter)
    _check_tensor(sparse.indices, counter)
    _check_dims(sparse.dims, sparse.values.name or "a sparse tensor", counter.limits)


_NUMBERS = [name for name in DATA_FIELDS if name != "raw_data"]


def _check_tensor(tensor: Any, counter: Counter) -> None:
    counter.add(items=len(tensor.dims))
    _check_texts([tensor.name], counter.limits)
    if tensor.data_location == onnx.TensorProto.EXTERNAL or len(tensor.external_data):
        repair = "Send the graph without weights (`automap strip model.onnx`); they are never needed."
        raise refuse("the file refers to external data", tensor.name or "a tensor", repair)
    count = _check_dims(tensor.dims, tensor.name, counter.limits)
    for name in _NUMBERS:
        # Complex elements take two numbers. Unlike `ByteSize`, `len` does not serialise the tensor.
        if len(getattr(tensor, name)) > 2 * count:
            raise refuse("a stored tensor holds more values than its dims say", tensor.name, "Export again.")


def _check_dims(dims: Sequence[int], name: str, limits: Limits) -> int:
    """Checks dims, and returns the number of elements; a dim of 0 (unknown) counts as 1, so that others still count."""
    if len(dims) > limits.max_rank:
        raise refuse("a tensor has an absurd rank", f"{name}: rank {len(dims)}", "Check the exporter.")
    count = 1
    for size in dims:
        if not 0 <= size < limits.max_dim:
            raise refuse("a tensor has an absurd dim", f"{name}: {size}", "Check the exporter: dims must be sizes.")
        count *= size or 1
    if count > limits.max_elements:
        repair = "Check the exporter: no real tensor is that large."
        raise refuse("a tensor is absurdly large", f"{name}: {list(dims)[:8]}", repair)
    return count


def _check_texts(texts: Sequence[str], limits: Limits) -> None:
    most = limits.max_name_bytes
    for text in texts:
        if not isinstance(text, str):  # protobuf returns bytes for strings that are not valid UTF-8
            raise refuse("a name is not text", repr(text)[:40], "Export again, with names in UTF-8.")
        if len(text) > most:
            raise too_large(f"a name longer than {limits.max_name_bytes} characters", text[:40])


def _check_unique(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise refuse(f"{what} is given twice", name, "Check the exporter: names must be unique.")
        seen.add(name)


def _check_defined(given: set[str], nodes: Any, outputs: Iterable[str]) -> None:
    """Checks that every name that is read is either given or written by a node, and that none is written twice."""
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
                repair = "Send the complete graph, with every input and initializer declared."
                raise refuse("a node reads a tensor that nothing defines", name, repair)
    for name in outputs:
        if not name or name not in defined:
            raise refuse("an output is computed by nothing", name, "Send the whole graph.")
