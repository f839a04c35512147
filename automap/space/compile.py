"""Builds the records of a plan space that the compiled kernels read, see `automap.space.kernels.records`."""

from __future__ import annotations

from itertools import accumulate, combinations, product
from typing import NamedTuple

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.price.kernels.array_types import Rows
from automap.price.kernels.stage_records import HARDWARE_DTYPE, LINK_DTYPE
from automap.schedule import KINDS
from automap.space.batch_shares import share_out
from automap.space.decisions import DECISIONS, SpaceOutline
from automap.space.kernels.records import GROUP, LEVEL, MOVED, SHAPE_NODE, TIED, USUAL_LAYOUT, Scalars, SpaceArrays
from ir.factors import whole_signature


# long: it fills one record, field after field, and each step needs the results of those before it
def compile_space(space: SpaceOutline) -> SpaceArrays:
    """The records of a space."""
    evaluator, meshes = space.evaluator, space.meshes
    tables = evaluator.tables
    # Number of a distinct stage in the evaluator, which may have further ones -> its row here.
    rows: dict[int, int] = {}
    layouts, stages, sends = _usual_layouts(space, rows)
    stage_rows, send_rows = _unlike_stages(space, rows, sends)
    mixed = _mixed(space, rows)
    distinct = [evaluator.laid_out.stages[number] for number in rows]
    most = max(shape.num_chunks for shape in space.shapes)
    windows = np.zeros((most + 1, most, 2), dtype=np.int64)
    for num_chunks in {shape.num_chunks for shape in space.shapes}:
        windows[num_chunks, :num_chunks] = [space.constrained.window(c, num_chunks) for c in range(num_chunks)]
    modes = len(evaluator.masks(0))
    legal_levels = np.zeros((most + 1, len(space.levels)), dtype=np.bool_)
    for num_chunks in {shape.num_chunks for shape in space.shapes}:
        legal_levels[num_chunks] = space.levels.legal(num_chunks)
    levels = [(level.light, level.heavy, level.steps) for level in space.levels.levels]
    masks = np.zeros((modes, len(tables.type_of)), dtype=np.bool_)
    for unit_type in range(evaluator.blocks.num_types):
        rows_type = tables.rows(unit_type)
        for mode, mask in enumerate(evaluator.masks(unit_type).values()):
            masks[mode, rows_type.start : rows_type.stop] = mask
    until = accumulate(decision.moved for decision in DECISIONS)
    moved = [(round(end, 6), decision.is_numbered) for end, decision in zip(until, DECISIONS, strict=True)]
    names = [name for name, _, _ in evaluator.tied.parameters]
    tied = [
        (one, other, names.index(name), evaluator.tied.reader(name, one), evaluator.tied.reader(name, other))
        for name, one, other in evaluator.tied.parameters
    ]
    groups, members, assignments, obeys = _groups(space)
    tensors = space.problem.graph.tensors
    return SpaceArrays(
        first=space.first,
        scalars=_scalars(space, mixed.most_meshes),
        moved=np.array(moved, dtype=MOVED),
        shape_nodes=_shape_nodes(space),
        ranks=_ints([stages for stages, _ in meshes.divisions]),
        sizes=_ints([size for _, size in meshes.divisions]),
        degrees=_ints(meshes.degrees),
        middles=_ints(meshes.middles),
        micro_batches=_ints(meshes.micro_batches),
        virtuals=_ints(meshes.virtuals),
        schedules=_ints([KINDS[kind] for kind in space.schedules]),
        stages=_ints(stages),
        units=_ints([unit.type for unit in evaluator.blocks.units]),
        spans=tables.spans,
        group_spans=_ints(np.cumsum([0, *(len(unit.groups) for unit in space.linkage.types)])),
        boundary=tables.boundary_out,
        members=members,
        assignments=assignments,
        groups=groups,
        tied=np.array(tied, dtype=TIED),
        levels=np.array([*levels, (modes, modes, 0)], dtype=LEVEL),
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
        tied_frozen=np.array([tensors[name].frozen for name, _, _ in evaluator.tied.parameters], dtype=np.bool_),
        settings=evaluator.settings(0),
        axes=_floats([s.axes for s in distinct]),
        hardware=np.array([s.hardware for s in distinct], dtype=HARDWARE_DTYPE),
        links=np.array([s.links for s in distinct], dtype=LINK_DTYPE),
        windows=windows,
        share_ways=mixed.ways,
        send_rows=send_rows,
        kind_samples=mixed.samples,
        usual_layouts=layouts,
        stage_rows=stage_rows,
        fills=meshes.fills,
        masks=masks,
        silent=np.array(
            [evaluator.recomputed.is_frozen(kind) for kind in range(evaluator.blocks.num_types)], dtype=np.bool_
        ),
        obeys=obeys,
        kept=np.ascontiguousarray(space.constrained.kept),
        again=np.ascontiguousarray(space.constrained.again),
        legal_levels=legal_levels,
        modes=space.modes,
        zeros=space.zeros,
    )


