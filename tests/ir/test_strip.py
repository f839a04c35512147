"""Stripped files: no weights, no paths, the same Graph."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from long_cases import long_but
from onnx import TensorProto, external_data_helper, helper, numpy_helper

from ir.errors import ModelError, ModelTooExpensive
from ir.onnx.load import load_model
from ir.onnx.readers.limits import LARGEST_FILE
from ir.onnx.rewrites.exporter_quirks import is_filled
from ir.onnx.sandbox import SandboxLimits, strip_upload
from ir.onnx.strip import strip, strip_file
from ir.serialize import graph_digest

NAMES = ("gpt", "gpt_linear", "llama", "bert", "vit", "resnet", "mlp")
SECRET = "/home/somebody/secret/model.py"


def same(data: bytes, stripped: bytes, **options) -> None:
    before, after = load_model(data, **options), load_model(stripped, **options)
    assert graph_digest(replace(after, sha256="")) == graph_digest(replace(before, sha256=""))
    assert after.parameters == before.parameters


def weighty(seed: int = 0) -> onnx.ModelProto:
    """Weights small and large, in every way that a file holds numbers, and traces of where it was written."""
    rng = np.random.default_rng(seed)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])
    nodes = [
        helper.make_node("MatMul", ["x", "large"], ["a"], name="/net/first/MatMul"),
        helper.make_node("Add", ["a", "bias"], ["b"]),
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(rng.random((1, 200, 50), np.float32))),
        helper.make_node("Reshape", ["b", "shape"], ["d"]),
        helper.make_node("Mul", ["d", "scale"], ["e"]),
        helper.make_node("Reshape", ["c", "flat"], ["f"]),
        helper.make_node("Gemm", ["e", "second"], ["y"], transB=1, doc_string=SECRET),
    ]
    half = helper.make_tensor("second", TensorProto.FLOAT16, [10, 100], rng.random(1000).astype(np.float16))
    weights = [
        numpy_helper.from_array(rng.random((64, 100), np.float32), "large"),
        helper.make_tensor("bias", TensorProto.FLOAT, [100], rng.random(100)),
        numpy_helper.from_array(np.asarray([0, -1]), "shape"),
        numpy_helper.from_array(np.asarray([-1]), "flat"),
        numpy_helper.from_array(np.asarray(0.5, np.float32), "scale"),
        half,
    ]
    for weight in weights:
        weight.doc_string = SECRET
    nodes[0].metadata_props.add(key="pkg.torch.onnx.stack_trace", value=f'File "{SECRET}", line 1')
    nodes[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'net', 'net.first', 'matmul']")
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "weighty", [x], [y], weights, doc_string=SECRET)
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 20)], producer_name="somebody", doc_string=SECRET, ir_version=10
    )
    made.metadata_props.add(key="source", value=SECRET)
    return made


def test_nothing_of_the_weights_is_left():
    model = weighty()
    data = model.SerializeToString()
    stripped = strip(data)
    same(data, stripped.data)
    assert b"secret" not in stripped.data and b"somebody" not in stripped.data
    left = onnx.load_from_string(stripped.data)
    held = {t.name for t in left.graph.initializer if t.raw_data or t.float_data or t.int32_data or t.int64_data}
    assert held == {"shape", "flat", "scale"}
    assert stripped.num_kept == 3 and stripped.num_dropped == 3
    assert stripped.bytes_before == len(data) > 30 * len(stripped.data)
    assert "net.first" in {op.scope for op in load_model(stripped.data).operators}


@pytest.mark.parametrize("name", NAMES)
def test_stripped_exports_are_read_as_the_same_model(name, export):
    data = export(name)
    same(data, strip(data).data)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["gpt"], ["gpt", "bert", "resnet"]))
@pytest.mark.parametrize("dynamo", [True, False])
def test_exports_with_weights(name, dynamo, build, tmp_path):
    """The exporters as users call them: weights inside, stack traces, paths."""
    import warnings

    import torch

    module, inputs = build(name)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), inputs, path, dynamo=dynamo, external_data=False, opset_version=18, verbose=False
        )
    data = path.read_bytes()
    stripped = strip_file(path)
    same(data, stripped.data)
    assert stripped.bytes_before > 2 * len(stripped.data) and str(torch.__file__).encode() not in stripped.data
    assert b"stack_trace" not in stripped.data


def test_stripped_light_models_are_read_as_the_same_model(light, light_name):
    data = light(light_name)
    same(data, strip(data).data)


def test_stripping_twice_changes_nothing(light):
    once = strip(light("squeezenet")).data
    assert strip(once).data == once


def test_external_data_is_dropped(tmp_path):
    inside = weighty().SerializeToString()
    outside = weighty()
    external_data_helper.convert_model_to_external_data(outside, location="weights.bin", size_threshold=64)
    path = tmp_path / "model.onnx"
    onnx.save(outside, path)
    (tmp_path / "weights.bin").unlink()
    stripped = strip_file(path)
    same(inside, stripped.data)
    assert b"weights.bin" not in stripped.data


def test_small_constants_are_read_from_external_data_beside_the_file(tmp_path):
    """PyTorch's newer exporter keeps all but the smallest there."""
    inside, outside = weighty(), weighty()
    external_data_helper.convert_model_to_external_data(outside, location="model.onnx.data", size_threshold=0)
    path = tmp_path / "model.onnx"
    onnx.save(outside, path)
    same(inside.SerializeToString(), strip_file(path).data)
    # No other folder is read.
    (tmp_path / "elsewhere").mkdir()
    path.rename(tmp_path / "elsewhere" / path.name)
    with pytest.raises(ModelError, match="could not be read"):
        strip_file(tmp_path / "elsewhere" / path.name)
    for tensor in (moved := onnx.load(tmp_path / "elsewhere" / path.name, load_external_data=False)).graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../model.onnx.data"
    path.write_bytes(b"")
    (tmp_path / "elsewhere" / path.name).write_bytes(moved.SerializeToString())
    with pytest.raises(ModelError, match="could not be read"):
        strip_file(tmp_path / "elsewhere" / path.name)


