"""Cuts where one tensor crosses, and where several do."""

import itertools

import pytest
from crossing_graphs import GRAPHS, cells, towers, unet

from ir import zoo
from ir.blocks import find_units
from ir.cuts import MIN_HEAVY, find_cuts, legal_cuts, nearest_smaller
from ir.graph import Graph
from ir.zoo.net import Net


def live(graph: Graph, place: int) -> set[str]:
    """By the definition: what is made up to an operator and read behind it."""
    made = {name for op in graph.operators[: place + 1] if op.is_live for name in op.outputs}
    return made & {name for op in graph.operators[place + 1 :] for name in op.inputs}


@pytest.mark.parametrize("name", [*GRAPHS, "t5-small", "resnet50", "gpt2"])
def test_a_cut_says_all_that_crosses(name):
    graph = GRAPHS[name]() if name in GRAPHS else zoo.build(name)
    for place, cut in find_cuts(graph).items():
        assert {cut.boundary, *cut.beside} == live(graph, place)
        assert cut.boundary not in cut.beside
        assert all(graph.tensors[name].is_float for name in (cut.boundary, *cut.beside))
    for unit in find_units(graph).units[:-1]:
        assert (unit.boundary, unit.beside) == (
            find_cuts(graph)[unit.stop - 1].boundary,
            find_cuts(graph)[unit.stop - 1].beside,
        )


def test_a_pyramid_with_skips_is_cut_at_all_levels():
    graph = unet(levels=3)
    counts = [len(unit.beside) for unit in find_units(graph).units]
    assert max(counts) == 2
    # Down and up again.
    assert counts == sorted(counts[: counts.index(2)]) + counts[counts.index(2) :]
    assert counts[counts.index(2) :] == sorted(counts[counts.index(2) :], reverse=True)
    names = {graph.operators[unit.start].name for unit in find_units(graph).units}
    assert {"down.1.0/Conv", "down.2.0/Conv", "up.1.1/Conv"} <= names


def test_cells_that_read_the_two_before_them_are_alike():
    blocks = find_units(cells(8))
    assert blocks.num_blocks == 7
    assert all(len(unit.beside) == 1 for unit in blocks.units if unit.type == 2)
    # What it reads as the tensor that crosses, a cell hands on to the next cell but one.
    assert blocks.handed_on[2] == {(0, 0)}


def test_layers_of_the_second_of_two_towers_are_alike():
    graph = towers(10)
    blocks = find_units(graph)
    right = [unit for unit in blocks.units if graph.operators[unit.start].name.startswith("right.")]
    # The first layer reads data, and the last one stands with the comparison.
    assert len(right) == 10 and [unit.type for unit in right].count(right[2].type) == 8
    assert all(unit.beside == ("left.9.tanh",) for unit in right[:-1])


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "bert-large", "vit-b", "resnet50", "vgg19", "mixtral-8x7b"])
def test_models_with_enough_cuts_are_cut_where_one_tensor_crosses(name):
    graph = zoo.build(name)
    assert list(find_cuts(graph)) == sorted(legal_cuts(graph))


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_steps_of_a_recurrence_are_not_cut_apart(is_turned):
    """They share their weights: no device could have a part of the steps alone."""
    net = Net()

    def product(x, name):
        weight = net.parameter(f"{name}.weight", 8, 8)
        return net.op("MatMul", [x, net.op("Transpose", [weight], perm=(1, 0)) if is_turned else weight])

    state = kept = net.builder.input("x", (1, 8))
    for _ in range(2 * MIN_HEAVY):
        state = net.op("Tanh", [product(state, "recurrent")])
        kept = product(net.add(kept, state), "out")
    graph = net.finish(net.add(kept, state), loss="mse")
    assert not [cut for cut in find_cuts(graph).values() if cut.beside]


def test_nearest_smaller_is_that_of_a_search():
    sizes = [5, 3, 3, 7, 2, 9, 9, 4]
    for i, found in enumerate(nearest_smaller(sizes)):
        assert found == max((j for j in range(i) if sizes[j] < sizes[i]), default=-1)


@pytest.mark.parametrize("name", GRAPHS)
def test_units_of_a_type_hand_on_alike(name):
    graph = GRAPHS[name]()
    blocks = find_units(graph)
    for one, other in itertools.product(blocks.units, repeat=2):
        if one.type == other.type:
            passed = [
                sorted(
                    graph.tensors[name].shape
                    for name in unit.beside
                    if not any(name in (*op.inputs, *op.outputs) for op in graph.operators[unit.start : unit.stop])
                )
                for unit in (one, other)
            ]
            assert passed[0] == passed[1]
