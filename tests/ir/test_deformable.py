"""Convolutions whose windows read at moved places are read, priced and executed as such."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from ort_oracle import compare

from ir.errors import ModelError
from ir.onnx.load import load_model

node = helper.make_node
CHANNELS, FILTERS, SIZE = 4, 6, 8


def written(*, parts=1, groups=1, bias=True, mask=True, samples=1, stride=1, dilation=1, wrong=0):
    """The bytes of a file in which a convolution makes the places and the mask of the other one."""
    shapes = {"places": (18 * parts + wrong, CHANNELS, 3, 3), "w": (FILTERS, CHANNELS // groups, 3, 3)}
    shapes |= {"masks": (9 * parts, CHANNELS, 3, 3)} if mask else {}
    shapes |= {"b": (FILTERS,)} if bias else {}
    rng = np.random.default_rng(0)
    stored = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    window = {"kernel_shape": [3, 3], "pads": [1] * 4, "strides": [stride] * 2, "dilations": [dilation] * 2}
    nodes = [
        node("Conv", ["x", "places"], ["offsets"], **window),
        *([node("Conv", ["x", "masks"], ["m"], **window), node("Sigmoid", ["m"], ["mask"])] if mask else []),
        node("DeformConv", ["x", "w", "offsets", "b" if bias else "", "mask" if mask else ""], ["y"],
             group=groups, offset_group=parts, **window),
    ]  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (samples, CHANNELS, SIZE, SIZE))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "deformable", [x], [y], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9).SerializeToString()


CASES = [{}, {"bias": False, "mask": False}, {"parts": 2, "groups": 2}, {"stride": 2}, {"dilation": 2, "stride": 2}]


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_its_flops_are_those_of_a_convolution(case, samples):
    graph = load_model(written(samples=samples, **case))
    op = next(op for op in graph.operators if op.kind == "DeformConv")
    result = graph.tensors[op.outputs[0]]
    filters = FILTERS * CHANNELS // case.get("groups", 1) * 9
    assert op.forward_flops.at(1) == 2 * filters * result.shape[2] * result.shape[3]
    assert op.backward_flops.at(1) == 2 * op.forward_flops.at(1)
    assert result.batch_dim == 0 and not graph.warnings


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_computes_what_onnxruntime_does(case):
    assert compare(written(**case)) < 1e-5


def test_places_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match=r"DeformConv.*places \(1, 19, 8, 8\)"):
        load_model(written(wrong=1))
