"""What the price must know of a run, operator by operator, as flat arrays: the input of `step_model`.

Each run is built by `automap.published`, so shapes, shardings and collectives are those of the Evaluator's tables; a
matrix product is known by its local m, n, k, other kernels by their bytes. Units: elements, bytes, seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from automap.price.communication import L_AXIS, L_BACKWARD, L_BYTES, L_COUNT, L_KIND, L_OPERATOR
from automap.price.evaluator import Evaluator, Segment
from automap.price.kernels import C_BOUNDARY, C_COUNT, C_PARAMETERS, C_REDUCE, C_ZERO, unit_cost
from automap.price.tables import (
    B_KERNELS,
    D_MOVED,
    D_TENSOR,
    E_BYTES,
    F_KERNELS,
    OP_FREE,
    OP_INPUTS,
    OP_OPERANDS,
    OP_OUTPUTS,
    OP_SIGNATURES,
    S_PLACES,
    T_BACKWARD,
    T_BATCH_DIM,
    T_DIMS,
    T_FORWARD,
    T_NDIM,
)
from automap.published import Case, Run, case_of

MEMORY, PRODUCT, BATCHED_PRODUCT, ATTENTION, CONVOLUTION = range(5)
# Columns of an operator.
(
    O_KIND,
    O_M,
    O_N,
    O_K,
    O_BATCH,
    O_FORWARD_BYTES,
    O_BACKWARD_BYTES,
    O_RECOMPUTED,
    O_KERNELS,
    O_BACKWARD_KERNELS,
    O_CAUSAL,
    O_LOSS,
) = range(12)
"""Of attention: m = heads of all samples, n = queries, k = keys, batch = head size. Of a softmax between two products:
m = heads of all samples."""
O_COUNT = 12
# Columns of a collective.
X_KIND, X_AXIS, X_BYTES, X_BACKWARD, X_RECOMPUTED = range(5)
# Columns of a unit: rows of operators and collectives, then what is once a step.
U_FIRST, U_LAST, U_FIRST_X, U_LAST_X, U_PARAMETERS, U_ZERO, U_REDUCE, U_BOUNDARY = range(8)

ZERO_BUBBLE = {"ZB-1p": 1, "ZB-2p": 2}
LOW_PRECISION = {"fp8": 1, "mxfp8": 2, "nvfp4": 3}
DP = 0
"""Number of the data-parallel axis."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """A run as numbers."""

    run: Run
    case: Case
    operators: list[list[float]]
    collectives: list[list[float]]
    units: list[list[float]]
    parts: list[list[int]]
    """Chunk, unit, how often it follows itself."""
    axes: list[tuple[float, float, float]]
    """Ranks, hosts and ranks a host of each mesh axis."""
    crosses_hosts: bool
    """Whether consecutive pipeline ranks stand on different hosts."""
    tied: float
    """Local elements of a parameter that two pipeline ranks hold."""
    shared: tuple[float, float]
    """Elements counted twice because two units of one rank read them: local, and under ZeRO."""
    low_precision: int
    zero_bubble: int


def features(run: Run) -> Features:
    """The features of a run; low precision is told apart by a flag, its graph is that of bf16.

    Raises:
        Unpriced: the run cannot be expressed.
    """
    strategy = dict(run.strategy)
    low = LOW_PRECISION.get(str(strategy.get("precision")), 0)
    bubble = ZERO_BUBBLE.get(str(strategy.get("schedule")), 0)
    if low:
        strategy["precision"] = "bf16"
    if bubble:
        strategy["schedule"] = "1F1B"
    case = case_of(replace(run, strategy=strategy))
    evaluator, choice = case.evaluator, case.choice
    operators: list[list[float]] = []
    collectives: list[list[float]] = []
    units: list[list[float]] = []
    parts: list[list[int]] = []
    known: dict[tuple[object, ...], int] = {}
    for number, segment, incoming in evaluator.surroundings(choice):
        key = (segment.first, segment.last, segment.recomputed.tobytes(), incoming.tobytes())
        if key not in known:
            known[key] = len(units)
            first, first_x = len(operators), len(collectives)
            once = _collectives(evaluator, case, segment, incoming, collectives)
            operators += _operators(evaluator, case, segment)
            units.append([first, len(operators), first_x, len(collectives), *once])
        if parts and parts[-1][0] == number and parts[-1][1] == known[key]:
            parts[-1][2] += 1
        else:
            parts.append([number, known[key], 1])
    tied = evaluator.tied_rows(evaluator.tied_homes(choice), choice.layout, choice.zero_axes)
    same = tied[tied[:, 0] == tied[:, 1]]
    apart = tied[tied[:, 0] != tied[:, 1]]
    homes = [case.problem.cluster.node_of[stage.devices[0]] for stage in choice.layout.stages]
    return Features(
        run=run,
        case=case,
        operators=operators,
        collectives=collectives,
        units=units,
        parts=parts,
        axes=_axes(case),
        crosses_hosts=len(set(homes)) > 1,
        tied=float(apart[:, 2:4].max(initial=0.0)),
        shared=(float(same[:, 3].sum()), float(same[:, 4].sum())),
        low_precision=low,
        zero_bubble=bubble,
    )


def _axes(case: Case) -> list[tuple[float, float, float]]:
    stage = case.choice.layout.stages[0]
    sizes = [int(size) for size in stage.axes]
    grid = np.array(stage.devices).reshape(sizes)
    found = []
    for axis, size in enumerate(sizes):
        group = np.moveaxis(grid, axis, -1).reshape(-1, size)[0]
        hosts = [case.problem.cluster.node_of[rank] for rank in group]
        found.append((float(size), float(len(set(hosts))), float(max(hosts.count(h) for h in hosts))))
    return found


def _collectives(
    evaluator: Evaluator, case: Case, segment: Segment, incoming: Any, collectives: list[list[float]]
) -> list[float]:
    """Appends the collectives of a unit; returns parameters, under ZeRO, gradients to reduce, and what crosses out."""
    choice, tables = case.choice, evaluator.tables
    stage = choice.layout.stages[0]
    out = np.empty(C_COUNT)
    records = np.full((16 * (segment.last - segment.first), L_COUNT), -1.0)
    unit_cost(
        tables.arrays,
        segment.first,
        segment.last,
        segment.chosen,
        segment.recomputed,
        incoming,
        stage.axes,
        stage.links,
        choice.zero_axes,
        stage.hardware,
        float(choice.samples),
        int(tables.boundary_out[evaluator.blocks.units[segment.unit].type]),
        records,
        np.zeros(1, dtype=np.int64),
        out,
    )
    again = bool(segment.recomputed.all())
    for record in records[records[:, L_KIND] >= 0.0]:
        # Gradients of whole parameters are reduced once a step and not here.
        if int(record[L_AXIS]) != DP:
            inside = again and bool(segment.recomputed[int(record[L_OPERATOR]) - segment.first])
            collectives.append([record[L_KIND], record[L_AXIS], record[L_BYTES], record[L_BACKWARD], float(inside)])
    reduced = max(float(out[C_REDUCE + axis]) for axis in range(len(stage.axes)) if axis != 1)
    return [float(out[C_PARAMETERS]), float(out[C_ZERO]), reduced, float(out[C_BOUNDARY])]


def _operators(evaluator: Evaluator, case: Case, segment: Segment) -> list[list[float]]:
    tables, graph = evaluator.tables, case.problem.graph
    unit = evaluator.blocks.units[segment.unit]
    base = int(tables.spans[unit.type])
    groups = {i: group for group in graph.fused for i in group.members}
    is_fused = case.problem.trainer.fused_attention
    found: list[list[float]] = []
    products: dict[tuple[str, str, str], int] = {}
    attentions: dict[int, int] = {}
    for row in range(segment.first, segment.last):
        if tables.operators[row, OP_FREE] == 1:
            continue
        index = unit.start + row - base
        op, group = graph.operators[index], groups.get(index)
        dims, moved = _dims(evaluator, case, segment, row)
        costs, inputs = tables.costs[row], int(tables.operators[row, OP_INPUTS])
        entry = [0.0] * O_COUNT
        entry[O_RECOMPUTED] = float(segment.recomputed[row - segment.first])
        entry[O_KERNELS], entry[O_BACKWARD_KERNELS] = float(costs[F_KERNELS]), float(costs[B_KERNELS])
        entry[O_FORWARD_BYTES], entry[O_BACKWARD_BYTES] = moved * costs[T_FORWARD], moved * costs[T_BACKWARD]
        is_product = op.forward_flops.at(1) > 0 and op.kind in ("MatMul", "Gemm")
        if group is not None and group.kind == "attention" and is_fused:
            if group.members[0] not in attentions:
                attentions[group.members[0]] = len(found)
                entry[O_KIND], entry[O_KERNELS], entry[O_BACKWARD_KERNELS] = ATTENTION, 1.0, 1.0
                entry[O_FORWARD_BYTES] = entry[O_BACKWARD_BYTES] = 0.0
                found.append(entry)
            whole = found[attentions[group.members[0]]]
            if is_product and whole[O_M] == 0.0:
                whole[O_M], whole[O_N] = float(dims[0][0] * dims[0][1]), float(dims[0][2])
                whole[O_K], whole[O_BATCH] = float(dims[1][-1]), float(dims[0][3])
            if any(_is_mask(graph, name) for name in op.inputs):
                whole[O_CAUSAL] = 1.0
            continue
        if is_product:
            result, left = dims[inputs], dims[0]
            if len(dims[1]) == 2:
                key = (op.kind, op.scope, op.inputs[0])
                if key in products:
                    # Pieces of one fused weight are one product.
                    found[products[key]][O_N] += float(result[-1])
                    continue
                products[key] = len(found)
                n, k = float(result[-1]), float(left[-1] if op.kind == "MatMul" else left[1])
                entry[: O_BATCH + 1] = [PRODUCT, float(np.prod(result)) / n, n, k, 1.0]
            else:
                batch = float(np.prod(result[:-2]))
                entry[: O_BATCH + 1] = [
                    BATCHED_PRODUCT,
                    float(result[-2]),
                    float(result[-1]),
                    float(left[-1]),
                    batch,
                ]
        elif op.forward_flops.at(1) > 0 and op.kind == "Conv":
            result = dims[inputs]
            rows = float(result[0] * result[2] * result[3])
            entry[: O_BATCH + 1] = [CONVOLUTION, rows, float(result[1]), float(np.prod(dims[1][1:])), 1.0]
        elif entry[O_FORWARD_BYTES] == entry[O_BACKWARD_BYTES] == 0.0:
            continue
        entry[O_LOSS] = float("Loss" in op.kind)
        plain = group.unfused if group is not None and group.kind == "attention" else None
        if plain is not None and index == plain.members[0]:
            entry[O_M] = float(np.prod(dims[0][:-2]))
        found.append(entry)
    return found


def _is_mask(graph: Any, name: str) -> bool:
    index = graph.producer.get(name)
    return index is not None and graph.operators[index].kind == "Trilu"


def _dims(evaluator: Evaluator, case: Case, segment: Segment, row: int) -> tuple[list[Any], float]:
    """Local dims of every operand, and the bytes that the kernel moves."""
    tables, choice = evaluator.tables, case.choice
    axes = choice.layout.stages[0].axes
    begin = int(tables.operators[row, OP_OPERANDS])
    count = int(tables.operators[row, OP_INPUTS] + tables.operators[row, OP_OUTPUTS])
    chosen = segment.chosen[row - segment.first]
    rows = [int(tables.signatures[tables.operators[row, OP_SIGNATURES] + s, S_PLACES]) for s in chosen]
    dims, moved = [], 0.0
    for slot in range(count):
        tensor = int(tables.operands[begin + slot, D_TENSOR])
        ndim = int(tables.tensors[tensor, T_NDIM])
        local = tables.tensors[tensor, T_DIMS : T_DIMS + ndim].astype(float)
        batch = int(tables.tensors[tensor, T_BATCH_DIM])
        if batch >= 0:
            local[batch] *= choice.samples
        for axis, size in enumerate(axes):
            place = int(tables.places[rows[axis] + slot, 0])
            if place >= 0:
                local[place] /= size
        dims.append(local)
        if tables.operands[begin + slot, D_MOVED] == 1:
            moved += float(np.prod(local)) * float(tables.sizes[tensor, E_BYTES])
    return dims, moved
