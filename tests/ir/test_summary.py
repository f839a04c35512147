"""Coverage and the heaviest operators."""

from dataclasses import replace

import pytest

from ir.build import GraphBuilder, Stated
from ir.graph import Amount, Graph
from ir.loss import with_loss
from ir.profile_import import load_profile
from ir.summary import FLOPS_PER_BYTE, summarize


def custom_graph() -> Graph:
    b = GraphBuilder()
    x = b.input("x", (1, 8))
    (y,) = b.add("MatMul", [x, b.parameter("w", (8, 16))], ["y"], scope="layers.0")
    (z,) = b.add("mine.Swirl", [y], ["z"], scope="layers.1", stated=Stated(shapes=[((1, 16), "float32")]))
    (r,) = b.add("Relu", [z], ["r"], scope="layers.2")
    return with_loss(b.finish([r], name="custom"))


def changed(graph: Graph, name: str, **fields: object) -> Graph:
    return replace(graph, operators=tuple(replace(op, **fields) if op.name == name else op for op in graph))


def test_an_unknown_operator_weighs_what_it_moves():
    found = summarize(custom_graph())
    product, unknown = 2 * 8 * 16, FLOPS_PER_BYTE * 2 * 16 * 4
    assert found["coverage"] == pytest.approx(
        {"measured": 0.0, "modelled": product / (product + unknown), "opaque": unknown / (product + unknown)}
    )
    assert [row["name"] for row in found["heaviest"]] == ["layers.*/mine.Swirl", "layers.*/MatMul"]


def test_what_the_user_measured_or_gave_is_measured():
    name = "layers.1/mine.Swirl"
    for fields in ({"measured_forward_s": 1e-6}, {"forward_flops": Amount(per_sample=512.0)}):
        coverage = summarize(changed(custom_graph(), name, **fields))["coverage"]
        assert coverage["opaque"] == 0.0
        assert coverage["measured"] > 0.0
    given = summarize(changed(custom_graph(), name, forward_flops=Amount(per_sample=256.0)))
    assert given["coverage"] == {"measured": 0.5, "modelled": 0.5, "opaque": 0.0}


def test_shares_of_a_model_are_shares_of_its_flops(gpt):
    graph = gpt()
    found = summarize(graph)
    assert found["coverage"] == {"measured": 0.0, "modelled": 1.0, "opaque": 0.0}
    up = next(row for row in found["heaviest"] if row["name"] == "h.*.mlp.up/MatMul")
    assert up["count"] == 2
    assert up["share"] == pytest.approx(2 * 2 * 32 * 64 * 256 / graph.forward_flops)


def test_a_profile_is_measured():
    text = "\n".join(
        f"node{i} -- cell_{i} -- forward_compute_time={i}, backward_compute_time=1, activation_size=4, parameter_size=4"
        for i in (1, 2, 3)
    )
    text += "\n\tnode1 -- node2\n\tnode2 -- node3"
    found = summarize(load_profile(text, batch=1))
    assert found["coverage"] == {"measured": 1.0, "modelled": 0.0, "opaque": 0.0}
    assert found["heaviest"] == [{"name": "node*/cell_*", "count": 3, "share": 1.0}]


def test_nothing_known_at_all():
    b = GraphBuilder()
    x = b.input("x", (1, 8))
    (y,) = b.add("Mul", [x, b.parameter("w", (8,))], ["y"])
    coverage = summarize(b.finish([y]))["coverage"]
    assert coverage == {"measured": 0.0, "modelled": 1.0, "opaque": 0.0}
