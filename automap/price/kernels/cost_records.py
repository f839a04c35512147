"""The rows of costs: of a unit, of a collective, of a rank, of a tied parameter; and the settings of the trainer.

Units: seconds, bytes, elements of parameters. Numbers of parameters and of gradients are those of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from automap.arrays import Floats
from automap.price.kernels.array_types import Ints, Rows, dtype_of, record_type, tuple_type
from automap.price.kernels.stage_records import PerCollective

MAX_AXES = 4
"""Mesh axes that a row of costs has room for."""

PerAxis = Annotated[Floats, np.float64, MAX_AXES]
"""One number for each mesh axis; zero behind the last axis of the plan."""


# -- a unit -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class UnitCostRow:
    """Cost of a unit, or of one of its operators, for one micro-batch on one rank: the result of `unit_cost`.

    Where several axes reduce a gradient, the inner axes reduce and scatter it first, and an outer axis reduces the part
    that a rank has after that. Under ZeRO, the axes that it shards over come before all others.
    """

    forward_s: float
    """Seconds of the device in the forward pass, without collectives."""
    backward_s: float
    """Seconds of the device in the backward pass, without collectives and recomputation."""
    recompute_s: float
    """Seconds of the device to recompute activations."""
    parameters: float
    """Parameters that a rank holds without ZeRO."""
    zero_parameters: float
    """Parameters that a rank holds under ZeRO."""
    saved_bytes: float
    """Bytes kept from the forward pass to the backward pass."""
    live_bytes: float
    """Bytes that are saved if nothing is recomputed. If the unit is recomputed as a whole, those of them that
    `saved_bytes` does not contain: they are in memory from its recomputation to its backward pass."""
    workspace_bytes: float
    """Bytes that the largest operator writes."""
    boundary_bytes: float
    """Bytes that a rank sends to the next stage if a chunk ends after the unit."""
    result_bytes: float
    """Bytes of the tensor that crosses out of the unit, if the backward passes of this unit and of the next one need
    it: only the `saved_bytes` of the next one contain them."""
    forward_comm_s: PerCollective
    """Exposed seconds of collectives in the forward pass, see `exposed_share`."""
    backward_comm_s: PerCollective
    """The same in the backward pass."""
    recompute_comm_s: PerCollective
    """The same of the collectives that recomputation repeats."""
    reduced: PerAxis
    """Elements of gradients that are all-reduced over each axis once a step without ZeRO."""
    forward_host_s: float
    """Seconds that the device waits for its host in the forward pass."""
    backward_host_s: float
    """Seconds that the device waits for its host in the backward pass, recomputation included."""
    input_s: float
    """Part of `backward_s` that makes gradients of inputs."""
    weight_s: float
    """Part of `backward_s` that makes gradients of weights."""
    input_host_s: float
    """Seconds that the device waits for its host in a separate pass for gradients of inputs, recomputation included."""
    weight_host_s: float
    """Seconds that the device waits for its host in a separate pass for gradients of weights."""
    launched: float
    """Kernels of the forward pass."""
    weight_kernels: float
    """Kernels of the forward pass whose backward pass makes gradients of weights."""
    forward_waits: float
    """Host time of the collectives of the forward pass, as a multiple of that of a collective of two ranks."""
    backward_waits: float
    """Host time of the collectives of the backward pass, recomputation included, in the same unit."""
    forward_ring_s: float
    """Seconds to send keys and values round a ring in the forward pass, before `forward_attended_s` hides any."""
    backward_ring_s: float
    """The same of keys and values, and of their gradients, in the backward pass."""
    recompute_ring_s: float
    """The same of keys and values in recomputation."""
    forward_attended_s: float
    """Seconds of attention in the forward pass, under which the ring is hidden."""
    backward_attended_s: float
    """Seconds of attention in the backward pass, under which the ring is hidden."""
    gathered: PerAxis
    """Elements of parameters that ZeRO gathers over each axis."""
    num_parameters: float
    """Number of parameter tensors of the unit as the trainer counts them, and of the calls that gather them one by
    one."""
    scattered: PerAxis
    """Elements of gradients that are scattered over each axis under ZeRO, or all-reduced once a step over an axis that
    ZeRO does not shard over."""
    frozen: float
    """Those of `parameters` that are not trained: they have no gradients and no optimizer state."""
    zero_frozen: float
    """Those of `zero_parameters` that are not trained."""
    gathered_frozen: PerAxis
    """Those of `gathered` that are not trained: the optimizer does not change them, so ZeRO 1 and 2 never gather
    them."""
    unanswered: float
    """Kernels of the forward pass that have no backward pass, since nothing at or before them is trained."""


@dataclass(kw_only=True, slots=True)
class ReshardedRow:
    """Cost of resharding one tensor for an operand, or of the collectives inside an operator, in the forward pass."""

    comm_s: PerCollective
    """Exposed seconds of each kind of collective."""
    waits: float
    """Host time of the collectives, see `UnitCostRow.forward_waits`."""
    ring_s: float
    """Seconds to send it round a ring, see `UnitCostRow.forward_ring_s`."""


@dataclass(kw_only=True, slots=True)
class CollectiveRow:
    """One collective of a micro-batch, as it was priced."""

    kind: int
    """Kind of collective."""
    axis: int
    """Mesh axis over whose groups it runs."""
    data_bytes: float
    """Bytes that a rank holds before or after it, the larger of the two."""
    seconds: float
    """Seconds of the collective, hidden or not."""
    shown_s: float
    """Exposed seconds of it."""
    operator: int
    """Row of the operator that requires it."""
    tensor: int
    """Row of the tensor that moves."""
    direction: int
    """FORWARD_PASS, BACKWARD_PASS or BEFORE_SENDING."""


FORWARD_PASS, BACKWARD_PASS, BEFORE_SENDING = 0, 1, -1
"""When a collective runs. BEFORE_SENDING: in the forward pass of the stage before, which all-reduces a partial sum."""

UNIT_COST_DTYPE, RESHARDED_DTYPE, COLLECTIVE_DTYPE = (
    dtype_of(UnitCostRow),
    dtype_of(ReshardedRow),
    dtype_of(CollectiveRow),
)
UNIT_COST, RESHARDED, COLLECTIVE = map(record_type, (UNIT_COST_DTYPE, RESHARDED_DTYPE, COLLECTIVE_DTYPE))
UNIT_COST_WIDTH = UNIT_COST_DTYPE.itemsize // 8
"""Numbers in a `UnitCostRow`, which may also be read as an array of floats."""


class Recorder(NamedTuple):
    """List of the collectives of a unit, in the order in which they are priced."""

    rows: Annotated[Rows, COLLECTIVE[::1]]
    """[capacity] see `CollectiveRow`; collectives beyond the capacity are not listed."""
    num_rows: Ints
    """[1] rows written."""


RECORDER = tuple_type(Recorder)


# -- a step -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class SettingsRow:
    """Settings of trainer, precision and ZeRO, on which the time and memory of a step depend besides its units."""

    parameter_bytes: float
    """Bytes of a parameter."""
    gradient_bytes: float
    """Bytes of a gradient in memory."""
    optimizer_bytes: float
    """Bytes of the optimizer's state for each parameter."""
    zero_stage: float
    """Stage of ZeRO, 0 to 3."""
    gradient_overlap: float
    """Share of the reduction of gradients that may hide under a backward pass."""
    gather_overlap: float
    """Share of ZeRO's gathers that may hide under a forward pass."""
    reserved_bytes: float
    """Bytes that the framework reserves on each device."""
    sent_gradient_bytes: float
    """Bytes of a gradient on its way between ranks."""
    update_bytes: float
    """Bytes that the optimizer moves for each parameter."""
    micro_batch_s: float
    """Host seconds of each micro-batch besides its kernels."""
    step_s: float
    """Host seconds of each step besides its micro-batches."""
    send_s: float
    """Host seconds of each exchange with the next rank."""
    send_overlap: float
    """Share of the exchange with the next rank that is hidden."""
    gathers_singly: float
    """1 where ZeRO gathers each parameter by a call of its own."""
    most_gathered: float
    """Most parameters that ZeRO 3 holds gathered."""
    keeps_gradients: float
    """1 where gradients have memory for the whole training, 0 where the backward pass allocates them."""
    unused_share: float
    """Memory that the allocator holds unused, as a share of the used memory."""
    held_update_bytes: float
    """Bytes for each parameter that the optimizer holds while it updates, beside its state."""
    bucket_bytes: float
    """Bytes for each parameter of the buckets in which replicas without ZeRO reduce gradients, beside the gradients."""
    pipeline_bytes: float
    """Bytes that the framework reserves on each device of a pipeline, beside `reserved_bytes`."""
    crossing_buffers: float
    """Buffers for the tensor that crosses between two stages, for each micro-batch of a step."""
    frozen_bytes: float
    """Bytes of the master copy of a weight, trained or not, where the trainer computes with weights of another format;
    else 0."""
    pairs_passes: float
    """1 where the forward pass of a unit runs beside the backward pass of a unit of another micro-batch."""


