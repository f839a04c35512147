"""Unit rows: the units of a choice whose signatures are still open, equal ones in equal surroundings as one row.

What differs between rows is told apart before any signature is known: a unit's type, the type before it, whether it
opens a chunk, what it recomputes, and its pipeline rank where ranks differ. Units: seconds, bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from automap.price.evaluator import Evaluator
from automap.price.kernels.collectives import SUMMED
from automap.price.kernels.unit_workspace import new_sharded
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.outcome import Outcome
from ir.factors import BROADCAST, PARTIAL

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitRow:
    """Equal units in equal surroundings."""

    unit_type: int
    before: int
    """Type of the unit before it, or -1."""
    opens: bool
    """Whether it is the first of its chunk."""
    rank: int
    """Pipeline rank; 0 where all are alike."""
    segment: Segment
    """One of the units; its signatures are not read."""


class UnitRows:
    """The rows of `lowered`.

    `chosen` is everywhere [operator rows, axes]: the signature of each operator of each unit type.

    Attributes:
        rows: see `UnitRow`.
        parts: [parts, 3] chunk, row, how often it follows itself.
    """

    def __init__(self, evaluator: Evaluator, lowered: LoweredPlan) -> None:
        self.evaluator, self.lowered = evaluator, lowered
        rows: dict[tuple[object, ...], UnitRow] = {}
        parts: list[tuple[int, int, int]] = []
        whole: list[bool] = []
        numbers: dict[tuple[object, ...], int] = {}
        before = -1
        for chunk, segments in enumerate(lowered.chunks):
            rank = 0 if lowered.is_uniform else chunk % len(lowered.layout.stages)
            for position, segment in enumerate(segments):
                unit_type = evaluator.blocks.units[segment.unit].type
                key = (unit_type, before, position == 0, segment.recomputed.tobytes(), rank)
                if key not in rows:
                    numbers[key] = len(rows)
                    rows[key] = UnitRow(
                        unit_type=unit_type, before=before, opens=position == 0, rank=rank, segment=segment
                    )
                if parts and parts[-1][:2] == (chunk, numbers[key]):
                    parts[-1] = (chunk, numbers[key], parts[-1][2] + 1)
                else:
                    parts.append((chunk, numbers[key], 1))
                    whole.append(bool(segment.recomputed.all()))
                before = unit_type
        self.rows = tuple(rows.values())
        self.parts = np.array(parts, dtype=np.int64)
        self._whole = np.array(whole, dtype=np.bool_)
        self._ties = evaluator.tied.ties(lowered)

    def costs(self, chosen: Ints) -> Floats:
        """[rows, C_COUNT]"""
        evaluator, lowered = self.evaluator, self.lowered
        sharded = new_sharded(evaluator.tables.arrays, len(lowered.zero_axes))
        found = []
        for row in self.rows:
            segment = replace(row.segment, chosen=chosen[row.segment.first : row.segment.last])
            found.append(
                evaluator.unit_row(
                    segment,
                    row.rank,
                    lowered.layout,
                    self._incoming(row, chosen),
                    float(lowered.rank_samples[row.rank]),
                    lowered.zero_axes,
                    int(evaluator.tables.boundary_out[row.unit_type]),
                    sharded=sharded,
                )
            )
        return np.array(found)

    def _incoming(self, row: UnitRow, chosen: Ints) -> Ints:
        """[axes] placement of the tensor that crosses into a unit; a partial one is reduced before it is sent."""
        evaluator, axes = self.evaluator, len(self.lowered.zero_axes)
        if row.before < 0:
            return np.full(axes, BROADCAST, dtype=np.int64)
        first, last = (int(x) for x in evaluator.tables.spans[row.before : row.before + 2])
        maker = replace(row.segment, first=first, last=last, chosen=chosen[first:last])
        placement = evaluator.output_placement(maker, row.before, axes)
        if row.opens:
            placement[placement == PARTIAL] = SUMMED
        return placement

    def tied(self, chosen: Ints) -> Floats:
        """What `combine` needs of parameters that two units read."""
        return self.evaluator.tied.rows(self._ties, self.lowered.layout, self.lowered.zero_axes, chosen)

    def outcome(self, costs: Floats, tied: Floats, *, exact: bool) -> Outcome:
        """Time and memory of a step with these unit costs."""
        return self.evaluator.combine(self.lowered, costs, self.parts, self._whole, tied, exact=exact)
