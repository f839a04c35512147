"""Span costs: what any run of consecutive units costs on one stage of a pipeline, for planners that divide a model.

The costs of units are those of the price, with given signatures, each unit behind the one before it. What the schedule,
hosts and overlap do to them is left to the exact price. Units: seconds, bytes.
"""

from __future__ import annotations

import functools

import numpy as np

from agents.planners.unit_profile import unit_costs
from automap.arrays import Floats, Ints, Mask
from automap.price.evaluator import by_type
from automap.price.kernels.array_types import Record
from automap.price.kernels.collectives import RAMP_UNIT_S
from automap.price.kernels.records import ALL_REDUCE
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.price.stage_layout import StageLayout
from automap.space.space import PlanSpace


class SpanCosts:
    """Costs of all spans of units on one stage.

    A span is given by two indices: [units + 1, units + 1] from the first index to before the second; infinite where
    there is none.

    Attributes:
        forward_s, backward_s: [modes, units] seconds of a micro-batch, with what is recomputed in the backward pass and
            with the collectives that nothing hides.
        crossing_bytes: [units + 1] bytes that a rank sends where a stage begins before each unit.
        reduce_s: span -> seconds of the reduction of gradients that nothing hides.
        capacity: bytes that a plan may use on a device.
    """

    def __init__(self, space: PlanSpace, chosen: Ints, layout: StageLayout, samples: float, zero: int) -> None:
        """Prices all units.

        Args:
            chosen: [operator rows, axes] signatures.
            layout: the stage.
            samples: samples of a micro-batch, a multiple of the ranks that split them.
            zero: ZeRO stage, over all axes but the innermost.
        """
        self.space, self.layout = space, layout
        zero_axes = (layout.axes > 1.0) & (np.arange(len(layout.axes)) < len(layout.axes) - 1)
        stage = Stage(layout.axes, layout.links, layout.hardware, zero_axes, float(samples))
        evaluator, of_types = space.evaluator, by_type(space.evaluator, chosen)
        units = enumerate(space.linkage.blocks.units)
        segments = [evaluator.segment(n, of_types, evaluator.masks(unit.type)["none"]) for n, unit in units]
        costs = unit_costs(evaluator, segments, stage)
        settings = evaluator.settings(zero)
        self._settings, exposed = settings, evaluator.exposed
        comm_s = (costs["backward_comm_s"] + costs["recompute_comm_s"]) @ exposed
        self.forward_s: Floats = costs["forward_s"] + costs["forward_host_s"] + costs["forward_comm_s"] @ exposed
        self.backward_s: Floats = costs["backward_s"] + costs["backward_host_s"] + costs["recompute_s"] + comm_s
        self.crossing_bytes: Floats = np.concatenate([[0.0], costs["boundary_bytes"][0]])
        self.capacity = float(layout.capacity)
        self._saved = spans(costs["saved_bytes"])
        live = np.where(np.array(RECOMPUTE_MODES) == "full", costs["live_bytes"].max(axis=1), 0.0)
        self._fixed = settings.reserved_bytes + 2.0 * costs["workspace_bytes"].max(axis=1) + live
        self._parameters, self._zero_parameters = spans(costs["parameters"][0]), spans(costs["zero_parameters"][0])
        elements = costs["scattered" if zero else "reduced"][0]
        self.reduce_s: Floats = np.zeros_like(self._parameters)
        for axis, size in enumerate(layout.axes.tolist()):
            sent = spans(elements[:, axis]) * settings.sent_gradient_bytes
            hidden = space.problem.trainer.gradient_overlap
            self.reduce_s += (1.0 - hidden) * _all_reduce_s(size, layout.links[axis], sent)

    @functools.cached_property
    def state_bytes(self) -> Floats:
        """Span -> bytes of parameters, gradients and optimizer state."""
        whole, sharded, settings = self._parameters, self._zero_parameters, self._settings
        return (
            (sharded if settings.zero_stage >= 3.0 else whole) * settings.parameter_bytes
            + (sharded if settings.zero_stage >= 2.0 else whole) * settings.gradient_bytes
            + (sharded if settings.zero_stage >= 1.0 else whole) * settings.optimizer_bytes
        )

    @functools.cached_property
    def pass_s(self) -> Floats:
        """[modes, units + 1, units + 1] seconds of the forward and the backward pass of a micro-batch."""
        return spans(self.forward_s + self.backward_s)

    def used_bytes(self, alive: int) -> Floats:
        """[modes, units + 1, units + 1] bytes of a device with so many micro-batches between their passes."""
        return self.state_bytes + alive * self._saved + self._fixed[:, None, None]

    def fastest(self, alive: int) -> tuple[Floats, Ints]:
        """Of each span the seconds of both passes in the fastest recompute mode that fits, and that mode."""
        fits = (self.used_bytes(alive) <= self.capacity) & self.space.modes[:, None, None]
        times = np.where(fits, self.pass_s, np.inf)
        return times.min(axis=0), times.argmin(axis=0)


def spans(of_units: Floats) -> Floats:
    """Sums over the units from one to before another, […, units + 1, units + 1]; infinite where there is none."""
    sums = np.concatenate([np.zeros((*of_units.shape[:-1], 1)), np.cumsum(of_units, axis=-1)], axis=-1)
    found: Floats = sums[..., None, :] - sums[..., :, None]
    empty: Mask = np.tril(np.ones(found.shape[-2:], dtype=np.bool_))
    return np.where(empty, np.inf, found)


def _all_reduce_s(size: float, link: Record, sent: Floats) -> Floats:
    """`automap.price.kernels.collectives.collective_s` of many all-reduces."""
    if size <= 1.0:
        return np.zeros_like(sent)
    is_sent = np.isfinite(sent) & (sent > 0.0)
    x = 2.0 * (size - 1.0) / size * np.where(is_sent, sent, 0.0) / link["bytes_per_s"][ALL_REDUCE]
    found: Floats = link["latency_s"][ALL_REDUCE] + x + link["ramp"][ALL_REDUCE] * np.sqrt(x * RAMP_UNIT_S)
    return np.where(is_sent, found, 0.0)
