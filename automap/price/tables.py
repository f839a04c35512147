"""Tables: a problem's graph as flat arrays for the compiled kernels, with one row for each operator of each unit type.

Everything here belongs to the problem and to no plan. The fields of the rows are described in
`automap.price.kernels.records`. Units: elements, bytes, FLOPs, seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np

from automap.arrays import Ints, Mask
from automap.execution import execution, host_of
from automap.fitted_curves import COLLECTIVES
from automap.measured_blocks import block_rows
from automap.price.crossing_results import leave_results_behind
from automap.price.curves import convolves_on_tensor_cores
from automap.price.kernel_shapes import Classes, KernelShapes
from automap.price.kernels.array_types import rows_of
from automap.price.kernels.records import (
    ACTIVATION,
    BOUNDARY,
    CARRIED,
    INSIDE,
    KERNEL_DTYPE,
    MAX_DIMS,
    MEASURED,
    MEASURED_BLOCK_DTYPE,
    OPERAND_DTYPE,
    OPERATOR_DTYPE,
    OTHER,
    PARAMETER,
    PLACEMENT_DTYPE,
    SIGNATURE_DTYPE,
    TENSOR_DTYPE,
    Arrays,
    KernelRow,
    OperandRow,
    OperatorRow,
    PlacementRow,
    SignatureRow,
    TensorRow,
)
from automap.price.operand_links import UnlinkedRows, link_operands
from automap.problem import Problem
from automap.units import units_of
from ir.blocks import Unit
from ir.factors import BROADCAST, Signature, may_be_uneven
from ir.graph import DTYPE_BYTES, Graph, Operator, Tensor
from ir.groups import FusedGroup
from ir.linkage import Linkage, link
from ir.loss import scores_of_losses
from ir.operators.experts import token_copies

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Kinds of operators that compute the positions of a sequence one after the other."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables of a problem; unit type t has the operator rows from spans[t] to spans[t + 1] - 1."""

    linkage: Linkage
    """Unit types, linkage groups and signatures of the graph."""
    graph: Graph
    """The graph of the problem."""
    arrays: Arrays
    """The tables for the kernels."""
    spans: Ints
    """[types + 1] first operator row of each unit type."""
    type_of: Ints
    """[operators] unit type of each operator row."""
    boundary_out: Ints
    """[types] row of `arrays.operands` whose tensor crosses out of a unit, or -1."""
    core: Mask
    """[operators] whether an operator belongs to an attention core."""
    names: tuple[str, ...]
    """Name of each row of `arrays.tensors` in the representative unit."""

    def rows(self, unit_type: int) -> range:
        """Operator rows of a unit type."""
        return range(int(self.spans[unit_type]), int(self.spans[unit_type + 1]))


