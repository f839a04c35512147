"""How tf2onnx and jax2onnx write norms, attention and loops: the same parts are found as in files of PyTorch."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.blocks import find_units
from ir.canonical import BIAS_TRAFFIC
from ir.frozen import names_in_file
from ir.groups import fused_groups
from ir.onnx.load import load_model

node = helper.make_node
BATCH, LENGTH, HEADS, SIZE = 3, 6, 4, 8
WIDTH = HEADS * SIZE
RANDOM = np.random.default_rng(0)


def load(nodes, held, x=("N", LENGTH, WIDTH), y=("N", LENGTH, WIDTH)):
    """The graph of nodes that read `x` and write `y`."""
    stored = [numpy_helper.from_array(np.asarray(v), n) for n, v in held.items()]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shape) for n, shape in (("x", x), ("y", y))]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], stored)
    return load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def weights(*shapes):
    return {f"w{i}": RANDOM.normal(size=shape).astype(np.float32) for i, shape in enumerate(shapes)}


def number(value, dtype=np.float32):
    return np.asarray(value, dtype)


def kinds(graph):
    return [(group.kind, len(group.members)) for group in fused_groups(graph)]


def test_a_norm_of_tensorflow_is_one_group():
    """Its optimizer writes the mean as a pooling, and joins the scale to the deviation and the shift to the mean."""
    nodes = [
        node("MatMul", ["x", "w0"], ["h"]), node("GlobalAveragePool", ["h"], ["mean"]),
        node("Sub", ["h", "mean"], ["d"]), node("Mul", ["d", "d"], ["square"]),
        node("GlobalAveragePool", ["square"], ["var"]), node("Add", ["var", "eps"], ["e"]), node("Sqrt", ["e"], ["s"]),
        node("Reciprocal", ["s"], ["r"]), node("Mul", ["r", "w1"], ["m"]), node("Mul", ["h", "m"], ["a"]),
        node("Neg", ["mean"], ["n"]), node("Mul", ["n", "m"], ["b"]), node("Add", ["b", "w2"], ["c"]),
        node("Add", ["a", "c"], ["z"]), node("MatMul", ["z", "w0"], ["y"]),
    ]  # fmt: skip
    held = {**weights((WIDTH, WIDTH), (1, 1, WIDTH), (1, 1, WIDTH)), "eps": number(1e-3)}
    assert kinds(load(nodes, held)) == [("norm", 13)]


def test_a_variance_of_moments_is_a_norm():
    nodes = [
        node("MatMul", ["x", "w0"], ["h"]), node("ReduceMean", ["h"], ["mean"], axes=[2]),
        node("Sub", ["h", "mean"], ["d"]), node("Mul", ["h", "h"], ["square"]),
        node("ReduceMean", ["square"], ["second"], axes=[2]), node("Mul", ["mean", "mean"], ["first"]),
        node("Sub", ["second", "first"], ["v"]), node("Max", ["v", "zero"], ["var"]),
        node("Add", ["var", "eps"], ["e"]), node("Sqrt", ["e"], ["s"]), node("Div", ["d", "s"], ["n"]),
        node("Mul", ["n", "w1"], ["z"]),
        node("MatMul", ["z", "w0"], ["y"]),
    ]  # fmt: skip
    held = {**weights((WIDTH, WIDTH), (WIDTH,)), "eps": number(1e-6), "zero": number(0)}
    assert kinds(load(nodes, held)) == [("norm", 11)]


def heads(*behind):
    """Queries, keys and values as `[b, s, h, d]`, and what is done with them."""
    nodes = []
    for i, name in enumerate("qkv"):
        nodes += [node("MatMul", ["x", f"w{i}"], [f"{name}0"]), node("Reshape", [f"{name}0", "split"], [name])]
    return [*nodes, *behind, node("Reshape", ["o", "join"], ["y"])]


HELD = {
    **weights(*[(WIDTH, WIDTH)] * 3), "split": number([-1, LENGTH, HEADS, SIZE], np.int64),
    "join": number([-1, LENGTH, WIDTH], np.int64),
}  # fmt: skip


def test_an_einsum_that_was_written_as_a_product_has_heads():
    """tf2onnx views operands of an Einsum as `[(b h), rows, columns]`, with dims of 1 for the loops they lack."""
    to = {"to_q": [-1, LENGTH, SIZE], "to_s": [-1, HEADS, LENGTH, LENGTH, 1], "to_w": [-1, LENGTH, LENGTH],
          "to_v": [-1, SIZE, LENGTH], "to_o": [-1, HEADS, LENGTH, SIZE, 1]}  # fmt: skip
    nodes = heads(
        node("Unsqueeze", ["q", "three"], ["q5"]), node("Transpose", ["q5"], ["qt"], perm=[0, 2, 1, 3, 4]),
        node("Reshape", ["qt", "to_q"], ["qm"]), node("Unsqueeze", ["k", "one"], ["k5"]),
        node("Transpose", ["k5"], ["kt"], perm=[0, 3, 1, 2, 4]), node("Reshape", ["kt", "to_q"], ["km"]),
        node("Transpose", ["km"], ["kx"], perm=[0, 2, 1]), node("MatMul", ["qm", "kx"], ["sm"]),
        node("Reshape", ["sm", "to_s"], ["s5"]), node("Squeeze", ["s5", "four"], ["s"]), node("Softmax", ["s"], ["p"]),
        node("Unsqueeze", ["p", "three"], ["p5"]), node("Reshape", ["p5", "to_w"], ["pm"]),
        node("Unsqueeze", ["v", "two"], ["v5"]), node("Transpose", ["v5"], ["vt"], perm=[0, 3, 2, 4, 1]),
        node("Reshape", ["vt", "to_v"], ["vm"]), node("Transpose", ["vm"], ["vx"], perm=[0, 2, 1]),
        node("MatMul", ["pm", "vx"], ["om"]), node("Reshape", ["om", "to_o"], ["o5"]),
        node("Squeeze", ["o5", "four"], ["o4"]), node("Transpose", ["o4"], ["o"], perm=[0, 2, 1, 3]),
    )  # fmt: skip
    axes = {"one": [1], "two": [2], "three": [3], "four": [4]}
    held = {**HELD, **{name: number(value, np.int64) for name, value in {**to, **axes}.items()}}
    for batch in ("N", BATCH):
        graph = load(nodes, held, (batch, LENGTH, WIDTH), (batch, LENGTH, WIDTH))
        products = [op for op in graph if op.kind == "MatMul" and len(graph.tensors[op.outputs[0]].shape) == 4]
        assert [graph.tensors[op.outputs[0]].shape[:2] for op in products] == [(1, HEADS)] * 2
        assert [kind for kind, _ in kinds(graph)] == ["attention"]


def test_weights_that_are_masked_behind_the_softmax_are_attention():
    """jax2onnx takes hidden weights out behind the softmax and divides by what is left."""
    nodes = heads(
        node("Transpose", ["q"], ["qt"], perm=[0, 2, 1, 3]), node("Transpose", ["k"], ["kt"], perm=[0, 2, 3, 1]),
        node("MatMul", ["qt", "kt"], ["s"]), node("Softmax", ["s"], ["p"]), node("Mul", ["p", "mask"], ["m"]),
        node("ReduceSum", ["m", "last"], ["t"]), node("Greater", ["t", "zero"], ["g"]),
        node("Where", ["g", "t", "unit"], ["d"]), node("Div", ["m", "d"], ["w"]),
        node("Transpose", ["v"], ["vt"], perm=[0, 2, 1, 3]), node("MatMul", ["w", "vt"], ["a"]),
        node("Transpose", ["a"], ["o"], perm=[0, 2, 1, 3]),
    )  # fmt: skip
    held = {**HELD, "mask": np.tril(np.ones((LENGTH, LENGTH), np.float32)), "last": number([3], np.int64),
            "zero": number(0), "unit": number(1)}  # fmt: skip
    assert [kind for kind, _ in kinds(load(nodes, held))] == ["attention"]


def loop(kind, outer, state, scanned, results):
    """A Loop or Scan of three iterations whose body multiplies `s` by `u` and returns all its state."""
    value = helper.make_tensor_value_info
    nodes = [node("MatMul", ["s", "u"], ["t"]), node("Tanh", ["t"], ["o"])]
    inputs, outputs = [value("s", TensorProto.FLOAT, None)], [value("o", TensorProto.FLOAT, None)]
    inputs += [value("u", TensorProto.FLOAT, None)]
    if kind == "Scan":
        body = helper.make_graph(nodes, "body", inputs, outputs)
        return node("Scan", [*state, *scanned], results, body=body, num_scan_inputs=len(scanned))
    nodes += [node("Identity", ["c"], ["c1"]), node("Identity", ["u"], ["u1"])]
    ahead = [value("i", TensorProto.INT64, []), value("c", TensorProto.BOOL, [])]
    outputs = [value("c1", TensorProto.BOOL, []), *outputs, value("u1", TensorProto.FLOAT, None)]
    body = helper.make_graph(nodes, "body", [*ahead, *inputs], outputs)
    return node("Loop", [*outer, *state], results, body=body)


def test_weights_that_a_loop_carries_are_parameters():
    """tf2onnx hands the weights of a recurrent cell to the body as state."""
    held = {**weights((WIDTH, WIDTH)), "count": number(3, np.int64), "on": number(True, np.bool_)}
    graph = load([loop("Loop", ["count", "on"], ["x", "w0"], [], ["y", "left"])], held)
    assert graph.num_parameters == WIDTH**2
    assert graph.forward_flops == 3 * 2 * LENGTH * WIDTH**2


def test_what_a_recurrence_begins_with_is_no_parameter():
    """JAX stores zeros for the first state, which the body changes."""
    held = {"first": np.zeros((BATCH, WIDTH), np.float32), **weights((LENGTH, WIDTH, WIDTH))}
    nodes = [loop("Scan", [], ["first"], ["w0"], ["last"]), node("Add", ["x", "last"], ["y"])]
    graph = load(nodes, held, (BATCH, WIDTH), (BATCH, WIDTH))
    assert graph.num_parameters == LENGTH * WIDTH**2


def test_weights_of_layers_that_are_scanned_are_parameters():
    """Layers whose weights are stacked, as JAX's `scan` takes them, are read one after the other."""
    nodes = [node("MatMul", ["x", "w1"], ["h"]), loop("Scan", [], ["h"], ["w0"], ["y"])]
    graph = load(nodes, weights((6, WIDTH, WIDTH), (WIDTH, WIDTH)))
    assert graph.num_parameters == 7 * WIDTH**2
    assert graph.forward_flops == 7 * 2 * LENGTH * WIDTH**2
    # Each is a parameter of its own, so that layers are alike and a pipeline has nothing in common.
    assert graph.pieces["w0#4"] == ("w0", 0, 4, 5)
    assert (find_units(graph).num_blocks, find_units(graph).num_types) == (6, 2)