def outside(path, changes: dict[str, str | None]) -> None:
    """Saves the model with all its data in another file; entries of `changes` replace those of the tensor `shape`."""
    model = weighty()
    external_data_helper.convert_model_to_external_data(model, location=f"{path.name}.data", size_threshold=0)
    onnx.save(model, path)
    model = onnx.load(path, load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name == "shape")
    entries = {entry.key: entry.value for entry in tensor.external_data} | changes
    del tensor.external_data[:]
    for key, value in entries.items():
        if value is not None:
            tensor.external_data.add(key=key, value=value)
    path.write_bytes(model.SerializeToString())


def test_a_constant_in_external_data_needs_no_stated_length(tmp_path):
    outside(tmp_path / "model.onnx", {"length": None})
    same(weighty().SerializeToString(), strip_file(tmp_path / "model.onnx").data)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"offset": "99999999"}, "exceeds file size"), ({"length": "9999999"}, "its length is 9999999 bytes"),
     ({"length": "many"}, "many"), ({"location": "nothing"}, "nothing")],
)  # fmt: skip
def test_a_constant_that_cannot_be_read_from_external_data_is_refused_with_the_reason(tmp_path, changes, why):
    outside(tmp_path / "model.onnx", changes)
    with pytest.raises(ModelError, match="could not be read") as error:
        strip_file(tmp_path / "model.onnx")
    assert error.value.value.startswith("shape: ") and why in error.value.value


def test_small_constants_in_external_data_are_refused(tmp_path):
    model = weighty()
    model.graph.initializer[2].data_location = TensorProto.EXTERNAL
    with pytest.raises(ModelError, match="small constant") as error:
        strip(model.SerializeToString())
    assert error.value.value == "shape"


def test_weights_that_only_the_user_knows():
    """Globs name what the exporter did not say: then a small tensor in an unusual place is a weight too."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Max", ["a", "floor"], ["y"])]
    weights = [numpy_helper.from_array(np.ones(s, np.float32), n) for n, s in (("w", (4, 4)), ("floor", (4,)))]
    data = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights)).SerializeToString()
    assert strip(data).num_kept == 1
    stripped = strip(data, parameters=["floor"])
    assert stripped.num_kept == 0
    same(data, stripped.data, parameters=["floor"])


@pytest.mark.parametrize("data", [b"text that is no model", b"\x3a\xff\xff\xff\x7f", bytes(100)])
def test_other_files_are_refused(data, tmp_path):
    with pytest.raises(ModelError) as error:
        strip(data)
    assert error.value.field == "model" and error.value.repair
    path = tmp_path / "empty.onnx"
    path.touch()
    with pytest.raises(ModelError, match="cannot be read"):
        strip_file(path)
    with pytest.raises(ModelError, match="cannot be read"):
        strip_file(tmp_path / "absent.onnx")


@pytest.mark.parametrize("bits", [0x7F800001, 0xFFC00000])
def test_weights_that_are_not_numbers_are_no_fill(bits):
    """Memory that nobody filled may begin with zeros and hold NaNs, also those that signal."""
    value = np.zeros(8, dtype=np.uint32)
    assert is_filled(numpy_helper.from_array(value.view(np.float32), "w"))
    value[5] = bits
    assert not is_filled(numpy_helper.from_array(value.view(np.float32), "w"))


def test_an_upload_is_stripped_in_a_child_as_it_is_here(light, tmp_path):
    data = light("squeezenet")
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with path.open("rb") as file:
        file.seek(7)  # it is read from its beginning, wherever it stands
        assert strip_upload(file) == strip(data).data


def test_uploads_that_cannot_be_stripped_are_refused(tmp_path):
    """Too large to be looked at, no ONNX file, and one that unpacks to more memory than the child may have."""
    path = tmp_path / "model.onnx"
    with path.open("wb+") as file:
        file.truncate(LARGEST_FILE + 1)
        with pytest.raises(ModelTooExpensive, match="larger than 2,146,435,072 bytes"):
            strip_upload(file)
        file.truncate(100)
        with pytest.raises(ModelError, match="not an ONNX model"):
            strip_upload(file)
    # Three million empty nodes: protobuf merges what comes again.
    many = onnx.ModelProto(graph=onnx.GraphProto(node=[onnx.NodeProto()] * 1000)).SerializeToString() * 3000
    path.write_bytes(many)
    with path.open("rb") as file, pytest.raises(ModelTooExpensive, match="many times its size"):
        strip_upload(file, limits=SandboxLimits(memory_bytes=256 << 20))
