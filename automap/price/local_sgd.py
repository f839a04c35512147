"""The cost of a step when replicas are averaged periodically, instead of summing the gradients of every step.

The compiled price does not include the averaging; it is added to the result in closed form. With t the seconds of the
step without the reduction of gradients over the replicas, a those of the all-reduce of a rank's parameters over the
replicas (in float32), and c those of the copies in memory, a step takes

    local SGD   t + (a + c) / period
    DaSGD       t + (max(0, a - delay t) + c) / period          (DaSGD, arXiv 2006.00441)

Replicas are the ranks of the first batch axis. A mode is refused if the replicas would have to communicate within a
step. The collectives of all other axes stay; the averaging is assumed to run at full rate while they run. Units:
seconds, bytes, steps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from automap.arrays import Floats
from automap.errors import PlanError
from automap.fitted_curves import COLLECTIVES
from automap.plan import Plan, Sync
from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import Record
from automap.price.kernels.collectives import collective_s
from automap.price.kernels.records import ALL_REDUCE
from automap.price.kernels.step import overflow, step_time_s
from automap.price.lowered_plan import LoweredPlan
from automap.price.outcome import Averaging, Outcome
from automap.targets import SyncKind
from ir.factors import BROADCAST, PARTIAL

AVERAGED_BYTES = 4.0
"""Bytes of an element in the all-reduce: the optimizer's float32 copies are averaged (`automap.runtime`)."""
TOUCHED = {"local_sgd": 16.0, "mixing": 20.0, "corrected": 32.0}
"""Bytes of memory that one average moves for each parameter (counted): every parameter is packed (read and written) and
unpacked; a merge also reads the parameter, and the corrected merge writes and reads a snapshot."""


class Silent(Evaluator):
    """Prices plans without the reduction of gradients. Without ZeRO, this is a lower bound on the time and the memory
    of a plan under every sync mode."""

    def settings(self, zero: int) -> Record:
        """See `Evaluator`."""
        settings = super().settings(zero)
        settings.sent_gradient_bytes = 0.0
        return settings


def evaluate_plan(plan: Plan, lowered: LoweredPlan, evaluator: Evaluator) -> Outcome:
    """Time and memory of a step of `plan` under its sync mode.

    Args:
        plan: the plan.
        lowered: the same plan, lowered.
        evaluator: of its problem.

    Raises:
        PlanError: the replicas of the plan cannot be apart, or the problem does not allow it.
    """
    if plan.sync.kind == "synchronous":
        return evaluator.evaluate(lowered)
    return averaged(lowered, evaluator, plan.sync, replica_axis(plan, lowered, evaluator))


def averaged(lowered: LoweredPlan, evaluator: Evaluator, sync: Sync, axis: int) -> Outcome:
    """Time and memory of a step of a plan whose replicas are averaged periodically.

    Args:
        lowered: the plan.
        evaluator: of its problem.
        sync: how replicas are averaged; not synchronous.
        axis: the mesh axis of the replicas, see `replica_axis`.
    """
    bare = evaluator.evaluate(lowered, apart=axis)
    settings = evaluator.settings(0)
    held = held_bytes(sync, float(settings.gradient_bytes))
    views, averagings = [], []
    for view, found in zip(lowered.views, bare.of_views, strict=True):
        rows = found.copy()
        # Number of trained parameters on each rank; there is no ZeRO here.
        elements = rows["gradient_bytes"] / settings.gradient_bytes
        seconds = averaging_s(view, elements, axis)
        rest = seconds if sync.delay is None else np.maximum(0.0, seconds - sync.delay * step_time_s(rows))
        bandwidth = view.layout.arrays.hardware["bytes_per_s"]
        copies = TOUCHED[sync.merge or "local_sgd"] * elements / bandwidth
        shown = (rest + copies) / float(sync.period or 1)
        rows["end_s"] += shown
        rows["buffer_bytes"] += held * elements
        views.append(rows)
        averagings.append(
            Averaging(
                sync=sync,
                axis=axis,
                all_reduce_s=tuple(seconds.tolist()),
                copies_s=tuple(copies.tolist()),
                shown_s=tuple(shown.tolist()),
            )
        )
    last = max(range(len(views)), key=lambda number: (step_time_s(views[number]), -number))
    return Outcome(
        step_time_s=step_time_s(views[last]),
        overflow=max(overflow(rows) for rows in views),
        ranks=views[last],
        view=last,
        of_views=tuple(views),
        averaging=averagings[last],
    )


