from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import onnx
import pytest
import torch
from torch import Tensor, nn

from automap.runtime.torch_export import export_onnx
from ir.onnx.sandbox import import_model

pytestmark = pytest.mark.slow  # torch and its exporter take seconds to import

ROOT = Path(__file__).parents[3]


class Net(nn.Module):
    """Convolution, batch norm (with buffers), a linear layer and one that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.conv(x))).mean(dim=(2, 3))
        result: Tensor = self.second(torch.relu(self.first(hidden)))
        return result


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Net(), (torch.zeros(1, 3, 8, 8),)


def kinds(model: onnx.ModelProto) -> dict[str, str]:
    name = "pkg.torch.export.graph_signature.InputSpec.kind"
    return {
        value.name: next((p.value for p in value.metadata_props if p.key == name), "") for value in model.graph.input
    }


@pytest.fixture(scope="module")
def gpt2() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt2_example", ROOT / "examples" / "gpt2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_graph_without_its_weights(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "net.onnx"
    data = export_onnx(build, path, name="net")
    assert path.read_bytes() == data
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")
    model = onnx.load_from_string(data)
    onnx.checker.check_model(model)
    assert model.graph.name == "net"
    found = kinds(model)
    parameters = {name for name, kind in found.items() if kind == "PARAMETER"}
    assert {"conv.weight", "conv.bias", "norm.weight", "norm.bias"} < parameters
    assert len(parameters) == 5  # first and second are one
    assert {name for name, kind in found.items() if kind == "BUFFER"} == {"norm.running_mean", "norm.running_var"}
    assert [name for name, kind in found.items() if kind == "USER_INPUT"] == ["x"]
    assert sum(len(tensor.raw_data) for tensor in model.graph.initializer) < 1000
    assert Counter(node.op_type for node in model.graph.node)["BatchNormalization"] == 1  # not folded away


def test_nothing_of_this_machine_is_in_the_file() -> None:
    data = export_onnx(build)
    for text in (str(ROOT), __file__, "torch_export.py", ".py", "stack_trace"):
        assert text.encode() not in data, text


def test_exports_are_equal() -> None:
    assert export_onnx(build) == export_onnx(build)


def test_every_operator_knows_its_module() -> None:
    model = onnx.load_from_string(export_onnx(build))
    for node in model.graph.node:
        assert "pkg.torch.onnx.name_scopes" in {p.key for p in node.metadata_props}, node.name


def test_gpt2(gpt2: ModuleType) -> None:
    data = export_onnx(gpt2.gpt2)
    assert len(data) < 1_000_000
    graph = import_model(data)
    assert graph.num_parameters == 124_439_808
    assert len(graph.parameters) == len({t.name for t in graph.parameters})


def test_gpt2_xl_is_a_small_file(gpt2: ModuleType) -> None:
    data = export_onnx(gpt2.gpt2_xl)
    assert len(data) < 2_000_000
    model = onnx.load_from_string(data)
    sizes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    parameters = [name for name, kind in kinds(model).items() if kind == "PARAMETER"]
    assert sum(torch.Size(sizes[name]).numel() for name in parameters) == 1_557_611_200
    tied = next(name for name in parameters if sizes[name] == [50257, 1600])
    users = [node.op_type for node in model.graph.node if tied in node.input]
    assert sorted(users) == ["Gather", "Transpose"]
    assert import_model(data).num_parameters == 1_557_611_200
