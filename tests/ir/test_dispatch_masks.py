"""GShard's mixtures of experts, whose one-hot masks dispatch the tokens of all samples at once (arXiv 2006.16668)."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Mapping
from io import BytesIO

import onnx
import pytest
import torch
from long_cases import long_but
from onnx import numpy_helper
from torch import Tensor, nn
from torch.nn import functional

from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.runtime.operators.apply import run
from automap.runtime.torch_export import export_onnx
from automap.runtime.trainer.graph_trainer import with_room
from automap.space.space import PlanSpace
from ir.errors import ModelError
from ir.graph import Graph
from ir.onnx.load import load_model
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT

VOCABULARY, LENGTH, WIDTH, FFN, EXPERTS = 80, 12, 32, 48, 4


def one_choice(scores: Tensor, capacity: int) -> Tensor:
    """Masks of the Switch Transformer: weights are the scores themselves."""
    mask = functional.one_hot(scores.argmax(-1), EXPERTS).to(scores.dtype)
    place = torch.cumsum(mask, 0) * mask - mask
    mask = mask * (place < capacity)
    slot = functional.one_hot((place * mask).sum(-1).long(), capacity).to(scores.dtype)
    return torch.einsum("s,se,sc->sec", (scores * mask).sum(-1), mask, slot)


def two_choices(scores: Tensor, capacity: int) -> Tensor:
    """Masks of GShard: the second expert is the best of the others, and both weights add up to one."""
    first = functional.one_hot(scores.argmax(1), EXPERTS)
    second = functional.one_hot(scores.masked_fill(first.bool(), float("-inf")).argmax(1), EXPERTS)
    places = torch.cumsum(first, 0) - 1, torch.cumsum(second, 0) - 1 + first.sum(0, keepdim=True)
    masks = [mask * (place < capacity) for mask, place in zip((first, second), places, strict=True)]
    weights = [(scores * mask).sum(1) for mask in masks]
    total = torch.clamp(weights[0] + weights[1], min=1e-9)
    found = []
    for mask, place, weight in zip(masks, places, weights, strict=True):
        slot = functional.one_hot((place * mask).sum(1), capacity).to(scores.dtype)
        found.append(torch.einsum("se,sc->sec", (weight / total)[:, None] * mask, slot))
    return found[0] + found[1]


class Layer(nn.Module):
    """A layer of experts with room for `factor` times the routed tokens."""

    def __init__(self, form: str, factor: float) -> None:
        super().__init__()
        self.form, self.factor = form, factor
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.choices = 2 if "two" in form else 1
        if "list" in form or "picked" in form:
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, FFN), nn.ReLU(), nn.Linear(FFN, WIDTH)) for _ in range(EXPERTS)
            )
        else:
            self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, FFN).normal_(std=0.3))
            self.down = nn.Parameter(torch.empty(EXPERTS, FFN, WIDTH).normal_(std=0.3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        scores = functional.softmax(self.router(tokens), -1)
        capacity = int(self.factor * self.choices * tokens.shape[0] / EXPERTS)
        combine = (two_choices if self.choices == 2 else one_choice)(scores, capacity)
        dispatch = (combine > 0).to(x.dtype)
        if "matrices" in self.form:
            slots = torch.matmul(dispatch.reshape(tokens.shape[0], -1).t(), tokens).reshape(EXPERTS, capacity, WIDTH)
        else:
            slots = torch.einsum("sec,sm->ecm", dispatch, tokens)
        if "list" in self.form:
            parts = zip(self.experts, slots.chunk(EXPERTS, 0), strict=True)
            results = torch.cat([expert(part) for expert, part in parts], 0)
        elif "picked" in self.form:
            results = torch.stack([expert(slots[number]) for number, expert in enumerate(self.experts)])
        elif "einsum" in self.form:
            hidden = torch.einsum("ecm,emf->ecf", slots, self.up).relu()
            results = torch.einsum("ecf,efm->ecm", hidden, self.down)
        else:
            results = torch.bmm(torch.bmm(slots, self.up).relu(), self.down)
        if "matrices" in self.form:
            combined = torch.matmul(combine.reshape(tokens.shape[0], -1), results.reshape(-1, WIDTH))
        else:
            combined = torch.einsum("sec,ecm->sm", combine, results)
        return combined.reshape(x.shape)


class Mixture(nn.Module):
    """Two residual layers between an embedding and a head."""

    def __init__(self, form: str, factor: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.layers = nn.ModuleList(Layer(form, factor) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


FORMS = (
    "one, einsum",
    "two, einsum",
    "one, matrices",
    "two, matrices",
    "two, list",
    "one, matrices, list",
    "one, picked",
)
ALL = [pytest.param(form, marks=() if form == FORMS[1] else pytest.mark.slow) for form in FORMS]


def built(form: str, factor: float = 1.0) -> Mixture:
    torch.manual_seed(0)
    return Mixture(form, factor)


def exported(module: nn.Module, data: Tensor) -> bytes:
    """The file of torch's older exporter, with weights."""
    torch.set_num_threads(1)
    file = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (data,), file, dynamo=False, input_names=["data"])
    return file.getvalue()


