"""What onnx's own schemas say about a standard operator: how many operands it takes, and the shapes of its results.

Shapes are inferred for kinds outside the table, one node at a time. Inference over a whole model would walk functions
and subgraphs, and crashes where a required operand is absent; a single node is checked against its schema first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import helper, numpy_helper

from ir.errors import ModelError, refuse
from ir.graph import Tensor
from ir.onnx.readers.control_flow import all_graphs
from ir.onnx.readers.declarations import declared
from ir.onnx.readers.nodes import DTYPES, Declared, Node
from ir.operators import Value

NUMBERS = {name: number for number, name in sorted(DTYPES.items(), reverse=True)}
REQUIRED = onnx.defs.OpSchema.FormalParameterOption.Single


@functools.lru_cache(maxsize=1024)
def _schema(kind: str, opset: int) -> Any:
    """The schema of a standard operator in a version of the operator set (0 = the latest); None if there is none."""
    try:
        return onnx.defs.get_schema(kind, opset or onnx.defs.onnx_opset_version(), "")
    except (onnx.defs.SchemaError, TypeError):  # versions of other domains may be larger than onnx's integers
        return None


def check_num_operands(node: Node, count: int) -> None:
    """Refuses a node with more operands than its kind takes; `count` is their number.

    Raises:
        ModelError: names the node and both numbers.
    """
    # The reader adds to control flow the tensors that its branches and bodies read.
    schema = _schema(node.kind, node.opset) if node.kind not in ("If", "Loop", "Scan") else None
    if schema is not None and count > schema.max_input:
        most = f"{schema.max_input} operand{'s' if schema.max_input != 1 else ''}"
        raise refuse(
            f"operator {node.name or node.outputs[0]} ({node.kind}) has {count} operands, but takes at most {most}",
            f"{node.kind}({', '.join(node.inputs)})",
            f"Remove the operands after the first {schema.max_input}, or export the model again.",
        )


def with_picked_boxes(error: ModelError, model: onnx.ModelProto) -> ModelError:
    """The error of a file that cannot be read; where the file picks boxes, as detectors do for inference, it says so.

    Such files are exported from one image without a dim of samples. The first operator that cannot be read is often far
    from where boxes are picked.

    Args:
        error: why the file cannot be read.
        model: the parsed file.
    """
    if error.field != "model" or not any(n.op_type == "NonMaxSuppression" for g in all_graphs(model) for n in g.node):
        return error
    repair = (
        "The file picks boxes for inference (NonMaxSuppression): hand in the network alone, with the boxes and scores "
        f"as its outputs (docs/models.md). {error.repair}"
    )
    return type(error)(**(error.texts | {"repair": repair}))


def check_is_standard(node: Node) -> None:
    """Refuses a node of the standard domain that no operator set of ONNX has; its result has no shape.

    Raises:
        ModelError: names the node.
    """
    if "." in node.kind or _schema(node.kind, node.opset) is not None or _schema(node.kind, 0) is not None:
        return
    raise refuse(
        f"operator {node.name or node.outputs[0]} is of a kind that ONNX does not have",
        node.kind,
        "The exporter left in the file what it could not convert: use a version or another exporter that can, or write"
        f" this part of the model otherwise. Or state the shape of {', '.join(node.outputs[:3])} in the file"
        " (graph.value_info): it is then read, replicated.",
    )


def infer(
    node: Node, inputs: Sequence[str], tensors: Mapping[str, Tensor], values: Mapping[str, Value], num_samples: int
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
    schema = _schema(node.kind, node.opset)
    if schema is None or any(
        f.option == REQUIRED and not (i < len(inputs) and inputs[i]) for i, f in enumerate(schema.inputs)
    ):
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
