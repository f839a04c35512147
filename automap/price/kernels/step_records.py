"""Arguments of `automap.price.kernels.step`: the pipeline, the stages that it runs on, and scratch memory.

Units: seconds, bytes, elements of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
from numba import int64

from automap.jit import kernel
from automap.price.kernels.array_types import (
    Floats,
    Floats2,
    Ints,
    Ints2,
    Mask,
    Rows,
    dtype_of,
    record_type,
    tuple_type,
)
from automap.price.kernels.cost_records import (
    MOMENT,
    MOMENT_DTYPE,
    PART,
    TIE,
    UNIT_IN_STEP,
    UNIT_IN_STEP_DTYPE,
    PerAxis,
)
from automap.price.kernels.stage_records import HARDWARE, LINK
from automap.schedule import A_COUNT


class Order(NamedTuple):
    """The order of the actions of a step."""

    kind: int
    """Kind of the schedule, see `automap.schedule.KINDS`."""
    num_micro_batches: int
    """Micro-batches of one step."""
    program: Ints2
    """[actions, A_COUNT] list of actions of an explicit schedule; empty for other kinds."""


class Pipeline(NamedTuple):
    """The units that run on each rank, and the order of their passes."""

    order: Order
    """Order of the actions."""
    num_ranks: int
    """Pipeline ranks."""
    num_chunks: int
    """Chunks; chunk c runs on rank c mod ranks."""
    zero_axes: Mask
    """[axes] whether ZeRO shards over the axis."""
    parts: Annotated[Rows, PART[::1]]
    """Units of each chunk, sorted by chunk, see `PartRow`."""
    tied: Annotated[Rows, TIE[::1]]
    """Parameters that two units read, see `TieRow`."""
    stages: Ints
    """[ranks] row of each rank in `StageArrays`."""
    boundaries: Ints
    """[ranks] row in `StageArrays` of the boundary after each rank."""


class StageArrays(NamedTuple):
    """The distinct stages and boundaries that pipelines run on."""

    axes: Floats2
    """[stages, axes] ranks of each mesh axis."""
    links: Annotated[Rows, LINK[:, ::1]]
    """[stages, axes] see `LinkRow`."""
    hardware: Annotated[Rows, HARDWARE[::1]]
    """[stages] see `HardwareRow`."""
    capacity: Floats
    """[stages] bytes of its smallest device that a plan may use."""
    send_latency_s: Floats
    """[boundaries] seconds of an empty message to the next rank."""
    send_bytes_per_s: Floats
    """[boundaries] bandwidth from each device to the next rank."""


ORDER, PIPELINE, STAGE_ARRAYS = tuple_type(Order), tuple_type(Pipeline), tuple_type(StageArrays)


@dataclass(kw_only=True, slots=True)
class RankTotalsRow:
    """Sums of fields of `UnitCostRow` over the units of one rank, where tied parameters count once."""

    crossing_bytes: float
    """Bytes of the largest tensor of a micro-batch that a chunk of the rank receives from another or sends to it."""
    parameters: float
    """Parameters that the rank holds without ZeRO."""
    zero_parameters: float
    """Parameters that the rank holds under ZeRO."""
    frozen: float
    """Those of `parameters` that are not trained."""
    zero_frozen: float
    """Those of `zero_parameters` that are not trained."""
    reduced: PerAxis
    """Elements of gradients that are all-reduced over each axis once a step without ZeRO."""
    gathered: PerAxis
    """Elements of parameters that ZeRO gathers over each axis."""
    gathered_frozen: PerAxis
    """Those of `gathered` that are not trained."""
    scattered: PerAxis
    """Elements of gradients that are scattered over each axis under ZeRO."""


RANK_TOTALS_DTYPE = dtype_of(RankTotalsRow)
RANK_TOTALS = record_type(RANK_TOTALS_DTYPE)


class StepWorkspace(NamedTuple):
    """Scratch memory of one caller, for pipelines up to a number of ranks and chunks."""

    counts: Floats2
    """[words, chunks] how often a chunk runs each kind of action of `automap.schedule` in a step."""
    seconds: Floats2
    """[words, chunks] seconds of one action."""
    saved: Floats
    """[chunks] whole bytes that one micro-batch keeps for its backward pass."""
    send: Floats
    """[chunks] seconds of a message to the next chunk beside the passes: 0, since the passes contain them."""
    exchange: Floats
    """[chunks] seconds that a rank waits for the tensor that crosses out of a chunk."""
    busy: Floats
    """[ranks] seconds of work."""
    ends: Floats
    """[ranks] seconds until a rank has finished its last action."""
    peak: Floats
    """[ranks] most bytes of saved activations."""
    last_backward: Floats
    """[ranks] seconds of the last backward pass, without its exchanges."""
    holds: Mask
    """[ranks] scratch: whether a rank holds a tied parameter."""
    totals: Annotated[Rows, RANK_TOTALS[::1]]
    """[ranks] see `RankTotalsRow`."""
    moments: Annotated[Rows, MOMENT[::1]]
    """[chunks] the fullest moment of a micro-batch in each chunk; where the backward pass allocates gradients, that in
    all chunks of a rank, in the row of the first one."""
    unit: Annotated[Rows, UNIT_IN_STEP[::1]]
    """[1] scratch: the unit that is added."""
    program: Ints2
    """[0, A_COUNT] the program of a schedule that is not explicit."""


STEP_WORKSPACE = tuple_type(StepWorkspace)


@kernel(STEP_WORKSPACE(int64, int64))
def new_step_workspace(num_ranks, num_chunks):
    """Memory for pipelines of at most these numbers of ranks and chunks."""
    return StepWorkspace(
        np.empty((4, num_chunks)),
        np.empty((4, num_chunks)),
        np.empty(num_chunks),
        np.zeros(num_chunks),
        np.empty(num_chunks),
        np.empty(num_ranks),
        np.empty(num_ranks),
        np.empty(num_ranks),
        np.empty(num_ranks),
        np.empty(num_ranks, np.bool_),
        np.empty(num_ranks, RANK_TOTALS_DTYPE),
        np.empty(num_chunks, MOMENT_DTYPE),
        np.empty(1, UNIT_IN_STEP_DTYPE),
        np.empty((0, A_COUNT), np.int64),
    )
