"""Mixtures of experts as people write and export them: recognised, counted, and still computing the same."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from ir.blocks import find_units
from ir.graph import Graph, Operator
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT

FORMS = (
    "looked_up_bias", "looked_up_indexed", "looked_up_transposed", "looked_up_einsum", "loop", "masked_loop",
    "where_loop", "noisy_loop", "stacked_loop", "dense",
)  # fmt: skip
QUICK = ("masked_loop",)
"""Exported by `make unit` too; an export takes more than a second."""
ALL = [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FORMS]


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
    assert Graph.from_bytes(graph.to_bytes()) == graph


@pytest.mark.parametrize("name", ALL)
def test_flops_are_those_of_routed_tokens(name: str) -> None:
    mixtures = _mixtures()
    model, inputs = module(name, 1)
    with FlopCounterMode(display=False) as counter:
        model(*inputs)
    counted = counter.get_total_flops()
    if not name.startswith("looked_up"):  # the counter sees every expert on every token
        products = 3 * 2 * mixtures.LENGTH * mixtures.WIDTH * mixtures.FFN * 2
        counted -= products * (mixtures.EXPERTS - mixtures.TOP)
    assert imported(name).forward_flops == pytest.approx(counted, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["looked_up_indexed", "loop", "dense"])
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


# The graph, operator by operator, with torch


def evaluate(graph: Graph, parameters: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The first output, for a batch of samples; every expert has a slot for every token."""
    samples = len(ids)
    values: dict[str, Any] = {}
    for name, tensor in graph.tensors.items():
        if tensor.role == "input":
            values[name] = ids
        elif tensor.role == "parameter":
            values[name] = parameter(graph, parameters, name)
    with torch.no_grad():
        for op in graph.operators:
            if op.kind in RUN:
                results = RUN[op.kind](op, dict(op.attributes), *[values[n] for n in op.inputs])
            else:
                shape = graph.tensors[op.outputs[0]].shape_at(samples)
                results = SHAPED[op.kind](dict(op.attributes), shape, *[values[n] for n in op.inputs])
            results = results if isinstance(results, (tuple, list)) else (results,)
            values.update(zip(op.outputs, results, strict=True))
    return values[graph.outputs[0]]


def parameter(graph: Graph, parameters: Mapping[str, Tensor], name: str) -> Tensor:
    """A parameter of the graph: of the file, a piece of one, or a stack of several."""
    if name in parameters:
        return parameters[name].detach()
    if name in graph.pieces:
        whole, dim, start, stop = graph.pieces[name]
        return parameter(graph, parameters, whole).narrow(dim, start, stop - start)
    slices = sorted((start, n) for n, (whole, _, start, _) in graph.pieces.items() if whole == name)
    return torch.stack([parameters[n].detach() for _, n in slices])


def dispatch(_op: Operator, attributes: dict[str, Any], x: Tensor, chosen: Tensor) -> Tensor:
    """[e, (tokens), h]: a slot for every token, whose others are zero; samples need no telling apart."""
    mine = (chosen.flatten(0, -2)[None] == torch.arange(attributes["num_experts"])[:, None, None]).any(-1)
    return mine[..., None] * x.flatten(0, -2)[None]


def combine(_op: Operator, _attributes: dict[str, Any], slots: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    index = chosen.flatten(0, -2)
    found = slots[index, torch.arange(len(index))[:, None]]
    return (found * weights.flatten(0, -2)[..., None]).sum(1).reshape(*chosen.shape[:-1], slots.shape[-1])


def constant(_op: Operator, attributes: dict[str, Any]) -> Tensor:
    value = np.asarray(attributes.get("value", 0.0), dtype=attributes["dtype"])
    return torch.from_numpy(np.broadcast_to(value.reshape(-1) if value.size == 1 else value.reshape(
        attributes["shape"]), attributes["shape"]).copy())  # fmt: skip


def cut(_op: Operator, a: dict[str, Any], x: Tensor) -> Tensor:
    bounds = zip(a["axes"], a["starts"], a["ends"], a["steps"], strict=True)
    for axis, start, stop, step in bounds:
        x = x[(slice(None),) * axis + (slice(start, stop, step),)]
    return x


def unsqueeze(_op: Operator, a: dict[str, Any], x: Tensor) -> Tensor:
    for axis in a["axes"]:
        x = x.unsqueeze(axis)
    return x


RUN: Mapping[str, Callable[..., Any]] = {
    "Add": lambda _o, _a, x, y: x + y,
    "Mul": lambda _o, _a, x, y: x * y,
    "Div": lambda _o, _a, x, y: x / y,
    "Sigmoid": lambda _o, _a, x: x.sigmoid(),
    "Gelu": lambda _o, _a, x: functional.gelu(x),
    "MatMul": lambda _o, _a, x, y: x @ y,
    "Gemm": lambda _o, a, x, y: x @ (y.T if a.get("transB") else y),
    "Softmax": lambda _o, a, x: x.softmax(a["axis"]),
    "TopK": lambda _o, a, x: x.topk(a["k"], dim=-1),
    "ReduceSum": lambda _o, a, x: x.sum(a["axes"], keepdim=bool(a["keepdims"])),
    "LayerNormalization": lambda _o, _a, x, w, b: functional.layer_norm(x, w.shape, w, b),
    "Gather": lambda _o, _a, x, i: x[i],
    "GatherElements": lambda _o, a, x, i: x.gather(a["axis"], i),
    "ScatterElements": lambda _o, a, x, i, y: x.scatter(a["axis"], i, y),
    "Transpose": lambda _o, a, x: x.permute(a["perm"]),
    "Unsqueeze": unsqueeze,
    "Squeeze": lambda _o, a, x: x.squeeze(a["axes"]),
    "Split": lambda _o, a, x: x.split(a["split"], dim=a["axis"]),
    "Slice": cut,
    "Constant": constant,
    "ConstantOfShape": constant,
    DISPATCH: dispatch,
    PRODUCT: lambda _o, _a, x, w: x @ w,
    COMBINE: combine,
}
SHAPED: Mapping[str, Callable[..., Any]] = {
    "Reshape": lambda _a, shape, x: x.reshape(shape),
    "Expand": lambda _a, shape, x: x.expand(shape),
}