@dataclass(kw_only=True, slots=True)
class UnitInStepRow:
    """The numbers of a unit on which the time and memory of a step depend, taken from its `UnitCostRow`.

    The seconds here include waiting for the host and exposed collectives. All other fields equal those of
    `UnitCostRow` with the same names.
    """

    forward_s: float
    """Seconds of the forward pass of a micro-batch."""
    backward_s: float
    """Seconds of the backward pass, recomputation included."""
    input_s: float
    """Seconds of a separate pass for gradients of inputs, recomputation included."""
    weight_s: float
    """Seconds of a separate pass for gradients of weights."""
    saved_bytes: float
    """Bytes kept from the forward pass to the backward pass."""
    live_bytes: float
    """Bytes that are in memory while the unit is recomputed, beside the saved ones."""
    workspace_bytes: float
    """Bytes that the largest operator writes."""
    boundary_bytes: float
    """Bytes that a rank sends to the next stage if a chunk ends after the unit."""
    result_bytes: float
    """Bytes of the tensor that crosses out of the unit which only the next unit counts as saved."""
    parameters: float
    """Parameters that a rank holds without ZeRO."""
    zero_parameters: float
    """Parameters that a rank holds under ZeRO."""
    frozen: float
    """Those of `parameters` that are not trained."""
    zero_frozen: float
    """Those of `zero_parameters` that are not trained."""
    num_parameters: float
    """Number of parameter tensors of the unit as the trainer counts them."""
    reduced: PerAxis
    """Elements of gradients that are all-reduced over each axis once a step without ZeRO."""
    gathered: PerAxis
    """Elements of parameters that ZeRO gathers over each axis."""
    gathered_frozen: PerAxis
    """Those of `gathered` that are not trained."""
    scattered: PerAxis
    """Elements of gradients that are scattered over each axis."""


