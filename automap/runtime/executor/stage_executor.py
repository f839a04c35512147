"""Runs one stage of a plan on one rank (SPMD): local kernels with redistributions of their operands between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from automap.plan import Plan
from automap.runtime.executor.parameters import Parameters
from automap.runtime.executor.regions import LocalOperator, Operand, Region, build_regions, sent_operand
from automap.runtime.executor.stage_program import StageProgram
from automap.runtime.operators.apply import apply, value_of
from automap.runtime.redistribute import convert, direction, move, sum_over
from automap.runtime.sharded_operators.call import Call
from ir.factors import BROADCAST, PARTIAL
from ir.graph import Graph

SUMMED_LOSSES = {"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss", "MeanSquaredErrorLoss"}
"""Kinds of losses that can be sums over the rows of a micro-batch."""
Values = dict[object, Tensor]
"""Name of a tensor, or key of a redistributed operand -> its local value."""


class StageExecutor:
    """One stage of a plan on one rank.

    A step is: `forward` of every micro-batch, with `torch.autograd.backward` of its outputs in any order that the
    schedule allows; then `tied_gradients`, to which the pipeline adds the gradients of other stages; then `finish`, the
    optimizer on `parameters`, and `refresh`.

    Attributes:
        program: the operators and placements of the stage.
        parameters: leaves for the optimizer, by name. Under ZeRO these are flat pieces with names of their own.
        members: leaf -> the parameters that it holds.
        loss: the name of the loss among the results of `forward`, None if another stage makes it. The backward pass
            starts from it with a gradient of one.
        scores: None, or number of a micro-batch -> the first output of the graph, whole, if the stage makes it.
    """

    def __init__(
        self, program: StageProgram, values: Mapping[str, Tensor], plan: Plan, scale: float, device: torch.device
    ) -> None:
        """Builds the regions of the stage.

        Args:
            values: whole parameters, buffers and stored constants, under the names of the graph or of its file.
            scale: the factor of the stage's loss, see `loss_scale`.

        Raises:
            PlanError: an operator cannot be executed exactly; names it.
            ModelError: a value is missing or of another shape.
        """
        self.program, self.scale, self.device = program, scale, device
        self.inputs, self.outputs, self.data, self.loss = program.inputs, program.outputs, program.data, program.loss
        self._held = Parameters(program, values, plan.stages[program.number].zero, device)
        self.parameters, self.members = self._held.leaves, self._held.members
        self._fixed = self._make_fixed(values)
        self._regions = build_regions(program, self._held, device, local_batch_norm=plan.training.batch_norm == "local")
        self._sends = [sent_operand(program, sent) for sent in program.outputs]
        self._steps = 0
        self.scores: dict[int, Tensor] | None = None

    def _make_fixed(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Buffers and constants, whole, in the type of this run."""
        program, graph = self.program, self.program.graph
        found = {name: value_of(graph, name, values).detach().to(self.device) for name in program.stored}
        for op in program.constants:
            results = apply(op, graph.tensors, [found[n] for n in op.inputs], program.layouts.samples, self.device)
            found.update(zip(op.outputs, results, strict=True))
        return {name: _narrowed(value, program.dtype) for name, value in found.items()}

    def weights(self) -> Sequence[Tensor]:
        """The leaves that `forward` reads and whose gradients a schedule may put off."""
        return self._held.used()

    def forward(self, tensors: Mapping[str, Tensor], micro_batch: int) -> dict[str, Tensor]:
        """Runs one micro-batch.

        Args:
            tensors: the local part of each of the program's `inputs` and `data`, by name. Inputs that carry a gradient
                are leaves that require it: after the backward pass their `grad` is the gradient that their maker needs.
            micro_batch: the number of the micro-batch within the step.

        Returns:
            The local part of each of the program's `outputs`, and the loss if the stage makes it: this rank's term of
            the loss of the step.
        """
        values: Values = {}
        values.update(tensors.items())
        step = (self._steps, micro_batch)
        with self._held.saving():
            for region in self._regions:
                if region.recomputed:
                    self._run_recomputed(region, values, step)
                else:
                    for one in region.operators:
                        self._run(one, values, step)
                for key in region.drops:
                    values.pop(key, None)
            found = {}
            for sent in self._sends:
                found[sent.name] = convert(values[sent.name], sent.there, sent.back, ("", sent.name))
            if self.loss is not None:
                found[self.loss] = values[self.loss].reshape(()) * self.scale
        return found

    def _value(self, operand: Operand, values: Values) -> Tensor:
        """The operand in the placement in which it is held."""
        name, found = operand.name, values.get(operand.name)
        if found is not None:
            return found
        return self._fixed[name] if name in self._fixed else self._held.read(name, values, operand.unit)

    def _operand(self, operand: Operand, values: Values) -> Tensor:
        """The operand in the placement that its reader requires."""
        if operand.key == operand.name:
            return self._value(operand, values)
        found = values.get(operand.key)
        if found is None:
            tag = operand.operator, operand.name
            found = values[operand.key] = convert(self._value(operand, values), operand.there, operand.back, tag)
        return found

    def _run(self, one: LocalOperator, values: Values, step: tuple[int, int]) -> None:
        operands = [self._operand(operand, values) for operand in one.operands]
        values.update(zip(one.outputs, one.function(Call(one.operator, operands, step)), strict=True))
        name = self.program.graph.outputs[0]
        if self.scores is not None and name in one.outputs:
            program, whole = self.program, (BROADCAST,) * len(self.program.mesh.axes)
            steps = program.layouts.steps(program.graph.tensors[name], program.placements[name], whole)
            self.scores[step[1]] = move(values[name].detach(), steps)

    def _run_recomputed(self, region: Region, values: Values, step: tuple[int, int]) -> None:
        """Runs a region of which only the operands are kept for the backward pass."""
        for one in region.operators:
            for operand in one.operands:
                if operand.key in region.kept_operands:
                    self._operand(operand, values)
        given = {key: values[key] for one in region.operators for key in one.uses() if key in values}
        passes = iter(("forward",))

        def body() -> tuple[Tensor, ...]:
            inside: Values = dict(given)
            with direction(next(passes, "recompute")):
                for one in region.operators:
                    self._run(one, inside, step)
            return tuple(inside[name] for name in region.makes)

        made = checkpoint(body, use_reentrant=False, preserve_rng_state=False)
        values.update(zip(region.makes, made, strict=True))

    def total_loss(self, losses: Tensor) -> Tensor:
        """The loss of the step, on every rank of the stage, from the sum of this rank's terms. A collective."""
        assert self.loss is not None
        held, live = self.program.placements[self.loss], self.program.mesh.live
        axes = [axis for axis in live if held[axis.number] == PARTIAL and not axis.is_apart]
        return sum_over(losses.detach(), axes, BROADCAST)

    def tied_gradients(self) -> dict[str, Tensor]:
        """Gradients of parameters that other stages read too, complete within this stage, to be added to in place.

        A collective, to be called on every rank of the stage after the last backward pass and before `finish`.
        """
        return self._held.tied_gradients()

    def finish(self) -> None:
        """Reduces the gradients of the step to `parameters[...].grad`. A collective."""
        self._steps += 1
        self._held.finish()

    def refresh(self) -> None:
        """Gathers what the optimizer changed, where ZeRO requires it for the next step. A collective."""
        self._held.refresh()

    def whole_parameters(self) -> dict[str, Tensor]:
        """Every parameter of the graph that this stage reads, whole on every rank. A collective."""
        return self._held.wholes(self._held.values())

    def whole_gradients(self) -> dict[str, Tensor]:
        """The gradient of every trained parameter that this stage reads, whole, after `finish`. A collective."""
        return self._held.wholes(self._held.gradients())

    def wholes(self, local: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Trained parameter -> the whole of a tensor of its shape, such as a moment of an optimizer. A collective.

        Args:
            local: for each of `parameters`, this rank's part.
        """
        return self._held.wholes(local)

    def own(self, wholes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `wholes`, without communication."""
        return self._held.own(wholes)


def _narrowed(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A constant in the type of this run; finite values stay finite, as masks of scores require."""
    if not value.is_floating_point():
        return value
    largest = min(torch.finfo(dtype).max, torch.finfo(value.dtype).max)
    return torch.where(value.isinf(), value, value.clamp(-largest, largest)).to(dtype)


def loss_scale(graph: Graph, num_micro_batches: int, samples: int) -> float:
    """The factor of a micro-batch's loss with which the loss of a step is the mean over all rows of its batch.

    A loss that is summed over rows is divided by the global count of rows; a loss that the model computes by itself is
    averaged over the micro-batches.

    Args:
        graph: a graph with its loss as the last output.
        num_micro_batches: the number of micro-batches of a step.
        samples: the number of samples of a micro-batch, over all ranks.
    """
    op = graph.maker(graph.outputs[-1])
    if op is None or op.kind not in SUMMED_LOSSES:
        return 1.0 / num_micro_batches
    if op.kind != "MeanSquaredErrorLoss" and dict(op.attributes).get("reduction", "mean") != "sum":
        return 1.0 / num_micro_batches
    rows = 1 if op.kind == "MeanSquaredErrorLoss" else graph.tensors[op.inputs[1]].num_elements
    return 1.0 / (num_micro_batches * samples * rows)
