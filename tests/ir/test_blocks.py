"""Units: cover, isomorphism, repeats, speed."""

import itertools
import time

import pytest
from long_cases import long_but
from small_graphs import build_shared

from ir import zoo
from ir.blocks import Blocks, Unit, find_units, repeats
from ir.build import GraphBuilder
from ir.cuts import carried_tensors, legal_cuts
from ir.graph import Graph
from ir.localize import localize
from ir.loss import with_loss
from ir.onnx.load import load_model


def check(graph: Graph, blocks: Blocks) -> None:
    first = next(i for i, op in enumerate(graph.operators) if not op.is_constant)
    assert blocks.units[0].start == first and blocks.units[-1].stop == len(graph.operators)
    assert all(a.stop == b.start for a, b in zip(blocks.units, blocks.units[1:], strict=False))
    cuts = legal_cuts(graph)
    for unit in blocks.units[:-1]:
        assert unit.boundary == cuts[unit.stop - 1]
    assert blocks.units[-1].boundary is None
    for unit in blocks.units:
        model = blocks.representative(unit.type)
        mine, other = graph.operators[unit.start : unit.stop], graph.operators[model.start : model.stop]
        assert [o.kind for o in mine] == [o.kind for o in other]
        assert [o.rule for o in mine] == [o.rule for o in other]
    assert {u.type for u in blocks.units} == set(range(blocks.num_types))


@pytest.mark.parametrize(
    ("name", "opset"),
    long_but(
        [("gpt", 18), ("llama", 20), ("bert", 20), ("vit", 20)],
        itertools.product(("gpt", "gpt_linear", "llama", "bert", "vit"), (18, 20, 23)),
    ),
)
def test_transformers_are_embed_layers_head_loss(name, opset, export):
    graph = load_model(export(name, 1, opset), loss="cross_entropy")
    blocks = find_units(graph)
    check(graph, blocks)
    assert [u.type for u in blocks.units] == [0, 1, 1, 2, 3] and blocks.num_blocks == 2


# Units of the loss included: one a bottleneck, a convolution, an inception module, a dense layer, a fire module.
LIGHT_UNITS = {
    "resnet50": 19, "vgg19": 20, "inception_v1": 14, "inception_v2": 15, "densenet121": 64, "squeezenet": 18,
    "shufflenet": 19, "bvlc_alexnet": 9, "zfnet512": 9,
}  # fmt: skip


def test_light_models_have_the_expected_number_of_units(light, light_name):
    graph = load_model(light(light_name), loss="cross_entropy")
    blocks = find_units(graph)
    check(graph, blocks)
    assert abs(len(blocks.units) - LIGHT_UNITS[light_name]) <= 1
    largest = max(u.stop - u.start for u in blocks.units)
    assert largest < 0.25 * len(graph.operators)


def test_resnet_bottlenecks_repeat(light):
    blocks = find_units(load_model(light("resnet50")))
    assert blocks.num_blocks == 10


def stack(layers: int) -> Graph:
    """A pre-norm stack with a shared mask made from data."""
    builder = GraphBuilder()
    builder.input("ids", (1, 8), "int64")
    builder.input("keep", (1, 8), "int64")
    builder.parameter("table", (32, 16))
    (x,) = builder.add("Gather", ["table", "ids"], ["x"], attributes={"axis": 0})
    (mask,) = builder.add("Cast", ["keep"], ["mask"], attributes={"to": "float32"})
    (mask,) = builder.add("Unsqueeze", [mask], ["wide"], attributes={"axes": (2,)})
    for i in range(layers):
        builder.parameter(f"scale{i}", (16,))
        builder.parameter(f"up{i}", (16, 64))
        builder.parameter(f"down{i}", (64, 16))
        (y,) = builder.add("RMSNormalization", [x, f"scale{i}"], [f"n{i}"], attributes={"axis": -1}, opset=23)
        (y,) = builder.add("MatMul", [y, f"up{i}"], [f"u{i}"])
        (y,) = builder.add("Relu", [y], [f"r{i}"])
        (y,) = builder.add("MatMul", [y, f"down{i}"], [f"d{i}"])
        (y,) = builder.add("Mul", [y, mask], [f"m{i}"])
        (x,) = builder.add("Add", [x, y], [f"x{i}"])
    builder.parameter("head", (16, 32))
    (x,) = builder.add("MatMul", [x, "head"], ["logits"])
    return builder.finish([x], name="stack")


