"""Malformed and hostile ONNX files, by the hundred: hand-made ones, systematic ones, bombs.

Small ones are built with onnx.helper and its protobuf messages; large ones and broken ones byte by byte.
"""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
OPSETS = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
SIZES = (-(2**63), -1, 0, 2**31, 2**40, 2**62, 2**63 - 1)
TYPES = (-1, 0, 8, 14, 15, 21, 99, 2**31 - 1)


# Wire format


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def number(index: int, value: int) -> bytes:
    return varint(index << 3) + varint(value)


def raw_model(graph: bytes, more: bytes = b"") -> bytes:
    """A model around the bytes of a GraphProto."""
    return number(1, 9) + field(8, field(1, b"") + number(2, 20)) + field(7, graph) + more


def raw_value(name: bytes, *dims: int) -> bytes:
    shape = b"".join(field(1, number(1, d)) for d in dims)
    return field(1, name) + field(2, field(1, number(1, FLOAT) + field(2, shape)))


RAW_ENDS = field(11, raw_value(b"x", 1, 4)) + field(12, field(1, b"y"))
"""Input x and output y of a GraphProto."""


# Models


def value(name: str, *dims: int | str | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


def floats(name: str, *dims: int) -> TensorProto:
    return numpy_helper.from_array(np.zeros(dims, np.float32), name)


def ints(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.asarray(values, np.int64), name)


def model(nodes, initializers=(), inputs=None, outputs=("y",), functions=(), values=()) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "g",
        [value("x", 2, 4)] if inputs is None else list(inputs),
        [helper.make_tensor_value_info(o, FLOAT, None) if isinstance(o, str) else o for o in outputs],
        list(initializers),
        value_info=list(values),
    )
    return helper.make_model(graph, opset_imports=OPSETS, functions=list(functions), ir_version=10)


def node(kind: str, inputs="x", outputs="y", **attributes) -> onnx.NodeProto:
    domain = attributes.pop("domain", "")
    return helper.make_node(kind, inputs.split(","), outputs.split(","), domain=domain, **attributes)


def perceptron() -> onnx.ModelProto:
    nodes = [
        node("MatMul", "x,w", "a"), node("Add", "a,b", "c"), node("Relu", "c", "d"),
        node("Gemm", "d,v", "y", transB=1, alpha=1.0),
    ]  # fmt: skip
    return model(nodes, [floats("w", 4, 8), floats("b", 8), floats("v", 3, 8)], values=[value("c", 2, 8)])


def pictures() -> onnx.ModelProto:
    nodes = [
        node("Conv", "x,w", "a", kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1], dilations=[1, 1], group=1),
        node("BatchNormalization", "a,s,t,m,v", "b", epsilon=1e-5), node("Relu", "b", "c"),
        node("MaxPool", "c", "d", kernel_shape=[2, 2], strides=[2, 2]), node("GlobalAveragePool", "d", "e"),
        node("Flatten", "e", "f", axis=1), node("Gemm", "f,h,i", "y", transB=1),
    ]  # fmt: skip
    weights = [floats("w", 8, 3, 3, 3), *(floats(n, 8) for n in "stmv"), floats("h", 5, 8), floats("i", 5)]
    return model(nodes, weights, [value("x", 1, 3, 8, 8)])


def attention() -> onnx.ModelProto:
    nodes = [
        node("Gather", "e,x", "h", axis=0), node("MatMul", "h,w", "qkv"),
        node("Split", "qkv", "q,k,v", axis=2, num_outputs=3), node("Shape", "x", "s"),
        node("Concat", "s,two", "t", axis=0), node("Reshape", "q,t", "q4"),
        node("Transpose", "q4", "q5", perm=[0, 2, 1, 3]),
        node("Reshape", "k,t", "k4"), node("Transpose", "k4", "k5", perm=[0, 2, 3, 1]),
        node("Reshape", "v,t", "v4"), node("Transpose", "v4", "v5", perm=[0, 2, 1, 3]),
        node("MatMul", "q5,k5", "p"), node("Softmax", "p", "r", axis=-1), node("MatMul", "r,v5", "o"),
        node("Transpose", "o", "o2", perm=[0, 2, 1, 3]), node("Reshape", "o2,back", "o3"),
        node("LayerNormalization", "o3,g", "n", axis=-1), node("ReduceMean", "n,ax", "m", keepdims=1),
        node("Cast", "m", "c", to=1), node("Slice", "c,zero,one,ax", "sl"), node("Squeeze", "sl,ax", "y"),
    ]  # fmt: skip
    weights = [floats("e", 10, 8), floats("w", 8, 24), floats("g", 8), ints("two", 2, 4), ints("back", 0, 0, 8),
               ints("ax", 1), ints("zero", 0), ints("one", 1)]  # fmt: skip
    return model(nodes, weights, [value("x", 2, 6, dtype=INT64)])


