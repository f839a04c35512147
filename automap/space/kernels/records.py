"""A plan space as arrays, which `automap.space.compile` builds and every kernel of the space reads.

Everything here belongs to a space and to no plan. Tables with several fields are structured arrays, read by field:
`space.groups[group].first_member`. The *distinct stages* are the stages of all plans of the space that differ in
hardware, links or mesh; other arrays refer to them by row. Units: seconds, bytes, samples, devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np

from automap.price.kernels.array_types import (
    Floats,
    Floats2,
    Ints,
    Ints2,
    Ints3,
    Ints4,
    Ints5,
    Mask,
    Mask2,
    Mask5,
    Record,
    Rows,
    dtype_of,
    rows_type,
    tuple_type,
)
from automap.price.kernels.cost_records import SETTINGS, UNIT_IN_STEP
from automap.price.kernels.records import Arrays
from automap.price.kernels.stage_records import HARDWARE, LINK
from automap.price.kernels.unit_workspace import OperatorMemory


class FirstSlots(NamedTuple):
    """Number of the first slot of each kind of decision, in the order in which they are decided.

    The slots of a kind are consecutive. A kind without slots has the same number as the next kind.
    """

    pp: int
    tp: int
    middle: int
    micro_batches: int
    virtual: int
    schedule: int
    order: int
    devices: int
    shares: int
    cut: int
    recompute: int
    zero: int
    signature: int


class Scalars(NamedTuple):
    """Numbers that hold for the whole space."""

    num_devices: int
    """Devices of the cluster."""
    global_batch: int
    """Samples of a step."""
    part: int
    """Devices of a part, see `automap.space.stage_sizes`."""
    longest: int
    """Stages of the longest pipeline whose stages may have unlike numbers of devices."""
    most_meshes: int
    """Largest number of rows that `unlike_meshes` writes."""
    most_values: int
    """Largest number of values of a slot."""
    orders_one: int
    """Whether the order of the devices matters to a pipeline of one stage, 0 or 1."""
    proportional: int
    """Whether the user asked for uneven batch shares, 0 or 1."""
    binds_modes: int
    """Whether constraints bind the recompute modes of some units, 0 or 1."""
    one_mode: int
    """Whether all pipeline ranks have the same recompute mode, 0 or 1."""
    level_steps: int
    """Steps of recomputation from one mode to the next, see `automap.space.recomputation`."""


GROUP = np.dtype(
    [
        ("first_member", np.int64),  # row of `SpaceArrays.members`
        ("num_members", np.int64),
        ("first_assignment", np.int64),  # row of `SpaceArrays.assignments`
        ("first_value", np.int64),  # column of `SpaceArrays.obeys`
        ("num_values", np.int64),
        ("whole", np.int64),  # value that keeps the leader whole
    ]
)
"""A linkage group: one decision on each mesh axis."""
TIED = np.dtype(
    [
        ("one", np.int64),  # unit
        ("other", np.int64),  # later unit
        ("first", np.int64),  # first row about the same parameter
        ("one_reader", np.int64),  # where the first unit's reader begins, see `read_too`
        ("other_reader", np.int64),
    ]
)
"""A parameter that two units use."""
LEVEL = np.dtype([("light", np.int64), ("heavy", np.int64), ("steps", np.int64)])
"""A level of recomputation, see `automap.space.recomputation.Level`."""
USUAL_LAYOUT = np.dtype([("first", np.int64), ("is_uniform", np.bool_)])
"""Layout of stages of the usual sizes, which no slot decides: row of its first rank in `SpaceArrays.stages`, -1 = no
such layout; and whether all ranks have equal costs, so that one rank is priced for all."""
SHAPE_NODE = np.dtype([("first_child", np.int64), ("num_children", np.int64), ("value", np.int64), ("shape", np.int64)])
"""A node of the tree of shapes, for the first values of a shape: its children, one for each possible next value, which
are consecutive and in ascending order; the last of its values; and the number of the shape if all values are decided,
else -1."""
MOVED = np.dtype([("until", np.float64), ("is_numbered", np.bool_)])
"""Probability that a move of one decision varies a kind of slot, as the upper end of the kind's interval in [0, 1); and
whether a plan may have several slots of the kind, of which one is drawn."""


class SpaceArrays(NamedTuple):
    """A plan space as flat arrays."""

    first: FirstSlots
    scalars: Scalars
    moved: Annotated[Rows, rows_type(MOVED)]
    """[kinds of decisions] see `MOVED`."""
    shape_nodes: Annotated[Rows, rows_type(SHAPE_NODE)]
    """[nodes of the tree of shapes] see `SHAPE_NODE`; the root first."""
    ranks: Ints
    """Pipeline ranks by the value of the slot `pp`."""
    sizes: Ints
    """By the value of the slot `pp`: devices of each rank except the first one, which has the remaining devices."""
    degrees: Ints
    """Values of the slot `tp`."""
    middles: Ints
    """Values of the slot `middle`, [1] without one."""
    micro_batches: Ints
    """Values of the slot `micro_batches`."""
    virtuals: Ints
    """Values of the slot `virtual`."""
    schedules: Ints
    """Values of the slot `schedule`, see `automap.schedule`."""
    stages: Ints
    """[ranks of all layouts of equal stages, one layout after the other] row of each among the distinct stages."""
    units: Ints
    """[units] type of each."""
    spans: Ints
    """[types + 1] first operator row of each type."""
    group_spans: Ints
    """[types + 1] first group of each type."""
    boundary: Ints
    """[types] row of `operands` that crosses out of a unit, or -1."""
    members: Ints
    """Operator rows of all groups, one group after the other."""
    assignments: Ints
    """Signatures of the members for each value of the group's slots, one group after the other."""
    groups: Annotated[Rows, rows_type(GROUP)]
    """[groups] see `GROUP`."""
    tied: Annotated[Rows, rows_type(TIED)]
    """[pairs of units that share a parameter] see `TIED`."""
    levels: Annotated[Rows, rows_type(LEVEL)]
    """[levels + 1] see `LEVEL`. The last one is for lower bounds and in no plan: each unit has the least costs of all
    modes; its mode is the number of modes."""
    mixed: Ints
    """[distinct stages] number among those of several kinds of devices, or -1."""
    quanta: Ints
    """[stages of several kinds] the samples of a rank are a multiple of this."""
    kind_rows: Ints2
    """[stages of several kinds, kinds] row of the distinct stage as if it consisted of each kind."""
    kind_ranks: Ints2
    """[stages of several kinds, kinds] ranks of the outer axis with each kind; a stage with fewer kinds repeats its
    last one."""
    weight: Floats
    """[units + 1] weight of all units before each, strictly rising."""
    capacity: Floats
    """[distinct stages] bytes of memory of a device."""
    speed: Floats
    """[distinct stages] relative speed of the stage."""
    send_latency_s: Floats
    """[boundaries] seconds of an empty message to the next rank; first those after each of `stages`."""
    send_bytes_per_s: Floats
    """[boundaries] bandwidth to the next rank."""
    tied_elements: Floats
    """[pairs of units that share a parameter] elements of the parameter."""
    tied_frozen: Mask
    """[pairs of units that share a parameter] whether the parameter is not trained."""
    settings: Annotated[Record, SETTINGS]
    """Settings of a step without ZeRO, see `SettingsRow`."""
    axes: Floats2
    """[distinct stages, axes] ranks of each mesh axis."""
    hardware: Annotated[Rows, HARDWARE[::1]]
    """[distinct stages] hardware of a device, see `HardwareRow`."""
    links: Annotated[Rows, LINK[:, ::1]]
    """[distinct stages, axes] link of each mesh axis, see `LinkRow`."""
    windows: Ints3
    """[chunks + 1, chunks, 2] first and last legal end of each chunk, by the number of chunks."""
    share_ways: Ints3
    """[stages of several kinds, values of `micro_batches`, values of `shares`] the first way to share out samples that
    gives the same samples; 0: even shares."""
    send_rows: Ints4
    """[order, parts before, parts of the last stage among them, parts of the next] boundary, or -1; the first stage
    follows the last one."""
    kind_samples: Ints4
    """[stages of several kinds, values of `micro_batches`, values of `shares`, kinds] samples of all ranks of a kind
    together."""
    usual_layouts: Annotated[Rows, rows_type(USUAL_LAYOUT, 4)]
    """[order, values of `pp`, inner degree, middle degree] see `USUAL_LAYOUT`."""
    stage_rows: Ints5
    """[order, inner degree, middle degree, parts before, parts] row of the distinct stage, or -1."""
    fills: Mask5
    """[inner, middle, micro-batches, stages, parts + 1] see `ways_to_fill`."""
    masks: Mask2
    """[modes, operator rows] whether each recompute mode recomputes an operator."""
    silent: Mask
    """[types] whether no mode recomputes anything in such units, since nothing in them or before them is trained."""
    obeys: Mask2
    """[axes, values of all groups] whether a signature obeys the user's constraints."""
    kept: Mask2
    """[units, modes] whether a mode obeys the constraints that forbid recomputation."""
    again: Mask2
    """[units, modes] whether a mode obeys the constraints that demand recomputation."""
    legal_levels: Mask2
    """[chunks + 1, levels] whether a level may be chosen, by the number of chunks."""
    modes: Mask
    """[modes] whether trainer, target and `hints.fix` allow a recompute mode."""
    zeros: Mask2
    """[3, 4] whether `hints.fix` and the target allow a ZeRO stage: in plans whose outer axis alone has several ranks,
    in plans with other axes, and in pipelines."""


