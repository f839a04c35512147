"""Fused groups: found in every way of writing, closed, and nothing else taken in."""

from collections import Counter

import numpy as np
import pytest
from long_cases import long_but

import ir.zoo
from ir.build import GraphBuilder
from ir.graph import Graph
from ir.groups import fused_groups
from ir.loss import with_loss
from ir.onnx.load import load_model


def check(graph: Graph) -> None:
    """What a kernel keeps to itself nobody else reads, and what it keeps for backward is at its edge."""
    owner: dict[int, int] = {}
    for number, group in enumerate(fused_groups(graph)):
        made = {n for i in group.members for n in graph.operators[i].outputs}
        read = {n for i in group.members for n in graph.operators[i].inputs}
        for i in group.members:
            assert owner.setdefault(i, number) == number
            assert not graph.operators[i].is_view and not graph.operators[i].is_constant
        for name in group.internal:
            assert name in made and name not in graph.outputs
            assert set(graph.consumers[name]) <= set(group.members)
        assert group.saved <= (made | read) - group.internal


def kinds(graph: Graph) -> Counter:
    check(graph)
    return Counter(group.kind for group in fused_groups(graph))


# Two layers each; from operator set 20 on Gelu and from 23 on Attention are single operators.
EXPECTED = {
    ("gpt", 18): {"attention": 2, "activation": 2},
    ("gpt", 20): {"attention": 2},
    ("gpt", 23): {"attention": 2},
    ("gpt_linear", 20): {"attention": 2},
    ("llama", 20): {"attention": 2, "activation": 2, "rotary": 4, "norm": 5},
    ("bert", 18): {"attention": 2, "activation": 2},
    ("vit", 20): {"attention": 2},
    ("resnet", 20): {},
    ("mlp", 20): {},
}


@pytest.mark.parametrize(("name", "opset"), long_but([one for one in EXPECTED if one[1] == 20], EXPECTED))
def test_exported_models_have_the_expected_fused_groups(name, opset, export):
    assert kinds(load_model(export(name, 1, opset))) == EXPECTED[name, opset]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("zoo:gpt2", {"attention": 12}),
        ("zoo:llama-7b", {"attention": 32, "activation": 32, "rotary": 64}),
        ("zoo:bert-large", {"attention": 24}),
        ("zoo:t5-small", {"attention": 18}),
        ("zoo:vit-b", {"attention": 12}),
        ("zoo:resnet50", {}),
    ],
)
def test_models_of_the_zoo_have_the_expected_fused_groups(spec, expected):
    assert kinds(ir.zoo.build(spec.removeprefix("zoo:"))) == expected


def test_an_attention_kernel_keeps_its_operands_and_its_result(export):
    graph = load_model(export("gpt", 1, 18))
    group = next(g for g in fused_groups(graph) if g.kind == "attention")
    square = [n for n in group.internal if graph.tensors[n].shape[-1] == graph.tensors[n].shape[-2]]
    assert square and len(group.saved) == 4
    assert {graph.tensors[n].num_elements for n in group.saved} == {16 * 32}
    inner = group.unfused
    assert inner is not None and inner.kind == "softmax" and set(inner.members) < set(group.members)
    assert [graph.tensors[n].shape for n in inner.saved] == [(1, 4, 16, 16)]


class Chain:
    """A small graph around one chain of operators."""

    def __init__(self, shape: tuple[int, ...] = (1, 8, 16)) -> None:
        self.b = GraphBuilder()
        self.b.input("x", shape)
        self.b.parameter("w", (shape[-1], shape[-1]))
        self.count = 0
        self.x = self.op("MatMul", "x", "w")

    def op(self, kind: str, *inputs: str, **attributes) -> str:
        self.count += 1
        names = [n if isinstance(n, str) else self.b.constant(f"c{self.count}_{i}", n) for i, n in enumerate(inputs)]
        return self.b.add(kind, names, [f"t{self.count}"], attributes=attributes, opset=18)[0]

    def graph(self, *outputs: str) -> Graph:
        self.b.parameter("v", (16, 4))
        return with_loss(self.b.finish([self.op("MatMul", outputs[0], "v"), *outputs[1:]]))


def number(value: float) -> np.ndarray:
    return np.float32(value)


