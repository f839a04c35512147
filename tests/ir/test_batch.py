"""Where the batch goes in a Reshape, and common factors of shapes."""

import io
import warnings
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ir.batch import align, reshape_target, resolve
from ir.build import GraphBuilder
from ir.errors import ModelError
from ir.graph import Tensor
from ir.onnx.load import load_model


def tensor(shape, batch=0):
    return Tensor(name="x", shape=shape, dtype="float32", role="activation", batch_dim=batch)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(
    ("shape", "place", "target", "at_one", "where"),
    [
        ((1, 128, 768), 0, lambda n: (128 * n, 768), (128, 768), 0),
        ((128, 768), 0, lambda n: (n, 128, 768), (1, 128, 768), 0),
        ((1, 128, 768), 0, lambda n: (n, 128, 12, 64), (1, 128, 12, 64), 0),
        ((1, 12, 128, 64), 0, lambda n: (12 * n, 128, 64), (12, 128, 64), 0),
        ((1, 128, 768), 0, lambda n: (-1, 768), (128, 768), 0),
        ((1, 128, 768), 0, lambda n: (0, 0, 12, -1), (1, 128, 12, 64), 0),
        ((1, 512, 7, 7), 0, lambda n: (n, -1), (1, 25088), 0),
        ((7, 1, 32), 1, lambda n: (7, n, 4, 8), (7, 1, 4, 8), 1),
        ((7, 1, 32), 1, lambda n: (7, 32 * n) if n > 1 else (7, 32), (7, 32), 1),
    ],
)
def test_batch_is_found_at_any_export_size(shape, place, target, at_one, where, batch):
    found = reshape_target(tensor(shape, place), target(batch), export_batch=batch)
    assert found is not None
    assert (found.shape, found.batch_dim, found.is_traced) == (at_one, where, True)


def test_a_minor_batch_is_reported():
    found = reshape_target(tensor((7, 1, 32), 1), (28, 32), export_batch=4)
    assert found is not None and not found.is_traced and found.shape == (7, 32)


def test_sizes_that_do_not_fit():
    assert reshape_target(tensor((1, 6)), (4,), export_batch=1) is None
    assert resolve((2, 3), (-1, -1)) is None and resolve((2, 3), (0, 3)) == (2, 3)
    assert resolve((2, 0), (0, 2), allow_zero=True) == (0, 2)


def shapes(size: int):
    """Factorisations of `size` with ones strewn in."""

    def draw(data):
        rest, found = size, []
        while rest > 1:
            step = data.draw(st.sampled_from([d for d in range(2, rest + 1) if rest % d == 0]))
            found.append(step)
            rest //= step
        return [*found, *([1] * data.draw(st.integers(0, 2)))]

    return draw


@given(st.data(), st.sampled_from([1, 12, 24, 36, 64, 120]))
def test_aligned_factors_multiply_to_both_sides(data, size):
    source, target = shapes(size)(data), shapes(size)(data)
    groups = align(source, target)
    for ins, outs, factors in groups:
        assert prod(source[d] for d in ins) == prod(target[d] for d in outs)
        if factors:
            assert prod(factors) == prod(source[d] for d in ins)
            for dims, side in ((ins, source), (outs, target)):
                position = 0
                for d in dims:
                    reached = 1
                    while reached < side[d]:
                        reached *= factors[position]
                        position += 1
                    assert reached == side[d]
    assert sorted(d for ins, _, _ in groups for d in ins) == [d for d, s in enumerate(source) if s != 1]


@pytest.mark.parametrize(
    ("kind", "operands", "attributes", "helps"),
    [
        ("MatMul", ("w", "x"), {}, True),  # 3 x 8 by 8 x 4: a product, if the 8 are no samples
        ("Gather", ("x", "rows"), {"axis": 0}, True),
        ("MatMul", ("x", "w"), {}, False),  # 8 x 4 by 3 x 8 is none, whatever is the batch
        ("Transpose", ("x",), {"perm": (0, 0)}, False),
        ("Reshape", ("x",), {"shape": (3, 5)}, False),
    ],
)
def test_the_batch_is_asked_for_where_another_one_makes_an_operator_readable(kind, operands, attributes, helps):
    builder = GraphBuilder(export_batch=8)
    builder.input("x", (1, 4))
    builder.input("rows", (1,), "int64")
    builder.parameter("w", (3, 8))
    with pytest.raises(ModelError) as caught:
        builder.add(kind, operands, ["y"], attributes=attributes)
    assert ("--batch-dim" in caught.value.repair) == helps


