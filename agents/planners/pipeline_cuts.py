"""Pipeline cuts: where to cut a pipeline and what each rank recomputes, by dynamic programming over units.

As in PipeDream (arXiv 1806.03377) and DAPPLE (arXiv 2007.01045), the best cut of the first units over the first ranks
follows from those of fewer units, with the slowest rank as cost. The costs of units are those of given signatures; each
rank takes the fastest recompute mode with which its chunk, its state and the micro-batches in flight fit. Gradient
reductions and the exchange between ranks are left to the exact price. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agents.planners.unit_profile import unit_costs
from automap.price.kernels.array_types import Record, Rows
from automap.price.kernels.memory import in_flight, state_bytes
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace, Values

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLACKS = (1.0, 1.01, 1.05)
"""Allowed times of the slowest rank, over the least possible one; within each, the sum of all ranks is least."""


def partition(seconds: Sequence[Floats], slack: float = 1.0) -> list[int] | None:
    """Cuts units into one span for each rank.

    With T(r, u) the least time of the slowest of r ranks that have the first u units, and t(r, v, u) the time of rank r
    with the units from v to before u: T(r, u) = min over v of max(T(r - 1, v), t(r, v, u)) (PipeDream, section 3.1).

    Args:
        seconds: for each rank, [units + 1, units + 1] time of the units from the first index to before the second;
            infinite where they do not fit or may not be.
        slack: see `SLACKS`.

    Returns:
        Ends of the units of all ranks but the last, of a cut whose slowest rank is within `slack` of the least
        possible time and whose sum is least; None where nothing fits.
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
    """Plans with the shape and the signatures of a plan, and with the cuts and recompute modes of `partition`.

    There are none for plans of one stage or with virtual stages. The exact price says whether the plans are better.
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


@dataclass(frozen=True, kw_only=True)
class _Spans:
    """What spans of units cost on ranks that are alike: sums over the units from one to before another."""

    seconds: Floats
    """[modes, units + 1, units + 1] seconds of a micro-batch; infinite where a span is empty."""
    state: Floats
    """[modes, units + 1, units + 1] bytes of parameters, gradients and the optimizer."""
    saved: Floats
    """[modes, units + 1, units + 1] bytes that a micro-batch keeps for its backward pass."""
    passing: Floats
    """[modes] bytes that the largest unit needs for a while."""


def _chunks(space: PlanSpace, values: Values) -> tuple[list[Floats], list[Ints]]:
    """For each rank, [units + 1, units + 1] seconds of a micro-batch in the fastest mode that fits, and that mode."""
    evaluator, lowered = space.evaluator, space.lowered(values).views[0]
    shape, settings = space.shape(values), evaluator.settings(lowered.zero)
    known: dict[tuple[int, float], _Spans] = {}
    seconds, modes = [], []
    for rank, stage in enumerate(lowered.layout.stages):
        key = (lowered.layout.numbers[rank], float(lowered.rank_samples[rank]))
        if key not in known:
            segments = [segment for chunk in lowered.chunks for segment in chunk]
            costs = unit_costs(evaluator, segments, lowered.stages[rank])
            known[key] = _spans_of(costs, evaluator.exposed, settings)
        spans = known[key]
        alive = in_flight(rank, shape.pp, shape.pp, shape.num_micro_batches)
        if lowered.kind == "gpipe":
            alive = shape.num_micro_batches
        room = stage.capacity - settings.reserved_bytes - spans.passing
        fits = spans.state + alive * spans.saved <= room[:, None, None]
        time = np.where(fits & space.modes[:, None, None], spans.seconds, np.inf)
        low, high = space.constrained.window(rank, shape.pp) if rank < shape.pp - 1 else (space.num_units,) * 2
        ends = np.arange(space.num_units + 1)
        time[:, :, (ends < low) | (ends > high)] = np.inf
        seconds.append(time.min(axis=0))
        modes.append(time.argmin(axis=0))
    return seconds, modes


def _spans_of(costs: Rows, exposed: Floats, settings: Record) -> _Spans:
    """The spans of units with these costs.

    Args:
        costs: [modes, units] rows of `UnitCostRow`.
        exposed: [axes] share of communication that is not overlapped.
        settings: bytes of each state and stage of ZeRO.
    """
    spent = costs["forward_s"] + costs["forward_host_s"] + costs["backward_s"] + costs["backward_host_s"]
    spent += costs["recompute_s"]
    spent += (costs["forward_comm_s"] + costs["backward_comm_s"] + costs["recompute_comm_s"]) @ exposed
    # A row holds few distinct numbers of parameters: repeated blocks are alike.
    parameters = np.stack([costs["parameters"].ravel(), costs["zero_parameters"].ravel()])
    distinct, at = np.unique(parameters, axis=1, return_inverse=True)
    state = np.array([sum(state_bytes(whole, sharded, settings)) for whole, sharded in distinct.T.tolist()])
    live = np.where(np.array(RECOMPUTE_MODES) == "full", costs["live_bytes"].max(axis=1), 0.0)
    return _Spans(
        seconds=_spans(spent),
        state=_spans(state[at.reshape(costs.shape)]),
        saved=_spans(costs["saved_bytes"]),
        passing=2.0 * costs["workspace_bytes"].max(axis=1) + live,
    )


def _spans(of_units: Floats) -> Floats:
    """Sums over the units from one to before another, [modes, units + 1, units + 1]; infinite where there is none."""
    sums = np.concatenate([np.zeros((len(of_units), 1)), np.cumsum(of_units, axis=1)], axis=1)
    spans = sums[:, None, :] - sums[:, :, None]
    empty = np.tril(np.ones(spans.shape[1:], dtype=np.bool_))
    found: Floats = np.where(empty, np.inf, spans)
    return found


def _with_cuts(space: PlanSpace, values: Values, ends: Sequence[int], modes: Sequence[Ints]) -> Values:
    """A plan with other ends of the ranks' units, and with the recompute mode of each rank's span."""
    found = list(values)
    shape = space.shape(values)
    shares = space.cut_shares(values)
    start = 0
    for chunk, end in enumerate([*ends, space.num_units]):
        if chunk < shape.pp - 1:
            candidates = space.candidates(start, chunk, shape.num_chunks, shares[chunk]).tolist()
            found[space.first.cut + chunk] = candidates.index(end) if end in candidates else 0
        found[space.first.recompute + chunk] = int(modes[chunk][start, end])
        start = end
    # The signatures stay legal: the mesh and the samples are the same.
    first = space.first.signature
    return (*space.repair(found[:first]), *found[first:])
