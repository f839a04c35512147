"""Sensitivities: derivatives of step time and memory with respect to each column of each unit cost, at a plan.

The step time is not a sum over units, because of the slowest rank, waits for hosts, overlap and the schedule. Planners
that need a sum take the sensitivities at a plan as weights, find the best plan under these, price it exactly, and
repeat this at the new plan. Units: seconds, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.kernels.sensitivities import Changes, step_changed
from automap.cost_graph.unit_rows import EXCHANGED, WIDTH, UnitRows
from automap.price.evaluator import pipeline_of
from automap.price.kernels.array_types import Rows, columns_of, records_of
from automap.price.kernels.cost_records import RANK_COST_DTYPE, UNIT_COST_DTYPE, UNIT_COST_WIDTH
from automap.price.kernels.step_records import new_step_workspace

SECONDS = columns_of(UNIT_COST_DTYPE, "forward_s", "backward_s", "recompute_s", "input_s", "weight_s")
BYTES = columns_of(UNIT_COST_DTYPE, "saved_bytes", "live_bytes", "workspace_bytes", "boundary_bytes")
ELEMENTS = columns_of(UNIT_COST_DTYPE, "parameters", "zero_parameters", "frozen", "zero_frozen")
"""Columns whose sensitivities are computed as finite differences; those in `PER_AXIS` are added for each mesh axis."""
PER_AXIS = ("reduced", "gathered", "scattered", "gathered_frozen")
(CROSSING,) = columns_of(UNIT_COST_DTYPE, "boundary_bytes")
MEMORY = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "buffer_bytes")
"""Fields of `RankCostRow` that add up to the memory of a rank."""
HALF = 0.5
"""Size of the difference for bytes that cross between units, as a share of these bytes. It is large because the first
bytes saved may gain much, and the others nothing once sending is hidden under computation; most changes of a plan save
half of the bytes or more."""
STEP = 1e-4
"""Size of all other differences, as a share of the step time or of a device's memory."""
SHARPNESS = 16.0
"""Exponent of the p-norm over ranks that replaces the maximum, so that ranks nearly as slow as the slowest count too
(assumed)."""


@dataclass(frozen=True, kw_only=True)
class Sensitivities:
    """Sensitivities at one plan; the rows are those of its unit costs, the `WIDTH` columns those of its cost graph."""

    time: Floats
    """[rows, columns] seconds of the step for one more of each column."""
    memory: Floats
    """[ranks, rows, columns] bytes of each rank for one more of each column."""
    used: Floats
    """[ranks] bytes that the plan uses."""
    capacity: Floats
    """[ranks] bytes that a plan may use."""


def sensitivities(units: UnitRows, chosen: Ints) -> Sensitivities:
    """Sensitivities at the plan with signatures `chosen`, [operator rows, axes]."""
    evaluator, lowered = units.evaluator, units.lowered
    costs, tied = units.costs(chosen), units.tied(chosen)

    pipeline = pipeline_of(lowered, units.parts, tied)
    before = units.outcome(costs, tied, exact=False).ranks
    step_s, used, capacity = float(_smooth_s(before)), _memory(before), before["capacity_bytes"]
    num_axes, room = len(lowered.zero_axes), float(capacity.max())
    firsts = [columns_of(UNIT_COST_DTYPE, name)[:num_axes] for name in PER_AXIS]
    reduced = [column for axis in zip(*firsts, strict=True) for column in axis]
    columns = np.array([*SECONDS, *BYTES, *ELEMENTS, *reduced], dtype=np.int64)
    sizes = np.full((len(columns), len(costs)), STEP * room / 16.0)
    sizes[: len(SECONDS)] = STEP * (step_s / lowered.num_micro_batches)
    sizes[len(SECONDS) : len(SECONDS) + len(BYTES)] = STEP * room
    crossing = costs[:, CROSSING]
    sizes[columns == CROSSING] = np.where(crossing > 0.0, -HALF * crossing, STEP * room)
    after = np.empty((len(columns), len(costs), pipeline.num_ranks), dtype=RANK_COST_DTYPE)
    workspace = new_step_workspace(pipeline.num_ranks, pipeline.num_chunks)
    rows, settings = records_of(costs, UNIT_COST_DTYPE), evaluator.settings(lowered.zero)
    step_changed(rows, Changes(columns, sizes), pipeline, lowered.layout.arrays, settings, workspace, after)
    time = np.zeros((len(costs), WIDTH))
    memory = np.zeros((pipeline.num_ranks, *time.shape))
    time[:, columns] = ((_smooth_s(after) - step_s) / sizes).T
    memory[:, :, columns] = ((_memory(after) - used) / sizes[:, :, None]).T
    for first in dict.fromkeys(tied["first"][units.large_ties].tolist()):
        # All ranks that hold a parameter reduce it in one all-reduce. So its rows are changed together, and the
        # difference is divided among them.
        rows_of_it = np.flatnonzero((tied["first"] == first) & (tied["exchanged"] > 0.0))
        if len(rows_of_it):
            less, exchanged = tied.copy(), float(tied["exchanged"][rows_of_it].sum())
            less["exchanged"][rows_of_it] *= 1.0 - HALF
            ranks = units.outcome(costs, less, exact=False).ranks
            worth_s = (step_s - float(_smooth_s(ranks))) / (HALF * exchanged)
            time[[units.payer(tie) for tie in rows_of_it.tolist()], EXCHANGED] = worth_s
    of_units = np.ascontiguousarray(time[:, :UNIT_COST_WIDTH])
    worth = records_of(of_units, UNIT_COST_DTYPE)
    worth["forward_comm_s"] = worth["forward_s"][:, None]
    worth["backward_comm_s"] = worth["recompute_s"][:, None]
    worth["recompute_comm_s"] = worth["backward_comm_s"]
    _share_with_hosts(units, costs, of_units)
    time[:, :UNIT_COST_WIDTH] = of_units
    return Sensitivities(time=time, memory=memory, used=used, capacity=capacity)


