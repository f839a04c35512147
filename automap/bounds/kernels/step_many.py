"""Walks: many plans being decided at once, each with lower bounds behind every legal value of its next decision.

All bounds are admissible: no completion is faster or smaller. Behind a shape they come from a tree over shapes, and
stay while schedule, order and devices of the stages are decided; while cuts are, they come from the least that units
cost on the ranks; then from the rows of `Workspace` with undecided recomputation, ZeRO and signatures at their best.
Units: seconds; memory as share of capacity (overflow).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types, void

from automap.bounds.kernels.unit_floors import settle
from automap.jit import borrowing, kernel
from automap.price.kernels.memory import in_flight
from automap.price.kernels.records import TABLES
from automap.price.kernels.step import rank_overflow
from automap.price.kernels.unit_workspace import UNIT_WORKSPACE, new_unit_workspace
from automap.schedule import ZB1P, ZB2P
from automap.space.compile import (
    G_VALUES,
    G_WHOLE,
    N_FIRST_CUT,
    N_FIRST_RECOMPUTE,
    N_FIRST_SIGNATURE,
    N_ORDERS_ONE,
    N_SHARES_SLOT,
    N_ZERO_SLOT,
    SPACE,
)
from automap.space.kernels.cuts import nth_cut
from automap.space.kernels.masks import mode_mask, share_mask, size_mask
from automap.space.kernels.price_one import cost_rows, finish, price_laid
from automap.space.kernels.unit_cache import UNIT_CACHE
from automap.space.kernels.workspace import (
    F_ALIKE,
    F_KIND,
    F_RANKS,
    WORKSPACE,
    find_stages,
    new_workspace,
    pick,
    remember_mask,
    set_frame,
    set_stages,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Columns of Tree.nodes: first child, number of children, value that leads here, row of floors of a leaf; leaves know
# their shape: pipeline ranks, chunks, micro-batches.
T_CHILD, T_CHILDREN, T_VALUE, T_FLOOR, T_RANKS, T_CHUNKS, T_COUNT = range(7)


BEGIN, GO_ON, WAIT = -1, -2, -3
"""Actions that decide nothing: a new plan; what was decided already, with preferred values that are known now; not this
time."""
LATER = -2
"""A preferred value that is not known yet."""


class Tree(NamedTuple):
    """Bounds of a space before any signature is decided."""

    nodes: Ints
    """[nodes, 7] decided beginnings of a shape's values, the empty one first; see the T_ constants."""
    bounds: Floats
    """[nodes, 2] seconds and overflow that no plan behind a node goes below."""
    work: Floats
    """[floors, units + 1] least seconds of a micro-batch in all units before each."""
    weights: Floats
    """[floors, units + 1] least bytes of parameters, gradients and moments."""
    kept: Floats
    """[floors, units + 1] least bytes that a micro-batch leaves for its backward pass."""
    sent: Floats
    """[floors, units + 1] least bytes of the tensor that crosses behind as many units."""
    unlike: Ints
    """[distinct stages, values of the slot `micro_batches`] row of floors, or -1; of stages of unlike size."""
    asked: Mask
    """[slots] which are decided one by one; the others take what is preferred."""
    free_ranks: Ints
    """[1] on longer pipelines a rank recomputes no more than the one before it; the last one is free."""
    aside: Floats
    """[2] bytes of state of parameters that several units use, which may count once; bytes that the framework holds."""


class Walks(NamedTuple):
    """Plans being decided; rows of a walk that is through are as its last decision left them."""

    values: Ints
    """[walks, slots]"""
    position: Ints
    """[walks] slot to decide; the number of slots where a plan is complete."""
    node: Ints
    """[walks] of the tree."""
    bound: Floats
    """[walks, 2] seconds and overflow; of a complete plan its price."""
    legal: Ints
    """[walks, most] legal values of the slot to decide, ascending."""
    offered: Ints
    """[walks] how many there are."""
    ahead: Floats
    """[walks, most, 2] seconds and overflow behind each."""
    preferred: Ints
    """[walks, slots] values of slots that are not asked."""


