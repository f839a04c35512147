"""Factor rules and the signatures (S / B / P placements) that follow from them.

A factor is one loop of an operator (einsum style): `MatMul: b m k+, k n -> b m n` has factors b, m, k, n. Splitting a
factor over a mesh axis splits every operand dim of which it is the *major* factor, leaves operands without it whole,
and makes the outputs partial when it is summed (`+`). OneFlow's SBP and PyTorch's DTensor placements name the same
three things: S(i) = Shard(i), B = Replicate(), P = Partial().

Gradients follow from the rule too: the gradient of an operand that lacks the split factor is a sum over it, hence
partial; the gradient of a split operand is split alike; the gradient of a partial value is whole. A bias that is added
to a partial value is added on the first rank of the axis only (`ir.linkage.operator_signatures`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Placement = int
"""`BROADCAST`, `PARTIAL`, or a dim number i >= 0 for S(i)."""

BROADCAST: Placement = -1
PARTIAL: Placement = -2

LEAST_PART = 512
"""Elements of a dim that every rank has where ranks share the dim unevenly (assumed). The largest part is then at most
1/512 larger than an even one, by which the price is off there; vocabularies are shared so by up to 98 ranks."""
ANY_PARTS = ("", "softmax", "norm", "cross_entropy")
"""Exchanges inside an operator that are sums over the ranks, for which parts may be of any sizes."""

Passing = Literal["none", "joint", "multi", "first", "rest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InternalCollective:
    """The exchange inside an operator that a split of a factor requires (`@name` marks)."""

    name: str
    """Name of the mark: softmax, norm, cross_entropy, batch_norm, attention or halo."""
    kind: Literal["all_reduce", "all_gather", "all_to_all", "send_recv"]
    """Collective that is run."""
    forward_bytes: tuple[float, float] = (0.0, 0.0)
    """(Fixed, per sample) bytes of the whole tensor that is exchanged forward, before other axes shard it."""
    backward_bytes: tuple[float, float] = (0.0, 0.0)
    """(Fixed, per sample) bytes of the whole tensor that is exchanged backward."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Factor:
    """One loop of an operator."""

    name: str
    """Letter of the loop in the rule's line, or `d` and a number."""
    size: int
    """Number of iterations at one sample; the batch factor has size 1."""
    is_batch: bool = False
    """Whether this is the loop over samples."""
    summed: bool = False
    """Mark `+`: contracted, so that a split makes the outputs partial."""
    fixed: bool = False
    """Mark `!`: never split."""
    collective: InternalCollective | None = None
    """Mark `@name`: split at the price of this exchange; None = split for free."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorRule:
    """The factors that make up each dim of each operand."""

    factors: tuple[Factor, ...]
    inputs: tuple[tuple[tuple[int, ...], ...], ...]
    """Operand -> dim -> indices into `factors`, major first; a dim of size 1 that is broadcast has none."""
    outputs: tuple[tuple[tuple[int, ...], ...], ...]
    """Result -> dim -> indices into `factors`, major first."""
    passing: Passing = "none"
    """How partial inputs pass to partial outputs: `joint` = all inputs partial (Add); `multi` = exactly one, any
    (MatMul, Mul); `first` = the first one (Div); `rest` = all but the first (Where)."""
    linear: tuple[int, ...] = ()
    """Inputs that may be the partial one of `multi`, where others (indices) can never be; empty = all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """One legal way to place an operator's operands on one mesh axis."""

    factor: int | None
    """Index of the split factor; None for the replicated and the partial-passing signatures."""
    inputs: tuple[Placement, ...]
    """Placement that the operator requires of each input."""
    outputs: tuple[Placement, ...]
    """Placement of each output."""
    input_gradients: tuple[Placement, ...]
    """Placement of the gradient of each input, as the backward pass of this operator writes it."""

    @property
    def divides_work(self) -> bool:
        """Whether each rank of the axis does an equal share of the operator."""
        return self.factor is not None

    @property
    def is_whole(self) -> bool:
        """Whether all inputs and outputs are whole on every rank of the axis."""
        return all(placement == BROADCAST for placement in (*self.inputs, *self.outputs))

    @property
    def text(self) -> str:
        """The placements of inputs and outputs, as in `S(0),B -> S(0)`."""
        inputs, outputs = (",".join(map(placement_text, placements)) for placements in (self.inputs, self.outputs))
        return f"{inputs} -> {outputs}"


def placement_text(placement: Placement) -> str:
    """`B`, `P` or `S(i)`."""
    return {BROADCAST: "B", PARTIAL: "P"}.get(placement, f"S({placement})")


