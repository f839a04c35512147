"""The importer against known figures, other libraries and other exports of the same model."""

import numpy as np
import onnx
import pytest
from long_cases import long_but
from onnx import TensorProto, helper, numpy_helper, shape_inference

from ir.blocks import find_units
from ir.canonical import BIAS_TRAFFIC
from ir.errors import ModelError
from ir.linkage import operator_signatures
from ir.onnx.load import load_model
from ir.serialize import graph_digest, graph_from_bytes, graph_to_bytes
from ir.summary import summarize

NAMES = ("gpt", "gpt_linear", "llama", "bert", "vit", "resnet", "mlp")
# Trainable elements; VGG-19, ResNet-50, SqueezeNet 1.1 and Inception v1 as the papers' models (torchvision's
# vgg19 143,667,240, resnet50 25,557,032, squeezenet1_1 1,235,496, alexnet with groups 60,965,224).
PARAMETERS = {"vgg19": 143_667_240, "resnet50": 25_557_032, "squeezenet": 1_235_496, "bvlc_alexnet": 60_965_224}
# 2 a multiply-add: ResNet-50 4.09, VGG-19 19.6, AlexNet (grouped) 0.65 G multiply-adds.
FLOPS = {"resnet50": 8.2e9, "vgg19": 39.2e9, "bvlc_alexnet": 1.31e9}


def trainable_elements(data: bytes) -> int:
    """Independent count: shapes behind ConstantOfShape and float initializers, running statistics left out."""
    graph = onnx.load_from_string(data).graph
    shapes = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer if t.data_type == TensorProto.INT64}
    sizes = {t.name: int(np.prod(t.dims)) for t in graph.initializer if t.data_type == TensorProto.FLOAT}
    for node in graph.node:
        if node.op_type == "ConstantOfShape":
            sizes[node.output[0]] = int(np.prod(shapes[node.input[0]]))
    statistics = {n for node in graph.node if node.op_type == "BatchNormalization" for n in node.input[3:5]}
    used = {n for node in graph.node for n in node.input}
    return sum(size for name, size in sizes.items() if name in used and name not in statistics)


def test_light_model_parameters(light, light_name):
    data = light(light_name)
    graph = load_model(data)
    assert graph.num_parameters == trainable_elements(data)
    assert graph.num_parameters == PARAMETERS.get(light_name, graph.num_parameters)
    assert graph.forward_flops == pytest.approx(FLOPS.get(light_name, graph.forward_flops), rel=0.02)
    assert not graph.warnings


def test_light_model_shapes(light, light_name):
    data = light(light_name)
    graph = load_model(data)
    inferred = shape_inference.infer_shapes(onnx.load_from_string(data)).graph
    checked = 0
    for value in (*inferred.value_info, *inferred.output):
        if value.name in graph.tensors:
            shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
            assert graph.tensors[value.name].shape == shape, value.name
            checked += 1
    assert checked > 0.7 * sum(not op.is_view for op in graph.operators)


def test_light_models_keep_the_batch(light, light_name):
    graph = load_model(light(light_name))
    for op in graph.operators:
        if not op.is_view and not op.is_constant:
            assert all(graph.tensors[n].batch_dim == 0 for n in op.outputs), op.name


def test_light_model_round_trip(light, light_name):
    graph = load_model(light(light_name))
    again = graph_from_bytes(graph_to_bytes(graph))
    assert again == graph and graph_digest(again) == graph_digest(graph) and again.sha256 == graph.sha256


@pytest.mark.parametrize("name", NAMES)
def test_exported_parameters_and_shapes(name, export, build):
    data = export(name)
    graph = load_model(data)
    module, _ = build(name)
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    assert not graph.warnings
    inferred = shape_inference.infer_shapes(onnx.load_from_string(data), data_prop=True).graph
    pushed = {source for source, *_ in graph.pieces.values()}
    checked = 0
    for value in (*inferred.value_info, *inferred.output):
        if value.name in graph.tensors and value.name not in pushed:
            shape = tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
            mine = graph.tensors[value.name].shape
            # A product on merged dims is rewritten to one on the dims apart.
            assert mine == shape or int(np.prod(mine)) == int(np.prod(shape)), value.name
            checked += 1
    assert checked > 4


@pytest.mark.parametrize("name", NAMES)
def test_exported_flops(name, export, build):
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    module, inputs = build(name)
    module.eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        module(*inputs)
    graph = load_model(export(name))
    tables = sum(op.forward_flops.fixed for op in graph.operators if op.is_constant)
    # `inv_freq @ positions` is folded here and counted there: a few hundred operations.
    assert graph.forward_flops - tables == pytest.approx(counter.get_total_flops(), rel=2e-3)


