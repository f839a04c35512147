"""Skeleton: a choice whose shape is decided, priced again and again while its signatures are being decided.

Equal units in equal surroundings share one row of costs; deciding the signatures of one unit type recomputes only
the rows that see it. Prices complete signatures to the same floats as `Evaluator.evaluate`. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from automap.price.evaluator import Choice, Evaluator, Floats, Ints, Outcome, Segment
from automap.price.kernels import C_COUNT
from ir.factors import BROADCAST, PARTIAL


@dataclass(frozen=True, kw_only=True)
class _Row:
    segment: Segment
    unit_type: int
    before: int
    rank: int
    first_of_chunk: bool
    boundary_row: int


class Skeleton:
    """Unit costs of `choice`, by row, for changing signatures."""

    def __init__(self, evaluator: Evaluator, choice: Choice) -> None:
        self.evaluator = evaluator
        self.choice = choice
        self.rows: list[_Row] = []
        parts: list[tuple[int, int, int]] = []
        whole: list[bool] = []
        seen: dict[tuple[object, ...], int] = {}
        before = -1
        num_ranks = len(choice.layout.stages)
        for number, segments in enumerate(choice.chunks):
            rank = number % num_ranks
            for position, segment in enumerate(segments):
                unit_type = evaluator.blocks.units[segment.unit].type
                key = (
                    before,
                    position == 0,
                    segment.first,
                    segment.recomputed.tobytes(),
                    0 if choice.layout.uniform else rank,
                )
                if key not in seen:
                    seen[key] = len(self.rows)
                    self.rows.append(
                        _Row(
                            segment=segment,
                            unit_type=unit_type,
                            before=before,
                            rank=rank,
                            first_of_chunk=position == 0,
                            boundary_row=int(evaluator.tables.boundary_out[unit_type]),
                        )
                    )
                row = seen[key]
                if parts and parts[-1][0] == number and parts[-1][1] == row:
                    parts[-1] = (number, row, parts[-1][2] + 1)
                else:
                    parts.append((number, row, 1))
                    whole.append(bool(segment.recomputed.all()))
                before = unit_type
        self.parts = np.array(parts, dtype=np.int64)
        self.whole = np.array(whole, dtype=np.bool_)
        self._homes = evaluator.tied_homes(choice)
        self._touched = [
            [i for i, row in enumerate(self.rows) if kind in (row.unit_type, row.before)]
            for kind in range(evaluator.blocks.num_types)
        ]

    def costs(self, chosen: Sequence[Ints]) -> Floats:
        """[rows, C_COUNT] under `chosen`, the signatures of each unit type (-1 = undecided)."""
        costs = np.empty((len(self.rows), C_COUNT))
        for index in range(len(self.rows)):
            costs[index] = self._row(index, chosen)
        return costs

    def update(self, costs: Floats, chosen: Sequence[Ints], unit_type: int) -> Floats:
        """`costs` after the signatures of one unit type have changed."""
        fresh: Floats = costs.copy()
        for index in self._touched[unit_type]:
            fresh[index] = self._row(index, chosen)
        return fresh

    def _row(self, index: int, chosen: Sequence[Ints]) -> Floats:
        row = self.rows[index]
        axes = len(self.choice.zero_axes)
        if row.before < 0:
            incoming: npt.NDArray[np.int64] = np.full(axes, BROADCAST, dtype=np.int64)
        else:
            incoming = self.evaluator.output_placement(row.before, chosen[row.before], axes)
            if row.first_of_chunk:
                incoming[incoming == PARTIAL] = BROADCAST
        return self.evaluator.unit_row(
            replace(row.segment, chosen=chosen[row.unit_type]),
            row.rank,
            self.choice.layout,
            incoming,
            self.choice.samples,
            self.choice.zero_axes,
            row.boundary_row,
        )

    def outcome(self, costs: Floats, chosen: Sequence[Ints], *, exact: bool) -> Outcome:
        """Time and memory of a step with these unit costs of these signatures."""
        tied = self.evaluator.tied_rows(self._homes, self.choice.layout, chosen)
        return self.evaluator.combine(self.choice, costs, self.parts, self.whole, tied, exact=exact)
