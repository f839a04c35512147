"""Dispatch, GroupedMatMul and Combine: each signature of each rule run on virtual ranks, against the whole operator.

Outputs and gradients are compared. Ranks exchange nothing: what a rank computes follows from its shards alone, and
what the rule says of the results (split, partial, whole) must put them together again.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ir.factors import BROADCAST, PARTIAL, Placement, Signature, signatures
from ir.graph import Tensor as Spec
from ir.operators import Unsupported, make_operator
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT

SAMPLES, LENGTH, WIDTH, OUT, EXPERTS, TOP = 4, 6, 8, 10, 4, 2
CAPACITY = 4  # of 3 that a balanced load would need: some experts are chosen more often
ROUTED = LENGTH * TOP


def slots(chosen: Tensor, capacity: int, first: int, count: int) -> Tensor:
    """[samples, capacity, tokens * k] of 0 and 1 for each expert first ... first + count: who takes which slot."""
    flat = chosen.reshape(len(chosen), -1)
    mine = flat[None] == torch.arange(first, first + count)[:, None, None]
    place = mine.cumsum(-1) - 1
    return (mine[:, :, None] & (place[:, :, None] == torch.arange(capacity)[:, None])).to(torch.float64)


def dispatch(x: Tensor, chosen: Tensor, *, first: int = 0, count: int = EXPERTS) -> Tensor:
    """[experts, (samples slots), width] of the experts first ... first + count."""
    table = slots(chosen, CAPACITY, first, count)
    repeated = x.reshape(len(x), -1, x.shape[-1]).repeat_interleave(chosen.shape[-1], dim=1)
    return torch.einsum("ebct,bth->ebch", table, repeated).flatten(1, 2)


def combine(tokens: Tensor, chosen: Tensor, weights: Tensor, *, first: int = 0) -> Tensor:
    """Tokens of the experts first ... to their places, times their weights, added up."""
    table = slots(chosen, CAPACITY, first, len(tokens))
    found = torch.einsum("ebct,ebch->bth", table, tokens.unflatten(1, (len(weights), CAPACITY)))
    return (found.unflatten(1, (-1, weights.shape[-1])) * weights[..., None]).sum(-2)


def run(kind: str, operands: Sequence[Tensor], signature: Signature | None, rank: int) -> Tensor:
    """One operator on one rank; a rank whose e is split knows which experts are its own."""
    if kind == PRODUCT:
        return torch.einsum("ecn,enm->ecm", operands[0], operands[1])
    if kind == DISPATCH:
        split = signature is not None and signature.outputs[0] == 0
        count = EXPERTS // 2 if split else EXPERTS
        return dispatch(operands[0], operands[1], first=rank * count if split else 0, count=count)
    return combine(operands[0], operands[1], operands[2], first=rank * len(operands[0]) if len(operands[0]) < 4 else 0)


def made(kind: str) -> tuple[list[Spec], list[Tensor], dict[str, int]]:
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lead = (SAMPLES, LENGTH)
    chosen = torch.rand((*lead, EXPERTS), generator=generator).topk(TOP).indices

    def spec(name: str, shape: tuple[int, ...], batch: int | None, dtype: str = "float32") -> Spec:
        role = "parameter" if batch is None else "activation"
        return Spec(name=name, shape=shape, dtype=dtype, role=role, batch_dim=batch)  # type: ignore[arg-type]

    x = spec("x", (1, LENGTH, WIDTH), 0)
    experts = spec("experts", (1, LENGTH, TOP), 0, "int64")
    tokens = spec("tokens", (EXPERTS, CAPACITY, WIDTH), 1)
    held = floats(EXPERTS, SAMPLES * CAPACITY, WIDTH)
    if kind == DISPATCH:
        return [x, experts], [floats(*lead, WIDTH), chosen], {"num_experts": EXPERTS, "capacity": CAPACITY}
    if kind == PRODUCT:
        weight = spec("weight", (EXPERTS, WIDTH, OUT), None)
        return [tokens, weight], [held, floats(EXPERTS, WIDTH, OUT)], {"num_tokens": ROUTED}
    return [tokens, experts, spec("weights", (1, LENGTH, TOP), 0)], [held, chosen, floats(*lead, TOP)], {}


def shards(whole: Tensor, placement: Placement) -> list[Tensor]:
    """What two ranks hold."""
    if placement == PARTIAL:
        noise = torch.ones_like(whole) * 0.3
        return [whole - noise, noise]
    return [whole, whole] if placement == BROADCAST else list(whole.chunk(2, dim=placement))


def joined(parts: Sequence[Tensor], placement: Placement) -> Tensor:
    """The whole that two ranks' parts stand for."""
    if placement == BROADCAST:
        torch.testing.assert_close(parts[0], parts[1])
        return parts[0]
    return parts[0] + parts[1] if placement == PARTIAL else torch.cat(list(parts), dim=placement)


def leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]


@pytest.mark.parametrize("kind", [DISPATCH, PRODUCT, COMBINE])
def test_shards_agree_with_the_whole(kind: str) -> None:
    specs, values, attributes = made(kind)
    built = make_operator(kind, name="op", inputs=specs, outputs=["y"], attributes=attributes)
    whole = leaves(values)
    y = run(kind, whole, None, 0)
    assert y.shape == built.outputs[0].shape_at(SAMPLES)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y.backward(upstream)
    found = signatures(built.operator.rule)
    for signature in found:
        given = [shards(v, p) for v, p in zip(values, signature.inputs, strict=True)]
        ranks = [leaves([g[rank] for g in given]) for rank in (0, 1)]
        outputs = [run(kind, operands, signature, rank) for rank, operands in enumerate(ranks)]
        torch.testing.assert_close(joined(outputs, signature.outputs[0]), y, msg=str(signature))
        # The gradient of a partial result is whole on every rank, that of a split one is split alike.
        wanted = BROADCAST if signature.outputs[0] == PARTIAL else signature.outputs[0]
        for output, part in zip(outputs, shards(upstream, wanted), strict=True):
            output.backward(part)
        for slot, operand in enumerate(whole):
            if operand.grad is not None:
                parts = [operands[slot].grad for operands in ranks]
                torch.testing.assert_close(joined(parts, signature.input_gradients[slot]), operand.grad)  # type: ignore[arg-type]
    placed = {(s.inputs, s.outputs) for s in found}
    assert placed == EXPECTED[kind]


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


def test_a_layer_of_experts_is_what_its_loop_computes() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    w = torch.randn(EXPERTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    weights = torch.rand(SAMPLES, LENGTH, TOP, generator=generator, dtype=torch.float64)
    first = torch.arange(LENGTH) % EXPERTS  # so evenly that no expert is chosen more often than it has slots
    chosen = torch.stack([first, (first + 1) % EXPERTS], dim=-1).expand(SAMPLES, -1, -1)
    y = combine(torch.einsum("ecn,enm->ecm", dispatch(x, chosen), w), chosen, weights)
    loop = torch.zeros_like(x)
    for e in range(EXPERTS):
        loop += (weights * (chosen == e)).sum(-1, keepdim=True) * (x @ w[e])
    torch.testing.assert_close(y, loop)


def test_costs_are_those_of_routed_tokens() -> None:
    specs, _, _ = made(PRODUCT)
    op = make_operator(PRODUCT, name="op", inputs=specs, outputs=["y"], attributes={"num_tokens": 9}).operator
    assert op.forward_flops.per_sample == 2 * 9 * WIDTH * OUT  # 16 slots
    assert op.backward_flops.per_sample == 2 * op.forward_flops.per_sample and op.saved == ("tokens", "weight")
    specs, _, _ = made(COMBINE)
    op = make_operator(COMBINE, name="op", inputs=specs, outputs=["y"]).operator
    assert op.forward_flops.at(1) == 0 and op.saved == ("tokens", "experts", "weights")


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(DISPATCH, {"capacity": 0}), (DISPATCH, {"num_experts": 0}), (PRODUCT, {"num_tokens": 17}), (PRODUCT, {})],
)
def test_attributes_that_do_not_fit_are_refused(kind: str, wrong: dict[str, int]) -> None:
    specs, _, attributes = made(kind)
    with pytest.raises(Unsupported):
        make_operator(kind, name="op", inputs=specs, outputs=["y"], attributes=(attributes | wrong) if wrong else {})
