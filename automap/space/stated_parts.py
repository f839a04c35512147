"""The parts of a plan that follow from stated degrees: mesh axes, signatures in Megatron's pattern, chunks of layers.

Published runs and the strategies that users state are built from these parts. Nothing is priced here. Units: samples.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from automap.arrays import Ints, Mask
from automap.hints import Fix, Hints
from automap.price.evaluator import Evaluator, by_type
from automap.price.lowered_plan import Segment
from automap.space.megatron import AxisChoice
from automap.space.shape import Shape
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures
from automap.targets import ANY
from ir.factors import BROADCAST, PARTIAL, Placement
from ir.graph import Operator
from ir.groups import fused_groups
from ir.layers import layer_spans, layer_units
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT
from ir.operators.measured import LAYER


class Unpriced(Exception):
    """A run cannot be priced; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One mesh axis of a run."""

    name: str
    """Name of the axis."""
    size: int
    """Ranks of the axis."""
    split: Literal["batch", "sequence", "weights"]
    """Dim that dense operators split over the axis."""
    experts: Literal["alike", "spread", "sliced"] = "alike"
    """Whether experts are spread over the axis, or each expert is sliced; `alike` = experts split the same dim as dense
    operators."""
    shards_states: bool = True
    """Whether ZeRO shards over the axis."""


def mesh(
    *,
    dp: int,
    tp: int,
    cp: int = 1,
    ep: int = 1,
    slices: int | None = None,
    states: int | None = None,
    sequence_parallel: bool = False,
) -> list[Axis]:
    """Mesh axes of the stated degrees, the last one over consecutive devices: data, context, tensor parallelism.

    Args:
        dp: number of replicas.
        tp: ranks that split the weights of dense operators.
        cp: parts of the sequence.
        ep: ranks over which experts are spread. They are taken from the innermost axes outwards (Megatron-Core's
            parallel folding, arXiv 2504.14960): from tp if experts are not sliced, then from cp, then from dp.
        slices: slices of each expert, 1 or tp; None = tp unless ep takes all ranks.
        states: replicas that share optimizer states, the inner part of dp; None = all.
        sequence_parallel: whether tp splits the sequence between products.

    Raises:
        Unpriced: the degrees do not fit each other.
    """
    tensor = Axis(name="tp", size=tp, split="weights", shards_states=False)
    context = Axis(name="cp", size=cp, split="sequence")
    if states is not None and ep > 1:
        raise Unpriced("optimizer states of experts over a part of the ranks")
    if slices is None:
        slices = tp if dp * cp % ep == 0 else 1
    left = ep
    if slices == tp:
        tensor = replace(tensor, experts="sliced")
    elif slices == 1 and sequence_parallel and ep % tp == 0:
        tensor, left = replace(tensor, experts="spread"), ep // tp
    else:
        raise Unpriced(f"experts in {slices} slices, dense operators in {tp}")
    if left > 1 and left % cp == 0:
        context, left = replace(context, experts="spread"), left // cp
    inner = Axis(name="ep", size=left, split="batch", experts="spread")
    if states is not None:
        inner = Axis(name="zero", size=states, split="batch")
    if dp % inner.size:
        what = f"ep = {ep}" if states is None else f"optimizer states over {states} ranks"
        raise Unpriced(f"{what} does not fit dp = {dp}, cp = {cp}, tp = {tp}")
    outer = Axis(name="dp", size=dp // inner.size, split="batch", shards_states=states is None)
    return [outer, *(axis for axis in (inner, context) if axis.size > 1), tensor]


def signatures(evaluator: Evaluator, shape: Shape, axes: Sequence[Axis], *, sequence_parallel: bool) -> Ints:
    """[operator rows, axes] signatures in Megatron's pattern, with experts spread or sliced as the axes say."""
    space = stage_space(evaluator, shape)
    prefix = space.even_values(space.shapes[0], recompute="none", zero=0)
    values = megatron_signatures(space, space.shapes[0], prefix, sequence_parallel=sequence_parallel)
    dense = space.signatures(values)
    mixtures = _mixtures(space)
    columns = []
    for axis in axes:
        if axis.split == "sequence":
            column = _follow(space, 1, axis.experts)
        elif axis.split == "batch":
            column = np.where(mixtures, _follow(space, 0, axis.experts), dense[:, 0])
        elif sequence_parallel and axis.size > 1:
            column = np.where(mixtures, _follow(space, 1, axis.experts), dense[:, 1])
        else:
            column = dense[:, 1]
        columns.append(column)
    return np.ascontiguousarray(np.column_stack(columns))


