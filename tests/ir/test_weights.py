"""Weights wherever a file keeps them: in Constant nodes, in branches, as integers, as operands of any kind."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.onnx.load import load_model
from ir.onnx.readers.nodes import FOLDED_KEY, KIND_KEY, SIGNATURE_KEY
from ir.onnx.strip import strip

FLOAT = TensorProto.FLOAT
node = helper.make_node


def weight(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def value(name: str, *dims: int | str | None, dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


def model(nodes, stored, inputs=(("x", "N", 8),), inner=()) -> bytes:
    """A file whose last node writes y."""
    graph = helper.make_graph(
        nodes, "weights", [value(*i) for i in inputs], [helper.make_tensor_value_info("y", FLOAT, None)], stored,
        value_info=inner,
    )  # fmt: skip
    domains = {n.domain for n in nodes} | {""}
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, 1 if d else 21) for d in sorted(domains)])
    return made.SerializeToString()


def facts(data: bytes) -> tuple:
    """What the price of a model depends on."""
    graph = load_model(data)
    kinds = [(op.kind, op.forward_flops, op.backward_flops) for op in graph.operators]
    return graph.num_parameters, sorted((p.shape, p.dtype) for p in graph.parameters), kinds


PLAIN = [
    node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "b"], ["h"]), node("Relu", ["h"], ["r"]),
    node("MatMul", ["r", "v"], ["y"]),
]  # fmt: skip
STORED = [weight("w", 8, 96), weight("b", 96), weight("v", 96, 64)]


@pytest.mark.parametrize(
    "dtype",
    [TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.INT2, TensorProto.FLOAT8E8M0,
     TensorProto.FLOAT4E2M1],
)  # fmt: skip
def test_a_quantised_file_is_the_model_of_floats(dtype):
    """Weights stored as integers, values rounded between operators, and a weight rounded in training."""
    narrow = helper.make_tensor("w", dtype, [8, 96], np.ones((8, 96), np.int8))
    small = [numpy_helper.from_array(np.asarray(0.1, np.float32), "s")]
    zero = numpy_helper.from_array(np.asarray(0, np.int8), "z")
    bias = numpy_helper.from_array(np.ones(96, np.int32), "b")
    nodes = [
        node("DequantizeLinear", ["w", "s"], ["wf"]), node("DequantizeLinear", ["b", "s"], ["bf"]),
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]), node("DequantizeLinear", ["xq", "s", "z"], ["xf"]),
        node("MatMul", ["xf", "wf"], ["a"]), node("Add", ["a", "bf"], ["h"]), node("Relu", ["h"], ["r"]),
        node("QuantizeLinear", ["r", "s", "z"], ["rq"]), node("DequantizeLinear", ["rq", "s", "z"], ["rf"]),
        node("QuantizeLinear", ["v", "s", "z"], ["vq"]), node("DequantizeLinear", ["vq", "s", "z"], ["vf"]),
        node("MatMul", ["rf", "vf"], ["y"]),
    ]  # fmt: skip
    data = model(nodes, [narrow, bias, zero, weight("v", 96, 64), *small])
    assert facts(data) == facts(model(PLAIN, STORED))
    assert facts(strip(data).data) == facts(data)
    assert load_model(data).warnings == ("the file is quantised (2 weights, 3 other values): it is read as floats",)


def test_a_quantised_bias_of_one_element_is_a_parameter():
    """As behind the head of a regression; without quantisation it is one too."""
    stored = [
        helper.make_tensor("w", TensorProto.INT8, [8, 1], np.ones((8, 1), np.int8)),
        numpy_helper.from_array(np.ones(1, np.int32), "b"), numpy_helper.from_array(np.asarray(0.1, np.float32), "s"),
    ]  # fmt: skip
    nodes = [
        node("DequantizeLinear", ["w", "s"], ["wf"]), node("DequantizeLinear", ["b", "s"], ["bf"]),
        node("Gemm", ["x", "wf", "bf"], ["y"]),
    ]  # fmt: skip
    x, y = (helper.make_tensor_value_info(n, FLOAT, ("N", size)) for n, size in (("x", 8), ("y", 1)))
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    assert load_model(data).num_parameters == load_model(strip(data).data).num_parameters == 9


def scaled(form: str) -> tuple[list, list]:
    """The nodes that make `wf` of the integers `w` in the way of a tool, and the tensors that they need."""
    cast = node("Cast", ["w"], ["c"], to=FLOAT)
    stored = {
        "w": np.ones((8, 96), np.int8), "k": np.ones((1, 96), np.float32), "z": np.ones((1, 96), np.int8),
        "t": np.ones((96, 8), np.uint8), "n": np.asarray(4, np.uint8), "l": np.ones((8, 96), np.int16),
        "u": np.ones((8, 96), np.uint32), "m": np.asarray(16, np.uint32),
    }  # fmt: skip
    nodes = {
        "scale": [cast, node("Mul", ["k", "c"], ["wf"])],
        "long": [node("Cast", ["l"], ["c"], to=FLOAT), node("Mul", ["k", "c"], ["wf"])],
        "bits": [node("BitShift", ["u", "m"], ["s"], direction="LEFT"), node("BitCast", ["s"], ["wf"], to=FLOAT)],
        "zero": [cast, node("Cast", ["z"], ["d"], to=FLOAT), node("Sub", ["c", "d"], ["e"]),
                 node("Div", ["e", "k"], ["wf"])],
        "turned": [node("Transpose", ["t"], ["c"], perm=[1, 0]), node("Cast", ["c"], ["wf"], to=FLOAT)],
        "packed": [node("BitShift", ["w", "n"], ["s"], direction="RIGHT"), node("Cast", ["s"], ["wf"], to=FLOAT)],
    }[form]  # fmt: skip
    read = {name for each in nodes for name in each.input}
    return nodes, [numpy_helper.from_array(value, name) for name, value in stored.items() if name in read]


@pytest.mark.parametrize("form", ["scale", "zero", "turned", "long"])
def test_integers_that_are_converted_and_scaled_are_weights(form):
    """Such a file once had no parameter there, without a word, as if the product were one of data and a constant."""
    nodes, stored = scaled(form)
    data = model([*nodes, node("MatMul", ["x", "wf"], ["a"]), *PLAIN[1:]], [*stored, *STORED[1:]])
    weights = {p.name: p.num_elements for p in load_model(data).parameters}
    assert weights == {{"turned": "t", "long": "l"}.get(form, "w"): 768, "b": 96, "v": 96 * 64}
    if form != "turned":
        assert facts(data) == facts(model(PLAIN, STORED))
    assert facts(strip(data).data) == facts(data)
    assert load_model(data).warnings == ("the file is quantised (1 weights, 0 other values): it is read as floats",)


@pytest.mark.parametrize("per_row", [False, True], ids=["one scale", "a scale of each row"])
def test_rows_of_integers_that_are_scaled_behind_the_look_up_are_an_embedding(per_row):
    """Its table was once taken for a constant, without a word: the model had no embedding."""
    table = numpy_helper.from_array(np.ones((20, 8), np.int8), "e")
    scale = numpy_helper.from_array(np.full((20, 1) if per_row else (), 0.1, np.float32), "k")
    nodes = [
        node("Gather", ["e", "ids"], ["rows"]), node("Cast", ["rows"], ["c"], to=FLOAT),
        *([node("Gather", ["k", "ids"], ["ks"])] if per_row else []),
        node("Mul", ["c", "ks" if per_row else "k"], ["x"]), *PLAIN,
    ]  # fmt: skip
    made = onnx.load_from_string(model(nodes, [table, scale, *STORED], [("ids", "N", 5)]))
    made.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    data = made.SerializeToString()
    plain = onnx.load_from_string(model([node("Gather", ["e", "ids"], ["x"]), *PLAIN], [weight("e", 20, 8), *STORED]))
    plain.graph.input[0].CopyFrom(made.graph.input[0])
    assert facts(data) == facts(plain.SerializeToString()) == facts(strip(data).data)
    assert load_model(data).warnings == ("the file is quantised (1 weights, 0 other values): it is read as floats",)


@pytest.mark.parametrize(("stored", "dtype"), [(np.uint16, "bfloat16"), (np.uint8, "float8")])
def test_the_bits_of_floats_that_are_stored_as_integers_are_weights(stored, dtype):
    """numpy has no bfloat16, so that tools write its bits as integers; they were once read as a constant."""
    bits = numpy_helper.from_array(np.ones((8, 96), stored), "w")
    to = {"bfloat16": TensorProto.BFLOAT16, "float8": TensorProto.FLOAT8E4M3FN}[dtype]
    nodes = [node("BitCast", ["w"], ["b16"], to=to), node("Cast", ["b16"], ["wf"], to=FLOAT)]
    data = model([*nodes, node("MatMul", ["x", "wf"], ["a"]), *PLAIN[1:]], [bits, *STORED[1:]])
    graph = load_model(data)
    assert {(p.name, p.shape) for p in graph.parameters} == {("w", (8, 96)), ("b", (96,)), ("v", (96, 64))}
    assert graph.tensors["w"].dtype == dtype and not graph.warnings
    assert facts(strip(data).data) == facts(data)


def test_integers_that_meet_the_data_are_no_weights():
    """A mask that is stored as integers, converted, and multiplied with the data in front of a product."""
    mask = numpy_helper.from_array(np.ones((1, 8), np.int8), "mask")
    nodes = [node("Cast", ["mask"], ["m"], to=FLOAT), node("Mul", ["x", "m"], ["xm"])]
    graph = load_model(model([*nodes, node("MatMul", ["xm", "w"], ["a"]), *PLAIN[1:]], [mask, *STORED]))
    assert {p.name for p in graph.parameters} == {"w", "b", "v"} and not graph.warnings


@pytest.mark.parametrize("form", ["packed", "bits"])
def test_weights_that_are_packed_into_integers_are_refused(form):
    nodes, stored = scaled(form)
    with pytest.raises(ModelError, match=r"computes with integers.*BitShift.*before it was quantised"):
        load_model(model([*nodes, node("MatMul", ["x", "wf"], ["a"]), *PLAIN[1:]], [*stored, *STORED[1:]]))


def test_integers_that_are_only_moved_are_floats():
    """ONNX Runtime moves roundings behind look-ups and views, and stores transposed weights as integers."""
    shapes = {"w": (96, 8), "t": (50, 8), "u": (9, 8)}
    sizes = numpy_helper.from_array(np.asarray([-1, 8]), "sizes")
    common = [weight("v", 96, 8), numpy_helper.from_array(np.asarray(0.1, np.float32), "s"), sizes]

    def moved(dtype, rounds, restores):
        """A file whose values are looked up, turned, joined and reshaped between two kinds of nodes."""
        nodes = [
            node("Cast", ["x"], ["ids"], to=TensorProto.INT64), node("Concat", ["t", "u"], ["all"], axis=0),
            node("Gather", ["all", "ids"], ["e0"]), node(restores, ["e0", "s"], ["e"]),
            node("Transpose", ["w"], ["w0"], perm=[1, 0]), node(restores, ["w0", "s"], ["w1"]),
            node("MatMul", ["e", "w1"], ["m"]), node("MatMul", ["m", "v"], ["h"]), node(rounds, ["h", "s"], ["hq"]),
            node("Reshape", ["hq", "sizes"], ["r"]), node(restores, ["r", "s"], ["rf"]), node("Relu", ["rf"], ["y"]),
        ]  # fmt: skip
        for each in nodes:
            if each.op_type == "Identity":
                del each.input[1:]
        stored = [numpy_helper.from_array(np.ones(shape, dtype), name) for name, shape in shapes.items()]
        return model(nodes, [*stored, *common])

    integers = moved(np.int8, "QuantizeLinear", "DequantizeLinear")
    assert facts(integers) == facts(moved(np.float32, "Identity", "Identity"))
    assert load_model(integers).warnings == ("the file is quantised (3 weights, 1 other values): it is read as floats",)


@pytest.mark.parametrize("domain", ["qonnx.custom_op.general", "onnx.brevitas"])
def test_roundings_of_training_with_quantisation_are_left_out(domain):
    """Brevitas writes a node of its own for each weight and value that it rounds, with no shape of the result."""
    scalars = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in (("s", 0.1), ("z", 0), ("bits", 4))]
    nodes = [
        node("Quant", ["w", "s", "z", "bits"], ["wq"], domain=domain),
        node("Quant", ["x", "s", "z", "bits"], ["xq"], domain=domain),
        node("MatMul", ["xq", "wq"], ["a"]), node("Add", ["a", "b"], ["h"]), node("Relu", ["h"], ["r"]),
        node("BipolarQuant", ["v", "s"], ["vq"], domain=domain), node("MatMul", ["r", "vq"], ["y"]),
    ]  # fmt: skip
    data = model(nodes, [*STORED, *scalars])
    assert facts(data) == facts(model(PLAIN, STORED))
    assert load_model(data).warnings == ("the file is quantised (2 weights, 1 other values): it is read as floats",)


@pytest.mark.parametrize(
    "made", ["/act/Constant_output_0", "val_3", "_val_3", "scalar_tensor_default_1", "onnx::Mul_9"]
)
def test_a_number_that_a_tool_stored_is_no_parameter(made):
    """Optimisers of files turn the exporter's Constant nodes into initializers; a module's own scalar stays trained."""
    scalars = [numpy_helper.from_array(np.asarray(2, np.float32), n) for n in (made, "head.scale")]
    nodes = [*PLAIN[:3], node("Mul", ["r", made], ["m"]), node("Mul", ["m", "head.scale"], ["n"])]
    file = onnx.ModelProto.FromString(model([*nodes, node("MatMul", ["n", "v"], ["y"])], [*STORED, *scalars]))
    file.producer_name = "pytorch"
    graph = load_model(file.SerializeToString())
    assert {p.name for p in graph.parameters} == {"w", "b", "v", "head.scale"}


def test_weights_of_one_element_are_parameters():
    """The bias of one filter, the slope of a PRelu and the matrix of one feature; a number is none, nor a factor."""
    stored = [weight("w", 1, 3, 3, 3), weight("b", 1), weight("slope", 1), weight("f", 1), weight("m", 1, 1)]
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"]), node("PRelu", ["c", "slope"], ["p"]), node("Mul", ["p", "f"], ["s"]),
        node("GlobalAveragePool", ["s"], ["g"]), node("Flatten", ["g"], ["h"]), node("MatMul", ["h", "m"], ["y"]),
    ]  # fmt: skip
    graph = load_model(model(nodes, stored, [("x", "N", 3, 8, 8)]))
    assert {p.name for p in graph.parameters} == {"w", "b", "slope", "m"}


def integers(form: str) -> tuple[list, list]:
    """The nodes of `PLAIN` as a tool writes them on integers, and the tensors that they need."""
    held = {
        "s": np.asarray(0.1, np.float32), "z": np.asarray(0, np.int8), "w": np.ones((8, 96), np.int8),
        "v": np.ones((96, 64), np.int8), "b": np.ones(96, np.float32), "u": np.asarray(0, np.uint8),
        "packed": np.ones((96, 1, 16), np.uint8), "packed v": np.ones((64, 3, 16), np.uint8),
        "blocks": np.ones((96, 1), np.float32), "blocks v": np.ones((64, 3), np.float32),
        "nf4": np.ones(8 * 96 // 2, np.uint8), "nf4 v": np.ones(96 * 64 // 2, np.uint8),
        "nf4 scales": np.ones(8 * 96 // 32, np.float32),
    }  # fmt: skip

    def dynamic(x: str, w: str, y: str) -> list:
        """What `quantize_dynamic` writes."""
        return [
            node("DynamicQuantizeLinear", [x], [f"{y}q", f"{y}s", f"{y}z"]),
            node("MatMulInteger", [f"{y}q", w, f"{y}z", "z"], [f"{y}i"]),
            node("Cast", [f"{y}i"], [f"{y}c"], to=FLOAT), node("Mul", [f"{y}s", "s"], [f"{y}t"]),
            node("Mul", [f"{y}c", f"{y}t"], [y]),
        ]  # fmt: skip

    def ort(kind: str, inputs: list, y: str, **attributes: int):
        return node(kind, inputs, [y], domain="com.microsoft", **attributes)

    relu = node("Relu", ["h"], ["r"])
    bits = {"quant_type": 1, "block_size": 32}
    nodes = {
        "dynamic": [*dynamic("x", "w", "a"), node("Add", ["a", "b"], ["h"]), relu, *dynamic("r", "v", "y")],
        "fused": [ort("DynamicQuantizeMatMul", ["x", "w", "s", "z", "b"], "h"), relu,
                  node("DynamicQuantizeLinear", ["r"], ["rq", "rs", "rz"]),
                  ort("MatMulIntegerToFloat", ["rq", "v", "rs", "s", "rz", "z"], "y")],
        "static": [node("QuantizeLinear", ["x", "s", "u"], ["xq"]),
                   node("QLinearMatMul", ["xq", "s", "u", "w", "s", "z", "s", "u"], ["aq"]),
                   node("DequantizeLinear", ["aq", "s", "u"], ["a"]), node("Add", ["a", "b"], ["h"]), relu,
                   node("QuantizeLinear", ["r", "s", "u"], ["rq"]),
                   node("QLinearMatMul", ["rq", "s", "u", "v", "s", "z", "s", "u"], ["yq"]),
                   node("DequantizeLinear", ["yq", "s", "u"], ["y"])],
        "in blocks": [ort("MatMulNBits", ["x", "packed", "blocks", "", "", "b"], "h", K=8, N=96, bits=4, block_size=32),
                      relu, ort("MatMulNBits", ["r", "packed v", "blocks v"], "y", K=96, N=64, bits=4, block_size=32)],
        "bitsandbytes": [ort("MatMulBnb4", ["x", "nf4", "nf4 scales"], "a", K=8, N=96, **bits),
                         node("Add", ["a", "b"], ["h"]), relu,
                         ort("MatMulBnb4", ["r", "nf4 v", "nf4 scales"], "y", K=96, N=64, **bits)],
    }[form]  # fmt: skip
    read = {name for each in nodes for name in each.input}
    return nodes, [numpy_helper.from_array(value, name) for name, value in held.items() if name in read]


@pytest.mark.parametrize("form", ["dynamic", "fused", "static", "in blocks", "bitsandbytes"])
def test_arithmetic_on_integers_is_that_of_the_floats(form):
    data = model(*integers(form))
    quantised, floats = load_model(data), load_model(model(PLAIN, STORED))
    assert facts(data)[0] == facts(strip(data).data)[0] == floats.num_parameters
    live = [[(op.kind, op.forward_flops) for op in g.operators if op.is_live] for g in (quantised, floats)]
    assert live[0] == live[1]
    assert quantised.warnings[0].startswith("the file is quantised (2 weights")


def test_a_convolution_on_integers_is_that_of_floats():
    stored = {
        "s": np.asarray(0.1, np.float32), "u": np.asarray(0, np.uint8), "w": np.ones((4, 3, 3, 3), np.uint8),
        "b": np.ones(4, np.int32),
    }  # fmt: skip
    by, pads = ["s", "u"], {"pads": [1] * 4}
    inside = [
        node("QLinearConv", ["q", *by, "w", *by, *by, "b"], ["c"], **pads),
        node("QLinearAdd", ["c", *by, "c", *by, *by], ["d"], domain="com.microsoft"),
        node("QLinearConcat", [*by, "c", *by, "d", *by], ["e"], domain="com.microsoft", axis=1),
    ]
    nodes = [node("QuantizeLinear", ["x", *by], ["q"]), *inside, node("DequantizeLinear", ["e", *by], ["y"])]
    held, inputs = [numpy_helper.from_array(v, n) for n, v in stored.items()], (("x", "N", 3, 8, 8),)
    floats = [
        node("Conv", ["x", "w", "b"], ["c"], **pads), node("Add", ["c", "c"], ["d"]),
        node("Concat", ["c", "d"], ["y"], axis=1),
    ]  # fmt: skip
    assert facts(model(nodes, held, inputs)) == facts(model(floats, [weight("w", 4, 3, 3, 3), weight("b", 4)], inputs))
    inside[1].attribute.append(helper.make_attribute("channels_last", 1))
    with pytest.raises(ModelError, match=r"channels last.*before it was quantised"):
        load_model(model(nodes, held, inputs))


def test_an_embedding_in_blocks_is_a_table_of_floats():
    stored = [
        numpy_helper.from_array(np.ones((20, 16), np.uint8), "t"), weight("s", 20, 2), weight("w", 32, 8),
    ]  # fmt: skip
    looked_up = node("GatherBlockQuantized", ["t", "ids", "s"], ["e"], domain="com.microsoft", bits=4, block_size=16)
    data = model([looked_up, node("MatMul", ["e", "w"], ["y"])], stored, [("ids", "N", 6)])
    graph = onnx.load_from_string(data)
    graph.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    assert {p.shape for p in load_model(graph.SerializeToString()).parameters} == {(20, 32), (32, 8)}


def test_fused_arithmetic_on_integers_is_refused_by_name():
    nodes = [node("QAttention", ["x", "w"], ["y"], domain="com.microsoft")]
    with pytest.raises(ModelError, match=r"QAttention.*before it was quantised"):
        load_model(model(nodes, [numpy_helper.from_array(np.ones((8, 96), np.uint8), "w")]))


def test_zeros_beside_stored_weights_are_no_parameters():
    """A recurrence begins with zeros; a file that holds no weights may hold the shape of each in such a node."""
    shape = numpy_helper.from_array(np.asarray([8, 96]), "shape")
    zeros = [node("ConstantOfShape", ["shape"], ["w"]), node("MatMul", ["x", "w"], ["h"])]
    beside = load_model(model([*zeros, node("MatMul", ["h", "v"], ["y"])], [shape, STORED[2]]))
    assert {p.name for p in beside.parameters} == {"v"}
    alone = load_model(model([*zeros, node("Add", ["h", "b"], ["y"])], [shape, STORED[1]]))
    assert {p.name for p in alone.parameters} == {"w", "b"}


@pytest.mark.parametrize("sizes", [(8, -96), (8, 1 << 60), (1 << 30, 1 << 30)])
def test_a_weight_of_no_possible_shape_is_refused(sizes):
    shape = numpy_helper.from_array(np.asarray(sizes), "shape")
    zeros = [node("ConstantOfShape", ["shape"], ["w"]), node("MatMul", ["x", "w"], ["y"])]
    with pytest.raises(ModelError, match="its result would be of shape"):
        load_model(model(zeros, [shape]))


def test_weights_in_constant_nodes():
    constants = [node("Constant", [], [t.name], value=t) for t in STORED]
    data = model([*constants, *PLAIN], [])
    assert facts(data) == facts(model(PLAIN, STORED))
    assert facts(strip(data).data) == facts(data)


def test_constants_beside_stored_weights_are_no_weights():
    mask = node("Constant", [], ["b"], value=weight("", 96))
    assert load_model(model([mask, *PLAIN], [STORED[0], STORED[2]])).num_parameters == 8 * 96 + 96 * 64


def test_weights_that_only_a_branch_reads():
    """Of the branch that is taken: those of the file and those of the branch itself."""
    taken = helper.make_graph(
        [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "b"], ["h"])], "then", [], [value("h", "N", 96)],
        [weight("b", 96)],
    )  # fmt: skip
    other = helper.make_graph([node("MatMul", ["x", "u"], ["k"])], "else", [], [value("k", "N", 96)])
    nodes = [
        node("If", ["c"], ["g"], then_branch=taken, else_branch=other), node("Relu", ["g"], ["r"]),
        node("MatMul", ["r", "v"], ["y"]),
    ]  # fmt: skip
    data = model(nodes, [*STORED[::2], weight("u", 8, 96), numpy_helper.from_array(np.asarray(True), "c")])
    assert facts(data) == facts(model(PLAIN, STORED))


def test_branches_may_have_names_in_common():
    """Each branch is a graph of its own: two may call their tensors alike, and a third one has branches inside."""

    def branch(operand, held, *inner):
        product = node("MatMul", [operand, "own"], ["t"])
        return helper.make_graph([*inner, product], "branch", [], [value("t", "N", 96)], [weight("own", *held)])

    within = node("If", ["c"], ["i"], then_branch=branch("g", (96, 96)), else_branch=branch("g", (96, 5)))
    nodes = [
        node("If", ["c"], ["g"], then_branch=branch("x", (8, 96)), else_branch=branch("x", (8, 7))),
        node("If", ["c"], ["h"], then_branch=branch("i", (96, 64), within), else_branch=branch("g", (96, 5))),
        node("Relu", ["h"], ["y"]),
    ]
    plain = [
        node("MatMul", ["x", "w"], ["g"]), node("MatMul", ["g", "u"], ["i"]), node("MatMul", ["i", "v"], ["h"]),
        node("Relu", ["h"], ["y"]),
    ]  # fmt: skip
    data = model(nodes, [numpy_helper.from_array(np.asarray(True), "c")])
    assert facts(data) == facts(model(plain, [*STORED[::2], weight("u", 96, 96)]))


@pytest.mark.parametrize(
    ("kind", "operands", "shapes", "inputs"),
    [
        ("Einsum", ["x", "p", "q"], [(8, 4), (4, 3)], (("x", "N", 8),)),
        ("acme.Fancy", ["x", "p"], [(5, 7)], (("x", "N", 8),)),
        ("DeformConv", ["x", "p", "o"], [(6, 4, 3, 3)], (("x", "N", 4, 8, 8), ("o", "N", 18, 6, 6))),
    ],
)
def test_weights_of_any_operator(kind, operands, shapes, inputs):
    domain, _, name = kind.rpartition(".")
    attributes = {"equation": "ni,ij,jk->nk"} if kind == "Einsum" else {}
    given = [weight(n, *s) for n, s in zip("pq", shapes, strict=False)]
    inner = [value("t", "N", 8)] if domain else []
    nodes = [node(name, operands, ["t"], domain=domain, **attributes), node("Relu", ["t"], ["y"])]
    assert load_model(model(nodes, given, inputs, inner)).num_parameters == sum(np.prod(s) for s in shapes)


@pytest.mark.parametrize("kind", ["LayerNormalization", "Gelu", "Conv"])
def test_learned_tensors_in_the_place_of_data_are_parameters(kind):
    """As DeBERTa's embeddings of relative places, which are normalised before anything else reads them: they were
    constants without a word. A single number is one still."""
    held = {"LayerNormalization": [weight("s", 8)], "Gelu": [], "Conv": [weight("k", 8, 8, 1)]}[kind]
    shape = (1, 8, 8) if kind == "Conv" else (8, 8)
    nodes = [node(kind, ["p", *(each.name for each in held)], ["t"]), node("MatMul", ["x", "t"], ["y"])]
    graph = load_model(model(nodes, [weight("p", *shape), *held]))
    assert {p.name for p in graph.parameters} == {"p", *(each.name for each in held)}
    nodes = [node("Gelu", ["p"], ["t"]), node("Mul", ["x", "t"], ["u"]), node("MatMul", ["u", "w"], ["y"])]
    assert {p.name for p in load_model(model(nodes, [weight("p", 1), weight("w", 8, 8)])).parameters} == {"w"}


def test_a_bias_that_is_a_buffer_by_its_name_is_none():
    """BART's and DeepSeek's, in files of PyTorch's older exporter, which marks nothing."""
    nodes = [
        node("MatMul", ["x", "m.head.weight"], ["h"]), node("Add", ["h", "m.final_logits_bias"], ["b"]),
        node("Add", ["b", "m.gate.e_score_correction_bias"], ["c"]),
        node("Add", ["c", "m.gate.e_score_correction_bias"], ["y"]),
    ]  # fmt: skip
    held = {"m.head.weight": (8, 9), "m.final_logits_bias": (1, 9), "m.gate.e_score_correction_bias": (9,)}
    made = onnx.load_from_string(model(nodes, [weight(name, *shape) for name, shape in held.items()]))
    made.producer_name = "pytorch"
    assert {p.name for p in load_model(made.SerializeToString()).parameters} == {"m.head.weight"}
    # A tool that makes a buffer again leaves the marks of the others.
    made.graph.initializer[0].metadata_props.add(key=KIND_KEY, value="PARAMETER")
    assert {p.name for p in load_model(made.SerializeToString()).parameters} == {"m.head.weight"}


