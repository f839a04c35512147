"""Templates: expert plans that a user of Megatron-LM would find by trying all settings.

A template splits the batch over dp and the weights over tp in the Megatron-LM manner (arXiv 1909.08053: columns, then
rows; heads of attention; the vocabulary; optionally the sequence between them, arXiv 2205.05198), cuts the pipeline
evenly, and is tuned over the full grid of shapes, ZeRO stages and recompute modes. A mixture of experts spreads whole
experts over ep, over which all other operators split the batch (all-to-alls bring tokens to the experts and back, arXiv
2006.16668), or over tp, or it slices them like any weight. Over cp all operators split the sequence; attention splits
its queries and gathers keys and values (arXiv 2407.21783, section 3.3.2). Shardings follow from the graph alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count, product
from typing import NamedTuple

import numpy as np

from automap.arrays import Mask
from automap.price.lowered_plan import RECOMPUTE_MODES, spread
from automap.space.megatron import AxisChoice
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Values
from ir.blocks import NORMALISATIONS
from ir.factors import BROADCAST, PARTIAL, Placement
from ir.linkage import Group
from ir.operators.experts import DISPATCH, PRODUCT


def megatron_signatures(
    space: PlanSpace,
    shape: Shape,
    prefix: Values,
    *,
    sequence_parallel: bool,
    expert_axis: str = "ep",
    only_batch: bool = False,
) -> Values:
    """The values of a template: `prefix` followed by signatures in Megatron's pattern.

    The batch is split over dp and ep, the sequence over cp, and weights over tp.

    Args:
        space: the plan space.
        shape: shape that `prefix` decides.
        prefix: values of the slots before the first signature.
        sequence_parallel: whether tp splits the sequence of tensors that would otherwise be whole.
        expert_axis: axis that spreads experts, if the model and the mesh have them; "" = none.
        only_batch: whether tp splits the batch as dp does.
    """
    values = np.zeros(len(space.slots), dtype=np.int64)
    values[: len(prefix)] = prefix
    for number, axis in enumerate(space.axes):
        # What does not concern an axis is left out, so that equal choices are made once.
        is_megatron = axis == "tp" and not only_batch
        own_axis = axis if axis == expert_axis else ""
        way = _Way(sequence_parallel and is_megatron, own_axis, only_batch and axis == "tp")
        legal = space.legal_on_axis(values, number)
        # Meshes with equal legal signatures get the same ones.
        key = (axis, way, legal.tobytes())
        column = space.chosen.get(key)
        if column is None:
            column = space.chosen[key] = _column(space, axis, way, legal)
        values[len(prefix) + number :: len(space.axes)] = column
    return tuple(values.tolist())


def _column(space: PlanSpace, axis: str, way: _Way, legal: Mask) -> list[int]:
    """[groups] signatures of all linkage groups on an axis.

    Args:
        space: the space.
        axis: name of the axis.
        way: how the axes are used.
        legal: [groups, values] what is allowed.
    """
    tensors = space.problem.graph.tensors.items()
    # Data inputs are split along the sequence, their second dim, at no cost.
    along = {n: 1 for n, t in tensors if t.role == "input" and t.batch_dim == 0 and len(t.shape) > 1}
    given: Mapping[str, Placement] = along if axis == "cp" else {}
    incoming: Placement = BROADCAST
    column: list[int] = []
    for unit_type, unit in enumerate(space.linkage.types):
        own = legal[len(column) : len(column) + len(unit.groups)]
        # Most units have equal legal signatures on many meshes.
        key = (unit_type, axis, way, incoming, own.tobytes())
        if key not in space.chosen:
            space.chosen[key] = _best_of_unit(space, unit_type, axis, way, own, given, incoming)
        of_unit, incoming = space.chosen[key]
        column += of_unit
    return column


def _best_of_unit(
    space: PlanSpace,
    unit_type: int,
    axis: str,
    way: _Way,
    legal: Mask,
    given: Mapping[str, Placement],
    incoming: Placement,
) -> tuple[list[int], Placement]:
    """Signatures of the linkage groups of a unit on an axis, and the placement of the tensor that leaves it.

    Args:
        space, unit_type, axis, way: see `_column`.
        legal: [groups of the unit, values] what is allowed.
        given: placements of data inputs.
        incoming: placement of the tensor that enters the unit.
    """
    unit = space.linkage.types[unit_type]
    placed = dict(given) if unit.boundary_in is None else {**given, unit.boundary_in: incoming}
    best = _of_unit(space, unit_type, axis, way, legal, placed)
    if axis == "tp" and not way.only_batch and best.divided < 1.0:
        # A split layer in front of a norm, such as an embedding of patches, may leave attention after it whole.
        apart = way._replace(norms_whole=True)
        starts = [placed]
        if incoming != BROADCAST and unit.boundary_in is not None:
            starts.insert(0, {**placed, unit.boundary_in: BROADCAST})
        others = (_of_unit(space, unit_type, axis, w, legal, s) for s in starts for w in (way, apart))
        best = max(best, *others, key=lambda found: round(found.divided, 9))
    if unit.boundary_out is None:
        return best.column, incoming
    found = best.placed.get(unit.boundary_out, BROADCAST)
    return best.column, BROADCAST if found == PARTIAL else found


class _UnitChoice(NamedTuple):
    """The signatures of one unit on an axis."""

    column: list[int]
    """[groups] signatures of its linkage groups."""
    placed: dict[str, Placement]
    """Placements of the tensors that it makes, and of those before it."""
    divided: float
    """Share of its FLOPs that is divided."""


def _of_unit(
    space: PlanSpace, unit_type: int, axis: str, way: _Way, legal: Mask, incoming: Mapping[str, Placement]
) -> _UnitChoice:
    """Signatures of the linkage groups of a unit, given the placements of tensors before it; see `_column`."""
    unit, placed = space.linkage.types[unit_type], dict(incoming)
    column: list[int] = []
    flops = divided = 0.0
    for number, group in enumerate(unit.groups):
        op = space.operator(unit_type, group.leader)
        table = unit.signatures[group.leader]
        allowed = legal[number, : len(table)]
        if way.norms_whole:
            narrowed = allowed & ~_splits_statistics(space, unit_type, group)
            allowed = narrowed if narrowed.any() else allowed
        choice = AxisChoice(space=space, op=op, table=table, legal=allowed, placed=placed)
        column.append(_value(choice, axis, way))
        for member, index in zip(group.members, group.assignment[column[-1]], strict=True):
            each, signature = space.operator(unit_type, member), unit.signatures[member][index]
            placed |= zip(each.outputs, signature.outputs, strict=True)
            flops += each.forward_flops.at(1)
            divided += each.forward_flops.at(1) if signature.divides_work else 0.0
    return _UnitChoice(column, placed, divided / flops if flops else 1.0)


def _splits_statistics(space: PlanSpace, unit_type: int, group: Group) -> Mask:
    """[signatures] whether a normalisation of a group is split along the dims of its statistics.

    The first entries are those of the values of the group, which are signatures of its leader.
    """
    unit = space.linkage.types[unit_type]
    found = np.zeros(len(unit.signatures[group.leader]), dtype=np.bool_)
    for position, member in enumerate(group.members):
        op = space.operator(unit_type, member)
        if op.kind in NORMALISATIONS:
            for value, indices in enumerate(group.assignment):
                factor = unit.signatures[member][indices[position]].factor
                found[value] |= factor is not None and op.rule.factors[factor].collective is not None
    return found


class _Way(NamedTuple):
    """The arguments of `megatron_signatures` about the use of the axes."""

    sequence_parallel: bool
    expert_axis: str
    only_batch: bool
    norms_whole: bool = False
    """Whether normalisations are whole along the dims of their statistics."""


def _value(choice: AxisChoice, axis: str, way: _Way) -> int:
    """Number of the signature that is chosen on an axis."""
    op, legal = choice.op, choice.legal
    experts = choice.experts() if axis == way.expert_axis else None
    value: int | None
    if axis == "tp" and not way.only_batch:
        spreads = op.kind == DISPATCH and experts is not None and legal[experts]
        value = experts if spreads else choice.weights(sequence_parallel=way.sequence_parallel)
    elif axis == "cp":
        value = choice.follow()
    else:
        inside = experts if op.kind == PRODUCT else choice.given() if axis == way.expert_axis else None
        value = next((v for v in (inside, choice.batch()) if v is not None and legal[v]), choice.whole)
    # The user's constraints may allow none of these.
    return value if value is not None and legal[value] else int(np.flatnonzero(legal)[0])


def meshes_of(space: PlanSpace, shape: Shape, prefix: Values) -> tuple[int, ...]:
    """A key of everything on which `megatron_signatures` depends: the meshes of the stages.

    With constraints, it also contains the samples of a micro-batch, which must divide evenly.
    """
    samples = shape.samples if space.problem.hints.constraints else 0
    return (*space.meshes.mesh(shape), *sorted(set(space.stage_devices(prefix))), samples)


def templates(space: PlanSpace, first: int = 0) -> Iterator[tuple[Shape, Values]]:
    """Every template of the grid from number `first` on, as values of the space.

    The space caches them, since a search lists them several times, which takes some seconds for thousands of devices.
    See `_made`.
    """
    if space.listing is None:
        space.listing = _made(space)
    for number in count(first):
        while number >= len(space.listed):
            found = next(space.listing, None)
            if found is None:
                return
            space.listed.append(found)
        yield space.listed[number]


def _made(space: PlanSpace) -> Iterator[tuple[Shape, Values]]:
    """Every template of the grid; with virtual stages only if the user fixed them.

    - Experts are always spread over an ep axis of several ranks.
    - If stages span hosts, tp may split the batch too. Gradients are then reduced inside the hosts first, and only the
      results between the hosts.
    - Two stages without inner axes are tried in all sizes, since DAPPLE's planner (arXiv 2007.01045) often finds such
      plans.
    - Pipelines are tried in up to three orders of the devices.

    The largest share of every shape divides over the axes that split the batch, so the signatures depend on its meshes
    alone.
    """
    fixed = space.problem.hints.fix
    modes = [mode for mode, is_legal in zip(RECOMPUTE_MODES, space.modes, strict=True) if is_legal]
    has_experts = any(op.kind == DISPATCH for op in space.problem.graph)
    known: dict[tuple[object, ...], Values] = {}
    at = space.first.zero
    for shape in space.shapes:
        if shape.virtual > 1 and fixed.virtual_stages is None:
            continue
        sizes = dict(zip(space.axes, space.meshes.mesh(shape), strict=True))
        zeros = np.flatnonzero(space.zeros_of(shape)).tolist() if shape.replicas > 1 else [0]
        # Templates spread experts over dp only if there is an ep axis.
        expert_axes = ["", *(["tp"] if has_experts and shape.tp > 1 else [])]
        expert_axes = ["ep"] if sizes.get("ep", 1) > 1 else expert_axes
        # The uses of tp: (sequence_parallel, only_batch) of `megatron_signatures`.
        splits = [(False, False), *([(True, False)] if shape.tp > 1 else [])]
        splits += [(False, True)] if _spans_hosts(space, shape) else []
        values = space.meshes.values(shape)
        placed = [(stages, meshes_of(space, shape, (*values, *stages))) for stages in _stages(space, shape)]
        for (sequence_parallel, only_batch), expert_axis in product(splits, expert_axes):
            if only_batch and expert_axis == "tp":
                continue
            for (stages, meshes), mode in product(placed, modes):
                if only_batch and stages[-1] and not _divide(space, shape, (*values, *stages)):
                    continue
                prefix = space.even_values(shape, recompute=mode, zero=0, stages=stages)
                key = (*meshes, sequence_parallel, only_batch, expert_axis)
                if key not in known:
                    full = megatron_signatures(
                        space,
                        shape,
                        prefix,
                        sequence_parallel=sequence_parallel,
                        expert_axis=expert_axis,
                        only_batch=only_batch,
                    )
                    known[key] = full[len(prefix) :]
                for zero in zeros:
                    yield shape, (*prefix[:at], zero, *prefix[at + 1 :], *known[key])


def _spans_hosts(space: PlanSpace, shape: Shape) -> bool:
    """Whether stages span several hosts and have an inner axis that may split the batch, with samples for both axes."""
    share = spread(shape.samples, shape.dp) // shape.dp // (shape.middle if space.meshes.splits_batch else 1)
    cluster = space.problem.cluster
    largest = max(node.num_devices for node in cluster.nodes)
    # With measured bandwidths, some devices of a host may have faster links to each other than to the rest.
    has_levels = cluster.bandwidth_GBps is not None or shape.size > largest
    spans = min(shape.tp, shape.dp) > 1 and has_levels and space.problem.hints.fix.may_split_batch("tp")
    return spans and share % shape.tp == 0


def _divide(space: PlanSpace, shape: Shape, prefix: Values) -> bool:
    """Whether the unlike shares of all ranks divide over tp."""
    return all(count % shape.tp == 0 for shares in space.batch_shares(prefix) for count in shares or ())


def _stages(space: PlanSpace, shape: Shape) -> list[tuple[int, ...]]:
    """Values of the slots from `schedule` to `shares` that are tried with a shape."""
    # If there are more than three orders, the last one is the reverse of the first.
    count = space.meshes.num_orders(shape.pp)
    found: list[tuple[int, ...]] = [(0, order) for order in sorted({0, min(1, count - 1), count - 1})]
    first = space.meshes.values(shape)
    if shape.pp == 2 and shape.tp == shape.middle == 1 and space.meshes.may_differ(shape):
        found = [(*some, int(size)) for some in found for size in np.flatnonzero(space.legal((*first, *some)))]
    found = [(*some, *[0] * (space.first.shares - space.first.schedule - len(some))) for some in found]
    shared: list[tuple[int, ...]] = []
    for some in found:
        ways = np.flatnonzero(space.legal((*first, *some))).tolist()
        # Even shares and, with devices of several kinds, shares in proportion to their speed; without a pipeline also
        # in proportion to their memory, since a device may be too small for its share by speed.
        shared += [(*some, way) for way in dict.fromkeys([*ways[:2], *(ways[-1:] if shape.pp == 1 else [])])]
    return shared
