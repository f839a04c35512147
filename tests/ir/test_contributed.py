"""ONNX Runtime's fused operators are read as the standard ones that they were made of."""

import itertools

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from ort_oracle import compare

from ir.attention_windows import attention_masks
from ir.blocks import find_units
from ir.errors import ModelError
from ir.onnx.load import load_model

node = helper.make_node
SHAPES = {
    "wide": (16, 48), "wide_bias": (48,), "wq": (16, 16), "wk": (16, 8), "wv": (16, 8), "bq": (16,), "turned": (24, 16),
    "straight": (16, 24), "turned_bias": (24,), "sink": (4,), "bias": (1, 1, 6, 6),
    "words": (50, 16), "places": (6, 16), "kinds": (2, 16), "scale": (16,), "shift": (16,),
    "kernel": (4, 3, 3, 3), "kernel_bias": (4,), "last_kernel": (4, 3, 3, 16), "first_kernel": (4, 16, 3, 3),
}  # fmt: skip
INPUTS = {
    "x": ("N", 6, 16),
    "z": ("N", 4, 6, 6),
    "image": ("N", 3, 8, 8),
    "last": ("N", 4, 4, 16),
    "ids": ("N", 6),
    "segments": ("N", 6),
    "heads": ("N", 6, 4, 1, 4),
}
SIZES = {"four_heads": (1, 4, 1, 1), "in_three": (0, 0, 4, 3, 4), "flat": (0, 0, 16)}


def load(*nodes):
    """The graph of nodes that write y."""
    return load_model(written(*nodes))


def written(*nodes):
    """The bytes of their file."""
    used = {name for each in nodes for name in each.input}
    stored = [numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in SHAPES.items() if n in used]
    stored += [numpy_helper.from_array(np.asarray(s), n) for n, s in SIZES.items() if n in used]
    types = {"ids": TensorProto.INT64, "segments": TensorProto.INT64}
    inputs = [
        helper.make_tensor_value_info(n, types.get(n, TensorProto.FLOAT), s) for n, s in INPUTS.items() if n in used
    ]
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "fused", inputs, [y], stored)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def fused(kind, *operands, **attributes):
    return node(kind, operands, ["y"], domain="com.microsoft", **attributes)


