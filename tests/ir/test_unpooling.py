"""Max unpooling is one operator, and is split with the pooling whose indices it reads."""

import itertools

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from ort_oracle import compare
from torch import nn
from torch.nn import functional

from automap.runtime.operators.apply import run
from ir.errors import ModelError
from ir.factors import signatures
from ir.onnx.load import load_model

node = helper.make_node
CHANNELS, SIDE = 4, 8
WINDOW = {"kernel_shape": [2, 2], "strides": [2, 2]}
UNPOOL = [node("MaxPool", ["c"], ["p", "i"], **WINDOW), node("MaxUnpool", ["p", "i"], ["u"], **WINDOW)]


def scattered(samples):
    """The same as PyTorch's newer exporter writes it: indices of each channel plus the places of the channels."""
    stored = {
        "zero": np.zeros(2, np.int64), "one": np.ones(2, np.int64), "axes": np.array([2, 3]), "flat": np.array([-1]),
        "sizes": np.array([samples, CHANNELS, SIDE, SIDE]),
        "begins": (np.arange(samples * CHANNELS) * SIDE**2).reshape(samples, CHANNELS, 1, 1),
    }  # fmt: skip
    nodes = [
        UNPOOL[0], node("MaxPool", ["c"], ["q", "j"], kernel_shape=[1, 1]),
        node("Slice", ["j", "zero", "one", "axes"], ["first"]), node("Sub", ["i", "first"], ["own"]),
        node("Add", ["own", "begins"], ["all"]), node("Reshape", ["all", "flat"], ["a"]),
        node("ConstantOfShape", ["sizes"], ["zeros"]), node("Reshape", ["zeros", "flat"], ["z"]),
        node("Reshape", ["p", "flat"], ["v"]), node("Unsqueeze", ["a", "flat"], ["at"]),
        node("ScatterND", ["z", "at", "v"], ["s"]), node("Reshape", ["s", "sizes"], ["u"]),
    ]  # fmt: skip
    return nodes, stored


def file(nodes, samples, stored=(), outputs=("y",), *, declares=False):
    rng = np.random.default_rng(0)
    held = [
        numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n)
        for n, s in (("first kernel", (CHANNELS, 3, 3, 3)), ("last kernel", (3, CHANNELS, 3, 3)))
    ]
    held += [numpy_helper.from_array(value, name) for name, value in dict(stored).items()]
    whole = [
        node("Conv", ["x", "first kernel"], ["c"], pads=[1] * 4), *nodes,
        node("Conv", ["u", "last kernel"], ["y"], pads=[1] * 4),
    ]  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (samples, 3, SIDE, SIDE))
    results = [
        helper.make_tensor_value_info(n, TensorProto.INT64 if n == "i" else TensorProto.FLOAT, None) for n in outputs
    ]
    # Optimisers drop the declarations of inner tensors.
    inner = (
        [] if not declares else [helper.make_tensor_value_info("u", TensorProto.FLOAT, (samples, CHANNELS, SIDE, SIDE))]
    )
    graph = helper.make_graph(whole, "unpooling", [x], results, held, value_info=inner)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()


@pytest.mark.parametrize(
    ("form", "samples"), [*itertools.product(("operator", "scatter", "of computed sizes", "into stored zeros"), (1, 3))]
)
def test_each_channel_is_unpooled_alone(form, samples):
    nodes, stored = (UNPOOL, {}) if form == "operator" else scattered(samples)
    if form == "into stored zeros":
        nodes = [each for each in nodes if not {"zeros", "z"} & set(each.output)]
        stored["z"] = np.zeros(samples * CHANNELS * SIDE**2, np.float32)
    if form == "of computed sizes":
        stored["all sizes"] = stored.pop("sizes")
        nodes = [node("Abs", ["all sizes"], ["sizes"]), *nodes]
    graph = load_model(file(nodes, samples, stored, declares=form != "scatter"))
    assert [op.kind for op in graph] == ["Conv", "MaxPool", "MaxUnpool", "Conv"] and not graph.warnings
    assert graph.forward_flops == 2 * 2 * 27 * CHANNELS * SIDE**2
    for op in graph.operators[1:3]:
        split = {op.rule.factors[s.factor].size for s in signatures(op.rule) if s.factor is not None}
        assert split == {1, CHANNELS}  # samples, counted for one, and channels


@pytest.mark.parametrize("form", ["operator", "scatter"])
def test_it_computes_what_onnxruntime_and_torch_do(form):
    nodes, stored = (UNPOOL, {}) if form == "operator" else scattered(1)
    assert compare(file(nodes, 1, stored)) < 1e-5
    graph = load_model(file(nodes, 1, stored))
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False), nn.Conv2d(CHANNELS, 3, 3, padding=1, bias=False)
    x = torch.randn(3, 3, SIDE, SIDE)
    given = {"x": x, "first kernel": first.weight, "last kernel": last.weight}
    found = run(graph, given, 3)["y"]
    pooled, places = functional.max_pool2d(first(x), 2, return_indices=True)
    wanted = last(functional.max_unpool2d(pooled, places, 2))
    torch.testing.assert_close(found, wanted)
    gradients = [torch.autograd.grad(y.square().sum(), first.weight, retain_graph=True)[0] for y in (found, wanted)]
    torch.testing.assert_close(*gradients)


def test_indices_that_are_returned_count_the_whole_image():
    """As ONNX says; nothing of them can be split then."""
    graph = load_model(file(UNPOOL, 2, outputs=("y", "i")))
    assert all(s.factor is None for op in graph.operators[1:3] for s in signatures(op.rule))


def test_sizes_that_do_not_fit_are_refused():
    wrong = node("MaxUnpool", ["p", "i"], ["u"], kernel_shape=[2], strides=[2])
    with pytest.raises(ModelError, match=r"MaxUnpool.*kernel_shape=\(2,\)"):
        load_model(file([UNPOOL[0], wrong], 2))