def held_bytes(sync: Sync, gradient: float) -> float:
    """Bytes of memory that each parameter takes for averaging.

    Local SGD averages in the memory of the gradients, which are no longer needed then. DaSGD keeps the values that are
    being averaged beside the gradients, and for the corrected merge also the values that were sent.

    Args:
        sync: not synchronous.
        gradient: bytes of a gradient.
    """
    if sync.kind == "local_sgd":
        return max(0.0, AVERAGED_BYTES - gradient)
    return AVERAGED_BYTES * (2.0 if sync.merge == "corrected" else 1.0)


def averaging_s(lowered: LoweredPlan, elements: Floats, axis: int) -> Floats:
    """[ranks] seconds of the all-reduce of a rank's parameters over the replicas.

    Args:
        lowered: the plan, one of `LoweredPlan.views`.
        elements: [ranks] number of parameters.
        axis: the mesh axis of the replicas.
    """
    stages = lowered.layout.stages
    return np.array(
        [
            collective_s(ALL_REDUCE, float(stage.axes[axis]), stage.links[axis], AVERAGED_BYTES * float(count))
            for stage, count in zip(stages, elements, strict=True)
        ]
    )


def offers(plan: Plan, lowered: LoweredPlan, evaluator: Evaluator) -> Iterator[Sync]:
    """For every sync mode that the problem allows and the plan can use, its cheapest variant; synchronous first."""
    yield Sync()
    for kind in evaluator.problem.training.sync_modes:
        if kind != "synchronous":
            with contextlib.suppress(PlanError):
                yield cheapest(kind, plan, lowered, evaluator)


def cheapest(kind: SyncKind, plan: Plan, lowered: LoweredPlan, evaluator: Evaluator) -> Sync:
    """The cheapest variant of a mode for a plan.

    Local SGD gets the longest period that is allowed, since a longer one is cheaper. DaSGD gets the shortest delay that
    hides the all-reduce, ceil(a / t) with the seconds of this module's formulas, but at most the longest period; it
    starts the next averaging as soon as it has merged the last one.

    Raises:
        PlanError: the problem does not allow the mode, or the replicas of the plan cannot be apart; says why.
    """
    if kind == "synchronous":
        return Sync()
    most = evaluator.problem.training.sync_period
    longest = Sync(kind=kind, period=most, delay=most if kind == "dasgd" else None)
    axis = replica_axis(replace(plan, sync=longest), lowered, evaluator)
    if longest.delay is None:
        return longest
    bare = evaluator.evaluate(lowered, apart=axis)
    parameter = evaluator.settings(0).parameter_bytes
    all_reduce_s = max(
        float(averaging_s(view, rows["parameter_bytes"] / parameter, axis).max())
        for view, rows in zip(lowered.views, bare.of_views, strict=True)
    )
    delay = min(max(1, math.ceil(all_reduce_s / bare.step_time_s)), most)
    return replace(longest, period=delay, delay=delay)


def best_sync(plan: Plan, lowered: LoweredPlan, evaluator: Evaluator) -> Sync:
    """The fastest of `offers` with which a plan fits; the first one of equals, and if the plan fits with none."""
    best, best_s = Sync(), math.inf
    for sync in offers(plan, lowered, evaluator):
        outcome = evaluate_plan(replace(plan, sync=sync), lowered, evaluator)
        if outcome.fits and outcome.step_time_s < best_s:
            best, best_s = sync, outcome.step_time_s
    return best