@dataclass(kw_only=True, slots=True)
class PartRow:
    """A part of a chunk: consecutive units that are equal and priced alike."""

    chunk: int
    """Number of the chunk; parts are sorted by it."""
    row: int
    """Row of the unit costs."""
    times: int
    """How many units there are."""
    is_recomputed: int
    """Whether each of them is recomputed as a whole."""


@dataclass(kw_only=True, slots=True)
class MomentRow:
    """Memory at the fullest moment of the passes of a micro-batch, see `automap.price.kernels.memory.add_to_moment`."""

    saved: float
    """Bytes that all units added so far save for the backward pass."""
    activations: float
    """Bytes of saved and recomputed activations at that moment."""
    gradients: float
    """Bytes of the gradients that the backward pass has made until that moment."""
    working: float
    """Bytes that the unit which runs at that moment needs besides, see `automap.price.kernels.memory.working_bytes`."""


@dataclass(kw_only=True, slots=True)
class RankCostRow:
    """Time and memory of one pipeline rank: the result of `step`. Memory is that of the fullest moment."""

    end_s: float
    """Seconds until the rank is done with the step."""
    compute_s: float
    """Seconds of kernels, and of waiting for the host."""
    bubble_s: float
    """Seconds in which the rank has nothing to do."""
    optimizer_s: float
    """Seconds of the optimizer."""
    sync_s: float
    """Exposed seconds of the reduction of gradients, and of ZeRO's gathers after the optimizer."""
    parameter_bytes: float
    """Bytes of parameters."""
    gradient_bytes: float
    """Bytes of gradients."""
    optimizer_bytes: float
    """Bytes of the optimizer's state."""
    activation_bytes: float
    """Bytes of activations."""
    buffer_bytes: float
    """Bytes of temporaries, of ZeRO's gathers, and of the framework."""
    capacity_bytes: float
    """Bytes of a device that a plan may use."""
    overhead_s: float
    """Host seconds besides kernels."""
    exchange_s: float
    """Seconds of waiting for exchanges with neighbours in the pipeline."""
    comm_s: PerCollective
    """Exposed seconds of collectives inside the stage, without those of ZeRO."""
    zero_s: float
    """Exposed seconds in which the passes gather weights (ZeRO 3) and scatter gradients (ZeRO 2 and 3)."""


