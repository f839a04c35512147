"""Pipeline cuts: where to cut a pipeline and what each rank recomputes, by dynamic programming over units.

As in PipeDream (arXiv 1806.03377) and DAPPLE (arXiv 2007.01045), the best cut of the first units over the first ranks
follows from those of fewer units, with the slowest rank as cost. The costs of units are those of given signatures; each
rank takes the fastest level of recomputation with which its chunk, its state and the micro-batches in flight fit, and
is held while it sends and receives. Gradient reductions are left to the exact price. Where a rank has several chunks,
units move between chunks (`agents.planners.chunk_moves`). Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agents.planners.chunk_moves import moved, with_cuts
from agents.planners.kernels.cuts import SAVED, RankLimits, SpanCosts, least_costs, least_partition
from agents.planners.unit_profile import needs, states, unit_costs
from automap.price.kernels.array_types import Rows
from automap.price.kernels.memory import in_flight, standing_bytes
from automap.space.space import PlanSpace, Values

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLACKS = (1.0, 1.01, 1.05)
"""Allowed times of the slowest rank, as multiples of the least possible one (assumed). For each, the cut with the least
sum of the times of all ranks is found."""


def partition(seconds: Sequence[Floats] | Floats, slack: float = 1.0) -> list[int] | None:
    """Cuts units into one span for each rank by the dynamic program of `least_partition`.

    Args:
        seconds: [ranks, units + 1, units + 1] entry [r, i, j]: seconds of rank r with the units i to j - 1; infinite
            where they do not fit or are not allowed.
        slack: allowed time of the slowest rank, as a multiple of the least possible one.

    Returns:
        Ends of the units of all ranks but the last, of the allowed cut with the least sum over all ranks; None where
        nothing fits.
    """
    of_ranks = np.ascontiguousarray(seconds, dtype=np.float64)
    ends = np.empty(len(of_ranks), dtype=np.int64)
    is_found: bool = least_partition(of_ranks, slack, ends)
    return ends[:-1].tolist() if is_found else None


def cut_anew(space: PlanSpace, values: Values) -> list[Values]:
    """Plans with the shape and the signatures of a plan, and with new cuts and levels of recomputation (`partition`).

    If no cut fits into memory, the one plan is that whose fullest rank needs least: with other signatures it may fit.
    With virtual stages the cuts are those of `moved`, and the levels stay. There are no plans where there is one stage.
    The plans need not be better than the given one.

    With at most as many micro-batches as ranks, the slowest rank does not decide the step time: few micro-batches pass
    through all ranks, and gradients are reduced at the end. Then the plan of `moved` is also among those returned.
    """
    shape = space.shape(values)
    if shape.pp == 1:
        return []
    if shape.virtual > 1:
        return [moved(space, values)]
    cuts = _Cuts(space, values)
    costs, levels = cuts.fastest()
    fits = partition(costs) is not None
    if not fits:
        costs, levels = cuts.emptiest()
    found = []
    for slack in SLACKS if fits else SLACKS[:1]:
        ends = partition(costs, slack)
        if ends is not None:
            found.append(with_cuts(space, values, ends, levels))
    if shape.num_micro_batches <= shape.pp:
        found.append(moved(space, values))
    return list(dict.fromkeys(found))


class _Cuts:
    """What each rank of a plan would take for every span of units, with the signatures of this plan.

    Entry [r, i, j] of the tables, [ranks, units + 1, units + 1], is about rank r with the units i to j - 1.
    """

    def __init__(self, space: PlanSpace, values: Values) -> None:
        self._space, self._shape = space, space.shape(values)
        self._lowered = space.lowered(values).views[0]
        segments = [segment for chunk in self._lowered.chunks for segment in chunk]
        known: dict[tuple[int, float], tuple[Floats, Floats, Floats]] = {}
        self._costs = []
        for rank, stage in enumerate(self._lowered.stages):
            key = (self._lowered.layout.numbers[rank], float(self._lowered.rank_samples[rank]))
            if key not in known:
                costs = unit_costs(space.evaluator, segments, stage)
                crossing = np.concatenate([[0.0], costs["boundary_bytes"][0, :-1], [0.0]])
                before = self._before(costs)
                known[key] = before, self._fullest(costs, before[SAVED]), crossing
            self._costs.append(known[key])

    def fastest(self) -> tuple[Floats, Ints]:
        """The seconds of a micro-batch with the fastest level of recomputation that fits, and the number of this level.

        Seconds are infinite where no level fits and where the rank may not have these units.
        """
        return self._best(by_memory=False)

    def emptiest(self) -> tuple[Floats, Ints]:
        """The memory with the level of recomputation that needs least, as a share of the device's, and the number of
        this level."""
        return self._best(by_memory=True)

    def _best(self, *, by_memory: bool) -> tuple[Floats, Ints]:
        space, pp = self._space, self._shape.pp
        levels, last = np.flatnonzero(space.levels.legal(pp)), (space.num_units,) * 2
        ends = [*(space.constrained.window(rank, pp) for rank in range(pp - 1)), last]
        limits = [self._limits(rank, begins, ends[rank]) for rank, begins in enumerate([(0, 0), *ends[:-1]])]
        of_ranks = [self._least(rank, levels, of, by_memory=by_memory) for rank, of in enumerate(limits)]
        costs, chosen = (np.array(some) for some in zip(*of_ranks, strict=True))
        return costs, levels[chosen]

    def _least(self, rank: int, levels: Ints, limits: RankLimits, *, by_memory: bool) -> tuple[Floats, Ints]:
        """[units + 1, units + 1] costs of one rank at its best level, and index of this level in `levels`; see
        `least_costs`."""
        before, fullest, _ = self._costs[rank]
        about = [self._space.levels.levels[level] for level in levels.tolist()]
        rows = np.array([(level.light, level.heavy, level.steps) for level in about])
        costs = np.empty((self._space.num_units + 1,) * 2)
        chosen = np.zeros(costs.shape, dtype=np.int64)
        spans = SpanCosts(before, rows, self._space.levels.steps, fullest)
        least_costs(spans, limits, by_memory, costs, chosen)
        return costs, chosen

    def _limits(self, rank: int, begins: tuple[int, int], ends: tuple[int, int]) -> RankLimits:
        """The limits of a rank.

        Args:
            rank: number of the rank.
            begins: first and last unit with which it may begin.
            ends: first and last unit before which it may end.
        """
        layout, shape = self._lowered.layout, self._shape
        alive = in_flight(rank, shape.pp, shape.pp, shape.num_micro_batches)
        if self._lowered.kind == "gpipe":
            alive = shape.num_micro_batches
        settings = self._space.evaluator.settings(0)
        # Activations and gradients are sent at the same time, and the trainer hides a share of it.
        shown = 1.0 - settings.send_overlap
        *_, crossing = self._costs[rank]
        receives, sends = (
            np.where(crossing > 0.0, settings.send_s + shown * crossing / layout.send_bytes_per_s[at], 0.0)
            for at in (rank - 1, rank)
        )
        standing = standing_bytes(crossing.max(), shape.pp, shape.num_micro_batches, settings)
        room = float(layout.stages[rank].capacity) - standing
        room = max(room, 1.0) / (1.0 + self._space.problem.trainer.unused_share)
        return RankLimits(float(alive), room, receives, sends, *begins, *ends)

    def _before(self, costs: Rows) -> Floats:
        """`SpanCosts.before` of the costs of all units, see `unit_costs`."""
        spent = costs["forward_s"] + costs["forward_host_s"] + costs["backward_s"] + costs["backward_host_s"]
        spent += costs["recompute_s"]
        comm = costs["forward_comm_s"] + costs["backward_comm_s"] + costs["recompute_comm_s"]
        spent += comm.sum(axis=-1)
        settings = self._space.evaluator.settings(self._lowered.zero)
        before = np.zeros((3, len(costs), self._space.num_units + 1))
        np.cumsum([spent, states(costs, settings), costs["saved_bytes"]], axis=2, out=before[:, :, 1:])
        return before

    def _fullest(self, costs: Rows, saved: Floats) -> Floats:
        """`SpanCosts.fullest`.

        Args:
            costs: [modes, units] costs of all units, see `unit_costs`.
            saved: [modes, units + 1] bytes that all units before this one save.
        """
        moment = saved[:, 1:] + needs(costs, self._space.evaluator.settings(self._lowered.zero))
        found = [moment]
        for power in range(1, self._space.num_units.bit_length()):
            further = np.full_like(moment, -np.inf)
            further[:, : -(1 << power - 1)] = found[-1][:, 1 << power - 1 :]
            found.append(np.maximum(found[-1], further))
        return np.ascontiguousarray(np.stack(found, axis=1))
