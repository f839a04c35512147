"""The operators of a stage as one rank runs them: each with the redistribution of its operands in front of it.

Operators are joined to regions: a region is one operator, or a run of operators that is recomputed in the backward
pass. A redistribution runs once for all readers of a unit that require the same placement, as it is priced. What cannot
be executed exactly is refused here, by name, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from automap.errors import PlanError
from automap.runtime.executor.parameters import Parameters
from automap.runtime.executor.stage_program import PlacedOperator, StageProgram
from automap.runtime.operators import FUNCTIONS
from automap.runtime.operators.apply import local_operator
from automap.runtime.sharded_operators.call import AxisSplit, Call, ShardedFunction, ShardedOperator, with_attributes
from automap.runtime.sharded_operators.choose import choose, with_bias
from automap.runtime.tensor_layout import StageTensor, Step
from ir.factors import Factor, may_be_uneven, shares_out
from ir.graph import Operator


@dataclass(frozen=True)
class Operand:
    """One operand with its redistribution, or a result on its way out of the stage."""

    name: str
    """The name of the tensor."""
    key: object
    """The key under which the redistributed tensor is kept for other readers; the name where nothing changes."""
    there: tuple[Step, ...]
    """The steps of the tensor."""
    back: tuple[Step, ...]
    """The steps of its gradient."""
    operator: str = ""
    """The operator that reads it; empty for a result on its way out."""
    unit: int = -1
    """The unit of that operator."""


@dataclass(frozen=True)
class LocalOperator:
    """One operator of a stage on this rank."""

    operator: ShardedOperator
    function: ShardedFunction
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]

    def uses(self) -> Iterator[object]:
        """The names and keys that the operator reads."""
        for operand in self.operands:
            yield operand.name
            yield operand.key


@dataclass
class Region:
    """One operator, or a run of operators that is recomputed in the backward pass."""

    operators: list[LocalOperator]
    recomputed: bool
    kept_operands: frozenset[object] = frozenset()
    """Keys of redistributed operands of a recomputed run that are kept rather than redistributed again."""
    makes: tuple[str, ...] = ()
    """The results that operators outside the region read."""
    drops: tuple[object, ...] = ()
    """The names and keys that no operator reads after this region."""


def build_regions(
    program: StageProgram, parameters: Parameters, device: torch.device, *, local_batch_norm: bool
) -> list[Region]:
    """The regions of a stage in the order in which they run.

    Args:
        local_batch_norm: whether batch normalisation takes its statistics over the rank's own samples.

    Raises:
        PlanError: an operator cannot be executed exactly; names it.
    """
    regions: list[Region] = []
    previous: PlacedOperator | None = None
    products: dict[str, tuple[PlacedOperator, Region, int]] = {}
    for position, placed in enumerate(program.operators):
        one = _local(program, position, device, local_batch_norm=local_batch_norm)
        joins = previous is not None and placed.recomputed and previous.recomputed and previous.unit == placed.unit
        previous = placed
        source = next((products[o.key] for o in one.operands if o.key in products), None)
        if source is not None and _adds_bias(program, source, placed, one, run=regions[-1] if joins else None):
            _, region, at = source
            bias = [operand for operand in one.operands if operand.name in program.parameters]
            operands = (*region.operators[at].operands, *bias)
            region.operators[at] = LocalOperator(one.operator, with_bias, operands, one.outputs)
            continue
        if joins:
            regions[-1].operators.append(one)
        else:
            regions.append(Region([one], placed.recomputed))
        if placed.op.kind == "MatMul":
            products[one.outputs[0]] = placed, regions[-1], len(regions[-1].operators) - 1
    _link(program, parameters, regions)
    return regions


def sent_operand(program: StageProgram, sent: StageTensor) -> Operand:
    """A result on its way out of the stage: sums are made whole.

    Raises:
        PlanError: replicas that are trained apart would have to exchange it.
    """
    tensor, held = program.graph.tensors[sent.name], program.placements[sent.name]
    there = program.layouts.steps(tensor, held, sent.placements)
    back: tuple[Step, ...] = ()
    if sent.carries_gradient:
        back = program.layouts.steps(tensor, sent.placements, program.gradients[sent.name])
    _check_apart(sent.name, (*there, *back))
    return Operand(sent.name, sent.name, there, back)


def _local(program: StageProgram, position: int, device: torch.device, *, local_batch_norm: bool) -> LocalOperator:
    """The part of an operator that this rank computes.

    Args:
        program: the stage.
        position: place of the operator in it.
        device: device of the rank.
        local_batch_norm: whether statistics of batches are those of one rank.

    Raises:
        PlanError: no kernel can compute the part exactly.
    """
    placed = program.operators[position]
    op, tensors, layouts = placed.op, program.graph.tensors, program.layouts
    if op.kind not in FUNCTIONS:
        raise _refuse(placed, "no kernel of this kind is known", "Export with standard operators.")
    splits = tuple(
        AxisSplit(
            axis=axis,
            signature=placed.signatures[axis.number],
            factor=_factor(placed, axis.number, local_batch_norm=local_batch_norm),
        )
        for axis in program.mesh.live
    )
    _check_factors(placed, splits)
    local = _in_type(op, program.dtype)
    for split in splits:
        local = local_operator(local, split.signature, split.axis.size)
    read = [(tensors[name], program.required(position, slot)) for slot, name in enumerate(op.inputs)]
    made = [(tensors[name], program.placements[name]) for name in op.outputs]
    operator = ShardedOperator(
        op=local,
        splits=splits,
        shapes=tuple(layouts.shape(*result) for result in made),
        boxes=tuple(layouts.here(*operand) for operand in read),
        result_boxes=tuple(layouts.here(*result) for result in made),
        whole=tuple(tensor.shape_at(layouts.samples) for tensor, _ in read),
        device=device,
    )
    operands = tuple(_operand(program, position, slot) for slot in range(len(op.inputs)))
    return LocalOperator(operator, choose(operator), operands, op.outputs)


def _operand(program: StageProgram, position: int, slot: int) -> Operand:
    placed = program.operators[position]
    name = placed.op.inputs[slot]
    required, gradient = program.required(position, slot), program.operand_gradients.get((position, slot))
    tensor = program.graph.tensors[name]
    there = program.layouts.steps(tensor, program.placements[name], required)
    back = program.layouts.steps(tensor, gradient, program.gradients[name]) if gradient is not None else ()
    _check_apart(name, (*there, *back))
    key: object = (placed.unit, name, required, gradient) if there or back else name
    return Operand(name, key, there, back, placed.op.name, placed.unit)


def _adds_bias(
    program: StageProgram, source: tuple[PlacedOperator, Region, int], placed: PlacedOperator, one: LocalOperator,
    run: Region | None,
) -> bool:  # fmt: skip
    """Whether an operator adds a bias to a matrix product that no other operator reads: the two are then one kernel.

    Args:
        source: the operator that makes an operand, its region, and its position there.
        placed: the operator that may add a bias.
        one: the same operator on this rank.
        run: the recomputed region that the operator would join, if there is one.
    """
    maker, region, at = source
    graph, product = program.graph, region.operators[at]
    (made,) = product.outputs
    weight, others = graph.tensors[maker.op.inputs[1]].shape, [n for n in placed.op.inputs if n != made]
    return (
        placed.op.kind == "Add"
        and product.function is Call.plain
        and one.function is Call.plain
        and (region is run if placed.recomputed else not maker.recomputed)
        and made not in graph.outputs
        and len(graph.consumers[made]) == 1
        and len(weight) == 2
        and [graph.tensors[n].shape for n in others if n in program.parameters] == [weight[1:]]
    )


def _link(program: StageProgram, parameters: Parameters, regions: Sequence[Region]) -> None:
    """Fills `kept_operands`, `makes` and `drops`."""
    recomputed = {name for region in regions if region.recomputed for one in region.operators for name in one.outputs}
    own = {name for region in regions for one in region.operators for name in one.outputs}
    units = {name: placed.unit for placed in program.operators for name in placed.op.outputs}
    last: dict[object, int] = {}
    for number, region in enumerate(regions):
        if region.recomputed:
            unit = units[region.operators[0].outputs[0]]
            # What the unit itself keeps is redistributed once; what comes from elsewhere is redistributed again.
            changed = [o for one in region.operators for o in one.operands if o.key != o.name]
            kept = own - recomputed
            region.kept_operands = frozenset(o.key for o in changed if o.name in kept and units[o.name] == unit)
        for one in region.operators:
            for use in (*one.uses(), *one.outputs):
                last[use] = number
            for operand in one.operands:
                if operand.name in program.parameters:
                    last.update(dict.fromkeys(parameters.flat_keys(operand.name, operand.unit), number))
    leaving = {sent.name for sent in program.outputs} | {program.loss}
    for number, region in enumerate(regions):
        region.drops = tuple(k for k, at in last.items() if at == number and k not in leaving)
        made = [name for one in region.operators for name in one.outputs]
        region.makes = tuple(name for name in made if last[name] > number or name in leaving)


def _factor(placed: PlacedOperator, axis: int, *, local_batch_norm: bool) -> Factor | None:
    """The factor that an operator splits on an axis, without its exchange where batch normalisation is local."""
    index = placed.signatures[axis].factor
    if index is None:
        return None
    factor = placed.op.rule.factors[index]
    exchange = factor.collective
    is_local = local_batch_norm and factor.is_batch and exchange is not None and exchange.name == "batch_norm"
    return replace(factor, collective=None) if is_local else factor


def _in_type(op: Operator, dtype: torch.dtype) -> Operator:
    """The operator with attributes that name float32, the type of the file, changed to the type of this run."""
    named = {k: str(dtype).removeprefix("torch.") for k, v in op.attributes if k in ("to", "dtype") and v == "float32"}
    return with_attributes(op, **named) if named and dtype != torch.float32 else op


def _check_factors(placed: PlacedOperator, splits: Sequence[AxisSplit]) -> None:
    """Refuses a split that cuts through a head, a group or an expert, and windows that two axes split along one dim."""
    for split in splits:
        if split.factor is None or split.factor.is_batch:
            continue
        alike = [s for s in splits if s.signature.factor == split.signature.factor]
        ranks = prod(s.axis.size for s in alike)
        assert split.signature.factor is not None
        unevenly = may_be_uneven(placed.op.rule, split.signature.factor)
        if not shares_out(split.factor.size, ranks, unevenly=unevenly):
            what = f"{split.factor.size} of {split.factor.name or 'a factor'} cannot be shared by {ranks} ranks"
            raise _refuse(placed, what, "Split it over a number of ranks that divides them.")
        if split.exchange == "halo" and len(alike) > 1:
            raise _refuse(placed, "one dim of windows is split over two axes", "Leave it whole on one of them.")


def _check_apart(name: str, steps: Sequence[Step]) -> None:
    """Refuses a tensor that replicas which are trained apart would have to exchange within a step."""
    for step in steps:
        if step.axis.is_apart and step.kind not in ("slice", "first", "pad"):
            raise PlanError(
                f"replicas over {step.axis.name} cannot be trained apart: {name} needs {step.kind.replace('_', '-')}",
                field="plan.sync.kind", value="not synchronous",
                repair="Split the batch, and nothing else, over the first batch axis. Or train synchronously.",
            )  # fmt: skip


def _refuse(placed: PlacedOperator, what: str, repair: str) -> PlanError:
    return PlanError(
        f"operator {placed.op.name} ({placed.op.kind}) cannot be executed: {what}",
        field=f"plan.stages.shardings.{placed.op.name}",
        value="; ".join(s.text for s in placed.signatures),
        repair=repair,
    )
