"""The appended loss."""

import pytest

from ir.build import GraphBuilder
from ir.errors import ModelError
from ir.loss import has_loss, with_loss
from ir.onnx.load import load_model


def test_cross_entropy_of_a_language_model(export):
    plain = load_model(export("gpt"))
    graph = with_loss(plain)
    assert not has_loss(plain) and has_loss(graph) and with_loss(graph) is graph
    op = graph.operators[-1]
    assert op.kind == "SoftmaxCrossEntropyLoss" and graph.outputs[-1] == op.outputs[0]
    labels = graph.tensors["labels"]
    assert (labels.shape, labels.dtype, labels.batch_dim, labels.role) == ((1, 16), "int64", 0, "input")
    assert graph.tensors[op.outputs[0]].shape == ()
    classes = next(f for f in op.rule.factors if f.size == 96)
    assert classes.collective.name == "cross_entropy"
    assert all(f.summed for f in op.rule.factors if f is not classes)
    assert graph == load_model(export("gpt"), loss="cross_entropy")


def test_a_trailing_softmax_is_dropped(light, light_name):
    graph = with_loss(load_model(light(light_name)))
    assert graph.operators[-1].kind == "SoftmaxCrossEntropyLoss"
    assert not any(op.kind == "Softmax" for op in graph)
    assert graph.tensors["labels"].shape == (1,)
    assert graph.tensors[graph.operators[-1].inputs[0]].shape == (1, 1000)


def test_mean_squared_error_is_appended_against_a_target(export):
    graph = with_loss(load_model(export("mlp")), "mse")
    assert graph.operators[-1].kind == "MeanSquaredErrorLoss" and graph.tensors["target"].shape == (1, 10)


def test_a_scalar_output_is_the_loss_already():
    builder = GraphBuilder()
    builder.input("x", (1, 4))
    builder.parameter("w", (4, 4))
    builder.add("MatMul", ["x", "w"], ["y"])
    builder.add("ReduceSum", ["y"], ["total"], attributes={"axes": (0, 1), "keepdims": 0})
    graph = builder.finish(["total", "y"], name="scalar")
    assert with_loss(graph).outputs == ("y", "total")
    assert len(with_loss(graph).operators) == len(graph.operators)


def test_wrong_losses_are_refused(export):
    graph = load_model(export("mlp"))
    with pytest.raises(ModelError) as error:
        with_loss(graph, "hinge")
    assert error.value.field == "training.loss"
    builder = GraphBuilder()
    builder.input("x", (1, 4), "int64")
    builder.add("Abs", ["x"], ["y"])
    with pytest.raises(ModelError):
        with_loss(builder.finish(["y"]))