@pytest.mark.parametrize("form", ["slices", "split", "last"])
def test_layers_that_slice_stacked_weights(form):
    """Layers in a Python loop over a stack, as in JAX, are those of a scan; a stack with unread layers stays whole."""
    num, held = 3, {"axes": number([0], np.int64), **weights((3, WIDTH, WIDTH))}
    read = range(num) if form != "last" else range(1, num)
    nodes = [node("Split", ["w0"], [f"p{i}" for i in range(num)], axis=0)] if form == "split" else []
    for i in read:
        if form != "split":
            held |= {f"from{i}": number([i - num], np.int64), f"to{i}": number([i + 1], np.int64)}
            nodes += [node("Slice", ["w0", f"from{i}", f"to{i}", "axes"], [f"p{i}"])]
        x = "x" if i == read[0] else f"y{i - 1}"
        # A cast to the type that the operand has is no operator: JAX ends all iterations but the last one with it.
        y = "y" if i == num - 1 else f"y{i}"
        nodes += [node("Squeeze", [f"p{i}", "axes"], [f"q{i}"]), node("MatMul", [x, f"q{i}"], [f"h{i}"])]
        nodes += [node("Tanh", [f"h{i}"], [y if i == num - 1 else f"c{i}"])]
        nodes += [node("Cast", [f"c{i}"], [y], to=TensorProto.FLOAT)] if i < num - 1 else []
    graph = load(nodes, held)
    assert graph.num_parameters == num * WIDTH**2
    assert graph.forward_flops == len(read) * 2 * LENGTH * WIDTH**2
    assert not any(op.kind == "Cast" for op in graph)
    assert bool(graph.pieces) == (form != "last")
    if graph.pieces:
        assert [graph.pieces[f"w0#{i}"] for i in range(num)] == [("w0", 0, i, i + 1) for i in range(num)]
        assert (find_units(graph).num_blocks, find_units(graph).num_types) == (num - 1, 2)  # the last has the loss