def test_a_product_of_samples_with_samples_is_told_to_stay_within_each():
    """As csatv2's attention of `[samples, positions]` with its transpose."""
    builder = GraphBuilder(export_batch=8)
    builder.input("x", (1, 49))
    builder.add("Transpose", ["x"], ["t"], attributes={"perm": (1, 0)})
    with pytest.raises(ModelError, match=r"MatMul.*a product over samples.*If it is the batch.*within each sample"):
        builder.add("MatMul", ["t", "x"], ["y"])


def test_a_view_that_exporters_leave_out_at_one_sample() -> None:
    """Frames are taken apart from samples by a Reshape, of which an Unsqueeze is left at one sample: the error says how
    to export it."""

    def frames(samples: int) -> bytes:
        sizes = {"flat": [-1, 8], "apart": [samples, 3, 8], "first": [0]}
        stored = [numpy_helper.from_array(np.ones((8, 8), np.float32), "w")]
        stored += [numpy_helper.from_array(np.array(size), name) for name, size in sizes.items()]
        view = ("Unsqueeze", ["h", "first"]) if samples == 1 else ("Reshape", ["h", "apart"])
        nodes = [
            helper.make_node("Reshape", ["x", "flat"], ["m"]), helper.make_node("MatMul", ["m", "w"], ["h"]),
            helper.make_node(*view, ["t"]), helper.make_node("Transpose", ["t"], ["k"], perm=[0, 2, 1]),
            helper.make_node("MatMul", ["t", "k"], ["s"]), helper.make_node("Softmax", ["s"], ["p"]),
            helper.make_node("MatMul", ["p", "t"], ["y"]),
        ]  # fmt: skip
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [samples, 3, 8])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        graph = helper.make_graph(nodes, "frames", [x], [y], stored)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()

    with pytest.raises(ModelError) as fault:
        load_model(frames(1))
    assert "export it with two samples" in fault.value.repair
    graph = load_model(frames(2))
    assert not graph.warnings and graph.forward_flops == 2 * (3 * 8 * 8 + 2 * 3 * 3 * 8)


