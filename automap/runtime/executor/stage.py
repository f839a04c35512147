"""The sharded execution of one stage of a plan on one rank (SPMD), by local kernels and conversions between them.

Built once for a plan: every operator gets its local form under its signatures on all axes of the mesh, with conversions
of its operands in front. A conversion runs once for all readers of a unit that ask for the same, as it is priced. What
cannot be executed exactly is refused here, by name, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from automap.errors import PlanError
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.price.local_sgd import replica_axis
from automap.price.plan_reader import lower_plan
from automap.runtime.executor.parameters import Parameters, value_of
from automap.runtime.executor.replica_averaging import replica_share
from automap.runtime.executor.sharded_operators import Form, Local, Place, Split, choose, with_attributes, with_bias
from automap.runtime.executor.stage_outline import Outline, Planned, outline
from automap.runtime.mesh_groups import Groups, make_meshes
from automap.runtime.operators import FUNCTIONS
from automap.runtime.operators.apply import apply, local_operator
from automap.runtime.redistribute import all_reduce, convert, direction
from automap.runtime.stage_program import Crossing
from automap.runtime.tensor_layout import Step
from ir.factors import PARTIAL, Factor, placement_text
from ir.graph import Graph, Operator

SUMMED_LOSSES = {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "MeanSquaredErrorLoss"}
Env = dict[object, Tensor]


@dataclass(frozen=True)
class Read:
    """One operand on its way to an operator."""

    name: str
    key: object
    """Under which the converted tensor is kept for other readers; the name where nothing changes."""
    there: tuple[Step, ...]
    back: tuple[Step, ...]
    operator: str
    """That reads it; empty on the way out."""
    unit: int


@dataclass(frozen=True)
class Compiled:
    """One operator of this rank."""

    place: Place
    form: Form
    reads: tuple[Read, ...]
    outputs: tuple[str, ...]

    def uses(self) -> Iterator[object]:
        """Names and keys that it reads."""
        for read in self.reads:
            yield read.name
            yield read.key


@dataclass
class Item:
    """One operator, or a run of them that is recomputed in the backward pass."""

    operators: list[Compiled]
    recomputed: bool
    before: frozenset[object] = frozenset()
    """Keys of conversions of what a run reads, whose results are kept."""
    makes: tuple[str, ...] = ()
    """What others read."""
    drops: tuple[object, ...] = ()
    """What nobody reads behind it."""


class Sharded:
    """A `StageProgram`; see there."""

    def __init__(
        self,
        stage: Outline,
        values: Mapping[str, Tensor],
        *,
        scale: float,
        zero: int,
        zero_axes: Sequence[str],
        local_batch_norm: bool,
        device: torch.device,
    ) -> None:
        """Builds the program; see `build_program`."""
        self.stage, self.scale, self.device = stage, scale, device
        self.inputs, self.outputs, self.data = stage.inputs, stage.outputs, stage.data
        self.loss, self.layouts, self.tied = stage.loss, stage.parameters, stage.tied
        held = Parameters(stage, values, zero, zero_axes, device)
        self.held = held
        self.parameters = held.leaves
        self.fixed = self._fixed(values)
        compiled = [
            self._compile(i, planned, local_batch_norm=local_batch_norm) for i, planned in enumerate(stage.operators)
        ]
        self.items = self._items(compiled)
        self.sends = [self._send(crossing) for crossing in stage.outputs]
        self.steps = 0

    # -- building ---------------------------------------------------------------------------------------------------

    def _fixed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Buffers and constants, whole."""
        stage, graph = self.stage, self.stage.graph
        found: dict[str, Tensor] = {}
        for name in stage.stored:
            found[name] = value_of(graph, name, values).detach().to(self.device)
        for op in stage.constants:
            operands = [found[name] for name in op.inputs]
            results = apply(op, graph.tensors, operands, stage.layouts.samples, self.device)
            found.update(zip(op.outputs, results, strict=True))
        return {name: _narrowed(value, stage.dtype) for name, value in found.items()}

    def _compile(self, position: int, planned: Planned, *, local_batch_norm: bool) -> Compiled:
        stage, op = self.stage, planned.op
        tensors, layouts = stage.graph.tensors, stage.layouts
        if op.kind not in FUNCTIONS:
            raise _refuse(planned, "no kernel of this kind is known", "Export with standard operators.")
        splits = tuple(
            Split(
                axis=axis,
                signature=planned.signatures[axis.number],
                factor=_factor(planned, axis.number, local_batch_norm=local_batch_norm),
            )
            for axis in stage.mesh.live
        )
        _check_factors(planned, splits)
        local = _in_type(op, stage.dtype)
        for split in splits:
            local = local_operator(local, split.signature, split.axis.size)
        wanted = [stage.wants(position, slot) for slot in range(len(op.inputs))]
        lies = [stage.lies[name] for name in op.outputs]
        operands = [tensors[name] for name in op.inputs]
        results = [tensors[name] for name in op.outputs]
        place = Place(
            op=local,
            splits=splits,
            shapes=tuple(layouts.shape(t, p) for t, p in zip(results, lies, strict=True)),
            boxes=tuple(layouts.here(t, p) for t, p in zip(operands, wanted, strict=True)),
            result_boxes=tuple(layouts.here(t, p) for t, p in zip(results, lies, strict=True)),
            whole=tuple(t.shape_at(layouts.samples) for t in operands),
            device=self.device,
        )
        reads = tuple(self._read(position, slot, planned.unit) for slot in range(len(op.inputs)))
        return Compiled(place, choose(place), reads, op.outputs)

    def _read(self, position: int, slot: int, unit: int) -> Read:
        stage = self.stage
        name = stage.operators[position].op.inputs[slot]
        wanted, given = stage.wants(position, slot), stage.given.get((position, slot))
        tensor = stage.graph.tensors[name]
        there = stage.layouts.steps(tensor, stage.lies[name], wanted)
        back = stage.layouts.steps(tensor, given, stage.returns[name]) if given is not None else ()
        _check_apart(name, (*there, *back))
        key: object = (unit, name, wanted, given) if there or back else name
        return Read(name, key, there, back, stage.operators[position].op.name, unit)

    def _send(self, crossing: Crossing) -> Read:
        """A result on its way out of the stage: sums are made whole."""
        stage = self.stage
        tensor, lies = stage.graph.tensors[crossing.name], stage.lies[crossing.name]
        there = stage.layouts.steps(tensor, lies, crossing.placements)
        back: tuple[Step, ...] = ()
        if crossing.carries_gradient:
            back = stage.layouts.steps(tensor, crossing.placements, stage.returns[crossing.name])
        _check_apart(crossing.name, (*there, *back))
        return Read(crossing.name, crossing.name, there, back, "", -1)

    def _items(self, compiled: Sequence[Compiled]) -> list[Item]:
        items: list[Item] = []
        previous: Planned | None = None
        products: dict[str, tuple[Planned, Item, int]] = {}
        for planned, one in zip(self.stage.operators, compiled, strict=True):
            joins = (
                previous is not None and planned.recomputed and previous.recomputed and previous.unit == planned.unit
            )
            previous = planned
            before = next((products[read.key] for read in one.reads if read.key in products), None)
            if before is not None and self._adds_bias(before, planned, one, run=items[-1] if joins else None):
                _, item, at = before
                given = [read for read in one.reads if read.name in self.stage.parameters]
                item.operators[at] = Compiled(one.place, with_bias, (*item.operators[at].reads, *given), one.outputs)
                continue
            if joins:
                items[-1].operators.append(one)
            else:
                items.append(Item([one], planned.recomputed))
            if planned.op.kind == "MatMul":
                products[one.outputs[0]] = planned, items[-1], len(items[-1].operators) - 1
        self._link(items)
        return items

    def _adds_bias(self, before: tuple[Planned, Item, int], planned: Planned, one: Compiled, run: Item | None) -> bool:
        """Whether an operator adds a bias to a matrix product that nobody else reads: the two are one kernel.

        Args:
            before: operator, item and place in it that make what is read.
            planned: the operator.
            one: the same.
            run: the item that it joins, if it joins one.
        """
        maker, item, at = before
        graph, product = self.stage.graph, item.operators[at]
        (made,) = product.outputs
        weight, others = graph.tensors[maker.op.inputs[1]].shape, [n for n in planned.op.inputs if n != made]
        return (
            planned.op.kind == "Add"
            and product.form is Local.plain
            and one.form is Local.plain
            and (item is run if planned.recomputed else not maker.recomputed)
            and made not in graph.outputs
            and len(graph.consumers[made]) == 1
            and len(weight) == 2
            and [graph.tensors[n].shape for n in others if n in self.stage.parameters] == [weight[1:]]
        )

    def _link(self, items: Sequence[Item]) -> None:
        """Fills `before`, `makes` and `drops`."""
        again = {name for item in items if item.recomputed for one in item.operators for name in one.outputs}
        own = {name for item in items for one in item.operators for name in one.outputs}
        units = {name: planned.unit for planned in self.stage.operators for name in planned.op.outputs}
        last: dict[object, int] = {}
        for number, item in enumerate(items):
            if item.recomputed:
                unit = units[item.operators[0].outputs[0]]
                # What the unit itself keeps is converted once; what comes from elsewhere is converted again.
                reads = [r for one in item.operators for r in one.reads if r.key != r.name]
                item.before = frozenset(r.key for r in reads if r.name in own - again and units[r.name] == unit)
            for one in item.operators:
                for use in one.uses():
                    last[use] = number
                last.update(dict.fromkeys(one.outputs, number))
                for read in one.reads:
                    if read.name in self.stage.parameters:
                        last.update(dict.fromkeys(self.held.flat_keys(read.name, read.unit), number))
        kept = {crossing.name for crossing in self.outputs} | {self.loss}
        for number, item in enumerate(items):
            item.drops = tuple(k for k, at in last.items() if at == number and k not in kept)
            made = [name for one in item.operators for name in one.outputs]
            item.makes = tuple(name for name in made if last[name] > number or name in kept)

    # -- running ----------------------------------------------------------------------------------------------------

    def weights(self) -> list[Tensor]:
        """See `StageProgram.weights`."""
        return self.held.used()

    def forward(self, tensors: Mapping[str, Tensor], micro_batch: int) -> dict[str, Tensor]:
        """See `StageProgram.forward`."""
        env: Env = {}
        env.update(tensors.items())
        step = (self.steps, micro_batch)
        with self.held.saving():
            for item in self.items:
                if item.recomputed:
                    self._again(item, env, step)
                else:
                    for one in item.operators:
                        self._run(one, env, step)
                for key in item.drops:
                    env.pop(key, None)
            found = {}
            for read in self.sends:
                found[read.name] = convert(env[read.name], read.there, read.back, ("", read.name))
            if self.loss is not None:
                found[self.loss] = env[self.loss].reshape(()) * self.scale
        return found

    def _value(self, read: Read, env: Env) -> Tensor:
        found = env.get(read.name)
        if found is not None:
            return found
        return self.fixed[read.name] if read.name in self.fixed else self.held.read(read.name, env, read.unit)

    def _operand(self, read: Read, env: Env) -> Tensor:
        if read.key == read.name:
            return self._value(read, env)
        found = env.get(read.key)
        if found is None:
            found = convert(self._value(read, env), read.there, read.back, (read.operator, read.name))
            env[read.key] = found
        return found

    def _run(self, one: Compiled, env: Env, step: tuple[int, int]) -> None:
        operands = [self._operand(read, env) for read in one.reads]
        env.update(zip(one.outputs, one.form(Local(one.place, operands, step)), strict=True))

    def _again(self, item: Item, env: Env, step: tuple[int, int]) -> None:
        """Runs a region of which only what enters it is kept for the backward pass."""
        for one in item.operators:
            for read in one.reads:
                if read.key in item.before:
                    self._operand(read, env)
        given = {key: env[key] for one in item.operators for key in one.uses() if key in env}
        passes = iter(("forward",))

        def body() -> tuple[Tensor, ...]:
            inside: Env = dict(given)
            with direction(next(passes, "recompute")):
                for one in item.operators:
                    self._run(one, inside, step)
            return tuple(inside[name] for name in item.makes)

        made = checkpoint(body, use_reentrant=False, preserve_rng_state=False)
        env.update(zip(item.makes, made, strict=True))

    def total_loss(self, losses: Tensor) -> Tensor:
        """See `StageProgram.total_loss`."""
        assert self.loss is not None
        losses = losses.detach()
        for axis in self.stage.mesh.live:
            if self.stage.lies[self.loss][axis.number] == PARTIAL and not axis.is_apart:
                losses = all_reduce(losses, axis)
        return losses

    def tied_gradients(self) -> dict[str, Tensor]:
        """See `StageProgram.tied_gradients`."""
        return self.held.tied_gradients()

    def finish(self) -> None:
        """See `StageProgram.finish`."""
        self.steps += 1
        self.held.finish()

    def refresh(self) -> None:
        """See `StageProgram.refresh`."""
        self.held.refresh()

    def whole_parameters(self) -> dict[str, Tensor]:
        """See `StageProgram.whole_parameters`."""
        return self.held.wholes(gradients=False)

    def whole_gradients(self) -> dict[str, Tensor]:
        """See `StageProgram.whole_gradients`."""
        return self.held.wholes(gradients=True)


