"""Attributes, numbers of operands and result shapes of standard operators, according to the onnx package's schemas.

Shapes are inferred only for kinds that are not in the table, one node at a time. Shape inference of a whole model would
also process functions and subgraphs, and crashes if a required operand is absent; a single node can be checked against
its schema first.
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
from ir.onnx.readers.nodes import DTYPES, Declared, Node, dtype_name, small_value
from ir.operators import Value

DTYPE_ATTRIBUTES = {"Cast": "to"} | dict.fromkeys(
    ("EyeLike", "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli"), "dtype"
)
"""Kind -> its attribute that is a `TensorProto.DataType`."""
GEMM_DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
"""Default values of attributes of Gemm, which are removed, since only some exporters write them."""
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
    """Checks that a node does not have more operands (`count`) than its kind allows.

    Raises:
        ModelError: it does; the message states the node and both numbers.
    """
    # The reader adds the tensors that branches and bodies read to the operands of control flow nodes.
    schema = _schema(node.kind, node.opset) if node.kind not in ("If", "Loop", "Scan") else None
    if schema is not None and count > schema.max_input:
        most = f"{schema.max_input} operand{'s' if schema.max_input != 1 else ''}"
        raise refuse(
            f"operator {node.name or node.outputs[0]} ({node.kind}) has {count} operands, but takes at most {most}",
            f"{node.kind}({', '.join(node.inputs)})",
            f"Remove the operands after the first {schema.max_input}, or export the model again.",
        )


def with_picked_boxes(error: ModelError, model: onnx.ModelProto) -> ModelError:
    """The error for a file that cannot be read, with a hint if it selects boxes, as detectors do for inference.

    Such files are exported for one image without a batch dim. The first operator that cannot be read is often unrelated
    to the selection of boxes, so that its error alone would be misleading.

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
    """Checks that a node of the standard domain, whose results have no declared shape, is a kind that ONNX defines.

    Raises:
        ModelError: ONNX has no such kind; the message names the node.
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
    """Infers the types of the results of one node.

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


def plain_attributes(node: Node) -> dict[str, Any]:
    """The attributes of a node in the form that the table of kinds expects."""
    found = dict(node.attributes)
    key = DTYPE_ATTRIBUTES.get(node.kind)
    if key and key in found:
        found[key] = dtype_name(int(found[key]))
    if node.kind == "Gemm":
        found = {k: v for k, v in found.items() if GEMM_DEFAULTS.get(k) != v}
    if node.kind == "ConstantOfShape":
        fill = small_value(found["value"]) if "value" in found else None
        found["value"] = 0.0 if fill is None else fill.reshape(-1)[0].item()
        found["dtype"] = "float32" if fill is None else str(fill.dtype)
    if node.kind == "Constant":
        return {}
    return {k: v for k, v in found.items() if isinstance(v, (int, float, str, tuple))}
