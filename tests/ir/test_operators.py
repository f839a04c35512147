"""Every kind run whole and in two shards by each signature of its factor rule: the results must agree."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ir.build import GraphBuilder
from ir.factors import BROADCAST, PARTIAL, signatures
from ir.graph import Tensor
from ir.operators import KINDS, Unsupported, make_operator

SAMPLES = 4
RANKS = 2
OPSET = 23
AS_INPUTS = {
    "Reshape": ["shape"], "Expand": ["shape"], "Slice": ["starts", "ends", "axes", "steps"], "Squeeze": ["axes"],
    "Unsqueeze": ["axes"], "Split": ["split"], "Tile": ["repeats"], "Pad": ["pads"], "Trilu": ["k"], "TopK": ["k"],
    "CumSum": ["axis"], "Clip": ["min", "max"], "ReduceSum": ["axes"], "ReduceMax": ["axes"],
    "OneHot": ["depth", "values"],
}  # fmt: skip
"""Attributes of ours that are operands in ONNX."""
SCALARS = {"k", "min", "max", "depth", "axis"}


@dataclass
class Case:
    kind: str
    shapes: list[tuple[int, ...]]
    """At one sample."""
    batch: list[int | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    roles: list[str] | None = None
    outputs: int = 1
    integers: dict[int, int] = field(default_factory=dict)
    """Operand -> exclusive upper bound of its int64 values."""
    id: str = ""


def same(kind, *, rank=3, n=1, **attributes):
    return Case(kind, [(1, 4, 6, 8)[: rank + 1]] * n, [0] * n, attributes)


CASES = [
    *[same(k) for k in ("Relu", "Sigmoid", "Tanh", "Exp", "Gelu", "Erf", "Cos", "Sin", "Neg", "Abs", "Floor",
                        "Identity",
                        "Softplus", "LeakyRelu", "Elu", "HardSwish", "Mish", "Sign", "Ceil", "HardSigmoid")],
    *[same(k, n=2) for k in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Less", "Greater", "Equal", "LessOrEqual")],
    same("Sum", n=3), same("Mean", n=2), same("IsNaN"), same("Clip", min=-0.5, max=0.5),
    Case("Add", [(1, 4, 6), (6,)], [0, None], roles=["activation", "parameter"], id="bias"),
    Case("Mul", [(1, 4, 6), (4, 1)], [0, None], id="column"),
    Case("Add", [(4, 6), (4, 1)], [0, 0], id="merged batch"),
    Case("PRelu", [(1, 4, 6), (6,)], [0, None]),
    Case("MatMul", [(1, 4, 6), (6, 8)], [0, None], roles=["activation", "parameter"]),
    Case("MatMul", [(1, 2, 4, 6), (1, 2, 6, 8)], [0, 0], id="batched"),
    Case("MatMul", [(6, 4), (4, 8)], [0, None], id="merged"),
    Case("MatMul", [(1, 4, 6), (1, 6, 8)], [0, None], id="broadcast"),
    Case("Gemm", [(1, 6), (6, 8)], [0, None]), Case("Gemm", [(1, 6), (8, 6)], [0, None], {"transB": 1}),
    Case("Gemm", [(6, 1), (6, 8)], [1, None], {"transA": 1}), Case("Gemm", [(1, 6), (6, 8), (8,)], [0, None, None]),
    Case("Einsum", [(1, 4, 2, 6), (1, 8, 2, 6)], [0, 0], {"equation": "bshd,bthd->bhst"}),
    Case("Einsum", [(1, 4, 6), (6, 2, 8)], [0, None], {"equation": "bsk,khd->bshd"}, id="projection"),
    Case("Conv", [(1, 4, 6, 6), (8, 4, 3, 3)], [0, None], {"pads": (1, 1, 1, 1)}),
    Case("Conv", [(1, 4, 6, 6), (8, 4, 1, 1), (8,)], [0, None, None], id="pointwise bias"),
    Case("Conv", [(1, 4, 8, 8), (8, 2, 3, 3)], [0, None], {"group": 2, "strides": (2, 2), "pads": (1, 1, 1, 1)},
         id="group"),
    Case("Conv", [(1, 4, 8, 8), (4, 1, 3, 3)], [0, None], {"group": 4}, id="depthwise"),
    Case("Conv", [(1, 4, 8, 8), (6, 4, 2, 2)], [0, None], {"strides": (2, 2)}, id="patch"),
    Case("ConvTranspose", [(1, 4, 4, 4), (4, 6, 2, 2)], [0, None], {"strides": (2, 2)}),
    same("Softmax", axis=-1), same("Softmax", axis=1), same("LogSoftmax", axis=2),
    Case("LayerNormalization", [(1, 4, 6), (6,), (6,)], [0, None, None], {"axis": -1}),
    Case("RMSNormalization", [(1, 4, 6), (6,)], [0, None], {"axis": -1}),
    Case("InstanceNormalization", [(1, 4, 6, 6), (4,), (4,)], [0, None, None]),
    Case("GroupNormalization", [(1, 8, 4, 4), (8,), (8,)], [0, None, None], {"num_groups": 4}),
    Case("LRN", [(1, 4, 6, 6)], [0], {"size": 3}),
    same("ReduceSum", axes=(-1,), keepdims=0), same("ReduceSum", axes=(1, 2)), same("ReduceMax", axes=(1,)),
    Case("ReduceSum", [(1, 4)], [0], {"axes": (0,), "keepdims": 0}, id="over samples"),
    same("ArgMax", axis=2), same("CumSum", axis=1), same("TopK", k=2, axis=-1), same("Trilu", upper=0, k=0),
    Case("MaxPool", [(1, 4, 8, 8)], [0], {"kernel_shape": (2, 2), "strides": (2, 2)}),
    Case("AveragePool", [(1, 4, 7, 7)], [0], {"kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1}),
    Case("GlobalAveragePool", [(1, 4, 8, 8)], [0]), Case("GlobalMaxPool", [(1, 4, 8, 8)], [0]),
    Case("Pad", [(1, 4, 6)], [0], {"pads": (0, 0, 1, 0, 0, 2)}),
    Case("Gather", [(10, 6), (1, 4)], [None, 0], {"axis": 0}, ["parameter", "input"], integers={1: 10}),
    Case("Gather", [(1, 4, 6), (3,)], [0, None], {"axis": 1}, integers={1: 4}, id="columns"),
    Case("Gather", [(1, 4, 6)], [0], {"axis": 1, "indices": 2}, id="one"),
    Case("GatherElements", [(1, 4, 6), (1, 4, 2)], [0, 0], {"axis": 2}, integers={1: 6}),
    Case("OneHot", [(1, 4)], [0], {"depth": 6, "values": (0.0, 1.0), "axis": -1}, integers={0: 6}),
    Case("Reshape", [(1, 4, 6)], [0], {"shape": (1, 4, 2, 3)}, id="heads"),
    Case("Reshape", [(1, 4, 6)], [0], {"shape": (4, 6)}, id="merge batch"),
    Case("Reshape", [(4, 6)], [0], {"shape": (4, 2, 3)}, id="keep merged"),
    Case("Reshape", [(1, 2, 4, 6)], [0], {"shape": (1, 8, 6)}, id="merge"),
    Case("Reshape", [(1, 6, 4)], [0], {"shape": (1, 8, 3)}, id="no common factor"),
    Case("Flatten", [(1, 4, 6)], [0], {"axis": 1}), Case("Squeeze", [(1, 1, 6)], [0], {"axes": (1,)}),
    Case("Unsqueeze", [(1, 4, 6)], [0], {"axes": (0, 2)}), same("Transpose", perm=(0, 2, 1, 3)),
    Case("Transpose", [(1, 4, 6)], [0], {"perm": (1, 0, 2)}, id="batch"),
    Case("Slice", [(1, 4, 6)], [0], {"starts": (1,), "ends": (3,), "axes": (1,), "steps": (1,)}),
    Case("Split", [(1, 4, 6)], [0], {"axis": 2, "split": (2, 4)}, outputs=2),
    Case("Concat", [(1, 4, 6), (1, 2, 6)], [0, 0], {"axis": 1}),
    Case("Expand", [(1, 1, 6)], [0], {"shape": (1, 4, 6)}), Case("Tile", [(1, 4, 6)], [0], {"repeats": (1, 2, 1)}),
    Case("DepthToSpace", [(1, 8, 2, 2)], [0], {"blocksize": 2}), same("Where", n=3),
    Case("Attention", [(1, 4, 6, 8)] * 3, [0] * 3), Case("Attention", [(1, 6, 32), (1, 6, 16), (1, 6, 16)], [0] * 3,
         {"q_num_heads": 4, "kv_num_heads": 2}, id="grouped"),
    Case("Attention", [(1, 4, 6, 8)] * 3 + [(6, 6)], [0, 0, 0, None], {"scale": 0.5}, id="mask"),
    Case("RotaryEmbedding", [(1, 4, 6, 8), (1, 6, 4), (1, 6, 4)], [0, None, None]),
    Case("SoftmaxCrossEntropyLoss", [(1, 6, 8), (1, 6)], [0, 0], {"class_dim": 2, "reduction": "sum"}, integers={1: 8}),
    Case("MeanSquaredErrorLoss", [(1, 4), (1, 4)], [0, 0]),
    Case("Cast", [(1, 4, 6)], [0], {"to": "float64"}),
    Case("LSTM", [(5, 1, 4), (1, 12, 4), (1, 12, 3)], [1, None, None], {"hidden_size": 3}, outputs=3),
]  # fmt: skip


def evaluate(kind, attributes, arrays, shapes):
    """One operator in numpy, with our attributes, on arrays that may be shards; `shapes` are those of the results."""
    attributes = dict(attributes)
    if kind == "SoftmaxCrossEntropyLoss":
        scores, labels = arrays
        top = scores - scores.max(-1, keepdims=True)
        logs = top - np.log(np.exp(top).sum(-1, keepdims=True))
        return [-np.take_along_axis(logs, labels[..., None], -1).sum()]
    if kind == "MeanSquaredErrorLoss":
        return [((arrays[0] - arrays[1]) ** 2).sum() / 4]
    if kind == "LRN":
        # The reference evaluator of onnx loops over samples where it means channels.
        squares = np.pad(arrays[0] ** 2, ((0, 0), (1, 1), (0, 0), (0, 0)))
        window = squares[:, :-2] + squares[:, 1:-1] + squares[:, 2:]
        return [arrays[0] / (1 + 1e-4 / 3 * window) ** 0.75]
    if kind in ("Reshape", "Expand"):
        attributes["shape"] = shapes[0]
    if kind == "Gather" and "indices" in attributes:
        return [np.take(arrays[0], attributes["indices"], axis=attributes["axis"])]
    if kind == "Cast":
        attributes["to"] = TensorProto.DOUBLE
    if kind == "Where":
        arrays = [arrays[0] > 0, *arrays[1:]]
    attributes.pop("operands", None)
    if kind == "OneHot":
        attributes.pop("dtype")
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    names = list(feeds)
    for name in AS_INPUTS.get(kind, ()):
        value = attributes.pop(name)
        is_float = name in ("min", "max", "values")
        feeds[name] = np.asarray(value, np.float32 if is_float else np.int64)
        if kind in ("TopK",):
            feeds[name] = feeds[name].reshape(-1)
        names.append(name)
    outs = [f"y{i}" for i in range(len(shapes))]
    if kind == "TopK" and len(outs) == 1:
        outs.append("unused")
    node = helper.make_node(kind, names, outs, **attributes)
    types = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feeds.items()
    ]
    results = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outs[: len(shapes)]]
    graph = helper.make_graph([node], "one", types, results)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)])
    return [np.asarray(r) for r in ReferenceEvaluator(model).run(None, feeds)]


def shard(array, placement, rank):
    return array if placement < 0 else np.split(array, RANKS, axis=placement)[rank]


def divides(shape, placement, rule_size):
    return placement < 0 or (shape[placement] % RANKS == 0 and rule_size % RANKS == 0)


def made(case):
    rng = np.random.default_rng(0)
    roles = case.roles or ["activation"] * len(case.shapes)
    tensors, arrays = [], []
    for i, (shape, batch, role) in enumerate(zip(case.shapes, case.batch, roles, strict=True)):
        dtype = "int64" if i in case.integers else "float32"
        tensor = Tensor(name=f"x{i}", shape=shape, dtype=dtype, role=role, batch_dim=batch)
        whole = tensor.shape_at(SAMPLES)
        tensors.append(tensor)
        arrays.append(
            rng.integers(0, case.integers[i], whole)
            if i in case.integers
            else rng.standard_normal(whole).astype(np.float32)
        )
    built = make_operator(
        case.kind,
        name="op",
        inputs=tensors,
        outputs=[f"y{i}" for i in range(case.outputs)],
        attributes=case.attributes,
        opset=OPSET,
    )
    return built, tensors, arrays


def label(case):
    return f"{case.kind} {case.id}".strip()


@pytest.mark.parametrize("case", CASES, ids=label)
def test_shards_agree_with_the_whole(case):
    built, _tensors, arrays = made(case)
    op = built.operator
    attributes = dict(op.attributes)
    shapes = [t.shape_at(SAMPLES) for t in built.outputs]
    whole = evaluate(case.kind, attributes, arrays, shapes)
    for array, shape, tensor in zip(whole, shapes, built.outputs, strict=True):
        assert array.shape == shape
        assert case.kind in ("IsNaN", "Cast") or str(array.dtype) == tensor.dtype or array.dtype == np.float64
    rng = np.random.default_rng(1)
    checked = 0
    for signature in signatures(op.rule):
        factor = None if signature.factor is None else op.rule.factors[signature.factor]
        if factor is not None:
            size = SAMPLES if factor.is_batch else factor.size
            if factor.collective is not None or size % RANKS:
                continue
        elif PARTIAL not in signature.inputs:
            continue
        parts = []
        noise = [
            rng.standard_normal(a.shape).astype(np.float32) if p == PARTIAL else 0
            for a, p in zip(arrays, signature.inputs, strict=True)
        ]
        for rank in range(RANKS):
            local = []
            for array, placement, extra in zip(arrays, signature.inputs, noise, strict=True):
                if placement == PARTIAL:
                    local.append(extra if rank else array - extra)
                else:
                    local.append(shard(array, placement, rank))
            own = [
                tuple(s // RANKS if d == p else s for d, s in enumerate(shape))
                for shape, p in zip(shapes, signature.outputs, strict=True)
            ]
            if case.kind == "Gather" and factor is not None and factor.summed:
                # Masked look-up: rows of other ranks give zero.
                table, ids = local
                low = rank * len(table)
                mine = (ids >= low) & (ids < low + len(table))
                parts.append([np.where(mine[..., None], table[np.where(mine, ids - low, 0)], 0)])
                continue
            scoped = dict(attributes)
            if case.kind == "Conv" and "group" in scoped and signature.inputs[1] == 0:
                scoped["group"] = max(scoped["group"] // RANKS, 1)
            if case.kind == "GroupNormalization" and signature.inputs[1] == 0:
                scoped["num_groups"] //= RANKS
            if "q_num_heads" in scoped and signature.inputs[0] == 2:
                scoped["q_num_heads"] //= RANKS
                scoped["kv_num_heads"] //= RANKS
            parts.append(evaluate(case.kind, scoped, local, own))
        for number, placement in enumerate(signature.outputs):
            pieces = [p[number] for p in parts]
            if placement == BROADCAST:
                found = pieces[0]
                np.testing.assert_allclose(pieces[1], pieces[0], rtol=1e-4, atol=1e-4)
            else:
                found = sum(pieces) if placement == PARTIAL else np.concatenate(pieces, axis=placement)
            np.testing.assert_allclose(found, whole[number], rtol=2e-4, atol=2e-4, err_msg=str(signature))
        checked += 1
    if case.kind not in ("DepthToSpace",):
        assert checked >= 1


def test_every_kind_of_the_table_is_documented():
    assert all(entry.__doc__ for entry in KINDS.values())
    assert len(KINDS) > 120


def tensor(shape, role="activation", batch=0, dtype="float32", name="x"):
    return Tensor(name=name, shape=shape, dtype=dtype, role=role, batch_dim=batch)


def test_flops_and_saved_tensors_follow_gradients():
    x, w = tensor((1, 4, 6)), tensor((6, 8), "parameter", None, name="w")
    op = make_operator("MatMul", name="m", inputs=[x, w], outputs=["y"]).operator
    assert op.forward_flops.per_sample == 2 * 4 * 6 * 8 and op.forward_flops.fixed == 0
    assert op.backward_flops.per_sample == 2 * op.forward_flops.per_sample
    assert op.saved == ("x", "w")
    data = tensor((1, 4, 6), "input")
    op = make_operator("MatMul", name="m", inputs=[data, w], outputs=["y"]).operator
    assert op.backward_flops == op.forward_flops and op.saved == ("x",)
    op = make_operator("Add", name="a", inputs=[x, tensor((1, 4, 6), name="z")], outputs=["y"]).operator
    assert op.saved == () and op.forward_flops.per_sample == 0
    op = make_operator("Relu", name="r", inputs=[x], outputs=["y"]).operator
    assert op.saved == ("y",)


@pytest.mark.parametrize(
    ("kind", "shape", "attributes", "name"),
    [("Softmax", (1, 4, 6), {"axis": -1}, "softmax"), ("RMSNormalization", (1, 4, 6), {}, "norm"),
     ("ReduceMean", (1, 4, 6), {"axes": (2,)}, "norm")],
)  # fmt: skip
def test_statistics_have_a_price(kind, shape, attributes, name):
    op = make_operator(
        kind, name="o", inputs=[tensor(shape)], outputs=["y"], attributes=attributes, opset=OPSET
    ).operator
    priced = [f for f in op.rule.factors if f.collective]
    assert [f.size for f in priced] == [6] and priced[0].collective.name == name
    assert priced[0].collective.forward_bytes[1] in (4 * 4.0, 4 * 8.0) and priced[0].collective.forward_bytes[0] == 0


def test_batch_norm_synchronises_two_floats_a_channel():
    x = tensor((1, 16, 8, 8))
    side = [tensor((16,), "parameter", None, name=n) for n in "sbmv"]
    op = make_operator("BatchNormalization", name="o", inputs=[x, *side], outputs=["y"]).operator
    batch = next(f for f in op.rule.factors if f.is_batch)
    assert batch.collective.name == "batch_norm" and batch.collective.forward_bytes == (2 * 16 * 4.0, 0.0)
    channel = next(f for f in op.rule.factors if f.size == 16)
    assert channel.collective is None and not channel.fixed


def test_convolution_prices_the_halo():
    x, w = tensor((1, 4, 8, 8)), tensor((8, 4, 3, 3), "parameter", None, name="w")
    op = make_operator("Conv", name="o", inputs=[x, w], outputs=["y"], attributes={"pads": (1, 1, 1, 1)}).operator
    height = next(f for f in op.rule.factors if f.name == "h")
    assert height.collective.kind == "send_recv" and height.collective.forward_bytes == (0.0, 2 * 4 * 8 * 4.0)


def test_impossible_uses_are_refused():
    with pytest.raises(Unsupported):
        make_operator("MatMul", name="m", inputs=[tensor((1, 4)), tensor((5, 3), batch=None)], outputs=["y"])
    with pytest.raises(Unsupported):
        make_operator("Reshape", name="m", inputs=[tensor((1, 4))], outputs=["y"], attributes={"shape": (3, 3)})


def made_from(kind, inputs, attributes=None, outputs=("y",)):
    """A graph of one use of `kind`: (operators, result)."""
    builder = GraphBuilder()
    for i, (shape, batch, dtype) in enumerate(inputs):
        builder.input(f"x{i}", shape, dtype, batch_dim=batch)
    builder.add(kind, [f"x{i}" for i in range(len(inputs))], list(outputs), attributes=attributes)
    graph = builder.finish([outputs[0]])
    return [op.kind for op in graph.operators], graph.tensors[outputs[0]]


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes"),
    [
        ("GatherElements", [((1, 4), 0, "float32"), ((1, 2), None, "int64")], {"axis": 1}),
        ("GatherElements", [((1, 4), None, "float32"), ((1, 2), 0, "int64")], {"axis": 1}),
        ("GatherND", [((1, 4), 0, "float32"), ((1, 2, 1), None, "int64")], {"batch_dims": 1}),
        ("ScatterElements", [((1, 4), None, "float32"), ((1, 2), 0, "int64"), ((1, 2), 0, "float32")], {"axis": 1}),
        ("Attention", [((1, 2, 4, 8), None, "float32"), *[((1, 2, 6, 8), 0, "float32")] * 2], {}),
        ("RotaryEmbedding", [((1, 2, 4, 8), None, "float32"), *[((1, 4, 4), 0, "float32")] * 2], {}),
    ],
)
def test_an_operand_without_the_batch_of_its_siblings_is_repeated(kind, inputs, attributes):
    kinds, result = made_from(kind, inputs, attributes)
    assert kinds == ["Expand", kind]
    assert result.batch_dim == 0


def test_places_of_a_pool_and_look_ups_among_samples_do_not_split():
    x = tensor((1, 4, 8, 8))
    op = make_operator(
        "MaxPool", name="o", inputs=[x], outputs=["y", "p"], attributes={"kernel_shape": (2, 2)}, opset=OPSET
    ).operator
    assert all(s.factor is None for s in signatures(op.rule))
    with pytest.raises(Unsupported, match="among samples"):
        make_operator("GatherElements", name="o", inputs=[tensor((1, 4)), tensor((1, 4), dtype="int64", name="i")],
                      outputs=["y"], attributes={"axis": 0})  # fmt: skip


def test_unwanted_results_keep_the_places_of_the_others():
    op = make_operator("TopK", name="o", inputs=[tensor((1, 4))], outputs=["", "places"], attributes={"k": 2}).operator
    assert dict(op.attributes)["results"] == (1,)
    again = make_operator("TopK", name="o", inputs=[tensor((1, 4))], outputs=["p"], attributes=dict(op.attributes))
    assert again.operator.rule == op.rule and again.outputs[0].dtype == "int64"
    assert again.operator.attributes == op.attributes


def test_a_padding_that_shifts_the_windows_needs_a_halo():
    x, w = tensor((1, 4, 8)), tensor((8, 4, 2), "parameter", None, name="w")

    def height(**attributes):
        op = make_operator("Conv", name="o", inputs=[x, w], outputs=["y"], attributes=attributes).operator
        return next(f for f in op.rule.factors if f.name == "h").collective

    assert height(strides=(2,)) is None
    assert height(strides=(2,), pads=(1, 0)).forward_bytes == (0.0, 4 * 4.0)
    assert height(auto_pad="SAME_UPPER").forward_bytes == (0.0, 4 * 4.0)
