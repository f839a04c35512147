"""The least that units cost on a rank, whatever their undecided signatures; all compiled. Units: seconds, bytes."""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.kernels.records import NUM_COLLECTIVES, TABLES
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.kernels.unit import unit_cost
from automap.price.kernels.unit_workspace import new_unit_workspace
from automap.space.compile import G_VALUES, SPACE
from automap.space.kernels.masks import signature_mask
from automap.space.kernels.workspace import F_MESHES, WORKSPACE, new_workspace, pick, restore


@borrowing(void(TABLES, SPACE, WORKSPACE, boolean[::1]), inner=True)
def settle(tables, space, workspace, mask):
    """Picks the signatures that the meshes leave no choice of; the others are undecided.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        workspace: with its meshes.
        mask: scratch, as long as a group has values.
    """
    num_axes, meshes = workspace.incoming.shape[0], workspace.frame[F_MESHES]
    for group in range(space.groups.shape[0]):
        for axis in range(num_axes):
            pick(space, group, axis, -1, workspace)
        axis, only = 0, 0
        while axis < num_axes and only >= 0:
            legal = mask[: space.groups[group, G_VALUES]]
            sizes, samples = workspace.sizes[:meshes], workspace.divided[:meshes]
            signature_mask(tables, space, group, axis, workspace.chosen, sizes, samples, legal)
            only = -1
            for value in range(legal.shape[0]):
                if legal[value]:
                    only = value if only == -1 else -2
            # The mask's trials are taken back.
            for a in range(axis, num_axes):
                restore(space, group, a, workspace)
            pick(space, group, axis, max(only, -1), workspace)
            axis += 1


@kernel(void(TABLES, SPACE, int64[:, ::1], int64[:, :, ::1]))
def settled(tables, space, frames, out):
    """Signatures that the mesh of a stage leaves no choice of.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        frames: [n, 2] row among the distinct stages, samples of a micro-batch.
        out: [n, groups, axes] value of each, -1 where there is a choice; written.
    """
    workspace = new_workspace(tables, space)
    mask = np.empty(max(1, space.obeys.shape[1]), np.bool_)
    workspace.frame[F_MESHES] = 1
    for frame in range(frames.shape[0]):
        workspace.sizes[0] = space.axes[frames[frame, 0]]
        workspace.divided[0] = frames[frame, 1]
        settle(tables, space, workspace, mask)
        out[frame] = workspace.picked


@kernel(void(TABLES, SPACE, int64[:, ::1], int64[:, :, ::1], float64[::1], int64, float64[:, :, ::1]))
def floors(tables, space, frames, picked, exposed, again, out):
    """The least that units of each type cost on one rank, whatever their signatures.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        frames: [n, 2] row among the distinct stages, samples of a micro-batch.
        picked: [n, groups, axes] values of signatures that are known, -1 of others.
        exposed: [NUM_COLLECTIVES] share of each kind of collective that nothing hides.
        again: recompute mode that runs whole units again.
        out: [n, 6, types] seconds of a micro-batch, seconds where all is computed again, parameters held under ZeRO,
            bytes kept for the backward pass under the mode that keeps least, bytes that cross behind the unit,
            parameters held without ZeRO; written.
    """
    units = new_unit_workspace(tables, space.obeys.shape[0], 0)
    workspace = new_workspace(tables, space)
    workspace.incoming[:] = UNKNOWN
    costs = np.empty(1, UNIT_COST_DTYPE)
    cost = costs[0]
    for frame in range(frames.shape[0]):
        at, samples = frames[frame, 0], float64(frames[frame, 1])
        for a in range(space.obeys.shape[0] - 1):
            workspace.zero_axes[a] = space.axes[at, a] > 1.0
        for group in range(space.groups.shape[0]):
            for axis in range(space.obeys.shape[0]):
                pick(space, group, axis, picked[frame, group, axis], workspace)
        stage = Stage(space.axes[at], space.links[at], space.hardware[at], workspace.zero_axes, samples)
        for kind in range(out.shape[2]):
            first, last = space.spans[kind], space.spans[kind + 1]
            unit = Unit(first, last, workspace.chosen[first:last])
            shard_unit(tables, unit, stage, False, units)
            out[frame, 3, kind] = np.inf
            for mode in range(space.modes.shape[0]):
                recomputed, crossing = space.masks[mode, first:last], space.boundary[kind]
                unit_cost(tables, unit, recomputed, workspace.incoming, crossing, stage, units, costs)
                seconds = cost.forward_s + cost.backward_s + cost.recompute_s
                seconds += cost.forward_host_s + cost.backward_host_s
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.forward_comm_s[c] * exposed[c]
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.backward_comm_s[c] * exposed[c]
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.recompute_comm_s[c] * exposed[c]
                if mode in (0, again):
                    out[frame, 0 if mode == 0 else 1, kind] = seconds
                if space.modes[mode]:
                    out[frame, 3, kind] = min(out[frame, 3, kind], cost.saved_bytes)
            out[frame, 2, kind] = cost.zero_parameters
            out[frame, 4, kind] = cost.boundary_bytes
            out[frame, 5, kind] = cost.parameters