def stage_space(evaluator: Evaluator, shape: Shape) -> PlanSpace:
    """The plans of one stage with the dp and tp of a shape, on devices of the first node's kind.

    Megatron's pattern depends on the degrees alone, so that one stage of a plan suffices to find it.
    """
    problem = evaluator.problem
    node = replace(problem.cluster.nodes[0], num_devices=shape.dp * shape.tp, count=1)
    training = replace(problem.training, target=ANY)
    small = replace(problem, cluster=replace(problem.cluster, nodes=(node,), bandwidth_GBps=None), training=training)
    fix = Fix(dp=shape.dp, tp=shape.tp, pp=1, cp=1, ep=1, num_micro_batches=shape.num_micro_batches)
    return PlanSpace(replace(small, hints=Hints(fix=fix)), evaluator)


def _mixtures(space: PlanSpace) -> Mask:
    """[operator rows] whether an operator belongs to a mixture of experts, from the router to the sum over experts."""
    tables = space.evaluator.tables
    found = np.zeros(len(tables.type_of), dtype=np.bool_)
    for unit_type, unit in enumerate(space.linkage.types):
        ops = [space.operator(unit_type, offset) for offset in range(len(unit.signatures))]
        for op in ops:
            if op.kind == DISPATCH:
                # If the mixture is at the beginning of the unit, its tokens come from the unit before.
                first = next((k for k, other in enumerate(ops) if op.inputs[0] in other.outputs), -1)
                last = next(k for k, other in enumerate(ops) if other.kind == COMBINE and k > first)
                base = int(tables.spans[unit_type])
                found[base + first + 1 : base + last + 1] = True
    return found


def _follow(space: PlanSpace, dim: int, experts: str) -> Ints:
    """[operator rows] signatures that keep one dim of the tokens split, and all weights whole except for those of
    experts."""
    tables = space.evaluator.tables
    tensors = space.problem.graph.tensors
    found = np.zeros(len(tables.type_of), dtype=np.int64)
    for unit_type, unit in enumerate(space.linkage.types):
        placed: dict[str, Placement] = {} if unit.boundary_in is None else {unit.boundary_in: dim}
        ops = [space.operator(unit_type, offset) for offset in range(len(unit.signatures))]
        base = int(tables.spans[unit_type])
        for offset, (op, table) in enumerate(zip(ops, unit.signatures, strict=True)):
            placed |= {name: dim for name in op.inputs if tensors[name].role == "input"}
            legal = np.ones(len(table), dtype=np.bool_)
            best = _in_mixture(AxisChoice(space=space, op=op, table=table, legal=legal, placed=placed), experts)
            found[base + offset] = best
            placed.update(zip(op.outputs, table[best].outputs, strict=True))
        for offset in range(len(ops) - 1, -1, -1):
            made = ops[offset].outputs[0]
            reader = next((k for k in range(offset + 1, len(ops)) if made in ops[k].inputs), None)
            if ops[offset].is_view and reader is not None:
                signature = unit.signatures[reader][found[base + reader]]
                wanted = signature.inputs[ops[reader].inputs.index(made)]
                outputs = [s.outputs[0] for s in unit.signatures[offset]]
                found[base + offset] = outputs.index(wanted)
    return found


