"""PlanSpace: the plans of a problem as a sequence of decisions with legal values.

Environments, exhaustive search and templates all use these decisions, so "optimum" has one meaning for every searcher.
A plan of the space has pp pipeline ranks with meshes that may differ in the outer axis alone
(`automap.space.mesh_shapes`), chunks that are cut between units, one level of recomputation for each rank, one ZeRO
stage, and one signature on each mesh axis for each linkage group of each unit type; equal units are decided once.
`values` is a tuple with one number for each slot (`automap.space.decisions`); a slot with a single legal value is
forced.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from automap.arrays import Floats, Ints
from automap.plan import Plan
from automap.price.evaluator import by_type
from automap.price.lowered_plan import LoweredPlan, same_lowered
from automap.price.plan_reader import lower_plan
from automap.price.plan_writer import to_plan
from automap.space.count import count_decades
from automap.space.decisions import DECISIONS, SHAPE_KINDS, Slot, Values
from automap.space.encode import values_of
from automap.space.shape import Shape
from automap.space.stepping import SteppedSpace

__all__ = ["SHAPE_KINDS", "Ints", "PlanSpace", "Slot", "Values"]


class PlanSpace(SteppedSpace):
    """The plans of a problem; see `SpaceOutline` for its attributes."""

    @functools.cached_property
    def chosen(self) -> dict[tuple[Any, ...], Any]:
        """Cache of the signatures that `automap.space.templates` has chosen on each axis, of units and of models."""
        return {}

    @functools.cached_property
    def listed(self) -> list[tuple[Shape, Values]]:
        """The templates that `automap.space.templates` has listed so far."""
        return []

    listing: Iterator[tuple[Shape, Values]] | None = None
    """Iterator over the templates after these; None before the first one."""

    @functools.cached_property
    def priced(self) -> list[tuple[Ints, Floats]]:
        """Templates that `automap.bounds.priced_templates` has priced: their values, [n, slots], and prices, [n, 2]."""
        return []

    def even_values(self, shape: Shape, *, recompute: str, zero: int, stages: Sequence[int] = ()) -> Values:
        """The values before the signatures of a plan with even cuts and one recompute mode, as far as constraints allow
        these.

        Args:
            shape: shape of the plan.
            recompute: the recompute mode.
            zero: ZeRO stage, if there are replicas.
            stages: values of the slots of schedule, order and devices; those left out are 0.
        """
        level = self.levels.of_mode(recompute)
        values = [*self.meshes.values(shape), *stages]
        values += [0] * (self.first.recompute - len(values))
        for _ in range(shape.pp):
            legal = self.legal(values) if self.constrained.recomputes else None
            values.append(level if legal is None or legal[level] else int(np.flatnonzero(legal)[0]))
        values += [0] * (self.first.zero - len(values))
        values.append(zero if shape.replicas > 1 else 0)
        return (*values, *[0] * (self.first.signature - len(values)))

    def lowered(self, values: Sequence[int]) -> LoweredPlan:
        """The lowered plan of `values`; signatures without a value are undecided."""
        return self.choice_of(values, self.signatures(values))

    def choice_of(self, values: Sequence[int], signatures: Ints) -> LoweredPlan:
        """The lowered plan with the given signatures, [operator rows, axes]."""
        chosen = by_type(self.evaluator, signatures)
        shape = self.shape(values)
        ends = [0, *self.cuts(values, shape.num_chunks - 1), self.num_units]
        evaluator, units, chunks = self.evaluator, self.linkage.blocks.units, []
        for chunk, (begin, end) in enumerate(itertools.pairwise(ends)):
            level = values[self.first.recompute + chunk % shape.pp]
            modes = [self.levels.mode(level, place, end - begin) for place in range(end - begin)]
            masks = [evaluator.masks(units[begin + place].type)[mode] for place, mode in enumerate(modes)]
            chunks.append(tuple(evaluator.segment(begin + i, chosen, mask) for i, mask in enumerate(masks)))
        fields: dict[str, Any] = {"zero_axes": self.zero_axes(shape)}
        for number, decision in enumerate(DECISIONS):
            fields.update(decision.write(self, self.of_kind(values, number)))
        if shape.virtual > 1:
            fields["kind"] = "interleaved"
        is_unlike = any(values[self.first.devices : self.first.shares]) or shape.samples % shape.dp != 0
        is_unlike = is_unlike or not self.meshes.is_even(shape)
        return LoweredPlan(
            axes=self.axes,
            layout=self.layout(values),
            num_micro_batches=shape.num_micro_batches,
            samples=shape.samples,
            chunks=tuple(chunks),
            spread_over=(0,) * shape.pp if is_unlike else (),
            shares=self.batch_shares(values),
            **fields,
        )

    def decode(self, values: Sequence[int]) -> Plan:
        """The plan document of `values`, without estimate."""
        return to_plan(self.lowered(values), self.evaluator)

    def encode(self, plan: Plan) -> Values | None:
        """The values that decode to `plan`, or None if it lies outside the space.

        Raises:
            PlanError: the plan is malformed or for another problem.
        """
        lowered = lower_plan(plan, self.evaluator, self.axes)
        found = values_of(self, lowered) if plan.sync.kind == "synchronous" else None
        return found if found is not None and same_lowered(self.lowered(found), lowered) else None

    @functools.cached_property
    def decades(self) -> float:
        """log10 of the number of plans; constraints on recomputation are ignored."""
        return count_decades(self)