@dataclass(kw_only=True, slots=True)
class TiedShareRow:
    """What a tied parameter adds to one rank; the fields are those of `UnitCostRow` with the same names."""

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


@dataclass(kw_only=True, slots=True)
class TieRow:
    """A parameter that two units read, and the difference to the cost of two separate parameters."""

    rank: int
    """Pipeline rank of one of the units."""
    other_rank: int
    """Pipeline rank of the other unit; equal to `rank` where that rank holds the parameter for an earlier unit."""
    first: int
    """Number of the first row about the same parameter; these rows are consecutive."""
    exchanged: float
    """Elements of the gradient on the two ranks, if these differ: on the one that holds more of them."""
    excess: TiedShareRow
    """What the price of separate units counts too much on the rank, if both units are on one rank."""
    gathered_again: PerAxis
    """Elements that ZeRO gathers over each axis for each micro-batch, beyond those that the units gather if each is
    alone with its parameter."""
    scattered_again: PerAxis
    """The same of the elements of gradients that ZeRO scatters."""


@dataclass(kw_only=True, slots=True)
class ReadingRow:
    """How the units of a rank read a tied parameter on one mesh axis."""

    placement: int
    """Placement, UNKNOWN while all readers are undecided, or `automap.price.kernels.tied_parameters.NOBODY`."""
    is_summed: int
    """Whether the gradient has to be summed over the axis."""
    is_open: int
    """Whether a reader is undecided."""


SETTINGS_DTYPE, PART_DTYPE, RANK_COST_DTYPE = dtype_of(SettingsRow), dtype_of(PartRow), dtype_of(RankCostRow)
UNIT_IN_STEP_DTYPE = dtype_of(UnitInStepRow)
UNIT_IN_STEP = record_type(UNIT_IN_STEP_DTYPE)
SHARE_DTYPE, TIE_DTYPE, READING_DTYPE = dtype_of(TiedShareRow), dtype_of(TieRow), dtype_of(ReadingRow)
SETTINGS, PART, RANK_COST = map(record_type, (SETTINGS_DTYPE, PART_DTYPE, RANK_COST_DTYPE))
MOMENT_DTYPE = dtype_of(MomentRow)
MOMENT = record_type(MOMENT_DTYPE)
SHARE, TIE, READING = map(record_type, (SHARE_DTYPE, TIE_DTYPE, READING_DTYPE))