@pytest.mark.parametrize("name", long_but(("gpt", "resnet"), NAMES))
def test_exports_at_other_batch_sizes_are_equal(name, export):
    assert load_model(export(name, 1)) == load_model(export(name, 4))


def toy(batch: int | str, merged: int | str) -> bytes:
    """Gather, merge (batch, position), Gemm, un-merge, with constants as an exporter bakes them."""
    size = batch if isinstance(batch, int) else 1
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("Reshape", ["x", "flat"], ["y"]),
        helper.make_node("Gemm", ["y", "w", "bias"], ["z"], transB=1),
        helper.make_node("Relu", ["z"], ["r"]),
        helper.make_node("Reshape", ["r", "whole"], ["out"]),
        helper.make_node("Slice", ["out", "zero", "end", "zero"], ["cut"]),
        helper.make_node("Softmax", ["cut"], ["p"], axis=-1),
    ]
    if isinstance(batch, str):
        nodes[4:5] = [
            helper.make_node("Shape", ["ids"], ["s"], start=0, end=1),
            helper.make_node("Concat", ["s", "tail"], ["whole"], axis=0),
            nodes[4],
        ]
    ints = {"flat": [merged, 8] if isinstance(merged, int) else [-1, 8], "zero": [0], "end": [size * 1000]}
    ints |= {"tail": [6, 12]} if isinstance(batch, str) else {"whole": [size, 6, 12]}
    initializers = [helper.make_tensor(k, TensorProto.INT64, [len(v)], v) for k, v in ints.items()]
    floats = {"table": (20, 8), "w": (12, 8), "bias": (12,)}
    initializers += [
        helper.make_tensor(k, TensorProto.FLOAT, s, np.zeros(s, np.float32).tobytes(), raw=True)
        for k, s in floats.items()
    ]
    graph = helper.make_graph(
        nodes,
        "toy",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [batch, 6])],
        [helper.make_tensor_value_info("p", TensorProto.FLOAT, None)],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString()


def test_batch_one_four_symbolic_are_equal():
    graphs = [load_model(toy(*a)) for a in ((1, 6), (4, 24), (4, -1), ("n", -1))]
    assert all(g == graphs[0] for g in graphs)
    assert graphs[0].tensors["p"].shape_at(7) == (7, 6, 12)
    assert all(graphs[0].tensors[n].batch_dim == 0 for op in graphs[0] for n in op.outputs)
    assert graphs[0].num_parameters == 20 * 8 + 12 * 8 + 12


def test_symbolic_batch_of_the_exporter(build):
    import torch

    from automap.runtime.torch_export import quiet

    module, inputs = build("gpt_linear", 2)
    for parameter in module.parameters():
        # The exporter stores equal tensors once: give each its own values.
        torch.nn.init.normal_(parameter)
    with quiet():
        program = torch.onnx.export(
            module.eval(),
            inputs,
            dynamo=True,
            verbose=False,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=64)},),
        )
    graph = load_model(program.model_proto.SerializeToString())
    assert not graph.warnings
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    assert graph.tensors[graph.outputs[0]].shape_at(3) == (3, 16, 96)
    assert find_units(graph).num_blocks == 2


def test_a_size_of_a_dim_that_the_file_does_not_have_is_refused():
    for batch, repair in ((4, "Leave it out"), ("n", "Its symbolic dims are n")):
        with pytest.raises(ModelError) as caught:
            load_model(toy(batch, -1), dims={"sequence": 6})
        assert caught.value.field == "dims.sequence" and caught.value.repair.startswith(repair)


def test_unbound_dim_says_how_to_bind_it():
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "seq", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)],
    )
    data = helper.make_model(graph).SerializeToString()
    with pytest.raises(ModelError) as error:
        load_model(data)
    assert error.value.field == "dims.seq" and "--dim seq=" in error.value.repair
    assert load_model(data, dims={"seq": 7}).tensors["y"].shape == (1, 7, 4)


def test_a_dim_of_minus_one_is_one_without_a_size():
    """TensorFlow and PaddlePaddle write -1 where they know no size; the standard leaves such dims without a value."""
    data = plain({"x": [-1, -1, 4], "w": [4, 4]})
    with pytest.raises(ModelError) as error:
        load_model(data, parameters=["w"])
    assert error.value.field == "dims.x.1" and "--dim x.1=" in error.value.repair
    unknown = plain({"x": [None, None, 4], "w": [4, 4]})
    graphs = [load_model(file, parameters=["w"], dims={"x.1": 7}) for file in (data, unknown)]
    assert graphs[0].operators == graphs[1].operators and graphs[0].tensors == graphs[1].tensors
    assert graphs[0].tensors["y"].shape == (1, 7, 4) and graphs[0].tensors["y"].batch_dim == 0


