"""Tables: a problem's graph as flat arrays, one row an operator of each unit type, for the compiled kernels.

Everything here belongs to the problem and to no plan. Columns are named by the constants below; `price/unit.py` reads
them. Units: elements, bytes, FLOPs, seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from automap.fitted_curves import COLLECTIVES
from automap.measured_blocks import block_rows
from automap.price.kernel_shapes import MEASURED, X_COUNT, Shapes
from automap.problem import Problem
from ir.blocks import Unit
from ir.factors import BROADCAST, Signature
from ir.graph import DTYPE_BYTES, Graph, Operator, Tensor
from ir.groups import FusedGroup, fused_groups
from ir.linkage import Linkage, link

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Columns of Tables.operators (integers).
OP_OPERANDS, OP_INPUTS, OP_OUTPUTS, OP_SIGNATURES, OP_COUNT, OP_FREE, OP_DIVISIBLE, OP_PARAMETRIC = range(8)
# Columns of Tables.costs.
F_FIXED, F_SAMPLE, B_FIXED, B_SAMPLE, T_FORWARD, T_BACKWARD, F_KERNELS, B_KERNELS, F_MEASURED, B_MEASURED, F_BYTES = (
    range(11)
)
# Columns of Tables.operands.
# D_SOURCE: row of the output that makes the tensor, or -1 where parameters, views or another unit do; D_SAME: row
# before it that may keep the same memory; D_READER: row that reads what a view or an operator on parameters makes.
D_TENSOR, D_SAVED, D_EARLIER, D_OWNER, D_MOVED, D_SOURCE, D_SAME, D_READER = range(8)
D_COUNT = 8
# Columns of Tables.tensors (integers); the dims follow.
T_ROLE, T_PRODUCER, T_SLOT, T_GRAD, T_ROOT, T_BATCH_DIM, T_NDIM, T_DIMS = range(8)
MAX_DIMS = 8
# Columns of Tables.sizes.
E_FIXED, E_SAMPLE, E_BYTES, E_TENSORS = range(4)
# E_TENSORS: parameters that the trainer knows; a piece of a fused weight is a part of one.
# Columns of Tables.signatures.
S_PLACES, S_DIVIDES, S_KIND, S_BATCH, S_CLASS = range(5)
# Columns of Tables.blocks.
Z_FIRST, Z_LAST, Z_TP, Z_SAMPLES, Z_FORWARD, Z_BACKWARD = range(6)

ACTIVATION, PARAMETER, OTHER, BOUNDARY, CARRIED = range(5)
"""Roles in a unit; BOUNDARY is the tensor that crosses into it, CARRIED one that crosses many units (an encoder's
memory), OTHER is data, buffers and constants."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND_RECV = range(5)


