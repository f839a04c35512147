"""Expert plans: what a patient Megatron user would find.

A template spreads batch over dp, weights over tp in the Megatron-LM manner (arXiv 1909.08053: columns, then rows;
heads of attention; vocabulary; optionally the sequence between them, arXiv 2205.05198), cuts the pipeline evenly, and
is tuned over the full grid dp x tp x pp x micro-batch x ZeRO x recompute. The experts of a mixture are sliced like
any weight, or spread whole over dp (tokens go to them and back by all-to-all, arXiv 2006.16668) or over tp.
Shardings follow from the graph alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt

from automap.price.evaluator import RECOMPUTE_MODES
from automap.space import AXES, PlanSpace, Shape, Values
from ir.factors import BROADCAST, PARTIAL, Placement, Signature, whole_signature
from ir.graph import Operator
from ir.linkage import UnitLinkage
from ir.operators.experts import COMBINE, DISPATCH, PRODUCT


def megatron_signatures(
    space: PlanSpace, shape: Shape, prefix: Values, *, sequence_parallel: bool, expert_axis: str = ""
) -> Values:
    """Completes `prefix` (all but the signatures) with batch splits on dp and Megatron's pattern on tp.

    Args:
        space: of the problem.
        shape: what `prefix` decided.
        prefix: values of the slots before the first signature.
        sequence_parallel: split the sequence where tensors would be whole on tp.
        expert_axis: the axis that spreads experts, or "".
    """
    values = list(prefix)
    incoming: Placement = BROADCAST
    for unit_type, unit in enumerate(space.linkage.types):
        placed: dict[str, Placement] = {}
        outer: dict[str, Placement] = {}
        if unit.boundary_in is not None:
            placed[unit.boundary_in] = incoming
        for group_number, group in enumerate(unit.groups):
            legal = space.legal(values)
            op, table = space.operator(unit_type, group.leader), unit.signatures[group.leader]
            experts = _experts(op, table)
            batch = _batch(op, table)
            if expert_axis == "dp":
                inside = experts if op.kind == PRODUCT else _as_given(space, op, table, outer)
                batch = batch if inside is None or not legal[inside] else inside
            values.append(batch if batch is not None and legal[batch] else whole_signature(table))
            _place(space, unit_type, unit, group_number, values[-1], outer)
            legal = space.legal(values)
            value = _megatron(space, unit, unit_type, group_number, legal, placed, sequence_parallel)
            if op.kind == DISPATCH and expert_axis == "tp" and experts is not None and legal[experts]:
                value = experts
            values.append(value)
            _place(space, unit_type, unit, group_number, value, placed)
        if unit.boundary_out is not None:
            incoming = placed.get(unit.boundary_out, BROADCAST)
            incoming = BROADCAST if incoming == PARTIAL else incoming
    return tuple(values)


def _batch(op: Operator, table: tuple[Signature, ...]) -> int | None:
    for index, signature in enumerate(table):
        if signature.factor is not None and op.rule.factors[signature.factor].is_batch:
            return index
    return None


def _experts(op: Operator, table: tuple[Signature, ...]) -> int | None:
    """The signature that spreads experts."""
    names = [None if s.factor is None else op.rule.factors[s.factor].name for s in table]
    return names.index("e") if op.kind in (DISPATCH, PRODUCT) and "e" in names else None


def _as_given(space: PlanSpace, op: Operator, table: tuple[Signature, ...], placed: dict[str, Placement]) -> int | None:
    """The signature that takes every activation as it is placed, some of them split."""
    tensors = space.problem.graph.tensors
    own = [tensors[n].role == "activation" and not space.is_view(n) for n in op.inputs]
    have = [placed.get(n, BROADCAST) for n in op.inputs]
    for index, signature in enumerate(table):
        taken = [(p, h) for p, h, is_own in zip(signature.inputs, have, own, strict=True) if is_own]
        if signature.divides_work and all(p == h for p, h in taken) and any(p >= 0 for p, _ in taken):
            return index
    return None


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
    """Megatron's choice for one group on the tp axis; falls back to whole tensors where it is not legal.

    Products with a weight take an input split along the summed dim as it is (rows), else split the weight and the
    output (columns). An embedding splits its vocabulary. Products of activations and losses follow split inputs
    (heads, classes), and so does what joins them (a gate and what it gates). Everything between stays whole, or is
    split along the sequence.
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
        # A sum over experts or over slices of them stays partial: tokens are fewer than the slots of their k experts.
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


def templates(space: PlanSpace) -> Iterator[tuple[Shape, Values]]:
    """Every template of the tuned grid, as values of `space`; virtual stages only where the user fixed them."""
    fixed = space.problem.hints.fix
    core = space.evaluator.has_core
    modes = [m for m in RECOMPUTE_MODES if fixed.recompute in (None, m) and (m != "selective" or core)]
    has_experts = any(op.kind == DISPATCH for op in space.problem.graph)
    known: dict[tuple[int, int, int, bool, str], Values] = {}
    for shape in space.shapes:
        if shape.virtual > 1 and fixed.virtual_stages is None:
            continue
        zeros = [0] if shape.dp == 1 else [fixed.zero] if fixed.zero is not None else [0, 1, 2, 3]
        spreads = ["", *(a for a, size in zip(AXES, (shape.dp, shape.tp), strict=True) if has_experts and size > 1)]
        for sequence_parallel, spread in product((False, True) if shape.tp > 1 else (False,), spreads):
            for mode, zero in product(modes, zeros):
                prefix = space.even_values(shape, recompute=mode, zero=zero)
                key = (shape.dp, shape.tp, shape.samples, sequence_parallel, spread)
                if key not in known:
                    full = megatron_signatures(
                        space, shape, prefix, sequence_parallel=sequence_parallel, expert_axis=spread
                    )
                    known[key] = full[len(prefix) :]
                yield shape, (*prefix, *known[key])


def data_parallel(space: PlanSpace) -> Iterator[Values]:
    """Pure data parallelism: dp over all devices, tuned over micro-batches, ZeRO and recompute."""
    for shape, values in templates(space):
        if shape.pp == 1 and shape.tp == 1:
            yield values


assert AXES == ("dp", "tp")  # the order in which signatures are appended above