def test_a_buffer_that_the_exporter_made_again_is_no_parameter():
    """As the window of a short-time Fourier transform, of which the newer exporter stores a copy (`val_21`)."""
    stored = [weight("w", 8, 8), weight("val_21", 8)]
    inner = [value("w", 8, 8), value("val_21", 8)]
    inner[0].metadata_props.add(key=KIND_KEY, value="PARAMETER")
    inner[1].metadata_props.add(key=FOLDED_KEY, value="['val_20', 'window']")
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Mul", ["h", "val_21"], ["y"])]
    made = onnx.load_from_string(model(nodes, stored, inner=inner))
    for kind, names in (("PARAMETER", {"w", "val_21"}), ("BUFFER", {"w"})):
        del made.graph.metadata_props[:]
        signature = f"\n# inputs\np_w: PARAMETER target='w'\nb_window: {kind} target='window' persistent=True\n"
        made.graph.metadata_props.add(key=SIGNATURE_KEY, value=signature)
        data = made.SerializeToString()
        assert {p.name for p in load_model(data).parameters} == names
        assert {p.name for p in load_model(strip(data).data).parameters} == names


def test_a_plain_tensor_of_a_module_is_no_parameter():
    """As VideoMAE's sinusoids of positions, whose name is that of a parameter."""
    stored = [weight("m.w", 8, 8), weight("m.position_embeddings", 8)]
    for kind, names in (("PARAMETER", {"m.w", "m.position_embeddings"}), ("CONSTANT_TENSOR", {"m.w"})):
        inner = [value("m.w", 8, 8), value("m.position_embeddings", 8)]
        for declared, its in zip(inner, ("PARAMETER", kind), strict=True):
            declared.metadata_props.add(key=KIND_KEY, value=its)
        nodes = [node("MatMul", ["x", "m.w"], ["h"]), node("Add", ["h", "m.position_embeddings"], ["y"])]
        data = model(nodes, stored, inner=inner)
        assert {p.name for p in load_model(data).parameters} == names
        assert {p.name for p in load_model(strip(data).data).parameters} == names