def product(inputs, outputs=(), **options):
    """A product of input `x` with a weight, to which the others among `inputs` (name -> shape) are added."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h0"])]
    others = [name for name in inputs if name != "x"]
    nodes += [helper.make_node("Add", [f"h{i}", name], [f"h{i + 1}"]) for i, name in enumerate(others)]
    declared = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    result = helper.make_tensor_value_info(f"h{len(others)}", TensorProto.FLOAT, *outputs or [None])
    stored = [numpy_helper.from_array(np.ones((8, 4), np.float32), "w")]
    graph = helper.make_graph(nodes, "product", declared, [result], stored)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    return load_model(proto.SerializeToString(), **options)


@pytest.mark.parametrize("length", ["seq", "sequence_length", "seq_len", "T", "time", "num_tokens", "src_len"])
@pytest.mark.parametrize("behind", [(3, 8), (8,)])
def test_a_leading_dim_that_is_called_a_length_is_not_taken_for_the_batch(length, behind):
    with pytest.raises(ModelError, match="which is not a batch") as caught:
        product({"x": (length, *behind)}, dims={length: 6})
    assert ("--batch-dim x=1" in caught.value.repair) and "a leading dim of samples" in caught.value.repair
    graph = product({"x": (length, *behind)}, dims={length: 6}, batch_dims={"x": None})
    assert graph.forward_flops == 2 * 6 * prod(behind) * 4
    graph = product({"x": (length, 3, 8)}, dims={length: 6}, batch_dims={"x": 1})
    assert (graph.tensors["x"].shape, graph.tensors["x"].batch_dim) == ((6, 1, 8), 1)
    assert graph.forward_flops == 2 * 6 * 8 * 4


@pytest.mark.parametrize("name", ["bsz", "N", "batch_size", "b"])
def test_the_second_dim_is_the_batch_where_it_is_called_so(name):
    graph = product({"x": ("seq", name, 8)}, dims={"seq": 6})
    assert (graph.tensors["x"].shape, graph.tensors["x"].batch_dim) == ((6, 1, 8), 1)


def test_an_input_of_one_length_is_the_same_for_all_samples():
    graph = product({"x": ("samples", "seq", 8), "mask": ("seq", 4)}, dims={"seq": 6})
    assert [graph.tensors[n].batch_dim for n in ("x", "mask")] == [0, None]
    assert graph.tensors["mask"].shape == (6, 4) and "mask: leading dim seq" in graph.warnings[0]


@pytest.mark.parametrize("shapes", [{"mask": (6, 4), "x": (5, 6, 8)}, {"x": (5, 6, 8), "mask": (6, 4)}])
@pytest.mark.parametrize("scale", [{}, {"scale": (1,)}])
def test_of_several_sizes_the_batch_is_that_of_the_outputs(shapes, scale):
    graph = product({**scale, **shapes}, [(5, 6, 4)])
    assert [graph.tensors[n].batch_dim for n in ("x", "mask")] == [0, None]
    assert graph.forward_flops == 2 * 6 * 8 * 4


@pytest.mark.parametrize("batch", [1, 4])
def test_attention_of_an_input_whose_sequence_is_first(batch):
    """Written as torch does: heads are taken apart from `[sequence, batch, width]`, and lie beside the batch. With the
    sequence as the batch it cannot be read; it is read with the second dim, unless the user states the first one."""
    sizes = {"apart": [6, batch * 2, 4], "four": [batch, 2, 6, 4]}
    stored = [numpy_helper.from_array(np.array(size), name) for name, size in sizes.items()]
    stored += [numpy_helper.from_array(np.ones((8, 8), np.float32), "w")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Reshape", ["h", "apart"], ["m"]),
        helper.make_node("Transpose", ["m"], ["t"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["t", "four"], ["q"]),
        helper.make_node("Transpose", ["q"], ["k"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "k"], ["s"]), helper.make_node("Softmax", ["s"], ["p"]),
        helper.make_node("MatMul", ["p", "q"], ["y"]),
    ]  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [6, batch, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "attention", [x], [y], stored)
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()
    with pytest.raises(ModelError, match="samples"):
        load_model(data, batch_dims={"x": 0})
    stated, found = load_model(data, batch_dims={"x": 1}), load_model(data)
    assert stated.forward_flops == 2 * 6 * 8 * 8 + 2 * 2 * 2 * 6 * 6 * 4
    assert found.operators == stated.operators and found.tensors == stated.tensors
    assert found.warnings == ("x: dim 1 is the batch, since operators combine what they read along dim 0",)


@pytest.mark.parametrize("layer", ["encoder", pytest.param("both", marks=pytest.mark.slow)])
def test_transformers_of_torch_with_the_sequence_first(layer):
    """`batch_first=False` is the default of nn.Transformer; masks of padding have the samples first all the same."""

    class Network(torch.nn.Module):
        def __init__(self, *, batch_first: bool) -> None:
            super().__init__()
            self.table, self.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)
            kind = torch.nn.TransformerEncoderLayer if layer == "encoder" else torch.nn.Transformer
            sizes = {"d_model": 16, "nhead": 2, "dim_feedforward": 24, "batch_first": batch_first}
            more = {} if layer == "encoder" else {"num_encoder_layers": 1, "num_decoder_layers": 1}
            self.layer = kind(**sizes, **more)

        def forward(self, x, other):
            if layer == "encoder":
                return self.head(self.layer(self.table(x), src_key_padding_mask=other))
            return self.head(self.layer(self.table(x), self.table(other)))

    graphs = []
    for batch_first in (False, True):
        file = io.BytesIO()
        x, other = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long)
        if layer == "encoder":
            other = torch.zeros(3, 7, dtype=torch.bool)
        elif not batch_first:
            other = other.T
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = Network(batch_first=batch_first).eval()
            for parameter in model.parameters():
                torch.nn.init.normal_(parameter)  # equal ones would be merged
            given = (x if batch_first else x.T, other)
            torch.onnx.export(model, given, file, dynamo=False, input_names=["x", "other"])
        graphs.append(load_model(file.getvalue()))
    second, first = graphs
    assert (second.num_parameters, second.forward_flops) == (first.num_parameters, first.forward_flops)
    assert first.num_parameters == sum(p.numel() for p in model.parameters())
    assert (second.tensors["x"].batch_dim, second.tensors["other"].batch_dim) == (1, 0 if layer == "encoder" else 1)
    assert not first.warnings and "dim 1 is the batch" in second.warnings[0]


def test_states_of_another_size_than_the_layer_are_refused():
    """PyTorch's exporter cuts the weights of an LSTM with `proj_size`, and leaves its state of all features."""
    builder = GraphBuilder(export_batch=4)
    builder.input("x", (5, 1, 8), batch_dim=1)
    for name, shape in (("w", (1, 12, 8)), ("r", (1, 12, 3)), ("h", (1, 1, 3)), ("c", (1, 1, 6))):
        builder.parameter(name, shape)
    with pytest.raises(ModelError, match="proj_size"):
        builder.add("LSTM", ["x", "w", "r", "", "", "h", "c"], ["y"], attributes={"hidden_size": 3})


