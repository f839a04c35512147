"""Unit profiles: what planners of the literature read of a model, unit by unit, as their profilers would measure it.

Units stand in the order of the model; a pipeline may be cut between any two of them. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from agents.planners.staged_plan import data_parallel
from automap.arrays import Floats, Ints
from automap.price.evaluator import Evaluator, by_type
from automap.price.kernels.array_types import Record, Rows
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import RECOMPUTE_MODES, Segment
from automap.space.space import PlanSpace
from ir.factors import BROADCAST, PARTIAL


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """Times and sizes of all units, for one micro-batch on one device."""

    samples: int
    """Samples of the micro-batch."""
    forward_s: Floats
    """[units] seconds of the forward pass."""
    backward_s: Floats
    """[units] seconds of the backward pass, recomputation included."""
    crossing_bytes: Floats
    """[units] bytes that go to the next stage if the unit is the last of one."""
    parameters: Floats
    """[units] parameters."""
    saved_bytes: Floats
    """[units] bytes kept from the forward pass to the backward pass."""


def unit_profile(space: PlanSpace, samples: int, *, device: int = 0, recompute: str = "none") -> UnitProfile:
    """What the units cost on one device of the cluster.

    Args:
        space: space of the problem.
        samples: samples of a micro-batch.
        device: number of the device.
        recompute: recompute mode of all units.
    """
    evaluator, num_axes = space.evaluator, len(space.axes)
    (layout,) = evaluator.layout_of([((device,), (1,) * num_axes)]).stages
    nothing = np.zeros(num_axes, dtype=np.bool_)
    stage = Stage(layout.axes, layout.links, layout.hardware, nothing, float(samples))
    chosen = by_type(evaluator, data_parallel(evaluator, num_axes))
    units = space.linkage.blocks.units
    segments = [
        evaluator.segment(number, chosen, evaluator.masks(unit.type)["none"]) for number, unit in enumerate(units)
    ]
    costs = unit_costs(evaluator, segments, stage)[RECOMPUTE_MODES.index(recompute)]
    return UnitProfile(
        samples=samples,
        forward_s=costs["forward_s"] + costs["forward_host_s"],
        backward_s=costs["backward_s"] + costs["backward_host_s"] + costs["recompute_s"],
        crossing_bytes=costs["boundary_bytes"],
        parameters=costs["parameters"],
        saved_bytes=costs["saved_bytes"],
    )


def unit_costs(evaluator: Evaluator, segments: Sequence[Segment], stage: Stage) -> Rows:
    """[modes, units] unit costs, rows of `UnitCostRow`, as if all units were in one chunk on a stage.

    Args:
        evaluator: evaluator of the problem.
        segments: all units in order, with their signatures.
        stage: the stage.
    """
    found = np.empty((len(RECOMPUTE_MODES), len(segments)), dtype=UNIT_COST_DTYPE)
    known: dict[tuple[int, bytes, str], Record] = {}
    workspace = evaluator.new_workspace(len(stage.axes))
    # Units of one type mostly have the same signatures, so that what crosses out of them is placed alike.
    crossing: dict[tuple[int, int], Ints] = {}
    incoming = np.full(len(stage.axes), BROADCAST, dtype=np.int64)
    for number, segment in enumerate(segments):
        unit_type = evaluator.blocks.units[segment.unit].type
        incoming = np.where(incoming == PARTIAL, BROADCAST, incoming)
        for row, mode in enumerate(RECOMPUTE_MODES):
            key = (unit_type, incoming.tobytes(), mode)
            if key not in known:
                recomputed = replace(segment, recomputed=evaluator.masks(unit_type)[mode])
                known[key] = evaluator.unit_cost(recomputed, incoming, stage, workspace)
            found[row, number] = known[key]
        signatures = unit_type, id(segment.chosen)
        if signatures not in crossing:
            crossing[signatures] = evaluator.crossing_placement(segment)
        incoming = crossing[signatures]
    return found