BASES = {"perceptron": perceptron, "pictures": pictures, "attention": attention}


# Where external data hides


def external(name="w", *, entries=True, location=True) -> TensorProto:
    tensor = TensorProto(name=name, data_type=FLOAT, dims=[4, 4])
    if location:
        tensor.data_location = TensorProto.EXTERNAL
    if entries:
        tensor.external_data.add(key="location", value="../../etc/passwd")
    return tensor


def external_files() -> Iterator[tuple[str, bytes]]:
    """Each must be refused for what it is."""
    for path in ("w.bin", "../w", "/etc/passwd", "a/../../b", "C:\\w", "\\\\host\\w", "w\0.bin", "", "file:///w"):
        made = perceptron()
        made.graph.initializer[0].CopyFrom(external())
        made.graph.initializer[0].external_data[0].value = path
        yield f"location {path!r}", made.SerializeToString()
    for name, tensor in (("entries", external(location=False)), ("location", external(entries=False))):
        made = perceptron()
        made.graph.initializer[0].CopyFrom(tensor)
        yield f"initializer with {name} only", made.SerializeToString()

    def attribute(kind: int, **held) -> AttributeProto:
        made = AttributeProto(name="value", type=kind)
        for key, content in held.items():
            target = getattr(made, key)
            if key in ("tensors", "sparse_tensors", "graphs"):
                target.add().CopyFrom(content)
            else:
                target.CopyFrom(content)
        return made

    indices, values = onnx.SparseTensorProto(dims=[4]), onnx.SparseTensorProto(dims=[4])
    indices.indices.CopyFrom(external("i"))
    indices.values.CopyFrom(floats("v", 1))
    values.values.CopyFrom(external("v"))
    graph = helper.make_graph([], "i", [], [], [external()])
    sparse_graph = helper.make_graph([], "i", [], [])
    sparse_graph.sparse_initializer.add().CopyFrom(indices)
    deep = helper.make_graph([node("If", "x", "z", then_branch=graph)], "o", [], [])
    attributes = {
        "t": attribute(AttributeProto.TENSOR, t=external()),
        "t denied by type": attribute(AttributeProto.INT, t=external()),
        "t without type": attribute(0, t=external()),
        "tensors": attribute(AttributeProto.TENSORS, tensors=external()),
        "sparse values": attribute(AttributeProto.SPARSE_TENSOR, sparse_tensor=values),
        "sparse indices": attribute(AttributeProto.SPARSE_TENSOR, sparse_tensor=indices),
        "sparse list": attribute(AttributeProto.SPARSE_TENSORS, sparse_tensors=values),
        "graph": attribute(AttributeProto.GRAPH, g=graph),
        "graph sparse": attribute(AttributeProto.GRAPH, g=sparse_graph),
        "graphs": attribute(AttributeProto.GRAPHS, graphs=graph),
        "deep graph": attribute(AttributeProto.GRAPH, g=deep),
    }
    for name, held in attributes.items():
        odd = onnx.NodeProto(op_type="Constant", output=["odd"], attribute=[held])
        made = perceptron()
        made.graph.node.append(odd)
        yield f"attribute {name}", made.SerializeToString()
        made = perceptron()
        made.functions.append(helper.make_function("f", "F", [], ["odd"], [odd], OPSETS))
        yield f"function node {name}", made.SerializeToString()
        made = perceptron()
        made.functions.append(helper.make_function("f", "F", [], [], [], OPSETS))
        made.functions[0].attribute_proto.append(held)
        yield f"function attribute {name}", made.SerializeToString()
    for name, sparse in (("values", values), ("indices", indices)):
        made = perceptron()
        made.graph.sparse_initializer.add().CopyFrom(sparse)
        yield f"sparse initializer {name}", made.SerializeToString()
    for part in ("algorithm", "initialization"):
        made = perceptron()
        getattr(made.training_info.add(), part).initializer.append(external())
        yield f"training {part}", made.SerializeToString()


# Systematic ones


