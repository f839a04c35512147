"""The busiest pipeline rank of a plan: its units, what it sends, and what a change of the plan would gain.

`automap.price.explain` puts what is found here into sentences. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from automap.amounts import in_seconds
from automap.arrays import Ints
from automap.group_links import group_link
from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import Record
from automap.price.kernels.placements import divides
from automap.price.local_sgd import averaged
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.outcome import Outcome

WORTH = 0.005
"""Share of the step that a change must save to be named. Chosen: less is within the error of any estimate."""


@dataclass(frozen=True, kw_only=True)
class BottleneckUnit:
    """Units of the busiest rank that are equal and have equal costs."""

    segment: Segment
    """Operators of one of them."""
    incoming: Ints
    """[axes] placement of the tensor that crosses into it."""
    cost: Record
    """Cost of one of them for one micro-batch, see `UnitCostRow`."""
    times: int
    """Number of these units."""
    sends: bool
    """Whether one of them ends a chunk, so that its result is sent to another rank."""


class Bottleneck:
    """The busiest pipeline rank of a plan.

    Attributes:
        lowered: the plan.
        evaluator: evaluator of its problem.
        outcome: time and memory of the plan, by the evaluator.
        rank: the busiest pipeline rank.
        result: its row of `RankCostRow`.
        stage: its devices.
        samples: samples of a micro-batch that it is priced with.
        settings: see `SettingsRow`.
        micro_batches: micro-batches of a step.
        units: its units, one entry for all equal ones.
    """

    def __init__(self, lowered: LoweredPlan, evaluator: Evaluator, outcome: Outcome) -> None:
        self.lowered, self.evaluator, self.outcome = lowered, evaluator, outcome
        self.rank = outcome.busiest
        self.result = outcome.ranks[self.rank]
        self.stage = lowered.layout.stages[self.rank]
        self.samples = float(lowered.rank_samples[self.rank])
        self.settings = evaluator.settings(lowered.zero)
        self.micro_batches = lowered.num_micro_batches
        self._workspace = evaluator.new_workspace(len(lowered.stages[self.rank].axes))
        self.units = tuple(self._units())
        self._said: set[str] = set()

    def _units(self) -> Iterator[BottleneckUnit]:
        """The distinct units of the rank, see `units`."""
        lowered, evaluator = self.lowered, self.evaluator
        num_ranks = len(lowered.layout.stages)
        found: dict[tuple[object, ...], list[tuple[Segment, Ints, bool]]] = {}
        for number, segment, incoming in evaluator.surroundings(lowered):
            if number % num_ranks == self.rank:
                arrays = (segment.chosen, segment.recomputed, incoming)
                key = (segment.first, segment.last, *(array.tobytes() for array in arrays))
                sends = number < len(lowered.chunks) - 1 and segment is lowered.chunks[number][-1]
                found.setdefault(key, []).append((segment, incoming.copy(), sends))
        for equal in found.values():
            segment, incoming, _ = equal[0]
            yield BottleneckUnit(
                segment=segment,
                incoming=incoming,
                cost=self.cost(segment, incoming),
                times=len(equal),
                sends=any(sends for _, _, sends in equal),
            )

    def cost(self, segment: Segment, incoming: Ints) -> Record:
        """Cost of a segment for one micro-batch, see `UnitCostRow`."""
        return self.evaluator.unit_cost(segment, incoming, self.lowered.stages[self.rank], self._workspace)

    def total(self, *fields: str, index: int | None = None) -> float:
        """Sum of fields of `UnitCostRow` over all units of the rank, for one micro-batch.

        Args:
            fields: names of the fields.
            index: element of the fields that is added up, if they are arrays.
        """
        return sum(
            unit.times * float(unit.cost[name] if index is None else unit.cost[name][index])
            for unit in self.units
            for name in fields
        )

    def reduced(self, axis: int) -> float:
        """Local elements of gradients that are reduced over an axis once a step."""
        if self.lowered.zero == 0:
            return self._once("reduced", axis)
        return 0.0 if self.lowered.zero >= 2 and self.lowered.zero_axes[axis] else self._once("scattered", axis)

    def gathered(self, axis: int) -> float:
        """Local elements of weights that are gathered over an axis once a step, after the optimizer."""
        if self.lowered.zero not in (1, 2):
            return 0.0
        return self._once("gathered", axis) - self._once("gathered_frozen", axis)

    def _once(self, name: str, axis: int) -> float:
        """Sum of a field of the units at an axis, where a parameter that two units read counts once."""
        elements = self.total(name, index=axis)
        for tie in self.evaluator.tied.rows(self.lowered):
            if tie.rank == tie.other_rank == self.rank:
                elements -= float(tie.excess[name][axis])
        return elements

    def where(self, axis: int) -> str:
        """Text that names an axis, its ranks and their link; the caller adds a rate and closes the parenthesis."""
        problem, stage = self.evaluator.problem, self.stage
        cluster = problem.cluster
        grid = np.array(stage.devices).reshape([int(s) for s in stage.axes])
        group = np.moveaxis(grid, axis, -1).reshape(-1, int(stage.axes[axis]))[0].tolist()
        link = group_link(cluster, group)
        host = cluster.hosts[cluster.node_of[group[0]]]
        kind = host.intra_node_link if link.hosts == 1 else host.inter_node_link
        over = "links as measured" if cluster.bandwidth_GBps is not None else kind
        hosts = "inside a host" if link.hosts == 1 else f"on {link.hosts} hosts"
        return f"{self.lowered.axes[axis]} ({link.size} ranks {hosts}, {over}"

    def gain(self, lowered: LoweredPlan | None, what: str) -> str:
        """A sentence about the time that a change of the plan saves; empty where it does not help or was named before.

        Args:
            lowered: the changed plan, or None if the change is not possible.
            what: the change, as the subject of the sentence.
        """
        if lowered is None or what in self._said:
            return ""
        self._said.add(what)
        mine = self.outcome.averaging
        if mine is None:
            outcome = self.evaluator.evaluate(lowered)
        else:
            outcome = averaged(lowered, self.evaluator, mine.sync, mine.axis)
        saved = 1.0 - outcome.step_time_s / self.outcome.step_time_s
        if saved < WORTH:
            return ""
        if not outcome.fits:
            return f" {what} would save {saved:.0%} but overflow the memory by {outcome.overflow:.0%}."
        return f" {what} would make the step {in_seconds(outcome.step_time_s)}, {saved:.1%} less."

    def batches(self, factor: float) -> LoweredPlan | None:
        """The same plan with `factor` times as many micro-batches; None where the samples do not divide, or where
        devices have unequal shares of them."""
        lowered = self.lowered
        count, samples = lowered.num_micro_batches * factor, lowered.samples / factor
        ranks = len(lowered.layout.stages)
        if count != int(count) or samples != int(samples) or count < 1 or lowered.most:
            return None
        if lowered.kind == "interleaved" and int(count) % ranks:
            return None
        return self._legal(replace(lowered, num_micro_batches=int(count), samples=int(samples)))

    def _legal(self, lowered: LoweredPlan) -> LoweredPlan | None:
        """The plan, or None if a dim cannot be divided evenly over the ranks of a mesh axis."""
        arrays = self.evaluator.tables.arrays
        seen, samples = set(), int(lowered.rank_samples[self.rank])
        for segments in lowered.chunks:
            for segment in segments:
                if (segment.first, segment.chosen.tobytes()) in seen:
                    continue
                seen.add((segment.first, segment.chosen.tobytes()))
                for k in range(segment.last - segment.first):
                    chosen = np.ascontiguousarray(segment.chosen[k])
                    if not divides(arrays, segment.first + k, chosen, self.stage.axes, samples):
                        return None
        return lowered

    def without_recomputation(self) -> LoweredPlan:
        """The same plan without recomputation."""
        chunks = tuple(
            tuple(replace(s, recomputed=np.zeros_like(s.recomputed)) for s in segments)
            for segments in self.lowered.chunks
        )
        return replace(self.lowered, chunks=chunks)
