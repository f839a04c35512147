"""Parameters that an optimiser stored once for each sample of the export are those of one sample."""

import io
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from automap.runtime.operators.apply import run
from ir.onnx.load import load_model
from ir.onnx.strip import strip

WIDTH, LENGTH = 16, 6
RANDOM = np.random.default_rng(0)


class Reader(nn.Module):
    """A class token in front of the samples, and learned queries that read them."""

    def __init__(self, *, is_inner: bool) -> None:
        super().__init__()
        tokens = {"token": (1, 1, WIDTH), "queries": (1, 4, WIDTH)}
        self.held = nn.ParameterDict({n: nn.Parameter(torch.randn(s)) for n, s in tokens.items()}) if is_inner else None
        self.token, self.queries = (None if is_inner else nn.Parameter(torch.randn(s)) for s in tokens.values())
        self.embed, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        token, queries = (self.token, self.queries) if self.held is None else self.held.values()
        x = torch.cat([token.expand(x.shape[0], -1, -1), self.embed(x)], 1)
        queries = queries.repeat(x.shape[0], 1, 1)
        return torch.softmax(queries @ self.keys(x).transpose(1, 2), -1) @ x


class Decoder(nn.Module):
    """As in DETR: queries are zeros at first, and their positions are what is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.norm = nn.Embedding(4, WIDTH), nn.LayerNorm(WIDTH)
        self.own, self.content, self.place, self.wave, self.keys = (nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        places = self.places.weight[None].repeat(b, 1, 1)
        content = self.norm(torch.zeros_like(places) + self.own(places))
        first = (self.content(content) + self.place(places)).view(b, 4, 2, WIDTH // 2)
        both = torch.cat([first, self.wave(places.sin()).view(b, 4, 2, WIDTH // 2)], -1)
        return both.permute(0, 2, 1, 3) @ torch.cat([self.keys(x), x], -1).view(b, LENGTH, 2, WIDTH).permute(0, 2, 3, 1)


class Messages(nn.Module):
    """Nodes of a graph add what their neighbours send, to zeros of their own shape, and mix it with what they had."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"send": nn.Linear(WIDTH, WIDTH), "own": nn.LayerNorm(WIDTH)})
        self.inner.register_parameter("share", nn.Parameter(torch.rand(WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        at = x.sum(-1, keepdim=True).long().clamp(0, LENGTH - 1).expand_as(x)
        sent = torch.zeros_like(x).scatter_add(1, at, torch.relu(self.inner["send"](x)))
        return torch.lerp(self.inner["own"](x), sent, self.inner.share)


class Rotated(nn.Module):
    """Rotary embedding by a buffer of a module inside, which the exporter leaves out for what it computes of it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.rotary, self.name = nn.Linear(WIDTH, WIDTH), nn.Module(), name
        self.rotary.register_buffer(name, 1.0 / 100 ** (torch.arange(WIDTH // 2) / WIDTH * 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(LENGTH, dtype=torch.float32)[:, None] * getattr(self.rotary, self.name)
        angles, x = torch.cat([angles, angles], -1)[None], self.linear(x)
        return x * angles.cos() + torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], -1) * angles.sin()


class Scaled(nn.Module):
    """Keys are divided by a root that the module computes of a literal, as DeBERTa's are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = layer(x) / torch.sqrt(torch.tensor(WIDTH, dtype=torch.float) * 3)
        return self.out(x)


def exported(module: nn.Module, batch: int, *, dynamo: bool = True) -> bytes:
    file = io.BytesIO()
    x = torch.randn(batch, LENGTH, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            torch.onnx.export(module.eval(), (x,), dynamo=True, opset_version=20, verbose=False).save(file)
        else:
            torch.onnx.export(module.eval(), (x,), file, dynamo=False, opset_version=18)
    return file.getvalue()


def optimised(data: bytes, folder) -> bytes:
    settings = onnxruntime.SessionOptions()
    settings.optimized_model_filepath = str(folder / "optimised.onnx")
    settings.log_severity_level = 3
    onnxruntime.InferenceSession(data, settings, providers=["CPUExecutionProvider"])
    return (folder / "optimised.onnx").read_bytes()


@pytest.mark.parametrize("is_inner", [False, True], ids=["own", "of a module inside"])
def test_parameters_do_not_grow_with_the_exported_batch(is_inner, tmp_path):
    module = Reader(is_inner=is_inner)
    wanted = sum(p.numel() for p in module.parameters())
    flops = set()
    for batch in (1, 3):
        data = exported(module, batch)
        for file in (data, optimised(data, tmp_path), strip(optimised(data, tmp_path)).data):
            graph = load_model(file)
            assert graph.num_parameters == wanted
            flops.add(graph.forward_flops)
    assert len(flops) == 1


def random(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("dynamo", [False, True])
def test_what_is_computed_of_learned_queries_costs_the_same_at_any_exported_batch(dynamo):
    module = random(Decoder())
    one, four = (load_model(exported(module, batch, dynamo=dynamo)) for batch in (1, 3))
    assert one.num_parameters == four.num_parameters and one.forward_flops == four.forward_flops


def test_numbers_that_are_no_weights_are_no_parameters():
    """Zeros in the shape of a result, and 1 less a weight, which the exporter computes."""
    module = random(Messages())
    assert {load_model(exported(module, batch)).num_parameters for batch in (1, 3)} == {(WIDTH + 4) * WIDTH}


def test_a_number_that_a_module_inside_computes_of_a_literal_is_no_parameter():
    outer = nn.Sequential(Scaled(), Scaled())
    graph = load_model(exported(random(outer), 1))
    assert graph.num_parameters == 6 * (WIDTH + 1) * WIDTH


@pytest.mark.parametrize("name", ["sliding_attention_inv_freq", "speeds"])
def test_tables_of_a_buffer_are_no_parameters(name):
    data = exported(random(Rotated(name)), 1)
    assert load_model(data).num_parameters == (WIDTH + 1) * WIDTH
    if name.endswith("inv_freq"):
        assert load_model(strip(data).data).num_parameters == (WIDTH + 1) * WIDTH


def test_a_filter_that_all_channels_share_keeps_its_channels():
    """There are as many channels as samples."""
    blur = np.repeat(RANDOM.normal(size=(1, 1, 3, 3)), 3, 0).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "blur"], ["y"], group=3)]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, (3, 3, s, s)) for n, s in (("x", 8), ("y", 6)))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(blur, "blur")])
    found = load_model(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    assert found.num_parameters == 27 and found.forward_flops == 2 * 3 * 9 * 36


@pytest.mark.parametrize("pairs", [3, 700], ids=["read as a number", "left as an operator"])
@pytest.mark.parametrize("stored_for_all", [True, False])
def test_a_table_of_all_samples_whose_columns_are_repeated(pairs, stored_for_all):
    """As rotary positions of LTX-Video: `repeat_interleave(2, -1)` of a table that is stored or expanded for 2."""
    table = RANDOM.normal(size=(1, LENGTH, pairs, 1)).astype(np.float32)
    weight = RANDOM.normal(size=(2 * pairs + 1, WIDTH)).astype(np.float32)
    held = {
        "table": np.repeat(table, 2, 0) if stored_for_all else table, "ones": np.ones((2, LENGTH, 1), np.float32),
        "twice": np.array([1, 1, 1, 2] if stored_for_all else [2, LENGTH, pairs, 2]), "flat": np.array([2, LENGTH, -1]),
    }  # fmt: skip
    node = helper.make_node
    nodes = [
        *(node("Constant", [], [name], value=numpy_helper.from_array(value)) for name, value in held.items()),
        node("Expand", ["table", "twice"], ["each"]), node("Reshape", ["each", "flat"], ["row"]),
        node("Concat", ["ones", "row"], ["all"], axis=-1), node("Mul", ["x", "all"], ["turned"]),
        node("MatMul", ["turned", "weight"], ["y"]),
    ]  # fmt: skip
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, (2, LENGTH, s))
        for n, s in (("x", len(weight)), ("y", WIDTH))
    )
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weight, "weight")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    found = load_model(model.SerializeToString())
    assert found.num_parameters == weight.size and not found.warnings
    data = RANDOM.normal(size=(1, LENGTH, len(weight))).astype(np.float32)
    both = np.concatenate([data, data])
    wanted, _ = onnxruntime.InferenceSession(model.SerializeToString()).run(["y"], {"x": both})[0]
    values = {name: torch.from_numpy(v) for name, v in {"x": data, "weight": weight, "table": table}.items()}
    result = run(found, {n: v for n, v in values.items() if n in found.tensors}, 1)[found.outputs[0]]
    np.testing.assert_allclose(result[0].numpy(), wanted, rtol=1e-3, atol=1e-4)