def odd_sizes() -> Iterator[tuple[str, bytes]]:
    """Every size in every place that has dims."""
    for size in SIZES:
        for place in ("input", "output", "value", "weight", "sparse", "constant", "reshape", "expand", "tile", "fill",
                      "slice", "range", "onehot", "resize", "pad"):  # fmt: skip
            made = perceptron()
            graph = made.graph
            if place in ("input", "output", "value"):
                declared = {"input": graph.input, "output": graph.output, "value": graph.value_info}[place][0]
                declared.type.tensor_type.shape.dim.add().dim_value = size
            elif place == "weight":
                graph.initializer[0].dims[1] = size
            elif place == "sparse":
                sparse = graph.sparse_initializer.add()
                sparse.values.CopyFrom(floats("s", 1))
                sparse.dims[:] = [size, 4]
            elif place == "constant":
                graph.node.insert(0, node("Constant", "", "k", value=TensorProto(data_type=1, dims=[size])))
                graph.node.append(node("Add", "y,k", "z"))
                graph.output[0].name = "z"
            else:
                graph.initializer.extend([ints("n", 2, size), ints("zero", 0), ints("one", 1), ints("size", size)])
                graph.initializer.append(numpy_helper.from_array(np.asarray([1.0, float(size)], np.float32), "scale"))
                made_by = {
                    "reshape": [node("Reshape", "y,n", "z")], "expand": [node("Expand", "y,n", "z")],
                    "tile": [node("Tile", "y,n", "z")],
                    "fill": [node("ConstantOfShape", "n", "k"), node("Add", "y,k", "z")],
                    "slice": [node("Slice", "y,zero,size,one", "z")],
                    "range": [node("Range", "zero,size,one", "k"), node("Cast", "k", "l", to=1),
                              node("Add", "y,l", "z")],
                    "onehot": [node("OneHot", "one,size,n", "k"), node("Cast", "k", "l", to=1),
                               node("Add", "y,l", "z")],
                    "resize": [node("Resize", "y,,scale", "z")], "pad": [node("Pad", "y,n", "z")],
                }[place]  # fmt: skip
                graph.node.extend(made_by)
                graph.output[0].name = "z"
            yield f"{place} {size}", made.SerializeToString()


def odd_types() -> Iterator[tuple[str, bytes]]:
    for kind in TYPES:
        for place in ("input", "output", "weight", "constant", "cast", "fill"):
            made = perceptron()
            graph = made.graph
            if place in ("input", "output"):
                (graph.input if place == "input" else graph.output)[0].type.tensor_type.elem_type = kind
            elif place == "weight":
                graph.initializer[0].data_type = kind
            else:
                held = TensorProto(data_type=kind, dims=[1], raw_data=bytes(8))
                extra = {
                    "constant": [node("Constant", "", "k", value=held)],
                    "cast": [node("Cast", "b", "k", to=kind)],
                    "fill": [node("ConstantOfShape", "n", "k", value=held)],
                }[place]
                graph.initializer.append(ints("n", 1))
                graph.node.extend([*extra, node("Add", "y,k", "z")])
                graph.output[0].name = "z"
            yield f"{place} {kind}", made.SerializeToString()


def odd_opsets() -> Iterator[tuple[str, bytes]]:
    for version in (-(2**63), -1, 0, 1, 2, 3, 4, 5, 6, 99, 2**62):
        made = perceptron()
        made.opset_import[0].version = version
        yield f"opset {version}", made.SerializeToString()
    made = perceptron()
    del made.opset_import[:]
    yield "no opset", made.SerializeToString()
    made = perceptron()
    made.opset_import.add(domain="ai.onnx", version=13)
    yield "two opsets", made.SerializeToString()


ODD_ATTRIBUTES = (
    99, -99, 2**62, -(2**63), 0.5, float("nan"), float("inf"), "text", "", [], [0], [-1, -1], [2**62, 2**62], [0.5],
    ["a", "b"], list(range(40)), [1] * 3000, floats("t", 2), TensorProto(),
)  # fmt: skip


def odd_attributes() -> Iterator[tuple[str, bytes]]:
    """Every attribute of every base with every odd value and kind."""
    for name, build in BASES.items():
        for at, one in enumerate(build().graph.node):
            for index, attribute in enumerate(one.attribute):
                for number_, odd in enumerate(ODD_ATTRIBUTES):
                    made = build()
                    target = made.graph.node[at].attribute[index]
                    kind = AttributeProto.INTS if odd == [] else None
                    target.CopyFrom(helper.make_attribute(attribute.name, odd, attr_type=kind))
                    yield f"{name} {at} {one.op_type}.{attribute.name} {number_}", made.SerializeToString()


def odd_nodes() -> Iterator[tuple[str, bytes]]:
    """Nodes with operands and results too few, too many, absent, of another rank."""
    kinds = sorted({schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""})
    for kind in kinds:
        for shape, operands in (("none", ""), ("one", "y"), ("three", "y,w,b"), ("same", "y,y,y,y,y,y")):
            made = perceptron()
            made.graph.node.append(node(kind, operands, "z,u"))
            made.graph.output[0].name = "z"
            yield f"{kind} of {shape}", made.SerializeToString()


