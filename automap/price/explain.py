"""Reasons for the step time of a plan: sentences with numbers about its largest parts, and changes that would help.

The parts are those of the busiest pipeline rank, which add up to the step. Each change is priced before it is named.
Units: seconds, bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from automap.amounts import in_bytes, in_rate, in_seconds
from automap.fitted_curves import COLLECTIVES
from automap.price.bottleneck import Bottleneck, BottleneckUnit
from automap.price.evaluator import Evaluator
from automap.price.kernels.array_types import Record
from automap.price.kernels.records import (
    ALL_REDUCE,
    ATTENTION,
    BATCHED_PRODUCT,
    CONVOLUTION,
    INSIDE,
    MEASURED,
    PRODUCT,
    ROOFLINE,
)
from automap.price.local_sgd import AVERAGED_BYTES
from automap.price.lowered_plan import LoweredPlan
from automap.price.outcome import Outcome
from ir.groups import fused_groups

NUM_REASONS = 3
"""Number of parts of the step that are explained (chosen: a user reads a few sentences)."""
NUM_NAMED = 3
"""Number of operators that are named as those that take longest (chosen: they fit into one line)."""
MEASURED_FROM = 1e-6
"""Share by which the time of a unit must differ from the sum of its kernels to count as measured as a whole (assumed:
far above rounding, and far below the difference that any measurement makes)."""
_ROUNDING = 1e-9
"""Share up to which a difference is rounding (assumed: sums of some thousand floats of 8 bytes are more exact)."""
_CLASSES = {
    PRODUCT: "matrix products",
    BATCHED_PRODUCT: "products of activations",
    ATTENTION: "fused attention",
    CONVOLUTION: "convolutions",
    ROOFLINE: "other arithmetic",
    MEASURED: "measured operators",
}
_RECURRENT = ("LSTM", "GRU", "RNN")
_KINDS = {name: name.replace("_", "-") + "s" for name in COLLECTIVES} | {"send_recv": "halo exchanges"}


def reasons(lowered: LoweredPlan, evaluator: Evaluator, outcome: Outcome) -> tuple[str, ...]:
    """Sentences about the largest parts of the step, their causes, and changes that would help.

    Args:
        lowered: the plan.
        evaluator: of its problem.
        outcome: time and memory of the plan, by the evaluator.

    Returns:
        At most three sentences, the largest part first. Each begins with the part's share of the step and its seconds.
    """
    case = Bottleneck(lowered, evaluator, outcome)
    result = case.result
    parts: list[tuple[float, Callable[[Bottleneck, float], str]]] = [
        (float(result.compute_s), _compute),
        (outcome.idle_s(case.rank), _bubble),
        (float(result.optimizer_s), _optimizer),
        (float(result.overhead_s), _overhead),
        (float(result.exchange_s), _exchange),
        (float(result.sync_s), _sync),
        (float(result.zero_s), _zero),
    ]
    if outcome.averaging is not None:
        parts.append((outcome.averaging.shown_s[case.rank], _averaging))
    parts += [(seconds, _collective(kind)) for kind, seconds in enumerate(result.comm_s.tolist())]
    largest = sorted(parts, key=lambda part: -part[0])[:NUM_REASONS]
    return tuple(
        f"{_share(seconds / outcome.step_time_s)} of the step ({in_seconds(seconds)}) is {say(case, seconds)}"
        for seconds, say in largest
        if seconds > 0.0
    )


def _share(share: float) -> str:
    """A share in whole percent, and never 0 % for a share that is not 0."""
    return f"{share:.0%}" if share >= 0.005 else "less than 1%"


# -- compute --------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Spent:
    seconds: float = 0.0
    flops: float = 0.0


def _compute(case: Bottleneck, seconds: float) -> str:
    classes, named = _by_operator(case)
    peak = min(
        case.evaluator.problem.cluster.device(d).flops(case.evaluator.problem.precision)
        for d in case.stage.seen_by or case.stage.devices
    )
    hardware, texts = case.stage.hardware, []
    reached = {
        _CLASSES[PRODUCT]: float(hardware.weights.flops_per_s) / peak,
        _CLASSES[ATTENTION]: float(hardware.attention.flops_per_s) / peak,
    }
    for name, spent in sorted(classes.items(), key=lambda item: -item[1].seconds):
        text = f"{name} {in_seconds(spent.seconds)}"
        if spent.flops > 0.0:
            text += f" at {spent.flops / spent.seconds / peak:.0%} of the peak"
            if name in reached:
                text += f" (large ones reach {reached[name]:.0%})"
        texts.append(text)
    host = case.micro_batches * case.total("forward_host_s", "backward_host_s")
    if host > 0.01 * seconds:
        texts.append(f"waiting for the host to launch {in_seconds(host)}")
    heaviest = sorted(named.items(), key=lambda item: -item[1])[:NUM_NAMED]
    where = ", ".join(f"{name} {spent / seconds:.0%}" for name, spent in heaviest)
    again = case.micro_batches * case.total("recompute_s")
    text = f"compute: {'; '.join(texts)}. The peak is {peak / 1e12:.4g} TFLOP/s. Most of it is {where}."
    if again > 0.0:
        text += f" Recomputation takes {in_seconds(again)} of it."
        text += case.gain(case.without_recomputation(), "Keeping all activations")
    else:
        text += case.gain(case.batches(0.5), "Micro-batches twice as large")
    return text


def _by_operator(case: Bottleneck) -> tuple[dict[str, _Spent], dict[str, float]]:
    """Seconds of a step by class of kernels and by operator, recomputation included."""
    classes: dict[str, _Spent] = {}
    named: dict[str, float] = {}
    for unit in case.units:
        repeated = case.micro_batches * unit.times
        own = _device_s(unit.cost)
        kernels = list(_kernels(case, unit))
        if abs(sum(seconds for _, _, seconds, _ in kernels) - own) > MEASURED_FROM * own:
            kernels = [("measured blocks", "whole blocks", own, 0.0)]
        for kind, name, seconds, flops in kernels:
            spent = classes.setdefault(kind, _Spent())
            spent.seconds += repeated * seconds
            spent.flops += repeated * flops
            named[name] = named.get(name, 0.0) + repeated * seconds
    return classes, named


def _device_s(cost: Record) -> float:
    """Seconds of the kernels of a unit for one micro-batch, recomputation included."""
    return float(cost.forward_s + cost.backward_s + cost.recompute_s)


def _kernels(case: Bottleneck, unit: BottleneckUnit) -> Iterator[tuple[str, str, float, float]]:
    """Class, name, predicted seconds and FLOPs of every kernel of a unit for one micro-batch."""
    evaluator, tables, segment = case.evaluator, case.evaluator.tables, unit.segment
    arrays = tables.arrays
    graph = evaluator.problem.graph
    fused = {i: group.members for group in fused_groups(graph) if group.kind == "attention" for i in group.members}
    where = evaluator.blocks.units[segment.unit]
    for k in range(segment.last - segment.first):
        row = segment.first + k
        kind = int(arrays.kernels["kind"][row])
        if kind == INSIDE:
            continue
        one = replace(
            segment,
            first=row,
            last=row + 1,
            chosen=np.ascontiguousarray(segment.chosen[k : k + 1]),
            recomputed=segment.recomputed[k : k + 1].copy(),
        )
        seconds = _device_s(case.cost(one, unit.incoming))
        if seconds <= 0.0:
            continue
        index = where.start + row - int(tables.spans[where.type])
        flops = 0.0
        if kind in _CLASSES and kind != MEASURED:
            members = [graph.operators[i] for i in (fused.get(index, (index,)) if kind == ATTENTION else (index,))]
            forward = sum(op.forward_flops.at(case.samples) for op in members)
            backward = sum(op.backward_flops.at(case.samples) for op in members)
            flops = forward * (2.0 if segment.recomputed[k] else 1.0) + backward
            flops *= float(arrays.kernels["visible_share"][row])
            for a, size in enumerate(case.stage.axes):
                if arrays.signatures["divides_work"][arrays.operators["first_signature"][row] + segment.chosen[k, a]]:
                    flops /= float(size)
        name = re.sub(r"(?<=\.)\d+(?=[./])", "*", graph.operators[index].name)
        what = _CLASSES.get(kind, "kernels bound by memory")
        if kind == ROOFLINE and graph.operators[index].kind in _RECURRENT:
            what = "recurrent layers"
        yield what, name, seconds, flops


# -- the pipeline -----------------------------------------------------------------------------------------------------


def _micro_batches(count: int) -> str:
    return "1 micro-batch" if count == 1 else f"{count} micro-batches"


def _bubble(case: Bottleneck, seconds: float) -> str:
    ranks, count = len(case.lowered.layout.stages), case.micro_batches
    virtual = len(case.lowered.chunks) // ranks
    busy = case.outcome.ranks["end_s"] - case.outcome.ranks["bubble_s"]
    text = f"the bubble of the pipeline: {ranks} ranks (pp), {_micro_batches(count)}, {case.lowered.kind}"
    text += f" with {virtual} stages a rank. " if virtual > 1 else ". "
    text += f"Ranks work between {in_seconds(float(busy.min()))} and {in_seconds(float(busy.max()))}"
    if case.lowered.kind in ("1f1b", "gpipe", "interleaved"):
        text += f"; equal ones would wait {(ranks - 1) / (count * virtual):.1%} of their work, (pp - 1) / "
        text += "micro-batches" + (" / virtual stages" if virtual > 1 else "")
    return text + "." + case.gain(case.batches(2.0), f"{2 * count} micro-batches of half the size")


def _exchange(case: Bottleneck, seconds: float) -> str:
    sent = max((float(unit.cost.boundary_bytes) for unit in case.units if unit.sends), default=0.0)
    rate = float(case.lowered.layout.send_bytes_per_s[case.rank])
    text = f"exchanges with the neighbours in the pipeline: {_micro_batches(case.micro_batches)}"
    if sent > 0.0:
        text += f", {in_bytes(sent)} a device to the next rank at {in_rate(rate)}"
        text += f", {case.settings.send_overlap:.0%} of it hidden"
    text += f"; the host takes {in_seconds(float(case.settings.send_s))} for each."
    return text + case.gain(case.batches(0.5), "Micro-batches twice as large")


# -- collectives ------------------------------------------------------------------------------------------------------


def _collective(kind: int) -> Callable[[Bottleneck, float], str]:
    def say(case: Bottleneck, seconds: float) -> str:
        found: dict[int, list[float]] = {}
        for unit in case.units:
            records = case.evaluator.collectives(case.lowered, case.rank, unit.segment, unit.incoming)
            for record in records[records["kind"] == kind]:
                sums = found.setdefault(int(record.axis), [0.0, 0.0, 0.0, 0.0])
                for place, each in enumerate((1.0, record.data_bytes, record.seconds, record.shown_s)):
                    sums[place] += unit.times * float(each)
        axis = max(found, key=lambda a: found[a][1])
        count, data, took, shown = found[axis]
        rate = float(case.stage.links["bytes_per_s"][axis, kind])
        hidden = 1.0 - shown / took
        text = f"{_KINDS[COLLECTIVES[kind]]} on {case.where(axis)}, {in_rate(rate)}): {count:.0f} a micro-batch of "
        text += f"{in_bytes(data / count)} on average, {_micro_batches(case.micro_batches)}"
        text += f"; {hidden:.0%} of their time is hidden." if hidden > _ROUNDING else "; nothing hides them."
        if case.total("recompute_comm_s", index=kind) > 0.0:
            text += " Recomputation repeats those of the forward pass."
            return text + case.gain(case.without_recomputation(), "Keeping all activations")
        return text + case.gain(case.batches(0.5), "Micro-batches twice as large")

    return say


def _zero(case: Bottleneck, seconds: float) -> str:
    axes = [a for a, on in enumerate(case.lowered.zero_axes) if on]
    rate = min(float(case.stage.links["gather_bytes_per_s"][a]) for a in axes)
    weights = max(case.total("gathered", index=a) for a in axes)
    gradients = max(case.total("scattered", index=a) for a in axes)
    stage = case.lowered.zero
    settings = case.settings
    overlap = settings.gather_overlap if stage >= 3 else settings.gradient_overlap
    what = f"gathers of {in_bytes(weights * settings.parameter_bytes)} of weights, twice, and " if stage >= 3 else ""
    text = f"ZeRO {stage} on {case.where(axes[0])}, {in_rate(rate)}): {what}scatters of "
    text += f"{in_bytes(gradients * settings.sent_gradient_bytes)} of gradients each micro-batch, "
    text += f"{case.micro_batches} of them; "
    text += f"up to {overlap:.0%} hides under the passes." if overlap > 0.0 else "nothing hides them."
    larger = case.gain(case.batches(0.5), "Micro-batches twice as large")
    return text + (larger or case.gain(replace(case.lowered, zero=1), "ZeRO 1"))


def _sync(case: Bottleneck, seconds: float) -> str:
    reduced, gathered = [], []
    mine = case.outcome.averaging
    for axis in range(len(case.stage.axes)):
        data = case.reduced(axis) * float(case.settings.sent_gradient_bytes)
        if data > 0.0 and case.stage.axes[axis] > 1.0 and (mine is None or axis != mine.axis):
            rate = float(case.stage.links["bytes_per_s"][axis, ALL_REDUCE])
            reduced.append(f"{in_bytes(data)} on {case.where(axis)}, {in_rate(rate)})")
        data = case.gathered(axis) * float(case.settings.parameter_bytes)
        if data > 0.0 and case.stage.axes[axis] > 1.0:
            rate = float(case.stage.links["gather_bytes_per_s"][axis])
            gathered.append(f"{in_bytes(data)} on {case.where(axis)}, {in_rate(rate)})")
    backward = case.total("backward_s", "recompute_s", "backward_host_s")
    parts = ["the exposed part of the reduction of gradients: " + ", ".join(reduced)] if reduced else []
    parts += ["gathers of the weights that the optimizer updated in parts: " + ", ".join(gathered)] if gathered else []
    text = "; ".join(parts or ["the gradients of weights that two stages share"])
    hidden = float(case.settings.gradient_overlap)
    text += f". Up to {hidden:.0%} hides under the last backward pass of {in_seconds(backward)}." if hidden else "."
    return text + case.gain(case.batches(0.5), "Micro-batches twice as large")


def _averaging(case: Bottleneck, seconds: float) -> str:
    mine = case.outcome.averaging
    assert mine is not None
    sync, took = mine.sync, mine.all_reduce_s[case.rank]
    data = AVERAGED_BYTES * float(case.result.parameter_bytes / case.settings.parameter_bytes)
    rate = float(case.stage.links["bytes_per_s"][mine.axis, ALL_REDUCE])
    every = "every step" if sync.period == 1 else f"every {sync.period} steps"
    text = f"the averaging of replicas, {every}: {in_bytes(data)} on {case.where(mine.axis)}, {in_rate(rate)}) in "
    text += f"{in_seconds(took)}, {in_seconds(mine.copies_s[case.rank])} to copy them"
    if sync.delay is not None:
        rest = seconds * (sync.period or 1) - mine.copies_s[case.rank]
        what = f"{in_seconds(took - rest)} of it" if rest > _ROUNDING * took else "all of it"
        text += (
            f"; the {sync.delay} steps of the delay hide {what}" if sync.delay > 1 else f"; the next step hides {what}"
        )
    return text + "."


# -- the rest ---------------------------------------------------------------------------------------------------------


def _optimizer(case: Bottleneck, seconds: float) -> str:
    rate, moved = float(case.stage.hardware.bytes_per_s), float(case.settings.update_bytes)
    text = f"the optimizer: {seconds * rate / moved / 1e9:.3g} G parameters a device, {moved:.0f} bytes moved for "
    text += f"each at {in_rate(rate)}, {in_bytes(float(case.result.optimizer_bytes))} of state."
    if case.lowered.zero == 0 and case.lowered.zero_axes.any() and case.outcome.averaging is None:
        text += case.gain(replace(case.lowered, zero=1), "ZeRO 1")
    return text


def _overhead(case: Bottleneck, seconds: float) -> str:
    each, once = float(case.settings.micro_batch_s), float(case.settings.step_s)
    which = f"each of {case.micro_batches} micro-batches" if case.micro_batches > 1 else "the micro-batch"
    text = f"host time beside the operators: {in_seconds(each)} for {which} and "
    text += f"{in_seconds(once)} a step."
    return text + case.gain(case.batches(0.5), "Micro-batches twice as large")
