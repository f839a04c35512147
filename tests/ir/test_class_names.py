"""Classifiers of scikit-learn are read as their networks, without what names the classes."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.errors import ModelError
from ir.onnx.load import load_model

node = helper.make_node
ML = "ai.onnx.ml"
FEATURES, HIDDEN, CLASSES = 6, 8, 3


def network(*, scaled=False):
    """The nodes of a classifier in front of the probabilities `p`, as skl2onnx writes them."""
    return [
        *([node("Scaler", ["x"], ["s"], domain=ML, offset=[0.5] * FEATURES, scale=[2.0] * FEATURES)] if scaled else []),
        node("MatMul", ["s" if scaled else "x", "w1"], ["a"]), node("Relu", ["a"], ["b"]),
        node("MatMul", ["b", "w2"], ["c"]), node("Softmax", ["c"], ["p"], axis=-1),
    ]  # fmt: skip


NAMES = [
    node("ArgMax", ["p"], ["best"], axis=1), node("ArrayFeatureExtractor", ["classes", "best"], ["found"], domain=ML),
    node("Reshape", ["found", "flat"], ["row"]), node("Cast", ["row"], ["label"], to=TensorProto.INT64),
]  # fmt: skip
MAP = node("ZipMap", ["p"], ["map"], domain=ML, classlabels_int64s=range(CLASSES))


def loaded(nodes, *outputs):
    rng = np.random.default_rng(0)
    stored = [
        numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        for name, shape in (("w1", (FEATURES, HIDDEN)), ("w2", (HIDDEN, CLASSES)))
    ]
    stored += [numpy_helper.from_array(np.array(v), n) for n, v in (("classes", [4, 5, 6]), ("flat", [-1]))]
    probabilities = helper.make_map_type_proto(
        TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, [])
    )  # fmt: skip
    types = {
        "label": helper.make_tensor_type_proto(TensorProto.INT64, ["n"]),
        "p": helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", CLASSES]),
        "map": helper.make_sequence_type_proto(probabilities),
    }
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", FEATURES])
    results = [helper.make_value_info(name, types[name]) for name in outputs]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(ML, 1)]
    graph = helper.make_graph(nodes, "classifier", [x], results, stored)
    return load_model(helper.make_model(graph, opset_imports=opsets).SerializeToString())


@pytest.mark.parametrize(
    ("nodes", "outputs"),
    [(NAMES, ("label", "p")), ([*NAMES, MAP], ("label", "map")), ([MAP], ("map", "p"))],
    ids=("label", "label and map", "map"),
)
def test_the_network_ends_with_its_probabilities(nodes, outputs):
    alone, graph = loaded(network(), "p"), loaded([*network(), *nodes], *outputs)
    assert graph.operators == alone.operators and graph.outputs == ("p",)
    (warning,) = graph.warnings
    assert all(name in warning for name in outputs if name != "p") and not alone.warnings


def test_features_are_scaled_by_constants():
    graph = loaded([*network(scaled=True), *NAMES], "label", "p")
    assert graph.num_parameters == FEATURES * HIDDEN + HIDDEN * CLASSES
    assert [op.kind for op in graph if op.kind not in ("Constant", "MatMul")] == ["Sub", "Mul", "Relu", "Softmax"]


def test_a_file_that_returns_names_alone_is_refused():
    with pytest.raises(ModelError, match="hand in the neural network alone"):
        loaded([*network(), *NAMES], "label")
