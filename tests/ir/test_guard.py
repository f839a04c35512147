"""Bad and hostile files: each refused with field, value and repair, quickly."""

import time

import pytest
from onnx import TensorProto, helper, printer

from ir.errors import ModelError, ModelTooExpensive
from ir.onnx.load import load_model
from ir.onnx.readers.guard import parse
from ir.onnx.readers.limits import Limits
from ir.onnx.sandbox import SandboxLimits, import_model
from ir.onnx.strip import strip


def model(nodes=None, initializers=None, functions=(), **graph):
    nodes = nodes if nodes is not None else [helper.make_node("MatMul", ["x", "w"], ["y"])]
    weights = [helper.make_tensor("w", TensorProto.FLOAT, [4, 4], [0.0] * 16)]
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, graph.get("shape", [1, 4]))],
        [helper.make_tensor_value_info(graph.get("output", "y"), TensorProto.FLOAT, None)],
        weights if initializers is None else initializers,
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    return helper.make_model(made, opset_imports=opsets, functions=list(functions))


def external(name="w"):
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4, 4], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="../../etc/passwd")
    return tensor


def hidden(kind: str):
    """A model with external data in a place other than the initializers."""
    made = model()
    if kind == "initializer":
        made.graph.initializer[0].CopyFrom(external())
    elif kind == "no location":
        made.graph.initializer[0].external_data.add(key="location", value="w.bin")
    elif kind == "constant":
        made.graph.node.append(helper.make_node("Constant", [], ["c"], value=external("c")))
    elif kind == "sparse":
        sparse = made.graph.sparse_initializer.add()
        sparse.values.CopyFrom(external("s"))
        sparse.dims[:] = [4, 4]
    elif kind == "sparse constant":
        node = helper.make_node("Constant", [], ["c"])
        attribute = node.attribute.add(name="sparse_value", type=11)
        attribute.sparse_tensor.values.CopyFrom(external("s"))
        made.graph.node.append(node)
    elif kind in ("subgraph", "deep subgraph"):
        inner = helper.make_graph([helper.make_node("Constant", [], ["c"], value=external("c"))], "i", [], [])
        for _ in range(3 if kind == "deep subgraph" else 0):
            inner = helper.make_graph([helper.make_node("If", ["x"], ["z"], then_branch=inner)], "o", [], [])
        made.graph.node.append(helper.make_node("If", ["x"], ["z"], then_branch=inner))
    elif kind == "function":
        nodes = [helper.make_node("Constant", [], ["c"], value=external("c"))]
        made.functions.append(helper.make_function("f", "F", [], ["c"], nodes, [helper.make_opsetid("", 20)]))
    elif kind == "tensors":
        node = helper.make_node("Odd", [], ["c"], domain="f")
        node.attribute.add(name="many", type=9).tensors.append(external("t"))
        made.graph.node.append(node)
    elif kind == "training":
        made.training_info.add().algorithm.initializer.append(external("t"))
    return made.SerializeToString()


