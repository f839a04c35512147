"""Loops of known length equal the same operators written out by hand."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError, ModelTooExpensive
from ir.onnx.load import load_model
from ir.onnx.rewrites import loops
from ir.onnx.strip import strip

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
node = helper.make_node


def value(name, *dims, dtype=FLOAT):
    return helper.make_tensor_value_info(name, dtype, dims)


def weight(name, *shape):
    return numpy_helper.from_array(np.ones(shape, np.float32), name)


def number(name, given):
    return numpy_helper.from_array(np.asarray(given), name)


def model(nodes, stored, inputs=(("x", "N", 80),)) -> bytes:
    """A file whose last node writes y."""
    y = helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph(nodes, "loops", [value(*i) for i in inputs], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()


def facts(data: bytes) -> tuple:
    graph = load_model(data)
    outputs = [(graph.tensors[n].shape, graph.tensors[n].batch_dim) for n in graph.outputs]
    live = [(op.kind, op.forward_flops) for op in graph.operators if op.is_live]
    return graph.num_parameters, live, outputs


def layer(state="s", out="o"):
    """A product with the weight of the file, and a bias of the body."""
    return [node("MatMul", [state, "w"], [f"{out}m"]), node("Add", [f"{out}m", "b"], [out])]


LAYERS = [
    *layer("x", "h1"), *layer("h1", "h2"), *layer("h2", "h3"), node("Relu", ["h3"], ["y"]),
]  # fmt: skip
WEIGHTS = [weight("w", 80, 80), weight("b", 80)]


def body(end):
    """Of a Loop: `end` are the nodes that write c, whether it goes on."""
    return helper.make_graph(
        [*layer(), *end], "body", [value("i", dtype=INT64), value("c0", dtype=BOOL), value("s", "N", 80)],
        [value("c", dtype=BOOL), value("o", "N", 80)], WEIGHTS[1:],
    )  # fmt: skip


ENDS = {"count": ([node("Identity", ["c0"], ["c"])], 3), "condition": ([node("Less", ["i", "two"], ["c"])], 99)}


@pytest.mark.parametrize("end", ENDS)
def test_a_loop_is_its_iterations(end):
    """Of a given number, and until a condition that needs no data."""
    nodes, most = ENDS[end]
    data = model(
        [node("Loop", ["n", "on", "x"], ["l"], body=body(nodes)), node("Relu", ["l"], ["y"])],
        [WEIGHTS[0], number("n", most), number("on", True), number("two", 2)],
    )
    assert facts(data) == facts(model(LAYERS, WEIGHTS))
    assert facts(strip(data).data) == facts(data)


def test_a_scan_is_a_recurrence_over_positions():
    """Its stacked result has a part for each position; read backwards, the first is the last."""
    inner = helper.make_graph(
        [node("MatMul", ["s", "w"], ["m"]), node("Add", ["m", "p"], ["o"]), node("Tanh", ["o"], ["t"])], "body",
        [value("s", "N", 80), value("p", "N", 80)], [value("o", "N", 80), value("t", "N", 80)],
    )  # fmt: skip
    scan = node("Scan", ["s0", "x"], ["last", "y"], body=inner, num_scan_inputs=1, scan_input_directions=[1])
    inputs = (("s0", "N", 80), ("x", 4, "N", 80))
    graph = load_model(model([scan], WEIGHTS[:1], inputs))
    assert graph.num_parameters == 80 * 80
    assert sum(op.forward_flops.at(1) for op in graph.operators if op.kind == "MatMul") == 4 * 2 * 80 * 80
    assert (graph.tensors["y"].shape, graph.tensors["y"].batch_dim) == ((4, 1, 80), 1)
    read = [dict(op.attributes)["indices"] for op in graph.operators if op.kind == "Gather"]
    assert read == [3, 2, 1, 0]


def test_a_scan_over_each_sample_is_refused_with_a_repair():
    """That of operator set 8: its first operand is the lengths of sequences, and its body sees no samples."""
    inner = helper.make_graph(
        [node("MatMul", ["s", "w"], ["m"]), node("Add", ["m", "p"], ["o"]), node("Tanh", ["o"], ["t"])], "body",
        [value("s", 80), value("p", 80)], [value("o", 80), value("t", 80)],
    )  # fmt: skip
    scan = node("Scan", ["", "s0", "x"], ["last", "y"], "cell", body=inner, num_scan_inputs=1)
    y = helper.make_tensor_value_info("y", FLOAT, None)
    inputs = [value("s0", "N", 80), value("x", "N", 4, 80)]
    graph = helper.make_graph([scan], "loops", inputs, [y], WEIGHTS[:1])
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)]).SerializeToString()
    with pytest.raises(ModelError, match=r"operator set 9 or newer") as error:
        load_model(data)
    assert error.value.value == "cell"


@pytest.mark.parametrize(
    ("nodes", "inputs", "error", "reason"),
    [
        ([node("Identity", ["c0"], ["c"])], (("n",),), ModelError, "length of a Loop depends on data"),
        (
            [node("ReduceSum", ["o"], ["r"], keepdims=0), node("Cast", ["r"], ["c"], to=BOOL)], (), ModelError,
            "end of a Loop depends on data",
        ),
        ([node("Identity", ["c0"], ["c"])], (), ModelTooExpensive, "more than"),
    ],
)  # fmt: skip
def test_other_loops_are_refused(monkeypatch, nodes, inputs, error, reason):
    monkeypatch.setattr(loops, "MAX_NODES", 300)
    stored = [WEIGHTS[0], number("on", True), *([] if inputs else [number("n", 1 << 40)])]
    loop = [node("Loop", ["n", "on", "x"], ["l"], body=body(nodes)), node("Relu", ["l"], ["y"])]
    declared = [value("x", "N", 80), *(value(*i, dtype=INT64) for i in inputs)]
    y = helper.make_tensor_value_info("y", FLOAT, None)
    graph = helper.make_graph(loop, "loops", declared, [y], stored)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()
    with pytest.raises(error, match=reason):
        load_model(data)


def test_a_loop_within_a_loop_is_bounded_as_a_whole(monkeypatch):
    """Each would be small enough by itself."""
    monkeypatch.setattr(loops, "MAX_NODES", 300)
    inner = node("Loop", ["many", "on", "s"], ["o"], body=body([node("Identity", ["c0"], ["c"])]), name="inner")
    outer = helper.make_graph(
        [inner, node("Identity", ["k0"], ["k"])], "outer",
        [value("j", dtype=INT64), value("k0", dtype=BOOL), value("s", "N", 80)],
        [value("k", dtype=BOOL), value("o", "N", 80)],
    )  # fmt: skip
    nodes = [node("Loop", ["many", "on", "x"], ["l"], body=outer), node("Relu", ["l"], ["y"])]
    stored = [WEIGHTS[0], number("on", True)]
    with pytest.raises(ModelTooExpensive, match="in all"):
        load_model(model(nodes, [*stored, number("many", 100)]))
    graph = load_model(model(nodes, [*stored, number("many", 3)]))
    assert sum(op.kind == "MatMul" for op in graph.operators) == 9
    assert graph.num_parameters == 80 * 80 + 80