def test_a_shared_mask_does_not_tie_layers_together():
    graph = stack(5)
    assert any(unit.beside for unit in find_units(graph).units)
    local = localize(graph)
    blocks = find_units(local)
    assert not any(unit.beside for unit in blocks.units)
    check(local, blocks)
    assert blocks.num_blocks == 5 and len(blocks.units) == 7
    assert sum(op.kind == "Cast" for op in local) == 5
    assert local.num_parameters == graph.num_parameters and local.forward_flops == graph.forward_flops
    assert localize(stack(1)) == stack(1)


def relative(layers: int, *, shared_products: bool) -> Graph:
    """Layers that read one normalised table, as DeBERTa's read its relative positions: each by a product of its own, or
    all the result of one product."""
    builder = GraphBuilder()
    builder.input("x", (1, 8, 16), "float32")
    for name, shape in (("table", (8, 16)), ("scale", (16,)), ("shared", (16, 16)), ("first", (16, 16))):
        builder.parameter(name, shape)
    (table,) = builder.add("RMSNormalization", ["table", "scale"], ["places"], attributes={"axis": -1}, opset=23)
    (x,), read = builder.add("MatMul", ["x", "first"], ["f"]), table
    if shared_products:
        (read,) = builder.add("MatMul", [table, "shared"], ["read"])
    for i in range(layers):
        builder.parameter(f"up{i}", (16, 16))
        (y,) = builder.add("MatMul", [x, f"up{i}"], [f"u{i}"])
        if not shared_products:
            builder.parameter(f"own{i}", (16, 16))
            (read,) = builder.add("MatMul", [table, f"own{i}"], [f"own{i}r"])
        (y,) = builder.add("Mul", [y, read], [f"m{i}"])
        (x,) = builder.add("Add", [x, y], [f"x{i}"])
    return builder.finish([x], name="relative")


def test_a_shared_table_with_a_product_in_each_layer_does_not_tie_them_together():
    graph = relative(5, shared_products=False)
    local = localize(graph)
    assert find_units(graph).num_blocks == 0 and find_units(local).num_blocks == 5
    # The norm is repeated, the products are not.
    assert sum(op.kind == "RMSNormalization" for op in local) == 5
    assert sum(op.kind == "MatMul" for op in local) == sum(op.kind == "MatMul" for op in graph)
    assert local.num_parameters == graph.num_parameters and local.forward_flops == graph.forward_flops


def called_twice(*, shared: bool) -> Graph:
    """Two layers of two products each; the first calls one weight twice, the second reads it as its second one."""
    builder = GraphBuilder()
    builder.input("x", (1, 8, 16), "float32")
    for name in ("first", "one", "two", "own"):
        builder.parameter(name, (16, 16))
    (x,) = builder.add("MatMul", ["x", "first"], ["begin"])
    for number, weights in enumerate((("one", "one" if shared else "own"), ("two", "one"))):
        for kind, weight in zip(("Relu", "Tanh"), weights, strict=True):
            (x,) = builder.add("MatMul", [x, weight], [f"product{number}{kind}"])
            (x,) = builder.add(kind, [x], [f"x{number}{kind}"])
    return builder.finish([x], name="called twice")


def test_a_layer_that_reads_one_parameter_twice_is_unlike_one_that_reads_two():
    """It has one of them, whatever else they have in common."""
    assert [unit.type for unit in find_units(called_twice(shared=False)).units] == [0, 1, 1]
    blocks = find_units(called_twice(shared=True))
    assert [unit.type for unit in blocks.units] == [0, 1, 2]
    assert [unit.structure for unit in blocks.units] == [0, 1, 1]


def test_a_product_that_all_layers_read_is_not_repeated():
    graph = relative(5, shared_products=True)
    assert localize(graph) == graph