def odd_graphs() -> Iterator[tuple[str, bytes]]:
    """By hand."""

    def change(name: str, edit, build=perceptron) -> tuple[str, bytes]:
        made = build()
        edit(made)
        return name, made.SerializeToString()

    def clear(*fields: str):
        return lambda m: [m.graph.ClearField(f) for f in fields]

    sequence = helper.make_tensor_sequence_value_info("q", FLOAT, [2])
    optional = helper.make_value_info("q", helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [2])))
    mapped = helper.make_value_info("q", onnx.TypeProto())
    mapped.type.map_type.key_type = INT64
    mapped.type.map_type.value_type.tensor_type.elem_type = FLOAT
    nested = onnx.TypeProto()
    inner = nested
    for _ in range(20):
        inner = inner.sequence_type.elem_type
    inner.tensor_type.elem_type = FLOAT
    nested_value = helper.make_value_info("q", nested)
    sparse_value = helper.make_sparse_tensor_value_info("q", FLOAT, [2, 2])
    for name, kind in (("sequence", sequence), ("optional", optional), ("map", mapped), ("nested", nested_value),
                       ("sparse", sparse_value), ("untyped", onnx.ValueInfoProto(name="q"))):  # fmt: skip
        for place in ("input", "output", "value_info"):
            yield change(f"{name} {place}", lambda m, p=place, k=kind: getattr(m.graph, p).append(k))
    for name, size in (("empty", ""), ("long", "d" * 100_000), ("odd", "a\n\x1b[31m'; DROP"), ("unbound", "batch"),
                       ("path", "../../x")):  # fmt: skip
        for dim in (0, 1):
            yield change(
                f"{name} dim_param {dim}",
                lambda m, s=size, d=dim: setattr(m.graph.input[0].type.tensor_type.shape.dim[d], "dim_param", s),
            )
    yield "empty graph", model([], [], [], []).SerializeToString()
    yield "no output", model([node("Relu")], outputs=()).SerializeToString()
    yield "output is input", model([], outputs=("x",)).SerializeToString()
    yield "output is weight", model([], [floats("w", 4)], outputs=("w",)).SerializeToString()
    yield "output twice", model([node("MatMul", "x,w")], [floats("w", 4, 4)], outputs=("y", "y")).SerializeToString()
    yield "parameters only", model([node("MatMul", "w,w")], [floats("w", 4, 4)], []).SerializeToString()
    yield (
        "constants only",
        model([node("Range", "a,b,c")], [ints("a", 0), ints("b", 5), ints("c", 1)], []).SerializeToString(),
    )
    yield "unused weight", model([node("Relu")], [floats("w", 4, 4)]).SerializeToString()
    for kind in ("nodes", "inputs", "outputs", "names", "types"):
        fields = {"nodes": "node", "inputs": "input", "outputs": "output"}
        if kind in fields:
            yield change(f"no {kind}", clear(fields[kind]))
        else:
            attribute = "name" if kind == "names" else "op_type"
            yield change(f"no {kind}", lambda m, a=attribute: [n.ClearField(a) for n in m.graph.node])
    yield change("no outputs of a node", lambda m: m.graph.node[2].ClearField("output"))
    yield change("no inputs of a node", lambda m: m.graph.node[2].ClearField("input"))
    yield change("no graph", lambda m: m.ClearField("graph"))
    yield change("no ir version", lambda m: m.ClearField("ir_version"))
    yield change("ir version 99", lambda m: setattr(m, "ir_version", 99))
    yield change("shape missing", lambda m: m.graph.input[0].type.tensor_type.ClearField("shape"))
    yield change("scalar input", lambda m: m.graph.input[0].type.tensor_type.shape.ClearField("dim"))
    yield change("rank 1000 input", lambda m: m.graph.input[0].CopyFrom(value("x", *[1] * 1000)))
    yield change("rank 1000 weight", lambda m: m.graph.initializer[0].dims.extend([1] * 1000))
    yield change("rank 31 input", lambda m: m.graph.input[0].CopyFrom(value("x", *[2] * 31)))
    yield change("doubled weight", lambda m: m.graph.initializer.append(m.graph.initializer[0]))
    yield change("doubled input", lambda m: m.graph.input.append(m.graph.input[0]))
    yield change("doubled node", lambda m: m.graph.node.append(m.graph.node[0]))
    yield change("doubled output", lambda m: m.graph.node[0].output.append("a"))
    yield change("doubled attribute", lambda m: m.graph.node[3].attribute.append(m.graph.node[3].attribute[0]))
    yield change("input named as result", lambda m: m.graph.input.append(value("a", 2)))
    yield change(
        "result without name", lambda m: m.graph.node[3].ClearField("output") or m.graph.node[3].output.append("")
    )
    yield change("self loop", lambda m: m.graph.node[1].input.__setitem__(0, "c"))
    yield change("cycle", lambda m: m.graph.node[0].input.__setitem__(0, "d"))
    yield change("undefined", lambda m: m.graph.node[0].input.__setitem__(0, "nothing"))
    yield change("long name", lambda m: setattr(m.graph.node[0], "name", "n" * 5000))
    yield change("long kind", lambda m: setattr(m.graph.node[0], "op_type", "n" * 5000))
    yield change("control characters", lambda m: setattr(m.graph.node[0], "op_type", "\x1b[2J\x07\n"))
    yield change("path as name", lambda m: setattr(m.graph.node[0], "name", "/../../../../etc/passwd"))
    yield change("unknown kind", lambda m: setattr(m.graph.node[2], "op_type", "Frobnicate"))
    yield change("unknown domain", lambda m: setattr(m.graph.node[2], "domain", "com.example"))
    yield change("format text as name", lambda m: setattr(m.graph.node[0], "name", "{0.__class__}%s%n$(id)`id`"))
    yield change("string input", lambda m: m.graph.input[0].CopyFrom(value("x", 2, 4, dtype=TensorProto.STRING)))
    yield change("string weight", lambda m: m.graph.initializer[0].CopyFrom(
        helper.make_tensor("w", TensorProto.STRING, [2], [b"a", b"\xff"])))  # fmt: skip
    yield change("weight without data", lambda m: m.graph.initializer[0].ClearField("raw_data"))
    yield change("weight of too much", lambda m: setattr(m.graph.initializer[1], "raw_data", bytes(10_000)))
    yield change("weight of odd bytes", lambda m: setattr(m.graph.initializer[1], "raw_data", bytes(3)))
    yield change("shape without data", lambda m: m.graph.initializer[3].ClearField("raw_data"), attention)
    yield change("shape of floats", lambda m: setattr(m.graph.initializer[3], "data_type", FLOAT), attention)
    yield change("shape of odd numbers", lambda m: m.graph.initializer[3].CopyFrom(ints("two", -5, 2**62)), attention)
    yield change("segment", lambda m: m.graph.initializer[0].segment.__setattr__("begin", 7))
    for scale in (float("nan"), float("inf"), -1e308, 1e-320):
        yield f"alpha {scale}", model([node("Gemm", "x,w", alpha=scale)], [floats("w", 4, 4)]).SerializeToString()
        scales = numpy_helper.from_array(
            np.asarray([1.0, scale], np.float32 if abs(scale) < 1e300 else np.float64), "s"
        )
        nodes = [node("MatMul", "x,w", "a"), node("Resize", "a,,s")]
        yield f"scale {scale}", model(nodes, [floats("w", 4, 4), scales]).SerializeToString()
    nodes = [
        node("MatMul", "x,w", "a"),
        node("Odd", "a", "y", domain="f", n=2**62, s="\ud800".encode("utf-8", "surrogatepass")),
    ]
    yield "surrogates", model(nodes, [floats("w", 4, 4)]).SerializeToString()
    branch = helper.make_graph([node("Relu", "x", "z")], "b", [], [value("z", 2, 4)])
    for kind, names in (("If", ("then_branch", "else_branch")), ("Loop", ("body",)), ("Scan", ("body",))):
        nodes = [node("MatMul", "x,w", "a"), node(kind, "a", "y", **dict.fromkeys(names, branch))]
        yield kind, model(nodes, [floats("w", 4, 4)]).SerializeToString()
    body = [node("MatMul", "a,b", "c")]
    for name, formal, results, call in (
        ("too few", ["a", "b"], ["c"], node("F", "x", domain="f")),
        ("too many", ["a", "b"], ["c"], node("F", "x,w,w,w", domain="f")),
        ("more results", ["a", "b"], ["c"], node("F", "x,w", "y,z", domain="f")),
        ("undefined inside", ["a"], ["c"], node("F", "x,w", domain="f")),
        ("undefined result", ["a", "b"], ["zzz"], node("F", "x,w", domain="f")),
        ("doubled formal", ["a", "a", "b"], ["c"], node("F", "x,w,w", domain="f")),
        ("result is formal", ["a", "b"], ["a"], node("F", "x,w", domain="f")),
    ):
        made = helper.make_function("f", "F", formal, results, body, OPSETS)
        yield f"function with {name}", model([call], [floats("w", 4, 4)], functions=[made]).SerializeToString()
    made = helper.make_function("", "Relu", ["a"], ["c"], [node("Relu", "a", "c")], OPSETS)
    yield "function that shadows", model([node("Relu")], functions=[made]).SerializeToString()
    made = helper.make_function("f", "F", ["a"], ["c"], [node("Relu", "a", "c")], OPSETS)
    yield "function twice", model([node("F", domain="f")], functions=[made, made]).SerializeToString()
    reference = node("Transpose", "a", "c")
    reference.attribute.add(name="perm", ref_attr_name="nowhere", type=AttributeProto.INTS)
    made = helper.make_function("f", "F", ["a"], ["c"], [reference], OPSETS)
    nodes = [node("MatMul", "x,w", "b"), node("F", "b", "y", domain="f")]
    yield "reference to nothing", model(nodes, [floats("w", 4, 4)], functions=[made]).SerializeToString()


