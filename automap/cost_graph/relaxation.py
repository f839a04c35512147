"""Relaxation: a lower bound on the time of all units of a model on a stage, as the minimum of one cost graph.

The cost graph (`automap.cost_graph.open_costs`) gives the costs of units as sums over linkage groups. The time of a
step is not such a sum. It is bounded from below by a sum, part by part:

- The passes, gradients and update of a rank are weighted by paths through the schedule (`automap.cost_graph.paths`).
- A pass takes (device^p + host^p)^(1/p) seconds. This function is convex, so that each of its tangents is a lower
  bound.
- The time of collectives of gradients is concave in the bytes, so that the chord from no parameters to all parameters
  is a lower bound. For the part that is not hidden, each of two straight lines is a lower bound, and so is any mixture
  of them.
- If there are several ZeRO stages, each cost has the least of its weights.
- The limit on memory is relaxed by a price of each byte (Lagrange). Each unit has the recompute mode that is best at
  this price. What recomputation saves and costs is computed with every signature undecided.

Every choice of tangents, lines and prices gives a lower bound. In each round, they are taken at the best assignment
found so far. The minimum of the graph is bounded by message passing. Units: seconds, bytes, elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from automap.arrays import Floats
from automap.cost_graph.message_passing import bounds_of_parts, candidates
from automap.cost_graph.open_costs import OpenCosts
from automap.cost_graph.paths import Path
from automap.cost_graph.relaxed_costs import Memory, OfTypes, State, Undecided
from automap.price.kernels.array_types import Record, columns_of
from automap.price.kernels.collectives import collective_s
from automap.price.kernels.cost_records import UNIT_COST_DTYPE, UNIT_COST_WIDTH
from automap.price.kernels.records import ALL_REDUCE
from automap.price.kernels.step import SPREAD_OVERLAP
from automap.space.space import PlanSpace

FORWARD = tuple(columns_of(UNIT_COST_DTYPE, name) for name in ("forward_s", "forward_comm_s", "forward_waits"))
BACKWARD = tuple(columns_of(UNIT_COST_DTYPE, name) for name in ("backward_s", "backward_comm_s", "backward_waits"))
"""Columns of the device's seconds, of collectives and of the host's waits in a pass."""
(LAUNCHED,) = columns_of(UNIT_COST_DTYPE, "launched")
PARAMETERS, SHARDS, REDUCED, SCATTERED, GATHERED = (
    columns_of(UNIT_COST_DTYPE, name) for name in ("parameters", "zero_parameters", "reduced", "scattered", "gathered")
)
FROZEN, FROZEN_SHARDS, GATHERED_FROZEN, UNANSWERED = (
    columns_of(UNIT_COST_DTYPE, name) for name in ("frozen", "zero_frozen", "gathered_frozen", "unanswered")
)
"""Columns of parameters that are not trained and of kernels without a backward pass. They are subtracted from all
parameters, or kernels, where these cost something besides the forward pass."""
AGAIN, AGAIN_COMM = (columns_of(UNIT_COST_DTYPE, name) for name in ("recompute_s", "recompute_comm_s"))
"""Columns of the device's seconds and of collectives in recomputation."""
BOUNDARY_BYTES, SAVED_BYTES, WORKSPACE_BYTES = columns_of(
    UNIT_COST_DTYPE, "boundary_bytes", "saved_bytes", "workspace_bytes"
)
FIRST_PRICE = 0.3
"""First price that is tried for the whole memory, in step times (assumed)."""
DEARER = 10.0
"""Factor to the next price if memory is short at a price (assumed)."""
PRICES = 8
"""Largest number of prices of memory that are tried (assumed)."""
ROUNDS = 8
"""Largest number of rounds in which tangents are taken (assumed)."""
ROUNDS_AGAIN = 2
"""The same if the first assignment is already close to the best one."""
FOREVER_S = 1e12
"""Seconds that are longer than any step."""
ALL_SHARDED = 3
"""ZeRO stage under which parameters are sharded too."""
NEAR = 1e-3
"""Relative difference below which two prices of memory count as equal."""


