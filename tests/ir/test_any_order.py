"""The graph of a network follows neither from the names of its tensors nor from the order of the nodes in its file."""

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.blocks import find_units
from ir.cuts import find_cuts
from ir.graph import Graph
from ir.groups import fused_groups
from ir.onnx.load import load_model

WIDTH, HEADS, LENGTH = 8, 2, 6


def shuffled(data: bytes, seed: int) -> bytes:
    """The same network with its nodes in another order in which all are behind their operands, and other names."""
    model, dice = onnx.load_from_string(data), random.Random(seed)
    waiting, order = list(model.graph.node), []
    made = {name for node in waiting for name in node.output}
    while waiting:
        node = dice.choice([each for each in waiting if made.isdisjoint(each.input)])
        waiting.remove(node)
        made.difference_update(node.output)
        order.append(onnx.NodeProto.FromString(node.SerializeToString()))
    results = {each.name for each in model.graph.output}
    names = [name for node in order for name in node.output if name and name not in results]
    fresh = {name: f"t{number}" for name, number in zip(names, dice.sample(range(len(names)), len(names)), strict=True)}
    for node in order:
        node.name = f"n{dice.random()}"
        for field in (node.input, node.output):
            field[:] = [fresh.get(name, name) for name in field]
    for value in model.graph.value_info:
        value.name = fresh.get(value.name, value.name)
    del model.graph.node[:]
    model.graph.node.extend(order)
    return model.SerializeToString()


def written(graph: Graph) -> tuple:
    """All of a graph that its price follows from: operators with their wiring, units, cuts and fused groups."""
    number: dict[str, int] = {}
    operators = [
        (op.kind, *(number.setdefault(n, len(number)) for n in (*op.inputs, *op.outputs)), op.attributes, op.traffic)
        for op in graph.operators
        if not op.is_constant
    ]
    units = [(unit.start, unit.stop, unit.type) for unit in find_units(graph).units]
    return operators, units, sorted(find_cuts(graph)), [(group.kind, group.members) for group in fused_groups(graph)]


class File:
    """A file that is written node by node; a weight is a name with a dot."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []

    def op(self, kind: str, *inputs: str, **attributes) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [f"{kind}{len(self.nodes)}"], **attributes))
        return self.nodes[-1].output[0]

    def heads(self, x: str, weight: str, perm: tuple[int, ...]) -> str:
        return self.op("Transpose", self.op("Reshape", self.op("MatMul", x, weight), "heads"), perm=perm)

    def attention(self, x: str, memory: str, name: str, kept: bool = False) -> str:
        """Attention with residual; `kept` says that keys of earlier positions stand before the new ones."""
        q = self.heads(x, f"{name}.q", (0, 2, 1, 3))
        k, v = self.heads(memory, f"{name}.k", (0, 2, 3, 1)), self.heads(memory, f"{name}.v", (0, 2, 1, 3))
        if kept:
            k, v = self.op("Concat", "keys", k, axis=3), self.op("Concat", "values", v, axis=2)
        y = self.op("MatMul", self.op("Softmax", self.op("MatMul", q, k), axis=-1), v)
        y = self.op("Reshape", self.op("Transpose", y, perm=(0, 2, 1, 3)), "width")
        return self.op("Add", x, self.op("MatMul", y, f"{name}.o"))

    def layer(self, x: str, name: str) -> str:
        return self.op("Add", x, self.op("MatMul", self.op("Relu", self.op("MatMul", x, f"{name}.u")), f"{name}.d"))

    def data(self, y: str, **inputs: tuple) -> bytes:
        self.nodes.append(helper.make_node("Identity", [y], ["y"]))
        stored = {n for node in self.nodes for n in node.input if "." in n}
        weights = [numpy_helper.from_array(np.random.rand(WIDTH, WIDTH).astype("float32"), n) for n in sorted(stored)]
        weights += [
            numpy_helper.from_array(np.array([0, LENGTH, HEADS, WIDTH // HEADS]), "heads"),
            numpy_helper.from_array(np.array([0, LENGTH, WIDTH]), "width"),
        ]
        given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("N", *shape)) for n, shape in inputs.items()]
        y_info = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("N", LENGTH, WIDTH))
        graph = helper.make_graph(self.nodes, "g", given, [y_info], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


def alone() -> bytes:
    file = File()
    return file.data(file.attention("x", "x", "a"), x=(LENGTH, WIDTH))


def with_kept_keys() -> bytes:
    file = File()
    size = WIDTH // HEADS
    y = file.attention("x", "x", "a", kept=True)
    return file.data(y, x=(LENGTH, WIDTH), keys=(HEADS, size, 3), values=(HEADS, 3, size))


def towers() -> bytes:
    file = File()
    x, z = file.layer(file.layer("x", "a"), "b"), file.layer(file.layer("z", "c"), "d")
    return file.data(file.op("Mul", x, z), x=(LENGTH, WIDTH), z=(LENGTH, WIDTH))


def encoder_and_decoder() -> bytes:
    file = File()
    memory, y = "x", file.op("MatMul", "z", "e.z")
    for number in range(2):
        memory = file.layer(file.attention(memory, memory, f"e{number}"), f"e{number}")
    for number in range(2):
        y = file.attention(y, y, f"d{number}")
        y = file.layer(file.attention(y, memory, f"c{number}"), f"d{number}")
    return file.data(y, x=(LENGTH, WIDTH), z=(LENGTH, WIDTH))


@pytest.mark.parametrize("make", [alone, with_kept_keys, towers, encoder_and_decoder])
def test_other_names_and_orders(make):
    data = make()
    usual = load_model(data)
    assert usual.num_parameters
    for seed in range(4):
        assert written(load_model(shuffled(data, seed))) == written(usual)


@pytest.mark.parametrize("make", [alone, with_kept_keys])
def test_no_cut_is_inside_a_kernel(make):
    graph = load_model(make())
    (group,) = fused_groups(graph)
    assert group.kind == "attention"
    assert not any(group.members[0] <= cut < group.members[-1] for cut in find_cuts(graph))


@pytest.mark.parametrize("name", ["llama", "bert", "resnet"])
def test_exports_in_other_orders(name, export):
    assert written(load_model(shuffled(export(name), 1))) == written(load_model(export(name)))
