from __future__ import annotations

import importlib.util
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from long_cases import long_but
from ort_oracle import compare
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from automap.errors import ModelError
from automap.runtime.operators.apply import run
from automap.runtime.torch_export import _unchecked, export_onnx
from automap.runtime.trainer.training_graph import input_names
from ir.attention_windows import CAUSAL, EVERYTHING, Window, attention_masks
from ir.groups import fused_groups
from ir.linkage import operator_signatures
from ir.loss import with_loss
from ir.onnx.load import load_model
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


class Branching(nn.Module):
    """Branches on the values of a tensor, in a module of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if bool((x.sum() > 0).item()) else x


class Turned(nn.Module):
    """Turns pairs of numbers as complex ones."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        angles = torch.arange(float(pairs.shape[-1]))
        turned = pairs * (1.5 * torch.polar(torch.ones_like(angles), angles)).unsqueeze(0)
        return torch.view_as_real(turned * x.sum()).flatten(-2)


class Grown(nn.Module):
    """Takes powers of complex numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)).exp()).flatten(-2)


class Nowhere(nn.Module):
    """Makes tensors without saying on which device, and has a part that nothing reads and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(32, 8), nn.Embedding(6, 8)
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.table(ids) + self.places(torch.arange(length))
        mixed = torch.softmax(x @ x.transpose(1, 2) + torch.full((length, length), -1e9).triu(1), -1) @ x
        result: Tensor = self.head(mixed)
        return result


class Constants(nn.Module):
    """Makes constants on the way, in each manner that has a device of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        limit = torch.tensor([-0.5, 0.25], device=x.device) + x.new_tensor([1.0, 3.0])
        chosen = x[:, [-2, 0]] + x[:, [1]]
        return chosen * limit + torch.as_tensor(2.0, device=x.device) + x[..., [True, False, False, True]]


class Merged(nn.Module):
    """Multiplies heads of all samples in one dim, as Bloom does: one sample broadcasts with the heads alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (x * self.weight).unflatten(2, (2, 2)).transpose(1, 2)
        scores = torch.softmax(heads @ heads.mT, -1)
        merged = heads.reshape(-1, x.shape[1], 2)
        values = torch.tanh(merged)
        return torch.bmm(scores.reshape(-1, x.shape[1], x.shape[1]), values).view(x.shape[0], 2, x.shape[1], 2)


class Detector(Branching):
    """A module that branches, of torchvision's detectors by its name."""

    __module__ = "torchvision.models.detection.rpn"


class Foreign(nn.Module):
    """Uses an operator that ONNX lacks."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x @ x.mT)


class Wrong(nn.Module):
    """Does not fit its operand."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class Within(nn.Module):
    """A linear layer, then another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        result: Tensor = self.inner(self.first(x))
        return result if scale is None else result * scale


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


@pytest.fixture(scope="module")
def built() -> bytes:
    """The file of `build`."""
    return export_onnx(build)


def test_nothing_of_this_machine_is_in_the_file(built: bytes) -> None:
    for text in (str(ROOT), __file__, "torch_export.py", ".py", "stack_trace"):
        assert text.encode() not in built, text


def test_exports_are_equal(built: bytes) -> None:
    assert export_onnx(build) == built


def test_every_operator_knows_its_module(built: bytes) -> None:
    model = onnx.load_from_string(built)
    for node in model.graph.node:
        assert "pkg.torch.onnx.name_scopes" in {p.key for p in node.metadata_props}, node.name


def test_gpt2_is_exported_without_weights_and_with_all_parameters(gpt2: ModuleType) -> None:
    data = export_onnx(gpt2.gpt2)
    assert len(data) < 1_000_000
    graph = import_model(data)
    assert graph.num_parameters == 124_439_808
    assert len(graph.parameters) == len({t.name for t in graph.parameters})


@pytest.mark.slow
@pytest.mark.long
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


X = torch.zeros(1, 4, 4)


@pytest.mark.parametrize("inputs", [X, (X,), {"x": X}, {"x": X, "scale": X}], ids=["one", "tuple", "named", "keyword"])
def test_inputs_in_every_form(inputs: Tensor | tuple[Tensor, ...] | dict[str, Tensor]) -> None:
    graph = import_model(export_onnx(lambda: (Within(nn.GELU()), inputs)))
    names = inputs if isinstance(inputs, dict) else {"x": X}
    assert [t.name for t in graph.tensors.values() if t.role == "input"] == list(names)


class Scaled(nn.Module):
    """`torch.Tensor(…)` makes a tensor on the CPU, whatever the default device is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.Tensor(4).uniform_())
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.scale * x)


