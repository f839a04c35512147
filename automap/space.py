"""PlanSpace: the plans of a problem as a sequence of decisions with legal values.

One meaning of "optimum" for every searcher: environments, exhaustive search and templates all walk these decisions.
A plan of the space has equal meshes dp x tp on pp pipeline ranks, chunks cut between units, one recompute mode a rank,
one ZeRO stage, and for each linkage group of each unit type one signature on each mesh axis; equal units are decided
once. `values` is a tuple with one number a slot; a slot with a single legal value is forced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from automap.constraints import Constrained
from automap.errors import ProblemError
from automap.order import SPLIT_KINDS
from automap.plan import Plan
from automap.price.evaluator import RECOMPUTE_MODES, Choice, Evaluator, Segment, blank, by_type
from automap.price.placements import divides
from automap.problem import Problem
from automap.translate import same_choice, to_choice, to_plan
from ir.factors import whole_signature
from ir.graph import Operator

if TYPE_CHECKING:
    from automap.price.batch import SpaceArrays

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Values = tuple[int, ...]

AXES = ("dp", "tp")
MAX_VIRTUAL_STAGES = 8
"""Chunks a rank; more only adds transfers. Megatron-LM's published runs use up to 4 to 6."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """One decision."""

    kind: str
    """pp, tp, micro_batches, virtual, cut, recompute, zero or signature."""
    name: str
    """For people."""
    num_values: int
    index: int = 0
    """Chunk of a cut, rank of a recompute mode, axis of a signature."""
    unit_type: int = -1
    group: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The decisions about the whole: how many of what."""

    pp: int
    tp: int
    dp: int
    num_micro_batches: int
    samples: int
    """Of a micro-batch over all replicas."""
    virtual: int = 1

    @property
    def num_chunks(self) -> int:
        """Chunks of the graph."""
        return self.pp * self.virtual


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


class PlanSpace:
    """The decisions of `problem`.

    Attributes:
        slots: all decisions in order.
        evaluator: prices what is decided.
        schedule: of plans without virtual stages.
    """

    def __init__(self, problem: Problem, evaluator: Evaluator | None = None) -> None:
        """Builds the space.

        Raises:
            ProblemError: the batch and the devices, or `hints.fix`, leave no plan.
        """
        self.problem = problem
        self.evaluator = evaluator or Evaluator(problem)
        self.linkage = self.evaluator.tables.linkage
        self.num_units = len(self.linkage.blocks.units)
        self.constrained = Constrained(problem, self.evaluator)
        devices = problem.cluster.num_devices
        self.schedule = problem.hints.fix.schedule or "1f1b"
        if self.schedule == "interleaved":
            self.schedule = "1f1b"
        self.degrees = divisors(devices)
        self.micro_batches = divisors(problem.training.global_batch)
        self._check_fix(devices)
        self.shapes = self._shapes(devices)
        if not self.shapes:
            self._refuse(devices)
        pp = max(s.pp for s in self.shapes)
        chunks = max(s.num_chunks for s in self.shapes)
        self._modes = len(RECOMPUTE_MODES)
        slots = [
            Slot(kind="pp", name="pipeline stages", num_values=len(self.degrees)),
            Slot(kind="tp", name="size of the inner mesh axis", num_values=len(self.degrees)),
            Slot(kind="micro_batches", name="micro-batches", num_values=len(self.micro_batches)),
            Slot(kind="virtual", name="virtual stages a rank", num_values=MAX_VIRTUAL_STAGES),
        ]
        slots += [
            Slot(kind="cut", name=f"end of chunk {i}", num_values=self.num_units, index=i) for i in range(chunks - 1)
        ]
        slots += [
            Slot(kind="recompute", name=f"recompute on rank {i}", num_values=self._modes, index=i) for i in range(pp)
        ]
        slots.append(Slot(kind="zero", name="ZeRO stage", num_values=4))
        self.first_signature = len(slots)
        for unit_type, unit in enumerate(self.linkage.types):
            for number, group in enumerate(unit.groups):
                for axis, axis_name in enumerate(AXES):
                    slots.append(
                        Slot(
                            kind="signature",
                            name=f"{self.operator_name(unit_type, group.leader)} on {axis_name}",
                            num_values=len(unit.signatures[group.leader]),
                            index=axis,
                            unit_type=unit_type,
                            group=number,
                        )
                    )
        self.slots = tuple(slots)
        self.first_cut = 4
        self.first_recompute = 4 + chunks - 1
        self.zero_slot = self.first_signature - 1
        self._legal: dict[tuple[int, ...], Mask] = {}
        self._targets: dict[tuple[int, ...], Ints] = {}
        self._ways: dict[tuple[int, int | None], float] = {}

    @property
    def is_split(self) -> bool:
        """Whether backward passes are split into gradients of inputs and of weights."""
        return self.schedule in SPLIT_KINDS

    # -- what is legal ------------------------------------------------------------------------------------------

    def _check_fix(self, devices: int) -> None:
        fix = self.problem.hints.fix
        for name, value, whole in (
            ("dp", fix.dp, devices),
            ("tp", fix.tp, devices),
            ("pp", fix.pp, devices),
            ("num_micro_batches", fix.num_micro_batches, self.problem.training.global_batch),
        ):
            if value is not None and whole % value:
                what = "global batch" if name == "num_micro_batches" else "number of devices"
                raise ProblemError(
                    f"does not divide the {what}, {whole}",
                    field=f"hints.fix.{name}",
                    value=value,
                    repair=f"Use one of {', '.join(map(str, divisors(whole)))}.",
                )
        modes = RECOMPUTE_MODES
        if fix.recompute is not None and fix.recompute not in modes:
            raise ProblemError(
                "no such mode",
                field="hints.fix.recompute",
                value=fix.recompute,
                repair=f"Use one of {', '.join(modes)}.",
            )

    def _shapes(self, devices: int) -> tuple[Shape, ...]:
        fix = self.problem.hints.fix
        batch = self.problem.training.global_batch
        found = []
        for pp in self.degrees:
            if pp > self.num_units or fix.pp not in (None, pp):
                continue
            for tp in self.degrees:
                if (devices // pp) % tp or fix.tp not in (None, tp) or not self.constrained.allows(pp, tp):
                    continue
                dp = devices // pp // tp
                if fix.dp not in (None, dp):
                    continue
                for count in self.micro_batches:
                    if (batch // count) % dp or fix.num_micro_batches not in (None, count):
                        continue
                    for virtual in self._virtuals(pp, count):
                        found.append(
                            Shape(pp=pp, tp=tp, dp=dp, num_micro_batches=count, samples=batch // count, virtual=virtual)
                        )
        return tuple(found)

    def _virtuals(self, pp: int, num_micro_batches: int) -> list[int]:
        fix = self.problem.hints.fix
        allowed = [1]
        if self.constrained.stages:
            return allowed if fix.virtual_stages in (None, 1) else []
        if pp > 1 and num_micro_batches % pp == 0 and fix.schedule in (None, "interleaved"):
            allowed += [v for v in range(2, MAX_VIRTUAL_STAGES + 1) if pp * v <= self.num_units]
        return [v for v in allowed if fix.virtual_stages in (None, v)]

    def _refuse(self, devices: int) -> None:
        batch = self.problem.training.global_batch
        self.constrained.explain(self.degrees)
        fixed = {k: getattr(self.problem.hints.fix, k) for k in ("dp", "tp", "pp", "num_micro_batches")}
        named = {k: v for k, v in fixed.items() if v is not None}
        if named:
            raise ProblemError(
                f"no plan on {devices} devices with a global batch of {batch} obeys these together",
                field="hints.fix",
                value=named,
                repair="Make dp * tp * pp the number of devices and the global batch a multiple of "
                "dp * num_micro_batches, or leave one of them out.",
            )
        raise ProblemError(
            "the batch cannot be spread over the devices",
            field="training.global_batch",
            value=batch,
            repair=f"Use a multiple of a divisor of {devices}.",
        )

    @functools.cached_property
    def _shape_index(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """Decided prefix of (pp, tp, micro-batches) -> the values that may follow."""
        found: dict[tuple[int, ...], dict[int, None]] = {}
        for shape in self.shapes:
            row = self.shape_values(shape)
            for depth in range(len(row)):
                found.setdefault(row[:depth], {})[row[depth]] = None
        return {prefix: tuple(values) for prefix, values in found.items()}

    def shape_values(self, shape: Shape) -> Values:
        """The first four values, which decide `shape`."""
        return (
            self.degrees.index(shape.pp),
            self.degrees.index(shape.tp),
            self.micro_batches.index(shape.num_micro_batches),
            shape.virtual - 1,
        )

    def shape(self, values: Sequence[int]) -> Shape:
        """The shape that the first four values decide."""
        pp, tp = self.degrees[values[0]], self.degrees[values[1]]
        count = self.micro_batches[values[2]]
        return Shape(
            pp=pp,
            tp=tp,
            dp=self.problem.cluster.num_devices // pp // tp,
            num_micro_batches=count,
            samples=self.problem.training.global_batch // count,
            virtual=values[3] + 1,
        )

    def legal(self, prefix: Sequence[int]) -> Mask:
        """Which values of slot `len(prefix)` may follow; at least one always may."""
        slot = self.slots[len(prefix)]
        mask = np.zeros(slot.num_values, dtype=np.bool_)
        if slot.kind in ("pp", "tp", "micro_batches", "virtual"):
            mask[list(self._shape_index[tuple(prefix)])] = True
            return mask
        shape = self.shape(prefix)
        if slot.kind == "cut":
            if slot.index >= shape.num_chunks - 1:
                mask[0] = True
            else:
                mask[: len(self.cut_candidates(prefix, slot.index, shape))] = True
            return mask
        if slot.kind == "recompute":
            return self._legal_recompute(slot, shape, prefix, mask)
        if slot.kind == "zero":
            fixed = self.problem.hints.fix.zero
            mask[:] = shape.dp > 1
            mask[0] = True
            if fixed is not None and shape.dp > 1:
                mask[:] = False
                mask[fixed] = True
            return mask
        return self._legal_signature(slot, prefix, shape)

    def _legal_recompute(self, slot: Slot, shape: Shape, prefix: Sequence[int], mask: Mask) -> Mask:
        if slot.index >= shape.pp:
            mask[0] = True
            return mask
        mask[:] = True
        mask[1] = self.evaluator.has_core
        fixed = self.problem.hints.fix.recompute
        if fixed is not None:
            mask[:] = False
            mask[RECOMPUTE_MODES.index(fixed)] = True
        if not self.constrained.recomputes:
            return mask
        ends = [0, *self.cuts(prefix, shape.num_chunks - 1), self.num_units]
        chunks = range(slot.index, shape.num_chunks, shape.pp)
        return self.constrained.recompute([u for c in chunks for u in range(ends[c], ends[c + 1])], mask)

    def _legal_signature(self, slot: Slot, prefix: Sequence[int], shape: Shape) -> Mask:
        sizes = (shape.dp, shape.tp)
        outer = prefix[-1] if slot.index == 1 else -1
        key = (slot.unit_type, slot.group, slot.index, outer, *sizes, shape.samples)
        if key not in self._legal:
            self._legal[key] = self._signature_mask(slot, outer, sizes, shape.samples)
        return self._legal[key]

    def _signature_mask(self, slot: Slot, outer: int, sizes: tuple[int, int], samples: int) -> Mask:
        unit = self.linkage.types[slot.unit_type]
        group = unit.groups[slot.group]
        table = unit.signatures[group.leader]
        mask = np.zeros(slot.num_values, dtype=np.bool_)
        if sizes[slot.index] == 1:
            mask[whole_signature(table)] = True
            return mask
        tables = self.evaluator.tables
        first = int(tables.spans[slot.unit_type])
        axes = np.array(sizes, dtype=np.float64)
        for value in range(len(table)):
            chosen = np.full((2,), -1, dtype=np.int64)
            fits = True
            for k, member in enumerate(group.members):
                chosen[slot.index] = group.assignment[value][k]
                if slot.index == 1:
                    chosen[0] = group.assignment[outer][k]
                fits = fits and bool(
                    divides(
                        tables.operators,
                        tables.operands,
                        tables.tensors,
                        tables.signatures,
                        tables.places,
                        first + member,
                        chosen,
                        axes,
                        samples,
                    )
                )
            mask[value] = fits
        allowed = self.constrained.signatures(slot.unit_type, group, AXES[slot.index], mask)
        return allowed if allowed.any() else mask

    def operator(self, unit_type: int, offset: int) -> Operator:
        """An operator of the representative unit of a type."""
        return self.problem.graph.operators[self.linkage.blocks.representative(unit_type).start + offset]

    def is_view(self, name: str) -> bool:
        """Whether a parameter view makes the tensor."""
        index = self.problem.graph.producer.get(name)
        return index is not None and self.problem.graph.operators[index].is_view

    def operator_name(self, unit_type: int, offset: int) -> str:
        """Name of an operator in the representative unit of a type."""
        return self.operator(unit_type, offset).name

    # -- cuts ----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def cumulative_weight(self) -> npt.NDArray[np.float64]:
        """[units + 1] weight of all units before each."""
        return np.concatenate([[0.0], np.cumsum(self.evaluator.unit_weights)])

    def cut_candidates(self, prefix: Sequence[int], chunk: int, shape: Shape) -> Ints:
        """Ends of `chunk` (units before it), the one nearest to an even share of what is left first."""
        start = self.cuts(prefix, chunk)[-1] if chunk else 0
        return self._candidates(start, chunk, shape.num_chunks)

    def _candidates(self, start: int, chunk: int, num_chunks: int) -> Ints:
        low, high = self.constrained.window(chunk, num_chunks)
        low, left = max(low, start + 1), num_chunks - chunk
        key = (start, low, high, left)
        if key not in self._targets:
            ends = np.arange(low, high + 1, dtype=np.int64)
            total = self.cumulative_weight
            target = total[start] + (total[-1] - total[start]) / left
            order = np.lexsort((ends, np.abs(total[ends] - target)))
            self._targets[key] = ends[order]
        return self._targets[key]

    def cuts(self, values: Sequence[int], num_cuts: int) -> list[int]:
        """The first `num_cuts` chunk ends that `values` decide."""
        shape = self.shape(values)
        ends: list[int] = []
        start = 0
        for chunk in range(num_cuts):
            start = int(self._candidates(start, chunk, shape.num_chunks)[values[self.first_cut + chunk]])
            ends.append(start)
        return ends

    # -- from values to choices ----------------------------------------------------------------------------------

    def even_values(self, shape: Shape, *, recompute: str, zero: int) -> Values:
        """The prefix, up to the signatures, of a plan with even cuts and one recompute mode, as constraints allow."""
        mode = RECOMPUTE_MODES.index(recompute)
        values = [*self.shape_values(shape)]
        for slot in self.slots[4 : self.first_signature]:
            if slot.kind == "recompute" and slot.index < shape.pp:
                legal = self.legal(values) if self.constrained.recomputes else None
                values.append(mode if legal is None or legal[mode] else int(np.flatnonzero(legal)[0]))
            elif slot.kind == "zero":
                values.append(zero if shape.dp > 1 else 0)
            else:
                values.append(0)
        return tuple(values)

    def signatures(self, values: Sequence[int]) -> Ints:
        """[operator rows, axes] signature of every operator; -1 where `values` has not decided yet."""
        chosen = blank(self.evaluator, len(AXES))
        for position in range(self.first_signature, len(values)):
            self.assign(chosen, self.slots[position], values[position])
        return chosen

    def assign(self, chosen: Ints, slot: Slot, value: int) -> None:
        """Writes the signatures of a whole group."""
        members, assignment = self.group_rows[slot.unit_type, slot.group]
        chosen[members, slot.index] = assignment[value]

    @functools.cached_property
    def group_rows(self) -> dict[tuple[int, int], tuple[Ints, Ints]]:
        """(unit type, group) -> operator rows of its members, and [values, members] their signatures."""
        spans = self.evaluator.tables.spans
        return {
            (unit_type, number): (
                np.array(group.members, dtype=np.int64) + int(spans[unit_type]),
                np.array(group.assignment, dtype=np.int64),
            )
            for unit_type, unit in enumerate(self.linkage.types)
            for number, group in enumerate(unit.groups)
        }

    def choice(self, values: Sequence[int]) -> Choice:
        """What `values` decide, all but the signatures complete."""
        return self.choice_of(values, self.signatures(values))

    def choice_of(self, values: Sequence[int], signatures: Ints) -> Choice:
        """The choice with the given signatures, [operator rows, axes]."""
        chosen = by_type(self.evaluator, signatures)
        shape = self.shape(values)
        ends = [0, *self.cuts(values, shape.num_chunks - 1), self.num_units]
        units = self.linkage.blocks.units
        spans = self.evaluator.tables.spans
        chunks = []
        for chunk in range(shape.num_chunks):
            mode = RECOMPUTE_MODES[values[self.first_recompute + chunk % shape.pp]]
            segments = []
            for number in range(ends[chunk], ends[chunk + 1]):
                kind = units[number].type
                segments.append(
                    Segment(
                        unit=number,
                        first=int(spans[kind]),
                        last=int(spans[kind + 1]),
                        chosen=chosen[kind],
                        recomputed=self.evaluator.masks(kind)[mode],
                    )
                )
            chunks.append(tuple(segments))
        return Choice(
            layout=self.evaluator.layout((shape.dp, shape.tp), shape.pp),
            num_micro_batches=shape.num_micro_batches,
            samples=shape.samples,
            kind="interleaved" if shape.virtual > 1 else self.schedule,
            chunks=tuple(chunks),
            zero=values[self.zero_slot],
            zero_axes=np.array([shape.dp > 1, False]),
        )

    def price(self, values: Ints) -> npt.NDArray[np.float64]:
        """Prices complete plans, [n, slots], in one compiled call.

        Returns:
            [n, 2] seconds of a step, and the largest share of its memory by which a device overflows (at most 0 where
            the plan fits); the floats of `Evaluator.evaluate`.
        """
        out = np.empty((len(values), 2))
        from automap.price.batch import price_many  # who prices one plan need not load it

        price_many(self.evaluator.tables.arrays, self._arrays, np.ascontiguousarray(values, dtype=np.int64), out)
        return out

    @functools.cached_property
    def _arrays(self) -> SpaceArrays:
        from automap.price.batch import compile_space

        return compile_space(self)

    def random(self, rng: np.random.Generator) -> Values:
        """A plan drawn by uniform choices among the legal values of each slot."""
        values: list[int] = []
        while len(values) < len(self.slots):
            legal = np.flatnonzero(self.legal(values))
            values.append(int(legal[rng.integers(len(legal))]) if len(legal) > 1 else int(legal[0]))
        return tuple(values)

    def repair(self, values: Sequence[int]) -> Values:
        """The nearest legal plan: each value kept if it is legal behind those before it, else the first legal one."""
        fixed: list[int] = []
        for value in values:
            legal = self.legal(fixed)
            fixed.append(int(value) if value < len(legal) and legal[value] else int(np.flatnonzero(legal)[0]))
        return tuple(fixed)

    def decode(self, values: Sequence[int]) -> Plan:
        """The plan that `values` decide, not yet priced."""
        return to_plan(self.choice(values), self.evaluator)

    def encode(self, plan: Plan) -> Values | None:
        """The values that decode to `plan`, or None if it lies outside the space.

        Raises:
            PlanError: the plan is malformed or for another problem.
        """
        choice = to_choice(plan, self.evaluator)
        meshes = {tuple(int(s) for s in stage.axes) for stage in choice.layout.stages}
        if len(meshes) != 1 or len(next(iter(meshes))) != len(AXES):
            return None
        dp, tp = next(iter(meshes))
        pp = len(choice.layout.stages)
        shape = Shape(
            pp=pp,
            tp=tp,
            dp=dp,
            num_micro_batches=choice.num_micro_batches,
            samples=choice.samples,
            virtual=len(choice.chunks) // pp,
        )
        if shape not in self.shapes or choice.layout is not self.evaluator.layout((dp, tp), pp):
            return None
        values: list[int] = [*self.shape_values(shape)]
        start = 0
        for slot in self.slots[4 : self.first_signature]:
            if slot.kind == "cut" and slot.index < shape.num_chunks - 1:
                end = start + len(choice.chunks[slot.index])
                candidates = self._candidates(start, slot.index, shape.num_chunks).tolist()
                if end not in candidates:
                    return None
                values.append(candidates.index(end))
                start = end
            elif slot.kind == "recompute" and slot.index < pp:
                values.append(self._mode(choice, slot.index))
            elif slot.kind == "zero":
                values.append(choice.zero)
            else:
                values.append(0)
        chosen: dict[int, Ints] = {}
        for segment in (s for chunk in choice.chunks for s in chunk):
            chosen.setdefault(self.linkage.blocks.units[segment.unit].type, segment.chosen)
        for slot in self.slots[self.first_signature :]:
            group = self.linkage.types[slot.unit_type].groups[slot.group]
            values.append(int(chosen[slot.unit_type][group.leader, slot.index]))
        found = self.repair(values)
        return found if found == tuple(values) and same_choice(self.choice(found), choice) else None

    def _mode(self, choice: Choice, rank: int) -> int:
        """The first recompute mode that all chunks of a rank follow; 0 where none does."""
        segments = [s for chunk in choice.chunks[rank :: len(choice.layout.stages)] for s in chunk]
        types = [self.linkage.blocks.units[s.unit].type for s in segments]
        for mode, name in enumerate(RECOMPUTE_MODES):
            if all(
                np.array_equal(s.recomputed, self.evaluator.masks(t)[name])
                for s, t in zip(segments, types, strict=True)
            ):
                return mode
        return 0

    def moves(self, values: Sequence[int], rng: np.random.Generator, count: int) -> list[Values]:
        """`count` neighbours: one free decision changed, what follows repaired."""
        free = [i for i in range(len(self.slots)) if self.legal(values[:i]).sum() > 1]
        found = []
        for _ in range(count if free else 0):
            at = free[int(rng.integers(len(free)))]
            legal = np.flatnonzero(self.legal(values[:at]))
            others = legal[legal != values[at]]
            found.append(self.repair((*values[:at], int(others[rng.integers(len(others))]), *values[at + 1 :])))
        return found

    @functools.cached_property
    def decades(self) -> float:
        """log10 of the number of plans; constraints on recomputation are not counted off."""
        return self.count_decades()

    def count_decades(self, *, limit: int | None = None, groups: Collection[tuple[int, int]] | None = None) -> float:
        """log10 of the number of plans with some decisions pruned.

        Args:
            limit: of every slot only the values below it are counted; None = all.
            groups: (unit type, group) whose signatures are decided, the others being forced; None = all.
        """
        fix = self.problem.hints.fix
        modes = 1 if fix.recompute is not None else 3 if self.evaluator.has_core else 2
        total = -math.inf
        for shape in self.shapes:
            if limit is not None and max(self.shape_values(shape)) >= limit:
                continue
            here = self._cut_decades(shape.num_chunks, limit) + shape.pp * math.log10(modes)
            here += math.log10(4 if shape.dp > 1 and fix.zero is None else 1)
            for position in range(self.first_signature, len(self.slots), len(AXES)):
                slot, inner = self.slots[position], self.slots[position + 1]
                if groups is not None and (slot.unit_type, slot.group) not in groups:
                    continue
                sizes = (shape.dp, shape.tp)
                outer = np.flatnonzero(self._cached_mask(slot, -1, sizes, shape.samples))
                here += math.log10(
                    sum(int(self._cached_mask(inner, int(v), sizes, shape.samples).sum()) for v in outer)
                )
            high, low = max(total, here), min(total, here)
            total = high + (math.log10(1 + 10 ** (low - high)) if low > -math.inf else 0.0)
        return total

    def _cut_decades(self, num_chunks: int, limit: int | None) -> float:
        """log10 of the number of ways to cut."""
        if not self.constrained.stages and (limit is None or limit >= self.num_units):
            return math.log10(math.comb(self.num_units - 1, num_chunks - 1))
        key = (num_chunks, limit)
        if key not in self._ways:
            scale = 0.0
            # ways[start]: how the chunks behind may be cut when the next one begins at `start`, times 10^-scale.
            ways = np.ones(self.num_units + 1)
            for chunk in range(num_chunks - 2, -1, -1):
                fewer = np.zeros(self.num_units + 1)
                starts = range(chunk, self.num_units - (num_chunks - 1 - chunk)) if chunk else [0]
                for start in starts:
                    fewer[start] = ways[self._candidates(start, chunk, num_chunks)[:limit]].sum()
                scale += math.log10(fewer.max())
                ways = fewer / fewer.max()
            self._ways[key] = scale + math.log10(ways[0])
        return self._ways[key]

    def _cached_mask(self, slot: Slot, outer: int, sizes: tuple[int, int], samples: int) -> Mask:
        key = (slot.unit_type, slot.group, slot.index, outer, *sizes, samples)
        if key not in self._legal:
            self._legal[key] = self._signature_mask(slot, outer, sizes, samples)
        return self._legal[key]
