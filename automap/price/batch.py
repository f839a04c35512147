"""Many plans of one space at once: values of the space's slots in, seconds and overflow out, all compiled.

Everything in `SpaceArrays` belongs to the space and to no plan. The arithmetic is that of `unit_cost` and `combine`,
in the same order as in `Evaluator.evaluate`: the results are identical floats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, njit, types, void

from automap.price.ahead import outgoing
from automap.price.combine import P_COUNT, P_ZERO, R_COUNT, combine, overflow, step_time_s
from automap.price.communication import L_COUNT
from automap.price.kernels import C_COUNT, MAX_AXES, TABLES, unit_cost
from automap.price.schedule import INTERLEAVED, KINDS
from automap.price.tables import OP_SIGNATURES, S_PLACES
from ir.factors import BROADCAST, PARTIAL

if TYPE_CHECKING:
    from automap.price.layout import StageLayout
    from automap.space import PlanSpace

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Slots of SpaceArrays.scalars.
(
    N_DEVICES,
    N_BATCH,
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_ZERO_SLOT,
    N_FIRST_SIGNATURE,
    N_KIND,
) = range(7)
# Columns of SpaceArrays.groups, one row a signature slot.
G_AXIS, G_MEMBERS, G_COUNT, G_ASSIGNMENT = range(4)
# Columns of SpaceArrays.layouts, [pipeline degree, inner degree].
Y_FIRST, Y_UNIFORM = range(2)
# Columns of SpaceArrays.tied: units, then operator row and input slot that read the parameter in each, and
# that compute with it in the other.
I_ONE, I_OTHER, I_ONE_ROW, I_ONE_SLOT, I_OTHER_ROW, I_OTHER_SLOT, I_USER_ROW, I_USER_SLOT = range(8)
# What tells rows of unit costs apart within one plan.
K_TYPE, K_MODE, K_RANK, K_BEFORE, K_OPENS, K_INCOMING = range(6)
K_COUNT = K_INCOMING + MAX_AXES


class SpaceArrays(NamedTuple):
    """A plan space as flat arrays."""

    scalars: Ints
    degrees: Ints
    """Values of the slots `pp` and `tp`."""
    micro_batches: Ints
    """Values of the slot `micro_batches`."""
    units: Ints
    """[units] type of each."""
    spans: Ints
    """[types + 1] operator rows of each type."""
    boundary: Ints
    """[types] row of `operands` that crosses out, or -1."""
    makers: Ints
    """[types, 2] operator row and output slot of the crossing tensor, or -1."""
    weight: Floats
    """[units + 1] cumulated weight, strictly rising."""
    windows: Ints
    """[chunks + 1, chunks, 2] first and last legal end of each chunk, by number of chunks."""
    masks: Mask
    """[modes, operator rows] what each recompute mode runs again."""
    groups: Ints
    members: Ints
    """Operator rows of all groups, one group behind the other."""
    assignments: Ints
    """Signatures of the members for each value of the group's slot, one group behind the other."""
    layouts: Ints
    axes: Floats
    """[rank rows, axes]; the ranks of all layouts, one layout behind the other."""
    links: Floats
    """[rank rows, axes, V_COUNT]."""
    hardware: Floats
    capacity: Floats
    send_latency_s: Floats
    send_bytes_per_s: Floats
    tied: Ints
    tied_elements: Floats
    settings: Floats


SPACE = types.NamedTuple(
    (
        *[int64[::1]] * 6,
        int64[:, ::1],
        float64[::1],
        int64[:, :, ::1],
        boolean[:, ::1],
        int64[:, ::1],
        int64[::1],
        int64[::1],
        int64[:, :, ::1],
        float64[:, ::1],
        float64[:, :, ::1],
        float64[:, ::1],
        *[float64[::1]] * 3,
        int64[:, ::1],
        float64[::1],
        float64[::1],
    ),
    SpaceArrays,
)
"""Numba's type of `SpaceArrays`."""


