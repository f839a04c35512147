"""Degrees of parallelism of a plan, read from the signatures of operators and not from the names of mesh axes.

An axis is named after the dims that operators with most of the FLOPs split over it: their batch, weights, the sequence,
another dim of activations, or none. Experts are looked at separately, since operators that are not experts use the same
axis for something else. This module counts FLOPs and prices nothing.
"""

from __future__ import annotations

import math
import typing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from automap.plan import AxisUse, Degrees
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan, Segment
from ir.blocks import NORMALISATIONS
from ir.factors import Signature
from ir.graph import Graph, Operator
from ir.groups import fused_groups
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT

EXPERT_KINDS = (DISPATCH, PRODUCT, COMBINE)
"""Kinds of operators that work on the slots of experts."""

_Split = Literal["batch", "weights", "positions", "heads", "sequence", "experts", "nothing"]
"""What one operator splits on an axis. `positions`: a dim of activations, while weights are whole; `sequence`:
positions of queries or keys in the core of attention; `heads`: any other dim in the core of attention."""


def degrees_of(lowered: LoweredPlan, evaluator: Evaluator) -> tuple[Degrees, ...]:
    """The degrees of every stage of a plan; one for all if they are alike."""
    every = [segment for segments in lowered.chunks for segment in segments]
    whole = [_amounts(evaluator, every, axis) for axis in range(len(lowered.axes))]
    # If no operator has FLOPs, as in a measured profile, operators are counted.
    whole = [some or _amounts(evaluator, every, axis, count=True) for axis, some in enumerate(whole)]
    along = [_splits_sequence(evaluator, every, axis) for axis in range(len(lowered.axes))]
    found = [_of_stage(lowered, evaluator, number, whole, along) for number in range(len(lowered.chunks))]
    return tuple(found[:1]) if all(each == found[0] for each in found) else tuple(found)


def sequence_length(graph: Graph) -> int | None:
    """Tokens of a sample: the second dim of the first integer data input, or None without one.

    Category numbers of a recommender, which are read column by column, are not tokens.
    """
    for tensor in graph.tensors.values():
        is_tokens = tensor.role == "input" and tensor.dtype.startswith("int") and tensor.name != "labels"
        if is_tokens and len(tensor.shape) == 2 and tensor.batch_dim == 0:
            readers = (graph.operators[reader] for reader in graph.consumers[tensor.name])
            parts = [graph.tensors[name].num_elements for op in readers for name in op.outputs]
            if tensor.shape[1] == 1 or any(part > 1 for part in parts) or not parts:
                return tensor.shape[1]
    return None