def _scalars(space: SpaceOutline, most_meshes: int) -> Scalars:
    """Numbers that hold for the whole space; `most_meshes` are those of one plan."""
    return Scalars(
        num_devices=space.problem.cluster.num_devices,
        global_batch=space.problem.training.global_batch,
        part=space.meshes.part,
        longest=space.meshes.longest,
        most_meshes=most_meshes,
        most_values=max(slot.num_values for slot in space.slots),
        orders_one=int(space.problem.cluster.bandwidth_GBps is not None),
        proportional=int(space.problem.hints.fix.batch_shares == "proportional"),
        binds_modes=int(space.constrained.recomputes),
        one_mode=int(space.limits.one_mode),
        level_steps=space.levels.steps,
    )


def _ints(values: object) -> Ints:
    return np.ascontiguousarray(np.array(values, dtype=np.int64))


def _floats(values: object) -> Floats:
    return np.ascontiguousarray(np.array(values, dtype=np.float64))


def _shape_nodes(space: SpaceOutline) -> Rows:
    """The nodes of the tree of shapes, level by level, see `SHAPE_NODE`."""
    paths = [space.meshes.values(shape) for shape in space.shapes]
    nodes = np.array([(-1, 0, -1, -1)], dtype=SHAPE_NODE)
    level = [(0, sorted(range(len(paths)), key=paths.__getitem__))]
    for depth in range(len(paths[0])):
        below = []
        for node, members in level:
            by_value: dict[int, list[int]] = {}
            for member in members:
                by_value.setdefault(paths[member][depth], []).append(member)
            nodes[node]["first_child"], nodes[node]["num_children"] = len(nodes), len(by_value)
            below += [(len(nodes) + i, some) for i, some in enumerate(by_value.values())]
            nodes = np.append(nodes, np.array([(-1, 0, value, -1) for value in by_value], dtype=SHAPE_NODE))
        level = below
    for node, (member,) in level:
        nodes[node]["shape"] = member
    return nodes


def _usual_layouts(space: SpaceOutline, rows: dict[int, int]) -> tuple[Rows, list[int], list[tuple[float, float]]]:
    """The arrays `usual_layouts` and `stages`, and latency and bandwidth to the next rank after each of the latter.

    Args:
        rows: number of a distinct stage -> its row; new stages are added.
    """
    meshes = space.meshes
    sizes = len(meshes.divisions), len(meshes.degrees), len(meshes.middles)
    layouts = np.full((len(meshes.orders), *sizes), np.array((-1, False), dtype=USUAL_LAYOUT))
    stages: list[int] = []
    sends: list[tuple[float, float]] = []
    for shape in space.shapes:
        at = meshes.division(shape), meshes.degrees.index(shape.tp), meshes.middles.index(shape.middle)
        if layouts[0][at]["first"] < 0:
            for order in range(meshes.num_orders(shape.pp)):
                layout = space.layout_of(shape, order, meshes.sizes(shape))
                layouts[order][at] = len(stages), layout.uniform
                stages += [rows.setdefault(number, len(rows)) for number in layout.numbers]
                sends += zip(layout.send_latency_s.tolist(), layout.send_bytes_per_s.tolist(), strict=True)
    return layouts, stages, sends