def test_an_input_that_is_also_an_output_has_the_batch_of_the_others():
    """Exporters hand an input on as a result, as an encoder does with its mask."""
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in ("x", "mask")]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    results = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None), values[1]]
    graph = load_model(helper.make_model(helper.make_graph(nodes, "g", values, results, [weight])).SerializeToString())
    assert graph.outputs == ("y", "mask") and graph.tensors["mask"].shape_at(3) == (3, 4)


def plain(names: dict[str, list]) -> bytes:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in names.items()],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
    )
    return helper.make_model(graph).SerializeToString()


def test_parameters_by_glob_and_batch_dims():
    data = plain({"x": [5, 8, 4], "w": [5, 4, 4]})
    with pytest.raises(ModelError) as error:
        load_model(data)
    assert "parameter" in error.value.message
    graph = load_model(data, parameters=["w*"], batch_dims={"x": 1})
    assert graph.num_parameters == 80 and graph.tensors["y"].shape == (5, 1, 4) and graph.tensors["y"].batch_dim == 1
    with pytest.raises(ModelError) as error:
        load_model(data, parameters=["w*"], batch_dims={"nothing": 1})
    assert error.value.field == "batch_dims.nothing"
    with pytest.raises(ModelError, match="glob") as error:
        load_model(data, parameters=["w*", "nosuch"])
    assert (error.value.field, error.value.value) == ("hints.parameters", "nosuch")
    assert "x, w" in error.value.repair


def test_fused_weights_become_pieces(export):
    graph = load_model(export("gpt"))
    assert graph.pieces["h.0.attn.c_attn.weight#k"] == ("h.0.attn.c_attn.weight", 1, 32, 64)
    assert graph.pieces["h.1.attn.c_attn.bias#v"] == ("h.1.attn.c_attn.bias", 0, 64, 96)
    linear = load_model(export("gpt_linear"))
    assert linear.pieces["h.0.attn.c_attn.weight#q"] == ("h.0.attn.c_attn.weight", 0, 0, 32)
    llama = load_model(export("llama"))
    assert llama.pieces["layers.0.gate_up_proj.weight#1"] == ("layers.0.gate_up_proj.weight", 0, 64, 128)
    vit = load_model(export("vit"))
    assert vit.pieces["blocks.1.attn.qkv.weight#v"] == ("blocks.1.attn.qkv.weight", 0, 64, 96)
    for each in (graph, linear, llama, vit):
        assert not any(op.kind == "Split" for op in each)
        assert not {s for s, *_ in each.pieces.values()} & set(each.tensors)
        biases = [op for op in each if op.kind == "Add" and set(op.inputs) & each.pieces.keys()]
        assert all(op.traffic == BIAS_TRAFFIC for op in biases) and len(biases) == (0 if each is llama else 6)


def test_tied_embedding_is_one_parameter(export):
    graph = load_model(export("gpt"))
    assert sum(t.shape == (96, 32) for t in graph.parameters) == 1
    readers = [graph.operators[i].kind for i in graph.consumers["lm_head.weight"]]
    assert readers == ["Gather", "Transpose"]


def test_names_are_scoped_and_unique(export):
    graph = load_model(export("llama"))
    names = [op.name for op in graph]
    assert len(set(names)) == len(names)
    assert "layers.0.q_proj/MatMul" in names and "layers.1.down_proj/MatMul" in names
    assert graph.by_name["layers.0.q_proj/MatMul"].scope == "layers.0.q_proj"


@pytest.mark.parametrize("times, dim, kind", [((1, 3, 1), 1, "Expand"), ((1, 1, 2), 2, "Tile")])
def test_the_repetitions_of_a_single_row_can_be_split(times, dim, kind):
    """Several rows that are repeated stay whole: the parts of the result are none of the operand."""
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [2, 1, 4]), ("y", None)))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Tile", ["h", "times"], ["y"])]
    weight = np.zeros((4, 4), dtype=np.float32)
    stored = [numpy_helper.from_array(np.array(times), "times"), numpy_helper.from_array(weight, "w")]
    model = helper.make_model(helper.make_graph(nodes, "repeated", [x], [y], stored))
    graph = load_model(model.SerializeToString())
    op = graph.operators[-1]
    assert (op.kind, graph.tensors["y"].shape) == (kind, (1, times[1], 4 * times[2]))
    assert (dim in {s.outputs[0] for s in operator_signatures(graph, op)}) == (kind == "Expand")


