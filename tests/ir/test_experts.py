"""Mixtures of experts as people write and export them: recognised, counted, and still computing the same."""

from __future__ import annotations

import functools
import importlib.util
import io
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from long_cases import long_but
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from automap.runtime.operators.apply import run
from automap.runtime.trainer.graph_trainer import with_room
from ir.blocks import find_units
from ir.graph import Graph
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT
from ir.serialize import graph_from_bytes, graph_to_bytes

FORMS = (
    "looked_up_bias", "looked_up_one_by_one", "looked_up_indexed", "looked_up_transposed", "looked_up_einsum", "loop",
    "masked_loop", "where_loop", "noisy_loop", "stacked_loop", "dense", "routed_loop", "routed_by_table",
    "routed_by_mask", "routed_by_choice", "routed_copies",
)  # fmt: skip
ALL = long_but(
    ("routed_loop", "routed_by_mask", "masked_loop", "looked_up_bias", "looked_up_one_by_one", "loop", "dense"), FORMS
)


def _mixtures() -> ModuleType:
    """The sibling module `mixtures`, which `--import-mode=importlib` does not put on the path."""
    name = "automap_test_mixtures"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("mixtures.py"))
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@functools.cache
def imported(name: str, batch: int = 1) -> Graph:
    """The graph of an export of the module."""
    from automap.runtime.torch_export import export_onnx
    from ir.onnx.load import load_model

    torch.set_num_threads(1)
    return load_model(export_onnx(lambda: _mixtures().build(name, batch)), name=name)


def module(name: str, batch: int) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    """With random weights and tokens."""
    torch.manual_seed(0)
    found, (ids,) = _mixtures().build(name, batch)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(std=0.3)
    return found, (torch.randint(0, _mixtures().VOCABULARY, ids.shape),)


@pytest.mark.parametrize("name", ALL)
def test_experts_are_found(name: str) -> None:
    graph, mixtures = imported(name), _mixtures()
    kinds = Counter(op.kind for op in graph)
    assert kinds[DISPATCH] == kinds[COMBINE] == 2
    assert kinds[PRODUCT] == (4 if name == "looked_up_transposed" else 6)
    assert graph.warnings == (BALANCED_LOAD,)
    model, _ = mixtures.build(name)
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    dispatch = next(op for op in graph if op.kind == DISPATCH)
    assert dict(dispatch.attributes) == {"num_experts": 4, "capacity": 6}
    assert dispatch.scope.startswith("layers.0")
    blocks = find_units(graph)
    assert blocks.num_blocks == 2
    # No weights a token: the largest activation is the logits or the slots of gate and up.
    routed = mixtures.LENGTH * mixtures.TOP
    largest = max(t.num_elements for t in graph.tensors.values() if t.role == "activation" and t.batch_dim is not None)
    assert largest <= max(routed * 2 * mixtures.FFN, mixtures.LENGTH * mixtures.VOCABULARY)
    assert graph_from_bytes(graph_to_bytes(graph)) == graph


@pytest.mark.parametrize("name", ALL)
def test_flops_are_those_of_routed_tokens(name: str) -> None:
    mixtures = _mixtures()
    model, inputs = module(name, 1)
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    counted = counter.get_total_flops()
    if not name.startswith(("looked_up", "routed")):  # the counter sees every expert on every token
        products = 3 * 2 * mixtures.LENGTH * mixtures.WIDTH * mixtures.FFN * 2
        counted -= products * (mixtures.EXPERTS - mixtures.TOP)
    assert imported(name).forward_flops == pytest.approx(counted, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_but(["dense"], ["looked_up_indexed", "loop", "dense"]))
def test_the_batch_of_the_export_does_not_matter(name: str) -> None:
    assert imported(name, 3).operators == imported(name).operators


@pytest.mark.parametrize("name", ALL)
def test_the_graph_computes_what_the_module_does(name: str) -> None:
    model, inputs = module(name, 2)
    graph = imported(name)
    with torch.no_grad():
        wanted = model(*inputs)
    found = evaluate(graph, dict(model.named_parameters()), inputs[0])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_weighted_in_front_of_their_experts(batch: int) -> None:
    """A mixture with one expert a token; its FLOPs are those of one expert, and it computes what the module does."""
    mixtures = _mixtures()
    graph = imported("weighted_first", batch)
    kinds = Counter(op.kind for op in graph)
    assert (kinds[DISPATCH], kinds[PRODUCT], kinds[COMBINE], kinds["Tile"]) == (2, 6, 2, 0)
    assert graph.operators == imported("weighted_first").operators
    width, length = mixtures.WIDTH, mixtures.LENGTH
    products = 2 * (3 * mixtures.FFN + mixtures.EXPERTS) * 2 + 2 * mixtures.VOCABULARY
    assert graph.forward_flops == pytest.approx(length * width * products, rel=0.01)
    model, inputs = module("weighted_first", 2)
    with torch.no_grad():
        assert torch.allclose(evaluate(graph, dict(model.named_parameters()), *inputs), model(*inputs), atol=1e-5)