TREE = types.NamedTuple(
    (int64[:, ::1], *[float64[:, ::1]] * 5, int64[:, ::1], boolean[::1], int64[::1], float64[::1]), Tree
)
"""Numba's type of `Tree`."""
WALKS = types.NamedTuple(
    (
        int64[:, ::1],
        int64[::1],
        int64[::1],
        float64[:, ::1],
        int64[:, ::1],
        int64[::1],
        float64[:, :, ::1],
        int64[:, ::1],
    ),
    Walks,
)
"""Numba's type of `Walks`."""


@borrowing(void(float64[::1], float64, float64), inner=True)
def _tighten(bound, seconds, over):
    """A later, sharper family of bounds never loosens what is known already."""
    bound[0] = max(bound[0], seconds)
    bound[1] = max(bound[1], over)


@borrowing(int64(SPACE, int64[::1], WORKSPACE, int64, int64, int64[::1]), inner=True)
def _ends(space, value, workspace, num_chunks, count, ends):
    """Writes the first `count` ends of chunks that are decided; returns the last of them."""
    start = 0
    for chunk in range(count):
        if chunk == num_chunks - 1:
            start = space.units.shape[0]
        else:
            low, high = space.windows[num_chunks, chunk]
            picked = value[space.scalars[N_FIRST_CUT] + chunk]
            start = nth_cut(space.weight, start, max(low, start + 1), high, workspace.shares[chunk], picked)
        ends[chunk] = start
    return start


@borrowing(int64(SPACE, TREE, int64[::1], int64[::1], WORKSPACE, int64), inner=True)
def _floor_of(space, tree, node, value, workspace, rank):
    """The row of floors of a rank; see `set_stages`."""
    if workspace.frame[F_ALIKE] == 1:
        return node[T_FLOOR]
    return tree.unlike[workspace.stages[rank], value[space.obeys.shape[0]]]


@borrowing(float64(SPACE, TREE, int64[::1], int64[::1], WORKSPACE, int64[::1], int64), inner=True)
def _pipeline_floor(space, tree, node, value, workspace, ends, known):
    """The step is at least what the known chunks ask of their ranks, behind the chunks before them.

    Args:
        space: see `compile_space`.
        tree: bounds.
        node: of the shape.
        value: [slots].
        workspace: see `set_stages`.
        ends: [chunks] of the known chunks.
        known: how many are known.
    """
    ranks, count = node[T_RANKS], node[T_COUNT]
    # Gradients of weights may fill the pipeline.
    is_filled = workspace.frame[F_KIND] == ZB1P or workspace.frame[F_KIND] == ZB2P
    busy, before = workspace.room.busy[:ranks], workspace.room.ends[:ranks]
    busy[:] = 0.0
    before[:] = 0.0
    start, passed, received = 0, 0.0, 0.0
    for chunk in range(known):
        rank = chunk % ranks
        row = _floor_of(space, tree, node, value, workspace, rank)
        seconds = tree.work[row, ends[chunk]] - tree.work[row, start]
        sent = 0.0
        if chunk < node[T_CHUNKS] - 1:
            rate = space.send_bytes_per_s[workspace.boundaries[rank]]
            sent = (
                workspace.settings[0].send_s
                + (1.0 - workspace.settings[0].send_overlap) * tree.sent[row, ends[chunk]] / rate
            )
        seconds += received + sent if node[T_CHUNKS] == ranks else max(received, sent)
        seconds += workspace.settings[0].micro_batch_s * ranks / node[T_CHUNKS]
        received = sent
        busy[rank] += seconds
        if chunk < ranks:
            before[rank] = 0.0 if is_filled else passed
            passed += seconds
        start = ends[chunk]
    longest = 0.0
    for rank in range(ranks):
        longest = max(longest, before[rank] + count * busy[rank])
    return longest + workspace.settings[0].step_s