class Arrays(NamedTuple):
    """The arrays of `Tables` as one argument of the compiled kernels."""

    operators: Ints
    costs: Floats
    operands: Ints
    tensors: Ints
    sizes: Floats
    signatures: Ints
    exchanges: Floats
    places: Ints
    shapes: Floats
    blocks: Floats


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Flat arrays over the operators of all unit types; unit type t owns rows spans[t]..spans[t+1]."""

    linkage: Linkage
    graph: Graph
    spans: Ints
    operators: Ints
    costs: Floats
    operands: Ints
    tensors: Ints
    sizes: Floats
    signatures: Ints
    exchanges: Floats
    """Internal collective of each signature: forward fixed, per sample, backward fixed, per sample; bytes."""
    places: Ints
    """(placement, gradient placement) of each operand of each signature."""
    shapes: Floats
    """[operators, X_COUNT] what the time of each kernel depends on besides its bytes."""
    blocks: Floats
    """Measured times of whole units, see the Z_ columns; seconds."""
    boundary_out: Ints
    """unit type -> row of `operands` whose tensor crosses out of the unit, or -1."""
    core: npt.NDArray[np.bool_]
    """operator row -> whether it belongs to an attention core."""
    names: tuple[str, ...]
    """tensor row -> name in the representative unit."""

    @functools.cached_property
    def arrays(self) -> Arrays:
        """What the compiled kernels take first."""
        return Arrays(
            operators=self.operators,
            costs=self.costs,
            operands=self.operands,
            tensors=self.tensors,
            sizes=self.sizes,
            signatures=self.signatures,
            exchanges=self.exchanges,
            places=self.places,
            shapes=self.shapes,
            blocks=self.blocks,
        )

    def tensor_name(self, row: int) -> str:
        """Name, in the representative unit, of a row of `tensors`."""
        return self.names[row]

    def rows(self, unit_type: int) -> range:
        """Operator rows of a unit type."""
        return range(int(self.spans[unit_type]), int(self.spans[unit_type + 1]))


class _Builder:
    def __init__(self, problem: Problem, linkage: Linkage) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.linkage = linkage
        self.operators: list[list[int]] = []
        self.costs: list[list[float]] = []
        self.operands: list[list[int]] = []
        self.tensors: list[list[int]] = []
        self.sizes: list[list[float]] = []
        self.signatures: list[list[int]] = []
        self.exchanges: list[list[float]] = []
        self.places: list[list[int]] = []
        self.shapes: list[list[float]] = []
        self.boundary_out: list[int] = []
        self.core: list[bool] = []
        self.fused = {i: group for group in _kernels(problem) for i in group.members}
        self.repeated = _repeated(problem.graph, set(self.fused.values()))
        self.shaped = Shapes(problem, self._trained)
        self.names: list[str] = []
        self.spans = [0]

    def add_type(self, unit_type: int) -> None:
        unit = self.linkage.blocks.representative(unit_type)
        linked = self.linkage.types[unit_type]
        ops = [self.graph.operators[i] for i in range(unit.start, unit.stop)]
        local: dict[str, int] = {}
        maker = {name: (k, slot) for k, op in enumerate(ops) for slot, name in enumerate(op.outputs)}
        roots: dict[str, int] = {}
        first = len(self.operators)
        seen: set[tuple[int, str]] = set()
        out_row = -1
        for k, op in enumerate(ops):
            begin = len(self.operands)
            earlier: dict[str, int] = {}
            group = self._fused(unit, k)
            kept = op.saved if group is None else group.saved
            for slot, name in enumerate((*op.inputs, *op.outputs)):
                if name not in local:
                    local[name] = self._add_tensor(self.graph.tensors[name], maker.get(name), first, linked.boundary_in)
                    roots[name] = local[name]
                is_output = slot >= len(op.inputs)
                if is_output and _is_alias(op):
                    roots[name] = roots[op.inputs[0]]
                    self.tensors[local[name]][T_ROOT] = roots[name]
                if is_output and name == linked.boundary_out:
                    out_row = len(self.operands)
                before = earlier.get(name, self._last_use(ops[:k], name, first))
                if not is_output:
                    earlier[name] = len(self.operands)
                moved = True
                if group is not None:
                    moved = name not in group.internal and (unit.start + k, name) not in seen
                    seen.update((i, name) for i in group.members)
                self.operands.append([local[name], int(name in kept), before, first + k, int(moved), -1, -1, -1])
            self._add_operator(op, linked.signatures[k], begin, group, unit, k)
            self.core.append(k in linked.core and (group is None or group.kind != "attention"))
        self._link_operands(first)
        self.boundary_out.append(out_row)
        self.spans.append(len(self.operators))

    def _link_operands(self, first: int) -> None:
        """Fills D_SOURCE, D_SAME and D_READER of the unit type whose operators begin at row `first`."""
        same: dict[int, int] = {}
        readers: dict[int, int] = {}
        begin = self.operators[first][OP_OPERANDS]
        for row in range(len(self.operands) - 1, begin - 1, -1):
            operand = self.operands[row]
            owner = self.operators[operand[D_OWNER]]
            if row >= owner[OP_OPERANDS] + owner[OP_INPUTS]:
                continue
            if owner[OP_FREE] or owner[OP_PARAMETRIC]:
                made = self.operands[owner[OP_OPERANDS] + owner[OP_INPUTS]][D_TENSOR]
                operand[D_READER] = readers.get(made, -1)
            readers[operand[D_TENSOR]] = row
        for row in range(begin, len(self.operands)):
            operand = self.operands[row]
            tensor = self.tensors[operand[D_TENSOR]]
            owner, producer = self.operators[operand[D_OWNER]], tensor[T_PRODUCER]
            is_input = row < owner[OP_OPERANDS] + owner[OP_INPUTS]
            is_free = producer >= 0 and self.operators[producer][OP_FREE] == 1
            if is_input and producer >= 0 and not is_free:
                maker = self.operators[producer]
                operand[D_SOURCE] = maker[OP_OPERANDS] + maker[OP_INPUTS] + tensor[T_SLOT]
            if tensor[T_ROLE] == PARAMETER or is_free:
                operand[D_SAVED] = 0
            if operand[D_SAVED] or (is_input and tensor[T_ROLE] in (BOUNDARY, CARRIED)):
                operand[D_SAME] = same.get(tensor[T_ROOT], -1)
                same[tensor[T_ROOT]] = row

    def _fused(self, unit: Unit, offset: int) -> FusedGroup | None:
        """The group of an operator; one that reaches over the unit's end is run operator by operator."""
        group = self.fused.get(unit.start + offset)
        inside = group is not None and unit.start <= group.members[0] and group.members[-1] < unit.stop
        return group if inside else None

    def _last_use(self, ops: list[Operator], name: str, first: int) -> int:
        for k in range(len(ops) - 1, -1, -1):
            if name in ops[k].inputs:
                return self.operators[first + k][OP_OPERANDS] + ops[k].inputs.index(name)
        return -1

    def _add_tensor(self, tensor: Tensor, made: tuple[int, int] | None, first: int, incoming: str | None) -> int:
        if tensor.name == incoming:
            role = BOUNDARY
        elif tensor.role == "parameter":
            role = PARAMETER
        elif made is not None:
            role = ACTIVATION
        elif tensor.role == "activation" and not self._is_free(tensor.name):
            role = CARRIED
        else:
            role = OTHER
        producer, slot = (first + made[0], made[1]) if made else (-1, 0)
        index = len(self.tensors)
        needs_gradient = tensor.is_float and (role == PARAMETER or (role != OTHER and self._depends(tensor.name)))
        dims = list(tensor.shape[:MAX_DIMS]) + [1] * (MAX_DIMS - len(tensor.shape[:MAX_DIMS]))
        batch = -1 if tensor.batch_dim is None else tensor.batch_dim
        self.tensors.append(
            [role, producer, slot, int(needs_gradient), index, batch, min(len(tensor.shape), MAX_DIMS), *dims]
        )
        self.names.append(tensor.name)
        size = self.problem.activation_bytes if tensor.is_float else DTYPE_BYTES.get(tensor.dtype, 4.0)
        size *= self.repeated.get(tensor.name, 1.0)
        self.sizes.append([tensor.elements.fixed, tensor.elements.per_sample, size, 1.0 / self._pieces(tensor.name)])
        return index

    def _pieces(self, name: str) -> int:
        """Into how many pieces the parameter was split that `name` is one of."""
        whole = self.graph.pieces[name][0] if name in self.graph.pieces else None
        return sum(piece[0] == whole for piece in self.graph.pieces.values()) if whole else 1

    def _is_free(self, name: str) -> bool:
        maker = self.graph.operators[self.graph.producer[name]]
        return maker.is_view or maker.is_constant

    def _depends(self, name: str) -> bool:
        return name in self._trained

    @functools.cached_property
    def _sampled(self) -> set[str]:
        """Tensors that depend on the data."""
        found = {t.name for t in self.graph.tensors.values() if t.role == "input"}
        for op in self.graph.operators:
            if any(name in found for name in op.inputs):
                found.update(op.outputs)
        return found

    @property
    def _trained(self) -> set[str]:
        if not hasattr(self, "_trained_names"):
            found = {t.name for t in self.graph.tensors.values() if t.role == "parameter"}
            for op in self.graph.operators:
                if any(name in found for name in op.inputs):
                    found.update(name for name in op.outputs if self.graph.tensors[name].is_float)
            self._trained_names = found
        return self._trained_names

    def _add_operator(
        self,
        op: Operator,
        table: tuple[Signature, ...],
        operands: int,
        group: FusedGroup | None,
        unit: Unit,
        offset: int,
    ) -> None:
        begin = len(self.signatures)
        index = unit.start + offset
        shape = self.shaped.of(index, group, range(unit.start, unit.stop))
        self.shapes.append(shape.row())
        for signature in table:
            factor = None if signature.factor is None else op.rule.factors[signature.factor]
            exchange = factor.collective if factor else None
            is_local = self.problem.training.batch_norm == "local" and factor is not None and factor.is_batch
            if exchange is not None and exchange.name == "batch_norm" and is_local:
                exchange = None
            kind = -1 if exchange is None else COLLECTIVES.index(exchange.kind)
            self.signatures.append(
                [
                    len(self.places),
                    int(signature.divides_work),
                    kind,
                    int(factor is not None and factor.is_batch),
                    -1 if signature.factor is None else shape.classes[signature.factor],
                ]
            )
            # What has no gradient sends none back.
            back = exchange.backward_bytes if exchange and self._depends(op.inputs[0]) else (0.0, 0.0)
            self.exchanges.append([*(exchange.forward_bytes if exchange else (0.0, 0.0)), *back])
            gradients = (*signature.input_gradients, *([BROADCAST] * len(signature.outputs)))
            placements = (*signature.inputs, *signature.outputs)
            self.places += [[p, g] for p, g in zip(placements, gradients, strict=True)]
        free = op.is_view or op.is_constant
        divisible = any(s.divides_work for s in table)
        parametric = not free and self._depends(op.outputs[0]) and not any(n in self._sampled for n in op.inputs)
        columns = [operands, len(op.inputs), len(op.outputs), begin, len(table), free, divisible, parametric]
        self.operators.append([int(column) for column in columns])
        trained_inputs = sum(self._depends(name) for name in op.inputs)
        kernels = (1.0, float(max(1, trained_inputs)) if op.forward_flops.at(1) > 0 else 1.0)
        traffic = op.traffic
        if group is not None:
            traffic = (1.0, group.backward_traffic)
            kernels = (1.0, 1.0) if index == self.shaped.host(group) else (0.0, 0.0)
        if shape.kind == MEASURED:
            kernels = (0.0, 0.0)
        kernels = (kernels[0] * shape.share, kernels[1] * shape.share)
        self.costs.append(
            [
                op.forward_flops.fixed,
                op.forward_flops.per_sample,
                op.backward_flops.fixed,
                op.backward_flops.per_sample,
                *((0.0, 0.0) if free else traffic),
                *kernels,
                *(op.measured_s or (-1.0, -1.0)),
                -1.0 if op.stated_bytes is None else op.stated_bytes,
            ]
        )


