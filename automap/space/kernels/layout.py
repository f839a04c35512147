"""The layout of a plan: devices of its stages and ends of its chunks, decided by the slots before `recompute`."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
from numba import boolean, float64, int64, types, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats, Floats2, Ints, Mask, Rows, rows_type, tuple_type
from automap.price.kernels.hashes import SEEDS, mix
from automap.schedule import INTERLEAVED
from automap.space.kernels.cuts import cut_shares, nth_cut
from automap.space.kernels.records import SPACE

FRAME = np.dtype(
    [
        ("num_ranks", np.int64),  # pipeline ranks
        ("num_chunks", np.int64),
        ("num_micro_batches", np.int64),
        ("schedule", np.int64),  # kind of the schedule, see `automap.schedule`
        ("num_meshes", np.int64),  # rows of `Layout.sizes`
        ("is_uniform", np.bool_),  # whether one rank stands for all
        ("is_usual", np.bool_),  # whether no slot decides how many devices ranks have
        ("is_even", np.bool_),  # whether all ranks have equally many devices
        ("has_replicas", np.bool_),  # whether ZeRO has something to shard
    ]
)
"""Numbers of one layout."""


class Layout(NamedTuple):
    """The layout of one plan; memory of one caller."""

    frame: Annotated[Rows, rows_type(FRAME)]
    """[1] see `FRAME`."""
    devices: Ints
    """[ranks] devices of each stage."""
    rows: Ints
    """[ranks] row of each stage among the distinct stages."""
    stages: Ints
    """[ranks] row of the stage in the present one of `LoweredPlan.views`, see `look_from`."""
    boundaries: Ints
    """[ranks] row of the boundary after each stage."""
    samples: Ints
    """[ranks] samples of a micro-batch with which the stage is priced in this view."""
    divided: Ints
    """[unlike meshes] samples of a micro-batch that must divide evenly, see `unlike_meshes`."""
    sizes: Floats2
    """[unlike meshes, axes] ranks of each mesh axis."""
    hashes: Ints
    """[2] two hashes of `sizes` and `divided`, on which legal signatures depend."""
    most_ranks: Floats
    """[axes] ranks of each mesh axis, in the stage that has most of it."""
    zero_axes: Mask
    """[axes] whether ZeRO shards over the axis."""
    shares: Floats
    """[chunks] see `cut_shares`."""
    ends: Ints
    """[chunks] units before the end of each chunk, for chunks whose ends are decided; for the last one all units."""


LAYOUT = tuple_type(Layout)
"""Numba's type of `Layout`."""


@kernel(LAYOUT(SPACE), inner=True)
def new_layout(space):
    """Memory for any layout of a space."""
    num_axes, meshes, most = space.obeys.shape[0], space.scalars.most_meshes, space.windows.shape[1]
    return Layout(
        frame=np.zeros(1, FRAME),
        devices=np.empty(most, np.int64),
        rows=np.empty(most, np.int64),
        stages=np.empty(most, np.int64),
        boundaries=np.empty(most, np.int64),
        samples=np.empty(most, np.int64),
        divided=np.empty(meshes, np.int64),
        sizes=np.empty((meshes, num_axes)),
        hashes=np.empty(2, np.int64),
        most_ranks=np.empty(num_axes),
        zero_axes=np.zeros(num_axes, np.bool_),
        shares=np.empty(most),
        ends=np.empty(most, np.int64),
    )


@borrowing(int64(SPACE, int64[::1]), inner=True)
def middle_of(space, value):
    """Value of the slot `middle`; 0 where meshes have two axes."""
    return value[space.first.middle] if space.first.middle < space.first.micro_batches else 0


@borrowing(boolean(SPACE, int64[::1]), inner=True)
def may_differ(space, value):
    """Whether slots may decide how many devices the stages of a pipeline without virtual stages have."""
    num_ranks, size = space.ranks[value[space.first.pp]], space.sizes[value[space.first.pp]]
    return 1 < num_ranks <= space.scalars.longest and num_ranks * size == space.scalars.num_devices


@borrowing(boolean(SPACE, int64[::1], int64[::1]), inner=True)
def share_devices(space, value, devices):
    """Writes how many devices each stage has, [stages]; returns whether these are the usual sizes, without slots."""
    num_ranks = space.ranks[value[space.first.pp]]
    left = space.scalars.num_devices
    usual = space.sizes[value[space.first.pp]]
    is_usual = True
    for stage in range(num_ranks):
        devices[stage] = usual if stage > 0 else left - (num_ranks - 1) * usual
        slot = space.first.devices + stage
        if stage == num_ranks - 1:
            devices[stage] = left
        elif slot < space.first.shares and value[slot] > 0:
            devices[stage] = value[slot] * space.scalars.part
            is_usual = False
        left -= devices[stage]
    return is_usual


