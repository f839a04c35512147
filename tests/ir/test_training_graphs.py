"""Of a training graph, the network is read: AutoMAP derives the backward pass itself."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.onnx.load import load_model

node = helper.make_node
MS, PREVIEW = "com.microsoft", "ai.onnx.preview.training"
FEATURES, CLASSES = 6, 3


def data(nodes, *outputs):
    """A file of a linear layer `s`, and of `nodes`."""
    w = numpy_helper.from_array(np.ones((FEATURES, CLASSES), np.float32), "w")
    one = numpy_helper.from_array(np.asarray(1, np.float32), "one")
    x, labels = (
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (("x", TensorProto.FLOAT, ["n", FEATURES]), ("labels", TensorProto.INT64, ["n"]))
    )
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph([node("MatMul", ["x", "w"], ["s"]), *nodes], "training", [x, labels], results, [w, one])
    opsets = [helper.make_opsetid(domain, version) for domain, version in (("", 15), (MS, 1), (PREVIEW, 1))]
    return helper.make_model(graph, opset_imports=opsets).SerializeToString()


LOSS = [node("SoftmaxCrossEntropyLoss", ["s", "labels"], ["loss"], reduction="mean")]
RUNTIME = [
    node("SoftmaxCrossEntropyLossInternal", ["s", "labels"], ["loss", "log"], domain=MS, reduction="mean"),
    node("SoftmaxCrossEntropyLossInternalGrad", ["one", "log", "labels"], ["ds"], domain=MS),
    node("Gemm", ["x", "ds"], ["dw"], transA=1), node("InPlaceAccumulatorV2", ["w", "dw"], ["ok"], domain=MS),
]  # fmt: skip
OF_ONNX = [
    *LOSS, node("Gradient", ["w"], ["dw"], domain=PREVIEW, xs=["w"], y="loss"),
    node("Momentum", ["one", "one", "w", "dw", "w"], ["w2", "v2"], domain=PREVIEW, alpha=0.9, beta=1.0, mode="standard",
         norm_coefficient=0.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [(RUNTIME, ("loss", "ok")), (RUNTIME, ("dw", "loss")), (OF_ONNX, ("loss", "dw", "w2"))],
    ids=("updates", "gradients", "ONNX's own operators"),
)
def test_gradients_and_updates_are_left_out(nodes, outputs):
    alone, graph = load_model(data(LOSS, "loss")), load_model(data(nodes, *outputs))
    read = [[(op.kind, op.inputs, op.outputs, op.attributes) for op in each.operators] for each in (graph, alone)]
    assert read[0] == read[1] and graph.outputs == ("loss",)
    assert graph.forward_flops == 2 * FEATURES * CLASSES
    assert not alone.warnings
    assert [w for w in graph.warnings if "training graph" in w and "that computes loss" in w] == list(graph.warnings)


def test_a_file_without_a_forward_pass_is_refused():
    with pytest.raises(ModelError, match=r"outputs are all gradients or updates.*as the exporter wrote it"):
        load_model(data(RUNTIME, "ok"))
