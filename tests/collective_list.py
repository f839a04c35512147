"""The list of collectives that a plan requires, forward and backward.

The list is written down by the very kernel that prices the plan, so that what runs can be checked against what was
priced. Units: bytes, seconds; of parameters elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from automap.fitted_curves import COLLECTIVES
from automap.price.evaluator import Evaluator
from automap.price.kernels.cost_records import BACKWARD_PASS, BEFORE_SENDING
from automap.price.lowered_plan import LoweredPlan

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
    """Bytes of the larger of what a rank holds before and after."""
    seconds: float
    """Seconds of the collective, hidden or not."""
    stage: int
    """Number of the stage in the plan."""
    operator: str
    """The consumer that requires the conversion, or the operator that exchanges inside; empty where a sum is made whole
    on its way out of the stage."""
    tensor: str
    """Name of the tensor that moves."""
    direction: Literal["forward", "backward"]
    """Pass in which it runs."""


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
        for record in listed[np.argsort(listed["operator"], kind="stable")]:
            offset = int(record.operator) - base
            op = graph.operators[unit.start + offset]
            model = graph.operators[representative.start + offset]
            slot = (*model.inputs, *model.outputs).index(tables.names[record.tensor])
            leaves = bool(record.direction == BEFORE_SENDING)
            yield Collective(
                kind=COLLECTIVES[record.kind],
                axis=lowered.axes[record.axis],
                bytes=float(record.data_bytes),
                seconds=float(record.seconds),
                stage=number - leaves,
                operator="" if leaves else op.name,
                tensor=(*op.inputs, *op.outputs)[slot],
                direction="backward" if record.direction == BACKWARD_PASS else "forward",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCollective:
    """What all parameters of a pipeline rank, or their gradients, send over one axis."""

    rank: int
    """Pipeline rank."""
    kind: Kind
    """Kind of the collective; send_recv: with another pipeline rank, which has the parameters too."""
    axis: str
    """Mesh axis; empty for send_recv."""
    what: What
    """Whether weights or gradients move."""
    when: When
    """Whether it runs once a step or once a micro-batch. ZeRO 3 gathers weights twice a micro-batch: both are counted
    here."""
    elements: float
    """Elements of the larger of what a device holds before and after; for send_recv those that it sends."""


def list_parameter_collectives(lowered: LoweredPlan, evaluator: Evaluator) -> Iterator[ParameterCollective]:
    """What parameters and gradients send in a step: the sums that `automap.price.kernels.step` turns into seconds."""
    # Elements do not depend on the samples: what one kind of device sees, all see.
    lowered = lowered.views[0]
    calls, parts = evaluator.distinct_units(lowered)
    costs = evaluator.unit_costs(lowered, calls)
    ranks, axes = len(lowered.layout.stages), len(lowered.axes)
    reduced, gathered, scattered, gathered_each, scattered_each = np.zeros((5, ranks, axes))
    for part in parts:
        rank, cost = part.chunk % ranks, costs[part.row]
        reduced[rank] += part.times * cost.reduced[:axes]
        gathered[rank] += part.times * cost.gathered[:axes]
        scattered[rank] += part.times * cost.scattered[:axes]
    gathered_each += gathered
    scattered_each += scattered
    for tie in evaluator.tied.rows(lowered):
        if tie.rank == tie.other_rank:
            reduced[tie.rank] -= tie.excess.reduced[:axes]
            gathered[tie.rank] -= tie.excess.gathered[:axes]
            scattered[tie.rank] -= tie.excess.scattered[:axes]
            gathered_each[tie.rank] += tie.gathered_again[:axes]
            scattered_each[tie.rank] += tie.scattered_again[:axes]
            continue
        for rank in (int(tie.rank), int(tie.other_rank)):
            yield ParameterCollective(
                rank=rank, kind="send_recv", axis="", what="gradients", when="step", elements=float(tie.exchanged)
            )
    for rank, a in np.argwhere(lowered.layout.arrays.axes > 1.0).tolist():
        found: list[tuple[Kind, What, When, float]] = []
        if lowered.zero == 0 or not lowered.zero_axes[a]:
            summed = reduced if lowered.zero == 0 else scattered
            found.append(("all_reduce", "gradients", "step", summed[rank, a]))
        else:
            if lowered.zero == 1:
                found.append(("reduce_scatter", "gradients", "step", scattered[rank, a]))
            else:
                found.append(("reduce_scatter", "gradients", "micro_batch", scattered_each[rank, a]))
            if lowered.zero == 3:
                found.append(("all_gather", "weights", "micro_batch", 2.0 * gathered_each[rank, a]))
            else:
                found.append(("all_gather", "weights", "step", gathered[rank, a]))
        for kind, what, when, elements in found:
            # What is left of a tied parameter after a subtraction is no element.
            if elements > 0.5:
                yield ParameterCollective(
                    rank=rank, kind=kind, axis=lowered.axes[a], what=what, when=when, elements=float(elements)
                )
