"""Span costs: the time and memory of consecutive units of a model (a span) on one stage, for planners that divide it.

The signatures of all units are given, and the units are priced as in `automap.price`. The effects of the schedule, of
hosts and of overlap are left to the exact price. Units: seconds, bytes.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np

from agents.planners.kernels.span_costs import (
    ModePair,
    ModesOfSpans,
    Passes,
    fastest_modes,
    recompute_fewest,
    span_maxima,
    span_sums,
)
from agents.planners.kernels.unit_profile import states_of
from agents.planners.tied_spans import TiedUnits
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
"""Numbers of micro-batches in flight for which `SpanCosts.fastest` computes its tables in one pass."""


class SpanCosts:
    """Costs of all spans of units on one stage.

    A table over spans is [units + 1, units + 1], written "span -> …" below. Its entry [i, j] is about the units i to
    j - 1. It is infinite where j <= i, because such a span is empty. "Modes" are those of `RECOMPUTE_MODES`.

    Attributes:
        forward_s, backward_s: [modes, units] seconds of a micro-batch. The backward pass contains the recomputation,
            and both contain the collectives that no computation hides.
        crossing_bytes: [units + 1] bytes that a rank sends if a stage begins with this unit.
        saved_bytes: [modes, units] bytes of the activations that a micro-batch saves for its backward pass.
        needed_bytes: [modes, units] bytes that the passes of a unit need besides state and saved activations.
        reduce_s: span -> seconds of gradient reductions and of ZeRO's gathers after them that no computation hides.
        unit_reduce_s: [units] the same for a stage of one unit.
        capacity: bytes of a device that units may use. The framework and the allocator take the rest of its memory.
        tied: what spans hold of tied parameters. A span of several units that read one holds it once.
    """

    def __init__(
        self, space: PlanSpace, units: UnitsInOrder, tied: TiedUnits, layout: StageLayout, samples: float, zero: int
    ) -> None:
        """Prices all units.

        Args:
            space: the plan space.
            units: the units with their signatures.
            tied: those that read tied parameters.
            layout: the stage.
            samples: samples of a micro-batch, a multiple of the ranks that split them.
            zero: ZeRO stage, over all axes but the innermost.
        """
        self.space, self.layout = space, layout
        zero_axes = (layout.axes > 1.0) & (np.arange(len(layout.axes)) < len(layout.axes) - 1)
        stage = Stage(layout.axes, layout.links, layout.hardware, zero_axes, float(samples))
        costs, settings = units.costs(stage), space.evaluator.settings(zero)
        self._settings, self.tied = settings, tied.spans(stage, zero)
        comm_s = (costs["backward_comm_s"] + costs["recompute_comm_s"]).sum(axis=-1)
        first_s = costs["forward_comm_s"].sum(axis=-1)
        self.forward_s: Floats = costs["forward_s"] + costs["forward_host_s"] + first_s
        self.backward_s: Floats = costs["backward_s"] + costs["backward_host_s"] + costs["recompute_s"] + comm_s
        self.crossing_bytes: Floats = np.concatenate([[0.0], costs["boundary_bytes"][0]])
        self.capacity = (float(layout.capacity) - settings.reserved_bytes) / (1.0 + settings.unused_share)
        self.saved_bytes: Floats = costs["saved_bytes"]
        self._saved = spans(self.saved_bytes)
        # A rank keeps the result of its last unit too, unless this unit is recomputed: the next unit is on another one.
        # `needed_bytes` contains it for one micro-batch.
        self._results: Floats = np.where(np.array(RECOMPUTE_MODES)[:, None] == "full", 0.0, costs["result_bytes"])
        self.needed_bytes: Floats = needs(costs, settings)
        self._costs, self._fastest = costs[0], dict[tuple[int, bool], tuple[Floats, Ints]]()
        self._beside: dict[tuple[int, float, float], Floats] = {}
        gradients = self._costs["scattered" if zero else "reduced"].T
        changed = (self._costs["gathered"] - self._costs["gathered_frozen"]).T
        self.reduce_s: Floats = self._reduced(
            spans(gradients) - self.tied.reduced, spans(changed) - self.tied.gathered, spans(self.backward_s[0])
        )
        self.unit_reduce_s: Floats = self._reduced(gradients, changed, self.backward_s[0])

    def _reduced(self, reduced: Floats, gathered: Floats, backward_s: Floats) -> Floats:
        """[...] seconds for which a step waits for gradient reductions, and for ZeRO's gathers after the optimizer.

        As in the price (`automap.price.kernels.step`), a trainer hides a share of the reductions under the backward
        pass of the last micro-batch. The step waits for the rest, and for what is longer than this pass.

        Args:
            reduced: [axes, ...] elements of gradients that are reduced over each axis; infinite for empty spans.
            gathered: [axes, ...] trained parameters that are gathered over each axis.
            backward_s: [...] seconds of the backward pass of a micro-batch.
        """
        zero, last = int(self._settings.zero_stage), len(self.layout.axes) - 1
        gradients = reduced * float(self._settings.sent_gradient_bytes)
        changed = gathered * float(self._settings.parameter_bytes)
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
        """Span -> seconds that a micro-batch takes besides its passes.

        These are its share of `reduce_s` and of `exchange_s`, and the transfers to and from both neighbouring stages. A
        transfer sends activations and gradients at the same time, and counts as far as no computation hides it.

        Args:
            num_micro_batches: micro-batches of a step.
            before, behind: seconds to send a byte to the stage before and to the stage after this one; 0 = this
                transfer does not hold the stage.
        """
        key = num_micro_batches, before, behind
        if key not in self._beside:
            received, sent = (self._exchange_s(rate) for rate in (before, behind))
            # The last stage sends nothing onward.
            sent[-1] = 0.0
            once_s = self.reduce_s + self.exchange_s(max(before, behind))
            self._beside[key] = once_s / num_micro_batches + (received[:, None] + sent)
        return self._beside[key]

    def exchange_s(self, seconds_a_byte: float) -> Floats:
        """Span -> seconds in which the stage and one other add up the gradients of the tied parameters that both hold.

        Which stages hold a parameter is not known before the model is divided. With more than two of them the exchange
        takes up to twice as long.

        Args:
            seconds_a_byte: seconds to send a byte to the other stage.
        """
        gradients = self.tied.exchanged * self.tied.is_shared
        found: Floats = gradients.sum(axis=0) * float(self._settings.sent_gradient_bytes) * seconds_a_byte
        return found

    def _exchange_s(self, seconds_a_byte: float) -> Floats:
        """[units + 1] seconds of the transfer between two stages if the second one begins with this unit; 0 where no
        tensor crosses."""
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
        excess = self.tied.parameters
        twice = np.empty(excess[0].size)
        states_of(np.ascontiguousarray(excess.reshape(4, -1)), self._settings, twice)
        found: Floats = spans(self.unit_state_bytes) - twice.reshape(excess[0].shape)
        return found

    @functools.cached_property
    def pass_s(self) -> Floats:
        """[modes, units + 1, units + 1] seconds of the forward and the backward pass of a micro-batch."""
        return spans(self.forward_s + self.backward_s)

    def passes(self, alive: int, *, partly: bool) -> Passes:
        """What each span takes with the recomputation of `fastest`, whose arguments these are."""
        return Passes(
            both_s=self.fastest(alive, partly=partly)[0],
            forward_s=_before(self.forward_s[0]),
            onward_s=float(self._settings.micro_batch_s),
            after_s=self.after_s,
            crossing_bytes=self.crossing_bytes,
            exchanged=self.tied.exchanged,
        )

    @functools.cached_property
    def after_s(self) -> Floats:
        """Span -> seconds after the last micro-batch: `reduce_s`, the update of the optimizer, and the host."""
        under_zero = int(self._settings.zero_stage > 0)
        held, frozen = (("parameters", "zero_parameters")[under_zero], ("frozen", "zero_frozen")[under_zero])
        twice = self.tied.parameters[under_zero] - self.tied.parameters[2 + under_zero]
        rate = float(self.layout.hardware.bytes_per_s)
        updated = spans(self._costs[held] - self._costs[frozen]) - twice
        updated *= float(self._settings.update_bytes) / rate
        found: Floats = self.reduce_s + updated + float(self._settings.step_s)
        return found

    @functools.cached_property
    def beyond_bytes(self) -> Floats:
        """[modes, units + 1, units + 1] peak bytes of a backward pass, less all that a micro-batch saves in the span.

        While the pass of a unit runs, it needs `needed_bytes`, and what later units had saved is already free.
        """
        before = _before(self.saved_bytes)
        most = _most(before[:, 1:] + self.needed_bytes)
        return np.where(np.isfinite(most), most - before[:, None, :], 0.0)

    def used_bytes(self, alive: int) -> Floats:
        """[modes, units + 1, units + 1] bytes of a device with `alive` micro-batches in flight."""
        found: Floats = self.state_bytes + alive * self._saved + self.beyond_bytes
        found[:, :, 1:] += (alive - 1) * self._results[:, None]
        return found

    @functools.cached_property
    def _legal(self) -> Mask:
        """[modes, units + 1, units + 1] whether all units of a span may have a recompute mode.

        If no mode obeys all of the user's constraints on recomputation, only those that ask for recomputation count.
        If no mode obeys these either, all modes are legal.
        """
        modes, constrained = self.space.modes[:, None, None], self.space.constrained
        found: Mask = np.broadcast_to(modes, self.pass_s.shape)
        for obeys in (constrained.again, constrained.again & constrained.kept) if constrained.recomputes else ():
            legal = modes & (spans((~obeys.T).astype(np.float64)) == 0.0)
            found = np.where(legal.any(axis=0), legal, found)
        return found

    def fastest(self, alive: int, *, partly: bool = False) -> tuple[Floats, Ints]:
        """Finds the fastest recomputation of each span with which it fits into memory.

        Args:
            alive: micro-batches in flight.
            partly: whether the first units of a span may have a heavier recompute mode than the others, so that only as
                many units recompute as memory requires. Units that save no less under the heavier mode keep the lighter
                one. Otherwise all units of a span have the same mode.

        Returns:
            Span -> seconds of both passes, infinite where nothing fits; and span -> the number of the recomputation,
            which `recomputed` reads.
        """
        if self._has_room(alive):
            return self.pass_s[0], self._no_recomputation
        block, at = divmod(alive - 1, AT_ONCE)
        if (block, partly) not in self._fastest:
            counts = AT_ONCE * block + np.arange(1, AT_ONCE + 1)
            best = np.empty((AT_ONCE, *self.state_bytes.shape))
            numbers = np.empty(best.shape, dtype=np.int64)
            fastest_modes(self._modes_of_spans, counts, best, numbers)
            modes = np.flatnonzero(self.space.modes).tolist()
            for light, heavy in itertools.combinations(modes if partly else (), 2):
                pair, legal = self._mode_pair(light, heavy), self._legal[light] & self._legal[heavy]
                recompute_fewest(pair, legal, counts, self._number(light, heavy, 0), best, numbers)
            self._fastest[block, partly] = best, numbers
        best, numbers = self._fastest[block, partly]
        return best[at], numbers[at]

    @functools.cached_property
    def _modes_of_spans(self) -> ModesOfSpans:
        return ModesOfSpans(
            seconds=self.pass_s,
            state=self.state_bytes,
            saved=self._saved,
            beyond=self.beyond_bytes,
            results=np.pad(self._results, ((0, 0), (1, 0))),
            legal=np.ascontiguousarray(self._legal),
            numbers=np.array([self._number(mode, mode, 0) for mode in range(len(RECOMPUTE_MODES))]),
            capacity=self.capacity,
        )

    def _has_room(self, alive: int) -> bool:
        """Whether the whole model fits without recomputation: then every span does, and nothing is faster."""
        state, kept, beyond = self._of_whole
        kept, beyond = kept + float(self._results[0].max()), beyond - float(self._results[0].max())
        return self._need_not_recompute and state + alive * kept + beyond <= self.capacity

    @functools.cached_property
    def _need_not_recompute(self) -> bool:
        return bool(self.space.modes[0]) and not self.space.constrained.recomputes

    @functools.cached_property
    def _of_whole(self) -> tuple[float, float, float]:
        """Bytes of the whole model without recomputation: its state, the saved activations of a micro-batch, and
        `beyond_bytes`."""
        state, kept = float(self.unit_state_bytes.sum()), float(self.saved_bytes[0].sum())
        return state, kept, float(self.beyond_bytes[0, 0, -1])

    @functools.cached_property
    def _no_recomputation(self) -> Ints:
        """Span -> the number of no recomputation."""
        return np.zeros_like(self.pass_s[0], dtype=np.int64)

    def _mode_pair(self, light: int, heavy: int) -> ModePair:
        """The numbers of a lighter and a heavier recompute mode, for spans that have the heavier one in some units."""
        frees, passes = self._frees(light, heavy), self.forward_s + self.backward_s
        freed = _before(np.where(frees, self.saved_bytes[light] - self.saved_bytes[heavy], 0.0))
        saved = _before(self.saved_bytes[light])
        needed = np.where(frees, self.needed_bytes[heavy], self.needed_bytes[light])
        # The result of the last unit is kept for all micro-batches but the one whose needs contain it.
        result = np.concatenate([[0.0], self._results[light]])
        return ModePair(
            light_s=self.pass_s[light],
            state=self.state_bytes - result,
            kept=self._saved[light] + result,
            heads=_most(saved[1:] - freed[1:] + needed),
            tails=self.beyond_bytes[light],
            saved=saved,
            freed=freed,
            more_s=_before(np.where(frees, passes[heavy] - passes[light], 0.0)),
            capacity=self.capacity,
        )

    def _number(self, light: int, heavy: int, count: int) -> int:
        """The number of a recomputation: two modes, and how many units, the first ones, have the heavier mode."""
        return (light * len(RECOMPUTE_MODES) + heavy) * (self.space.num_units + 1) + count

    def _frees(self, light: int, heavy: int) -> Mask:
        """[units] whether a unit saves less under the heavier of two recompute modes."""
        found: Mask = self.saved_bytes[heavy] < self.saved_bytes[light]
        return found

    def recomputed(self, number: int, first: int, last: int) -> str | tuple[str, ...]:
        """The recompute mode of all units of a span, or of each of them.

        Args:
            number: number of the recomputation, as `fastest` returns it.
            first: first unit of the span.
            last: one past its last unit.
        """
        modes, count = divmod(number, self.space.num_units + 1)
        light, heavy = divmod(modes, len(RECOMPUTE_MODES))
        frees = self._frees(light, heavy)[first:last] & (np.arange(last - first) < count)
        return (
            tuple(RECOMPUTE_MODES[heavy if is_heavy else light] for is_heavy in frees)
            if count
            else RECOMPUTE_MODES[light]
        )


def _before(of_units: Floats) -> Floats:
    """[..., units + 1] sums over all units before this one, of [..., units] numbers."""
    return np.concatenate([np.zeros((*of_units.shape[:-1], 1)), np.cumsum(of_units, axis=-1)], axis=-1)


def _most(of_units: Floats) -> Floats:
    """[..., units + 1, units + 1] the largest of the numbers of the units of each span, of [..., units] numbers; minus
    infinity for empty spans."""
    *others, size = of_units.shape
    found = np.empty((*others, size + 1, size + 1))
    span_maxima(np.ascontiguousarray(of_units).reshape(-1, size), found.reshape(-1, size + 1, size + 1))
    return found


def spans(of_units: Floats) -> Floats:
    """[..., units + 1, units + 1] sums over the units of each span, of [..., units] numbers; infinite for empty
    spans."""
    sums = _before(of_units)
    *others, size = sums.shape
    found = np.empty((*others, size, size))
    span_sums(np.ascontiguousarray(sums).reshape(-1, size), found.reshape(-1, size, size))
    return found


def _ring_s(link: Record, kind: int, on_wire_s: Floats) -> Floats:
    """Seconds of many collectives of one kind, as `automap.price.kernels.collectives` computes them.

    Args:
        link: the link that they use.
        kind: their kind, such as `ALL_REDUCE`.
        on_wire_s: their bytes over the rate of the link; zero and infinity mean that there is no collective.
    """
    takes_place = np.isfinite(on_wire_s) & (on_wire_s > 0.0)
    x = np.where(takes_place, on_wire_s, 0.0)
    found: Floats = link["latency_s"][kind] + x + link["ramp"][kind] * np.sqrt(x * RAMP_UNIT_S)
    return np.where(takes_place, found, 0.0)
