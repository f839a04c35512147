"""Weights that a tool stored twice or once for several, and tables that it computed and stored."""

import copy
import io
import warnings
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from ir.onnx.load import load_model
from ir.onnx.readers.nodes import KIND_KEY
from ir.onnx.rewrites.computed_tables import computed_tables
from ir.onnx.strip import strip
from ir.serialize import graph_digest

node = helper.make_node
RANDOM = np.random.default_rng(0)
TABLE = RANDOM.normal(size=(40, 8)).astype(np.float32)
SQUARE = {f"w{i}": RANDOM.normal(size=(8, 8)).astype(np.float32) for i in range(3)}
PLACES = np.arange(6)[:, None] / 10.0 ** np.arange(4)


def file(nodes, held, *, output=("N", 6, 8)):
    """A file of nodes that read `ids` or `x` and write `y`."""
    read = {name for each in nodes for name in each.input}
    kinds = {"ids": (TensorProto.INT64, ("N", 6)), "x": (TensorProto.FLOAT, ("N", 6, 8))}
    inputs = [helper.make_tensor_value_info(n, *kind) for n, kind in kinds.items() if n in read]
    stored = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in held.items() if n in read]
    graph = helper.make_graph(
        nodes, "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)], stored
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


def both(data):
    """The graph of a file, which is also that of the stripped file."""
    graph = load_model(data)
    stripped = load_model(strip(data).data)
    assert graph_digest(replace(stripped, sha256="")) == graph_digest(replace(graph, sha256=""))
    return graph


@pytest.mark.parametrize("turned", [False, True])
def test_a_head_that_is_stored_beside_its_embedding_is_tied(turned):
    nodes = [
        node("Gather", ["table", "ids"], ["a"]),
        node("MatMul", ["a", "w0"], ["b"]),
        node("MatMul", ["b", "head"], ["y"])
        if turned
        else node("Einsum", ["b", "head"], ["y"], equation="nld,vd->nlv"),
    ]
    head = TABLE.T if turned else TABLE
    held = {"table": TABLE, **SQUARE, "head": head}
    output = ("N", 6, 40)
    if turned:
        assert both(file(nodes, held, output=output)).num_parameters == 40 * 8 + 64
        other = {**held, "head": head + 1}
        assert both(file(nodes, other, output=output)).num_parameters == 2 * 40 * 8 + 64
    else:  # another product than one of two matrices is left as it is
        assert both(file(nodes, held, output=output)).num_parameters == 2 * 40 * 8 + 64


def layers(weights):
    nodes, last = [], "x"
    for i, weight in enumerate(weights):
        nodes += [node("MatMul", [last, weight], [f"m{i}"]), node("Add", [f"m{i}", "bias"], [f"a{i}"])]
        last = f"a{i}"
    return [*nodes, node("Relu", [last], ["y"])]


def test_a_fresh_bias_that_many_layers_read_is_a_bias_of_each_layer():
    assert both(file(layers(SQUARE), {**SQUARE, "bias": np.zeros(8)})).num_parameters == 3 * (64 + 8)
    # Numbers that differ belong together, and so do the vectors of a layer that runs several times.
    assert both(file(layers(SQUARE), {**SQUARE, "bias": np.arange(8)})).num_parameters == 3 * 64 + 8
    assert both(file(layers(["w0"] * 3), {**SQUARE, "bias": np.zeros(8)})).num_parameters == 64 + 8


@pytest.mark.parametrize(
    ("table", "is_parameter"),
    [
        (np.triu(np.full((6, 8), -10_000.0), 1), False), (np.tril(np.ones((6, 8))), False),
        (np.stack([np.sin(PLACES), np.cos(PLACES)], -1).reshape(6, 8), False),
        (np.concatenate([np.sin(PLACES), np.cos(PLACES)], -1), False),
        (np.concatenate([f(p[:, :2]) for p in (PLACES, PLACES[::-1] / 3) for f in (np.sin, np.cos)], -1), False),
        (RANDOM.normal(size=(6, 8)), True), (np.zeros((6, 8)), True), (np.ones((6, 8)), True),
    ],
)  # fmt: skip
def test_masks_and_sinusoids_are_no_parameters(table, is_parameter):
    nodes = [node("MatMul", ["x", "w0"], ["m"]), node("Add", ["m", "table"], ["y"])]
    graph = both(file(nodes, {**SQUARE, "table": table}))
    assert graph.num_parameters == 64 + 48 * is_parameter


@pytest.mark.parametrize("is_sinusoid", [True, False])
def test_sinusoids_that_a_layer_projects_are_no_parameters(is_sinusoid):
    """Relative positions in attention, as Transformer-XL and Conformers have them."""
    table = np.concatenate([np.sin(PLACES), np.cos(PLACES)], -1) if is_sinusoid else RANDOM.normal(size=(6, 8))
    nodes = [
        node("MatMul", ["x", "w0"], ["m"]), node("MatMul", ["table", "w1"], ["p"]), node("Add", ["m", "p"], ["y"]),
    ]  # fmt: skip
    graph = both(file(nodes, {**SQUARE, "w1": RANDOM.normal(size=(8, 8)), "table": table}))
    assert graph.num_parameters == 2 * 64 + 48 * (not is_sinusoid)


@pytest.mark.parametrize(
    ("table", "is_computed"),
    [
        (np.tril(RANDOM.normal(size=(2, 6, 6))), True), (np.tril(RANDOM.normal(size=(6, 6)), -1), True),
        (np.triu(RANDOM.normal(size=(6, 6))), False), (RANDOM.normal(size=(6, 6)), False),
        (np.tril(RANDOM.normal(size=(3, 3))), False), (np.tril(RANDOM.normal(size=(6, 8))), False),
    ],
    ids=["of each head", "without the diagonal", "upper", "full", "small", "no square"],
)  # fmt: skip
def test_decays_of_earlier_positions_are_no_parameters(table, is_computed):
    """A retention multiplies its scores by them (RetNet): zeros for later positions."""
    tensors = {"decays": numpy_helper.from_array(table.astype(np.float32), "decays")}
    assert computed_tables([("Mul", 1, "decays")], tensors) == ({"decays"} if is_computed else set())
    assert not computed_tables([("MatMul", 1, "decays")], tensors)


@pytest.mark.parametrize(
    ("numbers", "is_parameter"),
    [
        (10_000.0 ** (-np.arange(8) / 8), False), (np.exp(-np.arange(8)).astype(np.float16), False),
        (np.linspace(1, 0.1, 8), True), (np.ones(8), True), (2.0 ** np.arange(8), True),
    ],
    ids=["of times", "of 16 bits", "a line", "fresh", "growing"],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(8,), (1, 8)], ids=str)