def _in_mixture(choice: AxisChoice, experts: str) -> int:
    """The signature that keeps operands in their placement; for experts, the one that spreads or slices them."""
    op, table = choice.op, choice.table
    if op.kind == PRODUCT and experts == "spread":
        spread = choice.experts()
        return choice.whole if spread is None else spread
    if op.kind == PRODUCT and experts == "sliced":
        return choice.weights(sequence_parallel=False)
    if op.kind == COMBINE:
        # Tokens return to the ranks from which they came. If the tokens are whole there, as after a view `[(b s), h]`,
        # the sum over slices of experts stays P.
        made, *taken = (choice.placed.get(name, BROADCAST) for name in op.inputs)
        if made == PARTIAL and all(placement == BROADCAST for placement in taken):
            return next(i for i, s in enumerate(table) if s.inputs == (made, *taken) and s.outputs[0] == PARTIAL)
        back = [i for i, s in enumerate(table) if s.inputs[1:] == tuple(taken) and s.outputs[0] == taken[0]]
        return back[0] if back else choice.follow()
    return choice.follow()


def chunks(
    evaluator: Evaluator,
    signatures: Ints,
    num_chunks: int,
    masks: Callable[[int], Mask],
    sizes: Sequence[int] | None = None,
) -> tuple[tuple[Segment, ...], ...]:
    """The layers divided over chunks as evenly as possible; the first and last chunks, with embedding and head, have
    fewer.

    Args:
        evaluator: of the problem.
        signatures: [operator rows, axes].
        num_chunks: number of chunks.
        masks: unit type -> [operators] whether each is recomputed.
        sizes: layers of each chunk; None = even.

    Raises:
        Unpriced: there are fewer layers than chunks, or not as many as `sizes` says.
    """
    kinds = [unit.type for unit in evaluator.blocks.units]
    numbers = _layers(evaluator)
    if num_chunks > len(kinds):
        raise Unpriced(f"{len(numbers)} layers cannot be cut into {num_chunks} stages")
    chosen = by_type(evaluator, signatures)
    inside = {*numbers, *(n for span in layer_spans(evaluator.problem.graph, evaluator.blocks) for n in span)}
    again = [masks(kind) if n in inside else evaluator.masks(kind)["none"] for n, kind in enumerate(kinds)]
    segments = [evaluator.segment(number, chosen, mask) for number, mask in enumerate(again)]
    if sizes is not None and (sum(sizes) != len(numbers) or len(sizes) != num_chunks):
        raise Unpriced(f"{len(numbers)} layers in {num_chunks} stages are not {', '.join(map(str, sizes))}")
    if sizes is not None and any(
        numbers[end - 1] == numbers[end] for end in itertools.accumulate(sizes[:-1]) if 0 < end < len(numbers)
    ):
        raise Unpriced(
            f"{', '.join(map(str, sizes))} layers cut what the model repeats as one: layers of several kinds"
        )
    units = sorted({*numbers})
    found = divided(segments, _ends(numbers, sizes) if sizes else _ends(units, _even(len(units), num_chunks)))
    if not all(found):
        raise Unpriced(f"{len(numbers)} layers cannot be cut into {num_chunks} stages")
    return found


def divided(segments: Sequence[Segment], ends: Iterable[int]) -> tuple[tuple[Segment, ...], ...]:
    """Units divided into chunks; `ends` has the number of units before the end of each chunk but the last."""
    return tuple(tuple(segments[a:b]) for a, b in itertools.pairwise([0, *ends, len(segments)]))


def chunks_of_modules(
    evaluator: Evaluator, signatures: Ints, modules: Sequence[int], masks: Callable[[int], Mask]
) -> tuple[tuple[Segment, ...], ...]:
    """The units divided into chunks with given numbers of consecutive modules, as torchgpipe states them.

    If the model has this total number of outermost modules, these are meant. Otherwise the source counts finer modules,
    and a share of them is assumed to be the same share of the operators. A chunk ends at the nearest end of a unit.

    Args:
        evaluator: of the problem.
        signatures: [operator rows, axes].
        modules: number of modules of each chunk.
        masks: unit type -> [operators] whether each is recomputed.

    Raises:
        Unpriced: a chunk would be empty.
    """
    graph, units = evaluator.problem.graph, evaluator.blocks.units
    live = [i for i, op in enumerate(graph.operators) if op.is_live]
    scoped = [i for i in reversed(live) if graph.operators[i].scope]
    starts = sorted({graph.operators[i].scope.partition(".")[0]: i for i in scoped}.values())
    before = list(itertools.accumulate(modules))
    if len(starts) == before[-1]:
        wanted = [starts[count] for count in before[:-1]]
    else:
        wanted = [live[round(len(live) * count / before[-1])] for count in before[:-1]]
    chosen = by_type(evaluator, signatures)
    segments = [evaluator.segment(number, chosen, masks(unit.type)) for number, unit in enumerate(units)]
    stops = [unit.stop for unit in units]
    found = divided(segments, (1 + min(range(len(stops)), key=lambda n: abs(stops[n] - end)) for end in wanted))
    if not all(found):
        raise Unpriced(f"{len(units)} units cannot be cut into stages of {', '.join(map(str, modules))} modules")
    return found