def test_a_weight_behind_a_function_of_one_operand():
    """As the decay of a state-space model, which is stored as its logarithm."""
    nodes = [node("Exp", ["p"], ["e"]), node("Neg", ["e"], ["n"]), node("Mul", ["x", "n"], ["y"])]
    assert load_model(model(nodes, [weight("p", 8)])).num_parameters == 8


@pytest.mark.parametrize(
    ("dims", "place"),
    [
        (("seq", "batch"), 1), ((12, "N"), 1), (("batch_size", 12), 0), (("N", 12), 0), ((4, 12), 0),
        (("batch", "batch_of_words"), 0),
    ],
)  # fmt: skip
def test_a_dim_called_batch_is_the_batch(dims, place):
    nodes = [node("Gather", ["e", "x"], ["y"])]
    sizes = {name: size for name, size in (("batch_of_words", 3), ("seq", 5)) if name in dims}
    graph = load_model(model(nodes, [weight("e", 20, 6)], (("x", *dims),)), dims=sizes)
    assert graph.tensors["x"].batch_dim == place


@pytest.mark.parametrize(
    ("kind", "repair"),
    [
        ("NonZero", "as much as the data holds.*`add_self_loops=False`"),
        ("acme.Fancy", r"shape of t in the file \(graph.value_info\)"),
        ("com.microsoft.Fancy", "the one that the exporter wrote"), ("StatefulCall", "could not convert"),
        ("ai.onnx.ml.Normalizer", "the neural network alone"),
    ],
)  # fmt: skip
def test_an_unknown_kind_says_what_to_do(kind, repair):
    domain, _, name = kind.rpartition(".")
    with pytest.raises(ModelError, match=repair):
        load_model(model([node(name, ["x"], ["t"], domain=domain), node("MatMul", ["t", "w"], ["y"])], STORED[:1]))