@borrowing(void(SPACE, int64[::1], LAYOUT), inner=True)
def find_stages(space, value, layout):
    """Writes devices and rows of the stages, and rows of the boundaries, from the slots before `shares`."""
    first, scalars = space.first, space.scalars
    devices, rows, boundaries = layout.devices, layout.rows, layout.boundaries
    pp, tp, middle, order = value[first.pp], value[first.tp], middle_of(space, value), value[first.order]
    num_ranks = space.ranks[pp]
    is_usual = share_devices(space, value, devices)
    layout.frame[0].is_usual = is_usual
    layout.frame[0].is_even = is_usual and space.sizes[pp] * num_ranks == scalars.num_devices
    before = 0
    for rank in range(num_ranks):
        if is_usual:
            boundaries[rank] = space.usual_layouts[order, pp, tp, middle].first + rank
            rows[rank] = space.stages[boundaries[rank]]
        else:
            mine = devices[rank] // scalars.part
            after = devices[(rank + 1) % num_ranks] // scalars.part
            rows[rank] = space.stage_rows[order, tp, middle, before, mine]
            before += mine
            boundaries[rank] = space.send_rows[order, before, mine, after]


@borrowing(int64(SPACE, int64[::1], int64), inner=True)
def sharing(space, value, row):
    """Number of a distinct stage among those of several kinds if its ranks have unlike shares, else -1."""
    shares = value[space.first.shares]
    number = space.mixed[row]
    if shares == 0 or number < 0:
        return -1
    return number if space.share_ways[number, value[space.first.micro_batches], shares] > 0 else -1


