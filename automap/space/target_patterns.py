"""Megatron's pattern of tensor, expert and context parallelism as signatures of operators, where it splits a model.

The configuration of such a trainer states degrees, and the trainer splits every layer in the same way. A pattern is
what it does with the operators of a model for some degrees; a fault says why it cannot do so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from automap.arrays import Ints, Mask
from automap.price.evaluator import Evaluator
from automap.space.module_fitting import for_modules
from automap.space.module_limits import finer_than_modules
from automap.space.shape import Shape
from automap.space.space import PlanSpace
from automap.space.stated_parts import Axis, Unpriced, mesh, signatures, stage_space
from automap.targets import Target
from ir.adapters import adapters
from ir.factors import BROADCAST
from ir.graph import Graph
from ir.groups import fused_groups
from ir.operators.experts import PRODUCT

NORMALISATIONS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
"""Kinds of operators that normalise the last dim of every position."""
SMALL_PRODUCT = 0.05
"""Largest share of the FLOPs of the largest product with which a product may be whole on every rank (assumed)."""


def has_attention(graph: Graph) -> bool:
    """Whether a model has transformer layers, to which the degrees in configurations apply."""
    return any(group.kind == "attention" for group in fused_groups(graph))


def num_layer_kinds(space: PlanSpace) -> int:
    """Kinds of units with attention."""
    groups = (group for group in fused_groups(space.problem.graph) if group.kind == "attention")
    inside = {index for group in groups for index in group.members}
    units = space.linkage.blocks.units
    return len({unit.type for unit in units if inside.intersection(range(unit.start, unit.stop))})


class Pattern(NamedTuple):
    """Megatron's pattern on the meshes of some degrees."""

    degrees: tuple[int, int]
    """tp, and size of the middle axis."""
    columns: Ints
    """[operator rows, axes] signatures."""
    live: tuple[int, ...]
    """Axes of several ranks; on the others all operators are whole."""
    fault: str = ""
    """Why the trainer cannot run it; empty = it can."""


def patterns(space: PlanSpace, target: Target, along: bool) -> Iterator[Pattern]:
    """The patterns for all degrees that split every layer.

    Degrees that split some operator in another way than smaller degrees do are left out, so that each group has one
    signature on each axis. A vocabulary that no degree divides stays whole, unless the trainer pads it.

    Args:
        along: whether tp splits the sequence between products.
    """
    name = None if space.meshes.middle is None else space.meshes.middle.name
    has_experts = any(op.kind == PRODUCT for op in space.problem.graph)
    known: dict[int, Ints] = {}
    weighty = _large_rows(space) | _table_rows(space)
    for tp, middle in sorted({(shape.tp, shape.middle) for shape in space.shapes}):
        fault = ""
        if tp * middle > 1 and not has_attention(space.problem.graph):
            fault = "the model has no attention, whose layers are split"
        elif tp > 1 and target.grain == "linear" and has_experts:
            fault = "the model has experts"
        if fault:
            yield Pattern((tp, middle), np.empty((0, 0), dtype=np.int64), (), fault)
            continue
        shape = max((s for s in space.shapes if (s.tp, s.middle) == (tp, middle)), key=lambda s: s.dp)
        ep, cp = (middle if name == "ep" else 1), (middle if name == "cp" else 1)
        try:
            axes = mesh(dp=shape.dp * ep, tp=tp, cp=cp, ep=ep, slices=tp)
        except Unpriced:
            continue
        own = replace(shape, dp=shape.dp * ep, middle=1)
        found = split_for(target, space.evaluator, own, axes, sequence_parallel=along)
        names = [axis.name for axis in axes]
        columns = np.column_stack([found[:, names.index(axis if axis in names else "dp")] for axis in space.axes])
        live = tuple(a for a, size in enumerate(space.meshes.mesh(shape)) if size > 1)
        fault = "" if tp == 1 else _unsplit(space, target, columns[:, -1], along)
        if not fault and any(not _is_split(space, columns[:, a], known.get(a, columns[:, a])) for a in live):
            fault = "a large product of the layers would be done by every rank"
        if fault:
            yield Pattern((tp, middle), columns, live, fault)
            continue
        firsts = {axis: known.setdefault(axis, columns[:, axis]) for axis in live}
        # This also holds outside of the layers, since configurations do not state how the vocabulary is split.
        rows = slice(None) if target.grain == "linear" else weighty
        if target.grain == "layers" or all((first == columns[:, axis])[rows].all() for axis, first in firsts.items()):
            yield Pattern((tp, middle), columns, live)


def split_for(
    target: Target, evaluator: Evaluator, shape: Shape, axes: Sequence[Axis], *, sequence_parallel: bool
) -> Ints:
    """[operator rows, axes] signatures in Megatron's pattern, as a target's trainer runs it on the meshes of a shape.

    Args:
        target: the target.
        evaluator: of the model.
        shape: has the degrees of one stage.
        axes: mesh axes of that stage, tensor parallelism last.
        sequence_parallel: whether tp splits the sequence between products.
    """
    tp = shape.tp
    found = signatures(evaluator, shape, axes, sequence_parallel=sequence_parallel and tp > 1)
    if tp == 1:
        return found
    space = stage_space(evaluator, shape)
    if sequence_parallel and target.grain != "operators":
        # Code around the layers reads sizes, such as the length of masks, from what embeddings return.
        whole = signatures(evaluator, shape, axes, sequence_parallel=False)
        found = np.where(_layer_rows(space)[:, None], found, whole)
    found[:, -1] = for_modules(space, found[:, -1], target.grain)
    return found