def test_classical_models_are_refused_as_such():
    """As skl2onnx writes them: the weights are attributes of one operator, and the scores a sequence of maps."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 1])
    row = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    maps = helper.make_value_info("maps", helper.make_sequence_type_proto(row))
    regressor = helper.make_node("LinearRegressor", ["x"], ["y"], domain="ai.onnx.ml", coefficients=[0.5] * 8)
    named = helper.make_node("ZipMap", ["y"], ["maps"], domain="ai.onnx.ml", classlabels_int64s=[0])
    for nodes, outputs in (([regressor], [y]), ([regressor, named], [maps])):
        graph = helper.make_graph(nodes, "classical", [x], outputs)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
        with pytest.raises(ModelError, match="which no gradient trains"):
            load_model(helper.make_model(graph, opset_imports=opsets).SerializeToString())


def test_tokens_that_are_sorted_by_their_expert_are_told_how_to_be_exported():
    """As JetMoE's: no other dim is the batch, and two samples would be sorted too."""
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Reshape", ["h", "all"], ["tokens"]),
        node("TopK", ["tokens", "count"], ["y", "places"], axis=0),
    ]  # fmt: skip
    sizes = [numpy_helper.from_array(np.array(v), n) for n, v in (("all", [-1]), ("count", [16]))]
    with pytest.raises(ModelError, match="compares samples") as fault:
        load_model(model(nodes, [weight("w", 8, 8), *sizes], [("x", 2, 8)]))
    assert "loop over all experts" in fault.value.repair and "--batch-dim" not in fault.value.repair


