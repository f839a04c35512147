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

    Where several axes reduce a gradient, the inner ones come first, and an outer one carries what the inner ones leave
    a rank with; under ZeRO the axes that it shards over come before all others.
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
    """Bytes that are kept if nothing is recomputed; of a unit that is recomputed as a whole those of them that it does
    not save anyway, which are alive while it runs again."""
    workspace_bytes: float
    """Bytes that the largest operator writes."""
    boundary_bytes: float
    """Bytes that a rank sends to the next stage if a chunk ends behind the unit."""
    result_bytes: float
    """Bytes that the backward pass needs of what crosses out of the unit, where the unit behind keeps it too: only the
    saved bytes of that one have it."""
    forward_comm_s: PerCollective
    """Seconds of collectives in the forward pass that nothing hides, see `exposed_share`."""
    backward_comm_s: PerCollective
    """The same in the backward pass."""
    recompute_comm_s: PerCollective
    """The same of what recomputation repeats."""
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
    """Seconds of waiting for the host where gradients of inputs are computed apart, recomputation included."""
    weight_host_s: float
    """Seconds of waiting for the host where gradients of weights are computed apart."""
    launched: float
    """Kernels of the forward pass."""
    weight_kernels: float
    """Kernels of the forward pass whose backward pass makes gradients of weights."""
    forward_waits: float
    """Host time of the collectives of the forward pass, in that of a collective of two ranks."""
    backward_waits: float
    """Host time of the collectives of the backward pass, recomputation included, in the same unit."""
    forward_ring_s: float
    """Seconds of keys and values on their way round a ring in the forward pass, as far as no product hides them."""
    backward_ring_s: float
    """The same of keys and values, and of their gradients, in the backward pass."""
    recompute_ring_s: float
    """The same of keys and values in recomputation."""
    forward_attended_s: float
    """Seconds of attention in the forward pass, which hide a ring."""
    backward_attended_s: float
    """Seconds of attention in the backward pass, which hide a ring."""
    gathered: PerAxis
    """Elements of parameters that ZeRO gathers over each axis."""
    num_parameters: float
    """Parameters of the unit as the trainer knows them: how many calls gather them one by one."""
    scattered: PerAxis
    """Elements of gradients that are scattered over each axis under ZeRO, or all-reduced once a step over an axis that
    ZeRO does not shard over."""
    frozen: float
    """Those of `parameters` that are not trained: they have no gradients and no state of the optimizer."""
    zero_frozen: float
    """Those of `zero_parameters` that are not trained."""
    gathered_frozen: PerAxis
    """Those of `gathered` that are not trained: no optimizer changes them, so that ZeRO 1 and 2 never gather them."""
    unanswered: float
    """Kernels of the forward pass that have no backward pass, for nothing at them or before them is trained."""


@dataclass(kw_only=True, slots=True)
class ReshardedRow:
    """Seconds of bringing one tensor to an operand, or of exchanging it inside an operator, in the forward pass."""

    comm_s: PerCollective
    """Seconds of each kind of collective that nothing hides."""
    waits: float
    """Host time of the collectives, see `UnitCostRow.forward_waits`."""
    ring_s: float
    """Seconds on the way round a ring."""


@dataclass(kw_only=True, slots=True)
class CollectiveRow:
    """One collective of a micro-batch, as it was priced."""

    kind: int
    """Kind of collective."""
    axis: int
    """Mesh axis over whose groups it runs."""
    data_bytes: float
    """Bytes of the larger of what a rank holds before and after."""
    seconds: float
    """Seconds of the collective, hidden or not."""
    shown_s: float
    """Seconds of it that nothing hides."""
    operator: int
    """Row of the operator that requires it."""
    tensor: int
    """Row of the tensor that moves."""
    direction: int
    """FORWARD_PASS, BACKWARD_PASS or BEFORE_SENDING."""


FORWARD_PASS, BACKWARD_PASS, BEFORE_SENDING = 0, 1, -1
"""When a collective runs; BEFORE_SENDING: in the forward pass of the stage before, which makes a sum whole there."""

UNIT_COST_DTYPE, RESHARDED_DTYPE, COLLECTIVE_DTYPE = (
    dtype_of(UnitCostRow),
    dtype_of(ReshardedRow),
    dtype_of(CollectiveRow),
)
UNIT_COST, RESHARDED, COLLECTIVE = map(record_type, (UNIT_COST_DTYPE, RESHARDED_DTYPE, COLLECTIVE_DTYPE))
UNIT_COST_WIDTH = UNIT_COST_DTYPE.itemsize // 8
"""Numbers in a row of unit costs, which may also be read as an array of floats and added up."""


class Recorder(NamedTuple):
    """Where the collectives of a unit are written down, in the order in which they are priced."""

    rows: Annotated[Rows, COLLECTIVE[::1]]
    """[capacity] see `CollectiveRow`; what exceeds the capacity is not written down."""
    num_rows: Ints
    """[1] rows written."""


RECORDER = tuple_type(Recorder)