def test_a_fused_weight_in_a_stack_is_taken_apart():
    """An Einsum with a matrix is a product; its weights are pieces of a layer's, which are pieces of the stack."""
    body = helper.make_graph(
        [
            node("Einsum", ["s", "u"], ["t"], equation="abk,kn->abn"), node("Split", ["t"], ["a", "b"], axis=2),
            node("Sigmoid", ["a"], ["g"]), node("Mul", ["g", "b"], ["o"]),
        ],
        "body", [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "su"],
        [helper.make_tensor_value_info("o", TensorProto.FLOAT, None)],
    )  # fmt: skip
    graph = load([node("Scan", ["x", "w0"], ["y"], body=body, num_scan_inputs=1)], weights((3, WIDTH, 2 * WIDTH)))
    assert graph.num_parameters == 3 * 2 * WIDTH**2
    assert [tensor.shape for tensor in graph.parameters] == [(1, WIDTH, WIDTH)] * 6
    assert graph.pieces["w0#1#0"] == ("w0#1", 2, 0, WIDTH)
    assert {names_in_file(graph, tensor.name) for tensor in graph.parameters} == {("w0",)}
    assert not {"Split", "Einsum"} & {op.kind for op in graph}


def test_sequences_that_are_read_from_their_end():
    nodes = [
        node("MatMul", ["x", "w0"], ["h"]),
        node("ReverseSequence", ["h", "lengths"], ["y"], batch_axis=0, time_axis=1),
    ]
    held = {**weights((WIDTH, WIDTH)), "lengths": number([LENGTH] * BATCH, np.int64)}
    graph = load(nodes, held, (BATCH, LENGTH, WIDTH), (BATCH, LENGTH, WIDTH))
    assert [op.kind for op in graph] == ["MatMul", "Slice"]
    assert graph.tensors["y"].batch_dim == 0
    assert not graph.warnings


