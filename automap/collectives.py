"""The list of collectives that a plan calls for, forward and backward.

The list is written down by the very kernel that prices the plan, so that what runs can be checked against what was
priced. Units: bytes, seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from automap.fitted import COLLECTIVES
from automap.price.choice import Choice
from automap.price.communication import (
    L_AXIS,
    L_BACKWARD,
    L_BYTES,
    L_KIND,
    L_OPERATOR,
    L_SECONDS,
    L_TENSOR,
)
from automap.price.evaluator import Evaluator


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


def list_collectives(choice: Choice, evaluator: Evaluator) -> Iterator[Collective]:
    """Every collective inside the stages of one micro-batch, in the order of the operators.

    Recomputed operators repeat their forward collectives; gradient reductions (once a step) and ZeRO's gathers are
    not listed here.
    """
    tables, graph = evaluator.tables, evaluator.problem.graph
    num_ranks = len(choice.layout.stages)
    for number, segment, incoming in evaluator.surroundings(choice):
        unit = evaluator.blocks.units[segment.unit]
        representative = evaluator.blocks.representative(unit.type)
        listed = evaluator.collectives(choice, number % num_ranks, segment, incoming)
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
                axis=choice.axes[int(record[L_AXIS])],
                bytes=float(record[L_BYTES]),
                seconds=float(record[L_SECONDS]),
                stage=number - leaves,
                operator="" if leaves else op.name,
                tensor=(*op.inputs, *op.outputs)[slot],
                direction="backward" if record[L_BACKWARD] > 0.0 else "forward",
            )
