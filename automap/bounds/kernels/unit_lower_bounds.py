"""The least that units cost on a rank, whatever their undecided signatures; all compiled. Units: seconds, bytes."""

from __future__ import annotations

import numpy as np
from numba import float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.kernels.records import NUM_COLLECTIVES
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.kernels.unit import unit_cost
from automap.space.kernels.records import COMPILED
from automap.space.kernels.workspace import WORKSPACE, legal_signatures, new_workspace, pick


@borrowing(void(COMPILED, WORKSPACE), inner=True)
def pick_forced(compiled, workspace):
    """Picks the signatures that the meshes of the workspace's layout leave no choice of; the others are undecided."""
    space, num_axes = compiled.space, workspace.incoming.shape[0]
    for group in range(space.groups.shape[0]):
        for axis in range(num_axes):
            pick(space, group, axis, -1, workspace)
        axis, only = 0, 0
        while axis < num_axes and only >= 0:
            mask = workspace.mask[: space.groups[group].num_values]
            legal_signatures(compiled, group, axis, workspace, mask)
            only = -1
            for value in range(mask.shape[0]):
                if mask[value]:
                    only = value if only == -1 else -2
            pick(space, group, axis, max(only, -1), workspace)
            axis += 1


@kernel(void(COMPILED, int64[:, ::1], int64[:, :, ::1]))
def forced_signatures(compiled, stages, out):
    """Signatures that the mesh of a stage leaves no choice of.

    Args:
        compiled: whose cache is read and written.
        stages: [n, 2] row among the distinct stages, samples of a micro-batch.
        out: [n, groups, axes] value of each, -1 where there is a choice; written.
    """
    workspace = new_workspace(compiled)
    layout = workspace.layout
    layout.frame[0].num_meshes = 1
    for number in range(stages.shape[0]):
        layout.sizes[0] = compiled.space.axes[stages[number, 0]]
        layout.divided[0] = stages[number, 1]
        pick_forced(compiled, workspace)
        out[number] = workspace.picked


@kernel(void(COMPILED, int64[:, ::1], int64[:, :, ::1], float64[::1], int64, float64[:, :, ::1]))
def unit_lower_bounds(compiled, stages, picked, exposed, again, out):
    """The least that units of each type cost on one rank, whatever their signatures.

    Args:
        compiled: tables and space.
        stages: [n, 2] row among the distinct stages, samples of a micro-batch.
        picked: [n, groups, axes] values of signatures that are known, -1 of others.
        exposed: [NUM_COLLECTIVES] share of each kind of collective that nothing hides.
        again: recompute mode that runs whole units again.
        out: [n, 6, types] seconds of a micro-batch, seconds where all is computed again, parameters held under ZeRO,
            bytes saved for the backward pass under the mode that saves least, bytes that cross behind the unit,
            parameters held without ZeRO; written.
    """
    tables, space = compiled.tables, compiled.space
    workspace = new_workspace(compiled)
    zero_axes = workspace.layout.zero_axes
    workspace.incoming[:] = UNKNOWN
    costs = np.empty(1, UNIT_COST_DTYPE)
    cost = costs[0]
    for number in range(stages.shape[0]):
        at, samples = stages[number, 0], float64(stages[number, 1])
        for axis in range(space.obeys.shape[0]):
            zero_axes[axis] = axis < space.obeys.shape[0] - 1 and space.axes[at, axis] > 1.0
            for group in range(space.groups.shape[0]):
                pick(space, group, axis, picked[number, group, axis], workspace)
        stage = Stage(space.axes[at], space.links[at], space.hardware[at], zero_axes, samples)
        for kind in range(out.shape[2]):
            first, last = space.spans[kind], space.spans[kind + 1]
            unit = Unit(first, last, workspace.chosen[first:last])
            shard_unit(tables, unit, stage, False, workspace.unit)
            out[number, 3, kind] = np.inf
            for mode in range(space.modes.shape[0]):
                recomputed, crossing = space.masks[mode, first:last], space.boundary[kind]
                unit_cost(tables, unit, recomputed, workspace.incoming, crossing, stage, workspace.unit, costs)
                seconds = cost.forward_s + cost.backward_s + cost.recompute_s
                seconds += cost.forward_host_s + cost.backward_host_s
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.forward_comm_s[c] * exposed[c]
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.backward_comm_s[c] * exposed[c]
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.recompute_comm_s[c] * exposed[c]
                if mode in (0, again):
                    out[number, 0 if mode == 0 else 1, kind] = seconds
                if space.modes[mode]:
                    out[number, 3, kind] = min(out[number, 3, kind], cost.saved_bytes)
            out[number, 2, kind] = cost.zero_parameters
            out[number, 4, kind] = cost.boundary_bytes
            out[number, 5, kind] = cost.parameters
