"""Lower bounds on the costs of units on a rank for all undecided signatures; all compiled. Units: seconds, bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats2, tuple_type
from automap.price.kernels.collectives import UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST, UNIT_COST_DTYPE
from automap.price.kernels.memory import state_bytes
from automap.price.kernels.records import NUM_COLLECTIVES
from automap.price.kernels.shard_unit import shard_unit
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.kernels.unit import unit_cost
from automap.space.kernels.draft import DRAFT, legal_signatures, new_draft, pick
from automap.space.kernels.layout import set_mesh
from automap.space.kernels.records import COMPILED
from automap.space.kernels.workspace import WORKSPACE, new_workspace


@borrowing(void(COMPILED, DRAFT), inner=True)
def pick_forced(compiled, draft):
    """Picks the forced signatures: of which the meshes of the draft's layout allow only one; leaves others open."""
    space, num_axes = compiled.space, draft.picked.shape[1]
    for group in range(space.groups.shape[0]):
        for axis in range(num_axes):
            pick(space, group, axis, -1, draft)
        axis, only = 0, 0
        while axis < num_axes and only >= 0:
            mask = draft.mask[: space.groups[group].num_values]
            legal_signatures(compiled, group, axis, draft, mask)
            only = -1
            for value in range(mask.shape[0]):
                if mask[value]:
                    only = value if only == -1 else -2
            pick(space, group, axis, max(only, -1), draft)
            axis += 1


@borrowing(void(COMPILED, int64[:, ::1], int64[:, :, ::1], DRAFT), inner=True)
def _force(compiled, settings, out, draft):
    for number in range(settings.shape[0]):
        set_mesh(compiled.space.axes[settings[number, 0]], settings[number, 1], draft.layout)
        pick_forced(compiled, draft)
        for group in range(out.shape[1]):
            for axis in range(out.shape[2]):
                out[number, group, axis] = draft.picked[group, axis]


@kernel(void(COMPILED, int64[:, ::1], int64[:, :, ::1]))
def forced_signatures(compiled, settings, out):
    """Writes the forced signatures: of which the mesh of a stage allows only one.

    Args:
        settings: [settings, 2] row among the distinct stages, samples of a micro-batch.
        out: [settings, groups, axes] value of each, -1 where there is a choice; written.
    """
    _force(compiled, settings, out, new_draft(compiled))


class UnitBounds(NamedTuple):
    """Lower bounds on the costs of units of each type on one rank, by setting: a stage and samples of a micro-batch."""

    work_s: Floats2
    """[settings, types] seconds of a micro-batch without recomputation."""
    again_s: Floats2
    """[settings, types] seconds of a micro-batch if the unit is recomputed as a whole."""
    state_bytes: Floats2
    """[settings, types] bytes of parameters, gradients and moments under the ZeRO stage that needs least."""
    gradient_bytes: Floats2
    """[settings, types] bytes of the gradients among them."""
    saved_bytes: Floats2
    """[settings, types] bytes saved for the backward pass, under the recompute mode that saves least."""
    sent_bytes: Floats2
    """[settings, types] bytes of the tensor that crosses after the unit."""


UNIT_BOUNDS = tuple_type(UnitBounds)
"""Numba's type of `UnitBounds`."""


@borrowing(
    void(COMPILED, int64[:, ::1], int64[:, :, ::1], int64, UNIT_BOUNDS, WORKSPACE, UNIT_COST[::1]),
    inner=True,
)
def _least_of_units(compiled, settings, picked, again, out, workspace, costs):
    tables, space, zero_axes = compiled.tables, compiled.space, workspace.draft.layout.zero_axes
    cost = costs[0]
    for number in range(settings.shape[0]):
        at, samples = settings[number, 0], float64(settings[number, 1])
        for axis in range(space.obeys.shape[0]):
            zero_axes[axis] = axis < space.obeys.shape[0] - 1 and space.axes[at, axis] > 1.0
            for group in range(space.groups.shape[0]):
                pick(space, group, axis, picked[number, group, axis], workspace.draft)
        stage = Stage(space.axes[at], space.links[at], space.hardware[at], zero_axes, samples)
        for kind in range(space.boundary.shape[0]):
            first, last = space.spans[kind], space.spans[kind + 1]
            unit = Unit(first, last, workspace.draft.chosen[first:last])
            shard_unit(tables, unit, stage, False, workspace.unit)
            out.saved_bytes[number, kind] = np.inf
            for mode in range(space.modes.shape[0]):
                recomputed, crossing = space.masks[mode, first:last], space.boundary[kind]
                unit_cost(tables, unit, recomputed, workspace.incoming, crossing, stage, workspace.unit, costs)
                seconds = cost.forward_s + cost.backward_s + cost.recompute_s
                seconds += cost.forward_host_s + cost.backward_host_s
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.forward_comm_s[c]
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.backward_comm_s[c]
                for c in range(NUM_COLLECTIVES):
                    seconds += cost.recompute_comm_s[c]
                if mode == 0:
                    out.work_s[number, kind] = seconds
                elif mode == again:
                    out.again_s[number, kind] = seconds
                if space.modes[mode]:
                    out.saved_bytes[number, kind] = min(out.saved_bytes[number, kind], cost.saved_bytes)
            held, frozen = (cost.parameters, cost.zero_parameters), (cost.frozen, cost.zero_frozen)
            parameters, gradients, optimizer = state_bytes(held, frozen, workspace.settings[0])
            out.state_bytes[number, kind] = parameters + gradients + optimizer
            out.gradient_bytes[number, kind] = gradients
            out.sent_bytes[number, kind] = cost.boundary_bytes


@kernel(void(COMPILED, int64[:, ::1], int64[:, :, ::1], int64, UNIT_BOUNDS))
def unit_lower_bounds(compiled, settings, picked, again, out):
    """Writes lower bounds on the costs of units of each type on one rank.

    Args:
        settings: [settings, 2] row among the distinct stages, samples of a micro-batch.
        picked: [settings, groups, axes] values of decided signatures; -1 of undecided ones.
        again: recompute mode that recomputes whole units.
        out: written.
    """
    space, workspace = compiled.space, new_workspace(compiled)
    workspace.incoming[:] = UNKNOWN
    for zero in range(space.zeros.shape[1]):
        if space.zeros[:, zero].any():
            workspace.settings[0].zero_stage = zero
    costs = np.empty(1, UNIT_COST_DTYPE)
    _least_of_units(compiled, settings, picked, again, out, workspace, costs)