def test_frequencies_are_no_parameters(numbers, is_parameter, shape):
    """Those of the embedding of time of a diffusion model."""
    nodes = [node("MatMul", ["x", "w0"], ["m"]), node("Mul", ["m", "f"], ["y"])]
    graph = both(file(nodes, {**SQUARE, "f": np.reshape(numbers, shape)}))
    assert graph.num_parameters == 64 + 8 * is_parameter


def test_what_the_exporter_wrote_as_constants_is_no_parameter():
    """ONNX Runtime stores the nodes `Constant` of a file beside its weights, under the names of their results: here the
    scale and the shift of a norm that has none of its own."""
    names = ["/norm/Constant_output_0", "/norm/Constant_1_output_0", "/time/Constant_1_output_0_token_3"]
    nodes = [
        node("MatMul", ["x", "w0"], ["m"]), node("LayerNormalization", ["m", *names[:2]], ["n"]),
        node("MatMul", ["n", "w1"], ["o"]), node("LayerNormalization", ["o", *names[:2]], ["p"]),
        node("Mul", ["p", names[2]], ["y"]),
    ]  # fmt: skip
    held = {**SQUARE, names[0]: np.ones(8), names[1]: np.zeros(8), names[2]: np.arange(8)}
    assert both(file(nodes, held)).num_parameters == 2 * 64
    # Where all weights are such constants, the module was frozen, and these are its parameters.
    frozen = {name: f"/m/Constant_{i}_output_0" for i, name in enumerate(("w0", "w1"))}
    for each in nodes:
        each.input[:] = [frozen.get(name, name) for name in each.input]
    held = {frozen.get(name, name): value for name, value in held.items()}
    assert load_model(file(nodes, held)).num_parameters == 2 * 64 + 4 * 8 + 8