def test_a_module_that_was_built_before_is_exported_as_one_without_values() -> None:
    """The optimiser folds what is computed from values, and transposed weights would be constants of the file."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4, bias=False))

    made_before = build()
    graph = import_model(export_onnx(lambda: (made_before, torch.zeros(1, 3, 4))))
    fresh = import_model(export_onnx(lambda: (build(), torch.zeros(1, 3, 4))))
    assert graph.num_parameters == sum(p.numel() for p in made_before.parameters()) and not graph.warnings
    assert graph.operators == fresh.operators and all(p.device.type == "cpu" for p in made_before.parameters())


def test_parameters_and_inputs_on_the_cpu_and_on_the_meta_device() -> None:
    made_before = Scaled()
    values = made_before.scale.detach().clone()
    for build in (
        lambda: (Scaled(), torch.zeros(1, 4)),
        lambda: (Scaled(), torch.zeros(1, 4, device="cpu")),
        lambda: (made_before, torch.zeros(1, 4)),
    ):
        assert import_model(export_onnx(build)).num_parameters == 4 + 16 + 4
    assert torch.equal(made_before.scale, values)


@pytest.mark.parametrize(
    ("inner", "where", "why"),
    [
        (Branching, "inner (Branching, test_torch_export.py line", "values of a tensor"),
        (Detector, "inner (Detector, ", "Export backbone and heads alone: docs/models.md"),
        (Foreign, "inner uses aten.", "torch.onnx cannot write"),
        (Wrong, "inner", "cannot be exported"),
        (Grown, "got Within", "complex numbers"),
    ],
    ids=["branch", "detector", "operator", "shapes", "complex"],
)
def test_a_failure_is_one_sentence_that_names_the_module(
    inner: type[nn.Module], where: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        export_onnx(lambda: (Within(inner()), X))
    said = str(caught.value)
    assert where in said
    assert why in said
    assert "\n" not in said
    assert len(said) < 600
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")  # torch itself writes pages


def test_a_failure_names_no_module_before_the_one_at_fault() -> None:
    """The exporter takes the results of a batch norm apart: no function of torch does that."""
    with pytest.raises(ModelError, match=r"^module: 1 uses aten"):
        export_onnx(lambda: (nn.Sequential(nn.BatchNorm1d(4), Foreign()), torch.zeros(2, 4, 4)))


def test_products_of_complex_numbers_are_those_of_pairs() -> None:
    """As rotary embeddings of DeepSeek-V2 and Llama 4 write them; onnxruntime computes what the module does."""
    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    session = onnxruntime.InferenceSession(export_onnx(lambda: (Turned(), x)))
    (found,) = session.run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), Turned()(x), rtol=1e-5, atol=1e-5)


class Squeezed(nn.Module):
    """Takes away a dim that is there only for some settings of the model."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.head = rows, nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.view(len(x), self.rows, 8).squeeze(1))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_dim_that_pytorch_does_not_squeeze_stays(batch: int) -> None:
    for rows, shape in ((5, (1, 5, 4)), (1, (1, 4))):
        graph = load_model(export_onnx(lambda rows=rows: (Squeezed(rows), torch.zeros(batch, rows * 8))))
        result = graph.tensors[graph.outputs[0]]
        assert (result.shape, result.batch_dim, graph.num_parameters) == (shape, 0, 36)


