"""Measured layer graphs: sizes, times, branches, cuts, refusals. All texts are made up here."""

import re
import time

import pytest

from ir.blocks import find_units
from ir.cuts import legal_cuts
from ir.errors import ModelError, ModelTooExpensive
from ir.graph import Graph
from ir.profile_import import batch_in_name, is_profile, load_profile, read_profile
from ir.serialize import graph_from_bytes, graph_to_bytes

BATCH = 8


def line(number: int, text: str, forward: float, backward: float, activation: object, parameters: float) -> str:
    return (
        f"node{number} -- {text} -- forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}, "
        f"activation_size={activation}, parameter_size={parameters:.3f}"
    )


def edges(*pairs: tuple[int, int]) -> list[str]:
    return [f"\tnode{a} -- node{b}" for a, b in pairs]


def chain(length: int = 4) -> str:
    nodes = [line(1, "Input0", 100.0, 0.0, 3200.0, 0.0)]
    nodes += [line(i, f"Linear({i}, 4)", 2.0, 6.0, 6400.0, 4000.0) for i in range(2, length + 2)]
    # As the files are: nodes in no order, edges behind them, no newline at the end.
    return "\n".join(nodes[::-1] + edges(*((i, i + 1) for i in range(1, length + 1))))


def decoder(layers: int = 6, width: int = 1) -> str:
    """Memory of an encoder that every layer of a decoder reads, through a tuple, with residual sums."""
    nodes = [
        line(1, "Input", 0.0, 0.0, 0.0, 0.0),
        line(2, "Encoder(  (rnn): LSTM(4, 4))", 5.0, 9.0, "[6400.0; 320.0; 320.0]", 40000.0),
        line(3, "__getitem__(0)", 0.0, 0.0, 6400.0, 0.0),
        line(4, "__getitem__(1)", 0.0, 0.0, 320.0, 0.0),
    ]
    links = [(1, 2), (2, 3), (2, 4)]
    last, number = 3, 5
    for _ in range(layers):
        parts = []
        for _ in range(width):
            nodes.append(line(number, "Attention(4)", 1.0, 2.0, 3200.0, 8000.0))
            links += [(last, number), (3, number)] if last != 3 else [(3, number)]
            parts.append(number)
            number += 1
        nodes.append(line(number, "Add", 0.0, 0.0, 3200.0, 0.0))
        links += [(p, number) for p in parts] + [(last, number)]
        last, number = number, number + 1
    return "\n".join([*nodes, *edges(*dict.fromkeys(links))])


def layers_of(graph: Graph) -> list:
    return [op for op in graph.operators if op.kind == "Layer"]


def test_a_profile_becomes_a_chain_of_measured_layers():
    graph = load_profile(chain(), name="chain", batch=BATCH)
    layers = layers_of(graph)
    assert [op.name for op in layers] == [f"node{i}/Linear" for i in range(2, 6)]
    assert graph.num_parameters == 4 * 1000
    # 6400 bytes of 8 samples are 200 floats a sample.
    assert graph.tensors["node3"].shape == (1, 200)
    assert graph.tensors["node3"].shape_at(4) == (4, 200)
    assert layers[1].saved == ("node3",)
    # The data loader's time is not the model's.
    assert [op.measured_forward_s for op in layers] == [pytest.approx(2e-3 / BATCH)] * 4
    assert [op.measured_backward_s for op in layers] == [pytest.approx(6e-3 / BATCH)] * 4
    assert (graph.tensors["node1"].role, graph.tensors["node1"].batch_dim) == ("input", 0)
    assert list(legal_cuts(graph).values()) == ["node2", "node3", "node4", "node5"]
    # The last layer takes the loss along, the first reads data: only the two between are alike.
    assert [u.type for u in find_units(graph).units] == [0, 1, 1, 2]


