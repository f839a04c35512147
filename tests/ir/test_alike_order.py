"""Layers that a tool wrote in unlike orders are of one type again, and an encoder is in front of its decoder."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from ir.alike_order import FEWEST_TYPES
from ir.blocks import find_units
from ir.onnx.load import load_model

WIDTH, LAYERS = 8, 4


def attention(name, x, memory):
    """The nodes of an attention layer with residual, in the usual order; results `q`, `k` and `v` of `name`."""
    node = helper.make_node
    nodes = [node("MatMul", [x if p == "q" else memory, f"{name}.{p}"], [f"{name}/{p}"]) for p in "qkv"]
    nodes += [
        node("Transpose", [f"{name}/k"], [f"{name}/t"], perm=[0, 2, 1]),
        node("MatMul", [f"{name}/q", f"{name}/t"], [f"{name}/s"]), node("Softmax", [f"{name}/s"], [f"{name}/p"]),
        node("MatMul", [f"{name}/p", f"{name}/v"], [f"{name}/o"]), node("Add", [x, f"{name}/o"], [f"{name}/y"]),
    ]  # fmt: skip
    return nodes


def load(nodes, inputs):
    """The graph of nodes that write `y`, with a weight for every name with a dot."""
    names = dict.fromkeys(n for each in nodes for n in each.input if "." in n)
    random = np.random.default_rng(0)
    stored = [numpy_helper.from_array(random.normal(size=(WIDTH, WIDTH)).astype(np.float32), n) for n in names]
    data = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("N", 6, WIDTH)) for n in inputs]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N", 6, WIDTH))
    graph = helper.make_graph(nodes, "g", data, [y], stored)
    return load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


def stack(names, x, memory=None):
    found = []
    for name in names:
        found.append(attention(name, x, memory or x))
        x = f"{name}/y"
    return found, x


def test_layers_in_unlike_orders_are_of_one_type():
    found = []
    for turn in range(3):
        layers, last = stack([f"l{i}" for i in range(LAYERS)], "h")
        for i, layer in enumerate(layers):
            layer[:3] = layer[i * turn % 3 : 3] + layer[: i * turn % 3]
        nodes = [helper.make_node("MatMul", ["x", "h.w"], ["h"]), *(each for layer in layers for each in layer)]
        found.append(find_units(load([*nodes, helper.make_node("MatMul", [last, "y.w"], ["y"])], ["x"])))
    assert [(blocks.num_types, blocks.num_blocks) for blocks in found] == [(3, LAYERS)] * 3


def test_an_encoder_among_the_layers_of_its_decoder():
    encoder, memory = stack([f"e{i}" for i in range(LAYERS)], "x")
    decoder, last = stack([f"d{i}" for i in range(LAYERS)], "z", memory)
    first = helper.make_node("MatMul", ["z", "d0.q"], ["d0/q"])
    decoder[0] = decoder[0][1:]
    ordered = [each for layer in encoder for each in layer] + [first]
    behind = [each for layer in decoder for each in layer] + [helper.make_node("Relu", [last], ["y"])]
    usual, mixed = load([*ordered, *behind], ["x", "z"]), load([first, *ordered[:-1], *behind], ["x", "z"])
    assert find_units(mixed).num_blocks == find_units(usual).num_blocks >= 2 * (LAYERS - 2)


def test_learned_queries_of_a_head_are_not_computed_before_all_layers():
    """Were they, the layers could not be cut: the queries would cross each cut beside the layer's result."""
    layers, last = stack([f"l{i}" for i in range(LAYERS)], "h2")
    front = [helper.make_node("MatMul", ["x", "h.w"], ["h0"]), helper.make_node("Relu", ["h0"], ["h1"])]
    front.append(helper.make_node("MatMul", ["h1", "g.w"], ["h2"]))
    pooled = attention("pool", "query.w", last)
    behind = [helper.make_node("MatMul", ["pool/y", "a.w"], ["a"]), helper.make_node("Sigmoid", ["a"], ["b"])]
    behind.append(helper.make_node("MatMul", ["b", "y.w"], ["y"]))
    nodes = [*front, *(each for layer in layers for each in layer), *pooled, *behind]
    blocks = find_units(load(nodes, ["x"]))
    assert blocks.num_blocks == LAYERS and blocks.num_types > FEWEST_TYPES
