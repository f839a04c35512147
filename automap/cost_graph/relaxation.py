"""Relaxation: what all units of a model take at least on a stage, as the least of one cost graph.

The cost graph (`automap.cost_graph.open_costs`) gives the costs of units as sums over linkage groups. A step is no such
sum; here it is replaced by one that it is not below:

- A rank's passes, gradients and update have weights (`automap.cost_graph.paths`).
- A pass takes (device^p + host^p)^(1/p) seconds, which is at least any of its tangents.
- Collectives of gradients take a concave time, which is at least the chord from nothing to all parameters. What hides
  of them is at least one of two straight lines, or a mixture of them.
- Of several ZeRO stages, each cost has the least of its weights.

Every choice of tangents and lines is a lower bound; the ones at the best assignment of the graph so far are tried in
turn. The least of the graph is bounded by message passing. Units: seconds, bytes, elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats
from automap.cost_graph.message_passing import MANY_VALUES, bounds_of_parts, candidates
from automap.cost_graph.open_costs import OpenCosts
from automap.cost_graph.paths import Path
from automap.price.kernels.array_types import Record, columns_of
from automap.price.kernels.collectives import collective_s
from automap.price.kernels.cost_records import UNIT_COST_DTYPE, UNIT_COST_WIDTH
from automap.price.kernels.records import ALL_REDUCE, ALL_TO_ALL, NUM_COLLECTIVES
from automap.price.kernels.step import SPREAD_OVERLAP
from automap.space.space import PlanSpace

FORWARD = tuple(columns_of(UNIT_COST_DTYPE, name) for name in ("forward_s", "forward_comm_s", "forward_waits"))
BACKWARD = tuple(columns_of(UNIT_COST_DTYPE, name) for name in ("backward_s", "backward_comm_s", "backward_waits"))
"""Columns of the device's seconds, of collectives and of the host's waits in a pass."""
(LAUNCHED,) = columns_of(UNIT_COST_DTYPE, "launched")
PARAMETERS, SHARDS, REDUCED, SCATTERED, GATHERED = (
    columns_of(UNIT_COST_DTYPE, name) for name in ("parameters", "zero_parameters", "reduced", "scattered", "gathered")
)
(BOUNDARY_BYTES,) = columns_of(UNIT_COST_DTYPE, "boundary_bytes")
PRICES = (0.01, 10.0)
"""Least and greatest price of all memory, in step times."""
BISECTIONS = 6
"""Number of prices of memory that are tried at most."""
ROUNDS = 3
"""Number of times at most that tangents are taken."""
GAIN = 1e-3
"""Share by which a bound must rise for another round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """The tangents and lines at which a step is bounded."""

    forward: Floats
    """[types, 2] worth of a second of the device and of the host in a forward pass, one unit in the dual norm."""
    backward: Floats
    """[types, 2] the same of the backward pass."""
    behind: float
    """Share of the part of gradients that may hide which is taken to outlast the last backward pass, 0 to 1."""


