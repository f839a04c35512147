"""Recurrent layers define which dim of the inputs that they read is the batch."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.onnx.load import load_model

node = helper.make_node
TIME, WIDTH, HIDDEN, ROWS = 7, 6, 8, 30
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


def written(nodes, inputs, shapes):
    """The bytes of a file; `shapes` has those of the stored tensors."""
    rng = np.random.default_rng(0)
    stored = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    stored += [numpy_helper.from_array(np.array([n]), name) for name, n in (("zero", 0), ("one", 1), ("two", 2))]
    given = [helper.make_tensor_value_info(n, kind, s) for n, (kind, s) in inputs.items()]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph(nodes, "recurrent", given, [y], stored), opset_imports=[helper.make_opsetid("", 21)]
    )
    return model.SerializeToString()


def recurrent(kind, samples, *, layout=0, states=False, ids=False):
    """A layer behind a projection or a look-up, in front of a projection."""
    steps, batch = (1, 0) if layout else (0, 1)
    sizes = [0, 0]
    sizes[steps], sizes[batch] = TIME, samples
    shapes = {"w": (1, GATES[kind] * HIDDEN, WIDTH), "r": (1, GATES[kind] * HIDDEN, HIDDEN), "out": (HIDDEN, WIDTH)}
    shapes |= {"table": (ROWS, WIDTH)} if ids else {"first": (WIDTH, WIDTH)}
    inputs = {"x": (TensorProto.INT64, tuple(sizes)) if ids else (TensorProto.FLOAT, (*sizes, WIDTH))}
    operands = ["h", "w", "r"]
    if states:
        state = (samples, 1, HIDDEN) if layout else (1, samples, HIDDEN)
        names = ["state", "cell"] if kind == "LSTM" else ["state"]
        inputs |= dict.fromkeys(names, (TensorProto.FLOAT, state))
        operands += ["", "", *names]
    # Directions are the third dim of `[batch, time, directions, hidden]`, else the second.
    nodes = [
        node("Gather", ["table", "x"], ["h"]) if ids else node("MatMul", ["x", "first"], ["h"]),
        node(kind, operands, ["z"], hidden_size=HIDDEN, layout=layout, name="layer"),
        node("Squeeze", ["z", "two" if layout else "one"], ["s"]),
        node("MatMul", ["s", "out"], ["y"]),
    ]
    return nodes, inputs, shapes


def data(kind, samples, **options):
    return written(*recurrent(kind, samples, **options))


@pytest.mark.parametrize("samples", (1, 3, TIME))
@pytest.mark.parametrize("ids", (False, True), ids=("projection", "look-up"))
@pytest.mark.parametrize("kind", GATES)
def test_the_second_dim_of_a_sequence_is_the_batch(kind, ids, samples):
    graph = load_model(data(kind, samples, ids=ids, states=True))
    stated = load_model(
        data(kind, samples, ids=ids, states=True),
        batch_dims=dict.fromkeys(["x", "state", *(["cell"] if kind == "LSTM" else [])], 1),
    )
    assert graph.operators == stated.operators and graph.tensors == stated.tensors
    assert (graph.tensors["x"].shape[:2], graph.tensors["x"].batch_dim) == ((TIME, 1), 1)
    products = 2 * TIME * HIDDEN * WIDTH + (0 if ids else 2 * TIME * WIDTH * WIDTH)
    assert graph.forward_flops == products + 2 * TIME * GATES[kind] * HIDDEN * (WIDTH + HIDDEN)
    assert graph.tensors["y"].batch_dim == 1
    assert [w for w in graph.warnings if w.startswith("x:")] == [
        "x: dim 1 is the batch, as the recurrent layer layer defines it"
    ]
    assert not stated.warnings


@pytest.mark.parametrize("kind", GATES)
def test_a_layer_with_the_batch_first_changes_nothing(kind):
    graph = load_model(data(kind, 3, layout=1, states=True))
    assert (
        all(tensor.batch_dim == 0 for tensor in graph.tensors.values() if tensor.role == "input") and not graph.warnings
    )


def test_a_transpose_in_front_of_the_layer_is_followed():
    """As PyTorch exports `batch_first=True`: the sequence has the batch first, the states have it second."""
    nodes, inputs, shapes = recurrent("GRU", 3, states=True)
    nodes[:1] = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]), node("Relu", ["t"], ["h"]),
        node("Slice", ["state", "zero", "one", "zero"], ["part"]),
    ]  # fmt: skip
    nodes[3].input[5] = "part"
    inputs["x"] = (TensorProto.FLOAT, (3, TIME, WIDTH))
    del shapes["first"]
    graph = load_model(written(nodes, inputs, shapes))
    assert {t.name: t.batch_dim for t in graph.tensors.values() if t.role == "input"} == {"x": 0, "state": 1}
    assert [w.partition(":")[0] for w in graph.warnings] == ["state"]


def test_what_is_stated_goes_before_what_a_layer_defines():
    with pytest.raises(ModelError, match="batch"):
        load_model(data("LSTM", 3), batch_dims={"x": 0})


def test_layers_that_differ_define_nothing():
    """One reads the sequence as it is and the other one transposed: the leading dim is the batch then, as usual."""
    nodes, inputs, shapes = recurrent("RNN", 3)
    inputs["x"] = (TensorProto.FLOAT, (TIME, TIME, WIDTH))
    nodes[-1].output[0] = "y1"
    nodes += [
        node("Transpose", ["h"], ["turned"], perm=[1, 0, 2]),
        node("RNN", ["turned", "w", "r"], ["z2"], hidden_size=HIDDEN), node("Squeeze", ["z2", "one"], ["s2"]),
        node("MatMul", ["s2", "out"], ["y2"]), node("Add", ["y1", "y2"], ["y"]),
    ]  # fmt: skip
    with pytest.raises(ModelError, match="`--batch-dim x=1`"):
        load_model(written(nodes, inputs, shapes))


def stepped(samples, *, ends="last", ids=False):
    """A recurrence that a loop in Python writes out: each row times weights, added to the state times others."""
    shapes = {"w": (WIDTH, HIDDEN), "r": (HIDDEN, HIDDEN), "out": (HIDDEN, WIDTH)} | (
        {"table": (ROWS, WIDTH)} if ids else {}
    )
    inputs = {"x": (TensorProto.INT64, (TIME, samples)) if ids else (TensorProto.FLOAT, (TIME, samples, WIDTH))}
    inputs["h0"] = (TensorProto.FLOAT, (samples, HIDDEN))
    nodes = [node("Gather", ["table", "x"], ["e"])] if ids else [node("Identity", ["x"], ["e"])]
    for t in range(TIME):
        nodes += [
            node("Constant", [], [f"t{t}"], value=numpy_helper.from_array(np.array(t))),
            node("Gather", ["e", f"t{t}"], [f"x{t}"]), node("MatMul", [f"x{t}", "w"], [f"a{t}"]),
            node("MatMul", [f"h{t}", "r"], [f"b{t}"]), node("Add", [f"a{t}", f"b{t}"], [f"c{t}"]),
            node("Tanh", [f"c{t}"], [f"h{t + 1}" if ends == "last" else f"s{t}"]),
        ]  # fmt: skip
        if ends != "last":  # rows that are laid side by side and never combined may be samples
            nodes.append(node("Identity", ["h0"], [f"h{t + 1}"]))
            nodes.append(node("Unsqueeze", [f"s{t}", "zero"], [f"u{t}"]))
    if ends != "last":
        nodes.append(node("Concat", [f"u{t}" for t in range(TIME)], [f"h{TIME + 1}"], axis=0))
    last = f"h{TIME}" if ends == "last" else f"h{TIME + 1}"
    return written([*nodes, node("MatMul", [last, "out"], ["y"])], inputs, shapes)


@pytest.mark.parametrize("ids", (False, True), ids=("features", "look-up"))
@pytest.mark.parametrize("samples", (1, 3))
def test_a_loop_that_combines_the_rows_of_a_dim_steps_through_time(ids, samples):
    graph = load_model(stepped(samples, ids=ids))
    assert {name: graph.tensors[name].batch_dim for name in ("x", "h0", "y")} == {"x": 1, "h0": 0, "y": 0}
    assert graph.forward_flops == 2 * TIME * HIDDEN * (WIDTH + HIDDEN) + 2 * HIDDEN * WIDTH
    assert [w for w in graph.warnings if w.startswith("x:")] == [
        "x: dim 1 is the batch, since operators combine the rows of dim 0 with each other"
    ]


def test_rows_that_are_only_laid_side_by_side_may_be_samples():
    with pytest.raises(ModelError, match="looks up rows of the batch dim"):
        load_model(stepped(TIME, ends="joined"))