@pytest.mark.parametrize("kind", ["NonMaxSuppression", "Unique"])
def test_what_the_data_size_is_no_batch(kind):
    """Also where the file declares the result, whose leading dim is not the number of samples."""
    given = {"NonMaxSuppression": ["boxes", "scores"], "Unique": ["h"]}[kind]
    nodes = [
        node("MatMul", ["x", "w"], ["h"]), node("Unsqueeze", ["h", "places"], ["scores"]), node(kind, given, ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 8)),
         helper.make_tensor_value_info("boxes", TensorProto.FLOAT, ("N", 8, 4))],
        [helper.make_tensor_value_info("y", TensorProto.INT64, ("found", 3)[: 2 if "boxes" in given else 1])],
        [weight("w", 8, 8), numpy_helper.from_array(np.array([1]), "places")],
    )  # fmt: skip
    with pytest.raises(ModelError, match="the boxes and scores as its outputs" if "boxes" in given else "as the data"):
        load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def test_a_detector_of_one_image_is_told_to_leave_out_picking_boxes():
    """As torchvision's detectors are exported: an image without a dim of samples, and boxes picked in a branch."""
    picked = node("NonMaxSuppression", ["boxes", "scores"], ["found"])
    branch = helper.make_graph([picked], "pick", [], [helper.make_tensor_value_info("found", TensorProto.INT64, None)])
    nodes = [
        node("Conv", ["image", "w"], ["h"]), node("ReduceMax", ["h"], ["most"], keepdims=0),
        node("Cast", ["most"], ["any"], to=TensorProto.BOOL),
        node("If", ["any"], ["y"], then_branch=branch, else_branch=branch),
    ]  # fmt: skip
    with pytest.raises(ModelError, match=r"Conv.*the boxes and scores as its outputs"):
        load_model(model(nodes, [weight("w", 8, 3, 3, 3)], (("image", 3, 32, 32),)))