def _of_stage(
    lowered: LoweredPlan, evaluator: Evaluator, number: int, whole: Sequence[Counter[_Split]], along: Sequence[bool]
) -> Degrees:
    """The degrees of one stage.

    Args:
        whole: [axes] FLOPs of the whole model, see `_amounts`.
        along: [axes] whether most normalisations of the model split positions.
    """
    ranks = len(lowered.layout.stages)
    sizes = dict(zip(lowered.axes, lowered.layout.stages[number % ranks].axes.tolist(), strict=True))
    live = [axis for axis, name in enumerate(lowered.axes) if sizes[name] > 1]
    uses: dict[str, AxisUse] = {}
    # The layers decide, since an embedding or a head may be whole where layers are split.
    types = Counter(unit.type for unit in evaluator.blocks.units)
    layers = [s for s in lowered.chunks[number] if types[evaluator.blocks.units[s.unit].type] > 1]
    for axis in live:
        uses[lowered.axes[axis]] = _use(_amounts(evaluator, layers, axis), whole[axis])
    expert_axes = [lowered.axes[axis] for axis in live if whole[axis]["experts"]]
    of = Counter(dict.fromkeys(typing.get_args(AxisUse), 1))
    for name, use in uses.items():
        of[use] *= int(sizes[name])
    return Degrees(
        **of,
        expert=math.prod(int(sizes[name]) for name in expert_axes),
        sequence_parallel=any(along[axis] for axis in live if uses[lowered.axes[axis]] == "tensor"),
        pipeline=ranks,
        virtual_stages=len(lowered.chunks) // ranks,
        zero=lowered.zero,
        micro_batch=max(1, round(float(lowered.rank_samples[number % ranks])) // of["data"]),
        accumulation_steps=lowered.num_micro_batches,
        sequence_length=sequence_length(evaluator.problem.graph),
        axes=uses,
        expert_axes=tuple(expert_axes),
    )


def _use(stage: Counter[_Split], whole: Counter[_Split]) -> AxisUse:
    """The use of an axis in a stage.

    Args:
        stage: FLOPs of the stage's layers, see `_amounts`. If its layers have no products, `whole` decides.
        whole: FLOPs of the whole model.
    """
    dense: tuple[_Split, ...] = ("batch", "weights", "positions", "nothing")
    amounts = stage if any(stage[split] for split in dense) else whole
    largest = max(dense, key=lambda split: amounts[split])
    if largest == "positions":
        return "context" if whole["heads"] or whole["sequence"] else "other"
    uses: dict[_Split, AxisUse] = {"batch": "data", "weights": "tensor", "nothing": "repeated"}
    return uses[largest]


def _amounts(evaluator: Evaluator, segments: Iterable[Segment], axis: int, *, count: bool = False) -> Counter[_Split]:
    """For each way of splitting an axis, the FLOPs of the operators that do so; their number if `count`."""
    found: Counter[_Split] = Counter()
    known: dict[tuple[int, int, bytes], Counter[_Split]] = {}
    for segment in segments:
        key = (evaluator.blocks.units[segment.unit].type, segment.first, segment.chosen[:, axis].tobytes())
        if key not in known:
            known[key] = Counter()
            for op, signature, is_core in _operators(evaluator, segment, axis):
                amount = 1 if count else round(op.forward_flops.at(1))
                split = _split(evaluator.problem.graph, op, signature, is_core)
                # The core of attention has no weights, so it is not evidence that the batch or nothing is split.
                if amount and not op.is_view and not (is_core and split in ("batch", "nothing")):
                    known[key][split] += amount
        found += known[key]
    return found


def _split(graph: Graph, op: Operator, signature: Signature, is_core: bool) -> _Split:
    """What an operator splits on the axis of a signature, see `_Split`."""
    if signature.factor is None:
        return "nothing"
    factor = op.rule.factors[signature.factor]
    if factor.is_batch:
        return "batch"
    if op.kind in EXPERT_KINDS and factor.name == "e":
        return "experts"
    if any(p >= 0 and graph.is_weight(name) for name, p in zip(op.inputs, signature.inputs, strict=True)):
        return "weights"
    if not is_core:
        return "positions"
    # Scores are [..., queries, keys], results [..., queries, head size]; a split of keys sums the results.
    made = signature.outputs[0]
    is_last = made < 0 or made >= len(graph.tensors[op.outputs[0]].shape) - 2
    if op.kind == "Attention":
        return "sequence" if factor.name in ("s", "t") else "heads"
    return "sequence" if is_last else "heads"


def _operators(evaluator: Evaluator, segment: Segment, axis: int) -> Iterator[tuple[Operator, Signature, bool]]:
    """The operators of a segment, the signature of each on an axis, and whether it is in the core of attention."""
    unit = evaluator.blocks.units[segment.unit]
    linked = evaluator.tables.linkage.types[unit.type]
    begin = segment.first - int(evaluator.tables.spans[unit.type])
    for offset, value in enumerate(segment.chosen[:, axis].tolist(), begin):
        op = evaluator.problem.graph.operators[unit.start + offset]
        yield op, linked.signatures[offset][value], offset in linked.core or op.kind == "Attention"


def _splits_sequence(evaluator: Evaluator, segments: Iterable[Segment], axis: int) -> bool:
    """Whether most normalisations split positions on an axis."""
    graph = evaluator.problem.graph
    norms = {graph.operators[i].name for group in fused_groups(graph) if group.kind == "norm" for i in group.members}
    votes = 0
    for segment in segments:
        for op, signature, _ in _operators(evaluator, segment, axis):
            if op.kind in NORMALISATIONS or op.name in norms:
                # The last dim holds the features.
                made, placement = graph.tensors[op.outputs[0]], signature.outputs[0]
                votes += 1 if 0 <= placement < len(made.shape) - 1 and placement != made.batch_dim else -1
    return votes > 0