def test_unknown_kinds_are_kept_and_named():
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Odd", ["y"], ["z"], domain="me", name="odd")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [2, 4])],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("me", 1)]
    loaded = load_model(helper.make_model(graph, opset_imports=opsets).SerializeToString())
    assert loaded.operators[-1].kind == "me.Odd" and loaded.tensors["z"].batch_dim == 0
    assert any("odd" in w for w in loaded.warnings)
    coverage = summarize(loaded)["coverage"]
    assert coverage["opaque"] > 0.9 and sum(coverage.values()) == pytest.approx(1.0)
    del graph.output[0].type.tensor_type.shape.dim[:]
    graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match="odd"):
        load_model(helper.make_model(graph, opset_imports=opsets).SerializeToString())


@pytest.mark.parametrize("samples", [1, 4])
def test_an_unknown_kind_may_merge_samples_with_other_dims(samples):
    x, z, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("x", (samples, 3, 4)), ("z", (3 * samples, 4)), ("y", (3 * samples, 4)))
    )
    odd, product = helper.make_node("Odd", ["x"], ["z"], domain="me"), helper.make_node("MatMul", ["z", "w"], ["y"])
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)
    graph = helper.make_graph([odd, product], "g", [x], [y], [weight], value_info=[z])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("me", 1)]
    made = load_model(helper.make_model(graph, opset_imports=opsets).SerializeToString()).tensors["z"]
    assert (made.shape, made.batch_dim, made.elements.at(5)) == ((3, 4), 0, 60)


def test_local_functions_are_expanded():
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    twice = helper.make_function(
        "f",
        "Twice",
        ["a", "b"],
        ["c"],
        [helper.make_node("MatMul", ["a", "b"], ["h"]), helper.make_node("MatMul", ["h", "b"], ["c"])],
        opsets,
    )
    graph = helper.make_graph(
        [
            helper.make_node("Twice", ["x", "w"], ["y"], domain="f"),
            helper.make_node("Twice", ["y", "w"], ["z"], domain="f"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)],
    )
    model = helper.make_model(graph, opset_imports=opsets, functions=[twice])
    loaded = load_model(model.SerializeToString())
    assert [op.kind for op in loaded] == ["MatMul"] * 4 and loaded.num_parameters == 16


def test_a_function_may_hand_on_its_operands():
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    swapped = helper.make_function("f", "Swap", ["a", "b"], ["b", "a"], [], opsets)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Swap", ["h", "x"], ["first", "second"], domain="f"),
            helper.make_node("Concat", ["first", "second"], ["y"], axis=1),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 3], [0.0] * 12)],
    )
    loaded = load_model(helper.make_model(graph, opset_imports=opsets, functions=[swapped]).SerializeToString())
    product, joined = loaded.operators
    assert joined.inputs == ("x", *product.outputs)


def test_nodes_that_no_output_needs_are_not_read():
    """Also those that could not be read, such as one whose result is as long as its data say."""
    weights = [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)]
    needed = helper.make_node("MatMul", ["x", "w"], ["y"])
    other = [helper.make_node("NonZero", ["y"], ["places"]), helper.make_node("Transpose", ["places"], ["turned"])]
    found = []
    for nodes in ([needed], [*other[::-1], needed]):
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", 4]) for n in "xy"]
        model = helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:], weights))
        found.append(load_model(model.SerializeToString()))
    assert found[0].operators == found[1].operators


def test_nodes_out_of_order_are_sorted():
    nodes = [helper.make_node("Relu", ["y"], ["z"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)],
    )
    assert [op.kind for op in load_model(helper.make_model(graph).SerializeToString())] == ["MatMul", "Relu"]


@pytest.mark.parametrize("has_marks", [True, False])
def test_weights_whose_marks_another_tool_dropped_are_parameters(has_marks):
    """PyTorch's newer exporter marks weights in `value_info`, which shape inference and others write anew."""

    def marked(value, key, text):
        value.metadata_props.add(key=f"pkg.{key}", value=text)
        return value

    kind = "torch.export.graph_signature.InputSpec.kind"
    weight, bias = (np.arange(n, dtype=np.float32).reshape(shape) for n, shape in ((12, (4, 3)), (3, (3,))))
    inner = [
        marked(helper.make_tensor_value_info("val_0", TensorProto.FLOAT, [4, 3]), "onnxscript.optimizer.folded_from",
               "['fc.weight']"),
        marked(helper.make_tensor_value_info("fc.bias", TensorProto.FLOAT, [3]), kind, "PARAMETER"),
    ]  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "val_0"], ["y"]), helper.make_node("Add", ["y", "fc.bias"], ["z"])],
        "g",
        [marked(helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4]), kind, "USER_INPUT")],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1, 3])],
        [numpy_helper.from_array(weight, "val_0"), numpy_helper.from_array(bias, "fc.bias")],
        value_info=inner if has_marks else [],
    )
    assert load_model(helper.make_model(graph, producer_name="pytorch").SerializeToString()).num_parameters == 15


