"""Stages: one training step of a pipeline, on one rank.

All ranks walk one order of actions (`automap.runtime.executor.action_order`). Each does those of its own stages,
above plain autograd;
behind every action the tensors that it made set out straight to all stages that read them, gradients back likewise.
A send or receive is begun at the same place of the order on both ranks, and waited for only where its tensor is used.
Stages may have unlike meshes and may share ranks. What happens inside a stage is a `StageProgram`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from automap.plan import Plan, parse_devices
from automap.runtime.executor.action_order import Action, lower
from automap.runtime.executor.point_to_point import Mail
from automap.runtime.executor.transfer_plan import Piece, TensorLayout, transfer
from automap.runtime.operators.weight_gradients import Deferred, splitting
from automap.runtime.stage_program import Box, Crossing, StageProgram
from automap.schedule import A_CHUNK, A_MICRO_BATCH, A_WORD, FORWARD, INPUT, KINDS, WEIGHT, arrange, read_order

Data = Callable[[str, Box, int], Tensor]
"""(input of the graph, box, micro-batch) -> that part of it."""
PENDING_GRADIENTS = 8
"""Sends of gradients under way from one rank before it waits for the oldest: bounds the memory of those that are
received late. A rank so far ahead of its peer is not the one that others wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ends:
    """What the others must know of a stage."""

    ranks: tuple[int, ...]
    """In the order of its mesh."""
    inputs: tuple[Crossing, ...]
    outputs: tuple[Crossing, ...]
    parameters: Mapping[str, Crossing] = field(default_factory=dict)
    """Parameters that it reads, by name."""
    replicas: tuple[int, ...] = ()
    """Of each rank the number of its replica, where replicas are apart; those of all stages are then the same."""

    def layout(self, crossing: Crossing) -> TensorLayout:
        """Where the parts of a tensor are."""
        return dict(zip(self.ranks, crossing.boxes, strict=True))

    def layouts(self, crossing: Crossing) -> list[TensorLayout]:
        """The same for each replica by itself."""
        if not self.replicas:
            return [self.layout(crossing)]
        where = list(zip(self.replicas, self.ranks, crossing.boxes, strict=True))
        return [{rank: box for r, rank, box in where if r == replica} for replica in range(max(self.replicas) + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A tensor from a stage that has it to one that wants it, or its gradient back."""

    name: str
    maker: int
    reader: int
    """Stages: of the tensor, not of the gradient."""
    sources: TensorLayout
    """Of those who send."""
    pieces: tuple[Piece, ...]
    dtype: torch.dtype


def forward_routes(stages: Sequence[Ends]) -> tuple[Route, ...]:
    """All tensors between stages, by maker, name and reader."""
    return tuple(
        _route(stages, maker, made, reader, read)
        for maker, source in enumerate(stages)
        for made in source.outputs
        for reader, target in enumerate(stages)
        for read in target.inputs
        if read.name == made.name and reader != maker
    )


def backward_routes(stages: Sequence[Ends]) -> tuple[Route, ...]:
    """All gradients between stages, likewise."""
    return tuple(
        _route(stages, maker, made, reader, read, is_back=True)
        for maker, source in enumerate(stages)
        for made in source.outputs
        for reader, target in enumerate(stages)
        for read in target.inputs
        if read.name == made.name and reader != maker and made.carries_gradient
    )


def _route(
    stages: Sequence[Ends], maker: int, made: Crossing, reader: int, read: Crossing, *, is_back: bool = False
) -> Route:
    sources, targets = stages[maker].layouts(made), stages[reader].layouts(read)
    if is_back:
        sources, targets = targets, sources
    return Route(
        name=made.name,
        maker=maker,
        reader=reader,
        sources={rank: box for layout in sources for rank, box in layout.items()},
        pieces=tuple(piece for ends in zip(sources, targets, strict=True) for piece in transfer(*ends)),
        dtype=made.dtype,
    )


def tied_routes(stages: Sequence[Ends]) -> dict[str, tuple[Route, ...]]:
    """Gradients of parameters that several stages read, from each of them to each other."""
    holders: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for name, layout in stage.parameters.items():
            if layout.carries_gradient:
                holders.setdefault(name, []).append(number)
    return {
        name: tuple(
            _route(stages, a, stages[a].parameters[name], b, stages[b].parameters[name])
            for a in numbers
            for b in numbers
            if a != b
        )
        for name, numbers in sorted(holders.items())
        if len(numbers) > 1
    }


def action_lists(plan: Plan) -> dict[int, list[Action]]:
    """What each process does, in order; a process is named by its device.

    Raises:
        PlanError: an explicit order is malformed, or can never be finished.
    """
    ranks = [parse_devices(stage.devices) for stage in plan.stages]
    pipeline = ranks.index(ranks[0], 1) if ranks[0] in ranks[1:] else len(ranks)
    kind, count = plan.schedule.kind, plan.num_micro_batches
    if kind == "explicit":
        program = read_order(plan.schedule.order or (), pipeline, len(ranks), count)
    else:
        program = arrange(KINDS[kind], pipeline, len(ranks), count)
    actions = [Action(*row) for row in program[:, [A_WORD, A_CHUNK, A_MICRO_BATCH]].tolist()]
    everyone = sorted({rank for mine in ranks for rank in mine})
    return {rank: [a for a in actions if rank in ranks[a.stage]] for rank in everyone}


def global_order(lists: Mapping[int, Sequence[Action]], stages: Sequence[Ends]) -> tuple[Action, ...]:
    """One order for all ranks, see `lower`.

    Raises:
        PlanError: the ranks would wait for each other forever.
    """
    forward: dict[int, list[int]] = {}
    backward: dict[int, list[int]] = {}
    for route in forward_routes(stages):
        forward.setdefault(route.reader, []).append(route.maker)
    for route in backward_routes(stages):
        backward.setdefault(route.maker, []).append(route.reader)
    return lower(lists, [stage.ranks for stage in stages], forward, backward)


class Pipeline:
    """The stages of one rank and the tensors between them and others."""

    def __init__(
        self,
        stages: Sequence[Ends],
        programs: Mapping[int, StageProgram],
        order: Sequence[Action],
        rank: int,
        device: torch.device,
    ) -> None:
        """Joins the programs of this rank.

        Args:
            stages: all of the plan.
            programs: those of this rank, by number of the stage.
            order: of all ranks, see `global_order`.
            rank: of this process in the default group.
            device: of the tensors.
        """
        self.rank = rank
        self.programs = dict(sorted(programs.items()))
        self._stages, self._order = stages, order
        self._forward, self._backward = forward_routes(stages), backward_routes(stages)
        self._tied = tied_routes(stages)
        self._maker = {(route.reader, route.name): route.maker for route in self._forward}
        self._split = {action.stage for action in order if action.word == WEIGHT}
        returning = {(route.maker, route.name, route.reader) for route in self._backward}
        # Stages whose readers all send gradients back: when these are there, what was sent has arrived.
        self._answered = set(range(len(stages))) - {
            route.maker for route in self._forward if (route.maker, route.name, route.reader) not in returning
        }
        self._mail = Mail(rank, device)
        self._leaves: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._made: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._losses: dict[int, Tensor] = {}

    def step(self, data: Data) -> float | None:
        """Forward and backward passes of all micro-batches, and the reduction of gradients; not the optimizer.

        Args:
            data: gives the inputs of the graph.

        Returns:
            The loss of the step on the ranks of the stage that makes it, else None.
        """
        for action in self._order:
            if action.stage in self.programs:
                self._act(action, data)
            if action.word == FORWARD:
                self._send_on(action.stage, action.micro_batch)
            elif action.word != WEIGHT:
                self._send_back(action.stage, action.micro_batch)
        self._mail.settle_all()
        self._add_tied()
        loss = None
        for number, program in self.programs.items():
            program.finish()
            if program.loss is not None:
                loss = float(program.total_loss(self._losses.pop(number)))
        return loss

    def refresh(self) -> None:
        """Brings what the optimizer changed to where the next step reads it."""
        for program in self.programs.values():
            program.refresh()

    def _box(self, number: int, crossing: Crossing) -> Box:
        """What this rank holds of a tensor in a stage."""
        return crossing.boxes[self._stages[number].ranks.index(self.rank)]

    def _trained(self, number: int) -> Sequence[Tensor]:
        """The parameters whose gradients may be put off."""
        return self.programs[number].weights() if number in self._split else []

    # -- actions -----------------------------------------------------------------------------------------------------

    def _act(self, action: Action, data: Data) -> None:
        word, number, micro_batch = action
        if word == FORWARD:
            self._run_forward(number, micro_batch, data)
        elif word == WEIGHT:
            self._deferred.pop((number, micro_batch)).run()
        else:
            store = None
            if word == INPUT:
                store = self._deferred[number, micro_batch] = Deferred()
            self._run_backward(number, micro_batch, store)

    def _run_forward(self, number: int, micro_batch: int, data: Data) -> None:
        program = self.programs[number]
        leaves: dict[str, Tensor] = {}
        for crossing in program.inputs:
            key = ("tensor", self._maker[number, crossing.name], crossing.name, number, micro_batch)
            tensor = self._mail.take(key, self._box(number, crossing), crossing.dtype)
            leaves[crossing.name] = tensor.requires_grad_(crossing.carries_gradient)
        given = {c.name: data(c.name, self._box(number, c), micro_batch) for c in program.data}
        with splitting(self._trained(number)):
            made = program.forward({**leaves, **given}, micro_batch)
        if program.loss is not None:
            part = made[program.loss].detach()
            self._losses[number] = self._losses[number] + part if number in self._losses else part
        self._leaves[number, micro_batch] = leaves
        self._made[number, micro_batch] = made

    def _run_backward(self, number: int, micro_batch: int, store: Deferred | None) -> None:
        program = self.programs[number]
        made = self._made.pop((number, micro_batch))
        gradients = {program.loss: torch.ones_like(made[program.loss])} if program.loss is not None else {}
        boxes = {crossing.name: self._box(number, crossing) for crossing in program.outputs}
        for route in self._backward:
            if route.maker == number:
                key = ("gradient", number, route.name, route.reader, micro_batch)
                gradient = self._mail.take(key, boxes[route.name], route.dtype)
                known = gradients.get(route.name)
                gradients[route.name] = gradient if known is None else known + gradient
        if number in self._answered:
            self._mail.settle((number, micro_batch))
        names = [name for name in gradients if made[name].requires_grad]
        with splitting(self._trained(number), store):
            torch.autograd.backward([made[name] for name in names], [gradients[name] for name in names])

    # -- tensors on the way --------------------------------------------------------------------------------------------

    def _send_on(self, number: int, micro_batch: int) -> None:
        """Begins to send, and to receive, what the forward pass of a stage made."""
        made = self._made.get((number, micro_batch), {})
        for route in self._forward:
            if route.maker == number:
                self._mail.post(
                    route.pieces,
                    route.sources,
                    made.get(route.name),
                    route.dtype,
                    under=("tensor", number, route.name, route.reader, micro_batch),
                    sent_under=(number, micro_batch),
                )

    def _send_back(self, number: int, micro_batch: int) -> None:
        """Likewise the gradients that its backward pass made."""
        leaves = self._leaves.pop((number, micro_batch), {})
        for route in self._backward:
            if route.reader == number:
                leaf = leaves.get(route.name)
                gradient = leaf.grad if leaf is not None else None
                if leaf is not None and gradient is None:
                    gradient = torch.zeros_like(leaf)
                self._mail.post(
                    route.pieces,
                    route.sources,
                    gradient,
                    route.dtype,
                    under=("gradient", route.maker, route.name, number, micro_batch),
                    sent_under="gradients",
                )
        self._mail.settle("gradients", PENDING_GRADIENTS)

    def _add_tied(self) -> None:
        """Adds to the gradients of shared parameters what other stages have of them, in the order of the stages."""
        own = {number: program.tied_gradients() for number, program in self.programs.items()}
        for name, between in self._tied.items():
            for route in between:
                gradient = own[route.maker][name] if route.maker in own else None
                key = ("tied", route.maker, name, route.reader)
                self._mail.post(route.pieces, route.sources, gradient, route.dtype, under=key, sent_under="tied")
        self._mail.settle("tied")
        totals: list[tuple[Tensor, Tensor]] = []
        for name, between in self._tied.items():
            for number in sorted({route.reader for route in between if route.reader in own}):
                box = self._box(number, self._stages[number].parameters[name])
                terms = {number: own[number][name]}
                for route in between:
                    if route.reader == number:
                        terms[route.maker] = self._mail.take(("tied", route.maker, name, number), box, route.dtype)
                ordered = [terms[source] for source in sorted(terms)]
                totals.append((own[number][name], sum(ordered[1:], start=ordered[0])))
        for gradient, total in totals:
            gradient.copy_(total)
