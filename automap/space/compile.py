"""The decisions of a plan space as flat arrays, for the compiled kernels that draw and price many plans at once.

Everything here belongs to the space and to no plan.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types

from automap.price.kernels.array_types import Record, Rows
from automap.price.kernels.cost_records import SETTINGS
from automap.price.kernels.stage_records import HARDWARE, HARDWARE_DTYPE, LINK, LINK_DTYPE
from automap.schedule import KINDS
from automap.space.batch_shares import share_out
from ir.factors import whole_signature

if TYPE_CHECKING:
    from automap.space.space import PlanSpace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Slots of SpaceArrays.scalars. N_PART: devices of a part, see `automap.space.stage_sizes`; N_LONGEST: stages of the
# longest pipeline whose stages may differ; N_ORDERS_ONE: whether the order of the devices matters to a single stage;
# N_MOST_MESHES: rows of `legality.unlike_meshes`; N_PROPORTIONAL: whether the user asked for uneven batch shares.
(
    N_DEVICES,
    N_BATCH,
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_ZERO_SLOT,
    N_FIRST_SIGNATURE,
    N_PART,
    N_LONGEST,
    N_ORDERS_ONE,
    N_SHARES_SLOT,
    N_MOST_MESHES,
    N_PROPORTIONAL,
) = range(12)
# Columns of SpaceArrays.groups, one row a linkage group: its first member and their number, the first of its
# assignments, the first and the number of its values, the value that keeps the leader whole.
G_MEMBERS, G_COUNT, G_ASSIGNMENT, G_FIRST, G_VALUES, G_WHOLE = range(6)
# Columns of SpaceArrays.layouts, [order, pipeline degree, inner degree, middle degree].
Y_FIRST, Y_UNIFORM = range(2)
# Columns of SpaceArrays.tied: units, the first row about the same parameter, and where the reader of each unit begins,
# see `read_too`.
I_ONE, I_OTHER, I_FIRST, I_ONE_READER, I_OTHER_READER = range(5)
I_COUNT = 5


class SpaceArrays(NamedTuple):
    """A plan space as flat arrays."""

    scalars: Ints
    degrees: Ints
    """Values of the slots `pp` and `tp`."""
    middles: Ints
    """Values of the slot `middle`, [1] without one."""
    micro_batches: Ints
    """Values of the slot `micro_batches`."""
    virtuals: Ints
    """Values of the slot `virtual`."""
    kinds: Ints
    """Values of the slot `schedule`, see `automap.schedule`."""
    stages: Ints
    """[ranks of all layouts of equal stages, one layout behind the other] the row of each among the distinct stages."""
    units: Ints
    """[units] type of each."""
    spans: Ints
    """[types + 1] operator rows of each type."""
    group_spans: Ints
    """[types + 1] groups of each type."""
    boundary: Ints
    """[types] row of `operands` that crosses out, or -1."""
    members: Ints
    """Operator rows of all groups, one group behind the other."""
    assignments: Ints
    """Signatures of the members for each value of the group's slots, one group behind the other."""
    groups: Ints
    tied: Ints
    mixed: Ints
    """[distinct stages] number among those of several kinds of devices, or -1."""
    quanta: Ints
    """[stages of several kinds] samples of a rank come in multiples of this."""
    kind_rows: Ints
    """[stages of several kinds, kinds] row among the distinct stages of the stage as if it consisted of each kind."""
    kind_ranks: Ints
    """[stages of several kinds, kinds] ranks of the outer axis of each kind; where there are fewer the last one is
    repeated."""
    weight: Floats
    """[units + 1] cumulated weight, strictly rising."""
    capacity: Floats
    """[distinct stages]"""
    speed: Floats
    """[distinct stages]"""
    send_latency_s: Floats
    """[boundaries]; first those behind the ranks of `stages`."""
    send_bytes_per_s: Floats
    """[boundaries]"""
    tied_elements: Floats
    settings: Record
    """See `SettingsRow`; without ZeRO."""
    axes: Floats
    """[distinct stages, axes]"""
    hardware: Rows
    """[distinct stages] see `HardwareRow`."""
    links: Rows
    """[distinct stages, axes] see `LinkRow`."""
    windows: Ints
    """[chunks + 1, chunks, 2] first and last legal end of each chunk, by number of chunks."""
    share_ways: Ints
    """[stages of several kinds, values of `micro_batches`, values of `shares`] the first way that is the same; 0: even
    shares."""
    send_rows: Ints
    """[order, parts before, parts of the last stage among them, parts of the next] boundary, or -1; the first stage
    follows the last one."""
    kind_samples: Ints
    """[stages of several kinds, values of `micro_batches`, values of `shares`, kinds] samples of all ranks of a kind
    together."""
    layouts: Ints
    stage_rows: Ints
    """[order, inner degree, middle degree, parts before, parts] row among the distinct stages, or -1."""
    fills: Mask
    """See `ways_to_fill`."""
    masks: Mask
    """[modes, operator rows] what each recompute mode runs again."""
    obeys: Mask
    """[axes, values of all groups] what the user's constraints leave of each group's signatures."""
    kept: Mask
    """[units, modes] which modes obey constraints against recomputation."""
    again: Mask
    """[units, modes] which modes obey constraints for recomputation."""
    modes: Mask
    """[modes] that the trainer and `hints.fix` leave."""
    zeros: Mask
    """[4] ZeRO stages that `hints.fix` leaves."""


