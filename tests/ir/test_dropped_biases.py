"""Biases of zeros that PyTorch's newer exporter drops are parameters of the module all the same."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.onnx.load import load_model
from ir.onnx.readers.nodes import FOLDED_KEY, KIND_KEY, SIGNATURE_KEY
from ir.onnx.strip import strip, strip_file
from ir.serialize import graph_digest

node = helper.make_node
RANDOM = np.random.default_rng(0)
KINDS = {
    "Conv": ((8, 4, 3, 3), (1, 4, 9, 9), {}, 8),
    "ConvTranspose": ((4, 3, 2, 2), (1, 4, 9, 9), {"group": 2}, 6),
    "Gemm": ((4, 5), (1, 4), {}, 5),
    "Gemm, turned": ((5, 4), (1, 4), {"transB": 1}, 5),
}
"""Name -> shape of the weight, shape of the operand, attributes, channels of the result."""


def marked(nodes, inputs, stored, folded=None, listed=()) -> onnx.ModelProto:
    """A file whose exporter marked the parameters among the initializers, and computed `folded` from others."""
    folded = folded or {}
    given = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in stored.items()]
    shapes = {t.name: t.dims for t in given}
    given += [numpy_helper.from_array(np.array([0]), "zero"), numpy_helper.from_array(np.array([49, 49, -1]), "pairs")]
    inner = [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in shapes.items()]
    for declared in inner:
        is_folded = declared.name in folded
        declared.metadata_props.add(
            key=FOLDED_KEY if is_folded else KIND_KEY, value=str(folded[declared.name]) if is_folded else "PARAMETER"
        )
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in inputs.items()]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", values, [y], given, value_info=inner)
    signature = "".join(f"p_{i}: PARAMETER target='{name}'\n" for i, name in enumerate(listed))
    graph.metadata_props.add(key=SIGNATURE_KEY, value=signature)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], producer_name="pytorch")


def read(data: bytes):
    """The graph of a file; that of the stripped file is the same."""
    found, stripped = load_model(data), load_model(strip(data).data)
    assert graph_digest(replace(stripped, sha256="")) == graph_digest(replace(found, sha256=""))
    return found


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_bias_that_the_module_has_is_a_parameter(name, is_listed):
    shape, operand, attributes, channels = KINDS[name]
    nodes = [node(name.partition(",")[0], ["x", "head.weight"], ["y"], **attributes)]
    listed = ["head.weight", "head.bias"][: 1 + is_listed]
    graph = read(
        marked(nodes, {"x": operand}, {"head.weight": RANDOM.normal(size=shape)}, {}, listed).SerializeToString()
    )
    found = {p.name: p.shape for p in graph.parameters}
    assert found == {"head.weight": shape} | ({"head.bias": (channels,)} if is_listed else {})


def test_a_bias_that_something_else_reads_is_not_read_twice():
    nodes = [node("Conv", ["x", "conv.weight"], ["h"]), node("Add", ["h", "conv.bias"], ["y"])]
    stored = {"conv.weight": RANDOM.normal(size=(8, 4, 3, 3)), "conv.bias": RANDOM.normal(size=(8, 1, 1))}
    graph = read(marked(nodes, {"x": (1, 4, 9, 9)}, stored, {}, [*stored]).SerializeToString())
    assert {op.kind: len(op.inputs) for op in graph.operators} == {"Conv": 2, "Add": 2}


@pytest.mark.parametrize("samples", [1, 2])
def test_a_row_that_all_tokens_look_up_is_one_row(samples):
    """As of BERT's token types, which the module makes of zeros."""
    row = RANDOM.normal(size=(1, 1, 8))
    stored = {"w": RANDOM.normal(size=(8, 8)), "embedding_1": np.broadcast_to(row, (samples, 6, 8))}
    nodes = [node("Add", ["x", "embedding_1"], ["h"]), node("MatMul", ["h", "w"], ["y"])]
    folded = {"embedding_1": ["m.token_types.weight", "zeros"]}
    graph = read(marked(nodes, {"x": (samples, 6, 8)}, stored, folded).SerializeToString())
    assert graph.num_parameters == 64 + 8


@pytest.mark.parametrize("is_outside", [False, True])
def test_what_an_optimiser_looked_up_is_its_table_in_a_large_file(tmp_path, is_outside):
    """Of files that are stripped, also with weights in another file, as the newer exporter writes them by default."""
    heads, side = 4, 7
    y, x = np.divmod(np.arange(side * side), side)
    at = (y[:, None] - y + side - 1) * (2 * side - 1) + x[:, None] - x + side - 1
    table = RANDOM.normal(size=((2 * side - 1) ** 2, heads))
    stored = {"m.scale": RANDOM.normal(size=(heads, 1, 1)), "index_1": table[at.reshape(-1)]}
    nodes = [
        node("Reshape", ["index_1", "pairs"], ["viewed"]), node("Transpose", ["viewed"], ["turned"], perm=[2, 0, 1]),
        node("Unsqueeze", ["turned", "zero"], ["bias"]), node("Mul", ["x", "m.scale"], ["scaled"]),
        node("Add", ["scaled", "bias"], ["scores"]), node("Softmax", ["scores"], ["y"], axis=-1),
    ]  # fmt: skip
    folded = {"index_1": ["m.table", "m.index", "val_3"]}
    file = marked(nodes, {"x": (1, heads, side**2, side**2)}, stored, folded)
    assert read(file.SerializeToString()).num_parameters == table.size + heads
    path = tmp_path / "model.onnx"
    onnx.save(file, path, save_as_external_data=is_outside, location="model.data", size_threshold=100)
    assert load_model(strip_file(path).data).num_parameters == table.size + heads