def test_a_profile_survives_serialization():
    graph = load_profile(decoder(), name="decoder", batch=BATCH)
    again = graph_from_bytes(graph_to_bytes(graph))
    assert again == graph
    assert [op.measured_s for op in again] == [op.measured_s for op in graph]
    assert graph.operators[0].measured_s == pytest.approx((5e-3 / BATCH, 9e-3 / BATCH))


def test_unequal_times_make_unequal_units():
    text = chain().replace("forward_compute_time=2.000", "forward_compute_time=2.100", 2)
    types = [u.type for u in find_units(load_profile(text, name="x", batch=BATCH)).units]
    assert len(set(types)) == 4


def test_layers_that_take_turns_stay_apart():
    nodes = [line(1, "Input", 0, 0, 3200, 0)]
    nodes += [line(i, "cell", 1 + i % 2, 2, 3200, 400) for i in range(2, 14)]
    graph = load_profile("\n".join(nodes + edges(*((i, i + 1) for i in range(1, 13)))), name="cells", batch=BATCH)
    assert len(find_units(graph).units) == 12


def test_time_of_prepared_data_goes_to_its_first_reader():
    nodes = [
        line(1, "Input", 50.0, 0.0, 32, 0),
        line(2, "one_hot", 1.0, 0.0, 32, 0),
        line(3, "first", 2.0, 2.0, 32, 400),
        line(4, "second", 2.0, 2.0, 32, 400),
    ]
    graph = load_profile("\n".join(nodes + edges((1, 2), (1, 3), (3, 4), (2, 4))), name="x", batch=BATCH)
    assert [op.measured_forward_s for op in layers_of(graph)] == pytest.approx([2e-3 / BATCH, 3e-3 / BATCH])
    # Data is had everywhere: it does not cross the cut.
    assert legal_cuts(graph)[0] == "node3"
    assert graph.tensors["node2"].role == "input"


def test_branches_are_kept_and_cut_between_layers():
    graph = load_profile(decoder(6), name="decoder", batch=BATCH)
    assert all("getitem" not in op.name for op in graph)
    attention = [op for op in layers_of(graph) if op.name.endswith("Attention")]
    assert all(any(n.partition("@")[0] == "node2.0" for n in op.inputs) for op in attention)
    bundles = {op.inputs: graph.tensors[op.outputs[0]].shape for op in graph.operators if op.kind == "Bundle"}
    # Memory (200 floats a sample) and the state of the decoder (100) cross together.
    assert set(bundles.values()) == {(1, 300)}
    units = find_units(graph).units
    assert len(units) == 7
    assert units[0].boundary == "node2.0"
    assert [graph.tensors[u.boundary].shape for u in units[1:5]] == [(1, 300)] * 4
    for op in graph.operators:
        if op.kind in ("Bundle", "Unbundle"):
            assert op.traffic == (0.0, 0.0)
            assert any(f.is_batch for f in op.rule.factors)


def test_every_layer_reads_what_its_edges_say():
    """Bundles undone, the graph has the edges of the text."""
    graph = load_profile(decoder(9, 3), name="decoder", batch=BATCH)
    origin = {}
    for op in graph.operators:
        if op.kind == "Layer":
            origin.update((name, op.name) for name in op.outputs)
        if op.kind == "Unbundle":
            packed = next(o for o in graph.operators if op.inputs[0] in o.outputs)
            origin.update((out, origin[name]) for out, name in zip(op.outputs, packed.inputs, strict=True))
    found = {
        (int(origin[n][4:].partition("/")[0]), int(op.name[4:].partition("/")[0]))
        for op in layers_of(graph)
        for n in op.inputs
        if n in origin
    }
    wanted = {tuple(map(int, pair)) for pair in re.findall(r"\tnode(\d+) -- node(\d+)", decoder(9, 3))}
    wanted = {(2 if a == 3 else a, b) for a, b in wanted if a != 1 and b not in (3, 4)}
    assert found == wanted