@borrowing(float64(SPACE, TREE, int64[::1], int64[::1], WORKSPACE, int64, int64, int64), inner=True)
def _memory_floor(space, tree, node, value, workspace, chunk, start, end):
    """A device that holds the units of a chunk overflows by no smaller a share of its memory.

    Args:
        space, tree, node, value, desk: see `_pipeline_floor`.
        chunk: of the pipeline.
        start: units before the chunk.
        end: units before its end.
    """
    ranks = node[T_RANKS]
    rank = chunk % ranks
    row = _floor_of(space, tree, node, value, workspace, rank)
    waiting = in_flight(rank, ranks, node[T_CHUNKS], node[T_COUNT])
    used = max(0.0, tree.weights[row, end] - tree.weights[row, start] - tree.aside[0]) + tree.aside[1]
    used += waiting * (tree.kept[row, end] - tree.kept[row, start])
    return used / max(1.0, space.capacity[workspace.stages[rank]]) - 1.0


@borrowing(void(SPACE, TREE, int64[::1], int64[::1], WORKSPACE, int64), inner=True)
def _rest(space, tree, node, value, workspace, first):
    """Writes into `Workspace.rest` the least seconds of a micro-batch on each rank from `first` on.

    These share all units behind each.

    Args:
        space, tree, node, value, desk: see `_pipeline_floor`.
        first: pipeline rank.
    """
    rest = workspace.rest
    devices = 0
    for rank in range(first, node[T_RANKS]):
        devices += workspace.devices[rank]
    last = rest.shape[0] - 1
    rest[last] = 0.0
    for unit in range(last - 1, -1, -1):
        least = np.inf
        for rank in range(first, node[T_RANKS]):
            work = tree.work[_floor_of(space, tree, node, value, workspace, rank)]
            least = min(least, (work[unit + 1] - work[unit]) * workspace.devices[rank])
        rest[unit] = rest[unit + 1] + least / devices


@borrowing(int64(TABLES, SPACE, UNIT_CACHE, TREE, WALKS, int64, int64, WORKSPACE, int64[::1], boolean[::1]), inner=True)
def _legal(tables, space, cache, tree, walks, walk, slot, workspace, ends, mask):
    """Writes the legal values of a slot into `walks.legal`; returns their number."""
    value, node = walks.values[walk], tree.nodes[walks.node[walk]]
    legal = walks.legal[walk]
    most = legal.shape[0]
    first_cut, zero_slot = space.scalars[N_FIRST_CUT], space.scalars[N_ZERO_SLOT]
    found = 0
    schedule = space.obeys.shape[0] + 2
    if slot < schedule:
        for child in range(node[T_CHILD], node[T_CHILD] + node[T_CHILDREN]):
            if tree.nodes[child, T_VALUE] < most:
                legal[found] = tree.nodes[child, T_VALUE]
                found += 1
        return found
    num_values = 1
    mask[:] = False
    mask[0] = True
    if slot == schedule:
        if 1 < node[T_RANKS] == node[T_CHUNKS]:
            num_values = space.kinds.shape[0]
            mask[:num_values] = True
    elif slot == schedule + 1:
        if node[T_RANKS] > 1 or space.scalars[N_ORDERS_ONE] == 1:
            num_values = space.layouts.shape[0]
            mask[:num_values] = True
    elif slot < space.scalars[N_SHARES_SLOT]:
        num_values = space.send_rows.shape[1] - 1
        size_mask(space, value, slot - schedule - 2, mask[:num_values])
    elif slot < first_cut:
        num_values = space.share_ways.shape[2]
        find_stages(space, value, workspace.devices, workspace.rows, workspace.boundaries)
        share_mask(space, value, node[T_RANKS], workspace.rows, mask[:num_values])
    elif slot < space.scalars[N_FIRST_RECOMPUTE]:
        chunk = slot - first_cut
        if chunk < node[T_CHUNKS] - 1:
            low, high = space.windows[node[T_CHUNKS], chunk]
            start = _ends(space, value, workspace, node[T_CHUNKS], chunk, ends)
            num_values = high - max(low, start + 1) + 1
            mask[: min(most, num_values)] = True
    elif slot < zero_slot:
        rank = slot - space.scalars[N_FIRST_RECOMPUTE]
        if rank < node[T_RANKS]:
            num_values = space.modes.shape[0]
            _ends(space, value, workspace, node[T_CHUNKS], node[T_CHUNKS], ends)
            mode_mask(space, ends[: node[T_CHUNKS]], node[T_RANKS], rank, mask[:num_values])
            before = value[slot - 1]
            if tree.free_ranks[0] < node[T_RANKS] and 0 < rank < node[T_RANKS] - 1 and mask[: before + 1].any():
                mask[before + 1 : num_values] = False
    elif slot == zero_slot:
        # Whether there are replicas is written when the frame is laid out.
        value[zero_slot] = 0
        set_frame(space, value, workspace)
        replicated = False
        for a in range(workspace.zero_axes.shape[0]):
            replicated = replicated or workspace.zero_axes[a]
        if replicated:
            num_values = 4
            for zero in range(4):
                mask[zero] = space.zeros[zero]
    else:
        num_axes = workspace.incoming.shape[0]
        group, axis = divmod(slot - space.scalars[N_FIRST_SIGNATURE], num_axes)
        num_values = space.groups[group, G_VALUES]
        remember_mask(tables, space, cache, group, axis, workspace, mask[:num_values])
    for v in range(min(most, num_values)):
        if mask[v]:
            legal[found] = v
            found += 1
    return found