def layer_counts(evaluator: Evaluator, chunks: Sequence[Sequence[Segment]]) -> tuple[int, ...] | None:
    """Layers of each chunk in dataflow order; None if they are as even as possible."""
    numbers = Counter(_layers(evaluator))
    counts = [[numbers[unit] for unit in sorted({segment.unit for segment in chunk} & {*numbers})] for chunk in chunks]
    is_even = [len(some) for some in counts] == _even(len(numbers), len(chunks))
    return None if is_even else tuple(sum(some) for some in counts)


def recompute_masks(evaluator: Evaluator, trainer: str, mode: str) -> Callable[[int], Mask]:
    """The operators that a trainer recomputes in a mode: unit type -> [operators] whether each is recomputed.

    TorchTitan's selective mode saves the results of attention and of every second matrix product (its option `op`). All
    other trainers recompute the core of attention; this is nothing if one fused kernel computes it, which saves no
    scores.
    """
    if not trainer.startswith("torchtitan") or mode != "selective":
        return lambda kind: evaluator.masks(kind)[mode]
    tables, units = evaluator.tables, evaluator.blocks
    graph = evaluator.problem.graph
    attention = {i for group in fused_groups(graph) if group.kind == "attention" for i in group.members}

    def mask(kind: int) -> Mask:
        found = np.ones(len(tables.rows(kind)), dtype=np.bool_)
        start, products = units.representative(kind).start, 0
        for k in range(len(found)):
            if start + k in attention:
                found[k] = False
            elif graph.operators[start + k].kind in ("MatMul", "Gemm"):
                products += 1
                found[k] = products % 2 == 0
        return found

    return mask


def _layers(evaluator: Evaluator) -> list[int]:
    """Numbers of the units that count as layers, each repeated by its number of layers.

    In a measured profile, they are the units with its layers. Otherwise they are the layers of `ir.layers`, such as
    those of an encoder and of a decoder; or, if these are fewer than half of the units with weights and have no
    attention, as in VGG, all units with weights.
    """
    graph, units = evaluator.problem.graph, evaluator.blocks.units
    measured = [i for i, u in enumerate(units) if any(op.kind == LAYER for op in graph.operators[u.start : u.stop])]
    if measured:
        return measured
    layers = layer_units(graph, evaluator.blocks)
    weighty = [i for i, u in enumerate(units) if any(map(graph.is_weight, _read(graph.operators[u.start : u.stop])))]
    every = [number for number, times in layers.items() for _ in range(times)]
    attention = {group.members[0] for group in fused_groups(graph) if group.kind == "attention"}
    attends = any(not attention.isdisjoint(range(units[n].start, units[n].stop)) for n in layers)
    return every if attends or 2 * len(layers) >= len(weighty) else weighty


def _read(operators: Sequence[Operator]) -> set[str]:
    """Names of all tensors that operators read."""
    return {name for op in operators for name in op.inputs}


def _even(layers: int, chunks: int) -> list[int]:
    """Layers of each chunk; the first and last chunks, with embedding and head, have fewer."""
    share, extra = divmod(layers, chunks)
    sizes = [share] * chunks
    for i in range(extra):
        sizes[(chunks - extra) // 2 + i] += 1
    return sizes


def _ends(layers: list[int], sizes: Sequence[int]) -> list[int]:
    """Units before the end of each chunk but the last."""
    starts = [*layers, layers[-1] + 1]
    return [starts[end] for end in itertools.accumulate(sizes[:-1])]
