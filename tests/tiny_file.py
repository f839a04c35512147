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