def parse_placement(text: str) -> Placement:
    """Inverse of `placement_text`.

    Raises:
        ValueError: not a placement.
    """
    if text in ("B", "P"):
        return BROADCAST if text == "B" else PARTIAL
    if re.fullmatch(r"S\([0-9]{1,3}\)", text):  # no tensor has a thousand dims
        return int(text[2:-1])
    raise ValueError(f"{text!r} is no placement; use B, P or S(dim)")


def gradient_placement(placement: Placement) -> Placement:
    """Placement that a producer requires of the gradient of an output that it wrote with `placement`."""
    return placement if placement >= 0 else BROADCAST


def _split(rule: FactorRule, index: int) -> Signature | None:
    """The signature that splits factor `index`; None where the factor is a minor one of some dim, or in two dims."""
    placed: list[list[Placement]] = []
    for side in (rule.inputs, rule.outputs):
        placements: list[Placement] = []
        for dims in side:
            placement = BROADCAST
            for dim, factors in enumerate(dims):
                if index in factors:
                    if factors[0] != index or placement != BROADCAST:
                        return None
                    placement = dim
            placements.append(placement)
        placed.append(placements)
    inputs, outputs = placed
    if rule.factors[index].summed:
        outputs = [PARTIAL if p == BROADCAST else p for p in outputs]
    # An input without the split factor sums its gradient over it.
    gradients = [PARTIAL if p == BROADCAST else p for p in inputs]
    return Signature(factor=index, inputs=tuple(inputs), outputs=tuple(outputs), input_gradients=tuple(gradients))


def may_be_uneven(rule: FactorRule, index: int) -> bool:
    """Whether ranks may share a factor unevenly: the first ones equal parts, rounded up, and the last one the rest.

    Samples are shared by the shares of a stage instead. A factor that is merged with others in one dim, such as heads,
    would be cut where no rank can compute with it; neither can neighbours exchange rows of unlike parts.
    """
    factor = rule.factors[index]
    exchange = factor.collective.name if factor.collective is not None else ""
    alone = all(
        dims == (index,) for side in (rule.inputs, rule.outputs) for held in side for dims in held if index in dims
    )
    return alone and not factor.is_batch and factor.name not in ("e", "g", "h") and exchange in ANY_PARTS


def shares_out(size: int, ranks: int, *, unevenly: bool) -> bool:
    """Whether `ranks` ranks can share a dim of `size`.

    Args:
        unevenly: see `may_be_uneven`.
    """
    return size % ranks == 0 or (unevenly and size >= ranks * max(LEAST_PART, ranks))


def _linear_sets(rule: FactorRule) -> list[tuple[int, ...]]:
    """The sets of inputs that may be partial together."""
    every = tuple(range(len(rule.inputs)))
    if not every or rule.passing == "none":
        return []
    if rule.passing == "multi":
        return [(i,) for i in rule.linear or every]
    return [{"joint": every, "first": every[:1], "rest": every[1:]}[rule.passing]]


def signatures(rule: FactorRule) -> tuple[Signature, ...]:
    """All signatures of `rule` on one mesh axis: the batch split first, then other splits, then replicated, then P.

    Divisibility is not checked, as it depends on the size of the axis.
    """
    found: list[Signature] = []
    order = sorted(range(len(rule.factors)), key=lambda i: not rule.factors[i].is_batch)
    for index in order:
        factor = rule.factors[index]
        if factor.fixed or (factor.size == 1 and not factor.is_batch):
            continue
        signature = _split(rule, index)
        if signature is not None and any(p >= 0 for p in signature.inputs + signature.outputs):
            found.append(signature)
    num_inputs, num_outputs = len(rule.inputs), len(rule.outputs)
    whole = (BROADCAST,) * num_inputs
    found.append(Signature(factor=None, inputs=whole, outputs=(BROADCAST,) * num_outputs, input_gradients=whole))
    for linear in _linear_sets(rule):
        # The result is linear in these operands together: each rank has a part of them and the whole of the others,
        # whose gradients are then sums over the parts.
        inputs = tuple(PARTIAL if i in linear else BROADCAST for i in range(num_inputs))
        gradients = tuple(BROADCAST if i in linear else PARTIAL for i in range(num_inputs))
        outputs = (PARTIAL,) * num_outputs
        found.append(Signature(factor=None, inputs=inputs, outputs=outputs, input_gradients=gradients))
    unique: dict[tuple[tuple[Placement, ...], tuple[Placement, ...]], Signature] = {}
    for signature in found:
        unique.setdefault((signature.inputs, signature.outputs), signature)
    return tuple(unique.values())


def whole_signature(table: tuple[Signature, ...]) -> int:
    """Index of the signature in which every operand is whole."""
    return next(i for i, s in enumerate(table) if all(p == BROADCAST for p in s.inputs + s.outputs))