def test_wide_branches_do_not_blow_up():
    begin = time.perf_counter()
    graph = load_profile(decoder(60, 12), name="wide", batch=BATCH)
    units = find_units(graph).units
    assert time.perf_counter() - begin < 5.0
    # One cut behind each layer, and at most one inside it.
    assert 61 <= len(units) <= 121
    assert len(graph.operators) < 1100


@pytest.mark.parametrize(
    ("sizes", "shapes", "packed"),
    [("[3200; 6400]", [(1, 100), (1, 200)], 300), ("[3200; 3200]", [(1, 100)], 200), ("3200", [(1, 100)], 200)],
)
def test_a_size_for_each_edge(sizes: str, shapes: list, packed: int):
    nodes = [line(1, "stem", 1, 1, sizes, 400), line(2, "cell", 1, 1, 3200, 400), line(3, "cell", 1, 1, 32, 400)]
    graph = load_profile("\n".join(nodes + edges((1, 2), (1, 3), (2, 3))), name="cells", batch=BATCH)
    assert [graph.tensors[n].shape for n in graph.by_name["node1/stem"].outputs] == shapes
    crossing = graph.by_name["node2#bundle"]
    assert graph.tensors[crossing.outputs[0]].shape == (1, packed)


def residual(blocks: int, seconds_inside: float) -> str:
    """Residual blocks of two convolutions, between whom two tensors cross, as between the second one and the sum."""
    nodes, links, last = [line(1, "Input", 0, 0, 3200, 0), line(2, "stem", 40, 40, 3200, 400)], [(1, 2)], 2
    for i in range(blocks):
        a, b, c = 3 + 3 * i, 4 + 3 * i, 5 + 3 * i
        conv = (seconds_inside, 2 * seconds_inside, 3200, 400)
        nodes += [line(a, "conv", *conv), line(b, "conv", *conv), line(c, "Add", 0, 0, 3200, 0)]
        links += [(last, a), (a, b), (b, c), (last, c)]
        last = c
    return "\n".join(nodes + edges(*links))


def test_long_branches_are_cut_inside():
    """Each convolution is a unit, and what crosses inside a block counts the tensor that goes around it."""
    graph = load_profile(residual(12, 1.0), name="residual", batch=BATCH)
    units = find_units(graph).units
    assert len(units) == 25
    assert {graph.tensors[unit.boundary].shape for unit in units[1:-1]} == {(1, 100), (1, 200)}


def test_branches_of_little_time_are_not_cut_inside():
    graph = load_profile(residual(12, 0.05), name="residual", batch=BATCH)
    assert not any(op.kind == "Bundle" for op in graph)
    assert len(find_units(graph).units) == 13


def test_the_batch_is_read_from_the_name_of_a_profile():
    assert batch_in_name("gnmt-16-pbs-64") == 64
    assert batch_in_name("vgg16") is None
    graph = load_profile(chain(), name="chain-pbs-4")
    assert graph.tensors["node2"].shape == (1, 400)
    unknown = load_profile(chain(), name="chain")
    assert unknown.tensors["node2"].shape == (1, 1600)
    assert "dim batch=N" in unknown.warnings[0]
    with pytest.raises(ModelError, match="batch"):
        load_profile(chain(), name="chain", batch=0)


def test_the_batch_of_an_image_model_is_in_its_classifier():
    nodes = [
        line(1, "Conv2d(3, 4, kernel_size=(3, 3))", 1, 1, 512, 400),
        line(2, "Linear(in_features=4, out_features=10, bias=True)", 1, 1, 16 * 10 * 4, 160),
    ]
    graph = load_profile("\n".join([*nodes, *edges((1, 2))]), name="cnn")
    assert graph.tensors["node2"].shape == (1, 10)
    # In a vision transformer the linear layers disagree: patches are not samples.
    more = line(3, "Linear(in_features=10, out_features=10, bias=True)", 1, 1, 16 * 10 * 4 * 49, 400)
    graph = load_profile("\n".join([*nodes, more, *edges((1, 2), (2, 3))]), name="vit")
    assert graph.tensors["node2"].shape == (1, 160)