# -- a step -----------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class SettingsRow:
    """What the time and memory of a step depend on besides units: trainer, precision and ZeRO."""

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
    """1 where gradients have memory for the whole training, 0 where the backward pass makes them."""
    unused_share: float
    """Memory that the allocator holds and nothing uses, as a share of what is used."""
    held_update_bytes: float
    """Bytes for each parameter that the optimizer holds while it updates, beside its state."""
    bucket_bytes: float
    """Bytes for each parameter that buckets hold beside the gradients, where replicas are trained without ZeRO."""
    pipeline_bytes: float
    """Bytes that the framework reserves on each device of a pipeline, beside `reserved_bytes`."""
    crossing_buffers: float
    """Buffers for what crosses between stages, for each micro-batch of a step."""
    frozen_bytes: float
    """Bytes of the master of a weight that the trainer converts, trained or not; 0 where it converts none."""


@dataclass(kw_only=True, slots=True)
class UnitInStepRow:
    """What the time and memory of a step depend on of a `UnitCostRow`.

    The fields that have a namesake in `UnitCostRow` are equal to it.
    """

    forward_s: float
    """Seconds of the forward pass of a micro-batch."""
    backward_s: float
    """Seconds of the backward pass, recomputation included."""
    input_s: float
    """Seconds of the part of the backward pass that makes gradients of inputs, recomputation included, run apart."""
    weight_s: float
    """Seconds of the part that makes gradients of weights, run apart."""
    saved_bytes: float
    """Bytes kept from the forward pass to the backward pass."""
    live_bytes: float
    """Bytes that are alive while the unit is recomputed."""
    workspace_bytes: float
    """Bytes that the largest operator writes."""
    boundary_bytes: float
    """Bytes that a rank sends to the next stage if a chunk ends behind the unit."""
    result_bytes: float
    """Bytes that the backward pass needs of what crosses out of the unit, and only the unit behind counts as saved."""
    parameters: float
    """Parameters that a rank holds without ZeRO."""
    zero_parameters: float
    """Parameters that a rank holds under ZeRO."""
    frozen: float
    """Those of `parameters` that are not trained."""
    zero_frozen: float
    """Those of `zero_parameters` that are not trained."""
    num_parameters: float
    """Parameters of the unit as the trainer knows them."""
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
    """Equal units in equal surroundings that follow each other in one chunk."""

    chunk: int
    """Number of the chunk; parts are sorted by it."""
    row: int
    """Row of the unit costs."""
    times: int
    """How many units there are."""
    is_recomputed: int
    """Whether they are recomputed as a whole."""


@dataclass(kw_only=True, slots=True)
class MomentRow:
    """What the passes of a micro-batch hold in the fullest moment, see `automap.price.kernels.memory.add_to_moment`."""

    saved: float
    """Bytes that all units so far save for the backward pass."""
    activations: float
    """Bytes of saved activations in that moment, and of those that are alive while a unit is recomputed."""
    gradients: float
    """Bytes of the gradients that the backward pass has made until then."""
    working: float
    """Bytes that the passes of the unit which runs then need besides."""


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
    """Seconds of the reduction of gradients, and of ZeRO's gathers behind the optimizer, that nothing hides."""
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
    """Seconds of collectives inside the stage that nothing hides."""


@dataclass(kw_only=True, slots=True)
class ShareRow:
    """What one rank has of a tied parameter; the fields mean what they mean in `UnitCostRow`."""

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
    """A parameter that two units read, and what it costs more or less than two parameters."""

    rank: int
    """Pipeline rank of one of them."""
    other_rank: int
    """Pipeline rank of the other one; the same rank where this has the parameter for an earlier unit anyway."""
    first: int
    """Number of the first row of the same parameter; the rows of a parameter follow one another."""
    exchanged: float
    """Elements of the gradient that two unlike ranks hold, of the one with more of them."""
    excess: ShareRow
    """What one rank would have too much of it if each unit had a parameter of its own."""
    gathered_again: PerAxis
    """Elements that ZeRO gathers over each axis for each micro-batch beyond those of the units by themselves."""
    scattered_again: PerAxis
    """Elements that ZeRO scatters over each axis for each micro-batch beyond those of the units by themselves."""


@dataclass(kw_only=True, slots=True)
class ReadingRow:
    """How the units of a rank read a tied parameter on one mesh axis."""

    placement: int
    """Placement, UNKNOWN while all readers are undecided, or NOBODY."""
    is_summed: int
    """Whether the gradient has to be summed."""
    is_open: int
    """Whether a reader is undecided."""


SETTINGS_DTYPE, PART_DTYPE, RANK_COST_DTYPE = dtype_of(SettingsRow), dtype_of(PartRow), dtype_of(RankCostRow)
UNIT_IN_STEP_DTYPE = dtype_of(UnitInStepRow)
UNIT_IN_STEP = record_type(UNIT_IN_STEP_DTYPE)
SHARE_DTYPE, TIE_DTYPE, READING_DTYPE = dtype_of(ShareRow), dtype_of(TieRow), dtype_of(ReadingRow)
SETTINGS, PART, RANK_COST = map(record_type, (SETTINGS_DTYPE, PART_DTYPE, RANK_COST_DTYPE))
MOMENT_DTYPE = dtype_of(MomentRow)
MOMENT = record_type(MOMENT_DTYPE)
SHARE, TIE, READING = map(record_type, (SHARE_DTYPE, TIE_DTYPE, READING_DTYPE))
