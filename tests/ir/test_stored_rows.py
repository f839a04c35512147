"""Look-ups of constant places that a tool computed and stored: their tables are the parameters."""

from dataclasses import replace
from math import isqrt

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.onnx.load import load_model
from ir.onnx.sandbox import import_model
from ir.onnx.strip import strip
from ir.serialize import graph_digest

node = helper.make_node
RANDOM = np.random.default_rng(0)
HEADS, SIDE, WIDTH = 3, 5, 4
PAIRS = SIDE**4


def window(table):
    """`[heads, queries, keys]` of a table of relative places, as Swin looks it up."""
    y, x = np.divmod(np.arange(SIDE * SIDE), SIDE)
    at = (y[:, None] - y + SIDE - 1) * (2 * SIDE - 1) + x[:, None] - x + SIDE - 1
    return np.moveaxis(table[at], -1, 0)


def written(bias, *, joined=False, samples=1):
    """The bytes of attention to which `bias` is added in front of the softmax, or `joined` to its keys; one of
    `[queries * keys, heads]` is viewed as `[1, heads, queries, keys]` first."""
    is_flat = bias.ndim == 2
    tokens = isqrt(len(bias)) if is_flat else bias.shape[-2]
    shapes = dict.fromkeys(("wq", "wk"), (HEADS * WIDTH, WIDTH * HEADS))
    stored = {n: RANDOM.normal(size=s) for n, s in shapes.items()} | {"bias": bias}
    stored = [numpy_helper.from_array(np.asarray(v, np.float32), n) for n, v in stored.items()]
    stored.append(numpy_helper.from_array(np.array([0, 0, HEADS, WIDTH]), "heads"))
    stored.append(numpy_helper.from_array(np.array([tokens, tokens, -1]), "pairs"))
    stored.append(numpy_helper.from_array(np.array([0]), "first"))
    views = [
        node("Reshape", ["bias", "pairs"], ["viewed"]), node("Transpose", ["viewed"], ["turned"], perm=[2, 0, 1]),
        node("Unsqueeze", ["turned", "first"], ["put"]),
    ]  # fmt: skip
    nodes = [
        *(views if is_flat else []),
        *(node("MatMul", ["x", f"w{n}"], [n]) for n in "qk"), *(node("Reshape", [n, "heads"], [f"{n}r"]) for n in "qk"),
        node("Transpose", ["qr"], ["qt"], perm=[0, 2, 1, 3]), node("Transpose", ["kr"], ["kt"], perm=[0, 2, 3, 1]),
        node("MatMul", ["qt", "kt"], ["scores"]),
        node("Concat" if joined else "Add", ["scores", "put" if is_flat else "bias"], ["biased"],
             **({"axis": 3} if joined else {})),
        node("Softmax", ["biased"], ["y"], axis=-1),
    ]  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (samples, tokens, HEADS * WIDTH))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()


def attention(bias, **form):
    """The graph of such a file; that of the stripped file is the same."""
    data = written(bias, **form)
    found, stripped = load_model(data), load_model(strip(data).data)
    assert graph_digest(replace(stripped, sha256="")) == graph_digest(replace(found, sha256=""))
    return found


def test_the_sandbox_reads_it():
    """It opens no file once it has the upload, also none of a module of numpy that was not imported."""
    assert import_model(written(window(TABLE)[None])).num_parameters == 2 * (HEADS * WIDTH) ** 2 + TABLE.size


def own(graph):
    """Shapes of the parameters other than the projections."""
    return [p.shape for p in graph.parameters if not p.name.startswith("w")]


TABLE = RANDOM.normal(size=((2 * SIDE - 1) ** 2, HEADS))
MASK = np.where(RANDOM.random((4, 1, SIDE**2, SIDE**2)) < 0.5, -100.0, 0.0)
BUCKETS = np.moveaxis(RANDOM.normal(size=(6, HEADS))[RANDOM.integers(6, size=(8, 8))], -1, 0)


@pytest.mark.parametrize(
    ("bias", "rows"),
    [(window(TABLE)[None], 81), (window(TABLE), 81), (window(0 * TABLE)[None], 81), (BUCKETS[None], 6),
     (RANDOM.normal(size=(1, HEADS, 8, 8)), 0), (np.zeros((1, HEADS, 8, 8)), 0)],
    ids=["window", "window of three dims", "fresh window", "buckets", "numbers of each pair", "fresh"],
)  # fmt: skip
def test_biases_of_places_are_their_table(bias, rows):
    graph = attention(bias)
    assert own(graph) == [(rows, HEADS) if rows else bias.shape]
    assert graph.tensors["y"].shape == (1, HEADS, *bias.shape[-2:])
    assert graph.tensors["y"].batch_dim == 0 and not graph.warnings


def test_a_window_of_one_head():
    """As the first stage of a small MaxViT; numbers of one head that are there twice are no table."""
    graph = attention(window(TABLE[:, :1])[None])
    assert own(graph) == [(81, 1)]
    assert own(attention(RANDOM.integers(9, size=(1, 1, 8, 8)))) == [(1, 1, 8, 8)]


@pytest.mark.parametrize("rows", [81, 0], ids=["window", "numbers of each pair"])
def test_look_ups_that_are_viewed_as_a_bias_are_their_table(rows):
    """PyTorch's newer exporter leaves the views where the table is large, as in GC ViT and the wider stages of Swin."""
    stored = np.moveaxis(window(TABLE), 0, -1).reshape(-1, HEADS) if rows else RANDOM.normal(size=(PAIRS, HEADS))
    graph = attention(stored)
    assert own(graph) == [(rows or PAIRS, HEADS)]
    assert graph.tensors["y"].shape == (1, HEADS, SIDE**2, SIDE**2)


def test_sinks_of_attention_are_one_number_of_each_head():
    """Which the exporter repeated for all samples and queries."""
    sinks = np.broadcast_to(RANDOM.normal(size=(1, HEADS, 1, 1)), (2, HEADS, 8, 1))
    graph = attention(sinks, joined=True, samples=2)
    assert own(graph) == [(1, HEADS)]
    assert graph.tensors["y"].shape == (1, HEADS, 8, 9)


def test_biases_of_windows_with_a_mask_are_few_rows():
    """Windows at the border hide what was rolled around: each of the rows is there twice."""
    ((rows, heads),) = own(attention(window(TABLE)[None] + MASK, samples=4))
    assert 81 < rows <= 162 and heads == HEADS


def test_what_no_softmax_follows_is_left():
    stored = np.repeat(RANDOM.normal(size=(1, HEADS, 1, 8)), 8, 2)
    nodes = [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "bias"], ["y"])]
    held = [numpy_helper.from_array(np.asarray(v, np.float32), n)
            for n, v in (("w", RANDOM.normal(size=(8, 8))), ("bias", stored))]  # fmt: skip
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, (1, HEADS, 8, 8)) for n in "xy"]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    assert load_model(model.SerializeToString()).num_parameters == 64 + HEADS * 64
