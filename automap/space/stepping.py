"""Steps through the decisions of a problem: legal values, layouts, random plans, neighbours and prices; all compiled.

The kernels of `automap.space.kernels` do the work. They are imported at their first call, so that the price of one plan
does not need to load all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.price.evaluator import blank
from automap.price.kernels.array_types import Rows
from automap.price.kernels.cost_records import TIE_DTYPE
from automap.price.stage_layout import PipelineLayout
from automap.space.batch_shares import dealt
from automap.space.compile import compile_space
from automap.space.decisions import Slot, SpaceOutline, Values
from automap.space.kernels.records import Compiled, SpaceArrays
from automap.space.shape import Shape

if TYPE_CHECKING:
    from automap.space.kernels.draft import Draft
    from automap.space.kernels.layout import Layout

MOVE_CHANCES = (
    0.3,  # ONE
    0.1,  # TWO
    0.1,  # SHIFT
    0.05,  # SLIDE
    0.05,  # DEVICES
    0.05,  # MODE
    0.05,  # GROUP
    0.1,  # PAIR
    0.05,  # BORROW
    0.05,  # BATCH
    0.1,  # SHAPE
)
"""Probability of each kind of move of `automap.space.kernels.neighbours` (assumed)."""


class SteppedSpace(SpaceOutline):
    """A `SpaceOutline` whose decisions can be taken one after another."""

    @functools.cached_property
    def arrays(self) -> SpaceArrays:
        """The decisions for the compiled kernels."""
        return compile_space(self)

    @functools.cached_property
    def compiled(self) -> Compiled:
        """The arguments of the kernels; the cache holds the costs of units of the plans priced last."""
        from automap.space.kernels.unit_cache import new_cache

        return Compiled(tables=self.evaluator.tables.arrays, space=self.arrays, cache=new_cache())

    @functools.cached_property
    def _draft(self) -> Draft:
        from automap.space.kernels.draft import new_draft

        found: Draft = new_draft(self.compiled)
        return found

    # -- what is legal ------------------------------------------------------------------------------------------

    def _follow(self, values: Sequence[int] | Ints) -> int:
        """Decides `values` in the draft; returns how many values the next slot has, see `legal_values`."""
        from automap.space.kernels.stepper import follow

        row = np.zeros(len(self.slots), dtype=np.int64)
        row[: len(values)] = values
        num_values: int = follow(self.compiled, row, len(values), self._draft)
        return num_values

    def legal(self, prefix: Sequence[int] | Ints) -> Mask:
        """[values] which values of slot `len(prefix)` are legal after `prefix`; at least one always is."""
        mask = np.zeros(self.slots[len(prefix)].num_values, dtype=np.bool_)
        if len(mask) == 1:
            return ~mask  # which takes a thousandth of deciding the prefix
        num_values = self._follow(prefix)
        mask[:num_values] = self._draft.mask[:num_values]
        return mask

    def free_slots(self, values: Sequence[int]) -> list[Slot]:
        """The slots of a plan at which more than one value is legal after the values before them."""
        return [slot for i, slot in enumerate(self.slots) if self.legal(values[:i]).sum() > 1]

    def repair(self, values: Sequence[int], kept: int = 0) -> Values:
        """The nearest legal plan: each value is kept if it is legal after the values before it, else replaced by
        `nearest_legal`.

        Args:
            values: [slots] the plan.
            kept: number of first values that are known to be legal.
        """
        from automap.space.kernels.stepper import repair

        row = np.array(values, dtype=np.int64)
        repair(self.compiled, kept, row, self._draft)
        return tuple(row.tolist())

    def repair_many(self, plans: Ints, kept: int = 0) -> Ints:
        """[n, slots] `repair` of each of [n, slots] plans."""
        from automap.space.kernels.stepper import repair_many

        rows = np.array(plans, dtype=np.int64, order="C")
        repair_many(self.compiled, kept, rows, self._draft)
        return rows

    def legal_signatures(self, skeleton: Sequence[int] | Ints, group: int) -> Ints:
        """[combinations, axes] legal values of a linkage group's slots, after the values before all signatures."""
        from automap.space.kernels.stepper import list_signatures

        row = np.zeros(len(self.slots), dtype=np.int64)
        row[: len(skeleton)] = skeleton
        num_axes = len(self.axes)
        num_values = self.slots[self.first.signature + group * num_axes].num_values
        found = np.empty((num_values**num_axes, num_axes), dtype=np.int64)
        return found[: list_signatures(self.compiled, row, group, self._draft, found)].copy()

    def legal_on_axis(self, values: Ints, axis: int) -> Mask:
        """[groups, values] legal signatures of every linkage group on an axis; false after its last value.

        Args:
            values: [slots] int64, decided before the signatures, and on the axes before this one.
            axis: number of the axis.
        """
        from automap.space.kernels.stepper import legal_on_axis

        found = np.empty((len(self.arrays.groups), self.arrays.scalars.most_values), dtype=np.bool_)
        legal_on_axis(self.compiled, values, axis, self._draft, found)
        return found

    def legal_on_ranks(self, values: Sequence[int]) -> Mask:
        """[ranks, levels] which levels of recomputation are legal on each pipeline rank, after the cuts in `values`;
        ranks do not depend on one another."""
        from automap.space.kernels.stepper import legal_on_ranks

        found = np.empty((self.shape(values).pp, self.arrays.legal_levels.shape[1]), dtype=np.bool_)
        legal_on_ranks(self.compiled, np.array(values, dtype=np.int64), self._draft, found)
        return found

    # -- stages and cuts ----------------------------------------------------------------------------------------

    def _laid_out(self, values: Sequence[int]) -> Layout:
        """The layout of the stages in the form of the kernels; undecided slots before `cut` count as 0."""
        self._follow([*values, *[0] * (self.first.cut - len(values))])
        return self._draft.layout

    def stage_devices(self, values: Sequence[int]) -> tuple[int, ...]:
        """[stages] devices of each stage; undecided stages share the remaining devices as evenly as possible."""
        return tuple(self._laid_out(values).devices[: self.shape(values).pp].tolist())

    def layout(self, values: Sequence[int]) -> PipelineLayout:
        """The layout of the stages that `values` decide."""
        return self.layout_of(self.shape(values), values[self.first.order], self.stage_devices(values))

    def rows_seen(self, values: Sequence[int]) -> list[int]:
        """[stages] row of each stage among the distinct stages, in the view of its slowest kind of devices, see
        `LoweredPlan.views`."""
        found: list[int] = self._laid_out(values).stages[: self.shape(values).pp].tolist()
        return found

    def usual_rows(self, shape: Shape, order: int) -> list[int]:
        """[stages] row of each stage of usual size among the distinct stages."""
        degrees, middles = self.meshes.degrees, self.meshes.middles
        at = (order, self.meshes.division(shape), degrees.index(shape.tp), middles.index(shape.middle))
        first = self.arrays.usual_layouts[at]["first"]
        found: list[int] = self.arrays.stages[first : first + shape.pp].tolist()
        return found

    def batch_shares(self, values: Sequence[int]) -> tuple[tuple[int, ...] | None, ...]:
        """[stages] samples of a micro-batch for each index of the outer axis; None or empty: as even as possible."""
        way = values[self.first.shares]
        if not way:
            return ()
        arrays, found = self.arrays, list[tuple[int, ...] | None]()
        count, stages = values[self.first.micro_batches], self.layout(values).stages
        for row, stage in zip(self._laid_out(values).rows[: len(stages)].tolist(), stages, strict=True):
            number = int(arrays.mixed[row])
            if number < 0 or not arrays.share_ways[number, count, way]:
                found.append(None)
                continue
            shares = [0] * int(stage.axes[0])
            for kind, total in zip(stage.kinds, arrays.kind_samples[number, count, way].tolist(), strict=False):
                of_kind = dealt(total, len(kind.ranks), int(arrays.quanta[number]))
                for rank, mine in zip(kind.ranks, of_kind, strict=True):
                    shares[rank] = mine
            found.append(tuple(shares))
        return tuple(found)

    def unlike_meshes(self, values: Sequence[int]) -> tuple[Floats, Ints]:
        """[meshes, axes] distinct meshes of the stages, and [meshes] samples of a micro-batch that must divide over
        each evenly: the share of a rank times the ranks."""
        layout = self._laid_out(values)
        count = int(layout.frame[0]["num_meshes"])
        return layout.sizes[:count].copy(), layout.divided[:count].copy()

    def cut_shares(self, values: Sequence[int]) -> list[float]:
        """[chunks] the summed speed of the rank of each chunk and those of all later chunks, over that of its rank."""
        found: list[float] = self._laid_out(values).shares[: self.shape(values).num_chunks].tolist()
        return found

    def candidates(self, start: int, chunk: int, num_chunks: int, share: float) -> Ints:
        """The possible ends of a chunk that begins at unit `start`, the nearest to the even end first, see
        `automap.space.kernels.cuts`."""
        from automap.space.kernels.cuts import list_cuts

        low, high = self.constrained.window(chunk, num_chunks)
        low = max(low, start + 1)
        ends = np.empty(max(0, high - low + 1), dtype=np.int64)
        list_cuts(self.cumulative_weight, start, low, high, share, ends)
        return ends

    def cuts(self, values: Sequence[int], num_cuts: int) -> list[int]:
        """The first `num_cuts` ends of chunks that `values` decide."""
        found: list[int] = self._laid_out(values).ends[:num_cuts].tolist()
        return found

    # -- many plans at once -------------------------------------------------------------------------------------

    def price(self, values: Ints) -> Floats:
        """Prices complete plans, [n, slots], in one compiled call.

        Returns:
            [n, 2] seconds of a step, and the bytes by which the fullest device exceeds its memory, as a share of that
            memory (at most 0 if the plan fits). The floats are identical to those of `Evaluator.evaluate`.
        """
        return self._price(values, exact=True)

    def bound(self, values: Ints) -> Floats:
        """[n, 2] lower bounds on the results of `price` for all completions of plans, [n, slots], whose last signatures
        are -1, undecided.

        They are the bounds of `PartialPlan` after the shape and the cuts: undecided signatures have their least cost,
        and the time of the schedule is bounded in closed form.
        """
        return self._price(values, exact=False)

    def _price(self, values: Ints, *, exact: bool) -> Floats:
        from automap.space.kernels.price_many import price_many

        out = np.empty((len(values), 2))
        price_many(self.compiled, np.ascontiguousarray(values, dtype=np.int64), exact, out)
        return out

    def ties(self, values: Ints) -> Rows:
        """[n, ties] costs of the tied parameters of complete plans, [n, slots], beyond those of their readers
        (`TieRow`). `excess` counts if both ranks are the same, else `exchanged`."""
        from automap.space.kernels.price_many import tie_many

        out = np.zeros((len(values), len(self.evaluator.tied.parameters)), dtype=TIE_DTYPE)
        tie_many(self.compiled, np.ascontiguousarray(values, dtype=np.int64), out)
        return out

    def random(self, rng: np.random.Generator) -> Values:
        """A plan drawn by uniform choices among the legal values of each slot."""
        return tuple(self.random_batch(rng, 1)[0].tolist())

    def random_batch(self, rng: np.random.Generator, count: int) -> Ints:
        """[count, slots] plans drawn like `random`, in one compiled call."""
        from automap.space.kernels.sample import sample_many

        rows, chances = self._shape_chances
        values = np.zeros((count, len(self.slots)), dtype=np.int64)
        values[:, : self.first.schedule] = rows[rng.choice(len(rows), size=count, p=chances)]
        sample_many(self.compiled, rng.random(values.shape), values)
        return values

    @functools.cached_property
    def _shape_chances(self) -> tuple[Ints, Floats]:
        """The values of all shapes, and the probability of each if its values are chosen uniformly one after the
        other."""
        rows = [self.meshes.values(shape) for shape in self.shapes]
        beginnings = {row[:depth] for row in rows for depth in range(len(row) + 1)}
        followers: dict[tuple[int, ...], int] = {}
        for beginning in beginnings:
            followers[beginning[:-1]] = followers.get(beginning[:-1], 0) + bool(beginning)
        ways = [[followers[row[:depth]] for depth in range(len(row))] for row in rows]
        chances = 1.0 / np.prod(np.array(ways, dtype=np.float64), axis=1)
        return np.array(rows, dtype=np.int64), chances / chances.sum()

    def neighbours(
        self, rng: np.random.Generator, values: Ints, donors: Ints, chances: Sequence[float] = MOVE_CHANCES
    ) -> Ints:
        """[n, slots] one neighbour of each plan: some decisions are changed, all others are kept where they stay legal.

        Args:
            rng: random numbers.
            values: [n, slots] legal plans.
            donors: [m, slots] legal plans, the best first, from which shapes and signatures may be borrowed.
            chances: of each kind of move, see `automap.space.kernels.neighbours`.
        """
        from automap.space.kernels.neighbours import move_many

        shares = np.cumsum(np.array(chances)) / sum(chances)
        rows, _ = self._shape_chances
        seeds = rng.integers(1, 1 << 63, len(values), dtype=np.uint64)
        out = np.empty_like(values)
        move_many(self.compiled, rows, shares, seeds, donors, values, out)
        return out

    # -- signatures ---------------------------------------------------------------------------------------------

    def signatures(self, values: Sequence[int]) -> Ints:
        """[operator rows, axes] signature of every operator; -1 where it is not decided in `values`."""
        chosen = blank(self.evaluator, len(self.axes))
        for slot, value in zip(self.slots[self.first.signature :], values[self.first.signature :], strict=False):
            members, assignment = self.group_rows[slot.unit_type, slot.group]
            chosen[members, slot.index] = assignment[value]
        return chosen