GOOD = line(1, "a", 1, 1, 4, 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no layer has parameters"),
        ("hello", "line 1"),
        (GOOD + "\nnode2 -- b -- forward_compute_time=1", "line 2"),
        (line(1, "a", 1, 1, "x", 4), "not a number"),
        (line(1, "a", 1, 1, "", 4), "not a number"),
        (line(1, "a", 1, 1, "[]", 4), "not a number"),
        (line(1, "a", 1, 1, "nan", 4), "out of range"),
        (line(1, "a", 1, 1, "inf", 4), "out of range"),
        (line(1, "a", 1, 1, 4, 1e300), "out of range"),
        (line(1, "a", -1, 1, 4, 4), "out of range"),
        (line(1, "a", 1, 1, "[" + "; ".join(["4"] * 65) + "]", 4), "outputs"),
        (line(1, "a" * 5000, 1, 1, 4, 4), "longer than"),
        (GOOD + "\n" + GOOD, "given twice"),
        (GOOD + "\n\tnode1 -- node2", "not there"),
        ("\n".join([GOOD, line(2, "b", 1, 1, 4, 4), *edges((1, 2), (1, 2))]), "given twice"),
        ("\n".join([GOOD, line(2, "b", 1, 1, 4, 4), *edges((1, 2), (2, 1))]), "cycle"),
        (GOOD + "\n\tnode1 -- node1", "line 1: the edges form a cycle of 1 layers through node1"),
        (
            "\n".join(line(n, "a", 1, 1, 4, 4) for n in range(1, 5))
            + "\n\tnode1 -- node2\n\tnode2 -- node4\n\tnode4 -- node3\n\tnode3 -- node2",
            "line [234]: the edges form a cycle of 3 layers",
        ),
        ("\n".join([GOOD, line(2, "b", 1, 1, 4, 4)]), "line 2: no edge leads from node2 to the part of node1"),
        (GOOD.replace("=1.000", "=", 1), "line 1: forward_compute_time is not a number"),
        (line(1, "a", 1, -3, 4, 4), "line 1: backward_compute_time is out of range"),
        (line(1, "a", 1, 1, 4, 0), "no layer has parameters"),
    ],
)
def test_what_is_no_profile_is_refused(text: str, says: str):
    with pytest.raises(ModelError, match=says) as found:
        load_profile(text, name="bad", batch=BATCH)
    assert found.value.repair
    assert len(found.value.value) <= 200


def test_huge_files_are_refused_at_once():
    begin = time.perf_counter()
    for text in ("\n" * 1_000_000, "\n".join(line(i, "a", 1, 1, 4, 4) for i in range(5001))):
        with pytest.raises(ModelTooExpensive, match="more than"):
            load_profile(text, batch=1)
    with pytest.raises(ModelTooExpensive, match="larger"):
        read_profile(b"node1 -- " + bytes(17 << 20))
    with pytest.raises(ModelError, match="UTF-8"):
        read_profile(b"node1 -- \xff\xfe")
    assert time.perf_counter() - begin < 5.0


@pytest.mark.slow
def test_the_largest_files_are_read_in_linear_time():
    nodes = [line(i, "a", 1, 1, 4, 4) for i in range(1, 5001)]
    dense = edges(*((max(1, i - k), i) for i in range(12, 5001) for k in range(1, 11)))
    begin = time.perf_counter()
    load_profile("\n".join([*nodes, *edges((1, 2)), *dense]), batch=1)
    assert time.perf_counter() - begin < 20.0


def test_recognised_by_content():
    assert is_profile(chain().encode())
    assert is_profile(b"\n\tnode1 -- node2\n")
    assert not is_profile(b"")
    assert not is_profile(b"\x08\x09node1 -- ")
    assert not is_profile(b"import os")