def odd_bytes() -> Iterator[tuple[str, bytes]]:
    """Files that are not quite protobuf."""
    good = perceptron().SerializeToString()
    yield "nothing", b""
    yield "zeros", bytes(1000)
    yield "ones", b"\xff" * 1000
    yield "text", b"this is not a model\n" * 40
    yield "json", b'{"graph": {"node": []}}'
    yield "archive", b"PK\x03\x04" + bytes(500)
    yield "pickle", b"\x80\x05\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94."
    yield "twice", good * 2
    yield "trailing", good + b"\x00"
    yield "reversed", good[::-1]
    for i in range(1, 40):
        yield f"first {i}/40", good[: len(good) * i // 40]
        yield f"last {i}/40", good[len(good) * i // 40 :]
    contents = {0: varint(2**64 - 1), 1: b"\xff" * 8, 2: varint(3) + b"\xff\xfe\xfd", 3: b"", 4: b"", 5: b"\xff" * 4,
                6: b"", 7: b""}  # fmt: skip
    graph = RAW_ENDS + field(1, field(1, b"x") + field(2, b"y") + field(4, b"Relu"))
    for index in range(1, 27):
        for wire, content in contents.items():
            odd = varint(index << 3 | wire) + content
            yield f"model field {index} wire {wire}", good + odd
            yield f"graph field {index} wire {wire}", raw_model(graph + odd)
            in_node = field(1, field(1, b"x") + field(2, b"z") + field(4, b"Relu") + odd)
            yield f"node field {index} wire {wire}", raw_model(graph + in_node)
            in_tensor = field(5, field(8, b"w") + number(2, 1) + number(1, 4) + odd)
            yield f"tensor field {index} wire {wire}", raw_model(graph + in_tensor)


def mutated(data: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Seeded mutations: flips, cuts, splices, repeated and dropped stretches, large numbers."""
    rng = random.Random(seed)
    for _ in range(count):
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5, 20))):
            at = rng.randrange(max(len(changed), 1))
            size = min(rng.choice((1, 2, 8, 64, 500)), len(changed) - at)
            lowered = rng.randrange(8)
            if lowered == 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            elif lowered == 1 and size:
                changed[at] ^= 1 << rng.randrange(8)
            elif lowered == 2:
                del changed[at : at + size]
            elif lowered == 3:
                changed[at:at] = changed[at : at + size] * rng.choice((1, 3))
            elif lowered == 4:
                other = rng.randrange(max(len(changed), 1))
                changed[at : at + size] = changed[other : other + size]
            elif lowered == 5:
                changed[at : at + 1] = varint(rng.choice(SIZES))
            elif lowered == 6:
                changed[at : at + size] = bytes(rng.randrange(256) for _ in range(size))
            elif rng.random() < 0.1:
                del changed[at:]
        yield bytes(changed)


def hostile_files() -> Iterator[tuple[str, bytes]]:
    """All of the above but mutations; names are unique."""
    for make in (external_files, odd_sizes, odd_types, odd_opsets, odd_attributes, odd_nodes, odd_graphs, odd_bytes):
        for name, data in make():
            yield f"{make.__name__}: {name}", data


# Bombs


def nested_if(depth: int) -> bytes:
    inner = b""
    for _ in range(depth):
        inner = field(1, field(4, b"If") + field(2, b"z") + field(5, field(1, b"g") + field(6, inner) + number(20, 5)))
    return raw_model(inner + RAW_ENDS)


def laughs(depth: int) -> bytes:
    """Functions that double at every level."""
    functions = [helper.make_function("f", "F0", ["a"], ["b"], [node("Relu", "a", "b")], OPSETS)]
    for i in range(1, depth):
        calls = [node(f"F{i - 1}", "a", "h", domain="f"), node(f"F{i - 1}", "h", "b", domain="f")]
        functions.append(helper.make_function("f", f"F{i}", ["a"], ["b"], calls, OPSETS))
    nodes = [node("MatMul", "x,w", "h"), node(f"F{depth - 1}", "h", "y", domain="f")]
    return model(nodes, [floats("w", 4, 4)], functions=functions).SerializeToString()


def chain(length: int) -> bytes:
    ends = [b"x", *(b"%x" % i for i in range(length - 1)), b"y"]
    nodes = (field(1, field(1, a) + field(2, b) + field(4, b"Relu")) for a, b in pairwise(ends))
    return raw_model(b"".join(nodes) + RAW_ENDS)


def one_node(content: bytes, kind: bytes = b"Concat") -> bytes:
    return raw_model(field(1, field(1, b"x") + field(2, b"y") + field(4, kind) + content) + RAW_ENDS)


def called_often(body: onnx.NodeProto, calls: int = 40_000) -> bytes:
    """A function of one heavy node, called by many nodes."""
    function = helper.make_function("f", "F", ["a"], ["b"], [body], OPSETS).SerializeToString()
    call = b"".join(
        field(1, field(1, b"x") + field(2, b"%x" % i) + field(4, b"F") + field(7, b"f")) for i in range(calls)
    )
    last = field(1, field(1, b"0") + field(2, b"y") + field(4, b"Relu"))
    return raw_model(call + last + RAW_ENDS, field(8, field(1, b"f") + number(2, 1)) + field(25, function))


def folded(count: int) -> bytes:
    """Constants that are tiny in the file and large once computed, each used by the main chain."""
    nodes = [node("MatMul", "x,w", "t0"), node("Range", "zero,many,step", "r")]
    for i in range(count):
        nodes += [node("Add", f"r,k{i % 50}", f"c{i}"), node("Add", f"t{i},c{i}", f"t{i + 1}")]
    constants = [numpy_helper.from_array(np.float32(v), n) for n, v in (("zero", 0), ("many", 4096), ("step", 1))]
    constants += [numpy_helper.from_array(np.float32(i), f"k{i}") for i in range(50)]
    return model(nodes, [*constants, floats("w", 4, 4096)], outputs=(f"t{count}",)).SerializeToString()


MANY = 10**6


def many(content: bytes) -> bytes:
    """A graph with a million times `content`, each with another name in the place of 000000."""
    before, after = content.split(b"000000")
    return raw_model(b"".join(before + b"%06x" % i + after for i in range(MANY)) + RAW_ENDS)


def bombs() -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Files that are refused by a bound, each with what builds it."""
    good = perceptron().SerializeToString()
    yield "nested If, depth 30", lambda: nested_if(30)
    yield "nested If, depth 1000", lambda: nested_if(1000)
    for depth in (20, 24, 30, 60, 1000):
        yield f"function laughs, depth {depth}", lambda depth=depth: laughs(depth)
    yield "a million nodes", lambda: raw_model(field(1, field(1, b"x") + field(4, b"Relu")) * MANY + RAW_ENDS)
    yield "30 million empty nodes", lambda: raw_model(field(1, b"") * (30 * MANY) + RAW_ENDS)
    yield "chain of 100,000", lambda: chain(100_000)
    yield "dims 2^62 x 2^62", lambda: raw_model(field(11, raw_value(b"x", 2**62, 2**62)) + field(12, field(1, b"y")))
    yield (
        "weight 2^40 x 2^40",
        lambda: raw_model(RAW_ENDS + field(5, field(8, b"w") + (number(1, 2**40) * 2) + number(2, 1))),
    )
    fill = [node("ConstantOfShape", "n", "k"), node("Add", "x,k", "y")]
    yield "ConstantOfShape 2^40", lambda: model(fill, [ints("n", 2**20, 2**20)]).SerializeToString()
    tile = [node("ConstantOfShape", "n", "k"), node("Tile", "k,r", "t"), node("Add", "x,t", "y")]
    yield "Tile to 2^50", lambda: model(tile, [ints("n", 64, 64), ints("r", 2**22, 2**22)]).SerializeToString()
    spread = [node("MatMul", "x,w", "a"), node("Expand", "a,n", "y")]
    yield (
        "Expand to 2^50",
        lambda: model(spread, [floats("w", 4, 1), ints("n", 2**25, 2**25, 2, 1)]).SerializeToString(),
    )
    yield (
        "pads 2^62",
        lambda: model(
            [node("MaxPool", kernel_shape=[2, 2], pads=[2**62] * 4)], inputs=[value("x", 1, 1, 8, 8)]
        ).SerializeToString(),
    )
    yield (
        "cycle",
        lambda: model([node("Add", "x,b", "a"), node("Relu", "a", "b"), node("Relu", "b", "y")]).SerializeToString(),
    )
    yield "name of 30 MB", lambda: one_node(field(3, b"n" * (30 * MANY)))
    yield (
        "dim_param of 30 MB",
        lambda: raw_model(
            field(
                11, field(1, b"x") + field(2, field(1, number(1, 1) + field(2, field(1, field(2, b"n" * (30 * MANY))))))
            )
        ),
    )
    yield "a million attributes", lambda: one_node(field(5, field(1, b"a") + number(20, 2)) * MANY)
    yield "30 million empty attributes", lambda: one_node(field(5, b"") * (30 * MANY))
    yield "30 million operands", lambda: one_node(field(1, b"") * (30 * MANY))
    yield "a million outputs", lambda: one_node(b"".join(field(2, b"%x" % i) for i in range(MANY)), b"Split")
    yield "100,000 operands", lambda: one_node(field(1, b"x") * 100_000)
    perm = field(1, b"perm") + number(20, 7) + b"".join(number(8, i) for i in range(100_000))
    yield "perm of 100,000", lambda: one_node(field(5, perm), b"Transpose")
    yield (
        "30 million numbers in an attribute",
        lambda: one_node(field(5, field(1, b"a") + number(20, 7) + number(8, 1) * (30 * MANY))),
    )
    reshape = [node("Reshape", "x,n", "y")]
    yield "Reshape to a million dims", lambda: model(reshape, [ints("n", *[1] * MANY)]).SerializeToString()
    yield (
        "rank 30 million",
        lambda: raw_model(RAW_ENDS + field(5, field(8, b"w") + number(1, 1) * (30 * MANY) + number(2, 1))),
    )
    yield "rank 1000", lambda: raw_model(RAW_ENDS + field(5, field(8, b"w") + number(1, 1) * 1000 + number(2, 1)))
    yield "a million inputs", lambda: many(field(11, raw_value(b"000000", 1)))
    yield "a million weights", lambda: many(field(5, field(8, b"000000") + number(1, 2) + number(2, 1)))
    yield (
        "a million strings",
        lambda: raw_model(RAW_ENDS + field(5, field(8, b"w") + number(2, 8) + field(6, b"a") * MANY)),
    )
    yield "a million metadata entries", lambda: good + field(14, field(1, b"k") + field(2, b"v")) * MANY
    yield "a million operator sets", lambda: good + field(8, field(1, b"d") + number(2, 1)) * MANY
    yield "a million functions", lambda: good + field(25, field(1, b"F")) * MANY
    yield "the graph a thousand times", lambda: good * 1000
    yield (
        "a function of 3,000 operands, called 40,000 times",
        lambda: called_often(node("Sum", ",".join(["a"] * 3000), "b")),
    )
    yield (
        "a function of 50,000 numbers, called 40,000 times",
        lambda: called_often(node("Upsample", "a", "b", scales=[1.0] * 50_000)),
    )
    yield "64 MiB of zeros", lambda: bytes(64 << 20)
    yield "64 MiB of noise", lambda: random.Random(0).randbytes(64 << 20)
    yield "64 MiB of nested groups", lambda: b"\x0b" * (64 << 20)
    yield "more than 64 MiB", lambda: bytes((64 << 20) + 1)


# Random graphs


_RANDOM_KINDS = (
    "Add", "Mul", "MatMul", "Gemm", "Conv", "Relu", "Softmax", "Reshape", "Transpose", "Slice", "Concat", "Split",
    "Gather", "Squeeze", "Unsqueeze", "Expand", "Tile", "Where", "Cast", "Shape", "ReduceMean", "ReduceSum",
    "LayerNormalization", "BatchNormalization", "MaxPool", "AveragePool", "Pad", "Range", "ConstantOfShape",
    "Einsum", "LSTM", "TopK", "Flatten", "Resize", "Trilu", "CumSum", "Clip", "Dropout", "Identity", "Attention",
    "Odd", "GatherElements", "ScatterND",
)  # fmt: skip
_RANDOM_ATTRIBUTES = (
    "axis", "axes", "perm", "to", "kernel_shape", "pads", "strides", "dilations", "group", "num_outputs",
    "keepdims", "alpha", "transB", "equation", "hidden_size", "direction", "mode", "value", "auto_pad", "ceil_mode",
    "num_heads", "split",
)  # fmt: skip


def random_model(seed: int) -> bytes:
    """Nodes of random kinds over whatever tensors there are, with random attributes and sizes."""
    rng = random.Random(seed)

    def size() -> int:
        return rng.choice((1, 2, 2, 3, 4, 4, 8, rng.choice(SIZES)) if rng.random() < 0.1 else (1, 2, 4, 4, 4, 8))

    def attribute():
        return rng.choice((
            rng.randint(-3, 6), rng.choice(SIZES), rng.random(),
            rng.choice(("SAME_UPPER", "ij,jk->ik", "forward", "x")),
            [rng.randint(-2, 4) for _ in range(rng.randint(1, 4))], [rng.choice(SIZES)] * rng.randint(1, 3),
            ints("t", 1),
        ))  # fmt: skip

    inputs = [value("x", *(rng.choice((size(), "batch")) for _ in range(rng.randint(0, 4))))]
    weights = [floats(f"w{i}", *(rng.choice((1, 2, 4, 8)) for _ in range(rng.randint(0, 4)))) for i in range(3)]
    weights += [
        ints(f"i{i}", *(rng.choice((-1, 0, 1, 2, 4, size())) for _ in range(rng.randint(1, 4)))) for i in range(4)
    ]
    names = ["x", *(w.name for w in weights), ""]
    nodes = []
    for i in range(rng.randint(1, 12)):
        kind = rng.choice(_RANDOM_KINDS)
        operands = [rng.choice(names if rng.random() < 0.5 else names[-4:]) for _ in range(rng.randint(0, 4))]
        results = [f"t{i}_{j}" for j in range(rng.choice((1, 1, 1, 2, 3)))]
        given = {rng.choice(_RANDOM_ATTRIBUTES): attribute() for _ in range(rng.randint(0, 3))}
        nodes.append(helper.make_node(kind, operands, results, **given))
        names += results
    return model(nodes, weights, inputs, [rng.choice(names[-4:]) or "x"]).SerializeToString()