def ids_of(batch: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0))


@functools.cache
def imported(form: str, batch: int = 2, *, dynamo: bool = False, factor: float = 1.0) -> Graph:
    """The graph of an export."""
    if dynamo:
        return load_model(export_onnx(lambda: (built(form, factor), (ids_of(batch),))), name=form)
    return load_model(exported(built(form, factor), ids_of(batch)), name=form)


@pytest.mark.parametrize("form", ALL)
def test_masks_become_dispatch_and_combine(form: str) -> None:
    graph = imported(form)
    kinds = Counter(op.kind for op in graph)
    assert kinds[DISPATCH] == kinds[COMBINE] == kinds["TopK"] == 2
    assert kinds[PRODUCT] == 4
    assert not {"Einsum", "CumSum", "OneHot", "ArgMax"} & set(kinds), "nothing is left of the masks"
    assert graph.warnings == (BALANCED_LOAD,)
    assert graph.num_parameters == sum(p.numel() for p in built(form).parameters())
    choices = 2 if "two" in form else 1
    dispatch = next(op for op in graph if op.kind == DISPATCH)
    assert dict(dispatch.attributes) == {"num_experts": EXPERTS, "capacity": choices * LENGTH // EXPERTS}
    # Router and head see every token once, experts as many slots as there are routed tokens.
    rows = 2 * (WIDTH * EXPERTS + choices * 2 * WIDTH * FFN) + WIDTH * VOCABULARY
    assert graph.forward_flops == pytest.approx(2 * LENGTH * rows)


@pytest.mark.slow
@pytest.mark.parametrize("form", long_but(("one, einsum", "two, list"), FORMS))
def test_neither_batch_nor_exporter_matter(form: str) -> None:
    def shapes(graph: Graph) -> list[tuple[str, tuple[int, ...], int | None]]:
        made = [(op.kind, graph.tensors[op.outputs[0]]) for op in graph if op.kind not in ("Identity", "Transpose")]
        return [(kind, tensor.shape, tensor.batch_dim) for kind, tensor in made]

    assert shapes(imported(form, 4)) == shapes(imported(form))
    assert imported(form, dynamo=True).forward_flops == imported(form).forward_flops
    assert imported(form, dynamo=True).num_parameters == imported(form).num_parameters


@pytest.mark.parametrize("form", ALL)
def test_the_graph_computes_what_the_module_does(form: str) -> None:
    """With room for all tokens in one expert, so that none is dropped."""
    module, ids = built(form, EXPERTS), ids_of(2)
    file = exported(module, ids)
    graph = load_model(file)
    # The exporter stores turned weights under names of its own, and equal ones once.
    stored = {name: value.detach() for name, value in module.named_parameters()}
    stored |= {t.name: torch.tensor(numpy_helper.to_array(t)) for t in onnx.load_from_string(file).graph.initializer}
    values = {t.name: parameter(graph, stored, t.name) for t in graph.tensors.values() if t.role == "parameter"}
    values |= {t.name: ids for t in graph.tensors.values() if t.role == "input"}
    with torch.no_grad():
        found = run(with_room(graph), values, len(ids))[graph.outputs[0]]
        torch.testing.assert_close(found, module(ids), rtol=1e-4, atol=1e-4)


def parameter(graph: Graph, stored: Mapping[str, Tensor], name: str) -> Tensor:
    """A parameter of the graph: one of the file, or a stack of several."""
    pieces = sorted((start, piece) for piece, (whole, _, start, _) in graph.pieces.items() if whole == name)
    return torch.stack([stored[piece] for _, piece in pieces]) if pieces else stored[name]


def test_experts_are_spread() -> None:
    hints = {"fix": {"ep": 4}}
    space = PlanSpace(Problem.build(imported("two, einsum"), parse_cluster("8xA100"), {"global_batch": 16}, hints))
    assert space.axes == ("dp", "ep", "tp")


@pytest.mark.slow
def test_a_capacity_that_does_not_follow_the_batch_is_told() -> None:
    told = [warning for warning in imported("two, einsum", factor=2.5).warnings if "slots" in warning]
    assert len(told) == 2
    assert all("60 slots for 24 routed tokens" in warning for warning in told)


def test_a_product_over_samples_without_a_router_stays_refused() -> None:
    class Gram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return torch.einsum("sec,sm->ecm", y.reshape(-1, 4, 8), y)

    with pytest.raises(ModelError, match="a sum over samples"):
        load_model(exported(Gram(), torch.zeros(2, WIDTH)))