class Checked(nn.Module):
    """Checks what it computes, as torch does in functions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(1.0, 9.0, device=x.device)
        torch._check_tensor_all(places > 0)
        return self.head(x / places)


def test_checks_of_values_are_no_part_of_a_graph() -> None:
    graph = load_model(export_onnx(lambda: (Checked(), torch.zeros(1, 8))))
    assert graph.num_parameters == 36 and [op.kind for op in graph if op.is_live][-1] in ("Add", "Gemm")


def test_distributions_check_their_arguments_again_after_an_export() -> None:
    with _unchecked():
        torch.distributions.Normal(0.0, -1.0)
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(0.0, -1.0)


def test_tensors_made_without_a_device_and_parameters_that_nothing_reads() -> None:
    graph = import_model(export_onnx(lambda: (Nowhere(), torch.zeros(1, 6, dtype=torch.int64))))
    assert graph.num_parameters == 32 * 8 + 6 * 8
    (warning,) = graph.warnings
    assert warning.startswith("280 of 584 parameters are not in the graph")
    assert "tower (280)" in warning and "head" not in warning


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.Hardtanh(-1.0, 2.0), nn.Softplus(2.0)])
def test_literals_of_functions_are_no_parameters(activation: nn.Module, tmp_path: Path) -> None:
    """As torch's own exporter writes a file with weights: it computes casts of the literals ahead."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), activation, nn.Flatten(), nn.Linear(4 * 36, 2)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = torch.randn(2, 3, 8, 8)
        torch.onnx.export(network, (image,), tmp_path / "a.onnx", dynamo=True, verbose=False, external_data=False)
    graph = load_model((tmp_path / "a.onnx").read_bytes())
    assert graph.num_parameters == sum(p.numel() for p in network.parameters())


def failing() -> tuple[nn.Module, Tensor]:
    raise ValueError("no such width\nand more")


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (failing, "the function fails in line"),
        (lambda: None, "returns no module"),
        (lambda: Within(nn.GELU()), "no example inputs"),
        (lambda: (Within(nn.GELU()), 3), "no example inputs"),
    ],
    ids=["raises", "nothing", "module", "number"],
)
def test_what_the_function_returns(made: Callable[[], Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        export_onnx(made)
    assert "\n" not in str(caught.value)


class Grouped(nn.Module):
    """Attention whose keys and values are shared by groups of queries, as torch computes it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(2, dim=1) for y in (k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("batch", [1, 3])
def test_heads_of_torch_attention_can_be_split(batch: int) -> None:
    data = export_onnx(lambda: (Grouped(), torch.zeros(batch, 6, 16)))
    graph = import_model(data)
    assert batch > 1 or compare(data) < 1e-5  # the oracle runs one sample
    products = [op for op in graph.operators if op.kind == "MatMul" and len(graph.tensors[op.inputs[1]].shape) > 2]
    assert len(products) == 2
    for op in products:
        assert any(
            [graph.tensors[name].shape[p] for name, p in zip(op.inputs, s.inputs, strict=True) if p == 1] == [4, 4]
            for s in operator_signatures(graph, op)
        )


class Coded(nn.Module):
    """An encoder and a decoder of torch, whose masks are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(16, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        y: Tensor = self.both(x, x, src_mask=mask, tgt_mask=mask)
        return y


def test_masks_of_torch_transformers_are_read() -> None:
    """Torch looks whether they are causal, which their values alone would say."""
    own = nn.modules.transformer._detect_is_causal_mask
    data = export_onnx(lambda: (Coded(), torch.zeros(1, 6, 16)))
    assert nn.modules.transformer._detect_is_causal_mask is own
    assert compare(data) < 1e-5
    windows = [found.window for found in attention_masks(import_model(data)).values()]
    assert sorted(windows, key=str) == sorted([CAUSAL, CAUSAL, EVERYTHING], key=str)


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], Window]] = {
    "compared positions": (lambda at: at[None, :] <= at[:, None], CAUSAL),
    "triangle": (lambda at: torch.ones(len(at), len(at), dtype=torch.bool, device=at.device).tril(), CAUSAL),
    "not compared": (lambda at: at[None, :] != at[:, None], EVERYTHING),
    "a constant": (lambda at: torch.ones(len(at), len(at), dtype=torch.bool, device=at.device), EVERYTHING),
    "compared with a number": (lambda at: (at[None, :] - at[:, None]) > -3, Window(left=2)),
    "a window": (lambda at: (at[None, :] - at[:, None]).abs() <= 3, Window(left=3, right=3)),
}
"""Name: (the mask from [positions], which keys it shows)."""


