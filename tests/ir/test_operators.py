"""Costs, refusals and results of the table of kinds; what a split computes is in test_signature_oracle."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ir.build import GraphBuilder
from ir.factors import signatures
from ir.graph import Tensor
from ir.operators import KINDS, Unsupported, make_operator

OPSET = 23


def test_every_kind_of_the_table_is_documented():
    assert all(kind.entry.__doc__ for kind in KINDS.values())
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


@pytest.mark.parametrize("role", ["input", "activation"])
def test_the_state_of_a_recurrence_has_a_gradient_from_step_to_step(role):
    """The FLOPs of both passes are those of the steps written out, as torch counts them; the first state is given."""
    steps, features, hidden = 5, 4, 3
    x, w, r = (torch.ones(size) for size in ((steps, 1, features), (features, hidden), (hidden, hidden)))
    w, r, x = w.requires_grad_(), r.requires_grad_(), x.requires_grad_(role == "activation")
    with FlopCounterMode(display=False) as counted:
        state = torch.zeros(1, hidden, requires_grad=True)
        for step in range(steps):
            state = torch.tanh(x[step] @ w + state @ r)
        state.sum().backward()
    weights = [tensor(size, "parameter", None, name=n) for n, size in (("w", (1, 3, 4)), ("r", (1, 3, 3)))]
    inputs = [tensor((steps, 1, features), role, 1), *weights]
    op = make_operator("RNN", name="o", inputs=inputs, outputs=["y"], attributes={"hidden_size": hidden}).operator
    assert op.forward_flops.at(1) + op.backward_flops.at(1) == counted.get_total_flops()


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
    with pytest.raises(Unsupported, match="rows of the batch dim"):
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


@pytest.mark.parametrize(
    ("kind", "shapes", "attributes", "why"),
    [
        ("Transpose", [(1, 4, 6)], {"perm": (0, 1, 1)}, "perm"),
        ("Transpose", [(1, 4, 6)], {"perm": (0, 2)}, "perm"),
        ("Slice", [(1, 4, 6)], {"starts": (0,), "ends": (2,), "axes": (7,)}, "axis=7 is outside"),
        ("Slice", [(1, 4, 6)], {"starts": (0, 1), "ends": (2, 3), "axes": (1, -2)}, "repeat"),
        ("Slice", [(1, 4, 6)], {"starts": (0, 1), "ends": (2,)}, "2 starts, 1 ends"),
        ("Squeeze", [(1, 4, 1)], {"axes": (5,)}, "axis=5 is outside"),
        ("Unsqueeze", [(1, 4)], {"axes": (5,)}, "axis=5 is outside"),
        ("Pad", [(1, 4)], {"pads": (0, 1, 0)}, "3 pads"),
        ("Pad", [(1, 4)], {"pads": (1, 1), "axes": (3,)}, "axis=3 is outside"),
        ("ReduceSum", [(1, 4)], {"axes": (2,)}, "axis=2 is outside"),
        ("CumSum", [(1, 4)], {"axis": 2}, "axis=2 is outside"),
        ("TopK", [(1, 4)], {"k": 5}, "k=5 of 4"),
        ("Resize", [(1, 4, 6)], {"scales": (2.0,), "axes": (3,)}, "axis=3 is outside"),
        ("Conv", [(1, 4, 8, 8), (6, 4, 3, 3)], {"strides": (0, 1)}, r"strides=\(0, 1\)"),
        ("Conv", [(1, 4, 8, 8), (6, 4, 3, 3)], {"strides": (1,)}, r"strides=\(1,\)"),
        ("Conv", [(1, 4, 8, 8), (6, 4, 3, 3)], {"dilations": (-1, -1)}, "dilations"),
        ("Conv", [(1, 4, 8, 8), (6, 4, 3, 3)], {"pads": (1, 1)}, "pads"),
        ("Conv", [(1, 4, 8, 8), (6, 4, 3, 3)], {"kernel_shape": (5, 5)}, "kernel_shape"),
        ("Conv", [(1, 4, 8, 8), (6, 4, 3, 3)], {"auto_pad": "SAME"}, "auto_pad=SAME is none of"),
        ("Conv", [(1, 4, 8, 8), (6, 4, 3, 3), (5,)], {}, r"operand 2 is of shape \(5,\).* \(6,\)"),
        ("ConvTranspose", [(1, 4, 8, 8), (4, 6, 3, 3)], {"strides": (0, 0)}, "strides"),
        ("ConvTranspose", [(1, 4, 8, 8), (4, 6, 3, 3)], {"group": 0}, "0 groups"),
        ("MaxPool", [(1, 4, 8, 8)], {"kernel_shape": (2,)}, "kernel_shape"),
        ("AveragePool", [(1, 4, 8, 8)], {"kernel_shape": (2, 2), "strides": (2, -2)}, "strides"),
        ("BatchNormalization", [(1, 4, 8, 8), (3,), (4,), (4,), (4,)], {}, r"operand 1 is of shape \(3,\)"),
        ("InstanceNormalization", [(1, 4, 8, 8), (4,), (5,)], {}, r"operand 2 is of shape \(5,\)"),
        ("LSTM", [(1, 5, 4), (1, 10, 4), (1, 12, 3)], {"layout": 1}, "10 rows, and 4 gates of 3"),
        ("GRU", [(1, 5, 4), (1, 12, 4), (1, 12, 3)], {"layout": 1}, "12 rows, and 3 gates of 3"),
    ],
)  # fmt: skip
def test_attributes_and_operands_that_do_not_fit_are_refused_with_the_reason(kind, shapes, attributes, why):
    """Each of them once gave a graph of wrong sizes, or an error that named an exception of Python."""
    inputs = [
        tensor(s, "parameter" if i else "activation", None if i else 0, name=f"{i}") for i, s in enumerate(shapes)
    ]
    with pytest.raises(Unsupported, match=why):
        make_operator(kind, name="o", inputs=inputs, outputs=["y"], attributes=attributes, opset=OPSET)


def test_a_permutation_may_count_dims_from_the_end():
    """As PyTorch's older exporter writes `x.permute(0, -1, 1)`, in Mamba 2 of transformers."""
    made = [
        make_operator("Transpose", name="o", inputs=[tensor((1, 4, 6))], outputs=["y"], attributes={"perm": perm})
        for perm in ((0, -1, 1), (0, 2, 1))
    ]
    assert made[0].operator == made[1].operator and made[0].outputs[0].shape == (1, 6, 4)


@pytest.mark.parametrize("shape", [(4, 1, 24), (2, 3, 1, 8)])
def test_attention_between_samples_is_refused(shape):
    """Of queries `[length, samples, ...]` each would attend to the keys of other samples."""
    inputs = [tensor(shape, batch=len(shape) - 2) for _ in range(3)]
    heads = {"q_num_heads": 3, "kv_num_heads": 3} if len(shape) == 3 else {}
    with pytest.raises(Unsupported, match="samples are not the first dim"):
        make_operator("Attention", name="o", inputs=inputs, outputs=["y"], attributes=heads, opset=OPSET)
