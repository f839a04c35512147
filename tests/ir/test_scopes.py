"""Operators map back to the modules of PyTorch that they come from, whichever exporter wrote the file."""

import functools
import io
import warnings

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from automap.globs import select
from ir.graph import Graph
from ir.onnx.load import load_model
from ir.onnx.readers.nodes import KIND_KEY, SCOPE_KEY, path_scope, scope_of, text_list

LAYERS, WIDTH = 2, 8


class Block(nn.Module):
    """A residual block with a Sequential inside a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU()), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln(x))


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(16, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids)
        for block in self.h:
            x = block(x)
        return self.ln_f(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = Trunk()
        self.lm_head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.transformer(ids))


@functools.cache
def exported(how: str) -> Graph:
    ids = torch.zeros(1, 4, dtype=torch.long)
    if how == "weight-free":
        from automap.runtime.torch_export import export_onnx

        data = export_onnx(lambda: (Net(), (torch.zeros(1, 4, dtype=torch.long),)))
    else:
        file = io.BytesIO()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if how == "dynamo":
                torch.onnx.export(Net().eval(), (ids,), file, dynamo=True, verbose=False)
            else:
                torch.onnx.export(Net().eval(), (ids,), file, dynamo=False, opset_version=17)
        data = file.getvalue()
    return load_model(data, name="net")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["weight-free", "dynamo", "legacy"])
def test_every_operator_of_a_module_knows_it(how: str):
    graph = exported(how)
    modules = {name: type(module) for name, module in Net().named_modules()}
    for op in graph:
        if not op.is_constant:
            assert op.scope in modules, op.name
    products = {op.scope for op in graph if op.kind in ("MatMul", "Gemm")}
    assert products == {name for name, kind in modules.items() if kind is nn.Linear}
    assert {op.scope for op in graph if op.kind == "Relu"} == {n for n, kind in modules.items() if kind is nn.ReLU}
    norms = {op.scope for op in graph if op.kind == "LayerNormalization"}
    assert norms == {name for name, kind in modules.items() if kind is nn.LayerNorm}
    assert {op.scope for op in graph if op.kind == "Gather"} == {"transformer.wte"}
    # The residual sum belongs to the block itself.
    assert {"transformer.h.0", "transformer.h.1"} <= {op.scope for op in graph if op.kind == "Add"}


@pytest.mark.slow
def test_exporters_agree_on_names():
    named = []
    for how in ("weight-free", "dynamo", "legacy"):
        names = [op.name for op in exported(how)]
        assert len(select("transformer.h.*.mlp.0.0", names)) >= LAYERS
        named.append({name for name in select("transformer.h.*", names) if not name.endswith("/Transpose")})
    assert named[0] == named[1] == named[2]


@pytest.mark.parametrize(
    ("name", "scope"),
    [
        ("/h.0/attn/c_attn/MatMul", "h.0.attn.c_attn"),
        ("/features/features.1/conv/conv.0/conv.0.1/BatchNormalization", "features.1.conv.0.1"),
        ("/layer1/layer1.0/downsample/downsample.0/Conv", "layer1.0.downsample.0"),
        ("/layer1/layer10.0/Conv", "layer1.layer10.0"),
        ("/Add", ""),
        ("MatMul_3", ""),
        ("a/b/MatMul", ""),
    ],
)
def test_paths_of_the_older_exporter(name: str, scope: str):
    assert path_scope(name) == scope


@pytest.mark.parametrize(
    ("text", "scope"),
    [
        ("['', 'transformer', 'transformer.h.0', 'transformer.h.0.mlp', 'linear']", "transformer.h.0.mlp"),
        ("['', 'add']", ""),
        ("['add']", ""),
        ("", ""),
        ("__import__('os')", ""),
        ("[1, 2]", ""),
        ("[" * 1000, ""),
        ("'" + "x" * 30_000 + "'", ""),
    ],
)
def test_lists_of_the_newer_exporter(text: str, scope: str):
    assert scope_of(text_list(text)) == scope


@pytest.mark.parametrize("has_bias", (False, True))
def test_normalisations_are_found_again_where_all_weights_were_folded(has_bias):
    """The newer exporter marks no weight that it computed: nothing is marked in a network of such layers alone."""
    rng, nodes, stored, source, channels = np.random.default_rng(0), [], [], "x", 3
    for i in range(2):
        weight, bias, outputs = f"{i}.0.weight", f"{i}.0.{'' if has_bias else 'weight_'}bias", 4 + i
        stored += [
            numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
            for name, shape in ((weight, (outputs, channels, 3, 3)), (bias, (outputs,)))
        ]
        layer = helper.make_node("Conv", [source, weight, bias], [f"c{i}"], pads=[1] * 4)
        path = str(["", str(i), f"{i}.1", "_native_batch_norm_legit_no_training"])
        layer.metadata_props.add(key=SCOPE_KEY, value=path)
        nodes += [layer, helper.make_node("Relu", [f"c{i}"], [f"r{i}"])]
        source, channels = f"r{i}", outputs
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (2, c, 8, 8)) for n, c in (("x", 3), ("r1", 5)))
    x.metadata_props.add(key=KIND_KEY, value="USER_INPUT")
    file = helper.make_model(helper.make_graph(nodes, "g", [x], [y], stored), producer_name="pytorch")
    graph = load_model(file.SerializeToString())
    assert [op.kind for op in graph if op.kind in ("Conv", "BatchNormalization")] == ["Conv", "BatchNormalization"] * 2
    sizes = {"0.0.weight": 108, "1.0.weight": 180, "0.1.weight": 4, "0.1.bias": 4, "1.1.weight": 5, "1.1.bias": 5}
    sizes |= {"0.0.bias": 4, "1.0.bias": 5} if has_bias else {}
    assert {tensor.name: tensor.num_elements for tensor in graph.parameters} == sizes
