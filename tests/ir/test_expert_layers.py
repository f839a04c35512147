"""ONNX Runtime's operator of a whole mixture of experts is read as the operators that it is made of."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from ort_oracle import compare

from ir.errors import ModelError
from ir.onnx.load import load_model
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT

node = helper.make_node
TOKENS, WIDTH, INNER, EXPERTS = 6, 8, 10, 4


def written(*, k=2, merged=False, kind="gelu", third=False, turned=False, samples=1, bias=True, **attributes):
    """The bytes of a file with one mixture whose tokens are `[b, s, h]`, or `[(b s), h]` where `merged`."""
    inner = 2 * INNER if kind == "swiglu" and not third else INNER
    shapes = {"router": (WIDTH, EXPERTS), "w1": (EXPERTS, inner, WIDTH), "w2": (EXPERTS, WIDTH, INNER)}
    if bias:
        shapes |= {"b1": (EXPERTS, inner), "b2": (EXPERTS, WIDTH)}
    if third:
        shapes |= {"w3": (EXPERTS, INNER, WIDTH)}
    if turned:
        shapes |= {n: (s[0], *s[:0:-1]) for n, s in shapes.items() if n.startswith("w")}
    rng = np.random.default_rng(0)
    stored = [numpy_helper.from_array(rng.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    views = {"rows": (-1, WIDTH), "all_scores": (-1, EXPERTS), "back": (-1, TOKENS, WIDTH)}
    stored += [numpy_helper.from_array(np.array(s), n) for n, s in views.items()]
    operands = ["tokens" if merged else "x", "scores", "w1", "b1" if bias else "", "w2", "b2" if bias else ""]
    nodes = [
        node("MatMul", ["x", "router"], ["s"]), node("Reshape", ["s", "all_scores"], ["scores"]),
        node("Reshape", ["x", "rows"], ["tokens"]),
        node("MoE", [*operands, *(["w3"] if third else [])], ["m"], domain="com.microsoft", k=k, activation_type=kind,
             **attributes),
        node("Reshape", ["m", "back"], ["y"]),
    ]  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, (samples, TOKENS, WIDTH))
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, (samples, TOKENS, WIDTH))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "mixture", [x], [y], stored)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


@pytest.mark.parametrize("samples", (1, 3))
@pytest.mark.parametrize("merged", (False, True), ids=("by sample", "merged"))
@pytest.mark.parametrize(
    ("settings", "matrices"),
    [
        ({}, 2), ({"third": True, "kind": "silu"}, 3), ({"kind": "swiglu", "swiglu_fusion": 1}, 3),
        ({"kind": "swiglu", "swiglu_fusion": 2}, 3), ({"kind": "swiglu", "third": True, "bias": False}, 3),
        ({"turned": True, "kind": "relu"}, 2),
    ],
    ids=str,
)  # fmt: skip
def test_parameters_and_flops_are_those_of_the_routed_tokens(settings, matrices, merged, samples):
    graph = load_model(written(merged=merged, samples=samples, **settings))
    biases = 0 if not settings.get("bias", True) else EXPERTS * (WIDTH + INNER * (2 if matrices == 3 else 1))
    if settings.get("third"):
        biases = min(biases, EXPERTS * (WIDTH + INNER))
    assert graph.num_parameters == WIDTH * EXPERTS + matrices * EXPERTS * INNER * WIDTH + biases
    routed = 2 * TOKENS
    assert graph.forward_flops == 2 * TOKENS * WIDTH * EXPERTS + 2 * routed * matrices * INNER * WIDTH
    kinds = [op.kind for op in graph.operators]
    assert (kinds.count(DISPATCH), kinds.count(PRODUCT), kinds.count(COMBINE)) == (
        1,
        3 if "third" in settings else 2,
        1,
    )
    assert graph.warnings == (BALANCED_LOAD,)
    assert (graph.tensors["y"].shape, graph.tensors["y"].batch_dim) == ((1, TOKENS, WIDTH), 0)


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("third", (False, True), ids=("two layers", "three layers"))
def test_packed_weights_are_those_of_the_float_file(third, bits):
    """`QMoE` has scales between the weights and the biases of a layer, and `8 / bits` weights in one byte."""
    model = onnx.load_from_string(written(third=third, kind="silu"))
    mixture = next(each for each in model.graph.node if each.op_type == "MoE")
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    operands = [*mixture.input[:2]]
    for weight, bias in zip(mixture.input[2::2], [*mixture.input[3::2], ""], strict=False):
        shape = tuple(stored[weight].dims)
        packed = np.full((*shape[:2], shape[2] * bits // 8), 0x59, np.uint8)
        stored[weight].CopyFrom(numpy_helper.from_array(packed, weight))
        scales = numpy_helper.from_array(np.full(shape[:2], 0.1, np.float32), f"{weight} scales")
        model.graph.initializer.append(scales)
        operands += [weight, scales.name, bias]
    del mixture.input[:]
    mixture.input.extend(operands)
    mixture.op_type = "QMoE"
    mixture.attribute.append(helper.make_attribute("expert_weight_bits", bits))
    graph, floats = load_model(model.SerializeToString()), load_model(written(third=third, kind="silu"))
    assert graph.operators == floats.operators
    assert {t.name: t.shape for t in graph.parameters} == {t.name: t.shape for t in floats.parameters}
    assert len(graph.warnings) == 2 and "quantised" in graph.warnings[0]


def test_packed_weights_that_are_computed_are_refused():
    model = onnx.load_from_string(written())
    mixture = next(each for each in model.graph.node if each.op_type == "MoE")
    mixture.op_type = "QMoE"
    with pytest.raises(ModelError, match="weights of a QMoE are not stored"):
        load_model(model.SerializeToString())


@pytest.mark.parametrize("merged", (False, True), ids=("by sample", "merged"))
@pytest.mark.parametrize(
    "settings",
    [{}, {"kind": "relu"}, {"kind": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.3}],
    ids=str,
)
def test_it_computes_what_onnxruntime_does(settings, merged):
    """Every token goes to every expert, so that no expert has too few slots."""
    data = written(k=EXPERTS, merged=merged, normalize_routing_weights=1, **settings)
    assert compare(data) < 1e-3


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match=r"com.microsoft.MoE.* k=9, 4 scores"):
        load_model(written(k=9))
