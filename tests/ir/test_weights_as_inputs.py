"""Files that store no weights: what operators read as weights are parameters."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.onnx.load import load_model

node = helper.make_node
SHAPES = {"kernel": (4, 3, 3, 3), "kernel_bias": (4,), "scale": (4,), "shift": (4,), "mean": (4,), "var": (4,),
          "w": (5, 256), "b": (5,)}  # fmt: skip
NODES = [
    node("Conv", ["x", "kernel", "kernel_bias"], ["c"], pads=[1] * 4),
    node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"]), node("Flatten", ["n"], ["f"]),
    node("Transpose", ["w"], ["t"], perm=[1, 0]), node("MatMul", ["f", "t"], ["m"]), node("Add", ["m", "b"], ["y"]),
]  # fmt: skip


def file(nodes, shapes, *, stored=False, **data):
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in data.items()]
    held = []
    for name, shape in shapes.items():
        if stored:
            held.append(numpy_helper.from_array(np.random.default_rng(0).normal(size=shape).astype(np.float32), name))
        else:
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "g", inputs, [y], held), opset_imports=[helper.make_opsetid("", 17)]
    )
    return model.SerializeToString()


@pytest.mark.parametrize("batch", (1, 4, "n"))
def test_a_network_is_that_of_the_file_with_weights(batch):
    """Among others if the batch is as large as a weight's leading dim."""
    x = {"x": (batch, 3, 8, 8)}
    given, expected = (load_model(file(NODES, SHAPES, stored=stored, **x)) for stored in (False, True))
    assert {t.name: t.shape for t in given.parameters} == {t.name: t.shape for t in expected.parameters}
    assert given.forward_flops == expected.forward_flops
    assert {t.name: t.role for t in given.tensors.values()} == {t.name: t.role for t in expected.tensors.values()}
    (warning,) = given.warnings
    assert warning.startswith("kernel, kernel_bias, scale and 3 more: taken as parameters")


@pytest.mark.parametrize("second", [("n", 6, 5), (1, 6, 5)], ids=("samples", "one sample"))
def test_a_product_of_data_has_no_weight(second):
    with pytest.raises(ModelError, match="no trainable parameter"):
        load_model(file([node("MatMul", ["x", "k"], ["y"])], {}, x=(second[0], 4, 6), k=second))


def test_beside_stored_weights_inputs_are_data():
    """Such as the adjacency of a graph network, which all samples share."""
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "adjacency"], ["y"])]
    graph = load_model(file(nodes, {"w": (6, 5)}, stored=True, x=("n", 4, 6), adjacency=(5, 5)))
    assert [t.name for t in graph.parameters] == ["w"]


def test_what_is_named_is_a_parameter_too():
    nodes = [*NODES[:-1], node("Add", ["m", "table"], ["y"])]
    shapes = {name: shape for name, shape in SHAPES.items() if name != "b"} | {"table": (1, 5)}
    graph = load_model(file(nodes, shapes, x=("n", 3, 8, 8)), parameters=["table"])
    assert {t.name for t in graph.parameters} == {"kernel", "kernel_bias", "scale", "shift", "w", "table"}


def test_what_is_stated_as_data_is_no_weight():
    graph = load_model(
        file(
            [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "k"], ["y"])],
            {"w": (6, 5)},
            x=("n", 4, 6),
            k=(5, 5),
        ),
        batch_dims={"k": None},
    )
    assert [t.name for t in graph.parameters] == ["w"] and graph.tensors["k"].role == "input"
    assert list(graph.warnings) == ["w: taken as parameters, since the file stores none and they are read as weights"]