@borrowing(
    void(TABLES, SPACE, UNIT_CACHE, int64[::1], int64, int64, WORKSPACE, UNIT_WORKSPACE, float64[::1]), inner=True
)
def _look_at_mode(tables, space, cache, value, slot, mode, workspace, units, out):
    """Bounds what follows a recompute mode of a rank: the modes of ranks behind it and ZeRO at their best.

    A rank is fastest where nothing is computed again; which mode needs least memory is tried.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        cache: of the problem.
        value: [slots], those before `slot` are decided; the others are scratch.
        slot: of the mode.
        mode: that is decided.
        workspace: with the signatures that are known.
        units: scratch.
        out: [2] seconds, overflow; written.
    """
    first, ranks = space.scalars[N_FIRST_RECOMPUTE], workspace.frame[F_RANKS]
    is_last = slot == first + ranks - 1
    value[slot] = mode
    seconds = np.inf
    used = workspace.used[:, :ranks]
    used[:] = np.inf
    for other in range(space.modes.shape[0]):
        if other > 0 and (is_last or not space.modes[other]):
            continue
        value[slot + 1 : first + ranks] = other
        set_frame(space, value, workspace)
        cost_rows(tables, space, cache, -1, workspace, units)
        replicated = False
        for a in range(workspace.zero_axes.shape[0]):
            replicated = replicated or workspace.zero_axes[a]
        for zero in range(4):
            if space.zeros[zero] if replicated else zero == 0:
                workspace.settings[0].zero_stage = zero
                finish(tables, space, workspace, False, out)
                seconds = min(seconds, out[0])
                for rank in range(ranks):
                    used[zero, rank] = min(used[zero, rank], rank_overflow(workspace.ranks[rank]))
    out[0], out[1] = seconds, np.inf
    for zero in range(4):
        worst = -np.inf
        for rank in range(ranks):
            worst = max(worst, used[zero, rank])
        out[1] = min(out[1], worst)


