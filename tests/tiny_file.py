"""The bytes of a small ONNX file."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper


def mlp(batch: int | str = 1, hidden: int | str = 8) -> bytes:
    """A small model, with symbolic dims where given a text."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, hidden])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 4])
    w = helper.make_tensor("w", TensorProto.FLOAT, [8, 4], [0.0] * 32)
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "mlp", [x], [y], [w])
    return onnx.ModelProto.SerializeToString(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    )


def linear(rows: int, *, is_beside: bool) -> bytes:
    """A product with a weight of [rows, 1024] floats, which is in another file that need not exist, or all zeros."""
    weight = TensorProto(name="w", dims=[rows, 1024], data_type=TensorProto.FLOAT)
    if is_beside:
        weight.data_location = TensorProto.EXTERNAL
        weight.external_data.add(key="location", value="weights.bin")
    else:
        weight.raw_data = bytes(rows * 1024 * 4)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, rows])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1024])],
        [weight],
    )
    return onnx.ModelProto.SerializeToString(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    )