class _Builder:
    """Builds the tables of a problem, one unit type after the other."""

    def __init__(self, problem: Problem, linkage: Linkage) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.linkage = linkage
        self.operators: list[OperatorRow] = []
        self.kernels: list[KernelRow] = []
        self.operands: list[OperandRow] = []
        self.tensors: list[TensorRow] = []
        self.signatures: list[SignatureRow] = []
        self.placements: list[PlacementRow] = []
        self.boundary_out: list[int] = []
        self.core: list[bool] = []
        self.execution = execution(problem)
        self.fused = {i: group for group in self.execution.kernels for i in group.members}
        self.scores = scores_of_losses(problem.graph)
        self.repeated = _repeated(problem.graph, set(self.fused.values()))
        self.shapes = KernelShapes(problem, self.graph.trained, linkage.blocks, self.repeated)
        self.token_copies = token_copies(self.graph.operators, self.graph.tensors)
        self.names: list[str] = []
        self.copies: list[object] = []
        """For each operand row, a key of the copy that its operator reads: products with pieces of one weight read the
        same copy."""
        self.spans = [0]
        self.is_uneven = True
        """Whether dims of the operators of the unit type that is being added may be split unevenly."""

    def add_type(self, unit_type: int) -> None:
        """Adds the rows of a unit type: its operators, their operands, and the tensors and signatures of these."""
        unit = self.linkage.blocks.representative(unit_type)
        target, times = self.problem.target, sum(one.type == unit_type for one in self.linkage.blocks.units)
        self.is_uneven = target is None or (target.uneven and times == 1)
        linked = self.linkage.types[unit_type]
        ops = [self.graph.operators[i] for i in range(unit.start, unit.stop)]
        local: dict[str, int] = {}
        maker = {name: (k, slot) for k, op in enumerate(ops) for slot, name in enumerate(op.outputs)}
        first = len(self.operators)
        seen: set[tuple[int, str]] = set()
        out_row = -1
        for k, op in enumerate(ops):
            begin = len(self.operands)
            earlier: dict[str, int] = {}
            group = self._fused(unit, k)
            kept, beside = (
                op.saved if group is None else group.saved,
                self.execution.kept_beside.get(unit.start + k, 0.0),
            )
            for slot, name in enumerate((*op.inputs, *op.outputs)):
                if name not in local:
                    local[name] = self._add_tensor(self.graph.tensors[name], maker.get(name), first, linked.boundary_in)
                is_output = slot >= len(op.inputs)
                if is_output and op.is_alias:
                    self.tensors[local[name]].root = self.tensors[local[op.inputs[0]]].root
                if is_output and name == linked.boundary_out:
                    out_row = len(self.operands)
                before = earlier.get(name, self._last_use(ops[:k], name, first))
                if not is_output:
                    earlier[name] = len(self.operands)
                is_moved = True
                if group is not None:
                    is_moved = name not in group.internal and (unit.start + k, name) not in seen
                    seen.update((i, name) for i in group.members)
                keeps_beside = beside > 0.0 and slot == len(op.inputs)
                self.copies.append(self.shapes.fused_source(op) or begin)
                self.operands.append(
                    OperandRow(
                        tensor=local[name],
                        is_saved=int(keeps_beside or (name in kept and not self.graph.is_weight(name))),
                        copy_share=beside if keeps_beside else self._copy_share(unit.start + k, group, name),
                        earlier=before,
                        operator=first + k,
                        is_moved=int(is_moved),
                        maker=-1,
                        same_memory=-1,
                        next_reader=-1,
                        sibling=-1,
                        is_scores=int(name in self.scores),
                        is_kept=0,
                        is_kept_behind=0,
                        is_held=0,
                    )
                )
            self._add_operator(op, linked.signatures[k], begin, unit.start + k, range(unit.start, unit.stop), group)
            self.core.append(k in linked.core and (group is None or group.kind != "attention"))
        link_operands(UnlinkedRows(self.operators, self.operands, self.tensors, self.copies), first)
        self._hand_on(unit_type, unit, first, local)
        self.boundary_out.append(out_row)
        self.spans.append(len(self.operators))

    def _hand_on(self, unit_type: int, unit: Unit, first: int, local: Mapping[str, int]) -> None:
        """Marks the tensors that cross out of the unit beside its boundary tensor, to be read by later units.

        Args:
            unit_type: number of the type.
            unit: its first unit.
            first: row of its first operator.
            local: name of a tensor of the unit -> its row.
        """
        blocks, opening = self.linkage.blocks, self.operators[first]
        for offset, slot in blocks.handed_on[unit_type]:
            self.operands[self.operators[first + offset].first_operand + slot].goes_on = 1
        for offset, slot in sorted(blocks.carried_results(self.graph, unit_type), reverse=True):
            row = self.operators[first + offset].first_output + slot
            self.operands[row].next_handed_on, opening.hands_on = opening.hands_on, row
        passed = [name for name in unit.beside if name not in local]
        if passed:
            opening.passes = len(self.tensors)
            for name in passed:
                self._add_tensor(self.graph.tensors[name], None, first, None)
            rows = self.tensors[opening.passes :]
            # One row stands for all of these tensors, with the sum of their bytes.
            fixed, per_sample = (
                sum(getattr(row, name) * row.element_bytes for row in rows)
                for name in ("fixed_elements", "elements_per_sample")
            )
            del self.tensors[opening.passes + 1 :], self.names[opening.passes + 1 :]
            rows[0].fixed_elements, rows[0].elements_per_sample, rows[0].element_bytes = fixed, per_sample, 1.0

    def _fused(self, unit: Unit, offset: int) -> FusedGroup | None:
        """The fused group of an operator, or None; a group that crosses the unit's end is not fused."""
        group = self.fused.get(unit.start + offset)
        inside = group is not None and unit.start <= group.members[0] and group.members[-1] < unit.stop
        return group if inside else None

    def _copy_share(self, index: int, group: FusedGroup | None, name: str) -> float:
        """Bytes of the copy in another number format that an operator reads of an operand, over the bytes of the
        operand; 0 if it reads no copy."""
        own = index if group is None else host_of(self.graph, group)
        casts = self.execution.casts.get(own, ())
        return next((cast.copy / cast.source for cast in casts if cast.tensor == name), 0.0)

    def _last_use(self, ops: list[Operator], name: str, first: int) -> int:
        """The operand row by which the last of some operators reads a tensor, or -1; `first` is the row of `ops[0]`."""
        for k in range(len(ops) - 1, -1, -1):
            if name in ops[k].inputs:
                return self.operators[first + k].first_operand + ops[k].inputs.index(name)
        return -1

    def _add_tensor(self, tensor: Tensor, made: tuple[int, int] | None, first: int, incoming: str | None) -> int:
        """Adds the row of a tensor and returns its number. `made`: number of the operator in the unit, whose first one
        has the row `first`, and of the output; None where none makes it. `incoming`: the unit's boundary tensor."""
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
        needs_gradient = tensor.is_float and role != OTHER and tensor.name in self.graph.trained
        dims = np.ones(MAX_DIMS, dtype=np.int64)
        dims[: len(tensor.shape)] = tensor.shape[:MAX_DIMS]
        size = self.problem.activation_bytes if tensor.is_float else DTYPE_BYTES.get(tensor.dtype, 4.0)
        size = self.execution.widths.get(tensor.name, size)
        self.tensors.append(
            TensorRow(
                role=role,
                producer=producer,
                slot=slot,
                has_gradient=int(needs_gradient),
                root=index,
                batch_dim=-1 if tensor.batch_dim is None else tensor.batch_dim,
                num_dims=min(len(tensor.shape), MAX_DIMS),
                dims=dims,
                fixed_elements=tensor.elements.fixed,
                elements_per_sample=tensor.elements.per_sample,
                element_bytes=size * self.repeated.get(tensor.name, 1.0),
                is_frozen=int(tensor.frozen),
                num_parameters=1.0 / self._pieces(tensor.name),
                copies=self.token_copies.get(tensor.name, 0.0),
            )
        )
        self.names.append(tensor.name)
        return index

    def _pieces(self, name: str) -> int:
        """Number of pieces into which the parameter with the piece `name` was split; 1 for a whole parameter."""
        whole = self.graph.pieces[name][0] if name in self.graph.pieces else None
        return sum(piece[0] == whole for piece in self.graph.pieces.values()) if whole else 1

    def _is_free(self, name: str) -> bool:
        return not self.graph.operators[self.graph.producer[name]].is_live

    @functools.cached_property
    def _sampled(self) -> set[str]:
        """Names of the tensors that depend on the data."""
        found = {t.name for t in self.graph.tensors.values() if t.role == "input"}
        for op in self.graph.operators:
            if any(name in found for name in op.inputs):
                found.update(op.outputs)
        return found

    def _add_operator(
        self,
        op: Operator,
        table: tuple[Signature, ...],
        first_operand: int,
        index: int,
        unit: range,
        group: FusedGroup | None,
    ) -> None:
        """Adds the rows of the operator with the number `index` in the graph, of its kernel and of its signatures
        `table`; its operands are there already."""
        is_free = not op.is_live
        depends = op.outputs[0] in self.graph.of_parameters
        self.operators.append(
            OperatorRow(
                first_operand=first_operand,
                first_output=first_operand + len(op.inputs),
                end=first_operand + len(op.inputs) + len(op.outputs),
                first_signature=len(self.signatures),
                is_free=int(is_free),
                is_divisible=int(any(s.divides_work for s in table)),
                is_parametric=int(not is_free and depends and not any(n in self._sampled for n in op.inputs)),
            )
        )
        kernel, classes = self.shapes.of(index, group, unit)
        self._add_signatures(op, table, classes)
        trained_inputs = sum(name in self.graph.trained for name in op.inputs)
        launched = (1.0, float(max(1, trained_inputs)) if op.forward_flops.at(1) > 0 else 1.0)
        if op.kind in RECURRENT:
            launched = self._steps(op), 2.0 * self._steps(op)
        if (count := self.execution.launches.get(index)) is not None:
            launched = float(count), float(count)
        slower = self.execution.slower.get(index, (1.0, 1.0))
        traffic = (slower[0] * op.traffic[0], slower[1] * op.traffic[1])
        if group is not None:
            traffic = (1.0, group.backward_traffic)
            launched = (1.0, 1.0) if index == host_of(self.graph, group) else (0.0, 0.0)
        if kernel.kind == MEASURED:
            launched = (0.0, 0.0)
        kernel.is_frozen = int(not is_free and not self.graph.runs_backward(op))
        kernel.forward_flops, kernel.forward_flops_per_sample = op.forward_flops.fixed, op.forward_flops.per_sample
        kernel.backward_flops, kernel.backward_flops_per_sample = op.backward_flops.fixed, op.backward_flops.per_sample
        kernel.forward_traffic, kernel.backward_traffic = (0.0, 0.0) if is_free else traffic
        kernel.forward_kernels, kernel.backward_kernels = (count * kernel.share for count in launched)
        kernel.measured_forward_s, kernel.measured_backward_s = op.measured_s or (-1.0, -1.0)
        kernel.stated_bytes = -1.0 if op.stated_bytes is None else op.stated_bytes
        self._add_casts(index, kernel)
        self.kernels.append(kernel)

    def _add_casts(self, index: int, kernel: KernelRow) -> None:
        """Adds the cost of converting the operands of an operator; products with pieces of one weight share it."""
        if kernel.kind in (MEASURED, INSIDE):
            return
        casts = [(cast.tensor, cast.moved) for cast in self.execution.casts.get(index, ())]
        if index in self.execution.conversions and self._converts_images:
            casts.append((self.graph.operators[index].inputs[0], self.execution.conversions[index]))
        for name, (forward, backward) in casts:
            elements = self.graph.tensors[name].elements
            kernel.forward_cast_bytes += kernel.share * forward * elements.fixed
            kernel.forward_cast_bytes_per_sample += kernel.share * forward * elements.per_sample
            kernel.backward_cast_bytes += kernel.share * backward * elements.fixed
            kernel.backward_cast_bytes_per_sample += kernel.share * backward * elements.per_sample
            kernel.casts += kernel.share

    @functools.cached_property
    def _converts_images(self) -> bool:
        """Whether a device of the cluster runs convolutions on tensor cores, which take images with channels last."""
        cluster, precision = self.problem.cluster, self.problem.base_precision
        used = {node.device for node in cluster.nodes}
        return any(convolves_on_tensor_cores(cluster.devices[name], precision) for name in used)

    def _steps(self, op: Operator) -> float:
        """Number of positions of a recurrent layer, each of which is computed by a kernel of its own."""
        return float(self.graph.tensors[op.inputs[0]].shape[dict(op.attributes).get("layout", 0)])

    def _add_signatures(self, op: Operator, table: tuple[Signature, ...], classes: Classes) -> None:
        """Adds the rows of an operator's signatures `table` and of their placements."""
        for signature in table:
            factor = None if signature.factor is None else op.rule.factors[signature.factor]
            exchange = factor.collective if factor else None
            is_local = self.problem.training.batch_norm == "local" and factor is not None and factor.is_batch
            if exchange is not None and exchange.name == "batch_norm" and is_local:
                exchange = None
            forward = exchange.forward_bytes if exchange else (0.0, 0.0)
            # A tensor without gradient needs no collective in the backward pass.
            backward = exchange.backward_bytes if exchange and op.inputs[0] in self.graph.trained else (0.0, 0.0)
            self.signatures.append(
                SignatureRow(
                    first_placement=len(self.placements),
                    divides_work=int(signature.divides_work),
                    factor=-1 if signature.factor is None else signature.factor,
                    extent=1 if factor is None else factor.size,
                    collective=-1 if exchange is None else COLLECTIVES.index(exchange.kind),
                    splits_batch=int(factor is not None and factor.is_batch),
                    is_uneven=int(
                        self.is_uneven and signature.factor is not None and may_be_uneven(op.rule, signature.factor)
                    ),
                    loop_class=-1 if signature.factor is None else classes[signature.factor],
                    forward_bytes=forward[0],
                    forward_bytes_per_sample=forward[1],
                    backward_bytes=backward[0],
                    backward_bytes_per_sample=backward[1],
                )
            )
            gradients = (*signature.input_gradients, *([BROADCAST] * len(signature.outputs)))
            placements = (*signature.inputs, *signature.outputs)
            self.placements += [
                PlacementRow(placement=p, gradient=g) for p, g in zip(placements, gradients, strict=True)
            ]