def _smooth_s(ranks: Rows) -> Floats:
    """[...] p-norm of the seconds of ranks, [..., ranks], see `SHARPNESS`: a little more than the slowest rank's."""
    ends = ranks["end_s"]
    slowest = ends.max(axis=-1)
    norm = ((ends / slowest[..., None]) ** SHARPNESS).sum(axis=-1)
    found: Floats = slowest * norm ** (1.0 / SHARPNESS)
    return found


def _memory(ranks: Rows) -> Floats:
    """[..., ranks] bytes that each rank uses."""
    found: Floats = np.sum([ranks[name] for name in MEMORY], axis=0)
    return found


def _share_with_hosts(units: UnitRows, costs: Floats, time: Floats) -> None:
    """Converts sensitivities to the time of passes into sensitivities to the work of the device and of the host.

    A pass takes t = (device^p + host^p)^(1/p) seconds, see `automap.price.kernels.host_overhead`.

    Args:
        units: the unit rows.
        costs: [rows, columns] their costs.
        time: [rows, columns] sensitivities of the step time, changed.
    """
    cost, worth = records_of(costs, UNIT_COST_DTYPE), records_of(time, UNIT_COST_DTYPE)
    hardware = [units.lowered.stages[row.rank].hardware for row in units.rows]
    power, kernel_s, collective_s, backward = (
        np.array([float(one[name]) for one in hardware])
        for name in ("overlap_exponent", "host_kernel_s", "host_collective_s", "host_backward")
    )
    again = (cost["recompute_comm_s"] + cost["backward_comm_s"]).sum(axis=1) + cost["recompute_s"]
    forward_s, backward_s = cost["forward_s"] + cost["forward_comm_s"].sum(axis=1), cost["backward_s"] + again
    for wait, device_s, names in (
        ("forward_host_s", forward_s, ("forward_s", "forward_comm_s")),
        ("backward_host_s", backward_s, ("backward_s", "recompute_s", "backward_comm_s", "recompute_comm_s")),
        ("input_host_s", cost["input_s"] + again, ("input_s",)),
        ("weight_host_s", cost["weight_s"], ("weight_s",)),
    ):
        both_s = device_s + cost[wait]
        takes = both_s > 0.0
        of_device = np.where(takes, device_s / np.where(takes, both_s, 1.0), 1.0)
        share = of_device ** (power - 1.0)
        hosts = np.maximum(0.0, 1.0 - of_device**power) ** ((power - 1.0) / power)
        host_worth = np.where(takes, worth[names[0]] * hosts, 0.0)
        for name in names:
            worth[name] *= share if worth[name].ndim == 1 else share[:, None]
        if wait == "forward_host_s":
            worth["launched"] += host_worth * kernel_s
            worth["forward_waits"] += host_worth * collective_s
        elif wait == "backward_host_s":
            worth["launched"] += host_worth * kernel_s * backward
            worth["unanswered"] -= host_worth * kernel_s * backward
            worth["backward_waits"] += host_worth * collective_s
