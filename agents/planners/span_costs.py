"""Span costs: what any run of consecutive units costs on one stage of a pipeline, for planners that divide a model.

The costs of units are those of the price, with given signatures; each unit follows the unit before it in the model. The
effects of schedule, hosts and overlap are left to the exact price. Units: seconds, bytes.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from agents.planners.kernels.span_costs import ModePair, fewest_again
from agents.planners.unit_profile import UnitsInOrder, needs, states
from automap.arrays import Floats, Ints, Mask
from automap.price.kernels.array_types import Record
from automap.price.kernels.collectives import RAMP_UNIT_S
from automap.price.kernels.records import ALL_GATHER, ALL_REDUCE
from automap.price.kernels.stage_records import Stage
from automap.price.kernels.step import SPREAD_OVERLAP
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.price.stage_layout import StageLayout
from automap.space.space import PlanSpace

AT_ONCE = 8
"""How many numbers of micro-batches in flight are looked at together."""


class SpanCosts:
    """Costs of all spans of units on one stage.

    A span is given by two indices: [units + 1, units + 1] from the first index to before the second; infinite where
    there is none.

    Attributes:
        forward_s, backward_s: [modes, units] seconds of a micro-batch, with what is recomputed in the backward pass and
            with the collectives that nothing hides.
        crossing_bytes: [units + 1] bytes that a rank sends where a stage begins before each unit.
        saved_bytes: [modes, units] bytes kept from the forward to the backward pass of a micro-batch.
        needed_bytes: [modes, units] bytes that the passes of a unit need besides state and saved activations.
        reduce_s: span -> seconds of the reduction of gradients, and of ZeRO's gathers after it, that nothing hides.
        unit_reduce_s: [units] the same of each unit by itself.
        capacity: bytes that units may use on a device: without what the framework holds, and what nothing uses.
    """

    def __init__(self, space: PlanSpace, units: UnitsInOrder, layout: StageLayout, samples: float, zero: int) -> None:
        """Prices all units.

        Args:
            units: the units with their signatures.
            layout: the stage.
            samples: samples of a micro-batch, a multiple of the ranks that split them.
            zero: ZeRO stage, over all axes but the innermost.
        """
        self.space, self.layout = space, layout
        zero_axes = (layout.axes > 1.0) & (np.arange(len(layout.axes)) < len(layout.axes) - 1)
        stage = Stage(layout.axes, layout.links, layout.hardware, zero_axes, float(samples))
        costs, settings = units.costs(stage), space.evaluator.settings(zero)
        self._settings = settings
        comm_s = (costs["backward_comm_s"] + costs["recompute_comm_s"]).sum(axis=-1)
        first_s = costs["forward_comm_s"].sum(axis=-1)
        self.forward_s: Floats = costs["forward_s"] + costs["forward_host_s"] + first_s
        self.backward_s: Floats = costs["backward_s"] + costs["backward_host_s"] + costs["recompute_s"] + comm_s
        self.crossing_bytes: Floats = np.concatenate([[0.0], costs["boundary_bytes"][0]])
        self.capacity = (float(layout.capacity) - settings.reserved_bytes) / (1.0 + settings.unused_share)
        self.saved_bytes: Floats = costs["saved_bytes"]
        self._saved = spans(self.saved_bytes)
        self.needed_bytes: Floats = needs(costs, settings)
        self._costs, self._fastest = costs[0], dict[tuple[int, bool], tuple[Floats, Ints]]()
        self._beside: dict[tuple[int, float, float], Floats] = {}
        gradients = self._costs["scattered" if zero else "reduced"] * float(settings.sent_gradient_bytes)
        changed = (self._costs["gathered"] - self._costs["gathered_frozen"]) * float(settings.parameter_bytes)
        self.reduce_s: Floats = self._reduced(spans(gradients.T), spans(changed.T), spans(self.backward_s[0]))
        self.unit_reduce_s: Floats = self._reduced(gradients.T, changed.T, self.backward_s[0])

    def _reduced(self, gradients: Floats, changed: Floats, backward_s: Floats) -> Floats:
        """Seconds of reductions of gradients, and of ZeRO's gathers after the optimizer, that a step waits for, as in
        the price (`automap.price.kernels.step`): what no trainer hides, and what the backward pass of the last
        micro-batch is too short for.

        Args:
            gradients: [axes, ...] bytes that are reduced over each axis; infinite where there is nothing.
            changed: [axes, ...] bytes of parameters that are gathered over each axis.
            backward_s: [...] of the backward pass of a micro-batch.
        """
        zero, last = int(self._settings.zero_stage), len(self.layout.axes) - 1
        sync, spread = np.zeros_like(backward_s), np.zeros_like(backward_s)
        for axis, (size, link) in enumerate(zip(self.layout.axes.tolist(), self.layout.links, strict=True)):
            sent, rates = (size - 1.0) / size, link["bytes_per_s"]
            if size > 1.0:
                whole = _ring_s(link, ALL_REDUCE, 2.0 * sent * gradients[axis] / rates[ALL_REDUCE])
                is_scattered = zero > 0 and axis < last
                # Under ZeRO 2 the passes of every micro-batch scatter.
                sync += (0.5 if zero == 1 else 0.0) * whole if is_scattered else whole
                if is_scattered and zero < 3:
                    spread += _ring_s(link, ALL_GATHER, sent * changed[axis] / link["gather_bytes_per_s"])
        hidden = self.space.problem.trainer.gradient_overlap
        can_hide = np.where(np.isfinite(backward_s), backward_s, 0.0)
        found: Floats = sync * (1.0 - hidden) + np.maximum(sync * hidden - can_hide, 0.0)
        found += spread * (1.0 - SPREAD_OVERLAP * hidden)
        return found

    def beside_s(self, num_micro_batches: int, before: float, behind: float) -> Floats:
        """Span -> seconds of a micro-batch beside its passes: its share of `reduce_s`, and for how long the stage is
        held by what crosses on either side, both ways at once and as far as nothing hides it.

        Args:
            num_micro_batches: micro-batches of a step.
            before, behind: seconds of a byte that is sent to the stages beside; 0 = none is held.
        """
        key = num_micro_batches, before, behind
        if key not in self._beside:
            received, sent = (self._exchange_s(rate) for rate in (before, behind))
            # Behind the last unit nothing is sent.
            sent[-1] = 0.0
            self._beside[key] = self.reduce_s / num_micro_batches + (received[:, None] + sent)
        return self._beside[key]

    def _exchange_s(self, seconds_a_byte: float) -> Floats:
        """[units + 1] seconds of an exchange before each unit; 0 where nothing crosses."""
        settings, crossing = self._settings, self.crossing_bytes
        shown = float(settings.send_s) + (1.0 - float(settings.send_overlap)) * crossing * seconds_a_byte
        found: Floats = np.where((crossing > 0.0) & (seconds_a_byte > 0.0), shown, 0.0)
        return found

    @functools.cached_property
    def unit_state_bytes(self) -> Floats:
        """[units] bytes of parameters, gradients and optimizer state."""
        return states(self._costs, self._settings)

    @functools.cached_property
    def state_bytes(self) -> Floats:
        """Span -> bytes of parameters, gradients and optimizer state."""
        return spans(self.unit_state_bytes)

    @functools.cached_property
    def pass_s(self) -> Floats:
        """[modes, units + 1, units + 1] seconds of the forward and the backward pass of a micro-batch."""
        return spans(self.forward_s + self.backward_s)

    @functools.cached_property
    def beyond_bytes(self) -> Floats:
        """[modes, units + 1, units + 1] bytes in the fullest moment of a backward pass, over all that a micro-batch
        saves: the passes of a unit need some, and what the units after it have saved is free by then."""
        before = _before(self.saved_bytes)
        most = _most(before[:, 1:] + self.needed_bytes)
        return np.where(np.isfinite(most), most - before[:, None, :], 0.0)

    def used_bytes(self, alive: int) -> Floats:
        """[modes, units + 1, units + 1] bytes of a device with `alive` micro-batches in flight."""
        found: Floats = self.state_bytes + alive * self._saved + self.beyond_bytes
        return found

    @functools.cached_property
    def _legal(self) -> Mask:
        """[modes, units + 1, units + 1] whether all units of a span may have a recompute mode: where no mode obeys all
        constraints on recomputation, those that ask for it count, and where none obeys these, all modes may be."""
        modes, constrained = self.space.modes[:, None, None], self.space.constrained
        found: Mask = np.broadcast_to(modes, self.pass_s.shape)
        for obeys in (constrained.again, constrained.again & constrained.kept) if constrained.recomputes else ():
            legal = modes & (spans((~obeys.T).astype(np.float64)) == 0.0)
            found = np.where(legal.any(axis=0), legal, found)
        return found

    def fastest(self, alive: int, *, partly: bool = False) -> tuple[Floats, Ints]:
        """Of each span the seconds of both passes with the fastest recomputation that fits, and its number.

        Args:
            alive: micro-batches in flight.
            partly: whether the first units of a span may have a heavier recompute mode than the others, those that keep
                less then, so that no more recomputes than it takes to fit; otherwise all have the same mode.
        """
        if self._has_room(alive):
            return self.pass_s[0], self._nothing_again
        block, at = divmod(alive - 1, AT_ONCE)
        if (block, partly) not in self._fastest:
            counts = AT_ONCE * block + np.arange(1, AT_ONCE + 1)
            used = np.stack([self.used_bytes(count) for count in counts.tolist()])
            times = np.where((used <= self.capacity) & self._legal, self.pass_s, np.inf)
            best, mode = times.min(axis=1), times.argmin(axis=1)
            numbers = self._number(mode, mode, np.zeros_like(mode))
            modes = np.flatnonzero(self.space.modes).tolist()
            for light, heavy in itertools.combinations(modes if partly else (), 2):
                mixed, count = self._mixed(light, heavy, counts)
                is_faster = (mixed < best) & self._legal[light] & self._legal[heavy]
                best = np.where(is_faster, mixed, best)
                numbers = np.where(is_faster, self._number(light, heavy, count), numbers)
            self._fastest[block, partly] = best, numbers
        best, numbers = self._fastest[block, partly]
        return best[at], numbers[at]

    def _has_room(self, alive: int) -> bool:
        """Whether the whole model fits without recomputation, which then is the fastest for all spans."""
        state, kept, beyond = self._of_whole
        return self._need_not_recompute and state + alive * kept + beyond <= self.capacity

    @functools.cached_property
    def _need_not_recompute(self) -> bool:
        return bool(self.space.modes[0]) and not self.space.constrained.recomputes

    @functools.cached_property
    def _of_whole(self) -> tuple[float, float, float]:
        """Bytes of the whole model without recomputation: state, what each micro-batch keeps, and the most beyond."""
        state, kept = float(self.unit_state_bytes.sum()), float(self.saved_bytes[0].sum())
        return state, kept, float(self.beyond_bytes[0, 0, -1])

    @functools.cached_property
    def _nothing_again(self) -> Ints:
        return np.zeros_like(self.pass_s[0], dtype=np.int64)

    def _mixed(self, light: int, heavy: int, alive: Ints) -> tuple[Floats, Ints]:
        """Of each number of micro-batches and each span the seconds with as few units of the heavier of two recompute
        modes as fit, and their number."""
        frees, passes = self._frees(light, heavy), self.forward_s + self.backward_s
        freed = _before(np.where(frees, self.saved_bytes[light] - self.saved_bytes[heavy], 0.0))
        saved = _before(self.saved_bytes[light])
        needed = np.where(frees, self.needed_bytes[heavy], self.needed_bytes[light])
        pair = ModePair(
            light_s=self.pass_s[light],
            state=self.state_bytes,
            kept=self._saved[light],
            heads=_most(saved[1:] - freed[1:] + needed),
            tails=self.beyond_bytes[light],
            saved=saved,
            freed=freed,
            more_s=_before(np.where(frees, passes[heavy] - passes[light], 0.0)),
            capacity=self.capacity,
        )
        seconds = np.empty((len(alive), *self.state_bytes.shape))
        counts = np.empty(seconds.shape, dtype=np.int64)
        fewest_again(pair, alive, seconds, counts)
        return seconds, counts

    def _number(self, light: int | Ints, heavy: int | Ints, count: Ints) -> Ints:
        found: Ints = (light * len(RECOMPUTE_MODES) + heavy) * (self.space.num_units + 1) + count
        return found

    def _frees(self, light: int, heavy: int) -> Mask:
        """[units] whether a unit keeps less under the heavier of two recompute modes."""
        found: Mask = self.saved_bytes[heavy] < self.saved_bytes[light]
        return found

    def recomputed(self, number: int, first: int, last: int) -> str | tuple[str, ...]:
        """The recompute mode of all units of a span, or of each of them, by the number that `fastest` gives."""
        modes, count = divmod(number, self.space.num_units + 1)
        light, heavy = divmod(modes, len(RECOMPUTE_MODES))
        frees = self._frees(light, heavy)[first:last] & (np.arange(last - first) < count)
        return (
            tuple(RECOMPUTE_MODES[heavy if is_heavy else light] for is_heavy in frees)
            if count
            else RECOMPUTE_MODES[light]
        )


def _before(of_units: Floats) -> Floats:
    """[..., units + 1] sums over the units before each."""
    return np.concatenate([np.zeros((*of_units.shape[:-1], 1)), np.cumsum(of_units, axis=-1)], axis=-1)


def _most(of_units: Floats) -> Floats:
    """The most of the units from one to before another, [..., units + 1, units + 1]; -infinite where there is none."""
    size = of_units.shape[-1] + 1
    found = np.full((*of_units.shape[:-1], size, size), -np.inf)
    begins, units = np.ogrid[:size, : size - 1]
    found[..., 1:] = np.where(units >= begins, of_units[..., None, :], -np.inf)
    most: Floats = np.maximum.accumulate(found, axis=-1)
    return most


def spans(of_units: Floats) -> Floats:
    """Sums over the units from one to before another, […, units + 1, units + 1]; infinite where there is none."""
    sums = _before(of_units)
    found: Floats = sums[..., None, :] - sums[..., :, None]
    empty: Mask = np.tril(np.ones(found.shape[-2:], dtype=np.bool_))
    return np.where(empty, np.inf, found)


def _ring_s(link: Record, kind: int, on_wire_s: Floats) -> Floats:
    """Seconds of many collectives of one kind (`automap.price.kernels.collectives`), given those at the rate of the
    link; infinite ones do not take place."""
    takes_place = np.isfinite(on_wire_s) & (on_wire_s > 0.0)
    x = np.where(takes_place, on_wire_s, 0.0)
    found: Floats = link["latency_s"][kind] + x + link["ramp"][kind] * np.sqrt(x * RAMP_UNIT_S)
    return np.where(takes_place, found, 0.0)
