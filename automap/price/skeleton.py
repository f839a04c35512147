"""Skeleton: a choice whose shape is decided, priced again and again while its signatures are being decided.

Equal units in equal surroundings share one row of costs; deciding the signatures of one unit type recomputes only
the rows that see it. Prices complete signatures to the same floats as `Evaluator.evaluate`. Units: seconds, bytes.
"""

from __future__ import annotations

import numpy as np

from automap.order import KINDS
from automap.price.ahead import look_ahead, row_costs
from automap.price.evaluator import Choice, Evaluator, Floats, Ints, Outcome
from automap.price.vectors import C_COUNT


class Skeleton:
    """Unit costs of `choice`, by row, for changing signatures.

    `chosen` is everywhere [operator rows, axes]: the signature of each operator of each unit type, -1 = undecided.
    """

    def __init__(self, evaluator: Evaluator, choice: Choice) -> None:
        self.evaluator = evaluator
        self.choice = choice
        rows: list[list[int]] = []
        masks: list[np.ndarray] = []
        parts: list[tuple[int, int, int]] = []
        whole: list[bool] = []
        seen: dict[tuple[object, ...], int] = {}
        before = -1
        filled = 0
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
                    seen[key] = len(rows)
                    boundary = int(evaluator.tables.boundary_out[unit_type])
                    place = 0 if choice.layout.uniform else rank
                    rows.append(
                        [segment.first, segment.last, unit_type, before, place, int(position == 0), boundary, filled]
                    )
                    masks.append(segment.recomputed)
                    filled += len(segment.recomputed)
                row = seen[key]
                if parts and parts[-1][0] == number and parts[-1][1] == row:
                    parts[-1] = (number, row, parts[-1][2] + 1)
                else:
                    parts.append((number, row, 1))
                    whole.append(bool(segment.recomputed.all()))
                before = unit_type
        self.rows = np.array(rows, dtype=np.int64)
        self.masks = np.concatenate(masks)
        self.parts = np.array(parts, dtype=np.int64)
        self.whole = np.array(whole, dtype=np.bool_)
        self._homes = evaluator.tied_homes(choice)
        self._all = np.arange(len(rows), dtype=np.int64)
        # A change inside a unit type is seen by its own rows; by those behind it only if what crosses out changes.
        self._own = [
            np.array([i for i, row in enumerate(rows) if row[2] == kind], dtype=np.int64)
            for kind in range(evaluator.blocks.num_types)
        ]
        self._seen = [
            np.array([i for i, row in enumerate(rows) if kind in (row[2], row[3])], dtype=np.int64)
            for kind in range(evaluator.blocks.num_types)
        ]
        layout = choice.layout
        *self._stage, self._capacity = evaluator.stage_arrays(layout)
        self._settings = evaluator.settings(choice.zero)
        self._fixed = (evaluator.tables.arrays, evaluator.makers, self.rows, self.masks)

    def costs(self, chosen: Ints) -> Floats:
        """[rows, C_COUNT] under `chosen`."""
        costs = np.empty((len(self.rows), C_COUNT))
        self._compute(chosen, self._all, costs)
        return costs

    def update(self, costs: Floats, chosen: Ints, unit_type: int) -> None:
        """Brings `costs` up to date after the signatures of one unit type have changed."""
        self._compute(chosen, self._seen[unit_type], costs)

    def _compute(self, chosen: Ints, which: Ints, out: Floats) -> None:
        choice = self.choice
        row_costs(*self._fixed, chosen, which, *self._stage, choice.zero_axes, float(choice.samples), out)

    def outcome(self, costs: Floats, chosen: Ints, *, exact: bool) -> Outcome:
        """Time and memory of a step with these unit costs of these signatures."""
        tied = self.evaluator.tied_rows(self._homes, self.choice.layout, self.choice.zero_axes, chosen)
        return self.evaluator.combine(self.choice, costs, self.parts, self.whole, tied, exact=exact)

    def look_ahead(
        self, costs: Floats, chosen: Ints, unit_type: int, members: Ints, candidates: Ints, axis: int
    ) -> tuple[Floats, Floats]:
        """What each candidate assignment of a group would lead to.

        Args:
            costs: [rows, C_COUNT] under `chosen`.
            chosen: signatures so far.
            unit_type: of the group.
            members: operator rows of the group.
            candidates: [values, members] signatures on the axis.
            axis: mesh axis.

        Returns:
            [values, 2] lower bounds on seconds and overflow, and [values, rows, C_COUNT] costs.
        """
        choice = self.choice
        count = len(candidates)
        crosses = bool((members == self.evaluator.makers[unit_type, 0]).any())
        fresh = np.empty((count, *costs.shape))
        bounds = np.empty((count, 2))
        look_ahead(
            *self._fixed,
            chosen,
            (self._seen if crosses else self._own)[unit_type],
            *self._stage,
            choice.zero_axes,
            float(choice.samples),
            members,
            candidates,
            axis,
            costs,
            self.parts,
            self.whole,
            KINDS[choice.kind],
            choice.num_micro_batches,
            choice.layout.send_latency_s,
            choice.layout.send_bytes_per_s,
            self._capacity,
            self._tied(chosen, members, candidates, axis),
            self._settings,
            fresh,
            bounds,
        )
        return bounds, fresh

    def _tied(self, chosen: Ints, members: Ints, candidates: Ints, axis: int) -> Floats:
        tied = np.zeros((len(candidates), len(self._homes), 5 + len(self.choice.zero_axes)))
        if self._homes:
            trial = chosen.copy()
            for value, signatures in enumerate(candidates):
                trial[members, axis] = signatures
                tied[value] = self.evaluator.tied_rows(self._homes, self.choice.layout, self.choice.zero_axes, trial)
        return tied