def rms_norm(c: Chain, x: str, *, cast: bool) -> str:
    c.b.parameter("scale", (16,))
    y = c.op("Cast", x, to="float32") if cast else x
    mean = c.op("ReduceMean", c.op("Pow", y, number(2)), axes=(-1,), keepdims=1)
    y = c.op("Div", y, c.op("Sqrt", c.op("Add", mean, number(1e-6))))
    return c.op("Mul", "scale", c.op("Cast", y, to="float32") if cast else y)


def norm_of_gemma(c: Chain, x: str) -> str:
    """`(1 + weight) * x / rms(x)`: what is added to the weight is a step of the norm's kernel."""
    c.b.parameter("scale", (16,))
    mean = c.op("ReduceMean", c.op("Pow", x, number(2)), axes=(-1,), keepdims=1)
    y = c.op("Mul", x, c.op("Reciprocal", c.op("Sqrt", c.op("Add", mean, number(1e-6)))))
    return c.op("Mul", y, c.op("Add", c.op("Cast", "scale", to="float32"), number(1)))


def layer_norm(c: Chain, x: str) -> str:
    c.b.parameter("scale", (16,))
    c.b.parameter("shift", (16,))
    y = c.op("Sub", x, c.op("ReduceMean", x, axes=(2,), keepdims=1))
    var = c.op("ReduceMean", c.op("Mul", y, y), axes=(2,), keepdims=1)
    y = c.op("Div", y, c.op("Sqrt", c.op("Add", var, number(1e-5))))
    return c.op("Add", c.op("Mul", y, "scale"), "shift")


def norm_of_std(c: Chain, x: str) -> str:
    """`scale * (x - x.mean(-1)) / (x.std(-1) + eps)`: the dims of the deviation come back by a Reshape."""
    c.b.parameter("scale", (16,))
    y = c.op("Sub", x, c.op("ReduceMean", x, axes=(-1,), keepdims=1))
    y2 = c.op("Sub", x, c.op("ReduceMean", x, axes=(-1,), keepdims=1))
    variance = c.op(
        "Div", c.op("Mul", c.op("ReduceMean", c.op("Mul", y, y), axes=(-1,), keepdims=0), number(16)), number(15)
    )
    deviation = c.op("Sqrt", c.op("Reshape", variance, np.array([1, 8, 1])))
    return c.op("Div", c.op("Mul", "scale", y2), c.op("Add", deviation, number(1e-6)))


def norm_of_length(c: Chain, x: str) -> str:
    """`torch.nn.functional.normalize(x, dim=-1) * 4 * scale`."""
    c.b.parameter("scale", (16,))
    length = c.op("Clip", c.op("ReduceL2", x, axes=(-1,), keepdims=1), number(1e-12))
    y = c.op("Div", x, c.op("Expand", length, np.array([1, 8, 16])))
    return c.op("Mul", c.op("Mul", y, number(4)), "scale")


def gelu(c: Chain, x: str) -> str:
    y = c.op("Add", c.op("Erf", c.op("Div", x, number(1.4142))), number(1.0))
    return c.op("Mul", c.op("Mul", x, y), number(0.5))


def mish(c: Chain, x: str) -> str:
    return c.op("Mul", x, c.op("Tanh", c.op("Softplus", x)))


@pytest.mark.parametrize(
    ("make", "kind", "members", "saved"),
    [
        (lambda c: rms_norm(c, c.x, cast=False), "norm", 6, 1),
        (lambda c: rms_norm(c, c.x, cast=True), "norm", 8, 1),
        (lambda c: norm_of_gemma(c, c.x), "norm", 8, 1),
        (lambda c: layer_norm(c, c.x), "norm", 9, 1),
        (lambda c: norm_of_std(c, c.x), "norm", 13, 1),
        (lambda c: norm_of_length(c, c.x), "norm", 6, 1),
        (lambda c: gelu(c, c.x), "activation", 5, 1),
        (lambda c: mish(c, c.x), "activation", 3, 1),
        (lambda c: c.op("Mul", gelu(c, c.x), c.op("MatMul", "x", "w")), "activation", 6, 2),
    ],
    ids=["rms", "rms-cast", "gemma", "layer", "deviation", "length", "gelu", "mish", "geglu"],
)
def test_chains_of_small_operators_are_found_as_one_group(make, kind, members, saved):
    chain = Chain()
    graph = chain.graph(make(chain))
    check(graph)
    (group,) = fused_groups(graph)
    assert (group.kind, len(group.members), len(group.saved)) == (kind, members, saved)


