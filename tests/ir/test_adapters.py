"""Adapters beside layers are told from other products."""

import pytest

from ir.adapters import adapters
from ir.build import GraphBuilder


def network(*, rank=2, scaled=True, same=True):
    """A layer with a bias, an adapter of it, and a product of its own behind."""
    b = GraphBuilder()
    x, other = b.input("x", (1, 8)), b.input("other", (1, 8))
    (hidden,) = b.add("Relu", [x], ["hidden"])
    (y,) = b.add("MatMul", [hidden, b.parameter("base", (8, 6))], ["y"])
    (y,) = b.add("Add", [y, b.parameter("bias", (6,))], ["biased"])
    (thin,) = b.add("MatMul", [hidden if same else other, b.parameter("a", (8, rank))], ["thin"])
    (wide,) = b.add("MatMul", [thin, b.parameter("b", (rank, 6))], ["wide"])
    if scaled:
        (wide,) = b.add("Mul", [wide, b.parameter("scale", (6,))], ["scaled"])
    b.add("Add", [wide, y], ["sum"])
    b.add("MatMul", ["sum", b.parameter("head", (6, 5))], ["scores"])
    return b.finish(["scores"], name="adapted")


@pytest.mark.parametrize("scaled", [False, True])
def test_an_adapter_begins_where_its_layer_does(scaled):
    graph = network(scaled=scaled)
    ((second, first),) = adapters(graph).items()
    assert [graph.by_name[name].outputs[0] for name in (first, second)] == ["thin", "wide"]


@pytest.mark.parametrize("unlike", [{"rank": 6}, {"same": False}])
def test_products_that_are_no_adapters_are_left_alone(unlike):
    assert not adapters(network(**unlike))