def _unlike_stages(space: SpaceOutline, rows: dict[int, int], sends: list[tuple[float, float]]) -> tuple[Ints, Ints]:
    """The arrays `stage_rows` and `send_rows`; adds distinct stages to `rows`, and latency and bandwidth of boundaries
    to `sends`."""
    meshes, laid_out = space.meshes, space.evaluator.laid_out
    parts = meshes.devices // meshes.part if meshes.longest else 0
    within = sorted({(shape.tp, shape.middle) for shape in space.shapes if meshes.may_differ(shape)})
    stage_rows = np.full((len(meshes.orders), len(meshes.degrees), len(meshes.middles), parts, parts + 1), -1)
    send_rows = np.full((len(meshes.orders), *[parts + 1] * 3), -1)
    for number, order in enumerate(meshes.orders):
        stages = {}
        for first, last in combinations(range(parts + 1), 2):
            mine = np.array(order[first * meshes.part : last * meshes.part])
            stages[first, last] = laid_out.pattern(mine), mine
            for tp, middle in within:
                if len(mine) % (tp * middle) == 0 and last - first < parts:
                    mesh = meshes.mesh_of(len(mine), tp, middle)
                    row = rows.setdefault(laid_out.number(*stages[first, last], mesh), len(rows))
                    stage_rows[number, meshes.degrees.index(tp), meshes.middles.index(middle), first, last - first] = (
                        row
                    )
        for first, cut, last in combinations(range(parts + 1), 3):
            (one, senders), (other, receivers) = stages[first, cut], stages[cut, last]
            send_rows[number, cut, cut - first, last - cut] = len(sends)
            sends.append(laid_out.sends.of((one, other), senders, receivers))
        # The boundary from the last stage to the first one has the row after all parts.
        for last, first in product(range(1, parts), repeat=2):
            if last + first <= parts:
                (one, senders), (other, receivers) = stages[parts - last, parts], stages[0, first]
                send_rows[number, parts, last, first] = len(sends)
                sends.append(laid_out.sends.of((one, other), senders, receivers))
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


def _mixed(space: SpaceOutline, rows: dict[int, int]) -> _Mixed:
    """The ways to share out the samples of a micro-batch; adds the stages as if they had one kind alone to `rows`."""
    meshes, laid_out = space.meshes, space.evaluator.laid_out
    fix = "even" if meshes.alike else space.problem.hints.fix.batch_shares
    stages = [(row, laid_out.stages[number]) for number, row in rows.items() if laid_out.stages[number].kinds]
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
    num_values = space.slots[space.first.shares].num_values
    samples, ways = samples[:, :, :num_values], ways[:, :, :num_values]
    longest = max((shape.pp for shape in space.shapes), default=1)
    return _Mixed(
        numbers=numbers,
        quanta=quanta,
        rows=kind_rows,
        ranks=kind_ranks,
        samples=np.ascontiguousarray(samples),
        ways=np.ascontiguousarray(ways),
        most_meshes=1 + 2 * most * longest if stages else max(min(2, longest), meshes.longest),
    )


def _groups(space: SpaceOutline) -> tuple[Rows, Ints, Ints, Mask]:
    """The arrays `groups`, `members`, `assignments` and `obeys`."""
    groups: list[tuple[int, ...]] = []
    members: list[int] = []
    assignments: list[int] = []
    obeys: list[Mask] = []
    count = 0
    for (unit_type, number), (rows, values) in space.group_rows.items():
        unit = space.linkage.types[unit_type]
        group = unit.groups[number]
        whole = whole_signature(unit.signatures[group.leader])
        groups.append((len(members), len(rows), len(assignments), count, len(values), whole))
        members += rows.tolist()
        assignments += values.reshape(-1).tolist()
        obeys.append(np.array([space.constrained.signatures(unit_type, group, axis) for axis in space.axes]))
        count += len(values)
    every = np.concatenate(obeys, axis=1) if obeys else np.ones((len(space.axes), 0), dtype=np.bool_)
    if space.limits.signatures is not None:
        every &= space.limits.signatures
    return np.array(groups, dtype=GROUP), _ints(members), _ints(assignments), np.ascontiguousarray(every)


def ungrouped(space: SpaceOutline, arrays: SpaceArrays) -> SpaceArrays:
    """The records with every operator as a group of its own, in the order of operator rows, without constraints."""
    groups: list[tuple[int, ...]] = []
    count, row = 0, 0
    for unit in space.linkage.types:
        for table in unit.signatures:
            groups.append((row, 1, count, count, len(table), whole_signature(table)))
            count, row = count + len(table), row + 1
    found = np.array(groups, dtype=GROUP)
    return arrays._replace(
        members=np.arange(row, dtype=np.int64),
        assignments=_ints([value for number in found["num_values"] for value in range(number)]),
        groups=found,
        obeys=np.ones((len(space.axes), count), dtype=np.bool_),
    )
