"""The list of collectives that a plan calls for, forward and backward.

The list is written down by the very kernel that prices the plan, so that what runs can be checked against what was
priced. Units: bytes, seconds; of parameters elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from automap.fitted_curves import COLLECTIVES
from automap.price.evaluator import Evaluator
from automap.price.kernels.collectives import (
    L_AXIS,
    L_BACKWARD,
    L_BYTES,
    L_KIND,
    L_OPERATOR,
    L_SECONDS,
    L_TENSOR,
)
from automap.price.kernels.columns import C_GATHER, C_REDUCE, C_SCATTER
from automap.price.kernels.tied_parameters import (
    E_AXES,
    E_GATHER,
    E_GATHER_EACH,
    E_REDUCE,
    E_SCATTER,
    E_SCATTER_EACH,
    TIE_EXCHANGED,
    TIE_HAS,
    TIE_ONE,
    TIE_OTHER,
)
from automap.price.lowered_plan import LoweredPlan

Floats = npt.NDArray[np.float64]
Kind = Literal["all_reduce", "reduce_scatter", "all_gather", "send_recv"]
What = Literal["weights", "gradients"]
When = Literal["step", "micro_batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of one micro-batch."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send_recv."""
    axis: str
    """Mesh axis over whose groups it runs."""
    bytes: float
    """Of the larger of what a rank holds before and after."""
    seconds: float
    stage: int
    operator: str
    """The consumer that asks for the conversion, or the operator that exchanges inside; empty where a sum is made whole
    on its way out of the stage."""
    tensor: str
    direction: Literal["forward", "backward"]


def list_collectives(lowered: LoweredPlan, evaluator: Evaluator) -> Iterator[Collective]:
    """Every collective inside the stages of one micro-batch, in the order of the operators.

    Recomputed operators repeat their forward collectives; what parameters and their gradients send is in
    `list_parameter_collectives`.
    """
    tables, graph = evaluator.tables, evaluator.problem.graph
    num_ranks = len(lowered.layout.stages)
    for number, segment, incoming in evaluator.surroundings(lowered):
        unit = evaluator.blocks.units[segment.unit]
        representative = evaluator.blocks.representative(unit.type)
        listed = evaluator.collectives(lowered, number % num_ranks, segment, incoming)
        base = int(tables.spans[unit.type])
        for record in listed[np.argsort(listed[:, L_OPERATOR], kind="stable")]:
            offset = int(record[L_OPERATOR]) - base
            op = graph.operators[unit.start + offset]
            model = graph.operators[representative.start + offset]
            wanted = tables.tensor_name(int(record[L_TENSOR]))
            slot = (*model.inputs, *model.outputs).index(wanted)
            leaves = bool(record[L_BACKWARD] < 0.0)
            yield Collective(
                kind=COLLECTIVES[int(record[L_KIND])],
                axis=lowered.axes[int(record[L_AXIS])],
                bytes=float(record[L_BYTES]),
                seconds=float(record[L_SECONDS]),
                stage=number - leaves,
                operator="" if leaves else op.name,
                tensor=(*op.inputs, *op.outputs)[slot],
                direction="backward" if record[L_BACKWARD] > 0.0 else "forward",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCollective:
    """What all parameters of a pipeline rank, or their gradients, send over one axis."""

    rank: int
    kind: Kind
    """send_recv: with another pipeline rank, which has the parameters too."""
    axis: str
    """Mesh axis; empty for send_recv."""
    what: What
    when: When
    """How often. ZeRO 3 gathers weights twice a micro-batch: both are counted here."""
    elements: float
    """Of the larger of what a device holds before and after; of send_recv what it sends."""


def list_parameter_collectives(lowered: LoweredPlan, evaluator: Evaluator) -> Iterator[ParameterCollective]:
    """What parameters and gradients send in a step: the sums that `automap.price.kernels.step` turns into seconds."""
    # Elements do not depend on the samples: what one kind of device sees, all see.
    lowered = lowered.views[0]
    calls, parts, _ = evaluator.distinct_units(lowered)
    costs = evaluator.unit_rows(lowered, calls)
    ranks, axes = len(lowered.layout.stages), len(lowered.zero_axes)
    once, each = np.zeros((3, ranks, axes)), np.zeros((2, ranks, axes))
    for chunk, row, times in parts.tolist():
        for block, column in ((E_REDUCE, C_REDUCE), (E_GATHER, C_GATHER), (E_SCATTER, C_SCATTER)):
            once[block, chunk % ranks] += times * costs[row, column : column + axes]
    each += once[[E_GATHER, E_SCATTER]]
    for tie in evaluator.tied.rows(evaluator.tied.ties(lowered), lowered.layout, lowered.zero_axes):
        one, other = int(tie[TIE_ONE]), int(tie[TIE_OTHER])
        if one == other:
            more = tie[TIE_HAS + E_AXES :].reshape(-1, axes)
            once[:, one] -= more[[E_REDUCE, E_GATHER, E_SCATTER]]
            each[:, one] += more[[E_GATHER_EACH, E_SCATTER_EACH]]
        for rank in (one, other) if one != other else ():
            yield ParameterCollective(
                rank=rank, kind="send_recv", axis="", what="gradients", when="step", elements=float(tie[TIE_EXCHANGED])
            )
    for rank in range(ranks):
        for a, (axis, is_zero) in enumerate(zip(lowered.axes, lowered.zero_axes, strict=True)):
            for kind, what, when, elements in _over_axis(
                lowered.zero, bool(is_zero), once[:, rank, a], each[:, rank, a]
            ):
                if elements > 0.5 and lowered.layout.stages[rank].axes[a] > 1.0:
                    yield ParameterCollective(
                        rank=rank, kind=kind, axis=axis, what=what, when=when, elements=float(elements)
                    )


def _over_axis(zero: int, is_zero: bool, once: Floats, each: Floats) -> Iterator[tuple[Kind, What, When, float]]:
    """What a rank sends over one axis: kind, what, when, elements."""
    if zero == 0 or not is_zero:
        yield "all_reduce", "gradients", "step", once[E_REDUCE if zero == 0 else E_SCATTER]
        return
    if zero == 1:
        yield "reduce_scatter", "gradients", "step", once[E_SCATTER]
    else:
        yield "reduce_scatter", "gradients", "micro_batch", each[1]
    if zero == 3:
        yield "all_gather", "weights", "micro_batch", 2.0 * each[0]
    else:
        yield "all_gather", "weights", "step", once[E_GATHER]