def laughs(depth: int) -> bytes:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    functions = [helper.make_function("f", "F0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets)]
    for i in range(1, depth):
        call = [helper.make_node(f"F{i - 1}", [a], [b], domain="f") for a, b in (("a", "h"), ("h", "b"))]
        functions.append(helper.make_function("f", f"F{i}", ["a"], ["b"], call, opsets))
    return model([helper.make_node(f"F{depth - 1}", ["x"], ["y"], domain="f")], functions=functions).SerializeToString()


def recursive() -> bytes:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("f", 1)]
    body = [helper.make_node("F", ["a"], ["b"], domain="f")]
    return model(functions=[helper.make_function("f", "F", ["a"], ["b"], body, opsets)]).SerializeToString()


GOOD = model().SerializeToString()
BAD = {
    "empty": b"",
    "text": b"this is not a model, it is a sentence about one\n" * 40,
    "json": b'{"graph": {"node": []}}',
    "truncated": GOOD[: len(GOOD) // 2],
    "zeros": bytes(1000),
    "cycle": model([helper.make_node("Add", ["x", "b"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
                    helper.make_node("Relu", ["b"], ["y"])]).SerializeToString(),
    "self loop": model([helper.make_node("Relu", ["y"], ["y"])]).SerializeToString(),
    "undefined input": model([helper.make_node("Relu", ["nowhere"], ["y"])]).SerializeToString(),
    "undefined output": model(output="nothing").SerializeToString(),
    "written twice": model(
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Abs", ["x"], ["y"])]
    ).SerializeToString(),
    "huge input": model(shape=[1, 1 << 62]).SerializeToString(),
    "huge product": model(shape=[1 << 30, 1 << 30]).SerializeToString(),
    "negative dim": model(shape=[1, -4]).SerializeToString(),
    "huge weight": model(
        initializers=[TensorProto(name="w", data_type=1, dims=[1 << 39, 1 << 39])]
    ).SerializeToString(),
    "no data": model(initializers=[TensorProto(name="w", data_type=7, dims=[4, 4])]).SerializeToString(),
    "recursive function": recursive(),
    "rank mismatch": model(shape=[1, 5]).SerializeToString(),
    "control flow": model(
        [helper.make_node("If", ["x"], ["y"], then_branch=helper.make_graph([], "i", [], []))]
    ).SerializeToString(),
    "huge constant": model([helper.make_node("ConstantOfShape", ["s"], ["c"]),
                            helper.make_node("Add", ["x", "c"], ["y"])],
                           [helper.make_tensor("s", TensorProto.INT64, [2], [1 << 33, 1 << 33])]).SerializeToString(),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name):
    started = time.process_time()
    with pytest.raises(ModelError) as error:
        load_model(BAD[name])
    assert time.process_time() - started < 1
    assert error.value.field in ("model", "hints.parameters") and error.value.value and error.value.repair


@pytest.mark.parametrize(
    "kind",
    [
        "initializer",
        "no location",
        "constant",
        "sparse",
        "sparse constant",
        "subgraph",
        "deep subgraph",
        "function",
        "tensors",
        "training",
    ],
)
def test_external_data_is_refused_anywhere(kind):
    with pytest.raises(ModelError) as error:
        parse(hidden(kind))
    assert "external" in error.value.message or "training" in error.value.message


@pytest.mark.parametrize("depth", [20, 30, 60, 1000])
def test_function_laughs_are_refused(depth):
    data = laughs(depth)
    started = time.process_time()
    with pytest.raises(ModelTooExpensive):
        load_model(data)
    assert time.process_time() - started < 0.5


def test_an_operand_read_twice_does_not_double_the_work():
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t0"])]
    nodes += [helper.make_node("Add", [f"t{i}", f"t{i}"], [f"t{i + 1}"]) for i in range(100)]
    nodes.append(helper.make_node("Split", ["t100"], ["y", "z"], axis=1, num_outputs=2))
    nodes.append(helper.make_node("Add", ["y", "z"], ["sum"]))
    graph = load_model(model(nodes, output="sum").SerializeToString())
    assert graph.num_parameters == 16 and len(graph.pieces) == 2


def test_shallow_functions_are_fine():
    assert len(parse(laughs(8)).functions) == 8


@pytest.mark.parametrize(
    ("limits", "what"),
    [({"max_bytes": 20}, "larger"),
     ({"max_nodes": 0}, "nodes"), ({"max_tensors": 1}, "tensors"),
     ({"max_items": 1}, "attribute values"), ({"max_operands": 0}, "operands"),
     ({"max_values": 0}, "values"), ({"max_name_bytes": 0}, "name")],
)  # fmt: skip
def test_every_limit_is_kept(limits, what):
    data = model([helper.make_node("Softmax", ["x"], ["y"], axis=[1])]).SerializeToString()
    with pytest.raises(ModelTooExpensive, match=what):
        parse(data, Limits(**limits))


def test_nested_subgraphs_are_refused():
    inner = helper.make_graph([], "i", [], [])
    for _ in range(12):
        inner = helper.make_graph([helper.make_node("If", ["x"], ["z"], then_branch=inner)], "o", [], [])
    data = model([helper.make_node("If", ["x"], ["y"], then_branch=inner)]).SerializeToString()
    with pytest.raises(ModelTooExpensive):
        parse(data)


def test_long_chain_is_read():
    nodes = [helper.make_node("Relu", [f"t{i}"], [f"t{i + 1}"]) for i in range(3000)]
    nodes = [helper.make_node("MatMul", ["x", "w"], ["t0"]), *nodes]
    graph = load_model(model(nodes, output="t3000").SerializeToString())
    assert len(graph.operators) == 3001


@pytest.mark.slow
def test_sandbox_returns_graphs_and_errors(light):
    data = light("resnet50")
    assert import_model(data) == load_model(data)
    with pytest.raises(ModelError) as error:
        import_model(b"nonsense", name="x")
    assert error.value.field == "model" and error.value.repair
    with pytest.raises(ModelTooExpensive):
        import_model(laughs(40))


@pytest.mark.slow
def test_a_large_tensor_is_checked_without_a_copy():
    """Nearly the largest upload, of one tensor: its memory while it is parsed allows no second copy of it."""
    size = 60 << 20
    weight = TensorProto(name="w", dims=[size // 4096, 1024], data_type=TensorProto.FLOAT, raw_data=bytes(size))
    data = model(initializers=[weight], shape=[1, size // 4096]).SerializeToString()
    assert import_model(data).num_parameters == size // 4


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"wall_s": 0.001}, {"cpu_s": 0}, {"memory_bytes": 40 << 20}, {"max_bytes": 10}])
def test_sandbox_limits(limit, light):
    with pytest.raises(ModelTooExpensive) as error:
        import_model(light("vgg19"), limits=SandboxLimits(**limit))
    assert error.value.field == "model" and error.value.repair


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "Git LFS"),
        (b"PK\x03\x04" + bytes(60), "PyTorch"),
        (b"\x80\x04\x95\x10" + bytes(8), "PyTorch"),
        (b"\x1f\x8b\x08\x00 and what follows it", "gunzip"),
        (b"--------------------------26f3c7f0a7c3a2e1\r\nContent-Disposition: form-data", "--data-binary"),
        ((64).to_bytes(8, "little") + b'{"weight":{"dtype":"F32"', "safetensors"),
        (b"GGUF\x03\x00\x00\x00" + bytes(16), "GGUF"),
        (b"\x1c\x00\x00\x00TFL3" + bytes(16), "tf2onnx"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x28\x00\x00\x00ORTM" + bytes(16), "ONNX Runtime's own format"),
        (printer.to_text(helper.make_model(helper.make_graph([], "g", [], []))).encode(), "ONNX as text"),
        (b"\n<!DOCTYPE html><html>", "HTML"),
        (b'{"irVersion": "10"}', "JSON"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(data, what):
    for read in (parse, strip):
        with pytest.raises(ModelError, match=f"is not an ONNX model but .*{what}") as error:
            read(data)
        assert error.value.repair and error.value.value == f"{len(data)} bytes"


def test_a_graph_without_outputs():
    made = model()
    del made.graph.output[:]
    with pytest.raises(ModelError, match="has no outputs") as error:
        load_model(made.SerializeToString())
    assert error.value.field == "model" and "output of the graph" in error.value.repair
