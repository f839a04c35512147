"""Dispatch, GroupedMatMul and Combine: placements, costs, refusals; a layer of them against its loop.

That shards agree with the whole is in test_signature_oracle.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from automap.runtime.operators.apply import run
from ir.build import GraphBuilder
from ir.factors import BROADCAST, PARTIAL, signatures
from ir.graph import Tensor as Spec
from ir.operators import Unsupported, make_operator
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT

SAMPLES, LENGTH, WIDTH, OUT, EXPERTS, TOP = 4, 6, 8, 10, 4, 2
CAPACITY = 4  # a balanced load needs 3
ROUTED = LENGTH * TOP


def made(kind: str) -> tuple[list[Spec], dict[str, int]]:
    def spec(name: str, shape: tuple[int, ...], batch: int | None, dtype: str = "float32") -> Spec:
        role = "parameter" if batch is None else "activation"
        return Spec(name=name, shape=shape, dtype=dtype, role=role, batch_dim=batch)  # type: ignore[arg-type]

    x = spec("x", (1, LENGTH, WIDTH), 0)
    experts = spec("experts", (1, LENGTH, TOP), 0, "int64")
    tokens = spec("tokens", (EXPERTS, CAPACITY, WIDTH), 1)
    if kind == DISPATCH:
        return [x, experts], {"num_experts": EXPERTS, "capacity": CAPACITY}
    if kind == PRODUCT:
        return [tokens, spec("weight", (EXPERTS, WIDTH, OUT), None)], {"num_tokens": ROUTED}
    return [tokens, experts, spec("weights", (1, LENGTH, TOP), 0)], {}


B, P = BROADCAST, PARTIAL
EXPECTED = {
    DISPATCH: {((0, 0), (1,)), ((B, B), (0,)), ((2, B), (2,)), ((B, B), (B,)), ((P, B), (P,))},
    PRODUCT: {
        ((1, B), (1,)), ((0, 0), (0,)), ((2, 1), (P,)), ((B, 2), (2,)), ((B, B), (B,)), ((P, B), (P,)), ((B, P), (P,)),
    },
    COMBINE: {
        ((1, 0, 0), (0,)), ((0, B, B), (P,)), ((2, B, B), (2,)), ((B, B, B), (B,)), ((P, B, B), (P,)),
        ((B, B, P), (P,)),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", EXPECTED)
def test_kinds_of_experts_have_exactly_the_expected_signatures(kind: str) -> None:
    specs, attributes = made(kind)
    op = make_operator(kind, name="op", inputs=specs, outputs=["y"], attributes=attributes).operator
    assert {(s.inputs, s.outputs) for s in signatures(op.rule)} == EXPECTED[kind]


def layer(
    x: Tensor, chosen: Tensor, weights: Tensor, w: Tensor, *, behind: bool = False, groups: int = 1, capacity: int = 4
) -> Tensor:
    """The three kinds one after the other; samples are `behind` the tokens or lead."""
    lead = (LENGTH, 1) if behind else (1, LENGTH)
    builder = GraphBuilder()
    builder.input("x", (*lead, WIDTH), batch_dim=int(behind))
    builder.input("chosen", (*lead, TOP), "int64", batch_dim=int(behind))
    builder.input("weights", (*lead, TOP), batch_dim=int(behind))
    builder.parameter("w", (EXPERTS, WIDTH, WIDTH))
    attributes = {"num_experts": EXPERTS, "capacity": capacity, "groups": groups}
    builder.add(DISPATCH, ["x", "chosen"], ["slots"], attributes=attributes)
    builder.add(
        PRODUCT, ["slots", "w"], ["products"], attributes={"num_tokens": min(ROUTED, EXPERTS * capacity * groups)}
    )
    builder.add(COMBINE, ["products", "chosen", "weights"], ["y"])
    return run(builder.finish(["y"]), {"x": x, "chosen": chosen, "weights": weights, "w": w}, SAMPLES)["y"]


def loop(x: Tensor, chosen: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    """Token by token: an expert that has had its fill gives nothing."""
    y = torch.zeros_like(x)
    for sample in range(SAMPLES):
        taken = [0] * EXPERTS
        for token in range(LENGTH):
            for lowered in range(TOP):
                e = int(chosen[sample, token, lowered])
                taken[e] += 1
                if taken[e] <= CAPACITY:
                    y[sample, token] += weights[sample, token, lowered] * (x[sample, token] @ w[e])
    return y


@pytest.mark.parametrize("overflows", [False, True])
def test_a_layer_of_experts_is_what_its_loop_computes(overflows: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    w = torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(SAMPLES, LENGTH, TOP, generator=generator, dtype=torch.float64)
    even = torch.stack([torch.arange(LENGTH) % EXPERTS, torch.arange(1, LENGTH + 1) % EXPERTS], dim=-1)
    scores = torch.rand(SAMPLES, LENGTH, EXPERTS, generator=generator) + torch.tensor([1.0, 0.0, 0.0, 0.0])
    chosen = scores.topk(TOP).indices if overflows else even.expand(SAMPLES, -1, -1)
    assert bool(((chosen == 0).sum((1, 2)) > CAPACITY).all()) == overflows
    wanted = loop(x, chosen, weights, w)
    torch.testing.assert_close(layer(x, chosen, weights, w), wanted)
    turned = [t.transpose(0, 1) for t in (x, chosen, weights)]
    torch.testing.assert_close(layer(*turned, w, behind=True), wanted.transpose(0, 1))


@pytest.mark.parametrize("behind", [False, True])
def test_groups_of_tokens_have_slots_of_their_own(behind: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    w = torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(SAMPLES, LENGTH, TOP, generator=generator, dtype=torch.float64)
    chosen = torch.rand(SAMPLES, LENGTH, EXPERTS, generator=generator).topk(TOP).indices
    parts = [t.split(LENGTH // 2, 1) for t in (x, chosen, weights)]
    alone = [layer_of_half(*part, w) for part in zip(*parts, strict=True)]
    turned = [t.transpose(0, 1) for t in (x, chosen, weights)] if behind else [x, chosen, weights]
    got = layer(*turned, w, behind=behind, groups=2, capacity=1)
    torch.testing.assert_close(got.transpose(0, 1) if behind else got, torch.cat(alone, 1))


def layer_of_half(x: Tensor, chosen: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    """Token by token, the first of each expert alone."""
    y = torch.zeros_like(x)
    for sample in range(SAMPLES):
        taken = set[int]()
        for token in range(x.shape[1]):
            for e, share in zip(chosen[sample, token].tolist(), weights[sample, token], strict=True):
                if e not in taken:
                    y[sample, token] += share * (x[sample, token] @ w[e])
                taken.add(e)
    return y


def test_an_axis_over_groups_splits_tokens_and_slots_alike() -> None:
    specs, attributes = made(DISPATCH)
    op = make_operator(DISPATCH, name="op", inputs=specs, outputs=["y"], attributes=attributes | {"groups": 3}).operator
    assert ((1, 1), (1,)) in {(s.inputs, s.outputs) for s in signatures(op.rule)}
    with pytest.raises(Unsupported, match="4 groups of 6 tokens"):
        make_operator(DISPATCH, name="op", inputs=specs, outputs=["y"], attributes=attributes | {"groups": 4})


def test_costs_are_those_of_routed_tokens() -> None:
    specs, _ = made(PRODUCT)
    op = make_operator(PRODUCT, name="op", inputs=specs, outputs=["y"], attributes={"num_tokens": 9}).operator
    assert op.forward_flops.per_sample == 2 * 9 * WIDTH * OUT  # 16 slots
    assert op.backward_flops.per_sample == 2 * op.forward_flops.per_sample and op.saved == ("tokens", "weight")
    specs, _ = made(COMBINE)
    op = make_operator(COMBINE, name="op", inputs=specs, outputs=["y"]).operator
    assert op.forward_flops.at(1) == 0 and op.saved == ("tokens", "experts", "weights")


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(DISPATCH, {"capacity": 0}), (DISPATCH, {"num_experts": 0}), (PRODUCT, {"num_tokens": 17}), (PRODUCT, {})],
)
def test_attributes_that_do_not_fit_are_refused(kind: str, wrong: dict[str, int]) -> None:
    specs, attributes = made(kind)
    with pytest.raises(Unsupported):
        make_operator(kind, name="op", inputs=specs, outputs=["y"], attributes=(attributes | wrong) if wrong else {})