PRICE_OF_STATE = 0.5
"""Price of the state of all units, as a multiple of the seconds of all units, where each type is bounded separately
(assumed). At this price, signatures that need less state are preferred to the fastest ones if they are slower by less
than the price."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """The choice of tangents and lines of one bound."""

    forward: Floats
    """[types, 2] weights of a second of the device and of a second of the host in a forward pass; their dual norm is
    1."""
    backward: Floats
    """[types, 2] the same for the backward pass."""
    behind: float
    """Weight of the line in which the gradients outlast the last backward pass, 0 to 1; the rest is that of the line in
    which the backward pass hides them."""


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
        state: State,
        *,
        num_opened: int,
        memory: Memory | None = None,
        ends_first: float = 0.0,
        parameter_s: float = 0.0,
    ) -> None:
        """Prepares the numbers that all graphs share.

        Args:
            space: the plan space.
            costs: costs of units on the stage.
            path: weights of the seconds of a rank.
            state: ZeRO stages and gradients of the plans.
            num_opened: number of units that are the first of a chunk, without the first unit of the model.
            memory: memory of all ranks together; None: memory is not limited.
            ends_first: share of the paths that end on rank 0, which has the first unit, and are followed by its
                gradients. The path's weight of gradients is added to this for every rank.
            parameter_s: additional seconds for each parameter of the first unit.
        """
        self._parameter_s = parameter_s
        self._state = state
        self._room, self._in_flight = (memory.room, memory.in_flight) if memory else (math.inf, 1)
        self._price_s = 0.0
        self._costs, self._path, self._zeros, self._num_opened = costs, path, state.zeros, num_opened
        stage = costs.stage
        # Fields of an object are read many times faster than those of a numpy record.
        self._settings, self._hardware = _fields(space.evaluator.settings(0)), _fields(stage.hardware)
        self._sizes, self._is_sharded = stage.axes.tolist(), stage.zero_axes.tolist()
        evaluator = space.evaluator
        self._is_frozen = np.array([evaluator.recomputed.is_frozen(kind) for kind in range(len(costs.times))])
        self._first_type = int(space.arrays.units[0])
        self._first = np.zeros(len(costs.times))
        self._first[self._first_type] = ends_first / costs.times[self._first_type]
        elements, sent = float(space.problem.graph.num_parameters), self._settings.sent_gradient_bytes
        self._reduced_s = [
            _reduced_s(size, link, elements, sent) for size, link in zip(self._sizes, stage.links, strict=True)
        ]
        self._gather_bytes_per_s = stage.links["gather_bytes_per_s"].tolist()
        self.picked: tuple[int, ...] = (0,) * len(costs.values)

    def bound(self, target_s: float) -> float:
        """A lower bound on the weighted seconds of all units; the computation ends when it reaches `target_s`."""
        lines, best, before = self._first_lines(), -np.inf, list[tuple[int, ...]]()
        for _ in range(ROUNDS):
            best = max(best, self._least(lines, target_s))
            if best >= target_s or before[-1:] == [self.picked]:
                break
            before.append(self.picked)
            lines = self._lines_among(before)
        return self._with_memory(best, target_s) if best < target_s else best

    def _with_memory(self, without_s: float, target_s: float) -> float:
        """The same bound with a price on the memory that the units need beyond the room (Lagrange).

        The bound is a concave function of the price. Its slope is the shortage of memory at the best assignment. The
        next price is where two tangents meet: that at the highest price with a shortage, and that at the lowest price
        without one.

        Args:
            without_s: the bound without a limit on memory. The first price starts from its lines and assignment.
            target_s: a bound that suffices.
        """
        best, short = without_s, self._shortage()
        low, high = (0.0, without_s, short), None
        price_s = FIRST_PRICE * without_s / self._room
        for _ in range(PRICES if short > 0.0 else 0):
            self._price_s = price_s
            room_s = price_s * self._room
            found = self._least(self._lines_at(self.picked), target_s + room_s) - room_s
            best, short = max(best, found), self._shortage()
            if best >= target_s:
                break
            low, high = ((price_s, found, short), high) if short > 0.0 else (low, (price_s, found, short))
            if high is None:
                price_s *= DEARER
                continue
            slope = low[2] - high[2]
            price_s = (high[1] - low[1] + low[2] * low[0] - high[2] * high[0]) / max(slope, 1e-30)
            if not low[0] * (1.0 + NEAR) < price_s < high[0] * (1.0 - NEAR):
                break
        self._price_s = 0.0
        return best

    def _shortage(self) -> float:
        """Bytes that the best assignment needs beyond the room, with the best recompute modes at this price of
        memory."""
        each = (self._costs.unit_costs(self.picked) * self._state_bytes()).sum(axis=1)
        each += self._saved_bytes(self._lines_at(self.picked))
        return float(self._costs.times @ each) - self._room

    def _state_bytes(self) -> Floats:
        """[columns] lower bound on the bytes of parameters, gradients and moments for one more in each column."""
        settings = self._settings
        found = np.zeros(UNIT_COST_WIDTH)
        least = max(self._zeros)
        gradient_bytes = 0.0 if self._state.makes_gradients else settings.gradient_bytes
        masters = float(settings.frozen_bytes) if least >= ALL_SHARDED else 0.0
        parameter_bytes, optimizer_bytes = masters or settings.parameter_bytes, settings.optimizer_bytes - masters
        for stage, each in ((3, parameter_bytes), (2, gradient_bytes), (1, optimizer_bytes)):
            found[SHARDS if least >= stage else PARAMETERS] += float(each)
            if stage < ALL_SHARDED:
                kept = float(settings.frozen_bytes) - masters if stage == 1 else 0.0
                found[FROZEN_SHARDS if least >= stage else FROZEN] -= float(each) - kept
        return found

    # -- recomputation --------------------------------------------------------------------------------------------

    def _again_s(self, worth: Floats) -> Floats:
        """[types, modes] lower bound on the weighted seconds of recomputing a unit of each type.

        Args:
            worth: [types, columns] weight of each cost.
        """
        columns = np.array([*AGAIN, *AGAIN_COMM])
        found: Floats = (self._costs.modes[..., columns] * worth[:, None, columns]).sum(axis=2)
        return found

    def _modes_s(self, worth: Floats) -> Floats:
        """[types, modes] the same plus the price of the saved activations."""
        return self._again_s(worth) + self._price_s * self._in_flight * self._costs.modes[..., SAVED_BYTES]

    def _saved_bytes(self, lines: Lines) -> Floats:
        """[types] bytes that a unit of each type saves for all micro-batches in flight, in its best mode."""
        best = self._modes_s(self._weights(lines)).argmin(axis=1)
        found: Floats = self._in_flight * self._costs.modes[np.arange(len(best)), best, SAVED_BYTES]
        return found

    # -- types by themselves --------------------------------------------------------------------------------------

    def undecided(self) -> Undecided:
        """Lower bounds for all units of each type with every signature undecided; then the graph has no nodes."""
        assert not self._costs.values
        lines, before, found = self._first_lines(), self._path, []
        for number in range(3):
            self._path = Path(forward=float(number == 0), backward=float(number == 1), gradients=float(number == 2))
            found.append(self._of_types_at(lines))
        self._path = before
        state_bytes = self._costs.times * (self._costs.bases * self._state_bytes()).sum(axis=1)
        return Undecided(forward_s=found[0], backward_s=found[1], gradients_s=found[2], state_bytes=state_bytes)

    def of_types(self, plenty: float, picked: Sequence[int] | None = None) -> OfTypes:
        """Separate lower bounds for all units of each type.

        Args:
            plenty: bytes of state of all units up to which memory is not short, whatever activations they save.
            picked: an assignment close to the best one; None: none is known.
        """
        lines, floor_s = self._first_lines(), np.zeros(self._costs.modes.shape[1::-1])
        of_lines: dict[float, Floats] = {}
        before: list[tuple[int, ...]] = []
        if picked is not None:
            lines = self._lines_at(picked)
        for _ in range(ROUNDS if picked is None else ROUNDS_AGAIN):
            known_s = of_lines.get(lines.behind, floor_s)
            of_lines[lines.behind] = np.maximum(known_s, self._of_types_at(lines))
            if before[-1:] == [self.picked]:
                break
            before.append(self.picked)
            lines = self._lines_among(before)
        # The gradients of all types together are hidden or not, so all types must use the same line.
        behind, best = max(of_lines.items(), key=lambda each: float(each[1].min(axis=0).sum()))
        lines = replace(lines, behind=behind)
        state, found = self._state_bytes(), self.picked
        kept = float(self._costs.times @ (self._costs.unit_costs(found) * state).sum(axis=1))
        if kept <= plenty:
            return OfTypes(fast_s=best, priced_s=best, price_s=0.0, least_bytes=np.zeros(len(best[0])), picked=found)
        self._price_s = price_s = PRICE_OF_STATE * float(best.min(axis=0).sum()) / max(kept, 1.0)
        priced, self._price_s = self._of_types_at(lines), 0.0
        least_bytes = self._least_of_types(np.tile(state, (len(self._costs.times), 1)))
        return OfTypes(fast_s=best, priced_s=priced, price_s=price_s, least_bytes=least_bytes, picked=found)

    def _of_types_at(self, lines: Lines) -> Floats:
        """[modes, types] weighted seconds of all units of each type at some lines, and the price of state."""
        worth = self._weights(lines)
        alone_s, again_s = self._least_of_types(worth), self._costs.times[:, None] * self._again_s(worth)
        return alone_s + again_s.T

    def _least_of_types(self, worth: Floats) -> Floats:
        """[types] separate lower bounds on the weighted costs of all units of each type; writes `picked`."""
        constant: Floats = self._costs.times * (self._costs.bases * worth).sum(axis=1)
        if not self._costs.values:
            return constant
        graph = self._costs.weighted(worth, num_opened=self._num_opened, mixes=False)
        found, self.picked = bounds_of_parts(graph, self._costs.kinds)
        return constant + np.pad(found, (0, len(constant) - len(found)))

    def _least(self, lines: Lines, target_s: float) -> float:
        """A lower bound on the graph and on recomputation at some lines; writes `picked`."""
        worth = self._weights(lines)
        again_s = float(self._costs.times @ self._modes_s(worth).min(axis=1))
        return again_s + self._least_of_graph(worth, target_s - again_s)

    def _least_of_graph(self, worth: Floats, target_s: float) -> float:
        """A lower bound on the graph with the weights `worth`, [types, columns]; writes `picked`."""
        graph = self._costs.weighted(worth, num_opened=self._num_opened)
        _, self.picked, bound = candidates(graph, self.picked, min(target_s, FOREVER_S))
        if bound < target_s:
            _, self.picked, sharper = candidates(graph, self.picked)
            bound = max(bound, sharper)
        return min(bound, target_s)

    # -- weights --------------------------------------------------------------------------------------------------

    def _weights(self, lines: Lines) -> Floats:
        """[types, columns] weight of each cost: the least over the ZeRO stages."""
        found: Floats = np.minimum.reduce([self._weights_of(zero, lines) for zero in self._zeros])
        found[self._first_type, PARAMETERS] += self._parameter_s
        return found + self._price_s * self._state_bytes() if self._price_s else found

    def _weights_of(self, zero: int, lines: Lines) -> Floats:
        """[types, columns] weight of each cost under a ZeRO stage."""
        settings, path, hardware = self._settings, self._path, self._hardware
        worth = np.zeros((len(self._costs.times), UNIT_COST_WIDTH))
        hidden = settings.gradient_overlap
        last = lines.behind * path.gradients
        gradients = path.gradients + self._first
        passes = (
            (FORWARD, path.forward * lines.forward, 1.0),
            (BACKWARD, (path.backward - last) * lines.backward, hardware.host_backward),
        )
        for (own, comm, waits), weight, launches in passes:
            worth[:, own] = weight[:, :1]
            worth[:, comm] = weight[:, :1]
            worth[:, waits] = weight[:, 1:] * hardware.host_collective_s
            worth[:, LAUNCHED] += weight[:, 1] * launches * hardware.host_kernel_s
        worth[:, UNANSWERED] = -weight[:, 1:] * launches * hardware.host_kernel_s
        worth[:, AGAIN], worth[:, AGAIN_COMM] = worth[:, BACKWARD[0]], worth[:, BACKWARD[1]]
        shown = gradients * (1.0 - hidden) + last * hidden
        # The exposed part of the traffic of ZeRO 2 and 3 in every micro-batch, without latencies.
        again = (path.backward - last) * (1.0 - hidden)
        gather = np.where(self._is_frozen, 0.0, again) + path.forward * (1.0 - settings.gather_overlap)
        for a, (size, is_sharded) in enumerate(zip(self._sizes, self._is_sharded, strict=True)):
            sync_s = shown * self._reduced_s[a]
            byte_s = (size - 1.0) / size / self._gather_bytes_per_s[a] if size > 1.0 else 0.0
            parameter_s = byte_s * settings.parameter_bytes
            if zero < 1:
                worth[:, REDUCED[a]] = sync_s
            elif not is_sharded or zero < 2:
                worth[:, SCATTERED[a]] = 0.5 * sync_s if is_sharded else sync_s
            else:
                byte_s *= settings.sent_gradient_bytes
                worth[:, SCATTERED[a]] = (path.backward - last) * (1.0 - hidden) * byte_s
            if 1 <= zero < 3:
                worth[:, GATHERED[a]] = gradients * (1.0 - SPREAD_OVERLAP * hidden) * parameter_s
                worth[:, GATHERED_FROZEN[a]] = -worth[:, GATHERED[a]]
            elif zero >= 3 and is_sharded:
                worth[:, GATHERED[a]] = gather * parameter_s
        (state,) = SHARDS if zero >= 1 else PARAMETERS
        worth[:, state] = gradients * settings.update_bytes / hardware.bytes_per_s
        (frozen,) = FROZEN_SHARDS if zero >= 1 else FROZEN
        worth[:, frozen] = -worth[:, state]
        return worth

    # -- lines ----------------------------------------------------------------------------------------------------

    def _first_lines(self) -> Lines:
        """Tangents at the costs with every signature undecided, and both lines with equal weight."""
        found = self._lines_of(self._costs.bases)
        # Without signatures, no gradient is reduced, so none outlasts a backward pass.
        return replace(found, behind=0.5 if self._costs.values else 0.0)

    def _lines_at(self, picked: Sequence[int]) -> Lines:
        """The tangents and lines at an assignment."""
        return self._lines_of(self._costs.unit_costs(picked))

    def _lines_among(self, found: Sequence[tuple[int, ...]]) -> Lines:
        """The lines at the last assignment, or at the mean of all if the last one has occurred before.

        Two assignments may alternate: the device is the slower part in one and the host in the other, and each is the
        best one at the tangents of the other. Tangents at the mean of their costs converge (fictitious play, Brown
        1951).
        """
        if found[-1] not in found[:-1]:
            return self._lines_at(found[-1])
        return self._lines_of(np.mean([self._costs.unit_costs(some) for some in found], axis=0))

    def _lines_of(self, costs: Floats) -> Lines:
        """The tangents and lines at given costs of units, [types, columns]."""
        hardware, times = self._hardware, self._costs.times
        power = hardware.overlap_exponent
        tangents, pass_s = [], np.zeros(len(times))
        for (own, comm, waits), launches in ((FORWARD, 1.0), (BACKWARD, hardware.host_backward)):
            device_s = costs[:, own[0]] + costs[:, comm].sum(axis=1)
            launched = costs[:, LAUNCHED] if own is FORWARD[0] else costs[:, LAUNCHED] - costs[:, UNANSWERED[0]]
            host_s = hardware.host_kernel_s * launches * launched
            host_s += hardware.host_collective_s * costs[:, waits[0]]
            both = np.maximum(np.stack([device_s, host_s], axis=1), 0.0)
            longer_s = np.maximum(both.max(axis=1, keepdims=True), 1e-30)
            both /= longer_s
            norm = (both**power).sum(axis=1, keepdims=True) ** (1.0 / power)
            pass_s = (longer_s * norm)[:, 0]
            tangents.append((both / np.maximum(norm, 1e-30)) ** (power - 1.0))
        sync_s = 0.0
        for a, is_sharded in enumerate(self._is_sharded):
            column, share = (REDUCED[a], 1.0) if self._zeros[0] < 1 else (SCATTERED[a], 0.5)
            if self._zeros[0] < 2 or not is_sharded:
                sync_s += share * self._reduced_s[a] * float(times @ costs[:, column])
        is_behind = sync_s * self._settings.gradient_overlap > float(times @ pass_s)
        return Lines(forward=tangents[0], backward=tangents[1], behind=float(is_behind))


def _fields(record: Record) -> Any:
    """An object with the fields of a record."""
    return SimpleNamespace(**dict(zip(record.dtype.names, record.item(), strict=True)))


def _reduced_s(size: float, link: Record, elements: float, element_bytes: float) -> float:
    """Lower bound on the seconds of an all-reduce for each element of a gradient with at most `elements` elements."""
    most = elements * element_bytes
    return float(collective_s(ALL_REDUCE, size, link, most)) / elements if most > 0.0 else 0.0
