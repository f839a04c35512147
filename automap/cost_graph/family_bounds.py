"""Lower bounds on the step time of families of plans. The largest of these bounds counts:

- Where all stages are alike, that of one relaxed cost graph with all units (`automap.cost_graph.relaxation`).
- That of a linear program which spreads units, each type with its own bounds, over the ranks. It has rows for the
  memory of each rank and for paths through all ranks (`automap.cost_graph.unlike_stages`,
  `automap.cost_graph.virtual_stages`).
- Without virtual stages, that of the best cuts (`automap.cost_graph.best_cuts`); with them, that of the rank that works
  longest, if units are not divided (`automap.cost_graph.whole_units`).

Units: seconds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.best_cuts import Cuts
from automap.cost_graph.families import Family
from automap.cost_graph.mixed_stages import STEPS, MixedStages
from automap.cost_graph.open_costs import OpenCosts
from automap.cost_graph.paths import ORDERS, Passes, exchanged_s, least_in_flight, path_mixtures, path_trips, sends_on
from automap.cost_graph.relaxation import WORKSPACE_BYTES, Relaxation
from automap.cost_graph.relaxed_costs import Memory
from automap.cost_graph.stage_bounds import Level, least_crossing
from automap.cost_graph.stage_layouts import StageClass
from automap.cost_graph.unlike_stages import RankBounds, Spreads, Weights, fastest_spread
from automap.cost_graph.virtual_stages import Interleaving, fastest_interleaving
from automap.cost_graph.whole_units import WholeUnits
from automap.space.space import PlanSpace

EXACT = 1e-9
"""Share by which a bound may be below its target through rounding."""
MOST_PROGRAMS = 400
"""Largest number of layouts of a family whose linear programs are solved (assumed); the quick bounds of the others
count."""
MOST_EARLY_PROGRAMS = 8
"""The same before the layouts that are left are bounded more sharply (assumed)."""
MOST_WEIGHTS = 100
"""Most weights of programs that are tried again for layouts of other families (assumed)."""
MOST_MIXED = 60
"""Most stages of several kinds whose signatures are decided (assumed): that takes long."""
Key = tuple[tuple[StageClass, tuple[int, ...]], ...]
"""Class of each stage, and the samples that each kind of its devices is priced with; none: any of them."""


class FamilyBounds(MixedStages):
    """Bounds of the families of a space."""

    def __init__(self, space: PlanSpace) -> None:
        super().__init__(space)
        self._known_s: dict[tuple[Family, Level], float] = {}
        self._weights: dict[int, deque[Weights]] = {}

    @property
    def is_known(self) -> bool:
        """Whether the bounds hold; they do not if times of whole blocks were measured."""
        return len(self.space.evaluator.tables.arrays.blocks) == 0

    def bound(self, family: Family, target_s: float, level: Level = Level.TOGETHER) -> float:
        """A lower bound, in seconds, on the step times of a family; infinite where no plan of it fits.

        Args:
            family: the family.
            target_s: a bound that suffices: the computation ends when it is reached.
            level: the sharpest level of costs that is used.
        """
        if family.is_unlike:
            return self._of_sizes(family, target_s, level)
        is_alike = not family.way and len(self._rows(family.shapes[0])) == 1
        best = -np.inf
        for each in Level:
            if (family, each) in self._known_s:
                found = self._known_s[family, each]
            else:
                sharper = self._of_alike if is_alike and each is Level.TOGETHER else self._of_rows
                found = sharper(family, target_s, each)
                if found < target_s * (1.0 - EXACT):
                    # No other target raises it.
                    self._known_s[family, each] = found
            best = max(best, found)
            if best >= target_s or each is level:
                break
        return best

    # -- stages that are all alike --------------------------------------------------------------------------------

    def _of_alike(self, family: Family, target_s: float, level: Level) -> float:
        """`bound` of stages of equal size on equal devices."""
        space, shape = self.space, max(family.shapes, key=lambda each: each.num_chunks)
        (row,) = self._rows(shape)
        stage = self._stage(row, shape)
        costs, in_flight, settings = self._costs_on(stage, level), self._in_flight(family), space.evaluator.settings(0)
        # While the last unit runs, all units before it have saved their activations.
        working = costs.modes[space.arrays.units[-1], :, WORKSPACE_BYTES]
        room = shape.pp * self._room(row, shape) - 2.0 * float(working.min())
        if room <= 0.0:
            return np.inf
        tie = self._tie(family)
        best = -np.inf
        for number, way in enumerate(path_mixtures(shape, space.schedules)):
            constant_s = float(settings.step_s) + way.passes * float(settings.micro_batch_s)
            constant_s += way.sends * self._exchanged_s(costs, family) if shape.pp > 1 else 0.0
            # Two ranks exchange the gradients of what both read, one of them the first.
            parameter_s = (way.ends_first + 2.0 * way.path.gradients) * tie.parameter_s
            constant_s -= parameter_s * tie.untied
            relaxation = Relaxation(
                space,
                costs,
                way.path,
                self._state_of(family),
                num_opened=shape.num_chunks - 1,
                memory=Memory(room=room, in_flight=min(in_flight)),
                ends_first=way.ends_first,
                parameter_s=parameter_s,
            )
            best = max(best, constant_s + relaxation.bound(target_s - constant_s))
            if number == 0 and shape.pp > 1 and best < target_s:
                spread = self._of_chunks if shape.virtual > 1 else self._of_ranks
                best = max(best, spread(family, row, best, target_s))
            if best >= target_s:
                break
        return best

    def _of_ranks(self, family: Family, row: int, best: float, target_s: float) -> float:
        """The bound of the linear program without virtual stages, and of the best cuts.

        Args:
            family: stages of equal size on equal devices.
            row: number of the stage.
            best: the bound so far; it is returned if the program does not raise it.
            target_s: a bound that suffices.
        """
        shape = family.shapes[0]
        of_rank = self._rank_bounds(
            self._stage(row, shape),
            self._room(row, shape),
            family,
            Level.TOGETHER,
            with_passes=self._has_paths(shape),
        )
        found = np.inf
        for order in range(self.space.meshes.num_orders(shape.pp)):
            rates = self._rates(shape, order)
            seconds, _ = self._spread(family, [[of_rank]] * shape.pp, rates)
            at = np.zeros((1, shape.pp), dtype=np.int64)
            cut_s = self._of_cuts(family, [[of_rank]], at, np.array([rates]), target_s)
            seconds = max(seconds, float(cut_s[0]))
            found = min(found, seconds)
            if found <= best:
                return best
        return found

    def _of_chunks(self, family: Family, row: int, best: float, target_s: float) -> float:
        """The bound of the linear program with virtual stages; arguments as for `_of_ranks`."""
        shape = family.shapes[0]
        stage = self._stage(row, shape)
        of_rank = self._rank_bounds(stage, self._room(row, shape), family, Level.TOGETHER, with_passes=True)
        found = np.inf
        for order in range(self.space.meshes.num_orders(shape.pp)):
            found = min(found, self._interleaved(family, [of_rank] * shape.pp, order, best, target_s))
            if found <= best:
                return best
        return found

    def _interleaved(
        self, family: Family, rank_bounds: Sequence[RankBounds], order: int, best: float, target_s: float
    ) -> float:
        """The smallest bound over all numbers of virtual stages, in one order of the devices.

        Args:
            family: plans with virtual stages.
            rank_bounds: [ranks] bounds of each rank, with its passes.
            order: number of the order of the devices.
            best: a bound that is at most this need not be exact, and the computation ends.
            target_s: a bound that suffices.
        """
        settings, found = self.space.evaluator.settings(0), np.inf
        rates = self._rates(family.shapes[0], order)
        for each in sorted(family.shapes, key=lambda each: each.virtual):
            sent_s = self._sent_s(least_crossing([one.crossing for one in rank_bounds], each.virtual), rates)
            shown_s = np.array(exchanged_s(sent_s, each.virtual))
            begun_s = float(settings.micro_batch_s) / each.virtual
            of = Interleaving(
                rank_bounds=rank_bounds,
                times=np.bincount(self.space.arrays.units, minlength=len(self.space.linkage.types)).astype(np.float64),
                ends=self._ends(),
                virtual=each.virtual,
                num_micro_batches=each.num_micro_batches,
                in_flight=least_in_flight(each, self.space.schedules),
                besides_s=np.array([0.5 * shown_s + begun_s, 0.5 * shown_s]),
                step_s=float(settings.step_s),
            )
            # The smallest bound counts, so none is raised above the smallest one so far.
            seconds = fastest_interleaving(of, min(found, target_s))
            if seconds < target_s:
                seconds = self._whole(family, rank_bounds, rates, each.virtual, seconds, min(found, target_s))
            found = min(found, seconds)
            if found <= best:
                break
        return found

    def _of_cuts(
        self, family: Family, stages: Sequence[Sequence[RankBounds]], at: Ints, rates: Floats, target_s: float
    ) -> Floats:
        """[pipelines] bounds of pipelines without virtual stages under the best cuts.

        Args:
            family: plans without virtual stages.
            stages: for each stage, its bounds for each of its kinds of devices, all of which hold.
            at: [pipelines, ranks] number of the stage of each rank.
            rates: [pipelines, ranks] bytes a second from each rank to the next one.
            target_s: a bound that suffices.
        """
        settings = self.space.evaluator.settings(0)
        if at.shape[1] == 1:
            return np.zeros(len(at))
        cuts = Cuts(
            stages=stages,
            units=self.space.arrays.units,
            in_flight=self._in_flight(family),
            num_micro_batches=family.shapes[0].num_micro_batches,
            step_s=float(settings.step_s),
            micro_batch_s=float(settings.micro_batch_s),
            send_s=float(settings.send_s),
            shown=1.0 - float(settings.send_overlap),
            has_paths=len(stages[0][0].passes_s) > 0 and ORDERS.issuperset(self.space.schedules),
        )
        return cuts.bounds(at, rates, target_s)

    def _whole(
        self,
        family: Family,
        rank_bounds: Sequence[RankBounds],
        rates: Sequence[float],
        virtual: int,
        known_s: float,
        target_s: float,
    ) -> float:
        """The bound of a pipeline whose units are not divided.

        Args:
            family: the plans.
            rank_bounds: [ranks] bounds of each rank.
            rates: [ranks] bytes a second from each rank to the next one.
            virtual: number of virtual stages.
            known_s: the bound so far.
            target_s: a bound that suffices.
        """
        shapes = tuple(each for each in family.shapes if each.virtual == virtual)
        alone, units = replace(family, shapes=shapes), self.space.arrays.units
        last_in_flight = [min(each, shapes[0].pp) if virtual > 1 else each for each in self._in_flight(alone)]
        whole = WholeUnits(
            rank_bounds=rank_bounds,
            times=np.bincount(units, minlength=len(self.space.linkage.types)).astype(np.float64),
            ends=(int(units[0]), int(units[-1])),
            least=virtual,
            in_flight=last_in_flight,
            besides_s=self._besides_s(alone, [[of_rank] for of_rank in rank_bounds], rates),
        )
        return whole.bound(known_s, target_s)

    def _exchanged_s(self, costs: OpenCosts, family: Family) -> float:
        """Least seconds of exchanges between stages for one micro-batch, summed over all ranks."""
        crossing, shape = self._crossing(costs), family.shapes[0]
        rates = [self._rates(shape, order) for order in range(self.space.meshes.num_orders(shape.pp))]
        found = []
        for each in family.shapes:
            sent = least_crossing([crossing] * shape.pp, each.virtual)
            found += [sum(exchanged_s(self._sent_s(sent, some), each.virtual)) for some in rates]
        return min(found)

    # -- stages that differ ---------------------------------------------------------------------------------------

    def _of_rows(self, family: Family, target_s: float, level: Level) -> float:
        """`bound` of stages of the usual sizes on any devices: the least over the orders of the devices."""
        space, shape = self.space, family.shapes[0]
        found = []
        for order in range(space.meshes.num_orders(shape.pp)):
            quick = -np.inf
            for with_passes in (False, True) if self._has_paths(shape) else (False,):
                rows = dict.fromkeys(space.usual_rows(shape, order))
                known = {row: self._row_views(row, family, level, with_passes=with_passes) for row in rows}
                views = [known[row] for row in space.usual_rows(shape, order)]
                if with_passes and shape.virtual > 1:
                    raised_s = target_s if level is Level.TOGETHER else 0.0
                    mixed = [RankBounds.mixed(some) for some in views]
                    seconds = self._interleaved(family, mixed, order, quick, raised_s)
                else:
                    rates = self._rates(shape, order)
                    seconds, _ = self._spread(family, views, rates)
                    at = np.array([[list(known).index(row) for row in space.usual_rows(shape, order)]])
                    cut_s = self._of_cuts(family, list(known.values()), at, np.array([rates]), target_s)
                    seconds = max(seconds, float(cut_s[0]))
                quick = max(quick, seconds)
                if quick >= target_s:
                    break
            found.append(quick)
        return min(found)

    def _of_sizes(self, family: Family, target_s: float, level: Level) -> float:
        """`bound` of stages of unlike size: the least over all layouts."""
        layouts = self._layouts.of(family.shapes[0])
        if not layouts:
            return np.inf
        keys: list[Key] = [tuple((stage, ()) for stage in some) for some in layouts]
        rates, least = np.array(list(layouts.values())), np.full(len(keys), -np.inf)
        reached = np.inf
        for number, levels in enumerate(STEPS):
            if levels[0].value > level.value:
                break
            if number == 1:
                each = [list(itertools.product(*(self._each_way(stage, family) for stage, _ in key))) for key in keys]
                at = np.repeat(np.arange(len(keys)), [len(some) for some in each])
                keys, rates, least = [key for some in each for key in some], rates[at], least[at]
            mixed = {stage for key in keys for stage in key if self._is_mixed(stage[0], family)}
            if levels == STEPS[-1] and not 0 < len(mixed) <= MOST_MIXED:
                break
            least = np.maximum(least, self._of_layouts(family, keys, rates, target_s, levels))
            left = np.flatnonzero(least < target_s)
            reached = min(reached, np.delete(least, left).min(initial=np.inf))
            keys, rates, least = [keys[number] for number in left.tolist()], rates[left], least[left]
            if not keys:
                break
        return min(reached, float(least.min(initial=np.inf)))

    def _of_layouts(
        self, family: Family, keys: Sequence[Key], rates: Floats, target_s: float, levels: tuple[Level, Level]
    ) -> Floats:
        """[layouts] bounds of layouts.

        Args:
            family: plans with stages of unlike size.
            keys: the layouts.
            rates: [layouts, ranks] bytes a second from each stage to the next one.
            target_s: no program is solved for layouts whose bound reaches this.
            levels: levels of costs for stages of one kind of devices, and for stages of several kinds.
        """
        # Few distinct stages make up many layouts, so stages are numbered.
        number = {stage: at for at, stage in enumerate({stage for key in keys for stage in key})}
        views = [self._views(*stage, family, levels) for stage in number]
        at = np.array([[number[stage] for stage in key] for key in keys])
        spreads = self._spreads(family, [RankBounds.mixed(some) for some in views], at, rates)
        found, tried = spreads.quick(), np.zeros(len(keys), dtype=np.bool_)
        is_mixed = np.array([self._is_mixed(of, family) for of, _ in number])[at].any(axis=1)
        may_rise = is_mixed if levels == STEPS[-2] else np.full(len(keys), levels != STEPS[-1])
        # Dual weights that prove a high bound for one layout often do so for others too, also of other families.
        pool = self._weights.setdefault(family.shapes[0].pp, deque(maxlen=MOST_WEIGHTS))
        left = np.flatnonzero(found < target_s)
        for weights in tuple(pool):
            if not len(left):
                break
            found[left] = np.maximum(found[left], spreads.take(left).bounds(weights))
            left = left[found[left] < target_s]
        if len(left):
            found[left] = np.maximum(found[left], self._of_cuts(family, views, at[left], rates[left], target_s))
            left = left[found[left] < target_s]
        for _ in range(MOST_PROGRAMS if levels[0] is Level.TOGETHER else MOST_EARLY_PROGRAMS):
            # With all signatures decided, the bound of a layout whose program was solved cannot rise any more.
            waiting = left[~(tried & may_rise)[left]]
            if not len(waiting) or tried[fastest := int(waiting[found[waiting].argmin()])]:
                break
            tried[fastest] = True
            fastest_s, weights = self._spread(family, [views[stage] for stage in at[fastest]], rates[fastest].tolist())
            pool.append(weights)
            found[left] = np.maximum(found[left], spreads.take(left).bounds(weights))
            found[fastest] = max(found[fastest], fastest_s)
            left = left[found[left] < target_s]
        return found

    def _spreads(self, family: Family, stages: Sequence[RankBounds], at: Ints, rates: Floats) -> Spreads:
        """The spreads over the ranks of several layouts.

        Args:
            family: plans of one shape.
            stages: bounds of each distinct stage.
            at: [layouts, ranks] number of the stage of each rank.
            rates: [layouts, ranks] bytes a second from each rank to the next one.
        """
        shape, settings = family.shapes[0], self.space.evaluator.settings(0)
        trips = path_trips(shape, self.space.schedules)
        passes = list(map(Passes.of, trips))
        busy_s = np.array([one.busy_s.min(axis=0) for one in stages])
        trip_s = np.array([[one.on(each).min(axis=0) for each in passes] for one in stages])
        crossing = np.array([least_crossing([one.crossing] * shape.pp, 1) for one in stages])[at, np.arange(shape.pp)]
        sent_s = float(settings.send_s) + (1.0 - float(settings.send_overlap)) * crossing / rates
        sent_s[:, -1] = 0.0
        exchanged_s = sent_s + np.roll(sent_s, 1, axis=1)
        micro_batch_s, step_s = float(settings.micro_batch_s), float(settings.step_s)
        besides_trip_s = np.zeros((len(at), 0))
        if trips:
            before, _, behind = trips
            ends_s = np.cumsum(exchanged_s, axis=1)
            besides_trip_s = step_s + before.forward * shape.pp * micro_batch_s + sends_on(behind) * ends_s[:, -1:]
            besides_trip_s = besides_trip_s + (sends_on(before) - sends_on(behind)) * (ends_s - exchanged_s)
        return Spreads(
            busy_s=busy_s[at],
            besides_s=step_s + shape.num_micro_batches * (micro_batch_s + exchanged_s),
            trip_s=trip_s.reshape(len(stages), len(passes), busy_s.shape[1])[at],
            besides_trip_s=besides_trip_s,
            bound=self._bound(shape.pp),
        )

    def _spread(
        self, family: Family, views: Sequence[Sequence[RankBounds]], rates: Sequence[float]
    ) -> tuple[float, Weights]:
        """Seconds of the fastest spread of units over ranks, and the weights that prove it; see `fastest_spread`.

        Args:
            family: plans of one shape.
            views: for each rank, its bounds for each of its kinds of devices, all of which hold.
            rates: [ranks] bytes a second from each rank to the next one, from the last one to the first.
        """
        is_known = family.shapes[0].virtual == 1 and len(views[0][0].passes_s) > 0
        trips = list(map(Passes.of, path_trips(family.shapes[0], self.space.schedules))) if is_known else []
        trip_s = self._besides_trips_s(family, views, rates) if trips else []
        besides_s, bound = self._besides_s(family, views, rates), self._bound(len(views))
        return fastest_spread(views, besides_s, trip_s, self._in_flight(family), bound, trips)