def _repeated(graph: Graph, groups: AbstractSet[FusedGroup]) -> dict[str, float]:
    """For each tensor inside fused attention that repeats keys or values for several heads, 1 / repetitions.

    The kernel reads the heads of keys and values before their repetition, and ranks send these.
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


def build_tables(problem: Problem, linkage: Linkage | None = None) -> Tables:
    """Builds the tables of a problem."""
    linkage = linkage or link(problem.graph, units_of(problem))
    builder = _Builder(problem, linkage)
    for unit_type in range(linkage.blocks.num_types):
        builder.add_type(unit_type)
    spans, boundary_out = np.array(builder.spans, dtype=np.int64), np.array(builder.boundary_out, dtype=np.int64)
    blocks = block_rows(problem.graph, problem.hints, linkage, builder.spans)
    arrays = Arrays(
        operators=rows_of(builder.operators, OPERATOR_DTYPE),
        kernels=rows_of(builder.kernels, KERNEL_DTYPE),
        operands=rows_of(builder.operands, OPERAND_DTYPE),
        tensors=rows_of(builder.tensors, TENSOR_DTYPE),
        signatures=rows_of(builder.signatures, SIGNATURE_DTYPE),
        placements=rows_of(builder.placements, PLACEMENT_DTYPE),
        blocks=np.array([tuple(row) for row in blocks], dtype=MEASURED_BLOCK_DTYPE),
    )
    leave_results_behind(arrays, spans, boundary_out, linkage.blocks)
    return Tables(
        linkage=linkage,
        graph=problem.graph,
        arrays=arrays,
        spans=spans,
        type_of=np.repeat(np.arange(linkage.blocks.num_types), np.diff(builder.spans)),
        boundary_out=boundary_out,
        core=np.array(builder.core, dtype=np.bool_),
        names=tuple(builder.names),
    )