def test_a_scale_of_many_steps_is_found_once():
    """Each step reads the one before it twice: 60 of them have 2 ** 60 paths to the weight."""
    c = Chain()
    c.b.parameter("scale", (16,))
    scale = "scale"
    for _ in range(60):
        scale = c.op("Mul", scale, scale)
    mean = c.op("ReduceMean", c.op("Mul", c.x, c.x), axes=(-1,), keepdims=1)
    graph = c.graph(c.op("Mul", c.op("Div", c.x, c.op("Sqrt", mean)), scale))
    assert kinds(graph) == {"norm": 1}


def test_what_others_read_is_not_swallowed():
    """An inner tensor that is a result of the model reaches memory, whatever the kernel would like."""
    chain = Chain()
    inner = chain.op("Softplus", chain.x)
    result = chain.op("Mul", chain.x, chain.op("Tanh", inner))
    graph = chain.graph(result, inner)
    check(graph)
    assert all(inner not in group.internal for group in fused_groups(graph))


def test_scores_that_are_asked_for_are_not_fused():
    """`output_attentions=True`: the weights reach memory, and only scale, mask and softmax are one kernel."""
    c = Chain((1, 8, 16))
    q, k = c.op("MatMul", "x", "w"), c.op("Transpose", c.op("MatMul", "x", "w"), perm=(0, 2, 1))
    weights = c.op("Softmax", c.op("Mul", c.op("MatMul", q, k), number(0.25)), axis=-1)
    graph = c.graph(c.op("MatMul", weights, c.x), weights)
    assert kinds(graph) == {"softmax": 1}


@pytest.mark.parametrize("by", ["Concat", "Pad"])
def test_sinks_stand_beside_the_keys(by):
    """Attention whose softmax has one more place, that nobody reads: a trained one, as gpt-oss writes it, or zero."""
    c = Chain((1, 8, 16))
    q, k = c.op("MatMul", "x", "w"), c.op("Transpose", c.op("MatMul", "x", "w"), perm=(0, 2, 1))
    scores = c.op("Mul", c.op("MatMul", q, k), number(0.25))
    if by == "Concat":
        c.b.parameter("sinks", (1, 1, 1))
        places = c.op("Concat", scores, c.op("Expand", "sinks", np.array([1, 8, 1])), axis=2)
    else:
        places = c.op("Pad", scores, np.array([0, 0, 0, 0, 0, 1]))
    weights = c.op("Softmax", c.op("Sub", places, c.op("ReduceMax", places, axes=(2,), keepdims=1)), axis=-1)
    kept = c.op("Slice", weights, axes=(2,), starts=(0,), ends=(8,), steps=(1,))
    graph = c.graph(c.op("MatMul", kept, c.x))
    assert kinds(graph) == {"attention": 1}
    (group,) = fused_groups(graph)
    assert {"MatMul", by, "ReduceMax", "Slice", "Softmax"} <= {graph.operators[i].kind for i in group.members}


def test_a_loss_of_small_operators_is_one_kernel():
    c = Chain((1, 16))
    c.b.input("labels", (1,), "int64")
    c.b.parameter("v", (16, 4))
    scores = c.op("LogSoftmax", c.op("MatMul", c.x, "v"), axis=-1)
    picked = c.op("GatherElements", scores, c.op("Unsqueeze", "labels", axes=(1,)), axis=1)
    loss = c.op("ReduceSum", c.op("Neg", picked), axes=(0, 1), keepdims=0)
    graph = c.b.finish([loss])
    assert kinds(graph) == {"loss": 1}


