"""Softmax, its logarithm and the logarithm of its sum in small steps are the operators that they are."""

from collections import Counter

import numpy as np
import pytest

from ir.build import GraphBuilder
from ir.canonical import canonical
from ir.graph import Graph
from ir.groups import fused_groups

SIZE = 8


class Net:
    """Operators of the version 18, one after the other, on `x` of `[n, SIZE, SIZE]` times a weight."""

    def __init__(self) -> None:
        self.b = GraphBuilder()
        self.b.input("x", (1, SIZE, SIZE))
        self.b.input("labels", (1, SIZE), "int64")
        for name in "wv":
            self.b.parameter(name, (SIZE, SIZE))
        self.count = 0
        self.x = self.op("MatMul", "x", "w")

    def op(self, kind: str, *inputs, **attributes) -> str:
        self.count += 1
        names = [n if isinstance(n, str) else self.b.constant(f"c{self.count}_{i}", n) for i, n in enumerate(inputs)]
        return self.b.add(kind, names, [f"t{self.count}"], attributes=attributes, opset=18)[0]

    def over(self, kind: str, x: str, keepdims: int = 1) -> str:
        return self.op(kind, x, axes=(2,), keepdims=keepdims)

    def graph(self, y: str) -> Graph:
        return canonical(self.b.finish([y]))


def shifted(net: Net, x: str) -> str:
    return net.op("Sub", x, net.over("ReduceMax", x))


def quotient(net: Net, x: str) -> str:
    power = net.op("Exp", shifted(net, x))
    return net.op("Div", power, net.over("ReduceSum", power))


def without_shift(net: Net, x: str) -> str:
    power = net.op("Exp", x)
    total = net.op("Expand", net.over("ReduceSum", power), np.array([1, SIZE, SIZE]))
    return net.op("Mul", net.op("Reciprocal", total), power)


def logarithm(net: Net, x: str) -> str:
    y = shifted(net, x)
    return net.op("Sub", y, net.op("Log", net.over("ReduceSum", net.op("Exp", y))))


def log_sum(net: Net, x: str) -> str:
    top = net.over("ReduceMax", x)
    total = net.op("Log", net.over("ReduceSum", net.op("Exp", net.op("Sub", x, top)), keepdims=0))
    return net.op("Add", total, net.op("Squeeze", top, axes=(2,)))


@pytest.mark.parametrize(
    ("write", "kind"),
    [(quotient, "Softmax"), (without_shift, "Softmax"), (logarithm, "LogSoftmax"), (log_sum, "ReduceLogSumExp")],
)
def test_steps_are_one_operator(write, kind):
    net = Net()
    graph = net.graph(write(net, net.x))
    assert [op.kind for op in graph if op.is_live] == ["MatMul", kind]
    assert dict(graph.operators[-1].attributes).get("axis", 2) == 2


def test_what_else_is_read_stays():
    net = Net()
    power = net.op("Exp", net.x)
    total = net.over("ReduceSum", power)
    graph = net.graph(net.op("Add", net.op("Div", power, total), power))
    assert not any(op.kind == "Softmax" for op in graph)
    net = Net()
    power = net.op("Exp", net.x)
    assert not any(op.kind == "Softmax" for op in net.graph(net.op("Div", power, net.over("ReduceMean", power))))


def test_a_softmax_over_samples_stays_in_steps():
    net = Net()
    power = net.op("Exp", net.x)
    y = net.op("Div", power, net.op("ReduceSum", power, axes=(0,), keepdims=1))
    assert [op.kind for op in net.graph(y) if op.is_live] == ["MatMul", "Exp", "ReduceSum", "Div"]


def test_attention_with_a_softmax_in_steps():
    net = Net()
    keys = net.op("Transpose", net.op("MatMul", "x", "v"), perm=(0, 2, 1))
    graph = net.graph(net.op("MatMul", quotient(net, net.op("MatMul", net.x, keys)), net.op("MatMul", "x", "v")))
    assert [group.kind for group in fused_groups(graph)] == ["attention"]


def picked(net: Net, x: str) -> str:
    """`x.gather(-1, labels[..., None])[..., 0]`."""
    return net.op(
        "Gather", net.op("GatherElements", x, net.op("Unsqueeze", "labels", axes=(2,)), axis=2), np.array(0), axis=2
    )


def of_log_sum(net: Net) -> str:
    return net.op("Sub", net.over("ReduceLogSumExp", net.x, keepdims=0), picked(net, net.x))


def of_steps(net: Net) -> str:
    return net.op("Sub", log_sum(net, net.x), picked(net, net.x))


def of_probability(net: Net) -> str:
    return net.op("Neg", net.op("Log", picked(net, net.op("Softmax", net.x, axis=2))))


def of_tokens(net: Net) -> str:
    """The loss of each token that a mask leaves."""
    kept = net.op("Cast", net.op("Not", net.op("Equal", "labels", np.array(0))), to="float32")
    return net.op("Mul", net.op("Neg", picked(net, net.op("LogSoftmax", net.x, axis=2))), kept)


def of_a_whole(net: Net) -> str:
    scores = net.op("Transpose", net.x, perm=(0, 2, 1))
    return net.op("SoftmaxCrossEntropyLoss", scores, "labels", reduction="none")


def with_length(net: Net) -> str:
    """With the squares of the logarithms of the sums, as PaLM was trained."""
    total = net.over("ReduceLogSumExp", net.x, keepdims=0)
    return net.op("Add", net.op("Sub", total, picked(net, net.x)), net.op("Pow", total, np.float32(2)))


@pytest.mark.parametrize("write", [of_log_sum, of_steps, of_probability, of_tokens, of_a_whole, with_length])
def test_losses_are_one_kernel(write):
    net = Net()
    graph = net.graph(net.op("ReduceMean", write(net), axes=(0, 1), keepdims=0))
    (group,) = fused_groups(graph)
    kinds = Counter(graph.operators[i].kind for i in group.members)
    assert group.kind == "loss" and kinds["ReduceMean"] == 1
    # The kernel reads the scores themselves.
    assert {graph.tensors[name].shape for name in group.saved} == {(1, SIZE, SIZE)}
