"""The same file with the same values in onnxruntime and in the interpreter.

Weights of files that have none are drawn, and so are those that a file makes by ConstantOfShape. Both sides train:
Dropout is taken out, and onnxruntime, which knows inference alone, is given batch normalisation in plain operators.
"""

import itertools

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

from automap.runtime.executor.synthetic_data import index_limits
from automap.runtime.operators.apply import run
from ir.onnx.load import load_model

BLOCK = 1 << 20
"""Number of random numbers that are drawn; larger tensors repeat them."""
FED = 4096
"""Weights with at least so many elements are fed instead of written into the file."""


def compare(data, **options):
    """Largest difference of the first result over its largest element; `options` of the importer."""
    model = onnx.load_model_from_string(data)
    _drop_nothing(model.graph)
    graph = load_model(model.SerializeToString(), **options)
    rng = np.random.default_rng(0)
    block = rng.standard_normal(BLOCK, dtype=np.float32)
    values = _values(model.graph, graph, block)
    limits = index_limits(graph)
    feeds = {}
    for value in model.graph.input:
        if value.name in values or value.name not in graph.tensors:
            continue
        tensor = graph.tensors[value.name]
        if tensor.is_float:
            feeds[value.name] = rng.standard_normal(tensor.shape, dtype=np.float32)
        else:
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feeds[value.name] = rng.integers(limits.get(value.name, 2), size=tensor.shape).astype(kind)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    bare = _with_values(model, values, {name: len(tensor.shape) for name, tensor in graph.tensors.items()})
    session = onnxruntime.InferenceSession(bare.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    fed = {value.name: (values | feeds)[value.name] for value in session.get_inputs()}
    (wanted,) = session.run([model.graph.output[0].name], fed)
    given = {name: torch.from_numpy(array) for name, array in (values | feeds).items()}
    with torch.no_grad():
        found = run(graph, given, 1)[model.graph.output[0].name].numpy()
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / (np.abs(wanted).max() or 1.0))


def _drop_nothing(graph):
    for node in graph.node:
        if node.op_type == "Dropout":
            name, source, made = node.name, node.input[0], node.output[0]
            node.CopyFrom(helper.make_node("Identity", [source], [made], name=name))


def _values(file, graph, block):
    """Name -> array of all that the file stores or should store."""
    found = {}
    for stored in file.initializer:
        has_data = stored.data_location != TensorProto.EXTERNAL and (
            stored.raw_data
            or any(len(getattr(stored, f"{kind}_data")) for kind in ("float", "int32", "int64", "double"))
        )
        found[stored.name] = numpy_helper.to_array(stored).copy() if has_data else _drawn(tuple(stored.dims), block)
    for node in file.node:
        made = node.output[0]
        if node.op_type == "ConstantOfShape" and made in graph.tensors and made not in graph.producer:
            found[made] = _drawn(graph.tensors[made].shape, block)
        if node.op_type == "Identity" and node.input[0] in found and made not in graph.producer:
            # Equal weights are stored once.
            found[made] = found[node.input[0]]
    wholes = {whole for whole, *_ in graph.pieces.values()}
    for value in file.input:
        # Exporters that leave weights out declare them among the inputs.
        tensor = graph.tensors.get(value.name)
        if value.name not in found and (value.name in wholes or (tensor is not None and tensor.role != "input")):
            kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            shape = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            # Indices point to the first row of any table.
            found[value.name] = _drawn(shape, block) if kind == np.float32 else np.zeros(shape, kind)
    return found


def _drawn(shape, block):
    fan_in = 1 if len(shape) < 2 else np.prod(shape) // shape[len(shape) == 2]
    return (np.resize(block, shape) / np.sqrt(max(fan_in, 1))).astype(np.float32)


def _with_values(model, values, ranks):
    """The file with values, and batch normalisation by the statistics of its operand."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    graph = made.graph
    nodes = [node for node in graph.node if not (node.op_type == "ConstantOfShape" and node.output[0] in values)]
    inputs = [value for value in graph.input if value.name not in values]
    opset = next(one.version for one in made.opset_import if one.domain in ("", "ai.onnx"))
    numbers = itertools.count()
    for field in (graph.node, graph.initializer, graph.input):
        del field[:]
    graph.input.extend(inputs)
    for node in nodes:
        if node.op_type == "BatchNormalization":
            graph.node.extend(_normalised(node, graph, opset, ranks[node.input[0]], f"bn.{next(numbers)}"))
        else:
            graph.node.append(node)
    used = {name for node in graph.node for name in node.input} - {name for node in graph.node for name in node.output}
    for name, array in values.items():
        if name in used and array.size > FED:
            graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape))
        elif name in used:
            graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return made


def _normalised(node, graph, opset, rank, name):
    x, scale, bias = node.input[:3]
    axes = [axis for axis in range(rank) if axis != 1]
    epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)

    def stored(suffix, array):
        graph.initializer.append(numpy_helper.from_array(np.asarray(array), f"{name}.{suffix}"))
        return f"{name}.{suffix}"

    over = [stored("axes", np.array(axes, dtype=np.int64))] if opset >= 18 else []
    fixed = {} if opset >= 18 else {"axes": axes}
    shape = stored("shape", np.array([1, -1, *[1] * (rank - 2)], dtype=np.int64))
    steps = [
        ("ReduceMean", [x, *over], "mean", fixed),
        ("Sub", [x, f"{name}.mean"], "centred", {}),
        ("Mul", [f"{name}.centred", f"{name}.centred"], "squares", {}),
        ("ReduceMean", [f"{name}.squares", *over], "variance", fixed),
        ("Add", [f"{name}.variance", stored("epsilon", np.float32(epsilon))], "safe", {}),
        ("Sqrt", [f"{name}.safe"], "deviation", {}),
        ("Div", [f"{name}.centred", f"{name}.deviation"], "standard", {}),
        ("Reshape", [scale, shape], "scale", {}),
        ("Reshape", [bias, shape], "bias", {}),
        ("Mul", [f"{name}.standard", f"{name}.scale"], "scaled", {}),
    ]
    for kind, inputs, result, attributes in steps:
        yield helper.make_node(kind, inputs, [f"{name}.{result}"], **attributes)
    yield helper.make_node("Add", [f"{name}.scaled", f"{name}.bias"], [node.output[0]])
