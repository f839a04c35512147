"""Decoders that were exported for generation, with caches of keys and values, are read as those without."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ir.attention_windows import attention_masks
from ir.blocks import find_units
from ir.errors import ModelError
from ir.onnx.load import load_model
from ir.onnx.strip import strip

node = helper.make_node
LENGTH, HEADS, SIZE, LAYERS = 6, 2, 4, 3
WIDTH = HEADS * SIZE
PAST = ("b", HEADS, "past", SIZE)
SIZES = {"s": LENGTH, "past + s": LENGTH}
RANDOM = np.random.default_rng(0)


def attention(x, i, *, cached, copied):
    """One layer in small steps; with `copied`, keys of earlier tokens pass a Concat of one operand first."""
    nodes = []
    for part in "qkv":
        nodes += [
            node("MatMul", [x, f"w{part}{i}"], [f"{part}m{i}"]),
            node("Reshape", [f"{part}m{i}", "apart"], [f"{part}r{i}"]),
            node("Transpose", [f"{part}r{i}"], [f"{part}{i}"], perm=[0, 2, 1, 3]),
        ]
    keys, values = f"k{i}", f"v{i}"
    if cached:
        if copied:
            nodes.append(node("Concat", [f"past.{i}.k"], [f"copy{i}"], axis=-2))
        earlier = f"copy{i}" if copied else f"past.{i}.k"
        nodes.append(node("Concat", [earlier, keys], [f"present.{i}.k"], axis=-2))
        nodes.append(node("Concat", [f"past.{i}.v", values], [f"present.{i}.v"], axis=2))
        keys, values = f"present.{i}.k", f"present.{i}.v"
    return [
        *nodes,
        node("Transpose", [keys], [f"kt{i}"], perm=[0, 1, 3, 2]), node("MatMul", [f"q{i}", f"kt{i}"], [f"s{i}"]),
        node("Add", [f"s{i}", "mask"], [f"m{i}"]), node("Softmax", [f"m{i}"], [f"p{i}"], axis=-1),
        node("MatMul", [f"p{i}", values], [f"o{i}"]), node("Transpose", [f"o{i}"], [f"ot{i}"], perm=[0, 2, 1, 3]),
        node("Reshape", [f"ot{i}", "joined"], [f"oj{i}"]), node("Add", [x, f"oj{i}"], [f"x{i + 1}"]),
    ]  # fmt: skip


def fused(x, i, *, cached, kind="GroupQueryAttention"):
    """One layer by an operator of ONNX Runtime, or by that of the standard."""
    nodes = [node("MatMul", [x, f"w{part}{i}"], [f"{part}{i}"]) for part in "qkv"]
    operands, results = [f"{part}{i}" for part in "qkv"], [f"o{i}"]
    if cached:
        earlier = [f"past.{i}.k", f"past.{i}.v"]
        operands += [""] * {"GroupQueryAttention": 0, "MultiHeadAttention": 3, "Attention": 1}[kind] + earlier
        results += [f"present.{i}.k", f"present.{i}.v"]
    said = {
        "GroupQueryAttention": {"num_heads": HEADS, "kv_num_heads": HEADS},
        "MultiHeadAttention": {"num_heads": HEADS, "unidirectional": 1},
        "Attention": {"q_num_heads": HEADS, "kv_num_heads": HEADS, "is_causal": 1},
    }[kind]
    domain = "" if kind == "Attention" else "com.microsoft"
    return [
        *nodes, node(kind, operands, results, domain=domain, **said),
        node("Add", [x, f"o{i}"], [f"x{i + 1}"]),
    ]  # fmt: skip


def offset_positions():
    """A table of positions, of which earlier tokens have the first: their number is read off a cache."""
    return [
        node("Shape", ["past.0.k"], ["sizes"]), node("Gather", ["sizes", "two"], ["past"]),
        node("Shape", ["ids"], ["all"]), node("Gather", ["all", "one"], ["new"]), node("Add", ["past", "new"], ["end"]),
        node("Range", ["past", "end", "one"], ["places"]), node("Gather", ["wpe", "places"], ["at"]),
    ]  # fmt: skip


def written(layer, *, cached, **options):
    """The bytes of a decoder of `LAYERS` layers."""
    nodes = [node("Gather", ["wte", "ids"], ["token"])]
    nodes += offset_positions() if cached else [node("Slice", ["wpe", "begin", "length"], ["at"])]
    nodes.append(node("Add", ["token", "at"], ["x0"]))
    for i in range(LAYERS):
        nodes += layer(f"x{i}", i, cached=cached, **options)
    nodes.append(node("MatMul", [f"x{LAYERS}", "head"], ["y"]))
    weights = {f"w{part}{i}": (WIDTH, WIDTH) for part in "qkv" for i in range(LAYERS)}
    shapes = {**weights, "wte": (20, WIDTH), "wpe": (LENGTH, WIDTH), "head": (WIDTH, 20)}
    stored = [numpy_helper.from_array(RANDOM.normal(size=s).astype(np.float32), n) for n, s in shapes.items()]
    held = {"apart": [0, 0, HEADS, SIZE], "joined": [0, 0, WIDTH], "one": 1, "two": 2, "begin": [0], "length": [LENGTH]}
    stored += [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    used = {name for each in nodes for name in each.input}
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ("b", "s"))
    mask = helper.make_tensor_value_info("mask", TensorProto.FLOAT, ("b", 1, "s", "past + s"))
    names = [f"{i}.{part}" for i in range(LAYERS) for part in "kv"] if cached else []
    given = [ids, *([mask] if "mask" in used else [])]
    given += [helper.make_tensor_value_info(f"past.{name}", TensorProto.FLOAT, PAST) for name in names]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("b", "s", 20))]
    later = ("b", HEADS, "past + s", SIZE)
    results += [helper.make_tensor_value_info(f"present.{name}", TensorProto.FLOAT, later) for name in names]
    graph = helper.make_graph(nodes, "decoder", given, results, [t for t in stored if t.name in used])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (attention, {"copied": False}), (attention, {"copied": True}), (fused, {}),
        (fused, {"kind": "MultiHeadAttention"}), (fused, {"kind": "Attention"}),
    ],
)  # fmt: skip
def test_a_file_with_caches_is_the_network_without(layer, options):
    dims = SIZES if layer is attention else {"s": LENGTH}
    graph = load_model(written(layer, cached=True, **options), dims=dims)
    plain = load_model(written(layer, cached=False, **options), dims=dims)
    assert [t.name for t in graph.tensors.values() if t.role == "input"] == ["ids", "mask"][: 1 + (layer is attention)]
    assert len(graph.outputs) == 1 and graph.num_parameters == plain.num_parameters
    assert graph.forward_flops == plain.forward_flops > 0
    assert find_units(graph).num_blocks == find_units(plain).num_blocks == LAYERS
    assert list(attention_masks(graph).values()) == list(attention_masks(plain).values())
    (warning,) = graph.warnings
    assert f"present.0.k and {2 * LAYERS - 1} more" in warning and not plain.warnings


@pytest.mark.parametrize("kind", ["GroupQueryAttention", "MultiHeadAttention", "Attention"])
def test_keys_and_values_that_nothing_reads_are_no_cache(kind):
    plain = written(fused, cached=False, kind=kind)
    model = onnx.load_model_from_string(plain)
    for each in model.graph.node:
        if each.op_type == kind:
            each.output.extend([f"keys of {each.output[0]}", f"values of {each.output[0]}"])
    graph, wanted = (load_model(data, dims={"s": LENGTH}) for data in (model.SerializeToString(), plain))
    assert [(op.kind, op.inputs, op.outputs) for op in graph] == [(op.kind, op.inputs, op.outputs) for op in wanted]
    assert not graph.warnings


def merged():
    """The bytes of a decoder as optimum merges it: an If of a branch with the cache and one without."""
    first, later = (
        onnx.load_model_from_string(written(attention, cached=c, copied=False)).graph for c in (False, True)
    )
    names = [f"{i}.{part}" for i in range(LAYERS) for part in "kv"]
    first.output.extend(helper.make_tensor_value_info(f"{n[2:]}{n[0]}", TensorProto.FLOAT, None) for n in names)
    stored = {tensor.name: tensor for graph in (first, later) for tensor in graph.initializer}
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, (1,))
    given, results = [*later.input, flag], ["logits", *[f"present_{n}" for n in names]]
    for graph in (first, later):
        del graph.initializer[:], graph.input[:]
    choice = node("If", ["use_cache_branch"], results, then_branch=later, else_branch=first)
    outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in results]
    graph = helper.make_graph([choice], "merged", given, outputs, list(stored.values()))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10).SerializeToString()


@pytest.mark.parametrize("stripped", [False, True])
def test_a_merged_decoder_is_its_branch_without_a_cache(stripped):
    graph = load_model(strip(merged()).data if stripped else merged(), dims=SIZES)
    plain = load_model(written(attention, cached=False, copied=False), dims=SIZES)
    assert [t.name for t in graph.tensors.values() if t.role == "input"] == ["ids", "mask"]
    assert graph.num_parameters == plain.num_parameters and graph.forward_flops == plain.forward_flops > 0
    assert [op.kind for op in graph] == [op.kind for op in plain]
    assert len(graph.outputs) == 1 and find_units(graph).num_blocks == LAYERS
    assert "use_cache_branch" in graph.warnings[0]


@pytest.mark.parametrize("read", [load_model, strip])
@pytest.mark.parametrize("empty", [False, True])
def test_a_merged_decoder_without_its_branch_is_refused(read, empty):
    branches = {"else_branch": helper.make_graph([], "empty", [], [])} if empty else {}
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, (1,))
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)
    choice = node("If", ["use_cache_branch"], ["logits"], name="choice", **branches)
    model = helper.make_model(helper.make_graph([choice], "merged", [flag], [logits]))
    with pytest.raises(ModelError, match=r"no branch with its results .got choice"):
        read(model.SerializeToString())


def test_earlier_tokens_of_a_stated_number_are_data():
    """A tensor that is put in front of another is a cache only where its length is open."""
    nodes = [node("Concat", ["x", "h"], ["y"], axis=1), node("MatMul", ["z", "w"], ["h"])]
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ("b", 3, 4)) for n in "xz"]
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, ("b", 6, 4))
    result_h = helper.make_tensor_value_info("h", TensorProto.FLOAT, ("b", 3, 4))
    stored = [numpy_helper.from_array(np.ones((4, 4), np.float32), "w")]
    graph = helper.make_graph(nodes[::-1], "joined", values, [result, result_h], stored)
    loaded = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    assert len(loaded.outputs) == 2 and not loaded.warnings


def test_a_size_whose_name_has_blanks_is_asked_for_in_quotes():
    with pytest.raises(ModelError, match=r"--dim s=128 --dim 'past \+ s=128'"):
        load_model(written(attention, cached=True, copied=False))
