"""Stated strategies: a lowered plan from degrees of parallelism.

The batch is split over dp, weights over tp in Megatron's pattern, the sequence over cp, experts over ep, and layers are
divided evenly over pp. Degrees that do not divide the cluster, the batch or the model raise an error that names them.
Nothing is priced here. Units: samples.
"""

from __future__ import annotations

import math
import typing
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from automap.arrays import Ints
from automap.errors import PlanError, one_of
from automap.plan import ScheduleKind
from automap.price.degrees import sequence_length
from automap.price.evaluator import Evaluator, blank
from automap.price.lowered_plan import RECOMPUTE_MODES, LoweredPlan
from automap.price.stage_layout import PipelineLayout
from automap.problem import paired_micro_batches
from automap.space.shape import Shape, divisors
from automap.space.stated_parts import Axis, Unpriced, chunks, mesh, recompute_masks, signatures
from automap.space.target_patterns import split_for
from automap.targets import find_target
from ir.graph import Graph, Operator
from ir.groups import fused_groups
from ir.operators.experts import DISPATCH

SCHEDULES = tuple(kind for kind in typing.get_args(ScheduleKind) if kind != "explicit")

WHOLE_SHARE = 0.02
"""Share of the FLOPs that tp does not split from which there is a warning (assumed)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """A plan as users state it, by its degrees."""

    dp: int | None = None
    """Number of ranks that split the batch; None = the number of devices over the product of the other degrees."""
    tp: int = 1
    """Ranks that split the weights."""
    pp: int = 1
    """Pipeline ranks."""
    cp: int = 1
    """Ranks that split the sequence."""
    ep: int = 1
    """Ranks that share the experts: a divisor of dp, or of dp * cp where cp divides it."""
    micro_batch: int = 1
    """Samples of a micro-batch on one replica; if dp does not divide the batch, on the replica with most samples."""
    virtual: int = 1
    """Virtual stages of each pipeline rank."""
    schedule: str | None = None
    """Name of the pipeline schedule; None = interleaved with virtual stages, else 1f1b."""
    zero: int = 0
    """ZeRO stage, 0 to 3."""
    recompute: str = "none"
    """Recompute mode of all layers, one of `RECOMPUTE_MODES`, as the trainer means it (`recompute_masks`)."""
    sequence_parallel: bool = False
    """Whether tp splits the sequence between products."""
    may_idle: bool = False
    """Whether the last devices of the cluster may be idle if dp is stated, as in the configuration of a smaller
    cluster."""
    layers: tuple[int, ...] | None = None
    """Layers of each stage in dataflow order; None = as even as possible, with fewer in the first and last stages."""
    devices: tuple[int, ...] | None = None
    """Used devices in the order of the ranks; None = all of the cluster, in the order of their numbers."""
    shares: tuple[tuple[int, ...] | None, ...] = ()
    """Samples of a micro-batch on each replica of each stage; None or empty: as even as possible."""
    target: str | None = None
    """Name of the target whose trainer splits the weights, see `automap.targets`; None = the target of the problem."""


def hand_made(evaluator: Evaluator, strategy: Strategy) -> LoweredPlan:
    """The lowered plan of a strategy, on all of its devices, or on the first ones if others may be idle.

    Raises:
        PlanError: names the degree that does not fit, and values that do.
    """
    problem = evaluator.problem
    dp, kind = _degrees(evaluator, strategy), _schedule(strategy)
    axes = _mesh(dp, strategy)
    rows = _samples(problem.training.global_batch, dp, strategy)
    count = problem.training.global_batch // rows
    if not problem.pairs(strategy.pp, strategy.virtual, count):
        least = paired_micro_batches(strategy.pp, strategy.virtual)
        what = f"makes {count} micro-batches, and training.overlap_expert_exchange needs {least} or more"
        raise _refuse("micro_batch", strategy.micro_batch, what, "Use smaller ones, or leave that setting out.")
    if kind == "interleaved" and count % strategy.pp:
        what = f"interleaved stages need a multiple of pp = {strategy.pp} micro-batches, not {count}"
        repair = "Change the micro-batch or the global batch, or leave out --virtual."
        raise _refuse("virtual", strategy.virtual, what, repair)
    shape = Shape(pp=strategy.pp, tp=strategy.tp, dp=dp, num_micro_batches=count, samples=rows)
    _check_shares(strategy, axes[0].size, rows)
    target = problem.target if strategy.target is None else find_target(strategy.target)
    if target is None:
        chosen = signatures(evaluator, shape, axes, sequence_parallel=strategy.sequence_parallel)
    else:
        chosen = split_for(target, evaluator, shape, axes, sequence_parallel=strategy.sequence_parallel)
    if strategy.tp > 1:
        _check_heads(evaluator, chosen, strategy.tp)
    if strategy.ep > 1:
        _check_experts(evaluator, strategy.ep)
    try:
        again = recompute_masks(evaluator, problem.trainer.name, strategy.recompute)
        parts = chunks(evaluator, chosen, strategy.pp * strategy.virtual, again, sizes=strategy.layers)
    except Unpriced as fault:
        if strategy.layers is not None:
            repair = (
                f"Give {strategy.pp * strategy.virtual} numbers, one a stage, that add up to the layers of the model."
            )
            raise _refuse("layers", strategy.layers, str(fault), repair) from None
        degree = "virtual" if strategy.virtual > 1 else "pp"
        raise _refuse(degree, getattr(strategy, degree), str(fault), "Use fewer stages.") from None
    return LoweredPlan(
        axes=tuple(axis.name for axis in axes),
        layout=_layout(evaluator, strategy, [axis.size for axis in axes]),
        num_micro_batches=count,
        samples=rows,
        kind=kind,
        chunks=parts,
        zero=strategy.zero if dp * strategy.cp > 1 else 0,
        zero_axes=np.array([axis.size > 1 and axis.shards_states for axis in axes]),
        spread_over=(0,) * strategy.pp if rows % dp else (),
        shares=strategy.shares,
    )


def _mesh(dp: int, strategy: Strategy) -> list[Axis]:
    """The mesh axes of each stage."""
    try:
        return mesh(dp=dp, tp=strategy.tp, cp=strategy.cp, ep=strategy.ep, slices=strategy.tp)
    except Unpriced as fault:
        raise _refuse("ep", strategy.ep, str(fault), f"Use a divisor of dp, {_words(divisors(dp))}.") from None


def _layout(evaluator: Evaluator, strategy: Strategy, sizes: Sequence[int]) -> PipelineLayout:
    """Equal meshes over the devices of a strategy, one for each pipeline rank."""
    if strategy.devices is None:
        return evaluator.layout(sizes, strategy.pp)
    each = math.prod(sizes)
    starts = range(0, each * strategy.pp, each)
    return evaluator.layout_of([(strategy.devices[first : first + each], sizes) for first in starts])


def _check_shares(strategy: Strategy, replicas: int, rows: int) -> None:
    """Raises a `PlanError` for shares that do not divide a micro-batch among the replicas of each stage."""
    for mine in strategy.shares:
        if len(strategy.shares) != strategy.pp or (mine is not None and (len(mine), sum(mine)) != (replicas, rows)):
            what = f"do not divide {rows} samples of a micro-batch among {replicas} replicas of {strategy.pp} stages"
            raise _refuse("shares", strategy.shares, what, "Leave them out: replicas have equal shares then.")


def _samples(batch: int, dp: int, strategy: Strategy) -> int:
    """Samples of a micro-batch: dp times those of a replica, of the fullest one where dp does not divide the batch."""
    each = micro_batches(batch, dp, strategy)
    if strategy.micro_batch not in each:
        what = f"the global batch of {batch} is not a multiple of dp * micro_batch = {dp * strategy.micro_batch}"
        if each and batch % dp:
            what = f"dp {dp} does not divide the global batch of {batch}, so replicas take unequal numbers of samples, "
            what += f"and the fullest one cannot have {strategy.micro_batch} in a micro-batch"
        raise _refuse(
            "micro_batch" if each else "dp",
            strategy.micro_batch if each else dp,
            what,
            f"Use a micro-batch of {_words(sorted(each))}." if each else "Use a global batch that dp divides.",
        )
    return each[strategy.micro_batch]


def micro_batches(batch: int, dp: int, strategy: Strategy) -> dict[int, int]:
    """Possible samples of a micro-batch on the replica with most samples -> its samples on all dp replicas.

    Raises:
        PlanError: ep does not divide the replicas.
    """
    if batch % dp == 0:
        return {mine: mine * dp for mine in divisors(batch // dp)}
    # Samples are divided over the outer axis as evenly as possible; ep divides the samples of each index evenly.
    outer = _mesh(dp, strategy)[0].size
    inner = dp // outer
    most = {-(-samples // outer): samples for samples in divisors(batch) if samples >= dp}
    return {mine // inner: samples for mine, samples in most.items() if mine % inner == 0}


def _degrees(evaluator: Evaluator, strategy: Strategy) -> int:
    """The data-parallel degree, after a check of all degrees."""
    for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch", "virtual"):
        value = getattr(strategy, name)
        if value is not None and value < 1:
            raise _refuse(name, value, "must be positive", "Give 1 or more, or leave it out.")
    devices = len(strategy.devices or range(evaluator.problem.cluster.num_devices))
    others = strategy.tp * strategy.pp * strategy.cp
    if strategy.may_idle and strategy.dp is not None:
        devices = min(devices, strategy.dp * others)
    if devices % others:
        name = next(n for n in ("tp", "pp", "cp") if getattr(strategy, n) > 1)
        what = f"tp * pp * cp = {others} does not divide the {devices} devices of the cluster"
        repair = f"Make their product one of {_words(divisors(devices))}."
        raise _refuse(name, getattr(strategy, name), what, repair)
    dp = devices // others
    if strategy.dp not in (None, dp):
        what = f"dp * tp * pp * cp = {strategy.dp * others} is not the number of devices, {devices}"
        raise _refuse("dp", strategy.dp, what, f"Use dp = {dp}, or leave it out.")
    length = sequence_length(evaluator.problem.graph)
    if strategy.cp > 1 and (length is None or length % strategy.cp):
        has = "the model has no sequence" if length is None else f"does not divide the sequence of {length} tokens"
        repair = "Leave it out." if length is None else f"Use one of {_words(divisors(length))}."
        raise _refuse("cp", strategy.cp, has, repair)
    if not 0 <= strategy.zero <= 3:
        raise _refuse("zero", strategy.zero, "no such ZeRO stage", "Give 0 to 3.")
    if strategy.recompute not in RECOMPUTE_MODES:
        raise _refuse("recompute", strategy.recompute, "no such mode", one_of(RECOMPUTE_MODES, strategy.recompute))
    if evaluator.problem.training.overlap_expert_exchange:
        what = "does not go with training.overlap_expert_exchange"
        if strategy.pp > 1 and strategy.virtual == 1:
            raise _refuse("virtual", 1, f"{what} in pipelines", "Use 2 or more, or leave that setting out.")
        if strategy.recompute == "full":
            raise _refuse("recompute", "full", what, "Use selective, or leave that setting out.")
    return dp


def _schedule(strategy: Strategy) -> str:
    kind = strategy.schedule or ("interleaved" if strategy.virtual > 1 else "1f1b")
    if kind not in SCHEDULES:
        raise _refuse("schedule", kind, "no such schedule", one_of(SCHEDULES, kind))
    if strategy.virtual > 1 and strategy.pp == 1:
        what = "one pipeline rank has no virtual stages"
        raise _refuse("virtual", strategy.virtual, what, "Leave it out, or give a pp of 2 or more.")
    if (kind == "interleaved") != (strategy.virtual > 1):
        repair = "Give --virtual 2 or more." if kind == "interleaved" else "Use interleaved, or leave one of them out."
        raise _refuse("schedule", kind, f"does not go with {strategy.virtual} stages a rank", repair)
    return kind


def _check_heads(evaluator: Evaluator, chosen: Ints, tp: int) -> None:
    """Raises a `PlanError` for a tp that divides the heads of no attention, or splits no product at all.

    In models with unlike numbers of heads, such as pyramids, layers whose heads it does not divide stay whole.
    """
    graph = evaluator.problem.graph
    attention = [set(group.members) for group in fused_groups(graph) if group.kind == "attention"]
    whole = list(_whole_products(evaluator, chosen))
    undivided = {}
    for index in whole:
        heads = _heads(graph, graph.operators[index])
        if any(index in members for members in attention) and heads % tp:
            undivided[index] = heads
    if undivided and not _divides_attention(evaluator, attention, set(whole)):
        most = max(undivided, key=lambda index: len(divisors(undivided[index])))
        what = f"does not divide the {undivided[most]} heads of {graph.operators[most].name}"
        raise _refuse("tp", tp, what, f"Use one of {_words(divisors(undivided[most]))}.")
    units = [evaluator.blocks.representative(kind) for kind in range(evaluator.blocks.num_types)]
    products = {i for u in units for i in range(u.start, u.stop) if graph.operators[i].forward_flops.at(1) > 0.0}
    if products <= set(whole):
        raise _refuse("tp", tp, "divides no product of the model", "Use a smaller tp, or 1.")


def _heads(graph: Graph, op: Operator) -> int:
    """The number of heads of a product of attention: its number of matrix products for one sample."""
    if op.kind == "Einsum":
        # The heads may be any dim, as in "bhij,bjhd->bihd"; all operands and the result have this dim.
        operands = (*op.rule.inputs, *op.rule.outputs)
        shared = set.intersection(*({i for dim in dims for i in dim} for dims in operands))
        return math.prod(op.rule.factors[i].size for i in shared if not op.rule.factors[i].is_batch)
    tensor = graph.tensors[op.outputs[0]]
    return math.prod(size for dim, size in enumerate(tensor.shape[:-2]) if dim != tensor.batch_dim)


def _divides_attention(evaluator: Evaluator, attention: Sequence[Collection[int]], whole: Collection[int]) -> bool:
    """Whether tp splits all products of some attention.

    Args:
        attention: members of each attention.
        whole: operators that every rank of tp computes as a whole.
    """
    blocks, operators = evaluator.blocks, evaluator.problem.graph.operators
    units = [blocks.representative(kind) for kind in range(blocks.num_types)]
    for members in attention:
        products = [i for i in members if operators[i].forward_flops.at(1) > 0.0]
        is_priced = any(unit.start <= products[0] < unit.stop for unit in units) if products else False
        if is_priced and not any(index in whole for index in products):
            return True
    return False


def _whole_products(evaluator: Evaluator, chosen: Ints) -> Iterator[int]:
    """Operators with FLOPs, of one unit of each type, that every rank of tp, the last axis, computes as a whole."""
    tables, graph = evaluator.tables, evaluator.problem.graph
    for unit_type in range(evaluator.blocks.num_types):
        start = evaluator.blocks.representative(unit_type).start
        for offset, row in enumerate(tables.rows(unit_type)):
            signature = tables.arrays.signatures[tables.arrays.operators[row].first_signature + chosen[row, -1]]
            divided = signature.divides_work and not signature.splits_batch
            if graph.operators[start + offset].forward_flops.at(1) > 0.0 and not divided:
                yield start + offset


def recomputes_nothing(strategy: Strategy, lowered: LoweredPlan, trainer: str) -> tuple[str, ...]:
    """A warning if the stated recomputation has no effect."""
    if strategy.recompute == "none" or any(s.recomputed.any() for segments in lowered.chunks for s in segments):
        return ()
    what = f"{strategy.recompute} recomputation changes nothing: {trainer} recomputes the scores of attention in it"
    return (f"{what}, and the fused attention kernel saves no scores",)


def undivided(evaluator: Evaluator, lowered: LoweredPlan) -> tuple[str, ...]:
    """A warning if every rank of tp computes a large share of the FLOPs as a whole, see `WHOLE_SHARE`."""
    tp = int(lowered.layout.stages[0].axes[-1])
    if tp == 1:
        return ()
    chosen = blank(evaluator, len(lowered.zero_axes))
    for segments in lowered.chunks:
        for segment in segments:
            chosen[segment.first : segment.last] = segment.chosen
    graph, units = evaluator.problem.graph, evaluator.blocks.units
    times = Counter(unit.type for unit in units)
    kinds = {i: unit.type for unit in reversed(units) for i in range(unit.start, unit.stop)}
    amounts = {
        graph.operators[i].name: times[kinds[i]] * graph.operators[i].forward_flops.at(1)
        for i in _whole_products(evaluator, chosen)
    }
    share = sum(amounts.values()) / sum(op.forward_flops.at(1) for op in graph)
    if share < WHOLE_SHARE:
        return ()
    largest = max(amounts, key=lambda name: amounts[name])
    return (f"{share:.0%} of the FLOPs are not divided by tp = {tp}, most of them in {largest} and its like",)


def _check_experts(evaluator: Evaluator, ep: int) -> None:
    """Raises a `PlanError` for an ep that does not divide the number of experts."""
    graph = evaluator.problem.graph
    number = max((graph.tensors[op.outputs[0]].shape[0] for op in graph if op.kind == DISPATCH), default=0)
    if number == 0:
        raise _refuse("ep", ep, "the model has no experts", "Leave it out.")
    if number % ep:
        raise _refuse("ep", ep, f"does not divide the {number} experts", f"Use one of {_words(divisors(number))}.")


def _words(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _refuse(field: str, value: Any, message: str, repair: str) -> PlanError:
    return PlanError(message, field=field, value=value, repair=repair)