@pytest.mark.parametrize("size", [8, 2048], ids=["folded", "computed"])
@pytest.mark.parametrize("mask", long_but(("compared positions", "not compared"), MASKS))
def test_a_mask_is_known_however_it_is_made(mask: str, size: int) -> None:
    make, window = MASKS[mask]

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)[:, None]
            return nn.functional.scaled_dot_product_attention(
                y, y, y, attn_mask=make(torch.arange(size, device=x.device))
            )

    graph = import_model(export_onnx(lambda: (Masked(), torch.zeros(1, size, 4))))
    assert [found.window for found in attention_masks(graph).values()] == [window]


class Rendered(nn.Module):
    """Light that passes all samples in front of each one, and the logarithm of a density that checks its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        density = torch.distributions.Normal(y, y.square() + 1.0).log_prob(x + 1.0)
        return density + torch.cumprod(y, 1) + torch.cumprod(y, -1)


class Tailed(nn.Module):
    """The logarithm of a density of Student's t, whose degrees of freedom are computed: models of time series."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        degrees = 0.01 + (x * self.weight).exp()
        return torch.distributions.StudentT(degrees, x).log_prob(x.square())


@pytest.mark.parametrize(("kind", "shape"), [(Constants, (4,)), (Merged, (3, 4)), (Rendered, (5, 4)), (Tailed, (5, 4))])
def test_a_file_computes_the_same_at_other_batches(kind: type[nn.Module], shape: tuple[int, ...]) -> None:
    graph = load_model(export_onnx(lambda: (kind(), torch.zeros(1, *shape))))
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    found = run(graph, {"x": x, "weight": torch.ones(4)}, 3)
    torch.testing.assert_close(found[graph.outputs[0]], kind()(x))


class Gamma(nn.Module):
    """The logarithm of the gamma function of every element times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.lgamma(x * self.weight)


def test_the_logarithm_of_the_gamma_function_is_that_of_torch_on_both_sides_of_zero() -> None:
    """Also between, near and at the poles, in the interpreter and in onnxruntime, and with its gradient."""
    drawn = torch.empty(400).uniform_(-9.0, 9.0, generator=torch.Generator().manual_seed(0))
    near = torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0, 40.0])[:, None] + torch.tensor([-1e-3, 1e-3])
    x = torch.cat([drawn, near.flatten(), torch.tensor([-60.3, 1e-20, -1e-20])])[None].requires_grad_()
    data = export_onnx(lambda: (Gamma(), torch.zeros(1, x.shape[1])))
    graph = load_model(data)
    (found,) = (run(graph, {"x": x, "weight": torch.ones(())}, 1)[name] for name in graph.outputs)
    torch.testing.assert_close(found, torch.lgamma(x), rtol=1e-5, atol=1e-5)
    (slope,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(slope, torch.digamma(x.detach()), rtol=1e-4, atol=1e-4)
    poles = torch.tensor([0.0, -1.0, -7.0]).repeat(x.shape[1])[: x.shape[1]][None]
    session = onnxruntime.InferenceSession(data)
    for values in (x.detach(), poles):
        (other,) = session.run(None, {"x": values.numpy(), "weight": torch.ones(()).numpy()})
        torch.testing.assert_close(torch.from_numpy(other), torch.lgamma(values), rtol=1e-5, atol=1e-5)


class Bagged(nn.Module):
    """Two tables whose rows are summed, each in a loop of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(rows, 4, mode="sum") for rows in (50, 20)])
        self.head = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.cat([table(ids[:, i]) for i, table in enumerate(self.tables)], 1))