def test_constants_of_a_norm_without_parameters_are_no_parameters():
    """The newer exporter calls them as it calls transposed weights, and ONNX Runtime drops the marks of all others."""
    nodes = [node("MatMul", ["x", "val_3"], ["m"]), node("LayerNormalization", ["m", "val_4", "val_5"], ["y"])]
    held = {"val_3": SQUARE["w0"], "val_4": np.ones(8), "val_5": np.zeros(8)}
    for producer, number in (("pytorch", 64), ("", 64 + 16)):
        model = onnx.load_from_string(file(nodes, held))
        model.producer_name = producer
        assert load_model(model.SerializeToString()).num_parameters == number


def test_weights_that_a_tool_made_of_marked_ones_are_parameters():
    """ONNX Runtime's optimisers turn weights, and leave the marks of the others: three quarters of a U-Net had been
    constants without a word."""
    nodes = [
        node("MatMul", ["x", "m.weight"], ["m"]), node("MatMul", ["m", "Attention_0_qkv_weight"], ["h"]),
        node("Add", ["h", "Attention_0_qkv_bias"], ["a"]), node("Add", ["a", "unsqueeze_1"], ["y"]),
    ]  # fmt: skip
    held = {"m.weight": SQUARE["w0"], "Attention_0_qkv_weight": SQUARE["w1"], "Attention_0_qkv_bias": TABLE[0]}
    model = onnx.load_from_string(file(nodes, {**held, "unsqueeze_1": TABLE[:6]}))
    model.graph.initializer[0].metadata_props.add(key=KIND_KEY, value="PARAMETER")
    assert {p.name for p in load_model(model.SerializeToString()).parameters} == {*held}


def test_a_pair_of_rotary_tables_is_no_parameter():
    angles = np.concatenate([PLACES, PLACES], -1)
    held = {**SQUARE, "cos": np.cos(angles)[None], "sin": np.sin(angles)[None]}
    nodes = [
        node("MatMul", ["x", "w0"], ["m"]), node("Mul", ["m", "cos"], ["a"]), node("Neg", ["m"], ["b"]),
        node("Mul", ["b", "sin"], ["c"]), node("Add", ["a", "c"], ["y"]),
    ]  # fmt: skip
    assert both(file(nodes, held)).num_parameters == 64
    assert both(file(nodes, {**held, "sin": np.sin(angles + 1)[None]})).num_parameters == 64 + 2 * 48