@pytest.mark.parametrize("name", long_but(["routed_one"], ["routed_one", "routed_one_unweighted"]))
def test_one_expert_for_the_tokens_of_a_mask(name: str) -> None:
    """Whether the weight of its expert is in front of the sum or behind it, a token is computed by one expert."""
    mixtures = _mixtures()
    graph = imported(name)
    kinds = Counter(op.kind for op in graph)
    assert (kinds[DISPATCH], kinds[PRODUCT], kinds[COMBINE], kinds["Where"]) == (2, 6, 2, 0)
    products = 2 * (3 * mixtures.FFN + mixtures.EXPERTS) * 2 + 2 * mixtures.VOCABULARY
    assert graph.forward_flops == pytest.approx(mixtures.LENGTH * mixtures.WIDTH * products, rel=0.01)
    model, inputs = module(name, 2)
    with torch.no_grad():
        assert torch.allclose(evaluate(graph, dict(model.named_parameters()), *inputs), model(*inputs), atol=1e-4)


@pytest.mark.slow
def test_samples_are_split_where_experts_read_copies_of_all_tokens() -> None:
    """With two experts a token the layer stays as it is: copies are kept apart from samples."""
    graph = imported("weighted_first_two")
    assert not any(op.kind == DISPATCH for op in graph) and not graph.warnings
    assert graph.tensors[graph.outputs[0]].batch_dim == 0
    model, inputs = module("weighted_first_two", 2)
    with torch.no_grad():
        assert torch.allclose(evaluate(graph, dict(model.named_parameters()), *inputs), model(*inputs), atol=1e-5)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) for n in ("soft", "odd")])
def test_what_is_no_mixture_or_not_understood_is_left(name: str) -> None:
    graph = imported(name)
    assert not {op.kind for op in graph} & {DISPATCH, PRODUCT, COMBINE}
    model, _ = _mixtures().build(name)
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    assert not graph.warnings


def test_separate_experts_become_slices_of_one_parameter() -> None:
    graph = imported("masked_loop")
    assert graph.tensors["layers.1.experts.*.up.weight"].shape == (4, 48, 32)
    assert graph.pieces["layers.1.experts.3.up.weight"] == ("layers.1.experts.*.up.weight", 0, 3, 4)
    assert {"layers.0.shared.up.weight", "layers.0.router.linear.weight"} <= set(graph.tensors)
    assert any(op.name == "layers.0.experts.up/automap.GroupedMatMul" for op in graph)


@pytest.mark.slow
def test_a_fused_parameter_of_gates_and_ups_becomes_two() -> None:
    fused = imported("looked_up_bias")
    assert fused.pieces["layers.0.gate_up#1"] == ("layers.0.gate_up", 1, 48, 96)
    assert {"layers.0.gate_up#0", "layers.0.gate_up#1", "layers.0.down", "layers.0.bias"} <= set(fused.tensors)


class Weighted(nn.Module):
    """All experts run on every token; those that were not chosen weigh nothing. GELU holds constants."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 32), nn.Linear(32, 3)
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            total = total + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
        result: Tensor = self.leave(x + total)
        return result


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
def test_files_with_weights_whose_names_say_nothing(dynamo: bool, tmp_path: Path) -> None:
    """Both of torch's exporters turn weights ahead and give them numbers for names."""
    from ir.onnx.load import load_model

    model = Weighted().eval()
    path = tmp_path / "model.onnx"
    more = {"external_data": False, "verbose": False} if dynamo else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (torch.randn(2, 12, 8),), path, dynamo=dynamo, **more)
    graph = load_model(path.read_bytes())
    kinds = Counter(op.kind for op in graph)
    assert (kinds[DISPATCH], kinds[PRODUCT], kinds[COMBINE]) == (1, 2, 1)
    assert graph.num_parameters == sum(p.numel() for p in model.parameters())
    rows = 8 * 32 + 32 * 4 + 2 * (32 * 64 + 64 * 32) + 32 * 3
    assert graph.forward_flops == 2 * 12 * rows


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    long_but(
        ["routed_loop", "routed_by_mask", "routed_copies"],
        ["routed_loop", "routed_by_table", "routed_by_mask", "routed_by_choice", "routed_copies"],
    ),
)
def test_experts_on_routed_tokens_of_the_older_exporter(name: str) -> None:
    """Their sums begin with stored zeros, which are no parameters, also where a stripped file does not hold them."""
    from ir.onnx.load import load_model
    from ir.onnx.strip import strip

    model, (ids,) = _mixtures().build(name, 2)
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (ids,), file, dynamo=False)
    for data in (file.getvalue(), strip(file.getvalue()).data):
        graph = load_model(data)
        kinds = Counter(op.kind for op in graph)
        assert (kinds[DISPATCH], kinds[PRODUCT], kinds[COMBINE]) == (2, 6, 2)
        assert graph.num_parameters == sum(p.numel() for p in model.parameters())
        assert graph.forward_flops == imported(name).forward_flops


# The graph with torch


def evaluate(graph: Graph, parameters: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The first output, for a batch of samples; every expert has a slot for every token."""
    values = {t.name: parameter(graph, parameters, t.name) for t in graph.tensors.values() if t.role == "parameter"}
    values |= {t.name: ids for t in graph.tensors.values() if t.role == "input"}
    with torch.no_grad():
        return run(with_room(graph), values, len(ids))[graph.outputs[0]]


def parameter(graph: Graph, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """A parameter of the graph: of the file, a piece of one, or a stack of several."""
    if name in parameters:
        return parameters[name].detach()
    if name in graph.pieces:
        whole, dim, start, stop = graph.pieces[name]
        return parameter(graph, parameters, whole).narrow(dim, start, stop - start)
    slices = sorted((start, n) for n, (whole, _, start, _) in graph.pieces.items() if whole == name)
    return torch.stack([parameters[n].detach() for _, n in slices])
