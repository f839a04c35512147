"""Factor rules and the signatures (S / B / P placements) that follow from them.

A factor is one loop of an operator, as in einsum: `MatMul: b m k+, k n -> b m n` has factors b, m, k, n. If a factor is
split over a mesh axis, then every operand dim of which it is the *major* factor is split, operands without it are whole
(B), and the outputs are partial sums (P) if the factor is summed (`+`). OneFlow's SBP and PyTorch's DTensor have the
same three placements: S(i) = Shard(i), B = Replicate(), P = Partial().

Gradients follow from the rule too: the gradient of an operand without the split factor is a sum over it, hence P; the
gradient of a split operand is split in the same way; the gradient of an operand that is P is whole. A bias that is
added to a tensor that is P is added on the first rank of the axis only (`ir.linkage.operator_signatures`).
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
"""Least number of elements on every rank if a dim is split unevenly (assumed). The largest part is then at most 1/512
larger than an even one, and so is the error of the price. Vocabularies can be split like this over up to 98 ranks."""
ANY_PARTS = ("", "softmax", "norm", "cross_entropy")
"""Collectives inside an operator that sum over the ranks, so that the parts may have any sizes; "" = none."""

Passing = Literal["none", "joint", "multi", "first", "rest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InternalCollective:
    """The collective inside an operator that a split of a factor requires (mark `@name`)."""

    name: str
    """Name of the mark: softmax, norm, cross_entropy, batch_norm, attention or halo."""
    kind: Literal["all_reduce", "all_gather", "all_to_all", "send_recv"]
    """Kind of the collective."""
    forward_bytes: tuple[float, float] = (0.0, 0.0)
    """(Fixed, per sample) bytes of its whole tensor in the forward pass, before other axes shard it."""
    backward_bytes: tuple[float, float] = (0.0, 0.0)
    """(Fixed, per sample) bytes of its whole tensor in the backward pass."""


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
    """Mark `+`: summed over, so that a split makes the outputs P."""
    fixed: bool = False
    """Mark `!`: never split."""
    collective: InternalCollective | None = None
    """Mark `@name`: a split requires this collective; None = a split requires none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorRule:
    """The factors that make up each dim of each operand."""

    factors: tuple[Factor, ...]
    inputs: tuple[tuple[tuple[int, ...], ...], ...]
    """Operand -> dim -> indices into `factors`, major first; a dim of size 1 that is broadcast has none."""
    outputs: tuple[tuple[tuple[int, ...], ...], ...]
    """Result -> dim -> indices into `factors`, major first."""
    passing: Passing = "none"
    """The inputs that must be P for the outputs to be P: `joint` = all inputs (Add); `multi` = exactly one, any of them
    (MatMul, Mul); `first` = the first one (Div); `rest` = all but the first (Where)."""
    linear: tuple[int, ...] = ()
    """With `multi`, the inputs that may be P; empty = all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """One legal way to place an operator's operands on one mesh axis."""

    factor: int | None
    """Index of the split factor; None for signatures that split nothing: all B, or from P to P."""
    inputs: tuple[Placement, ...]
    """Placement that the operator requires of each input."""
    outputs: tuple[Placement, ...]
    """Placement of each output."""
    input_gradients: tuple[Placement, ...]
    """Placement of the gradient of each input that the backward pass of this operator produces."""

    @property
    def divides_work(self) -> bool:
        """Whether each rank of the axis does an equal share of the operator's work."""
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
    raise ValueError(f"{text!r} is not a placement; use B, P or S(dim)")


def gradient_placement(placement: Placement) -> Placement:
    """Placement that the gradient of an output with `placement` must have for the backward pass of its producer."""
    return placement if placement >= 0 else BROADCAST


def _split(rule: FactorRule, index: int) -> Signature | None:
    """The signature that splits a factor; None if it is a minor factor of some dim, or in two dims of a tensor."""
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
    """Whether a factor may be split unevenly: the first ranks have equal parts, rounded up, and the last one the rest.

    This is not possible for samples, which a stage divides by its batch shares; for a factor that is merged with others
    in one dim, such as heads, since the split would be inside a head; and for convolutions whose ranks exchange rows
    with their neighbours.
    """
    factor = rule.factors[index]
    exchange = factor.collective.name if factor.collective is not None else ""
    alone = all(
        dims == (index,) for side in (rule.inputs, rule.outputs) for held in side for dims in held if index in dims
    )
    return alone and not factor.is_batch and factor.name not in ("e", "g", "h") and exchange in ANY_PARTS


def shares_out(size: int, ranks: int, *, unevenly: bool) -> bool:
    """Whether a dim can be split over ranks.

    Args:
        size: size of the dim.
        ranks: number of ranks.
        unevenly: whether the split may be uneven, see `may_be_uneven`.
    """
    return size % ranks == 0 or (unevenly and size >= ranks * max(LEAST_PART, ranks))


def _linear_sets(rule: FactorRule) -> list[tuple[int, ...]]:
    """The sets of inputs that may be P together, with outputs that are P."""
    every = tuple(range(len(rule.inputs)))
    if not every or rule.passing == "none":
        return []
    if rule.passing == "multi":
        return [(i,) for i in rule.linear or every]
    return [{"joint": every, "first": every[:1], "rest": every[1:]}[rule.passing]]


def signatures(rule: FactorRule) -> tuple[Signature, ...]:
    """All signatures of `rule` on one mesh axis: first the split of the batch, then other splits, then B, then P.

    Whether dims divide evenly is not checked, since it depends on the size of the axis.
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
        # The result is linear in these operands together: they are P, and all others are B. The gradients of the others
        # are then P too.
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