@pytest.mark.parametrize("is_turned", [False, True])
def test_tables_of_bags_are_read_in_the_bodies_of_loops(is_turned: bool) -> None:
    """What a loop carries, the bags and their number, has no certain order."""
    data = export_onnx(lambda: (Bagged(), {"ids": torch.zeros(2, 2, 3, dtype=torch.int64)}))
    model = onnx.load_model_from_string(data)
    for loop in (node for node in model.graph.node if node.op_type == "Loop") if is_turned else ():
        body = loop.attribute[0].g
        for names, first in ((loop.input, 2), (loop.output, 0), (body.input, 2), (body.output, 1)):
            pair = list(names[first : first + 2])[::-1]
            del names[first:]
            names.extend(pair)
    graph = load_model(model.SerializeToString())
    assert not graph.warnings
    assert graph.num_parameters == 70 * 4 + 9
    assert not [op for op in graph if op.kind == "Loop"]


class Alike(nn.Module):
    """Arguments with the names of a parameter and of a buffer, the second argument left out."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor, other: Tensor | None = None, scale: Tensor | None = None, shift: Any = 0.0) -> Tensor:
        result: Tensor = x * self.scale * (1.0 if scale is None else scale) + self.shift + shift
        return result


def test_arguments_may_have_the_names_of_parameters_and_buffers() -> None:
    given = {name: torch.randn(3, 4) for name in ("x", "scale", "shift")}
    graph = with_loss(load_model(export_onnx(lambda: (Alike(), {name: torch.randn(1, 4) for name in given}))))
    assert {tensor.name for tensor in graph.tensors.values() if tensor.role == "parameter"} == {"scale"}
    module = Alike()
    nn.init.normal_(module.scale)
    nn.init.normal_(module.shift)
    names = input_names(graph, module)
    assert names == ("x", "scale", "shift")
    files = dict(zip((tensor.name for tensor in graph.data_inputs), given.values(), strict=True))
    values = {**dict(module.named_parameters()), **dict(module.named_buffers()), **files}
    found = run(graph, {**values, "labels": torch.zeros(3, dtype=torch.int64)}, 3)
    torch.testing.assert_close(found[graph.outputs[0]], module(**dict(zip(names, given.values(), strict=True))))


class Windows(nn.Module):
    """Attention inside windows, `[b, heads, windows, tokens, size]`, as Hiera has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).reshape(x.shape[0], 4, -1, 3, 2, 8).permute(3, 0, 4, 2, 1, 5)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.permute(0, 3, 2, 1, 4).reshape(x.shape))


def test_attention_of_five_dims() -> None:
    """The exporter's own translation takes four; parameters and arithmetic are those that torch counts."""
    with sdpa_kernel([SDPBackend.MATH]), FlopCounterMode(display=False) as counted:
        module = Windows()
        module(torch.zeros(1, 32, 16))
    graph = load_model(export_onnx(lambda: (Windows(), torch.zeros(1, 32, 16))))
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    assert graph.forward_flops == counted.get_total_flops()
    assert [group.kind for group in fused_groups(graph)] == ["attention"] and not graph.warnings


class LearnedMask(nn.Module):
    """Attention with a mask that a layer computes, as Doge has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mask, self.out = nn.Linear(64, 192), nn.Linear(64, 4), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(x.shape[0], -1, 3, 4, 16).permute(2, 0, 3, 1, 4)
        mask = self.mask(x).transpose(1, 2)[:, :, None].expand(-1, -1, x.shape[1], -1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))


def test_attention_of_a_built_module_with_a_mask_that_is_trained() -> None:
    """What requires a gradient decides which kernel torch takes on a CPU, and which strides its result has."""
    module = LearnedMask()
    with sdpa_kernel([SDPBackend.MATH]), FlopCounterMode(display=False) as counted:
        module(torch.zeros(1, 64, 64))
    graph = load_model(export_onnx(lambda: (module, torch.zeros(1, 64, 64))))
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    assert graph.forward_flops == counted.get_total_flops()
