"""Tensor parallelism of layers behind a split layer of another kind, and of pyramids with other heads in each stage."""

from __future__ import annotations

import math

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.space import stated_strategy
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy
from automap.space.templates import templates
from ir.graph import Graph
from ir.zoo.net import Net

WIDTH, LENGTH = 32, 8


def encoder(*heads: int) -> Graph:
    """A projection of features, then layers with the norm behind them, each with as many heads as is said."""
    net = Net()
    x = net.linear(net.builder.input("features", (1, LENGTH, 20)), "projection", WIDTH)
    for number, count in enumerate(heads):
        layer = f"layers.{number}"
        x = net.layer_norm(x, f"{layer}.before")
        q, k, v = (net.linear(x, f"{layer}.{name}", WIDTH) for name in "qkv")
        q, k, v = (net.heads(t, layer, count, transposed=t == k) for t in (q, k, v))
        x = net.layer_norm(net.add(x, net.linear(net.attend(q, k, v, layer), f"{layer}.out", WIDTH)), f"{layer}.norm")
        up = net.op("Gelu", [net.linear(x, f"{layer}.up", 4 * WIDTH)], layer)
        x = net.add(x, net.linear(up, f"{layer}.down", WIDTH))
    return net.finish(net.linear(net.layer_norm(x, "norm"), "head", 10))


def divided(graph: Graph, tp: int) -> dict[str, bool]:
    """Whether ranks of tp divide each product, by the name of its operator."""
    evaluator = Evaluator(Problem.build(graph, parse_cluster("1x8xA100"), {"global_batch": 64}))
    lowered = stated_strategy.hand_made(evaluator, Strategy(tp=tp))
    found = {}
    for segment in (s for chunk in lowered.chunks for s in chunk):
        unit = evaluator.blocks.units[segment.unit]
        rows = range(segment.first, segment.last)
        for offset, row in enumerate(rows):
            operator = evaluator.tables.arrays.operators[row]
            signature = evaluator.tables.arrays.signatures[operator.first_signature + int(segment.chosen[offset, -1])]
            op = graph.operators[unit.start + offset]
            if op.forward_flops.at(1) > 0.0:
                found[op.name] = bool(signature.divides_work) and not signature.splits_batch
    return found


def test_layers_behind_a_split_projection_split_their_heads() -> None:
    products = divided(encoder(4, 4, 4), 2)
    assert all(products.values()), [name for name, is_divided in products.items() if not is_divided]


def test_a_pyramid_divides_the_stages_whose_heads_it_can() -> None:
    products = divided(encoder(2, 4, 8), 4)
    cores = {n: d for n, d in products.items() if n.startswith("layers.") and n.count(".") == 1}
    assert {int(name[7]) for name, is_divided in cores.items() if not is_divided} == {0}
    assert len(cores) == 6


def test_a_degree_that_divides_no_heads_is_refused_with_those_that_fit_most_layers() -> None:
    with pytest.raises(PlanError, match=r"does not divide the 4 heads of layers\.1/MatMul.*Use one of 1, 2, 4"):
        divided(encoder(2, 4), 8)


def test_heads_of_grouped_products_in_letters_are_those_of_their_groups() -> None:
    """Queries in groups share a key, `[b, places, groups, heads of a group, size]`: no rank has part of a group."""
    net = Net()
    x = net.builder.input("features", (1, 9, WIDTH))
    shapes = {"q": (1, 9, 2, 2, 8), "k": (1, 9, 2, 8), "v": (1, 9, 2, 8)}

    def part(name: str, shape: tuple[int, ...]) -> str:
        made = net.linear(x, name, math.prod(shape[2:]))
        return net.op("Reshape", [made, net.builder.constant(f"{name}_to", np.array(shape))])

    q, k, v = (part(name, shape) for name, shape in shapes.items())
    scores = net.op("Einsum", [q, k], "core", equation="btghd,bsgd->bghts")
    mixed = net.op("Einsum", [net.op("Softmax", [scores], axis=-1), v], "mixed", equation="bghts,bsgd->btghd")
    whole = net.op("Reshape", [mixed, net.builder.constant("to", np.array([1, 9, WIDTH]))])
    with pytest.raises(PlanError, match=r"does not divide the 2 heads of .*Use one of 1, 2\."):
        divided(net.finish(net.linear(whole, "out", 10)), 4)


def test_a_norm_that_the_user_wants_split_stays_so() -> None:
    split = {"scope": "layers.0.before", "sharding": {"tp": "S(2)"}}
    problem = Problem.build(encoder(4, 4), parse_cluster("1x8xA100"), {"global_batch": 64}, {"constraints": [split]})
    assert next(iter(templates(PlanSpace(problem))))