def test_a_loss_over_the_tokens_that_a_mask_leaves_is_one_kernel():
    """`-scores.gather(-1, labels[..., None])[..., 0]`, and the mean over the labels that are not 0."""
    c = Chain((1, 8, 16))
    labels = c.b.input("labels", (1, 8), "int64")
    c.b.parameter("v", (16, 4))
    scores = c.op("LogSoftmax", c.op("MatMul", c.x, "v"), axis=-1)
    picked = c.op("GatherElements", scores, c.op("Unsqueeze", labels, axes=(2,)), axis=2)
    kept = c.op("Cast", c.op("Not", c.op("Equal", labels, np.array(0))), to="float32")
    masked = c.op("Mul", c.op("Neg", c.op("Squeeze", picked, axes=(2,))), kept)
    total, count = (c.op("ReduceSum", name, axes=(0, 1), keepdims=0) for name in (masked, kept))
    graph = c.b.finish([c.op("Div", total, count)])
    assert kinds(graph) == {"loss": 1}


def turned(c: Chain, x: str, turned_size: int) -> str:
    """The first dims of each head of `x` `[1, 2, 8, 8]` rotated, the others kept, as GPT-NeoX writes it."""
    half = turned_size // 2

    def part(whole: str, start: int, end: int) -> str:
        return c.op("Slice", whole, axes=(3,), starts=(start,), ends=(end,), steps=(1,))

    y = part(x, 0, turned_size)
    across = c.op("Concat", c.op("Neg", part(y, half, turned_size)), part(y, 0, half), axis=3)
    angles = np.ones((1, 1, 8, turned_size), np.float32)
    y = c.op("Add", c.op("Mul", y, angles), c.op("Mul", across, angles))
    return c.op("Concat", y, part(x, turned_size, 8), axis=3)


def test_queries_and_keys_of_one_product_are_rotated_apart():
    """GPT-NeoX: each head has its query, key and value side by side in one product, which is split behind heads."""
    c = Chain((1, 8, 16))
    c.b.parameter("qkv", (16, 48))
    heads = c.op("Reshape", c.op("MatMul", c.x, "qkv"), np.array([1, 8, 2, 24]))
    heads = c.op("Transpose", heads, perm=(0, 2, 1, 3))
    q, k, v = c.b.add("Split", [heads], ["query", "key", "value"], attributes={"axis": 3, "split": (8, 8, 8)}, opset=18)
    q, k = turned(c, q, 4), turned(c, k, 4)
    weights = c.op("Softmax", c.op("MatMul", q, c.op("Transpose", k, perm=(0, 1, 3, 2))), axis=-1)
    mixed = c.op("Transpose", c.op("MatMul", weights, v), perm=(0, 2, 1, 3))
    graph = c.graph(c.op("Reshape", mixed, np.array([1, 8, 16])))
    assert kinds(graph) == {"attention": 1, "rotary": 2}


def test_neighbours_are_rotated_without_a_negation():
    """torchtune, and Meta's code without complex numbers: `stack([a * cos - b * sin, b * cos + a * sin], -1)`."""
    c = Chain((1, 8, 16))
    cos, sin = np.full((8, 4), 0.6, np.float32), np.full((8, 4), 0.8, np.float32)

    def rotated(x: str) -> str:
        pairs = c.op("Reshape", x, np.array([1, 2, 8, 4, 2]))
        a, b = (c.op("Gather", pairs, np.array(i), axis=4) for i in (0, 1))
        first = c.op("Sub", c.op("Mul", a, cos), c.op("Mul", b, sin))
        second = c.op("Add", c.op("Mul", b, cos), c.op("Mul", a, sin))
        stacked = c.op("Concat", *(c.op("Unsqueeze", y, axes=(4,)) for y in (first, second)), axis=4)
        return c.op("Reshape", stacked, np.array([1, 2, 8, 8]))

    def heads() -> str:
        return c.op("Transpose", c.op("Reshape", c.op("MatMul", "x", "w"), np.array([1, 8, 2, 8])), perm=(0, 2, 1, 3))

    q, k = rotated(heads()), c.op("Transpose", rotated(heads()), perm=(0, 1, 3, 2))
    mixed = c.op(
        "Transpose", c.op("MatMul", c.op("Softmax", c.op("MatMul", q, k), axis=-1), heads()), perm=(0, 2, 1, 3)
    )
    graph = c.graph(c.op("Reshape", mixed, np.array([1, 8, 16])))
    assert kinds(graph) == {"attention": 1, "rotary": 2}