def test_a_network_of_one_sample_is_told_to_be_exported_with_samples():
    with pytest.raises(ModelError, match="exported with a leading dim of samples") as caught:
        product({"x": (8,)})
    assert "--batch-dim" not in caught.value.repair


def test_the_batch_is_asked_of_the_input_that_is_left():
    """A state `[layers, batch, width]` is not asked about `x` once its place is stated."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h0"]), helper.make_node("Split", ["h"], ["a", "b"], axis=0),
        helper.make_node("Add", ["h0", "a"], ["h1"]), helper.make_node("Add", ["h1", "b"], ["y"]),
    ]  # fmt: skip
    declared = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", (6, 2, 8)), ("h", (2, 2, 4)))
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (6, 2, 4))
    graph = helper.make_graph(
        nodes, "state", declared, [y], [numpy_helper.from_array(np.ones((8, 4), np.float32), "w")]
    )
    data = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    with pytest.raises(ModelError) as caught:
        load_model(data, batch_dims={"x": 1})
    assert "--batch-dim h=1" in caught.value.repair
    loaded = load_model(data, batch_dims={"x": 1, "h": 1})
    assert [loaded.tensors[name].shape for name in "xhy"] == [(6, 1, 8), (2, 1, 4), (6, 1, 4)]


@pytest.mark.parametrize("form", ["positions", "tables"])
def test_a_rotary_embedding_at_positions_stored_for_each_sample(form):
    """Three samples were exported: their positions, or their cosines and sines, are stored three times."""
    samples, length, heads, size = 3, 5, 2, 8
    angles = np.outer(np.arange(length), 0.5 ** np.arange(size // 2))
    tables = [np.cos(angles), np.sin(angles)]
    stored = {"w": np.ones((heads * size, heads * size))}
    if form == "positions":
        stored |= dict(zip(("cos", "sin"), tables, strict=True))
        operands = ["h", "cos", "sin", "places"]
    else:
        stored |= {n: np.tile(t, (samples, 1, 1)) for n, t in zip(("cos", "sin"), tables, strict=True)}
        operands = ["h", "cos", "sin"]
    held = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in stored.items()]
    held.append(numpy_helper.from_array(np.tile(np.arange(length), (samples, 1)), "places"))
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("RotaryEmbedding", operands, ["y"], num_heads=heads),
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (samples, length, heads * size)) for n in "xy")
    file = helper.make_model(helper.make_graph(nodes, "g", [x], [y], held), opset_imports=[helper.make_opsetid("", 23)])
    graph = load_model(file.SerializeToString())
    assert (graph.tensors["y"].shape, graph.tensors["y"].batch_dim) == ((1, length, heads * size), 0)
    rotary = next(op for op in graph if op.kind == "RotaryEmbedding")
    assert all(graph.tensors[name].shape[0] in (1, length) for name in rotary.inputs[1:])
    assert graph.num_parameters == (heads * size) ** 2 and not graph.warnings