@borrowing(
    void(TABLES, SPACE, UNIT_CACHE, TREE, WALKS, int64, int64, WORKSPACE, UNIT_WORKSPACE, int64[::1], boolean[::1]),
    inner=True,
)
def _look(tables, space, cache, tree, walks, walk, slot, workspace, units, ends, mask):
    """Writes the bounds behind the legal values of a slot into `walks.ahead`."""
    value, node = walks.values[walk], tree.nodes[walks.node[walk]]
    legal, ahead, bound = walks.legal[walk], walks.ahead[walk], walks.bound[walk]
    first_cut, first_recompute = space.scalars[N_FIRST_CUT], space.scalars[N_FIRST_RECOMPUTE]
    zero_slot = space.scalars[N_ZERO_SLOT]
    count = walks.offered[walk]
    if slot < space.obeys.shape[0] + 2:
        child = node[T_CHILD]
        for i in range(count):
            while tree.nodes[child, T_VALUE] != legal[i]:
                child += 1
            ahead[i, 0], ahead[i, 1] = tree.bounds[child, 0], tree.bounds[child, 1]
    elif slot < first_cut:
        for i in range(count):
            ahead[i, 0], ahead[i, 1] = bound[0], bound[1]
    elif slot < first_recompute:
        chunks = node[T_CHUNKS]
        workspace.rest[:] = 0.0
        chunk = slot - first_cut
        start = _ends(space, value, workspace, chunks, chunk, ends)
        low, high = space.windows[chunks, chunk]
        if chunks == node[T_RANKS]:
            _rest(space, tree, node, value, workspace, chunk + 1)
        for i in range(count):
            ends[chunk] = nth_cut(space.weight, start, max(low, start + 1), high, workspace.shares[chunk], legal[i])
            known = chunk + 1
            over = _memory_floor(space, tree, node, value, workspace, chunk, start, ends[chunk])
            if chunk == chunks - 2:
                ends[chunks - 1] = space.units.shape[0]
                known = chunks
                over = max(
                    over, _memory_floor(space, tree, node, value, workspace, chunk + 1, ends[chunk], ends[known - 1])
                )
            ahead[i, 0] = _pipeline_floor(space, tree, node, value, workspace, ends, known)
            ahead[i, 0] = max(ahead[i, 0], node[T_COUNT] * workspace.rest[ends[chunk]])
            ahead[i, 1] = over
    elif slot < zero_slot:
        settle(tables, space, workspace, mask)
        for i in range(count):
            _look_at_mode(tables, space, cache, value, slot, legal[i], workspace, units, ahead[i])
    elif slot == zero_slot:
        settle(tables, space, workspace, mask)
        cost_rows(tables, space, cache, -1, workspace, units)
        for i in range(count):
            workspace.settings[0].zero_stage = legal[i]
            finish(tables, space, workspace, False, ahead[i])
    else:
        num_axes = workspace.incoming.shape[0]
        group, axis = divmod(slot - space.scalars[N_FIRST_SIGNATURE], num_axes)
        kind = 0
        while space.group_spans[kind + 1] <= group:
            kind += 1
        for i in range(count):
            pick(space, group, axis, legal[i], workspace)
            cost_rows(tables, space, cache, kind, workspace, units)
            finish(tables, space, workspace, False, ahead[i])
    for i in range(count):
        _tighten(ahead[i], bound[0], bound[1])


@borrowing(void(SPACE, TREE, WALKS, int64, int64, int64), inner=True)
def _accept(space, tree, walks, walk, slot, picked):
    """Decides a slot; behind a shape's values the walk goes down the tree."""
    walks.values[walk, slot] = picked
    walks.position[walk] = slot + 1
    if slot < space.obeys.shape[0] + 2:
        child = tree.nodes[walks.node[walk], T_CHILD]
        while tree.nodes[child, T_VALUE] != picked:
            child += 1
        walks.node[walk] = child
        _tighten(walks.bound[walk], tree.bounds[child, 0], tree.bounds[child, 1])


@borrowing(int64(SPACE, WALKS, int64, int64), inner=True)
def _unasked(space, walks, walk, slot):
    """The value of a slot that is not asked: what is preferred, else whole operators, else the first legal one."""
    legal, count = walks.legal[walk], walks.offered[walk]
    wanted = walks.preferred[walk, slot]
    whole = -1
    if slot >= space.scalars[N_FIRST_SIGNATURE]:
        group = (slot - space.scalars[N_FIRST_SIGNATURE]) // space.obeys.shape[0]
        whole = space.groups[group, G_WHOLE]
    found = legal[0]
    for i in range(count):
        if legal[i] == wanted:
            return wanted
        if legal[i] == whole:
            found = whole
    return found