class Relaxation:
    """The relaxed cost graph of all units on one stage.

    Attributes:
        picked: the best assignment of the last graph.
    """

    def __init__(
        self,
        space: PlanSpace,
        costs: OpenCosts,
        path: Path,
        zeros: Sequence[int],
        *,
        num_opened: int,
        room: float = math.inf,
    ) -> None:
        """Gathers what the graphs share.

        Args:
            costs: what units cost on the stage.
            path: what the seconds of a rank weigh.
            zeros: ZeRO stages.
            num_opened: units that are the first of a chunk, but for the first of all.
            room: bytes that parameters, gradients and moments may take on all ranks together.
        """
        self._room, self._price_s = room, 0.0
        self._costs, self._path, self._zeros, self._num_opened = costs, path, tuple(zeros), num_opened
        self._settings = space.evaluator.settings(0)
        self._elements = float(sum(t.num_elements for t in space.problem.graph.parameters))
        self.picked: tuple[int, ...] = (0,) * len(costs.values)

    def bound(self, target_s: float) -> float:
        """Weighted seconds of all units, at least; not raised beyond `target_s`."""
        lines, best = self._first_lines(), -np.inf
        for _ in range(ROUNDS):
            found = self._least(lines, target_s)
            is_better = found > best * (1.0 + GAIN)
            best = max(best, found)
            if best >= target_s or not is_better:
                break
            lines = self._lines_at(self.picked)
        return max(best, self._with_memory(target_s)) if best < target_s else best

    def _with_memory(self, target_s: float) -> float:
        """The same where memory has a price: seconds of all units and of what they need too much of it, at least."""
        best, low, high = -np.inf, *(price * target_s / self._room for price in PRICES)
        self._price_s = 0.0
        for number in range(BISECTIONS):
            costs = self._costs.unit_costs(self.picked)
            is_short = float(self._costs.times @ (costs * self._state_bytes()).sum(axis=1)) > self._room
            if number == 0 and not is_short:
                break
            low, high = (low, high) if number == 0 else (self._price_s, high) if is_short else (low, self._price_s)
            self._price_s = math.sqrt(low * high)
            room_s = self._price_s * self._room
            best = max(best, self._least(self._lines_at(self.picked), target_s + room_s) - room_s)
            if best >= target_s:
                break
        self._price_s = 0.0
        return best

    def _state_bytes(self) -> Floats:
        """[columns] bytes of parameters, gradients and moments for one more of each column, at least."""
        settings = self._settings
        found = np.zeros(UNIT_COST_WIDTH)
        least = max(self._zeros)
        for stage, each in ((3, settings.parameter_bytes), (2, settings.gradient_bytes), (1, settings.optimizer_bytes)):
            found[SHARDS if least >= stage else PARAMETERS] += float(each)
        return found

    def of_types(self) -> Floats:
        """[types] weighted seconds of all units of each type by themselves, at least."""
        lines, best = self._first_lines(), np.zeros(len(self._costs.times))
        left = [np.arange(len(values)) for values in self._costs.values]
        for _ in range(ROUNDS - 1):
            worth = self._weights(lines)
            graph = self._costs.scalars(worth, left, num_opened=self._num_opened, with_three=False, mixes=False)
            found, self.picked = bounds_of_parts(graph, self._costs.kinds)
            constant = self._costs.times * (self._costs.bases * worth).sum(axis=1)
            best = np.maximum(best, constant + np.pad(found, (0, len(constant) - len(found))))
            lines = self._lines_at(self.picked)
        return best

    def _least(self, lines: Lines, target_s: float) -> float:
        """A lower bound on the graph at some lines; `picked` is written."""
        worth = self._weights(lines)
        left = [np.arange(len(values)) for values in self._costs.values]
        coarse = self._costs.scalars(worth, left, num_opened=self._num_opened, with_three=False)
        left, self.picked, bound = candidates(coarse, self.picked, target_s, MANY_VALUES)
        if bound >= target_s or any(len(some) > MANY_VALUES - 1 for some in left):
            # What was left out costs more than the target.
            return min(bound, target_s)
        left = [np.union1d(keep, [v]) for keep, v in zip(left, self.picked, strict=True)]
        fine = self._costs.scalars(worth, left, num_opened=self._num_opened, with_three=True)
        start = [int(np.searchsorted(keep, v)) for keep, v in zip(left, self.picked, strict=True)]
        _, picked, sharper = candidates(fine, start)
        self.picked = tuple(int(keep[v]) for keep, v in zip(left, picked, strict=True))
        return min(max(bound, sharper), target_s)

    # -- weights --------------------------------------------------------------------------------------------------

    def _weights(self, lines: Lines) -> Floats:
        """[types, columns] worth of one unit of each cost."""
        found = np.minimum.reduce([self._weights_of(zero, lines) for zero in self._zeros])
        return found + self._price_s * self._state_bytes() if self._price_s else found

    def _weights_of(self, zero: int, lines: Lines) -> Floats:
        """[types, columns] worth of one unit of each cost under a ZeRO stage."""
        settings, path, stage = self._settings, self._path, self._costs.stage
        hardware = stage.hardware
        worth = np.zeros((len(self._costs.times), UNIT_COST_WIDTH))
        hidden = float(settings.gradient_overlap)
        last = lines.behind * path.gradients
        passes = (
            (FORWARD, path.forward * lines.forward, 1.0),
            (BACKWARD, (path.backward - last) * lines.backward, float(hardware.host_backward)),
        )
        for (own, comm, waits), weight, launches in passes:
            worth[:, own] = weight[:, :1]
            worth[:, comm] = weight[:, :1] * _exposed(hardware)
            worth[:, waits] = weight[:, 1:] * float(hardware.host_collective_s)
            worth[:, LAUNCHED] += weight[:, 1] * launches * float(hardware.host_kernel_s)
        shown = path.gradients * (1.0 - hidden) + last * hidden
        # Of what ZeRO 2 and 3 move in every micro-batch, the part that nothing hides, without latencies.
        gather = path.forward * (1.0 - float(settings.gather_overlap)) + (path.backward - last) * (1.0 - hidden)
        for a, size in enumerate(stage.axes.tolist()):
            sync_s = shown * self._reduced_s(size, stage.links[a])
            byte_s = (size - 1.0) / size / float(stage.links[a].gather_bytes_per_s) if size > 1.0 else 0.0
            parameter_s = byte_s * float(settings.parameter_bytes)
            is_sharded = bool(stage.zero_axes[a])
            if zero < 1:
                worth[:, REDUCED[a]] = sync_s
            elif not is_sharded or zero < 2:
                worth[:, SCATTERED[a]] = 0.5 * sync_s if is_sharded else sync_s
            else:
                byte_s *= float(settings.sent_gradient_bytes)
                worth[:, SCATTERED[a]] = (path.backward - last) * (1.0 - hidden) * byte_s
            if 1 <= zero < 3:
                worth[:, GATHERED[a]] = path.gradients * (1.0 - SPREAD_OVERLAP * hidden) * parameter_s
            elif zero >= 3 and is_sharded:
                worth[:, GATHERED[a]] = gather * parameter_s
        (state,) = SHARDS if zero >= 1 else PARAMETERS
        worth[:, state] = path.gradients * float(settings.update_bytes) / float(hardware.bytes_per_s)
        return worth

    def _reduced_s(self, size: float, link: Record) -> float:
        """Least seconds of an all-reduce for each element of a gradient, of no more than all parameters."""
        most = self._elements * float(self._settings.sent_gradient_bytes)
        return float(collective_s(ALL_REDUCE, size, link, most)) / self._elements if most > 0.0 else 0.0

    # -- lines ----------------------------------------------------------------------------------------------------

    def _first_lines(self) -> Lines:
        """Tangents where nothing is decided, and both lines alike."""
        found = self._lines_of(self._costs.bases)
        return Lines(forward=found.forward, backward=found.backward, behind=0.5)

    def _lines_at(self, picked: Sequence[int]) -> Lines:
        """The tangents and lines at an assignment."""
        return self._lines_of(self._costs.unit_costs(picked))

    def _lines_of(self, costs: Floats) -> Lines:
        """The tangents and lines where units have some costs, [types, columns]."""
        hardware, stage, times = self._costs.stage.hardware, self._costs.stage, self._costs.times
        power = float(hardware.overlap_exponent)
        tangents, device_s = [], np.zeros(len(times))
        for (own, comm, waits), launches in ((FORWARD, 1.0), (BACKWARD, float(hardware.host_backward))):
            device_s = costs[:, own[0]] + costs[:, comm] @ _exposed(hardware)
            host_s = float(hardware.host_kernel_s) * launches * costs[:, LAUNCHED]
            host_s += float(hardware.host_collective_s) * costs[:, waits[0]]
            both = np.maximum(np.stack([device_s, host_s], axis=1), 0.0)
            both /= np.maximum(both.max(axis=1, keepdims=True), 1e-30)
            norm = (both**power).sum(axis=1, keepdims=True) ** (1.0 / power)
            tangents.append((both / np.maximum(norm, 1e-30)) ** (power - 1.0))
        sync_s = 0.0
        for a, size in enumerate(stage.axes.tolist()):
            column, share = (REDUCED[a], 1.0) if self._zeros[0] < 1 else (SCATTERED[a], 0.5)
            if self._zeros[0] < 2 or not stage.zero_axes[a]:
                sync_s += share * self._reduced_s(size, stage.links[a]) * float(times @ costs[:, column])
        is_behind = sync_s * float(self._settings.gradient_overlap) > float(times @ device_s)
        return Lines(forward=tangents[0], backward=tangents[1], behind=float(is_behind))


def _exposed(hardware: Record) -> Floats:
    """[NUM_COLLECTIVES] part of each kind of collective that nothing hides."""
    found = np.full(NUM_COLLECTIVES, float(hardware.exposed))
    found[ALL_TO_ALL] = float(hardware.exposed_exchange)
    return found
