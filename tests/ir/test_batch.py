"""Where the batch goes in a Reshape, and common factors of shapes."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ir.batch import align, reshape_target, resolve
from ir.build import GraphBuilder
from ir.errors import ModelError
from ir.graph import Tensor
from ir.linkage import operator_signatures
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


def test_samples_are_split_by_the_batch_only():
    """Where the batch was lost on the way, as in attention over what looks like positions, they stay together."""
    b = GraphBuilder()
    x = b.input("x", (1, 50, 8, 32))
    (rows,) = b.add("Reshape", [x], ["rows"], attributes={"shape": (50, 8, 32)})
    (turned,) = b.add("Transpose", [rows], ["turned"], attributes={"perm": (1, 0, 2)})
    (heads,) = b.add("Reshape", [turned], ["heads"], attributes={"shape": (2, 4, 50, 32)})
    (met,) = b.add("Attention", [heads, heads, heads], ["met"], opset=23)
    graph = b.finish([met])
    attention = graph.operators[-1]
    assert graph.tensors["heads"].batch_dim == 2
    splits = [s for s in operator_signatures(graph, attention) if s.divides_work]
    assert splits and all(2 not in (*s.inputs, *s.outputs) for s in splits)


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