@borrowing(int64(SPACE, int64[::1], int64, int64, boolean), inner=True)
def share_of(space, value, number, kind, largest):
    """Samples of a micro-batch of the rank of one kind of devices that has most (`largest`), or least.

    Args:
        number: number of the stage, see `sharing`.
        kind: number of the kind in the stage.
        largest: whether the largest share is returned; else the smallest.
    """
    total = space.kind_samples[number, value[space.first.micro_batches], value[space.first.shares], kind]
    each = space.kind_ranks[number, kind] * space.quanta[number]
    return (-(-total // each) if largest else total // each) * space.quanta[number]


@borrowing(void(SPACE, int64[::1], int64, LAYOUT), inner=True)
def look_from(space, value, kind, layout):
    """Writes `stages` and `samples` of the view of one kind of devices, the slowest is 0; see `LoweredPlan.views`."""
    batch = space.scalars.global_batch // space.micro_batches[value[space.first.micro_batches]]
    within = space.degrees[value[space.first.tp]] * space.middles[middle_of(space, value)]
    for rank in range(space.ranks[value[space.first.pp]]):
        outer = layout.devices[rank] // within
        number = sharing(space, value, layout.rows[rank])
        if number < 0:
            layout.stages[rank] = layout.rows[rank]
            layout.samples[rank] = -(-batch // outer) * outer
        else:
            layout.stages[rank] = space.kind_rows[number, kind]
            layout.samples[rank] = share_of(space, value, number, kind, True) * outer


@borrowing(void(SPACE, int64[::1], int64, int64, LAYOUT), inner=True)
def _add_mesh(space, value, outer, share, layout):
    """Adds a mesh whose ranks have `share` samples, unless it is there."""
    frame, sizes = layout.frame[0], layout.sizes
    for mesh in range(frame.num_meshes):
        if sizes[mesh, 0] == outer and layout.divided[mesh] == share * outer:
            return
    sizes[frame.num_meshes, 1] = space.middles[middle_of(space, value)]
    sizes[frame.num_meshes, sizes.shape[1] - 1] = space.degrees[value[space.first.tp]]
    sizes[frame.num_meshes, 0] = outer
    layout.divided[frame.num_meshes] = share * outer
    frame.num_meshes += 1


@borrowing(void(LAYOUT), inner=True)
def _hash_meshes(layout):
    """Writes `Layout.hashes`."""
    one, two = SEEDS
    for mesh in range(layout.frame[0].num_meshes):
        for axis in range(layout.sizes.shape[1]):
            one, two = mix(one, two, int64(layout.sizes[mesh, axis]))
        one, two = mix(one, two, layout.divided[mesh])
    layout.hashes[0], layout.hashes[1] = one, two


@borrowing(void(float64[::1], int64, LAYOUT), inner=True)
def set_mesh(sizes, samples, layout):
    """Sets the mesh of all stages of a layout: [axes] ranks, over which `samples` samples must divide evenly."""
    layout.frame[0].num_meshes = 1
    for axis in range(sizes.shape[0]):
        layout.sizes[0, axis] = sizes[axis]
    layout.divided[0] = samples
    _hash_meshes(layout)


@borrowing(void(SPACE, int64[::1], LAYOUT), inner=True)
def unlike_meshes(space, value, layout):
    """Writes `sizes`, the distinct meshes of the stages, and `divided`, the samples that must divide over each evenly.

    These samples are the share of one rank times the ranks. If all stages and ranks are equal, there is one mesh.
    """
    batch = space.scalars.global_batch // space.micro_batches[value[space.first.micro_batches]]
    within = space.degrees[value[space.first.tp]] * space.middles[middle_of(space, value)]
    layout.frame[0].num_meshes = 0
    is_shared = value[space.first.shares] > 0
    is_one = layout.frame[0].is_even and not is_shared
    for stage in range(1 if is_one else space.ranks[value[space.first.pp]]):
        outer = layout.devices[stage] // within
        number = sharing(space, value, layout.rows[stage])
        if number < 0:
            _add_mesh(space, value, outer, -(-batch // outer), layout)
        else:
            for kind in range(space.kind_rows.shape[1]):
                _add_mesh(space, value, outer, share_of(space, value, number, kind, True), layout)
                _add_mesh(space, value, outer, share_of(space, value, number, kind, False), layout)
    _hash_meshes(layout)


@borrowing(void(SPACE, int64[::1], LAYOUT), inner=True)
def set_layout(space, value, layout):
    """Writes a layout, except for the ends of chunks, from the slots before `cut`."""
    first, frame = space.first, layout.frame[0]
    num_axes = layout.zero_axes.shape[0]
    num_ranks = space.ranks[value[first.pp]]
    virtual = space.virtuals[value[first.virtual]]
    frame.num_ranks, frame.num_chunks = num_ranks, num_ranks * virtual
    frame.num_micro_batches = space.micro_batches[value[first.micro_batches]]
    frame.schedule = INTERLEAVED if virtual > 1 else space.schedules[value[first.schedule]]
    find_stages(space, value, layout)
    unlike_meshes(space, value, layout)
    look_from(space, value, 0, layout)
    cut_shares(space, layout.stages, num_ranks, layout.shares[: frame.num_chunks])
    even = space.usual_layouts[value[first.order], value[first.pp], value[first.tp], middle_of(space, value)]
    frame.is_uniform = frame.is_usual and even.is_uniform
    frame.has_replicas = False
    for axis in range(num_axes):
        layout.most_ranks[axis] = 1.0
        for mesh in range(frame.num_meshes):
            layout.most_ranks[axis] = max(layout.most_ranks[axis], layout.sizes[mesh, axis])
        layout.zero_axes[axis] = axis < num_axes - 1 and layout.most_ranks[axis] > 1.0
        frame.has_replicas = frame.has_replicas or layout.zero_axes[axis]
    layout.ends[frame.num_chunks - 1] = space.units.shape[0]


@borrowing(types.UniTuple(int64, 3)(SPACE, int64, LAYOUT), inner=True)
def cut_window(space, chunk, layout):
    """The unit at which a chunk begins, and the first and the last end that it may have."""
    start = layout.ends[chunk - 1] if chunk > 0 else 0
    low, high = space.windows[layout.frame[0].num_chunks, chunk]
    return start, max(low, start + 1), high


@borrowing(void(SPACE, int64[::1], int64, LAYOUT), inner=True)
def set_end(space, value, chunk, layout):
    """Writes the end of a chunk that is not the last one; the ends of the chunks before it must be known."""
    if chunk < layout.frame[0].num_chunks - 1:
        start, low, high = cut_window(space, chunk, layout)
        number = value[space.first.cut + chunk]
        layout.ends[chunk] = nth_cut(space.weight, start, low, high, layout.shares[chunk], number)


@borrowing(void(SPACE, int64[::1], int64, LAYOUT), inner=True)
def decide_stages(space, value, count, layout):
    """Writes the parts of a layout that the first `count` slots decide."""
    if count >= space.first.cut:
        set_layout(space, value, layout)
        for chunk in range(min(count - space.first.cut, layout.frame[0].num_chunks - 1)):
            set_end(space, value, chunk, layout)