def _unsplit(space: PlanSpace, target: Target, column: Ints, along: bool) -> str:
    """The reason why a target cannot split weights by a column of signatures; empty if it can."""
    if fault := _unfit_norm(space, column, along=along):
        return fault
    if target.vocabulary_multiple > 1 and not _splits_head(space, column):
        return "the product with the vocabulary cannot be split"
    return "" if target.grain == "operators" else finer_than_modules(space, column, target.grain)


def _unfit_norm(space: PlanSpace, column: Ints, *, along: bool) -> str:
    """The reason why a column of signatures does not split the positions of all normalisations of the layers, or does
    not leave them whole; empty if it does.

    Args:
        along: whether positions must be split.
    """
    tables, graph = space.evaluator.tables, space.problem.graph
    tensors = graph.tensors
    for row in np.flatnonzero(_layer_rows(space)).tolist():
        unit_type = int(tables.type_of[row])
        offset = row - int(tables.spans[unit_type])
        op = space.operator(unit_type, offset)
        if op.kind in NORMALISATIONS:
            made = tensors[op.outputs[0]]
            placement = space.linkage.types[unit_type].signatures[offset][column[row]].outputs[0]
            is_along = 0 <= placement < len(made.shape) - 1 and placement != made.batch_dim
            if not (is_along if along else placement == BROADCAST):
                sizes = [size for dim, size in enumerate(made.shape[:-1]) if dim != made.batch_dim]
                what = f"share the {' x '.join(map(str, sizes))} positions" if along else "each have the whole result"
                return f"ranks cannot {what} of {graph.place(op)}"
    return ""


def _is_split(space: PlanSpace, column: Ints, first: Ints) -> bool:
    """Whether a column of signatures splits all large products of the layers that the first column of its axis splits.

    Small products, such as the routers of experts, may be whole, and so may those of adapters.
    """
    tables, thin = space.evaluator.tables, adapters(space.problem.graph)
    rows = _layer_rows(space)
    for row in np.flatnonzero(rows & _large_rows(space, rows)).tolist():
        unit_type = int(tables.type_of[row])
        offset = row - int(tables.spans[unit_type])
        name = space.operator(unit_type, offset).name
        is_thin = name in thin or name in thin.values()
        if not (is_thin or space.linkage.types[unit_type].signatures[offset][column[row]].divides_work):
            return False
    return bool((first[rows] == column[rows]).all())


def _table_rows(space: PlanSpace) -> Mask:
    """[operator rows] whether an operator looks up rows of a parameter that has more than the share `SMALL_PRODUCT` of
    all parameters."""
    tables, graph = space.evaluator.tables, space.problem.graph
    small = SMALL_PRODUCT * graph.num_parameters
    found = np.zeros(len(tables.type_of), dtype=np.bool_)
    for row, unit_type in enumerate(tables.type_of):
        op = space.operator(int(unit_type), row - int(tables.spans[unit_type]))
        found[row] = op.kind == "Gather" and graph.tensors[op.inputs[0]].num_elements > small
    return found


def _large_rows(space: PlanSpace, among: Mask | None = None) -> Mask:
    """[operator rows] whether an operator has more than the share `SMALL_PRODUCT` of the largest operator's FLOPs.

    Args:
        space: the plan space of the model.
        among: [operator rows] operators of which the largest one counts; None = all.
    """
    tables = space.evaluator.tables
    flops = np.array(
        [
            space.operator(int(unit_type), row - int(tables.spans[unit_type])).forward_flops.at(1)
            for row, unit_type in enumerate(tables.type_of)
        ]
    )
    found: Mask = flops > SMALL_PRODUCT * (flops if among is None else flops[among]).max(initial=0.0)
    return found


def _splits_head(space: PlanSpace, column: Ints) -> bool:
    """Whether a column of signatures divides the largest product outside of the layers, that with the vocabulary."""
    tables = space.evaluator.tables
    found: list[tuple[float, bool]] = []
    for row in np.flatnonzero(~_layer_rows(space)).tolist():
        unit_type = int(tables.type_of[row])
        offset = row - int(tables.spans[unit_type])
        signature = space.linkage.types[unit_type].signatures[offset][column[row]]
        found.append((space.operator(unit_type, offset).forward_flops.at(1), signature.divides_work))
    flops, splits = max(found, default=(0.0, True))
    return splits or flops == 0.0


def _layer_rows(space: PlanSpace) -> Mask:
    """[operator rows] whether an operator is in a layer: a unit that the model has several times."""
    types = [unit.type for unit in space.linkage.blocks.units]
    of_row = space.evaluator.tables.type_of
    found: Mask = np.isin(of_row, [kind for kind in set(types) if types.count(kind) > 1])
    return found


def obeys(space: PlanSpace, patterns: Sequence[Pattern]) -> Mask:
    """[axes, values of all groups] whether some pattern has a signature, see `SpaceArrays.obeys`."""
    columns = []
    for axis in range(len(space.axes)):
        live = [pattern.columns[:, axis] for pattern in patterns if axis in pattern.live]
        stay = [
            np.any([(values == column[members]).all(axis=1) for column in live], axis=0)
            if live
            else np.ones(len(values), dtype=np.bool_)
            for members, values in space.group_rows.values()
        ]
        columns.append(np.concatenate(stay))
    return np.array(columns)