def _factor(planned: Planned, axis: int, *, local_batch_norm: bool) -> Factor | None:
    """The factor that an operator splits on an axis, without exchange where batch normalisation is local."""
    index = planned.signatures[axis].factor
    if index is None:
        return None
    factor = planned.op.rule.factors[index]
    exchange = factor.collective
    is_local = local_batch_norm and factor.is_batch and exchange is not None and exchange.name == "batch_norm"
    return replace(factor, collective=None) if is_local else factor


def _narrowed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A constant in the type of this run; what hides scores stays finite if it was."""
    if not value.is_floating_point():
        return value
    largest = min(torch.finfo(dtype).max, torch.finfo(value.dtype).max)
    return torch.where(value.isinf(), value, value.clamp(-largest, largest)).to(dtype)


def _in_type(op: Operator, dtype: torch.dtype) -> Operator:
    """What a file in float32 calls so is in the type of this run."""
    named = {k: str(dtype).removeprefix("torch.") for k, v in op.attributes if k in ("to", "dtype") and v == "float32"}
    return with_attributes(op, **named) if named and dtype != torch.float32 else op


def _check_factors(planned: Planned, splits: Sequence[Split]) -> None:
    """Refuses a split of heads, groups or experts that leaves parts of one, and windows cut twice along one dim."""
    for split in splits:
        if split.factor is None or split.factor.is_batch:
            continue
        alike = [s for s in splits if s.signature.factor == split.signature.factor]
        ranks = prod(s.axis.size for s in alike)
        if split.factor.size % ranks:
            what = f"{split.factor.size} of {split.factor.name or 'a factor'} are not shared evenly by {ranks} ranks"
            raise _refuse(planned, what, "Split it over a number of ranks that divides them.")
        if split.exchange == "halo" and len(alike) > 1:
            raise _refuse(planned, "one dim of windows is split over two axes", "Leave it whole on one of them.")


def _check_apart(name: str, steps: Sequence[Step]) -> None:
    """Refuses a tensor that replicas would have to exchange within a step."""
    for step in steps:
        if step.axis.is_apart and step.kind not in ("slice", "first", "pad"):
            raise PlanError(
                f"replicas over {step.axis.name} cannot be apart: {name} would go by {step.kind.replace('_', '-')}",
                field="plan.sync.kind",
                value="not synchronous",
                repair="Split the batch, and nothing else, over the first batch axis. Or synchronous.",
            )


def _refuse(planned: Planned, what: str, repair: str) -> PlanError:
    signatures = [
        f"{','.join(map(placement_text, s.inputs))} -> {','.join(map(placement_text, s.outputs))}"
        for s in planned.signatures
    ]
    return PlanError(
        f"operator {planned.op.name} ({planned.op.kind}) cannot be executed: {what}",
        field=f"plan.stages.shardings.{planned.op.name}",
        value="; ".join(signatures),
        repair=repair,
    )


def loss_scale(graph: Graph, num_micro_batches: int, samples: int) -> float:
    """What the loss of one micro-batch is multiplied with, so that a step is the mean over all rows of its batch.

    Losses that are summed over rows are divided by the global count; a loss that the model computes by itself is
    averaged over the micro-batches.

    Args:
        graph: with its loss as the last output.
        num_micro_batches: of a step.
        samples: of a micro-batch, over all ranks.
    """
    index = graph.producer.get(graph.outputs[-1])
    op = None if index is None else graph.operators[index]
    if op is None or op.kind not in SUMMED_LOSSES:
        return 1.0 / num_micro_batches
    if op.kind != "MeanSquaredErrorLoss" and dict(op.attributes).get("reduction", "mean") != "sum":
        return 1.0 / num_micro_batches
    rows = 1 if op.kind == "MeanSquaredErrorLoss" else graph.tensors[op.inputs[1]].num_elements
    return 1.0 / (num_micro_batches * samples * rows)


def outlines(plan: Plan, evaluator: Evaluator, dtype: torch.dtype = torch.float32) -> tuple[Outline, ...]:
    """All stages of a plan, without processes; see `automap.runtime.executor.stage_outline`.

    Raises:
        PlanError: the plan is illegal, or cannot be split so.
    """
    lowered = lower_plan(plan, evaluator)
    return outline(plan, lowered, evaluator, make_meshes(plan, lowered.axes), dtype)


def build_programs(
    plan: Plan,
    evaluator: Evaluator,
    rank: int,
    values: Mapping[str, Tensor],
    groups: Groups,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> tuple[tuple[Outline, ...], dict[int, Sharded]]:
    """All stages of a plan, and the programs of those in which this rank has a part, by number.

    Args:
        plan: of the evaluator's problem.
        evaluator: of the problem.
        rank: of this process: a device number of the plan.
        values: whole parameters, buffers and stored constants, under the names of the graph or of its file.
        groups: process groups, kept from plan to plan. All ranks must build the same plans in the same order.
        dtype: of floating-point tensors.
        device: of this process; default the CPU.

    Raises:
        PlanError: the plan is illegal, or an operator of it cannot be executed exactly; names it.
        ModelError: a value is missing or of another shape.
    """
    lowered = lower_plan(plan, evaluator)
    if plan.sync.kind != "synchronous":
        replica_axis(plan, lowered, evaluator)
    stages = outline(plan, lowered, evaluator, make_meshes(plan, lowered.axes, rank, groups), dtype)
    scale = loss_scale(evaluator.problem.graph, plan.num_micro_batches, plan.samples_per_micro_batch)
    programs = {
        stage.number: Sharded(
            stage,
            values,
            scale=scale / replica_share(stage),
            zero=plan.stages[stage.number].zero.stage,
            zero_axes=plan.stages[stage.number].zero.axes,
            local_batch_norm=plan.training.batch_norm == "local",
            device=device or torch.device("cpu"),
        )
        for stage in stages
        if stage.mesh.is_mine
    }
    return stages, programs
