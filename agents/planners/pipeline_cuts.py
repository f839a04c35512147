"""Cuts: where to cut a pipeline and what each rank recomputes, by dynamic programming over units.

As PipeDream (arXiv 1806.03377) and DAPPLE (arXiv 2007.01045): the best cut of the first units over the first ranks
follows from those of fewer, with the slowest rank as cost. Here what units cost is that of given signatures; each rank
takes the fastest recompute mode with which its chunk, its state and the micro-batches in flight fit. Gradient
reductions and the exchange between ranks are left to the exact price. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from automap.price.kernels.collectives import KIND_COUNT
from automap.price.kernels.columns import (
    C_BACKWARD,
    C_BACKWARD_HOST,
    C_FORWARD,
    C_FORWARD_COMM,
    C_FORWARD_HOST,
    C_LIVE,
    C_PARAMETERS,
    C_RECOMPUTE,
    C_REDUCE,
    C_SAVED,
    C_WORKSPACE,
    C_ZERO,
)
from automap.price.kernels.step import P_GRADIENT, P_OPTIMIZER, P_PARAMETER, P_RESERVED
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace, Values
from ir.factors import PARTIAL

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLACKS = (1.0, 1.01, 1.05)
"""Times the least bottleneck that a rank may take; within, all ranks together are to take the least."""


def partition(seconds: Sequence[Floats], slack: float = 1.0) -> list[int] | None:
    """Ends of all ranks but the last.

    Args:
        seconds: of each rank, [units + 1, units + 1]: of the units from the first index to the one before the second;
            infinite where they do not fit or may not stand there.
        slack: see `SLACKS`.

    Returns:
        of the cuts whose slowest rank is within `slack` of the least possible, one with the least sum; None where
        nothing fits.
    """
    count = len(seconds[0]) - 1
    worst = np.full(count + 1, np.inf)
    worst[0] = 0.0
    for of in seconds:
        worst = np.maximum(worst[:, None], of).min(axis=0)
    limit = worst[count] * slack
    if not np.isfinite(limit):
        return None
    total = np.full(count + 1, np.inf)
    total[0] = 0.0
    begins = []
    for of in seconds:
        sums = total[:, None] + np.where(of <= limit * (1.0 + 1e-12), of, np.inf)
        begins.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    ends = [count]
    for begin in reversed(begins):
        ends.append(int(begin[ends[-1]]))
    return ends[-2:0:-1]


def cut_anew(space: PlanSpace, values: Values) -> list[Values]:
    """Plans with the shape and the signatures of `values` and the cuts and recompute modes of `partition`.

    Of plans without virtual stages; whether the plans are better is for their exact price to say.
    """
    shape = space.shape(values)
    if shape.pp == 1 or shape.virtual > 1:
        return []
    seconds, modes = _chunks(space, values)
    found = []
    for slack in SLACKS:
        ends = partition(seconds, slack)
        if ends is not None:
            found.append(_with_cuts(space, values, ends, modes))
    return list(dict.fromkeys(found))


def _chunks(space: PlanSpace, values: Values) -> tuple[list[Floats], list[Ints]]:
    """Of each rank [units + 1, units + 1] seconds of a micro-batch in the fastest mode that fits, and that mode."""
    evaluator, lowered = space.evaluator, space.lowered(values).views[0]
    shape, settings = space.shape(values), evaluator.settings(lowered.zero)
    known: dict[tuple[int, float], Floats] = {}
    seconds, modes = [], []
    for rank, stage in enumerate(lowered.layout.stages):
        key = (lowered.layout.numbers[rank], float(lowered.rank_samples[rank]))
        if key not in known:
            known[key] = _unit_costs(space, values, rank)
        costs = known[key]
        spent = costs[:, :, [C_FORWARD, C_FORWARD_HOST, C_BACKWARD, C_BACKWARD_HOST, C_RECOMPUTE]].sum(axis=2)
        spent += (
            costs[:, :, C_FORWARD_COMM:C_REDUCE].reshape(*spent.shape, -1, KIND_COUNT).sum(axis=2) @ evaluator.exposed
        )
        whole, shard = costs[:, :, C_PARAMETERS], costs[:, :, C_ZERO]
        state = (shard if lowered.zero >= 3 else whole) * settings[P_PARAMETER]
        state = state + (shard if lowered.zero >= 2 else whole) * settings[P_GRADIENT]
        state = state + (shard if lowered.zero >= 1 else whole) * settings[P_OPTIMIZER]
        in_flight = (
            shape.num_micro_batches if lowered.kind == "gpipe" else min(shape.pp - rank, shape.num_micro_batches)
        )
        live = np.where(np.array(RECOMPUTE_MODES) == "full", costs[:, :, C_LIVE].max(axis=1), 0.0)
        room = stage.capacity - settings[P_RESERVED] - 2.0 * costs[:, :, C_WORKSPACE].max(axis=1) - live
        time, used = _spans(spent), _spans(state + in_flight * costs[:, :, C_SAVED])
        fits = (used <= room[:, None, None]) & space.modes[:, None, None]
        time = np.where(fits, time, np.inf)
        low, high = space.constrained.window(rank, shape.pp) if rank < shape.pp - 1 else (space.num_units,) * 2
        ends = np.arange(space.num_units + 1)
        time[:, :, (ends < low) | (ends > high)] = np.inf
        seconds.append(time.min(axis=0))
        modes.append(time.argmin(axis=0))
    return seconds, modes


def _spans(of_units: Floats) -> Floats:
    """[modes, units] -> [modes, units + 1, units + 1] sums from one unit to before another; infinite where empty."""
    sums = np.concatenate([np.zeros((len(of_units), 1)), np.cumsum(of_units, axis=1)], axis=1)
    spans = sums[:, None, :] - sums[:, :, None]
    empty = np.tril(np.ones(spans.shape[1:], dtype=np.bool_))
    found: Floats = np.where(empty, np.inf, spans)
    return found


def _unit_costs(space: PlanSpace, values: Values, rank: int) -> Floats:
    """[modes, units, C_COUNT] as if all units stood in one chunk on a rank."""
    evaluator, lowered = space.evaluator, space.lowered(values).views[0]
    segments = [segment for chunk in lowered.chunks for segment in chunk]
    axes = len(space.axes)
    known: dict[tuple[int, bytes, str], Floats] = {}
    incoming = np.full(axes, -1, dtype=np.int64)
    rows = []
    for segment in segments:
        unit_type = evaluator.blocks.units[segment.unit].type
        incoming = np.where(incoming == PARTIAL, -1, incoming)
        for mode in RECOMPUTE_MODES:
            key = (unit_type, incoming.tobytes(), mode)
            if key not in known:
                known[key] = evaluator.unit_row(
                    replace(segment, recomputed=evaluator.masks(unit_type)[mode]),
                    rank,
                    lowered.layout,
                    incoming,
                    float(lowered.rank_samples[rank]),
                    lowered.zero_axes,
                    int(evaluator.tables.boundary_out[unit_type]),
                )
            rows.append(known[key])
        incoming = evaluator.output_placement(segment, unit_type, axes)
    return np.array(rows).reshape(len(segments), len(RECOMPUTE_MODES), -1).transpose(1, 0, 2)


def _with_cuts(space: PlanSpace, values: Values, ends: Sequence[int], modes: Sequence[Ints]) -> Values:
    """`values` with these ends of the ranks' units, and of each rank the mode of its span."""
    found = list(values)
    shape = space.shape(values)
    shares = space.cut_shares(values)
    start = 0
    for chunk, end in enumerate([*ends, space.num_units]):
        if chunk < shape.pp - 1:
            candidates = space.candidates(start, chunk, shape.num_chunks, shares[chunk]).tolist()
            found[space.first_cut + chunk] = candidates.index(end) if end in candidates else 0
        found[space.first_recompute + chunk] = int(modes[chunk][start, end])
        start = end
    return space.repair(found)