SPACE = types.NamedTuple(
    (
        *[int64[::1]] * 13,
        *[int64[:, ::1]] * 2,
        *[int64[::1]] * 2,
        *[int64[:, ::1]] * 2,
        *[float64[::1]] * 6,
        SETTINGS,
        float64[:, ::1],
        HARDWARE[::1],
        LINK[:, ::1],
        *[int64[:, :, ::1]] * 2,
        *[int64[:, :, :, ::1]] * 2,
        *[int64[:, :, :, :, ::1]] * 2,
        boolean[:, :, :, :, ::1],
        *[boolean[:, ::1]] * 4,
        *[boolean[::1]] * 2,
    ),
    SpaceArrays,
)
"""Numba's type of `SpaceArrays`."""


def compile_space(space: PlanSpace) -> SpaceArrays:
    """The arrays of a space."""
    evaluator, meshes = space.evaluator, space.meshes
    tables = evaluator.tables
    # Number of a distinct stage, of which the evaluator may know others -> its row.
    rows: dict[int, int] = {}
    layouts, stages, sends = _layouts(space, rows)
    stage_rows, send_rows = _unlike_stages(space, rows, sends)
    mixed = _mixed(space, rows)
    distinct = [evaluator.stands.stages[number] for number in rows]
    most = max(shape.num_chunks for shape in space.shapes)
    windows = np.zeros((most + 1, most, 2), dtype=np.int64)
    for num_chunks in {shape.num_chunks for shape in space.shapes}:
        windows[num_chunks, :num_chunks] = [space.constrained.window(c, num_chunks) for c in range(num_chunks)]
    modes = len(evaluator.masks(0))
    masks = np.zeros((modes, len(tables.type_of)), dtype=np.bool_)
    for unit_type in range(evaluator.blocks.num_types):
        rows_of = tables.rows(unit_type)
        for mode, mask in enumerate(evaluator.masks(unit_type).values()):
            masks[mode, rows_of.start : rows_of.stop] = mask
    scalars = [
        space.problem.cluster.num_devices,
        space.problem.training.global_batch,
        space.first_cut,
        space.first_recompute,
        space.zero_slot,
        space.first_signature,
        meshes.part,
        meshes.longest,
        int(space.problem.cluster.bandwidth_GBps is not None),
        space.shares_slot,
        mixed.most_meshes,
        int(space.problem.hints.fix.batch_shares == "proportional"),
    ]
    names = [name for name, _, _ in evaluator.tied.parameters]
    tied = [
        [one, other, names.index(name), evaluator.tied.reader(name, one), evaluator.tied.reader(name, other)]
        for name, one, other in evaluator.tied.parameters
    ]
    groups, members, assignments, obeys = _groups(space)
    tensors = space.problem.graph.tensors
    return SpaceArrays(
        scalars=_ints(scalars),
        degrees=_ints(meshes.degrees),
        middles=_ints(meshes.middles),
        micro_batches=_ints(meshes.micro_batches),
        virtuals=_ints(meshes.virtuals),
        kinds=_ints([KINDS[kind] for kind in space.schedules]),
        stages=_ints(stages),
        units=_ints([unit.type for unit in evaluator.blocks.units]),
        spans=tables.spans,
        group_spans=_ints(np.cumsum([0, *(len(unit.groups) for unit in space.linkage.types)])),
        boundary=tables.boundary_out,
        members=members,
        assignments=assignments,
        groups=groups,
        tied=_ints(tied).reshape(-1, I_COUNT),
        mixed=_ints(mixed.numbers),
        quanta=mixed.quanta,
        kind_rows=mixed.rows,
        kind_ranks=mixed.ranks,
        weight=space.cumulative_weight,
        capacity=_floats([s.capacity for s in distinct]),
        speed=_floats([s.speed for s in distinct]),
        send_latency_s=_floats([latency for latency, _ in sends]),
        send_bytes_per_s=_floats([rate for _, rate in sends]),
        tied_elements=_floats([tensors[name].num_elements for name, _, _ in evaluator.tied.parameters]),
        settings=evaluator.settings(0),
        axes=_floats([s.axes for s in distinct]),
        hardware=np.array([s.hardware for s in distinct], dtype=HARDWARE_DTYPE),
        links=np.array([s.links for s in distinct], dtype=LINK_DTYPE),
        windows=windows,
        share_ways=mixed.ways,
        send_rows=send_rows,
        kind_samples=mixed.samples,
        layouts=layouts,
        stage_rows=stage_rows,
        fills=meshes.fills,
        masks=masks,
        obeys=obeys,
        kept=np.ascontiguousarray(space.constrained.kept),
        again=np.ascontiguousarray(space.constrained.again),
        modes=space.modes,
        zeros=space.zeros,
    )