def quantised(data, *, symmetric):
    """The file with its matrices as integers of 8 bits, as ONNX Runtime stores them: the table's rows are looked up
    first, and each tensor has a scale of its own, from its range or, if symmetric, from its largest number."""
    model, made = onnx.load_from_string(data), []
    for tensor in [t for t in model.graph.initializer if len(t.dims) > 1]:
        value = numpy_helper.to_array(tensor)
        low, high = value.min(), value.max()
        if tensor.name in symmetric:
            low, high = -max(-low, high), max(-low, high)
        scale, name = np.float32((high - low) / 254 or 1), tensor.name
        zero = np.int8(np.clip(-127 - np.round(low / scale), -127, 127))
        integers = np.clip(np.round(value / scale) + zero, -127, 127).astype(np.int8)
        tensor.CopyFrom(numpy_helper.from_array(integers, name))
        for part, number in (("scale", scale), ("zero", zero)):
            model.graph.initializer.append(numpy_helper.from_array(np.asarray(number), f"{name}.{part}"))
        reader = next(n for n in model.graph.node if name in n.input)
        if reader.op_type == "Gather":
            held, read = f"{reader.output[0]}.q", reader.output[0]
            reader.output[0] = held
        else:
            held, read = name, f"{name}.f"
            reader.input[list(reader.input).index(name)] = read
        made.append(node("DequantizeLinear", [held, f"{name}.scale", f"{name}.zero"], [read]))
    # The table is looked up by the first node.
    nodes = [model.graph.node[0], *made, *model.graph.node[1:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model.SerializeToString()


@pytest.mark.parametrize("symmetric", [(), ("head",)], ids=["one rounding", "two roundings"])
def test_tables_masks_and_tied_heads_of_quantised_files_are_those_of_floats(symmetric):
    """The embedding is asymmetric, so that a head with a symmetric scale holds other integers and other numbers."""
    angles = np.concatenate([PLACES, PLACES], -1)
    table = TABLE + (TABLE > 2)
    held = {
        **SQUARE, "table": table, "head": table.T, "cos": np.cos(angles)[None], "sin": np.sin(angles)[None],
        "mask": np.triu(np.full((6, 6), np.finfo(np.float32).min), 1),
    }  # fmt: skip
    nodes = [
        node("Gather", ["table", "ids"], ["m"]), node("Mul", ["m", "cos"], ["a"]), node("Neg", ["m"], ["b"]),
        node("Mul", ["b", "sin"], ["c"]), node("Add", ["a", "c"], ["q"]),
        node("Transpose", ["m"], ["k"], perm=[0, 2, 1]), node("MatMul", ["q", "k"], ["s"]),
        node("Add", ["s", "mask"], ["t"]), node("Softmax", ["t"], ["p"]),
        node("MatMul", ["p", "m"], ["v"]), node("MatMul", ["v", "w0"], ["o"]), node("MatMul", ["o", "head"], ["y"]),
    ]  # fmt: skip
    data = file(nodes, held, output=("N", 6, 40))
    graph, floats = both(quantised(data, symmetric=symmetric)), both(data)
    assert graph.num_parameters == floats.num_parameters == 40 * 8 + 64
    assert [op.kind for op in graph.operators if op.is_live] == [op.kind for op in floats.operators if op.is_live]
    other = both(quantised(file(nodes, {**held, "head": table.T[::-1]}, output=("N", 6, 40)), symmetric=symmetric))
    assert other.num_parameters == 2 * 40 * 8 + 64


class Layer(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)))


@pytest.mark.parametrize("is_shared", [True, False])
def test_one_module_in_several_layers_counts_once_and_copies_of_it_each(is_shared):
    """PyTorch's newer exporter stores both once, as their numbers are equal."""
    first = nn.Linear(16, 16)
    stack = nn.Sequential(*(Layer(first if is_shared else copy.deepcopy(first)) for _ in range(3)))
    written = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(stack, (torch.randn(2, 16),), dynamo=True, opset_version=20, verbose=False).save(written)
    assert load_model(written.getvalue()).num_parameters == sum(p.numel() for p in stack.parameters())


def test_convolutions_in_front_of_fresh_norms_of_zero_scale_are_each_their_own():
    """The older exporter folds the scale, and stores the zeros of both signs of unlike blocks once (RepViT)."""
    blocks = nn.ModuleDict(
        {n: nn.Sequential(nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4)) for n in ("one", "two")}
    )
    blocks["three"] = nn.Sequential(blocks.pop("two"), nn.ReLU())
    for module in blocks.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.zeros_(module.weight)
    network = nn.Sequential(blocks["one"], blocks["three"], nn.Conv2d(4, 2, 1)).eval()
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (torch.ones(1, 4, 8, 8),), out, dynamo=False, opset_version=17)
    assert both(out.getvalue()).num_parameters == sum(p.numel() for p in network.parameters())
