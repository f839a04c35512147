"""Attentions that share a product of scores: each has its own afterwards."""

import pytest

from ir.build import GraphBuilder
from ir.canonical import canonical
from ir.graph import Graph
from ir.groups import fused_groups

LENGTH, WIDTH = 8, 16


def differential(num_halves: int, *, masks: int, output_weights: bool = False) -> Graph:
    """Attentions with one product of scaled scores and values of their own, each of the first ones with a mask."""
    builder = GraphBuilder()
    for name in ("q", "k", *(f"v{i}" for i in range(num_halves))):
        builder.input(name, (1, LENGTH, WIDTH), "float32")
        builder.add("Relu", [name], [f"{name} made"])
    builder.parameter("scale", (1,))
    builder.add("Transpose", ["k made"], ["turned"], attributes={"perm": (0, 2, 1)})
    builder.add("MatMul", ["q made", "turned"], ["scores"])
    builder.add("Mul", ["scores", "scale"], ["scaled"])
    results = []
    for i in range(num_halves):
        name = "scaled"
        if i < masks:
            builder.input(f"mask{i}", (1, LENGTH, LENGTH), "float32")
            (name,) = builder.add("Add", [name, f"mask{i}"], [f"masked{i}"])
        builder.add("Softmax", [name], [f"weights{i}"], attributes={"axis": -1})
        results += builder.add("MatMul", [f"weights{i}", f"v{i} made"], [f"result{i}"])
    return builder.finish([*results, "weights1"] if output_weights else results, name="differential")


@pytest.mark.parametrize("masks", [0, 1, 2, 3])
def test_each_attention_has_a_product_of_its_own_and_is_one_kernel(masks):
    shared = differential(3, masks=masks)
    graph = canonical(shared)
    groups = [group for group in fused_groups(graph) if group.kind == "attention"]
    assert len(groups) == 3
    product = 2.0 * LENGTH * LENGTH * WIDTH
    assert shared.forward_flops == 4 * product and graph.forward_flops == 6 * product
    for group in groups:
        assert sum(graph.operators[i].kind == "MatMul" for i in group.members) == 2
    assert canonical(graph) == graph


def test_attentions_whose_weights_are_asked_for_share_the_product():
    graph = differential(2, masks=2, output_weights=True)
    assert canonical(graph) == graph