# -- what replicas exchange within a step ------------------------------------------------------------------------------


def replica_axis(plan: Plan, lowered: LoweredPlan, evaluator: Evaluator) -> int:
    """The mesh axis of the replicas, after a check that they communicate for averages alone.

    Args:
        plan: a plan whose `sync` is not synchronous.
        lowered: the same plan, lowered.
        evaluator: of its problem.

    Raises:
        PlanError: the problem does not allow the mode, or the replicas of the plan cannot be apart; says why.
    """
    sync, training = plan.sync, evaluator.problem.training
    if sync.kind not in training.sync_modes:
        raise PlanError(
            f"was not allowed, only {', '.join(training.sync_modes)}",
            field="plan.sync.kind",
            value=sync.kind,
            repair="Name it in training.sync_modes if it may be trained so.",
        )
    if (sync.period or 0) > training.sync_period:
        raise PlanError(
            f"is longer than the {training.sync_period} steps of training.sync_period",
            field="plan.sync.period",
            value=sync.period,
            repair="Use a shorter period, or allow this one in training.sync_period.",
        )
    found = {tuple((a, dict(stage.mesh).get(a, 1)) for a in stage.batch_axes[:1]) for stage in plan.stages}
    ((name, size),) = next(iter(found)) or (("", 1),)
    if len(found) > 1 or size == 1:
        raise _refuse(
            sync,
            "stages have no replicas, or not equally many",
            "Give all stages the same first batch axis, of two ranks or more.",
        )
    if len({stage.batch_shares for stage in plan.stages}) > 1:
        raise _refuse(sync, "stages share out the batch differently", "Give all the same batch_shares.")
    if any(stage.zero.stage for stage in plan.stages):
        raise _refuse(sync, "under ZeRO, a replica holds only a part of its optimizer states", "Use ZeRO 0.")
    axis = lowered.axes.index(name)
    fault = _ties(lowered, evaluator, axis)
    if fault is not None:
        raise _refuse(sync, fault, "Split the batch, and nothing else, over the first batch axis.")
    return axis


def _refuse(sync: Sync, what: str, repair: str) -> PlanError:
    return PlanError(
        f"replicas cannot be trained apart: {what}",
        field="plan.sync.kind",
        value=sync.kind,
        repair=f"{repair} Or train synchronously.",
    )


def _ties(lowered: LoweredPlan, evaluator: Evaluator, axis: int) -> str | None:
    """A text about what the ranks of an axis exchange within a step, besides the sum of the loss; None if nothing."""
    graph, tables = evaluator.problem.graph, evaluator.tables
    calls, _ = evaluator.distinct_units(lowered)
    for call in calls:
        segment = call.segment
        unit = evaluator.blocks.units[segment.unit]
        first = segment.first - int(tables.spans[unit.type])
        signatures = tables.linkage.types[unit.type].signatures
        for k, chosen in enumerate(segment.chosen[:, axis]):
            op, signature = graph.operators[unit.start + first + k], signatures[first + k][int(chosen)]
            for name, placement in zip(op.inputs, signature.inputs, strict=True):
                if graph.tensors[name].role == "parameter" and placement != BROADCAST:
                    return f"{op.name} has a part of its weights on each"
            if graph.outputs[-1] in op.outputs and signature.outputs[0] != PARTIAL:
                return f"{op.name} does not split the batch, and with it the loss"
        records = evaluator.collectives(lowered, call.rank, segment, call.incoming)
        for record in records[records["axis"] == axis]:
            op = graph.operators[unit.start + int(record.operator) - int(tables.spans[unit.type])]
            return f"{op.name} needs an {COLLECTIVES[record.kind].replace('_', '-')} among them"
    return None