def test_all_dims_without_sizes_are_named_at_once():
    data = model([node("Gather", ["e", "x"], ["y"])], [weight("e", 20, 6)], (("x", "batch", "rows", "columns"),))
    with pytest.raises(ModelError, match="--dim rows=128 --dim columns=128") as fault:
        load_model(data)
    assert (fault.value.field, fault.value.value) == ("dims.rows", "unbound")
    assert load_model(data, dims={"rows": 3, "columns": 4}).tensors["x"].shape == (1, 3, 4)


@pytest.mark.parametrize("batch", ["N", 2, 1])
def test_a_module_s_own_parameters_among_the_inputs(batch):
    """PyTorch's older exporter without stored weights lists data, then names without a dot, then those of modules."""
    nodes = [
        node("Concat", ["x", "cls_token"], ["t"], axis=1) if batch == 1 else node("Add", ["x", "cls_token"], ["t"]),
        node("Mul", ["t", "scale"], ["s"]),
        node("MatMul", ["s", "fc.weight"], ["y"]),
    ]
    inputs = [("x", batch, 2, 8), ("cls_token", 1, 1, 8), ("scale", 2, 1) if batch != 1 else ("scale", 1, 3, 1)]
    made = onnx.load_from_string(model(nodes, [], [*inputs, ("fc.weight", 8, 8)]))
    made.producer_name = "pytorch"
    graph = load_model(made.SerializeToString())
    names = {p.name for p in graph.parameters}
    said = "cls_token, scale: taken as parameters of the module itself, not as data"
    if batch == 1:
        # A leading dim of 1 may be that of one sample: it is said, and a name decides.
        said = "cls_token, scale: taken as data; if they are parameters, name them, as in `--parameters scale`"
        named = load_model(made.SerializeToString(), parameters=("cls_token", "scale"))
        assert {p.name for p in named.parameters} == {"cls_token", "scale", "fc.weight"}
    else:
        assert names == {"cls_token", "scale", "fc.weight"}
    assert said in graph.warnings