def compile_space(space: PlanSpace) -> SpaceArrays:
    """The arrays of a space with equal meshes (dp, tp) on all pipeline ranks."""
    evaluator = space.evaluator
    tables = evaluator.tables
    signature_slots = space.slots[space.first_signature :]
    groups: list[list[int]] = []
    members: list[int] = []
    assignments: list[int] = []
    for slot in signature_slots:
        rows, values = space.group_rows[slot.unit_type, slot.group]
        groups.append([slot.index, len(members), len(rows), len(assignments)])
        members += rows.tolist()
        assignments += values.reshape(-1).tolist()
    layouts = np.full((len(space.degrees), len(space.degrees), 2), -1, dtype=np.int64)
    stages: list[StageLayout] = []
    sends: list[tuple[float, float]] = []
    for shape in space.shapes:
        at = space.degrees.index(shape.pp), space.degrees.index(shape.tp)
        if layouts[at][Y_FIRST] < 0:
            layout = evaluator.layout((shape.dp, shape.tp), shape.pp)
            layouts[at] = len(stages), int(layout.uniform)
            stages += layout.stages
            sends += list(zip(layout.send_latency_s, layout.send_bytes_per_s, strict=True))
    most = max(shape.num_chunks for shape in space.shapes)
    windows = np.zeros((most + 1, most, 2), dtype=np.int64)
    for num_chunks in {shape.num_chunks for shape in space.shapes}:
        windows[num_chunks, :num_chunks] = [space.constrained.window(c, num_chunks) for c in range(num_chunks)]
    modes = len(evaluator.masks(0))
    masks = np.zeros((modes, len(tables.operators)), dtype=np.bool_)
    for unit_type in range(evaluator.blocks.num_types):
        rows_of = tables.rows(unit_type)
        for mode, mask in enumerate(evaluator.masks(unit_type).values()):
            masks[mode, rows_of.start : rows_of.stop] = mask
    fixed = space.problem.hints.fix.schedule or "1f1b"
    scalars = [
        space.problem.cluster.num_devices,
        space.problem.training.global_batch,
        space.first_cut,
        space.first_recompute,
        space.zero_slot,
        space.first_signature,
        KINDS[fixed],
    ]
    tied = [
        [one, other, *evaluator.reader(name, one), *evaluator.reader(name, other), *evaluator.user(name, other)]
        for name, one, other in evaluator.tied
    ]
    tensors = space.problem.graph.tensors

    def ints(values: object) -> Ints:
        return np.ascontiguousarray(np.array(values, dtype=np.int64))

    return SpaceArrays(
        scalars=ints(scalars),
        degrees=ints(space.degrees),
        micro_batches=ints(space.micro_batches),
        units=ints([unit.type for unit in evaluator.blocks.units]),
        spans=tables.spans,
        boundary=tables.boundary_out,
        makers=evaluator.makers,
        weight=space.cumulative_weight,
        windows=windows,
        masks=masks,
        groups=ints(groups).reshape(-1, 4),
        members=ints(members),
        assignments=ints(assignments),
        layouts=layouts,
        axes=np.array([s.axes for s in stages]),
        links=np.array([s.links for s in stages]),
        hardware=np.array([s.hardware for s in stages]),
        capacity=np.array([s.capacity for s in stages], dtype=np.float64),
        send_latency_s=np.array([a for a, _ in sends], dtype=np.float64),
        send_bytes_per_s=np.array([b for _, b in sends], dtype=np.float64),
        tied=ints(tied).reshape(-1, 8),
        tied_elements=np.array([tensors[name].num_elements for name, _, _ in evaluator.tied], dtype=np.float64),
        settings=evaluator.settings(0),
    )


@njit(int64(float64[::1], int64, int64, int64, int64, int64), cache=True)
def nth_cut(weight, start, low, high, chunks_left, number):
    """The end in [low, high] that is `number`-th nearest to an even share of what is left behind unit `start`.

    Of two that are equally near the left one comes first.
    """
    target = weight[start] + (weight[weight.shape[0] - 1] - weight[start]) / chunks_left
    right = low + np.searchsorted(weight[low : high + 1], target)
    left = right - 1
    found = low
    for _ in range(number + 1):
        if left >= low and (right > high or abs(weight[left] - target) <= abs(weight[right] - target)):
            found = left
            left -= 1
        else:
            found = right
            right += 1
    return found