IMAGES = {"x": ("N", 3, 8, 8), "y": ("N", 8, 8, 8)}
NORM = 2 * 8


@pytest.mark.parametrize(
    ("weight", "bias", "own"),
    [
        ("c/merged_input:0", "n/batchnorm/sub:0", 0), ("c/merged_input:0", "", 0), ("c/merged_input:0", "c/bias:0", 8),
        ("c_weights_fused_bn", "c_bias_fused_bn", 0), ("c/kernel:0", "c/bias:0", 8 - NORM),
    ],
)  # fmt: skip
def test_normalisations_that_tensorflow_folds_are_apart(weight, bias, own):
    held = {weight: RANDOM.normal(size=(8, 3, 3, 3)).astype(np.float32)}
    held |= {bias: RANDOM.normal(size=8).astype(np.float32)} if bias else {}
    conv = node("Conv", ["x", *held], ["c"], name="Conv__1", pads=[1, 1, 1, 1])
    graph = load([conv, node("Relu", ["c"], ["y"])], held, **IMAGES)
    assert graph.num_parameters == 8 * 27 + own + NORM
    assert ("BatchNormalization" in [op.kind for op in graph]) == ("kernel" not in weight)


@pytest.mark.parametrize("named", [True, False])
def test_normalisations_behind_depthwise_convolutions(named):
    scale, shift = ("n/batchnorm/mul_1", "n/batchnorm/add_1") if named else ("scale", "shift")
    nodes = [
        node("Conv", ["x", "w0"], ["c"], name="d/depthwise", pads=[1, 1, 1, 1]),
        node("Mul", ["c", "w1"], ["m"], name=scale), node("Add", ["m", "w2"], ["a"], name=shift),
        node("Relu", ["a"], ["y"]),
    ]  # fmt: skip
    graph = load(nodes, weights((8, 3, 3, 3), (1, 8, 1, 1), (1, 8, 1, 1)), **IMAGES)
    assert graph.num_parameters == 8 * 27 + NORM
    kinds = ["Conv", "BatchNormalization", "Relu"] if named else ["Conv", "Mul", "Add", "Relu"]
    assert [op.kind for op in graph] == kinds


@pytest.mark.parametrize(
    ("depth", "end", "is_told"),
    [(17, "Add", True), (16, "Add", False), (17, "Relu", False), (17, "InstanceNormalization", False)],
)
def test_many_convolutions_without_a_normalisation_are_told(depth, end, is_told):
    nodes = [node("Conv", [f"c{i}" if i else "x", "w0", "w1"], [f"c{i + 1}"]) for i in range(depth)]
    last = f"c{depth}"
    if end != "Relu":
        nodes.append(node("Add", [last, "c1"], ["sum"]))
        last = "sum"
    sides = {"Add": ["c1"], "InstanceNormalization": ["w1", "w1"]}.get(end, [])
    nodes.append(node(end, [last, *sides], ["y"]))
    graph = load(nodes, weights((3, 3, 1, 1), (3,)), ("N", 3, 8, 8), ("N", 3, 8, 8))
    assert any("export for training" in warning for warning in graph.warnings) == is_told


def test_a_bias_of_several_dims_is_added_where_the_product_is_written():
    """As Keras and JAX write heads; numbers that each row has are no such bias."""
    nodes = [
        node("Einsum", ["x", "w0"], ["h"], equation="abc,cde->abde"), node("Add", ["w1", "h"], ["b"]),
        node("Add", ["b", "w2"], ["c"]), node("Einsum", ["c", "w3"], ["o"], equation="abde,def->abf"),
        node("Add", ["o", "w4"], ["y"]),
    ]  # fmt: skip
    shapes = [(WIDTH, HEADS, SIZE), (HEADS, SIZE), (LENGTH, HEADS, SIZE), (HEADS, SIZE, WIDTH), (WIDTH,)]
    sums = [op for op in load(nodes, weights(*shapes)) if op.kind == "Add"]
    assert [op.traffic == BIAS_TRAFFIC for op in sums] == [True, False, True]