def _kernels(problem: Problem) -> Iterator[FusedGroup]:
    """The groups that the problem's trainer runs as one kernel."""
    for group in fused_groups(problem.graph):
        if group.kind != "attention" or problem.trainer.fused_attention:
            yield group
        elif group.unfused is not None:
            yield group.unfused


def _repeated(graph: Graph, groups: AbstractSet[FusedGroup]) -> dict[str, float]:
    """Tensors inside fused attention that repeat keys or values for several heads -> the part that is no repetition.

    The kernel reads each head once, and that is what ranks exchange.
    """
    found: dict[str, float] = {}
    for group in groups:
        for i in group.members if group.kind == "attention" else ():
            op = graph.operators[i]
            made = op.outputs[0]
            if op.forward_flops.at(1) > 0 or made not in group.internal:
                continue
            share = found.get(op.inputs[0], 1.0)
            if op.kind == "Expand":
                share *= graph.tensors[op.inputs[0]].num_elements / graph.tensors[made].num_elements
            if share != 1.0:
                found[made] = share
    return found


def _is_alias(op: Operator) -> bool:
    """Whether the output shares the input's memory."""
    return op.traffic[0] == 0.0 and len(op.outputs) == 1 and len(op.inputs) >= 1


def build_tables(problem: Problem, linkage: Linkage | None = None) -> Tables:
    """Compiles the graph of `problem`."""
    linkage = linkage or link(problem.graph)
    builder = _Builder(problem, linkage)
    for unit_type in range(linkage.blocks.num_types):
        builder.add_type(unit_type)

    def ints(rows: list[list[int]], width: int) -> Ints:
        return np.array(rows, dtype=np.int64).reshape(-1, width)

    def floats(rows: list[list[float]], width: int) -> Floats:
        return np.array(rows, dtype=np.float64).reshape(-1, width)

    return Tables(
        linkage=linkage,
        graph=problem.graph,
        spans=np.array(builder.spans, dtype=np.int64),
        operators=ints(builder.operators, 8),
        costs=floats(builder.costs, 11),
        operands=ints(builder.operands, D_COUNT),
        tensors=ints(builder.tensors, T_DIMS + MAX_DIMS),
        sizes=floats(builder.sizes, 4),
        signatures=ints(builder.signatures, 5),
        exchanges=floats(builder.exchanges, 4),
        places=ints(builder.places, 2),
        shapes=floats(builder.shapes, X_COUNT),
        blocks=floats(block_rows(problem.graph, problem.hints, linkage, builder.spans), 6),
        boundary_out=np.array(builder.boundary_out, dtype=np.int64),
        core=np.array(builder.core, dtype=np.bool_),
        names=tuple(builder.names),
    )