def _ints(values: object) -> Ints:
    return np.ascontiguousarray(np.array(values, dtype=np.int64))


def _floats(values: object) -> Floats:
    return np.ascontiguousarray(np.array(values, dtype=np.float64))


def _layouts(space: PlanSpace, rows: dict[int, int]) -> tuple[Ints, list[int], list[tuple[float, float]]]:
    """The arrays `layouts` and `stages`, and what sending to the next rank costs behind each of the latter.

    Args:
        space: of the problem.
        rows: number of a distinct stage -> its row, added to.
    """
    meshes = space.meshes
    sizes = len(meshes.degrees), len(meshes.degrees), len(meshes.middles)
    layouts = np.full((len(meshes.orders), *sizes, 2), -1, dtype=np.int64)
    stages: list[int] = []
    sends: list[tuple[float, float]] = []
    for shape in space.shapes:
        at = meshes.degrees.index(shape.pp), meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
        if layouts[0][at][Y_FIRST] < 0:
            for order in range(meshes.num_orders(shape.pp)):
                layout = space.layout_of(shape, order, (meshes.devices // shape.pp,) * shape.pp)
                layouts[order][at] = len(stages), int(layout.uniform)
                stages += [rows.setdefault(number, len(rows)) for number in layout.numbers]
                sends += zip(layout.send_latency_s.tolist(), layout.send_bytes_per_s.tolist(), strict=True)
    return layouts, stages, sends


def _unlike_stages(space: PlanSpace, rows: dict[int, int], sends: list[tuple[float, float]]) -> tuple[Ints, Ints]:
    """The arrays `stage_rows` and `send_rows`; distinct stages are added to `rows`, what boundaries cost to `sends`."""
    meshes, stands = space.meshes, space.evaluator.stands
    parts = meshes.devices // meshes.part if meshes.longest else 0
    within = sorted({(shape.tp, shape.middle) for shape in space.shapes if meshes.may_differ(shape)})
    stage_rows = np.full((len(meshes.orders), len(meshes.degrees), len(meshes.middles), parts, parts + 1), -1)
    send_rows = np.full((len(meshes.orders), *[parts + 1] * 3), -1)
    for number, order in enumerate(meshes.orders):
        stages = {}
        for first, last in combinations(range(parts + 1), 2):
            mine = np.array(order[first * meshes.part : last * meshes.part])
            stages[first, last] = stands.pattern(mine), mine
            for tp, middle in within:
                if len(mine) % (tp * middle) == 0 and last - first < parts:
                    mesh = meshes.mesh_of(len(mine), tp, middle)
                    row = rows.setdefault(stands.number(*stages[first, last], mesh), len(rows))
                    stage_rows[number, meshes.degrees.index(tp), meshes.middles.index(middle), first, last - first] = (
                        row
                    )
        for first, cut, last in combinations(range(parts + 1), 3):
            (one, senders), (other, receivers) = stages[first, cut], stages[cut, last]
            send_rows[number, cut, cut - first, last - cut] = len(sends)
            sends.append(stands.send((one, other), senders, receivers))
        # From the last stage to the first, as if the latter stood behind all parts.
        for last, first in product(range(1, parts), repeat=2):
            if last + first <= parts:
                (one, senders), (other, receivers) = stages[parts - last, parts], stages[0, first]
                send_rows[number, parts, last, first] = len(sends)
                sends.append(stands.send((one, other), senders, receivers))
    return stage_rows, send_rows


class _Mixed(NamedTuple):
    """Stages of several kinds of devices, see `SpaceArrays`."""

    numbers: list[int]
    quanta: Ints
    rows: Ints
    ranks: Ints
    samples: Ints
    ways: Ints
    most_meshes: int


def _mixed(space: PlanSpace, rows: dict[int, int]) -> _Mixed:
    """How the samples of a micro-batch may be shared out; the stages as if of one kind are added to `rows`."""
    meshes, stands = space.meshes, space.evaluator.stands
    fix = space.problem.hints.fix.batch_shares
    stages = [(row, stands.stages[number]) for number, row in rows.items() if stands.stages[number].kinds]
    stages = [] if fix == "even" else stages
    most = max((len(stage.kinds) for _, stage in stages), default=1)
    kind_rows = np.empty((len(stages), most), dtype=np.int64)
    kind_ranks = np.empty((len(stages), most), dtype=np.int64)
    for at, (_, stage) in enumerate(stages):
        for view in range(most):
            kind = stage.kinds[min(view, len(stage.kinds) - 1)]
            kind_rows[at, view] = rows.setdefault(kind.number, len(rows))
            kind_ranks[at, view] = len(kind.ranks)
    numbers = [-1] * len(rows)
    for at, (row, _) in enumerate(stages):
        numbers[row] = at
    quanta = np.array([stage.axes[1] if space.meshes.splits_batch else 1 for _, stage in stages], dtype=np.int64)
    batch = _ints([space.problem.training.global_batch // count for count in meshes.micro_batches])
    samples, ways = share_out(space.evaluator, [stage for _, stage in stages], quanta, batch, most)
    for at, (_, stage) in enumerate(stages):
        samples[at, :, :, len(stage.kinds) :] = samples[at, :, :, len(stage.kinds) - 1, None]
    num_values = space.slots[space.shares_slot].num_values
    samples, ways = samples[:, :, :num_values], ways[:, :, :num_values]
    longest = max((shape.pp for shape in space.shapes), default=1)
    return _Mixed(
        numbers=numbers,
        quanta=quanta,
        rows=kind_rows,
        ranks=kind_ranks,
        samples=np.ascontiguousarray(samples),
        ways=np.ascontiguousarray(ways),
        most_meshes=1 + 2 * most * longest if stages else max(1, meshes.longest),
    )


def _groups(space: PlanSpace) -> tuple[Ints, Ints, Ints, Mask]:
    """The arrays `groups`, `members`, `assignments` and `obeys`."""
    groups: list[list[int]] = []
    members: list[int] = []
    assignments: list[int] = []
    obeys: list[Mask] = []
    count = 0
    for (unit_type, number), (rows, values) in space.group_rows.items():
        unit = space.linkage.types[unit_type]
        group = unit.groups[number]
        whole = whole_signature(unit.signatures[group.leader])
        groups.append([len(members), len(rows), len(assignments), count, len(values), whole])
        members += rows.tolist()
        assignments += values.reshape(-1).tolist()
        obeys.append(np.array([space.constrained.signatures(unit_type, group, axis) for axis in space.axes]))
        count += len(values)
    every = np.concatenate(obeys, axis=1) if obeys else np.ones((len(space.axes), 0), dtype=np.bool_)
    if space.limits.signatures is not None:
        every &= space.limits.signatures
    return _ints(groups).reshape(-1, 6), _ints(members), _ints(assignments), np.ascontiguousarray(every)


def ungrouped(space: PlanSpace) -> SpaceArrays:
    """The arrays with every operator a group of its own, by operator row, that no constraint binds."""
    groups: list[list[int]] = []
    count, row = 0, 0
    for unit in space.linkage.types:
        for table in unit.signatures:
            groups.append([row, 1, count, count, len(table), whole_signature(table)])
            count, row = count + len(table), row + 1
    return space.arrays._replace(
        members=np.arange(row, dtype=np.int64),
        assignments=_ints([value for group in groups for value in range(group[G_VALUES])]),
        groups=_ints(groups).reshape(-1, 6),
        obeys=np.ones((len(space.axes), count), dtype=np.bool_),
    )
