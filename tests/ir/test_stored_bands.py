"""Masks that are too large to be read as numbers: their bands are found, also in a stripped file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.attention_windows import CAUSAL, Window, attention_masks
from ir.graph import Graph
from ir.known_values import KnownValues
from ir.onnx.load import load_model
from ir.onnx.rewrites.stored_bands import band_of
from ir.onnx.strip import strip
from ir.serialize import graph_digest

LENGTH, SIZE = 96, 8
Array = npt.NDArray[np.generic]
Nodes = list[onnx.NodeProto]


def shown(before: int | None, behind: int | None, rows: int = LENGTH, columns: int = LENGTH) -> npt.NDArray[np.bool_]:
    apart = np.arange(columns) - np.arange(rows)[:, None]
    low, high = -rows if before is None else -before, columns if behind is None else behind
    return (apart >= low) & (apart <= high)


def added(before: int | None, behind: int | None) -> tuple[Array, Nodes]:
    mask = np.where(shown(before, behind), 0.0, -np.inf).astype(np.float32)
    return mask[None, None], [helper.make_node("Add", ["s", "m"], ["w"])]


def chosen(before: int | None, behind: int | None) -> tuple[Array, Nodes]:
    """As GPT-2 and GPT-Neo: a buffer of truth values for more positions, of which a part is taken."""
    values = {"starts": [0, 0], "ends": [LENGTH, LENGTH], "axes": [2, 3], "low": np.float32(-1e4)}
    nodes = [
        helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value), name))
        for name, value in values.items()
    ]
    nodes.append(helper.make_node("Slice", ["m", "starts", "ends", "axes"], ["part"]))
    nodes.append(helper.make_node("Where", ["part", "s", "low"], ["w"]))
    return shown(before, behind, LENGTH + 32, LENGTH + 32)[None, None], nodes


def hiding(before: int | None, behind: int | None) -> tuple[Array, Nodes]:
    """Ones where a key is hidden, times a large number."""
    many = numpy_helper.from_array(np.float32(-1e9), "many")
    nodes = [helper.make_node("Constant", [], ["many"], value=many), helper.make_node("Mul", ["m", "many"], ["n"])]
    return (~shown(before, behind)).astype(np.float32), [*nodes, helper.make_node("Add", ["s", "n"], ["w"])]


def attention(stored: Array, mask: Nodes) -> bytes:
    """One head over `LENGTH` positions, with its mask among the initializers."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.random((SIZE, SIZE), np.float32), n) for n in ("q", "k", "v")]
    nodes = [helper.make_node("MatMul", ["x", n], [f"{n}.x"]) for n in ("q", "k", "v")]
    nodes.append(helper.make_node("Transpose", ["k.x"], ["k.t"], perm=[0, 1, 3, 2]))
    nodes += [helper.make_node("MatMul", ["q.x", "k.t"], ["s"]), *mask]
    nodes += [helper.make_node("Softmax", ["w"], ["p"], axis=-1), helper.make_node("MatMul", ["p", "v.x"], ["y"])]
    inputs, outputs = (
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 1, LENGTH, SIZE])] for n in ("x", "y")
    )
    graph = helper.make_graph(nodes, "head", inputs, outputs, [*weights, numpy_helper.from_array(stored, "m")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10).SerializeToString()


def window_of(graph: Graph) -> Window:
    (mask,) = attention_masks(graph).values()
    return mask.window


@pytest.mark.parametrize("way", [added, chosen, hiding])
@pytest.mark.parametrize(
    ("before", "behind", "window"),
    [(None, 0, CAUSAL), (8, 0, Window(left=8, right=0)), (5, 3, Window(left=5, right=3))],
)
def test_a_stored_mask_is_the_band_that_it_shows(
    way: Callable[..., tuple[Array, Nodes]], before: int | None, behind: int, window: Window
) -> None:
    data = attention(*way(before, behind))
    graph, stripped = load_model(data), load_model(strip(data).data)
    assert window_of(graph) == window_of(stripped) == window
    assert graph_digest(replace(graph, sha256="")) == graph_digest(replace(stripped, sha256=""))
    assert len(graph.parameters) == 3


def test_a_stored_mask_that_hides_nothing_is_no_parameter() -> None:
    """As a tool makes it of a mask of ones, for all heads; a table of positions may be of zeros too, and is one."""
    add = [helper.make_node("Add", ["s", "m"], ["w"])]
    data = attention(np.zeros((1, 1, LENGTH, LENGTH), np.float32), add)
    assert len(load_model(data).parameters) == len(load_model(strip(data).data).parameters) == 3
    assert len(load_model(attention(np.zeros((1, LENGTH, LENGTH), np.float32), add)).parameters) == 4


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "int64", "uint8"])
@pytest.mark.parametrize(("rows", "columns"), [(96, 96), (64, 120), (120, 64)])
@pytest.mark.parametrize(("before", "behind"), [(None, 0), (0, None), (7, 2), (None, 5), (0, 0), (3, None)])
def test_what_is_made_is_what_was_stored(
    dtype: str, rows: int, columns: int, before: int | None, behind: int | None
) -> None:
    mask = shown(before, behind, rows, columns)
    stored = (np.where(mask, 2.0, -5.0) if dtype.startswith("float") else mask).astype(dtype)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", rows, columns]) for n in ("x", "y"))
    nodes = [helper.make_node("Cast", ["m"], ["c"], to=TensorProto.FLOAT), helper.make_node("Add", ["x", "c"], ["z"])]
    nodes.append(helper.make_node("MatMul", ["z", "weight"], ["y"]))
    weight = numpy_helper.from_array(np.random.default_rng(0).random((columns, columns), np.float32), "weight")
    made = helper.make_graph(nodes, "sum", [x], [y], [numpy_helper.from_array(stored, "m"), weight])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    graph = load_model(model.SerializeToString())
    found = KnownValues(graph, frozenset(), frozenset()).whole("m")
    assert found.known.all() and np.array_equal(found.values.astype(dtype), stored)


@pytest.mark.parametrize(
    "stored",
    [
        np.random.default_rng(0).random((LENGTH, LENGTH)).astype(np.float32),
        np.zeros((LENGTH, LENGTH), np.float32),
        shown(None, 0) ^ (np.arange(LENGTH * LENGTH).reshape(LENGTH, LENGTH) == LENGTH * LENGTH - 2),
        np.tile(shown(None, 0), (3, 1, 1)),
    ],
)
def test_what_is_no_band_is_left_alone(stored: Array) -> None:
    assert band_of(numpy_helper.from_array(stored, "m")) is None


@pytest.mark.parametrize(
    "text",
    ["", "[", "[0, 0]", '["0", 0, 1, 0]', "[-1, 0, 1, 0]", "[0, 0, true, 0]", "[0, 0, 1, null]", "{}", "[" * 100_000],
)
def test_metadata_that_say_no_band_are_ignored(text: str) -> None:
    tensor = numpy_helper.from_array(np.zeros((LENGTH, LENGTH), np.float32), "m")
    tensor.ClearField("raw_data")
    tensor.metadata_props.add(key="automap.band", value=text)
    assert band_of(tensor) is None
    tensor.metadata_props[0].value = json.dumps([None, 0, 0.0, -1e9])
    assert band_of(tensor) is not None
