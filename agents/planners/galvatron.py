"""Galvatron: a strategy for every layer by dynamic programming within memory, after Miao et al., "Galvatron: Efficient
Transformer Training over Multiple GPUs Using Automatic Parallelism" (VLDB 2023, arXiv 2211.13878).

As in its decision tree, the pipeline is decided first: stages with equally many devices, then the mesh of a stage. In a
stage, each layer has its own strategy: whether the inner axis splits its weights (Megatron-LM, with or without sequence
parallelism) or its batch, and whether it recomputes. C(l, e, s) is the least time of the first l layers of a stage
within the memory e, where layer l has the strategy s (section 4, equation 5):

    C(l, e, s) = min over s' of C(l - 1, e - memory(l, s), s') + time(l, s) + conversion(l, s', s)

Here equal layers of a stage have the same sharding, but each of them may recompute or not. So l counts kinds of layers,
and the strategy of a kind includes how many of its layers recompute. Layers are divided among stages so that the
slowest stage is as fast as possible, as in Galvatron-BMW. The ZeRO stage, the mesh and the number of micro-batches are
those of the templates, one after the other. Units: seconds, bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from agents.incumbent import Incumbent
from agents.planners.pipeline_cuts import partition
from agents.planners.span_costs import SpanCosts
from agents.planners.stage_strategies import Strategy
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import StageChoice, StagedPlan, price_staged
from agents.searcher import SearchResult, SearchTask
from automap.arrays import Floats, Ints
from automap.bounds.priced_templates import priced_templates
from automap.price.evaluator import by_type
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import RECOMPUTE_MODES, Segment, spread
from automap.space.shape import Shape
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures
from ir.factors import BROADCAST, PARTIAL

LEVELS = 128
"""Number of equal parts in which the dynamic program counts the memory of a device (assumed)."""
MOST_COUNTS = 12
"""Largest number of counts of recomputed layers that are tried for one kind of layer (assumed)."""
PATIENCE = 24
"""Meshes without a better plan after which the search ends (assumed)."""


class Option(NamedTuple):
    """One choice for all layers of one kind in a stage."""

    strategy: int
    """Number of their sharding."""
    mode: int
    """Recompute mode of those that recompute."""
    recomputed: int
    """How many of them recompute, the first ones; the others recompute nothing."""
    seconds: float
    """Time of all of them for one micro-batch."""
    level: int
    """Memory that they use together, in parts of `LEVELS`."""


def shardings(space: PlanSpace, shape: Shape) -> list[Strategy]:
    """The shardings of a layer: the inner axis splits weights, weights and the sequence, or the batch."""
    ways = [(False, False)]
    if shape.tp > 1:
        splits = spread(shape.samples, shape.dp) // shape.dp % shape.tp == 0
        ways += [(True, False), *([(False, True)] if splits else [])]
    found = []
    for sequence_parallel, only_batch in ways:
        prefix = space.even_values(shape, recompute="none", zero=0)
        values = megatron_signatures(space, shape, prefix, sequence_parallel=sequence_parallel, only_batch=only_batch)
        found.append(Strategy(tp=shape.tp, signatures=space.signatures(values)))
    return found


@dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """The dynamic program of one stage."""

    table: StageTable
    begin: int
    """First unit of the stage."""
    end: int
    """One past its last unit."""
    place: int
    """Place of its first device."""
    devices: int
    alive: int
    """Micro-batches that it holds."""

    def best(self) -> StageChoice | None:
        """The fastest strategies that fit, or None where none do."""
        kinds, costs = self._kinds(), self._costs()
        room = [of.capacity - float(of.needed_bytes[0, self.begin : self.end].max()) for of in costs]
        if min(room) <= 0.0:
            return None
        worth = np.zeros((len(costs), LEVELS + 1))
        ways: list[tuple[list[Option], Ints, Ints]] = []
        for number, kind in enumerate(kinds):
            options = [option for s, of in enumerate(costs) for option in self._options(s, of, kind, room[s])]
            change = self._conversions(kinds[number - 1], kind) if number else np.zeros((len(costs), len(costs)))
            worth, picked, came = add_kind(worth, options, change)
            ways.append((options, picked, came))
        if not np.isfinite(worth).any():
            return None
        strategy, level = (int(at) for at in np.unravel_index(worth.argmin(), worth.shape))
        modes, chosen = ["none"] * (self.end - self.begin), self.table.strategies[0].signatures.copy()
        for kind, (options, picked, came) in zip(reversed(kinds), reversed(ways), strict=True):
            option = options[picked[strategy, level]]
            strategy, level = int(came[strategy, level]), level - option.level
            self._write(kind, option, modes, chosen)
        devices = self.table.devices(self.place, self.devices)
        tp = self.table.strategies[0].tp
        return StageChoice(end=self.end, devices=devices, tp=tp, recompute=tuple(modes), signatures=chosen)

    def _kinds(self) -> list[list[int]]:
        """The units of each kind of layer, in the order in which the kinds first appear."""
        found: dict[int, list[int]] = {}
        for unit in range(self.begin, self.end):
            found.setdefault(self.table.space.linkage.blocks.units[unit].type, []).append(unit)
        return list(found.values())

    def _costs(self) -> list[SpanCosts]:
        """The costs of the devices of the stage with each strategy."""
        return [self.table.spans(self.place, self.devices, strategy) for strategy in self.table.strategies]

    def _options(self, number: int, costs: SpanCosts, kind: Sequence[int], room: float) -> Iterator[Option]:
        """The choices of a kind of layers with one sharding.

        Args:
            number: number of the sharding.
            costs: costs of all units with it.
            kind: the units of this kind.
            room: bytes of memory of the stage.
        """
        times, saved = (costs.forward_s + costs.backward_s)[:, kind], self.alive * costs.saved_bytes[:, kind]
        state, reduced = float(costs.unit_state_bytes[kind].sum()), float(costs.unit_reduce_s[kind].sum())
        legal = np.flatnonzero(costs.space.modes).tolist()
        counts = sorted({round(share * len(kind)) for share in np.linspace(0.0, 1.0, MOST_COUNTS + 1)})
        for mode, count in itertools.product(legal, counts):
            # Mode 0 is "none" and has one option; with another mode at least one layer recomputes.
            if count == 0 if mode else count > 0:
                continue
            if count < len(kind) and 0 not in legal:
                continue
            seconds = float(times[mode, :count].sum() + times[0, count:].sum())
            # Slightly too high: the memory that recomputing a layer needs is added once for each kind of layer.
            used = float(saved[mode, :count].sum() + saved[0, count:].sum()) + state
            used += max(float((costs.needed_bytes[mode, kind] - costs.needed_bytes[0, kind]).max()), 0.0)
            level = int(np.ceil(used / room * LEVELS))
            if level <= LEVELS:
                yield Option(number, mode, count, seconds + reduced / self.table.num_micro_batches, level)

    def _conversions(self, before: Sequence[int], kind: Sequence[int]) -> Floats:
        """[strategies, strategies] entry [i, j]: extra seconds of the first layer of a kind with strategy j if the
        layer before it, of another kind, has strategy i."""
        space, table = self.table.space, self.table
        evaluator, strategies = space.evaluator, table.strategies
        found = np.zeros((len(strategies), len(strategies)))
        unit, previous = kind[0], kind[0] - 1
        if previous not in before:
            return found
        for of, strategy in enumerate(strategies):
            layout = self._costs()[of].layout
            nothing = np.zeros(len(layout.axes), dtype=np.bool_)
            samples = spread(table.samples, self.devices // strategy.tp)
            stage = Stage(layout.axes, layout.links, layout.hardware, nothing, float(samples))
            mine = _segment(space, unit, strategy)
            seconds = []
            for other in strategies:
                incoming = evaluator.crossing_placement(_segment(space, previous, other))
                cost = evaluator.unit_cost(mine, np.where(incoming == PARTIAL, BROADCAST, incoming), stage)
                comm = (cost.forward_comm_s + cost.backward_comm_s).sum()
                seconds.append(float(cost.forward_s + cost.backward_s + comm))
            found[:, of] = np.array(seconds) - seconds[of]
        return found

    def _write(self, kind: Sequence[int], option: Option, modes: list[str], chosen: Ints) -> None:
        """Writes an option of a kind of layers into the recompute modes and strategies of the units."""
        for unit in kind[: option.recomputed]:
            modes[unit - self.begin] = RECOMPUTE_MODES[option.mode]
        rows = self.table.space.evaluator.tables.rows(self.table.space.linkage.blocks.units[kind[0]].type)
        chosen[rows.start : rows.stop] = self.table.strategies[option.strategy].signatures[rows.start : rows.stop]


def _segment(space: PlanSpace, unit: int, strategy: Strategy) -> Segment:
    evaluator = space.evaluator
    masks = evaluator.masks(space.linkage.blocks.units[unit].type)
    return evaluator.segment(unit, by_type(evaluator, strategy.signatures), masks["none"])


def add_kind(worth: Floats, options: Sequence[Option], change: Floats) -> tuple[Floats, Ints, Ints]:
    """One step of the dynamic program: adds a kind of layers.

    Args:
        worth: [strategies, levels + 1] least seconds of the kinds so far, by the strategy of the last kind and the
            memory used.
        options: the choices for the new kind.
        change: [strategies, strategies] seconds of a conversion from one strategy to another.

    Returns:
        `worth` with the new kind; and, both [strategies, levels + 1], the number of its option and the strategy of the
        kind before it.
    """
    found = np.full_like(worth, np.inf)
    picked, came = np.zeros(worth.shape, dtype=np.int64), np.zeros(worth.shape, dtype=np.int64)
    before = {of: worth + change[:, of, None] for of in {option.strategy for option in options}}
    for number, option in enumerate(options):
        behind = before[option.strategy]
        best, which = behind.min(axis=0), behind.argmin(axis=0)
        total = np.full(worth.shape[1], np.inf)
        total[option.level :] = best[: worth.shape[1] - option.level] + option.seconds
        is_better = total < found[option.strategy]
        found[option.strategy] = np.where(is_better, total, found[option.strategy])
        picked[option.strategy] = np.where(is_better, number, picked[option.strategy])
        moved = np.zeros(worth.shape[1], dtype=np.int64)
        moved[option.level :] = which[: worth.shape[1] - option.level]
        came[option.strategy] = np.where(is_better, moved, came[option.strategy])
    return found, picked, came


def layered(space: PlanSpace, shape: Shape, zero: int) -> StagedPlan | None:
    """Galvatron's plan with a given shape and ZeRO stage.

    Returns:
        The plan; None where no division of the layers fits into memory, or where stages would have different numbers of
        devices.
    """
    if not space.meshes.is_even(shape):
        return None
    order, size = tuple(range(space.meshes.devices)), space.meshes.devices // shape.pp
    table = StageTable(space, order, shape.num_micro_batches, shardings(space, shape), zero=zero)
    seconds = [table.seconds(shape.pp - rank, rank * size, size) for rank in range(shape.pp)]
    ends = partition(seconds)
    if ends is None:
        return None
    stages = []
    for rank, (begin, end) in enumerate(itertools.pairwise([0, *ends, space.num_units])):
        alive = min(shape.pp - rank, shape.num_micro_batches)
        choice = LayerChoice(table=table, begin=begin, end=end, place=rank * size, devices=size, alive=alive).best()
        if choice is None:
            return None
        stages.append(choice)
    return StagedPlan(stages=tuple(stages), num_micro_batches=shape.num_micro_batches, zero=zero)


def run_galvatron(incumbent: Incumbent) -> None:
    """Plans for one mesh, number of micro-batches and ZeRO stage after the other, those of the best templates first."""
    space = incumbent.space
    values, prices = priced_templates(space)
    worth = np.where(prices[:, 1] <= 0.0, prices[:, 0], prices[:, 0] * (1.0 + prices[:, 1]))
    seen, best_s, waited = set(), float("inf"), 0
    for row in np.argsort(worth, kind="stable").tolist():
        shape, zero = space.shape(values[row].tolist()), int(values[row][space.first.zero])
        if shape.middle > 1 or shape.virtual > 1 or (shape, zero) in seen:
            continue
        seen.add((shape, zero))
        plan = layered(space, shape, zero)
        mine = float("inf") if plan is None else price_staged(incumbent, [plan])
        waited = 0 if mine < best_s else waited + 1
        best_s = min(best_s, mine)
        if incumbent.finished or waited > PATIENCE:
            return


def search_galvatron(task: SearchTask) -> SearchResult:
    """The best plan of Galvatron's dynamic program; see `Searcher`."""
    incumbent = Incumbent.begin(task, "galvatron")
    incumbent.price_start(task)
    run_galvatron(incumbent)
    return incumbent.result(seed=task.seed)
