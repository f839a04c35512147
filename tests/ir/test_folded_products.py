"""Weights that a tool multiplied with what else is stored, so that the file no longer holds them."""

from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.onnx.load import load_model
from ir.onnx.readers.nodes import FOLDED_KEY, KIND_KEY, PYTORCH
from ir.onnx.sandbox import import_model
from ir.onnx.strip import strip
from ir.serialize import graph_digest

node = helper.make_node
RANDOM = np.random.default_rng(0)
WIDTH = 64
TABLE = RANDOM.normal(size=(1, 7, 7, 2))
NARROW, WIDE = RANDOM.normal(size=(2, WIDTH)), RANDOM.normal(size=(WIDTH, WIDTH))


def load(nodes, held, marked=(), folded=None):
    """The graph of a file of PyTorch's exporter, which is also that of the stripped file.

    Args:
        nodes: nodes that read x, `[N, 7, 7, WIDTH]`, and write y.
        held: the stored tensors by name.
        marked: names of those that are marked, tables as buffers and others as parameters.
        folded: name of a stored tensor -> the names of what it was computed from.
    """
    stored = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in held.items()]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ("N", 7, 7, WIDTH)) for n in "xy")
    inner = []
    for name in {*marked, *(folded or {})}:
        inner.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, held[name].shape))
        kind = "BUFFER" if name.endswith("table") else "PARAMETER"
        text = {KIND_KEY: kind} if name in marked else {FOLDED_KEY: str(folded[name])}
        for key, value in text.items():
            inner[-1].metadata_props.add(key=key, value=value)
    graph = helper.make_graph(nodes, "g", [x], [y], stored, value_info=inner)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], producer_name=PYTORCH)
    data = model.SerializeToString()
    found, stripped = load_model(data), load_model(strip(data).data)
    assert graph_digest(replace(stripped, sha256="")) == graph_digest(replace(found, sha256=""))
    assert stripped.warnings == found.warnings
    assert import_model(data).num_parameters == found.num_parameters
    return found


def test_a_weight_that_was_multiplied_with_a_table_of_places_is_read_back():
    """As the first layer of the small network that makes Swin V2's biases."""
    behind = [node("Relu", ["h"], ["r"]), node("MatMul", ["r", "m.1.weight"], ["b"]), node("Add", ["x", "b"], ["y"])]
    held = {"m.relative_coords_table": TABLE, "m.0.weight": NARROW, "m.1.weight": WIDE}
    whole = load([node("MatMul", ["m.relative_coords_table", "m.0.weight"], ["h"]), *behind], held, held)
    named = {"h": ["m.0.weight", "m.relative_coords_table"]}
    folded = load(behind, {"h": TABLE @ NARROW, "m.1.weight": WIDE}, ["m.1.weight"], named)
    assert folded.num_parameters == whole.num_parameters == 2 * WIDTH + WIDTH**2
    assert folded.forward_flops == whole.forward_flops
    assert not folded.warnings
    # A table that was looked up has the rank of its rows.
    other = load(behind, {"h": RANDOM.normal(size=(1, 7, 7, WIDTH)), "m.1.weight": WIDE}, ["m.1.weight"], named)
    assert other.num_parameters == 49 * WIDTH + WIDTH**2


@pytest.mark.parametrize(
    ("sources", "is_told"),
    [
        (["linear", "m.0.q.weight", "m.0.q.bias", "m.0.embed.weight"], True),
        (["add", "m.0.norm.weight", "m.0.norm.bias", "m.0.embed.weight"], False),
        (["linear", "m.0.q.weight", "m.0.mask"], False),
    ],
)
def test_a_layer_that_the_newer_exporter_computed_is_told(sources, is_told):
    nodes = [node("Add", ["x", "add_1"], ["a"]), node("MatMul", ["a", "m.1.weight"], ["y"])]
    held = {"add_1": RANDOM.normal(size=(1, 7, 7, WIDTH)), "m.1.weight": WIDE}
    graph = load(nodes, held, ["m.1.weight"], {"add_1": sources})
    assert [("parameters of m.0.q:" in w and "export-onnx" in w) for w in graph.warnings] == [True] * is_told


@pytest.mark.parametrize(
    ("name", "is_told"),
    [
        ("/m/layers.0/q/Add_output_0", True), ("/m/layers.0/q/Constant_output_0", False),
        ("/m/embed/Add_output_0", False), ("/m/layers.1/q/Add_output_0", False),
    ],
)  # fmt: skip
def test_a_layer_that_a_later_tool_computed_is_told(name, is_told):
    """By the name of the result, if other layers of the same structure have weights there."""
    nodes = [
        node("Add", ["x", name], ["a"]), node("MatMul", ["a", "onnx::MatMul_7"], ["b"]),
        node("Add", ["b", "m.layers.1.q.bias"], ["y"]),
    ]  # fmt: skip
    held = {name: RANDOM.normal(size=(1, 7, 7, WIDTH)), "onnx::MatMul_7": WIDE, "m.layers.1.q.bias": WIDE[0]}
    told = [w for w in load(nodes, held).warnings if "such as m.layers.0.q.bias, are missing" in w]
    assert len(told) == is_told


def test_a_batch_normalisation_of_fixed_numbers_has_no_parameters():
    """Its scale and shift are buffers, of which the newer exporter leaves the product with the statistics."""
    nodes = [
        node("MatMul", ["x", "m.weight"], ["a"]), node("Mul", ["a", "mul"], ["b"]), node("Add", ["b", "sub"], ["y"]),
    ]  # fmt: skip
    held = {"m.weight": WIDE, "mul": WIDE[:1], "sub": WIDE[1:2]}
    norm = ["m.norm.running_var", "m.norm.weight", "rsqrt"]
    folded = {"mul": norm, "sub": [*norm, "m.norm.bias", "m.norm.running_mean"]}
    assert load(nodes, held, ["m.weight"], folded).num_parameters == WIDTH**2
