"""Stage table: the time of every possible stage of a pipeline on a given order of the devices, for planners that divide
a model among stages.

A stage has consecutive units of the model, consecutive devices of the order, and a strategy: the size of its inner mesh
axis and the signatures of all operators. For every such stage the table has the seconds with the fastest strategy and
recompute mode that fit, and the seconds of the transfer to the next stage. `agents.planners.device_partition` reads it.
A span is consecutive units. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agents.planners.device_partition import Partition, StageOf
from agents.planners.kernels.span_costs import keep_faster, take_passes
from agents.planners.pair_links import PairLinks
from agents.planners.span_costs import SpanCosts
from agents.planners.stage_strategies import Strategy
from agents.planners.staged_plan import StageChoice, StagedPlan
from agents.planners.tied_spans import TiedUnits
from agents.planners.unit_profile import UnitsInOrder
from automap.arrays import Floats, Ints
from automap.price.lowered_plan import spread
from automap.space.device_order import Order
from automap.space.space import PlanSpace


class StageTable:
    """The stages of plans with one number of micro-batches, one ZeRO stage and some strategies.

    Attributes:
        entries: how many costs have been computed, counting each strategy of each span.
    """

    def __init__(
        self,
        space: PlanSpace,
        order: Order,
        num_micro_batches: int,
        strategies: Sequence[Strategy],
        *,
        zero: int = 0,
        holds: bool = True,
        partly: bool = False,
        known: StageTable | None = None,
    ) -> None:
        """Begins a table; its entries are computed when they are first asked for.

        Args:
            space: the plan space.
            order: the devices of the cluster in the order in which stages take them.
            num_micro_batches: micro-batches of a step.
            strategies: those that a stage may have; of equally fast ones the first is taken.
            zero: ZeRO stage.
            holds: whether a transfer occupies the stages on either side, as in our price; otherwise it occupies only
                the channel between them.
            partly: whether the first units of a stage may recompute more than the others, see `SpanCosts.fastest`.
            known: a table whose costs are used again; it may differ in the order of the devices and in `holds`.
        """
        self.space, self.order, self.strategies, self.zero = space, order, strategies, zero
        self.num_micro_batches, self.holds, self.partly = num_micro_batches, holds, partly
        self.samples = space.problem.training.global_batch // num_micro_batches
        self.links: PairLinks = PairLinks(space.problem.cluster) if known is None else known.links
        self._spans: dict[object, SpanCosts] = {} if known is None else known._spans
        self._units: dict[Strategy, tuple[UnitsInOrder, TiedUnits]] = {} if known is None else known._units
        self._at: dict[tuple[int, int, Strategy], SpanCosts] = {}
        self._fastest: dict[object, tuple[Floats, Ints, Ints]] = {}
        self._channels: dict[tuple[float, int, int], Floats] = {}
        self._asked: dict[tuple[int, int, int], tuple[Floats, Ints, Ints]] = {}
        self._passes: dict[int, Floats] = {}
        """By the identity of the seconds of `_fastest`."""
        self._possible: dict[int, list[int]] = {}
        self._rates: dict[tuple[int, int, int], float] = {}
        self._least: dict[tuple[int, int], float] = {}
        self._kinds: dict[tuple[int, int], tuple[frozenset[int], bytes]] = {}
        self._sent: dict[tuple[int, int], tuple[float, float]] = {}
        self.entries = 0

    @property
    def sizes(self) -> list[int]:
        """Numbers of devices of a stage with which some strategy is possible: every rank has a sample."""
        found = set[int]()
        for strategy in self.strategies:
            most = min(len(self.order), self.samples * strategy.tp)
            found.update(
                size for size in range(strategy.tp, most + 1, strategy.tp) if strategy.fits(size, self.samples)
            )
        return sorted(found)

    @property
    def num_tied(self) -> int:
        """Number of parameters that several units read."""
        return len({name for name, *_ in self.space.evaluator.tied.parameters})

    def devices(self, place: int, size: int) -> tuple[int, ...]:
        """The devices of a stage."""
        return self.order[place : place + size]

    def spans(self, place: int, size: int, strategy: Strategy) -> SpanCosts:
        """Costs of all spans on `size` devices from a place of the order; they are computed once for equal devices."""
        known = self._at.get((place, size, strategy))
        if known is not None:
            return known
        key = (size, strategy, *self._hosts(place, size), self.least_rate(place, size))
        if key not in self._spans:
            inner = [1] * (len(self.space.axes) - 2)
            mesh = (size // strategy.tp, *inner, strategy.tp)
            (stage,) = self.space.evaluator.layout_of([(self.devices(place, size), mesh)]).stages
            samples = spread(self.samples, size // strategy.tp)
            if strategy not in self._units:
                which = self.space.evaluator, strategy.signatures
                self._units[strategy] = UnitsInOrder.of(*which), TiedUnits(*which)
            self._spans[key] = SpanCosts(self.space, *self._units[strategy], stage, samples, self.zero)
        self._at[place, size, strategy] = self._spans[key]
        return self._spans[key]

    def _hosts(self, place: int, size: int) -> tuple[frozenset[int], bytes]:
        """Kinds of the hosts of the devices at a place, and how many of these devices each host has."""
        if (place, size) not in self._kinds:
            cluster = self.space.problem.cluster
            hosts, counts = np.unique(cluster.places[list(self.devices(place, size))], return_counts=True)
            self._kinds[place, size] = frozenset(cluster.alike[hosts].tolist()), counts.tobytes()
        return self._kinds[place, size]

    def _rate(self, first: int, middle: int, last: int) -> float:
        """Least bandwidth from the devices at places `first` to `middle` - 1 to those at `middle` to `last` - 1."""
        key = (first, middle, last)
        if key not in self._rates:
            senders, receivers = np.array(self.order[first:middle]), np.array(self.order[middle:last])
            self._rates[key] = self.links.least_to(senders, receivers)
        return self._rates[key]

    def least_rate(self, place: int, size: int) -> float:
        """Least bandwidth between any two of `size` devices from a place of the order, in bytes/s."""
        if (place, size) not in self._least:
            self._least[place, size] = self.links.least_within(np.array(self.devices(place, size)))
        return self._least[place, size]

    def seconds(self, behind: int, place: int, size: int) -> Floats:
        """[units + 1, units + 1] seconds of each span for a micro-batch, see `StageSeconds`: both passes, transfers
        where the table `holds`, and its share of the reduction of gradients and of the exchange of tied parameters.

        Args:
            behind: number of stages from this one to the last.
            place: place of its first device in the order.
            size: number of its devices.
        """
        return self._best(behind, place, size)[0]

    def _best(self, behind: int, place: int, size: int) -> tuple[Floats, Ints, Ints]:
        """For each span: seconds, the number of the fastest strategy, and its recomputation as in
        `SpanCosts.fastest`."""
        asked = min(behind, self.num_micro_batches), place, size
        if asked not in self._asked:
            self._asked[asked] = self._find_best(*asked)
        return self._asked[asked]

    def _find_best(self, alive: int, place: int, size: int) -> tuple[Floats, Ints, Ints]:
        """`_best` with `alive` micro-batches in flight."""
        if size not in self._possible:
            fit = [number for number, strategy in enumerate(self.strategies) if strategy.fits(size, self.samples)]
            self._possible[size] = fit
        possible = self._possible[size]
        found = [self.spans(place, size, self.strategies[number]) for number in possible]
        sends = self._sends(place, size) if self.holds else (0.0, 0.0)
        key = (alive, *sends, *map(id, found))
        if key not in self._fastest:
            shape = self.space.num_units + 1, self.space.num_units + 1
            self.entries += len(found) * shape[0] ** 2
            seconds, which = np.full(shape, np.inf), np.full(shape, possible[0])
            again = np.zeros_like(which)
            for number, costs in zip(possible, found, strict=True):
                passes, modes = costs.fastest(alive, partly=self.partly)
                keep_faster(
                    passes, modes, costs.beside_s(self.num_micro_batches, *sends), number, seconds, which, again
                )
            self._fastest[key] = seconds, which, again
        return self._fastest[key]

    def strategy(self, behind: int, stage: StageOf) -> Strategy:
        """The fastest strategy of a stage, of which `behind` stages go to the last one with itself."""
        which = self._best(behind, stage.place, stage.devices)[1]
        return self.strategies[int(which[stage.first, stage.last])]

    def passes(self, behind: int, place: int, size: int) -> Floats:
        """[4 + tied parameters, units + 1, units + 1] what each span takes on a stage with the strategy of `seconds`;
        infinite where the span does not fit. The arguments are those of `seconds`.

        The first four rows are the seconds of the forward pass of a micro-batch; those of its backward pass with
        recomputation; the seconds, once a step, of the reduction of gradients that nothing hides and of the update of
        the optimizer; and the bytes that a rank sends to the next stage for a micro-batch. Transfers are left out. Each
        further row is about one tied parameter: the elements of its gradient on a rank with the span, which the stages
        that hold the parameter add up. 0 where the span does not read it.
        """
        best, which, _ = self._best(behind, place, size)
        if id(best) not in self._passes:
            found = np.full((4 + self.num_tied, *best.shape), np.inf)
            for number in np.flatnonzero(np.bincount(which.ravel())).tolist():
                costs = self.spans(place, size, self.strategies[number])
                passes = costs.passes(min(behind, self.num_micro_batches), partly=self.partly)
                take_passes(passes, number, which, best, found)
            self._passes[id(best)] = found
        return self._passes[id(best)]

    def _sends(self, place: int, size: int) -> tuple[float, float]:
        """Seconds to send a byte to the stage before a stage, and to the stage after it; 0 where there is none.

        Both are assumed to have as many devices as the stage itself, or as many as are left.
        """
        if (place, size) not in self._sent:
            own, end = np.array(self.order[place : place + size]), place + size
            before = np.array(self.order[max(0, place - size) : place])
            behind = np.array(self.order[end : end + size])
            self._sent[place, size] = self._a_byte(before, own), self._a_byte(own, behind)
        return self._sent[place, size]

    def _a_byte(self, senders: Ints, receivers: Ints) -> float:
        """Seconds in which each sender sends a byte, as in the price; 0 without senders or receivers."""
        if not len(senders) or not len(receivers):
            return 0.0
        laid_out = self.space.evaluator.laid_out
        patterns = laid_out.pattern(senders), laid_out.pattern(receivers)
        return 1.0 / laid_out.sends.of(patterns, senders, receivers)[1]

    def channel(self, place: int, size: int, following: int) -> Floats:
        """[units + 1] seconds a micro-batch of the channel to a stage of `following` devices, see `ChannelSeconds`:
        activations and their gradients, over all pairs of devices of the two stages at the same time."""
        rate = self._rate(place, place + size, place + size + following)
        key = (rate, size, following)
        if key not in self._channels:
            crossing = self.spans(place, size, self.strategies[0]).crossing_bytes * size
            self._channels[key] = 2.0 * crossing / (size * following * rate)
        return self._channels[key]

    def latency_s(self, partition: Partition, schedule: str = "1f1b") -> float:
        """Seconds of a step of a partition by Alpa's equation 2: the sum over all stages, and the slowest stage once
        more for each further micro-batch. Infinite where it does not fit under the schedule."""
        alive = self._alive(partition, schedule)
        each = [
            float(self.seconds(held, stage.place, stage.devices)[stage.first, stage.last])
            for held, stage in zip(alive, partition.stages, strict=True)
        ]
        return sum(each) + (self.num_micro_batches - 1) * max(each)

    def held(self, behind: int, schedule: str) -> int:
        """Largest number of micro-batches in flight on a stage: under GPipe all, otherwise one for each stage from
        this one to the last, of which there are `behind`."""
        return self.num_micro_batches if schedule == "gpipe" else behind

    def _alive(self, partition: Partition, schedule: str) -> list[int]:
        """`held` of each stage."""
        return [self.held(behind, schedule) for behind in range(len(partition.stages), 0, -1)]

    def staged(self, partition: Partition, schedule: str = "1f1b") -> StagedPlan:
        """The plan of a partition under a schedule; its stages recompute as much as their micro-batches in flight
        require."""
        found = []
        for held, stage in zip(self._alive(partition, schedule), partition.stages, strict=True):
            strategy, modes = self.strategy(held, stage), self._best(held, stage.place, stage.devices)[2]
            costs = self.spans(stage.place, stage.devices, strategy)
            found.append(
                StageChoice(
                    end=stage.last,
                    devices=self.devices(stage.place, stage.devices),
                    tp=strategy.tp,
                    recompute=costs.recomputed(int(modes[stage.first, stage.last]), stage.first, stage.last),
                    signatures=strategy.signatures,
                )
            )
        return StagedPlan(
            stages=tuple(found), num_micro_batches=self.num_micro_batches, schedule=schedule, zero=self.zero
        )
