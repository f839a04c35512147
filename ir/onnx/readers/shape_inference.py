"""Output shapes of a standard operator outside the table, by onnx's own inference of one node at a time.

Inference over a whole model would walk functions and subgraphs, and crashes where a required operand is absent; a
single node is checked against its schema first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper, numpy_helper

from ir.errors import ModelError
from ir.graph import Tensor
from ir.onnx.readers.nodes import DTYPES, Declared, Node, declared
from ir.operators import Value

NUMBERS = {name: number for number, name in sorted(DTYPES.items(), reverse=True)}
REQUIRED = onnx.defs.OpSchema.FormalParameterOption.Single


def infer(
    node: Node,
    inputs: Sequence[str],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Value],
    num_samples: int,
) -> dict[str, Declared]:
    """Infers the results of one node.

    Args:
        node: the node, with the names of the file.
        inputs: names of its operands in `tensors` and `values`.
        tensors: known tensors.
        values: known constants.
        num_samples: number of samples of the export.

    Returns:
        result -> its type at `num_samples` samples; empty where nothing can be inferred.
    """
    try:
        schema = onnx.defs.get_schema(node.kind, node.opset or onnx.defs.onnx_opset_version(), "")
    except onnx.defs.SchemaError:
        return {}
    formal = schema.inputs
    if any(f.option == REQUIRED and not (i < len(inputs) and inputs[i]) for i, f in enumerate(formal)):
        return {}
    try:
        types = {
            name: helper.make_tensor_type_proto(NUMBERS[tensors[name].dtype], tensors[name].shape_at(num_samples))
            if name in tensors
            else helper.make_tensor_type_proto(NUMBERS[str(values[name].dtype)], values[name].shape)
            for name in inputs
            if name
        }
        proto = helper.make_node(node.kind, list(inputs), node.outputs, **node.attributes)
        data = {name: numpy_helper.from_array(values[name], name) for name in inputs if name in values}
        opsets = [helper.make_opsetid("", node.opset)]
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, data, opset_imports=opsets)
        return {name: declared(onnx.ValueInfoProto(name=name, type=kind)) for name, kind in found.items()}
    except (
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
        ModelError,
        KeyError,
        TypeError,
        ValueError,
        RuntimeError,
    ):
        return {}