SPACE = tuple_type(SpaceArrays)
"""Numba's type of `SpaceArrays`."""


@dataclass(kw_only=True, slots=True)
class PricedRow:
    """The price of a plan, or the bounds of a partial plan, in a cache."""

    one: int
    """A hash of everything on which the price depends; 0 in an empty entry."""
    two: int
    """Another hash of it."""
    seconds: float
    """Seconds of a step."""
    overflow: float
    """Overflow of memory, as a share of the capacity."""


PRICED_DTYPE = dtype_of(PricedRow)


class UnitCache(NamedTuple):
    """The caches of one problem. Their keys are two hashes of everything on which an entry depends.

    Plans that are priced one after another have most entries in common. A new entry replaces an older one in the same
    place.
    """

    keys: Ints2
    """[REMEMBERED, 2] hashes of a unit row, see `automap.space.kernels.workspace.ROW`; zeros in an empty entry."""
    costs: Annotated[Rows, UNIT_IN_STEP[::1]]
    """[REMEMBERED] costs of the unit, see `UnitInStepRow`."""
    covered: Mask
    """[REMEMBERED] whether the unit is recomputed as a whole."""
    operators: OperatorMemory
    """Costs of operators that depend on their own signatures alone."""
    legal: Ints2
    """[REMEMBERED_LEGAL, 3] hashes of a linkage group on meshes of stages; legal signatures there, as bits."""
    plans: Annotated[Rows, rows_type(PRICED_DTYPE)]
    """[REMEMBERED_PLANS] see `PricedRow`."""


UNIT_CACHE = tuple_type(UnitCache)
"""Numba's type of `UnitCache`."""


class Compiled(NamedTuple):
    """The arguments that all kernels of a plan space share."""

    tables: Arrays
    """Operators, operands and tensors of the model."""
    space: SpaceArrays
    cache: UnitCache
    """Costs and legal signatures that are known already; read and written."""


COMPILED = tuple_type(Compiled)
"""Numba's type of `Compiled`."""