@njit(
    void(TABLES, SPACE, int64, int64, int64[:, ::1], float64[::1], float64[::1]),
    cache=True,
)
def _split(tables, space, row, slot, chosen, axes, result):
    """Over how many ranks a parameter is split where operator `row` reads it, and over how many more ZeRO shards it."""
    result[0] = 1.0
    result[1] = 1.0
    for a in range(axes.shape[0]):
        at = tables.signatures[tables.operators[row, OP_SIGNATURES] + chosen[row, a], S_PLACES] + slot
        if tables.places[at, 0] >= 0:
            result[0] *= axes[a]
        elif a == 0 and axes[a] > 1.0:
            result[1] *= axes[a]


@njit(void(TABLES, SPACE, int64[:, ::1], float64[:, ::1]), cache=True)
def price_many(tables, space, values, out):
    """Seconds and overflow of complete plans.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        values: [n, slots].
        out: [n, 2] seconds of a step; largest share of its memory by which a device overflows. Written.
    """
    num_units = space.units.shape[0]
    num_axes = space.axes.shape[1]
    num_rows = tables.operators.shape[0]
    chosen = np.empty((num_rows, num_axes), np.int64)
    costs = np.empty((64, C_COUNT))
    keys = np.empty((64, K_COUNT), np.int64)
    parts = np.empty((num_units, 3), np.int64)
    whole = np.empty(num_units, np.bool_)
    home = np.empty(num_units, np.int64)
    incoming = np.empty(num_axes, np.int64)
    tied = np.empty((space.tied.shape[0], 5 + num_axes))
    ways = np.empty(2)
    records = np.empty((0, L_COUNT))
    cursor = np.zeros(1, np.int64)
    settings = np.empty(P_COUNT)
    settings[:] = space.settings
    for plan in range(values.shape[0]):
        value = values[plan]
        num_ranks = space.degrees[value[0]]
        inner = space.degrees[value[1]]
        count = space.micro_batches[value[2]]
        virtual = value[3] + 1
        num_chunks = num_ranks * virtual
        outer = space.scalars[N_DEVICES] // num_ranks // inner
        samples = float64(space.scalars[N_BATCH] // count)
        begin = space.layouts[value[0], value[1], Y_FIRST]
        uniform = space.layouts[value[0], value[1], Y_UNIFORM] == 1
        zero_axes = np.zeros(num_axes, np.bool_)
        zero_axes[0] = outer > 1
        settings[P_ZERO] = value[space.scalars[N_ZERO_SLOT]]
        for g in range(space.groups.shape[0]):
            members = space.groups[g, G_COUNT]
            picked = value[space.scalars[N_FIRST_SIGNATURE] + g]
            at = space.groups[g, G_ASSIGNMENT] + picked * members
            for m in range(members):
                chosen[space.members[space.groups[g, G_MEMBERS] + m], space.groups[g, G_AXIS]] = space.assignments[
                    at + m
                ]

        known = 0
        num_parts = 0
        before = -1
        unit = 0
        for chunk in range(num_chunks):
            rank = chunk % num_ranks
            mode = value[space.scalars[N_FIRST_RECOMPUTE] + rank]
            end = num_units
            if chunk < num_chunks - 1:
                low, high = space.windows[num_chunks, chunk]
                picked = value[space.scalars[N_FIRST_CUT] + chunk]
                end = nth_cut(space.weight, unit, max(low, unit + 1), high, num_chunks - chunk, picked)
            opens = 1 if chunk > 0 or unit == 0 else 0
            while unit < end:
                kind = space.units[unit]
                home[unit] = rank
                row = -1
                where = 0 if uniform else rank
                for k in range(known):
                    if (
                        keys[k, K_TYPE] == kind
                        and keys[k, K_BEFORE] == before
                        and keys[k, K_OPENS] == opens
                        and keys[k, K_MODE] == mode
                        and keys[k, K_RANK] == where
                    ):
                        row = k
                        break
                if row < 0:
                    row = known
                    if known == keys.shape[0]:
                        more = np.empty((2 * known, K_COUNT), np.int64)
                        more[:known] = keys
                        keys = more
                        wide = np.empty((2 * known, C_COUNT))
                        wide[:known] = costs
                        costs = wide
                    known += 1
                    keys[row, K_TYPE] = kind
                    keys[row, K_BEFORE] = before
                    keys[row, K_OPENS] = opens
                    keys[row, K_MODE] = mode
                    keys[row, K_RANK] = where
                    outgoing(tables, space.makers, before, chosen, incoming)
                    if opens == 1:
                        # A partial tensor is never sent: it is reduced before it leaves the stage.
                        for a in range(num_axes):
                            if incoming[a] == PARTIAL:
                                incoming[a] = BROADCAST
                    for a in range(num_axes):
                        keys[row, K_INCOMING + a] = incoming[a]
                    # Behind another unit, but in the same surroundings: the cost is known.
                    same = -1
                    for k in range(row):
                        if keys[k, K_TYPE] == kind and keys[k, K_MODE] == mode and keys[k, K_RANK] == where:
                            alike = True
                            for a in range(num_axes):
                                alike = alike and keys[k, K_INCOMING + a] == incoming[a]
                            if alike:
                                same = k
                                break
                    if same >= 0:
                        costs[row] = costs[same]
                    else:
                        first = space.spans[kind]
                        last = space.spans[kind + 1]
                        unit_cost(
                            tables,
                            first,
                            last,
                            chosen[first:last],
                            space.masks[mode, first:last],
                            incoming,
                            space.axes[begin + rank],
                            space.links[begin + rank],
                            zero_axes,
                            space.hardware[begin + rank],
                            samples,
                            space.boundary[kind],
                            records,
                            cursor,
                            costs[row],
                        )
                if opens == 0 and parts[num_parts - 1, 1] == row:
                    parts[num_parts - 1, 2] += 1
                else:
                    parts[num_parts, 0] = chunk
                    parts[num_parts, 1] = row
                    parts[num_parts, 2] = 1
                    whole[num_parts] = space.masks[mode, space.spans[kind] : space.spans[kind + 1]].all()
                    num_parts += 1
                before = kind
                opens = 0
                unit += 1

        for t in range(space.tied.shape[0]):
            one = home[space.tied[t, I_ONE]]
            other = home[space.tied[t, I_OTHER]]
            tied[t, 0] = one
            tied[t, 1] = other
            _split(
                tables,
                space,
                space.tied[t, I_ONE_ROW],
                space.tied[t, I_ONE_SLOT],
                chosen,
                space.axes[begin + one],
                ways,
            )
            tied[t, 2] = space.tied_elements[t] / ways[0]
            _split(
                tables,
                space,
                space.tied[t, I_OTHER_ROW],
                space.tied[t, I_OTHER_SLOT],
                chosen,
                space.axes[begin + other],
                ways,
            )
            tied[t, 3] = space.tied_elements[t] / ways[0]
            tied[t, 4] = space.tied_elements[t] / ways[0] / ways[1]
            user = space.tied[t, I_USER_ROW]
            part = 1.0
            for a in range(num_axes - 1, -1, -1):
                at = tables.signatures[tables.operators[user, OP_SIGNATURES] + chosen[user, a], S_PLACES]
                at += space.tied[t, I_USER_SLOT]
                is_sum = tables.places[at, 0] == BROADCAST and tables.places[at, 1] == PARTIAL
                tied[t, 5 + a] = 0.0
                if is_sum and space.axes[begin + other, a] > 1.0:
                    tied[t, 5 + a] = part
                    part /= space.axes[begin + other, a]

        stop = begin + num_ranks
        result = np.empty((num_ranks, R_COUNT))
        combine(
            costs[:known],
            parts[:num_parts],
            whole[:num_parts],
            INTERLEAVED if virtual > 1 else space.scalars[N_KIND],
            num_ranks,
            count,
            space.axes[begin:stop],
            space.links[begin:stop],
            space.hardware[begin:stop],
            zero_axes,
            space.send_latency_s[begin:stop],
            space.send_bytes_per_s[begin:stop],
            space.capacity[begin:stop],
            tied,
            settings,
            True,
            result,
        )
        out[plan, 0] = step_time_s(result)
        out[plan, 1] = overflow(result)