@pytest.mark.parametrize("kind", ["Cast", "CastLike"])
def test_a_cast_to_the_type_of_a_known_tensor_is_a_cast(kind):
    """Expanded standard functions and PyTorch's unoptimised files write numbers and masks so."""

    def cast(name, like, to, out):
        return helper.make_node(kind, [name, like] if kind == "CastLike" else [name], [out], **to)

    as_int, as_half = ({"to": TensorProto.INT64}, {"to": TensorProto.FLOAT16}) if kind == "Cast" else ({}, {})
    nodes = [
        cast("floats", "end", as_int, "start"), helper.make_node("Range", ["start", "end", "one"], ["places"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Clip", ["y", "least"], ["c"]),
        cast("floats", "y", as_half, "least"), helper.make_node("Gather", ["c", "places"], ["g"], axis=1),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, [1, 4])],
        [helper.make_tensor_value_info("g", TensorProto.FLOAT16, None)],
        [
            helper.make_tensor("w", TensorProto.FLOAT16, [4, 4], [0.0] * 16),
            helper.make_tensor("floats", TensorProto.FLOAT, [], [1.0]),
            helper.make_tensor("end", TensorProto.INT64, [], [3]),
            helper.make_tensor("one", TensorProto.INT64, [], [1]),
        ],
    )
    loaded = load_model(helper.make_model(graph).SerializeToString())
    assert [op.kind for op in loaded if op.is_live] == ["MatMul", "Clip", "Gather"]
    assert loaded.tensors["g"].shape == (1, 2)
    assert ("min", 1.0) in next(op for op in loaded if op.kind == "Clip").attributes


def test_backward_flops_need_no_input_gradient(export):
    graph = load_model(export("mlp"))
    first, *rest = [op for op in graph if op.forward_flops.per_sample]
    assert first.backward_flops == first.forward_flops
    assert all(op.backward_flops == op.forward_flops.scaled(2) for op in rest)


def test_the_summary_counts_operators_and_blocks(export):
    found = summarize(load_model(export("gpt"), loss="cross_entropy"))
    assert found["num_blocks"] == 2 and found["coverage"]["opaque"] == 0
    assert found["operators"]["MatMul"] == 17 and found["num_operators"] == sum(found["operators"].values())


def test_an_operator_with_too_many_operands_is_refused():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h", "w"], ["y"], name="act")]
    w = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], np.ones((8, 8), np.float32).tobytes(), raw=True)
    shapes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 8]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "toy", shapes[:1], shapes[1:], [w])
    with pytest.raises(
        ModelError, match=r"operator act \(Relu\) has 2 operands, but takes at most 1 operand"
    ) as caught:
        load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString())
    assert caught.value.value == "Relu(h, w)" and "first 1" in caught.value.repair


def test_the_reason_for_samples_that_stay_together_is_a_warning():
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Transpose", ["h"], ["t"], perm=[1, 0]),
        helper.make_node("MatMul", ["h", "t"], ["y"], name="pairs"),
    ]
    w = helper.make_tensor("w", TensorProto.FLOAT, [8, 8], np.ones((8, 8), np.float32).tobytes(), raw=True)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "n"])
    graph = helper.make_graph(nodes, "toy", [x], [y], [w])
    loaded = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString())
    assert len(loaded.warnings) == 1
    assert "MatMul is replicated: it compares the samples of a batch with each other" in loaded.warnings[0]


@pytest.mark.parametrize("key", ["automap.unread_parameters", "automap.quantised_weights"])
def test_what_an_export_says_of_parameters_is_a_warning_of_bounded_length(key):
    file = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", 1, ["batch", 4])],
            [helper.make_tensor_value_info("y", 1, ["batch", 2])],
            [helper.make_tensor("w", 1, (4, 2), [0.5] * 8)],
        )
    )
    helper.set_model_props(file, {key: "7 parameters " + "and more " * 1000})
    (warning,) = load_model(file.SerializeToString()).warnings
    assert warning.startswith("7 parameters and more") and len(warning) == 1000