@kernel(void(TABLES, SPACE, UNIT_CACHE, TREE, WALKS, int64[::1]))
def step_many(tables, space, cache, tree, walks, actions):
    """Takes one decision of every walk, fills in what is forced or not asked behind it, and looks ahead.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        cache: of the problem.
        tree: bounds of the space.
        walks: read and written. A walk stops, with no legal values, before a slot whose preferred value is `LATER`.
        actions: [walks] index into `walks.legal`, or one of `BEGIN`, `GO_ON` and `WAIT`; a plan that is
            complete waits for `BEGIN`.
    """
    num_axes, num_slots = space.obeys.shape[0], walks.values.shape[1]
    first_cut = space.scalars[N_FIRST_CUT]
    zero_slot, first_signature = space.scalars[N_ZERO_SLOT], space.scalars[N_FIRST_SIGNATURE]
    workspace = new_workspace(tables, space)
    units = new_unit_workspace(tables, num_axes, 0)
    ends = np.empty(space.windows.shape[1], np.int64)
    widest = max(space.units.shape[0], space.obeys.shape[1], space.send_rows.shape[1], space.layouts.shape[0], 5)
    widest = max(widest, space.share_ways.shape[2])
    mask = np.empty(max(walks.legal.shape[1], widest), np.bool_)
    seen = np.empty(2)
    for walk in range(actions.shape[0]):
        value, bound, legal = walks.values[walk], walks.bound[walk], walks.legal[walk]
        if actions[walk] == BEGIN:
            walks.position[walk] = 0
            walks.node[walk] = 0
            bound[:] = tree.bounds[0]
        elif walks.position[walk] == num_slots or actions[walk] == WAIT:
            continue
        elif actions[walk] >= 0:
            ahead = walks.ahead[walk, actions[walk]]
            _accept(space, tree, walks, walk, walks.position[walk], legal[actions[walk]])
            bound[:] = ahead
        walks.offered[walk] = 0
        is_placed, is_laid, is_stale, is_through = False, False, False, True
        for slot in range(walks.position[walk], num_slots):
            if slot >= first_cut and not is_placed:
                is_placed = True
                set_stages(space, value, workspace)
            if slot >= first_signature and not is_laid:
                is_laid = True
                set_frame(space, value, workspace)
                for group in range(space.groups.shape[0]):
                    for axis in range(num_axes):
                        at = first_signature + group * num_axes + axis
                        pick(space, group, axis, value[at] if at < slot else -1, workspace)
            count = _legal(tables, space, cache, tree, walks, walk, slot, workspace, ends, mask)
            if count > 1 and (tree.asked[slot] or walks.preferred[walk, slot] == LATER):
                is_through = False
                if tree.asked[slot]:
                    walks.offered[walk] = count
                    if slot > zero_slot:
                        cost_rows(tables, space, cache, -1, workspace, units)
                    if slot > zero_slot and is_stale:
                        finish(tables, space, workspace, False, seen)
                        _tighten(bound, seen[0], seen[1])
                    _look(tables, space, cache, tree, walks, walk, slot, workspace, units, ends, mask)
                break
            walks.offered[walk] = count
            picked = legal[0] if count == 1 else _unasked(space, walks, walk, slot)
            walks.offered[walk] = 0
            _accept(space, tree, walks, walk, slot, picked)
            if slot >= first_signature:
                pick(
                    space, (slot - first_signature) // num_axes, (slot - first_signature) % num_axes, picked, workspace
                )
            is_stale = is_stale or slot >= zero_slot
        if is_through:
            if not is_laid:
                set_frame(space, value, workspace)
                for group in range(space.groups.shape[0]):
                    for axis in range(num_axes):
                        pick(space, group, axis, value[first_signature + group * num_axes + axis], workspace)
            price_laid(tables, space, cache, value, workspace, units, True, bound)
