"""Unit profiles: what planners of the literature read of a model, unit by unit, as their profilers would measure it.

Units stand in the order of the model; a pipeline may be cut between any two of them. Units: seconds, bytes, samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agents.planners.kernels.unit_profile import states_of, working_of
from agents.planners.staged_plan import data_parallel
from automap.arrays import Floats, Ints
from automap.price.evaluator import Evaluator, by_type
from automap.price.kernels.array_types import Record, Rows
from automap.price.kernels.stage_records import HARDWARE_DTYPE, Stage
from automap.price.kernels.step_records import StageArrays
from automap.price.lowered_plan import RECOMPUTE_MODES, Segment, UnitCall
from automap.space.space import PlanSpace
from ir.factors import BROADCAST


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
    trained: Floats
    """[units] trained parameters."""
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
    units = UnitsInOrder.of(evaluator, data_parallel(evaluator, num_axes))
    costs = units.costs(stage)[RECOMPUTE_MODES.index(recompute)]
    return UnitProfile(
        samples=samples,
        forward_s=costs["forward_s"] + costs["forward_host_s"],
        backward_s=costs["backward_s"] + costs["backward_host_s"] + costs["recompute_s"],
        crossing_bytes=costs["boundary_bytes"],
        parameters=costs["parameters"],
        trained=costs["parameters"] - costs["frozen"],
        saved_bytes=costs["saved_bytes"],
    )


def unit_costs(evaluator: Evaluator, segments: Sequence[Segment], stage: Stage) -> Rows:
    """[modes, units] unit costs, rows of `UnitCostRow`, as if all units were in one chunk on a stage.

    Args:
        evaluator: evaluator of the problem.
        segments: all units in order, with their signatures.
        stage: the stage.
    """
    return UnitsInOrder(evaluator, segments).costs(stage)


def states(costs: Rows, settings: Record) -> Floats:
    """Bytes of parameters, gradients and optimizer state of units, in the shape of their costs.

    Args:
        costs: rows of `UnitCostRow`.
        settings: the settings of the price under a ZeRO stage, see `Evaluator.settings`.
    """
    names = ("parameters", "zero_parameters", "frozen", "zero_frozen")
    return _of_each(costs, names, settings, states_of)


def needs(costs: Rows, settings: Record) -> Floats:
    """[modes, units] bytes that the passes of each unit need besides what is saved.

    These are `working_bytes`, the result that only the next unit counts as saved, and, in a unit that is recomputed as
    a whole, the tensors that live until its backward pass.

    Args:
        costs: [modes, units] rows of `UnitCostRow`.
        settings: the settings of the price under a ZeRO stage, see `Evaluator.settings`.
    """
    names = ("workspace_bytes", "parameters", "frozen", "zero_parameters")
    found = _of_each(costs, names, settings, working_of)
    found += costs["result_bytes"]
    again = RECOMPUTE_MODES.index("full")
    found[again] += costs["live_bytes"][again]
    return found


def _of_each(costs: Rows, names: Sequence[str], settings: Record, of: Callable[..., None]) -> Floats:
    """The results of a kernel that reads the fields `names` of every unit cost, in the shape of the costs."""
    found = np.empty(costs.size)
    of(np.stack([costs[name].ravel() for name in names]), settings, found)
    return found.reshape(costs.shape)


class UnitsInOrder:
    """All units of a model, in order and with their signatures, as if they were in one chunk.

    Which units are equal does not depend on the stage. So the distinct units are found once and priced on many stages.

    Attributes:
        distinct: [units] number of the distinct unit that each unit equals.
    """

    def __init__(self, evaluator: Evaluator, segments: Sequence[Segment]) -> None:
        """Finds the distinct units.

        Args:
            evaluator: evaluator of the problem.
            segments: all units in order, with their signatures.
        """
        self._evaluator = evaluator
        numbers: dict[tuple[int, bytes], int] = {}
        calls: list[UnitCall] = []
        incoming, before = np.full(segments[0].chosen.shape[1], BROADCAST, dtype=np.int64), -1
        # Cache: units of one type mostly have the same signatures, and then the same placement of their results.
        crossing: dict[tuple[int, int], Ints] = {}
        at = []
        for segment in segments:
            unit_type = evaluator.blocks.units[segment.unit].type
            key = (unit_type, incoming.tobytes())
            if key not in numbers:
                numbers[key] = len(numbers)
                masks = evaluator.masks(unit_type)
                for mode in RECOMPUTE_MODES:
                    recomputed = replace(segment, recomputed=masks[mode])
                    calls.append(UnitCall(recomputed, 0, incoming, unit_type, before, before < 0))
            at.append(numbers[key])
            signatures = unit_type, id(segment.chosen)
            if signatures not in crossing:
                crossing[signatures] = evaluator.crossing_placement(segment)
            incoming, before = crossing[signatures], unit_type
        self.distinct, self._calls = np.array(at), evaluator.packed(calls)

    @staticmethod
    def of(evaluator: Evaluator, chosen: Ints) -> UnitsInOrder:
        """The units of a model in which all units of a type have the same signatures.

        Args:
            evaluator: evaluator of the problem.
            chosen: [operator rows, axes] signatures.
        """
        of_types, units = by_type(evaluator, chosen), enumerate(evaluator.blocks.units)
        return UnitsInOrder(
            evaluator, [evaluator.segment(n, of_types, evaluator.masks(unit.type)["none"]) for n, unit in units]
        )

    def costs(self, stage: Stage) -> Rows:
        """[modes, units] unit costs on a stage, rows of `UnitCostRow`."""
        found = self.distinct_costs(stage).reshape(-1, len(RECOMPUTE_MODES)).T
        costs: Rows = np.take(found, self.distinct, axis=1)
        return costs

    def distinct_costs(self, stage: Stage) -> Rows:
        """[distinct units * modes] their costs on a stage, rows of `UnitCostRow`; those of a unit under all modes are
        consecutive."""
        nothing = np.zeros(0)
        stages = StageArrays(
            axes=stage.axes[None],
            links=stage.links[None],
            hardware=np.array([stage.hardware], dtype=HARDWARE_DTYPE),
            capacity=nothing,
            send_latency_s=nothing,
            send_bytes_per_s=nothing,
        )
        return self._evaluator.costs_of(self._calls, stages, stage.zero_axes, np.array([stage.samples]))