PROJECTED = [node("MatMul", ["x", w], [n]) for w, n in (("wq", "q"), ("wk", "k"), ("wv", "v"))]
CASES = {
    "attention": (
        [fused("Attention", "x", "wide", "wide_bias", num_heads=4)],
        [
            node("MatMul", ["x", "wide"], ["m"]), node("Add", ["m", "wide_bias"], ["n"]),
            node("Split", ["n"], ["q", "k", "v"], axis=-1, num_outputs=3),
            node("Attention", ["q", "k", "v"], ["y"], q_num_heads=4, kv_num_heads=4),
        ],
    ),
    "many heads": (
        [PROJECTED[0], fused("MultiHeadAttention", "q", "x", "x", "wide_bias", num_heads=4)],
        [
            PROJECTED[0], node("Split", ["wide_bias"], ["a", "b", "c"], num_outputs=3), node("Add", ["q", "a"], ["d"]),
            node("Add", ["x", "b"], ["e"]), node("Add", ["x", "c"], ["f"]),
            node("Attention", ["d", "e", "f"], ["y"], q_num_heads=4, kv_num_heads=4),
        ],
    ),
    "groups of queries": (
        [*PROJECTED, fused("GroupQueryAttention", "q", "k", "v", num_heads=4, kv_num_heads=2)],
        [*PROJECTED, node("Attention", ["q", "k", "v"], ["y"], q_num_heads=4, kv_num_heads=2, is_causal=1)],
    ),
    "window": (
        [*PROJECTED, fused("GroupQueryAttention", "q", "k", "v", num_heads=4, kv_num_heads=2, local_window_size=3)],
        [
            *PROJECTED,
            node("Attention", ["q", "k", "v"], ["y"], q_num_heads=4, kv_num_heads=2, is_causal=1, left_window_size=2),
        ],
    ),
    "bias and sinks": (
        [*PROJECTED,
         fused("GroupQueryAttention", "q", "k", "v", *[""] * 7, "bias", "sink", num_heads=4, kv_num_heads=2)],
        [
            *PROJECTED, node("Reshape", ["sink", "four_heads"], ["s"]), node("Add", ["bias", "s"], ["b"]),
            node("Attention", ["q", "k", "v", "b"], ["y"], q_num_heads=4, kv_num_heads=2, is_causal=1),
        ],
    ),
    "packed operands": (
        [
            node("MatMul", ["x", "wide"], ["m"]), node("Reshape", ["m", "in_three"], ["p"]),
            fused("MultiHeadAttention", "p", num_heads=4),
        ],
        [
            node("MatMul", ["x", "wide"], ["m"]), node("Split", ["m"], ["q", "k", "v"], axis=-1, num_outputs=3),
            node("Attention", ["q", "k", "v"], ["y"], q_num_heads=4, kv_num_heads=4),
        ],
    ),
    "packed keys and values": (
        [PROJECTED[0], node("Concat", ["heads", "heads"], ["p"], axis=3),
         fused("MultiHeadAttention", "q", "p", num_heads=4)],
        [
            PROJECTED[0], node("Reshape", ["heads", "flat"], ["k"]),
            node("Attention", ["q", "k", "k"], ["y"], q_num_heads=4, kv_num_heads=4),
        ],
    ),
    "gated": (
        [PROJECTED[0], node("SwiGLU", ["q", "x"], ["y"], alpha=1.5)],
        [PROJECTED[0], node("Swish", ["q"], ["s"], alpha=1.5), node("Mul", ["s", "x"], ["y"])],
    ),
    "turned product": (
        [fused("FusedMatMul", "x", "turned", transB=1, alpha=0.5)],
        [node("Transpose", ["turned"], ["t"]), node("MatMul", ["x", "t"], ["y"])],
    ),
    "product": ([fused("FusedMatMul", "x", "straight")], [node("MatMul", ["x", "straight"], ["y"])]),
    "convolution": (
        [fused("FusedConv", "image", "kernel", "kernel_bias", "z", activation="Relu", kernel_shape=[3, 3])],
        [
            node("Conv", ["image", "kernel", "kernel_bias"], ["c"]), node("Add", ["c", "z"], ["s"]),
            node("Relu", ["s"], ["y"]),
        ],
    ),
    "channels last": (
        [fused("NhwcConv", "last", "last_kernel", "kernel_bias", pads=[1, 1, 1, 1], kernel_shape=[3, 3])],
        [
            node("Transpose", ["last"], ["t"], perm=[0, 3, 1, 2]),
            node("Conv", ["t", "first_kernel", "kernel_bias"], ["c"], pads=[1, 1, 1, 1]),
            node("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1]),
        ],
    ),
    "residual and norm": (
        [
            PROJECTED[0],
            node("SkipLayerNormalization", ["x", "q", "scale", "shift", "bq"], ["n", "", "", "s"],
                 domain="com.microsoft"),
            node("Add", ["n", "s"], ["y"]),
        ],
        [
            PROJECTED[0], node("Add", ["q", "bq"], ["b"]), node("Add", ["b", "x"], ["s"]),
            node("LayerNormalization", ["s", "scale", "shift"], ["n"]), node("Add", ["n", "s"], ["y"]),
        ],
    ),
    "residual and RMS norm": (
        [fused("SkipSimplifiedLayerNormalization", "x", "x", "scale", "shift")],
        [
            node("Add", ["x", "shift"], ["b"]), node("Add", ["b", "x"], ["s"]),
            node("SimplifiedLayerNormalization", ["s", "scale"], ["y"], axis=-1),
        ],
    ),
    "bias and residual": (
        [fused("BiasAdd", "x", "bq", "x")],
        [node("Add", ["x", "bq"], ["b"]), node("Add", ["b", "x"], ["y"])],
    ),
    "gate": (
        [fused("BiasSplitGelu", "x", "bq")],
        [
            node("Add", ["x", "bq"], ["b"]), node("Split", ["b"], ["u", "g"], axis=-1, num_outputs=2),
            node("Gelu", ["g"], ["a"]), node("Mul", ["u", "a"], ["y"]),
        ],
    ),
    "group norm": (
        [fused("SkipGroupNorm", "last", "scale", "shift", "last", "bq", groups=4, activation=1)],
        [
            node("Add", ["last", "last"], ["a"]), node("Add", ["a", "bq"], ["s"]),
            node("Transpose", ["s"], ["t"], perm=[0, 3, 1, 2]),
            node("GroupNormalization", ["t", "scale", "shift"], ["n"], num_groups=4), node("Swish", ["n"], ["w"]),
            node("Transpose", ["w"], ["y"], perm=[0, 2, 3, 1]),
        ],
    ),
    "activation with bias": (
        [fused("BiasGelu", "x", "bq")], [node("Add", ["x", "bq"], ["b"]), node("Gelu", ["b"], ["y"])],
    ),
    "product with GELU": (
        [fused("GemmFastGelu", "x", "straight", "turned_bias")],
        [
            node("MatMul", ["x", "straight"], ["m"]), node("Add", ["m", "turned_bias"], ["a"]),
            node("Gelu", ["a"], ["y"], approximate="tanh"),
        ],
    ),
    "product with activation": (
        [fused("FusedMatMulActivation", "x", "turned", transB=1, alpha=0.5, activation="Relu")],
        [
            node("Transpose", ["turned"], ["w"], perm=[1, 0]), node("MatMul", ["x", "w"], ["m"]),
            node("Constant", [], ["half"], value_float=0.5), node("Mul", ["m", "half"], ["s"]),
            node("Relu", ["s"], ["y"]),
        ],
    ),
    "softmax with mask": (
        [fused("BiasSoftmax", "z", "bias", axis=-1, is_inner_broadcast=0)],
        [node("Add", ["z", "bias"], ["a"]), node("Softmax", ["a"], ["y"], axis=-1)],
    ),
    "dropout with bias and residual": (
        [fused("BiasDropout", "x", "bq", "x")],
        [node("Add", ["x", "bq"], ["b"]), node("Add", ["b", "x"], ["y"])],
    ),
    "triangle": (
        [PROJECTED[0], fused("Trilu", "q", upper=0)], [PROJECTED[0], node("Trilu", ["q"], ["y"], upper=0)],
    ),
    "embedding": (
        [fused("EmbedLayerNormalization", "ids", "segments", "words", "places", "kinds", "scale", "shift")],
        [
            node("Gather", ["words", "ids"], ["a"]), node("Gather", ["kinds", "segments"], ["b"]),
            node("Add", ["a", "b"], ["c"]), node("Add", ["c", "places"], ["d"]),
            node("LayerNormalization", ["d", "scale", "shift"], ["y"]),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_fused_operator_is_its_parts(case):
    given, expected = (load(*nodes) for nodes in CASES[case])
    assert given.num_parameters == expected.num_parameters
    assert given.forward_flops == expected.forward_flops
    assert [(t.shape, t.batch_dim) for t in map(given.tensors.get, given.outputs)] == [
        (t.shape, t.batch_dim) for t in map(expected.tensors.get, expected.outputs)
    ]
    assert [mask.window for mask in attention_masks(given).values()] == [
        mask.window for mask in attention_masks(expected).values()
    ]
    assert not given.warnings


@pytest.mark.parametrize("flags", [*itertools.product((0, 1), repeat=4)], ids=str)
def test_a_product_of_turned_operands_is_that_of_the_plain_ones(flags):
    """Layouts of `[b, m, k]` and `[b, k, n]`, by whether the last two dims are swapped and the first dim is in front
    of the batch."""
    layouts = {(0, 0): (0, 1, 2), (1, 0): (0, 2, 1), (0, 1): (1, 0, 2), (1, 1): (2, 0, 1)}
    a, b = flags[:2], flags[2:]
    names = ("transA", "transBatchA", "transB", "transBatchB")
    nodes = [
        node("MatMul", ["x", "wq"], ["q"]), node("Transpose", ["q"], ["k"], perm=[0, 2, 1]),
        node("Transpose", ["x"], ["a"], perm=layouts[a]), node("Transpose", ["k"], ["b"], perm=layouts[b]),
        fused("FusedMatMul", "a", "b", alpha=0.5, **dict(zip(names, flags, strict=True))),
    ]  # fmt: skip
    graph = load(*nodes)
    assert graph.forward_flops == load(*nodes[:2], node("MatMul", ["x", "k"], ["y"])).forward_flops
    assert "Einsum" not in {op.kind for op in graph} and graph.tensors["y"].shape == (1, 6, 6)
    assert compare(written(*nodes)) < 1e-5


def test_a_turned_product_takes_samples_that_are_merged_with_heads():
    """Attention of `nn.MultiheadAttention` on learned queries, as ONNX Runtime's optimiser leaves it: keys are
    `[s, (b h), d]`, and there are queries of each head for all samples."""
    stored = [
        numpy_helper.from_array(np.random.default_rng(0).normal(size=s).astype(np.float32), n)
        for n, s in {"wq": (16, 16), "queries": (4, 5, 4)}.items()
    ]
    stored += [numpy_helper.from_array(np.array(s), n) for n, s in {"m": (6, 12, 4), "back": (3, 4, 5, 6)}.items()]
    nodes = [
        node("MatMul", ["x", "wq"], ["k"]), node("Transpose", ["k"], ["t"], perm=[1, 0, 2]),
        node("Reshape", ["t", "m"], ["keys"]), node("Tile", ["queries", "times"], ["q"]),
        fused("FusedMatMul", "q", "keys", transB=1, transBatchB=1), node("Reshape", ["y", "back"], ["z"]),
    ]  # fmt: skip
    stored.append(numpy_helper.from_array(np.array([3, 1, 1]), "times"))
    x, z = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", (3, 6, 16)), ("z", (3, 4, 5, 6))))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [z], stored), opset_imports=opsets)
    graph = load_model(model.SerializeToString())
    assert graph.tensors["z"].shape == (1, 4, 5, 6) and graph.tensors["z"].batch_dim == 0
    assert graph.forward_flops == 2 * 6 * 16 * 16 + 2 * 4 * 5 * 6 * 4


def test_heads_in_one_operand_have_weights_of_their_own():
    """Four heads of queries, one of keys and one of values lie behind each other."""
    packed = node("MatMul", ["x", "straight"], ["m"])
    graph = load(packed, fused("GroupQueryAttention", "m", "", "", num_heads=4, kv_num_heads=1))
    assert [tensor.shape for tensor in graph.parameters] == [(16, 16), (16, 4), (16, 4)]
    assert graph.tensors["y"].shape == (1, 6, 16)


def test_layers_are_found_behind_fused_norms():
    """The fused norm returns the residual stream too: a cut between layers is crossed by that one tensor."""
    nodes, stream, norm = [], "x", "x"
    for i in range(4):
        nodes += [
            node("MatMul", [norm, "wq"], [f"m{i}"]),
            node("SkipLayerNormalization", [stream, f"m{i}", "scale", "shift"], [f"n{i}", "", "", f"s{i}"],
                 domain="com.microsoft"),
        ]  # fmt: skip
        stream, norm = f"s{i}", f"n{i}"
    graph = load(*nodes, node("Add", [stream, norm], ["y"]))
    assert find_units(graph).num_blocks == 2
    assert all(not op.kind.startswith("com.microsoft") for op in graph.operators)


def test_a_cache_of_keys_is_not_for_training():
    nodes = [node("Attention", ["x", "wide"], ["made", "cache"], domain="com.microsoft", num_heads=4)]
    nodes += [node("ReduceSum", ["cache"], ["sum"], keepdims=0), node("Add", ["made", "sum"], ["y"])]
    with pytest.raises(ModelError, match="as it is trained"):
        load(*nodes)


def test_a_layout_for_processors_is_refused_by_name():
    """Its weights have channels of zeros; with declared shapes it would be read as an operator without a price."""
    nodes = [
        node("Conv", ["image", "kernel"], ["h"], domain="com.microsoft.nchwc"),
        node("ReorderOutput", ["h"], ["y"], domain="com.microsoft.nchwc", channels=4),
    ]
    model = onnx.load_from_string(written(*nodes))
    model.graph.value_info.append(helper.make_tensor_value_info("h", TensorProto.FLOAT, ("N", 4, 6, 6)))
    with pytest.raises(
        ModelError, match=r"h has images in a layout .* com.microsoft.nchwc.Conv\).*ORT_ENABLE_EXTENDED"
    ):
        load_model(model.SerializeToString())