def test_six_thousand_operators_take_no_quadratic_time():
    graph = localize(stack(700))
    assert len(graph.operators) > 5000
    # Half a second of a processor; every pair of operators looked at would be minutes.
    started = time.process_time()
    blocks = find_units(with_loss(graph))
    assert time.process_time() - started < 10
    assert blocks.num_blocks == 700


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ([0, 1, 1, 1, 2], [1, 1, 1, 1, 1]),
        ([0, 1, 2, 1, 2, 1, 2, 3], [1, 2, 2, 2, 1]),
        ([5, 1, 2, 1, 2, 7, 8, 8, 8, 9], [1, 2, 2, 1, 1, 1, 1, 1]),
        ([1, 2, 3], [1, 1, 1]),
        ([], []),
    ],
)
def test_repeats_of_a_sequence_are_grouped_by_their_period(kinds, groups):
    found = repeats(kinds)
    assert [b - a for a, b in found] == groups


def test_units_are_plain_data():
    unit = Unit(start=0, stop=1, type=0, structure=0, boundary=None)
    assert Blocks(units=(unit,), num_types=1).representative(0) == unit
    assert find_units(Graph(name="", operators=(), tensors={}, outputs=())) == Blocks(units=(), num_types=0)


@pytest.mark.parametrize(("spec", "layers"), [("t5-small", 6), ("t5-11b", 24)])
def test_the_memory_of_an_encoder_does_not_tie_decoder_layers_together(spec, layers):
    graph = zoo.build(spec)
    memory = carried_tensors(graph)
    assert len(memory) == 1
    blocks = find_units(graph)
    assert blocks.num_blocks == 2 * layers
    beside = legal_cuts(graph, memory)
    for unit in blocks.units[:-1]:
        assert unit.boundary in (beside.get(unit.stop - 1), *memory)


def test_residuals_are_not_carried(export):
    for name in ("gpt", "llama", "bert", "vit", "resnet"):
        assert not carried_tensors(load_model(export(name)))


def test_layers_that_share_a_turned_weight_read_it_each():
    """Each one turns the weight itself, so that whichever stage a layer is on has the weight."""
    graph = build_shared(5, turned=True)
    local = localize(graph)
    assert sum(op.is_view for op in graph) == 2 and sum(op.is_view for op in local) == 10
    blocks = find_units(local)
    check(local, blocks)
    assert blocks.num_blocks >= 4
    for name in ("up", "down"):
        views = [local.operators[i] for i in local.consumers[name]]
        assert len(views) == 5 and all(len(local.consumers[view.outputs[0]]) == 1 for view in views)
    assert local.num_parameters == graph.num_parameters and local.forward_flops == graph.forward_flops
    # One layer, or weights that nobody else reads, are left as they are.
    assert localize(build_shared(1, turned=True)) == build_shared(1, turned=True)


def stages(depth: int) -> Graph:
    """Two stages of residual layers, each behind a norm, with a pooling and a head, in the manner of ConvNeXt."""
    builder = GraphBuilder()
    builder.input("x", (1, 4, 16), "float32")

    def linear(x: str) -> str:
        builder.parameter(f"{x} weight", (16, 16))
        return builder.add("MatMul", [x, f"{x} weight"], [f"{x}y"])[0]

    def norm(x: str) -> str:
        builder.parameter(f"{x} scale", (16,))
        return builder.add("RMSNormalization", [x, f"{x} scale"], [f"{x}n"], attributes={"axis": -1}, opset=23)[0]

    x = "x"
    for _ in range(2):
        x = norm(linear(x))
        for _ in range(depth):
            (inner,) = builder.add("Relu", [linear(x)], [f"{x}r"])
            (x,) = builder.add("Add", [x, inner], [f"{x}a"])
    (x,) = builder.add("ReduceMean", [norm(x)], ["mean"], attributes={"axes": (1,), "keepdims": 0})
    return builder.finish([linear(x)], name="stages")


def test_a_norm_beside_repeated_layers_is_merged_with_none_of_them():
    graph = stages(3)
    blocks = find_units(graph)
    check(graph, blocks)
    kinds = [[op.kind for op in graph.operators[unit.start : unit.stop]] for unit in blocks.units]
    layer = ["MatMul", "Relu", "Add"]
    stem = ["MatMul", "RMSNormalization"]
    assert kinds == [stem, *[layer] * 3, stem, *[layer] * 3, ["RMSNormalization", "ReduceMean", "MatMul"]]
    assert blocks.num_blocks == 6
