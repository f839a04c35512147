"""Templates: expert plans, which a patient user of Megatron-LM would find.

A template splits the batch over dp and the weights over tp in the Megatron-LM manner (arXiv 1909.08053: columns, then
rows; heads of attention; the vocabulary; optionally the sequence between them, arXiv 2205.05198), cuts the pipeline
evenly, and is tuned over the full grid of shapes, ZeRO stages and recompute modes. A mixture of experts spreads whole
experts over ep, over which all other operators split the batch (all-to-alls bring tokens to the experts and back, arXiv
2006.16668), or over tp, or it slices them like any weight. Over cp all operators split the sequence; attention splits
its queries and gathers keys and values (arXiv 2407.21783, section 3.3.2). Shardings follow from the graph alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

from automap.price.lowered_plan import RECOMPUTE_MODES, spread
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Values
from ir.factors import BROADCAST, PARTIAL, Placement, Signature, whole_signature
from ir.graph import Operator
from ir.linkage import UnitLinkage
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT


def megatron_signatures(
    space: PlanSpace,
    shape: Shape,
    prefix: Values,
    *,
    sequence_parallel: bool,
    expert_axis: str = "ep",
    only_batch: bool = False,
) -> Values:
    """Adds signatures to the values before them: batch split over dp and ep, sequence over cp, weights over tp.

    Args:
        space: of the problem.
        shape: shape that `prefix` decides.
        prefix: values of the slots before the first signature.
        sequence_parallel: whether tp splits the sequence where tensors would be whole.
        expert_axis: axis that spreads experts, if the model and the mesh have them; "" = none.
        only_batch: whether tp splits the batch as dp does.
    """
    values = list(prefix)
    incoming: list[Placement] = [BROADCAST] * len(space.axes)
    for unit_type, unit in enumerate(space.linkage.types):
        placed: list[dict[str, Placement]] = [{} for _ in space.axes]
        if unit.boundary_in is not None:
            for where, placement in zip(placed, incoming, strict=True):
                where[unit.boundary_in] = placement
        for number, group in enumerate(unit.groups):
            op, table = space.operator(unit_type, group.leader), unit.signatures[group.leader]
            for axis, where in zip(space.axes, placed, strict=True):
                legal = space.legal(values)
                experts = _experts(op, table) if axis == expert_axis else None
                if axis == "tp" and not only_batch:
                    value = _megatron(space, unit, unit_type, number, legal, where, sequence_parallel)
                    value = experts if op.kind == DISPATCH and experts is not None and legal[experts] else value
                elif axis == "cp":
                    value = _along_sequence(space, op, table, legal, where)
                else:
                    inside = experts if op.kind == PRODUCT else None
                    if axis == expert_axis and op.kind != PRODUCT:
                        inside = _as_given(space, op, table, where)
                    value = next(
                        (v for v in (inside, _batch(op, table)) if v is not None and legal[v]), whole_signature(table)
                    )
                # The user's constraints may allow none of these.
                value = value if legal[value] else int(np.flatnonzero(legal)[0])
                values.append(value)
                _place(space, unit_type, unit, number, value, where)
        if unit.boundary_out is not None:
            found = [where.get(unit.boundary_out, BROADCAST) for where in placed]
            incoming = [BROADCAST if placement == PARTIAL else placement for placement in found]
    return tuple(values)


def _batch(op: Operator, table: tuple[Signature, ...]) -> int | None:
    for index, signature in enumerate(table):
        if signature.factor is not None and op.rule.factors[signature.factor].is_batch:
            return index
    return None


def _experts(op: Operator, table: tuple[Signature, ...]) -> int | None:
    """The signature that spreads experts, or None."""
    names = [None if s.factor is None else op.rule.factors[s.factor].name for s in table]
    return names.index("e") if op.kind in (DISPATCH, PRODUCT) and "e" in names else None


def _as_given(space: PlanSpace, op: Operator, table: tuple[Signature, ...], placed: dict[str, Placement]) -> int | None:
    """The signature that takes every activation in its present placement, at least one of them split; or None."""
    tensors = space.problem.graph.tensors
    own = [tensors[n].role == "activation" and not space.is_view(n) for n in op.inputs]
    have = [placed.get(n, BROADCAST) for n in op.inputs]
    for index, signature in enumerate(table):
        taken = [(p, h) for p, h, is_own in zip(signature.inputs, have, own, strict=True) if is_own]
        if signature.divides_work and all(p == h for p, h in taken) and any(p >= 0 for p, _ in taken):
            return index
    return None


def _along_sequence(
    space: PlanSpace,
    op: Operator,
    table: tuple[Signature, ...],
    legal: npt.NDArray[np.bool_],
    placed: dict[str, Placement],
) -> int:
    """The signature that takes the first split activation, and as many others as possible, in their present placement.

    Data inputs are split along their second dim, which costs nothing. Where there is no such signature, the operator is
    whole.
    """
    tensors = space.problem.graph.tensors
    have: dict[int, Placement] = {}
    for slot, name in enumerate(op.inputs):
        if tensors[name].role == "activation" and not space.is_view(name):
            have[slot] = placed.get(name, BROADCAST)
        elif tensors[name].role == "input" and tensors[name].batch_dim == 0 and len(tensors[name].shape) > 1:
            have[slot] = 1
    first = next((slot for slot, placement in have.items() if placement >= 0), None)
    best, best_score = whole_signature(table), -1
    for index, signature in enumerate(table):
        if first is not None and legal[index] and signature.divides_work and signature.inputs[first] == have[first]:
            score = sum(signature.inputs[slot] == placement for slot, placement in have.items())
            if score > best_score:
                best, best_score = index, score
    return best


def _place(
    space: PlanSpace, unit_type: int, unit: UnitLinkage, group_number: int, value: int, placed: dict[str, Placement]
) -> None:
    group = unit.groups[group_number]
    for member, index in zip(group.members, group.assignment[value], strict=True):
        op = space.operator(unit_type, member)
        for name, placement in zip(op.outputs, unit.signatures[member][index].outputs, strict=True):
            placed[name] = placement


def _megatron(
    space: PlanSpace,
    unit: UnitLinkage,
    unit_type: int,
    group_number: int,
    legal: npt.NDArray[np.bool_],
    placed: dict[str, Placement],
    sequence_parallel: bool,
) -> int:
    """Megatron's signature of one group on the tp axis; whole tensors where it is not legal.

    A product with a weight whose input is split along the summed dim takes it in this placement (rows), otherwise it
    splits the weight and the output (columns). An embedding splits its vocabulary. Products of activations and losses
    take split inputs in their placement (heads, classes), and so do operators that join two split inputs (a gate and
    the gated tensor). All other operators are whole, or split the sequence.
    """
    group = unit.groups[group_number]
    op = space.operator(unit_type, group.leader)
    table = unit.signatures[group.leader]
    tensors = space.problem.graph.tensors
    weights = [tensors[n].role == "parameter" or space.is_view(n) for n in op.inputs]
    have = [placed.get(n, BROADCAST) for n in op.inputs]

    def usable(signature: Signature, index: int) -> bool:
        batch = signature.factor is not None and op.rule.factors[signature.factor].is_batch
        return bool(legal[index]) and signature.divides_work and not batch

    if op.kind == COMBINE:
        # The sum over experts, or over slices of them, stays partial: tokens are fewer than slots of their k experts.
        for index, signature in enumerate(table):
            if legal[index] and signature.inputs == (have[0], BROADCAST, BROADCAST) and signature.outputs[0] == PARTIAL:
                return index
    given = _as_given(space, op, table, placed)
    best, best_rank = whole_signature(table), 0
    for index, signature in enumerate(table):
        if not usable(signature, index):
            continue
        splits_weight = any(w and p >= 0 for w, p in zip(weights, signature.inputs, strict=True))
        follows = any(
            p >= 0 and p == h for p, h, w in zip(signature.inputs, have, weights, strict=True) if not w
        ) and all(p in (h, BROADCAST) for p, h, w in zip(signature.inputs, have, weights, strict=True) if not w)
        whole_inputs = all(p == BROADCAST for p, w in zip(signature.inputs, weights, strict=True) if not w)
        output = signature.outputs[0]
        batched = tensors[op.outputs[0]].batch_dim is not None
        if op.kind == "Gather" and any(weights):
            rank = 2 if batched and splits_weight and output == PARTIAL else 0
        elif op.forward_flops.at(1) > 0 and any(weights):
            rank = 3 if splits_weight and follows else 2 if splits_weight and whole_inputs and output >= 0 else 0
        elif op.forward_flops.at(1) > 0 or op.kind == "SoftmaxCrossEntropyLoss":
            rank = 2 if follows else 0
        elif index == given:
            rank = 3
        else:
            along = tensors[op.outputs[0]]
            rank = 2 if sequence_parallel and output == 1 and along.batch_dim == 0 and len(along.shape) == 3 else 0
        if rank > best_rank:
            best, best_rank = index, rank
    return best


def meshes_of(space: PlanSpace, shape: Shape, prefix: Values) -> tuple[int, ...]:
    """All that `megatron_signatures` depend on: the meshes of the stages.

    With constraints they may also depend on the samples of a micro-batch, which must divide.
    """
    samples = shape.samples if space.problem.hints.constraints else 0
    return (*space.meshes.mesh(shape), *sorted(set(space.stage_devices(prefix))), samples)


def templates(space: PlanSpace) -> Iterator[tuple[Shape, Values]]:
    """Every template of the tuned grid, as values of `space`; virtual stages only where the user fixed them.

    Over an ep axis of several ranks experts are always spread. The largest share of every shape divides over the axes
    that split the batch: the signatures depend on its meshes alone. Where stages span hosts, tp may split the batch
    too: gradients are then reduced inside the hosts first, and only the results between the hosts. Two stages without
    inner axes are tried in all sizes (the plans that DAPPLE's planner mostly finds, arXiv 2007.01045), and pipelines in
    up to three orders of the devices.
    """
    fixed = space.problem.hints.fix
    modes = [mode for mode, is_legal in zip(RECOMPUTE_MODES, space.modes, strict=True) if is_legal]
    has_experts = any(op.kind == DISPATCH for op in space.problem.graph)
    known: dict[tuple[object, ...], Values] = {}
    for shape in space.shapes:
        if shape.virtual > 1 and fixed.virtual_stages is None:
            continue
        sizes = dict(zip(space.axes, space.meshes.mesh(shape), strict=True))
        zeros = np.flatnonzero(space.zeros).tolist() if shape.replicas > 1 else [0]
        # Experts that are spread over dp are templates of an ep axis alone.
        ways = ["", *(["tp"] if has_experts and shape.tp > 1 else [])]
        ways = ["ep"] if sizes.get("ep", 1) > 1 else ways
        insides = [(False, False), *([(True, False)] if shape.tp > 1 else [])]
        insides += [(False, True)] if _spans_hosts(space, shape) else []
        for (sequence_parallel, only_batch), way in product(insides, ways):
            if only_batch and way == "tp":
                continue
            # Unlike shares need not divide over tp.
            placed = [stages for stages in _stages(space, shape) if not (only_batch and stages[-1])]
            for stages, mode, zero in product(placed, modes, zeros):
                prefix = space.even_values(shape, recompute=mode, zero=zero, stages=stages)
                key = (*meshes_of(space, shape, prefix), sequence_parallel, only_batch, way)
                if key not in known:
                    full = megatron_signatures(
                        space,
                        shape,
                        prefix,
                        sequence_parallel=sequence_parallel,
                        expert_axis=way,
                        only_batch=only_batch,
                    )
                    known[key] = full[len(prefix) :]
                yield shape, (*prefix, *known[key])


def _spans_hosts(space: PlanSpace, shape: Shape) -> bool:
    """Whether stages have an inner axis, an outer axis over several hosts, and samples to split over both."""
    share = spread(shape.samples, shape.dp) // shape.dp // (shape.middle if space.meshes.splits_batch else 1)
    largest = max(host.num_devices for host in space.problem.cluster.hosts)
    spans = min(shape.tp, shape.dp) > 1 and space.meshes.devices // shape.pp > largest
    return spans and share % shape.tp == 0


def _stages(space: PlanSpace, shape: Shape) -> list[tuple[int, ...]]:
    """Values of the slots from `schedule` to `shares` that are tried with a shape."""
    # If there are more than three orders, the last one is the reverse of the first.
    count = space.meshes.num_orders(shape.pp)
    found: list[tuple[int, ...]] = [(0, order) for order in sorted({0, min(1, count - 1), count - 1})]
    first = space.meshes.values(shape)
    if shape.pp == 2 and shape.tp == shape.middle == 1 and space.meshes.may_differ(shape):
        found = [(*some, int(size)) for some in found for size in np.flatnonzero(space.legal((*first, *some)))]
    found = [(*some, *[0] * (space.shares_slot - space.first_stage - len(some))) for some in found]
    # Even shares and, with devices of several kinds, shares in proportion to their speed.
    return [(*some, int(way)) for some in found for way in np.flatnonzero(space.legal((*first, *some))[:2])]
