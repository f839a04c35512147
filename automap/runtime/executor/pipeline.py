"""One training step of a pipeline on one rank.

All ranks follow one order of actions (`automap.runtime.executor.action_order`). Each rank runs the actions of its own
stages with plain autograd. After every action, the tensors that it made are sent straight to all stages that read them;
gradients come back likewise. A send or receive begins at the same point of the order on both ranks, and is waited for
only where its tensor is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from automap.runtime.executor.action_order import Action
from automap.runtime.executor.point_to_point import PointToPoint
from automap.runtime.executor.routes import StageBorder, backward_routes, forward_routes
from automap.runtime.executor.stage_executor import StageExecutor
from automap.runtime.executor.tied_gradients import add_tied, tied_parameters
from automap.runtime.operators.weight_gradients import Deferred, splitting
from automap.runtime.tensor_layout import Box, StageTensor
from automap.schedule import FORWARD, INPUT, WEIGHT

Data = Callable[[str, Box, int], Tensor]
"""(input of the graph, box, micro-batch) -> that part of the input."""
PENDING_GRADIENTS = 8
"""The number of sends of gradients under way from one rank, beyond which it waits for the oldest (assumed). It bounds
the memory of gradients that are received late. A rank so far ahead of its peer is not the one that others wait for."""


class Pipeline:
    """The stages of one rank, and the tensors between them and the stages of other ranks.

    Attributes:
        stages: what is to be known of all stages.
    """

    def __init__(
        self,
        stages: Sequence[StageBorder],
        executors: Mapping[int, StageExecutor],
        order: Sequence[Action],
        rank: int,
        device: torch.device,
    ) -> None:
        """Joins the stages of this rank.

        Args:
            executors: the executors of this rank's stages, by number of the stage.
            order: the actions of all ranks, see `automap.runtime.executor.routes.global_order`.
            rank: the number of this process in the default group.
        """
        self.rank = rank
        self.executors = dict(sorted(executors.items()))
        self.stages, self._order = stages, order
        self._forward, self._backward = forward_routes(stages), backward_routes(stages)
        self._tied = tied_parameters(stages)
        self._maker = {(route.reader, route.name): route.maker for route in self._forward}
        self._split = {action.stage for action in order if action.word == WEIGHT}
        returning = {(route.maker, route.name, route.reader) for route in self._backward}
        # The stages whose readers all send gradients back: once these have come, what was sent has arrived.
        self._answered = set(range(len(stages))) - {
            route.maker for route in self._forward if (route.maker, route.name, route.reader) not in returning
        }
        self._transfers = PointToPoint(rank, device)
        self._leaves: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._made: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._losses: dict[int, Tensor] = {}

    def step(self, data: Data) -> float | None:
        """Forward and backward passes of all micro-batches, and the reduction of gradients; not the optimizer.

        Args:
            data: gives the parts of the graph's inputs.

        Returns:
            The loss of the step on the ranks of the stage that makes it, None elsewhere.
        """
        for action in self._order:
            if action.stage in self.executors:
                self._act(action, data)
            if action.word == FORWARD:
                self._send_on(action.stage, action.micro_batch)
            elif action.word != WEIGHT:
                self._send_back(action.stage, action.micro_batch)
        self._transfers.settle_all()
        self._add_tied()
        for executor in self.executors.values():
            executor.finish()
        return self._loss()

    @torch.no_grad()
    def evaluate(self, data: Data) -> float | None:
        """Forward passes of all micro-batches, without any effect on the training; see `step`."""
        for word, number, micro_batch in self._order:
            if word != FORWARD:
                continue
            if number in self.executors:
                self._run_forward(number, micro_batch, data)
            self._send_on(number, micro_batch)
            self._leaves.pop((number, micro_batch), None)
            self._made.pop((number, micro_batch), None)
        self._transfers.settle_all()
        return self._loss()

    def _loss(self) -> float | None:
        """The loss of all micro-batches, on the ranks of the stage that makes it. A collective."""
        loss = None
        for number, executor in self.executors.items():
            if executor.loss is not None:
                loss = float(executor.total_loss(self._losses.pop(number)))
        return loss

    def refresh(self) -> None:
        """Gathers what the optimizer changed, where the next step requires it."""
        for executor in self.executors.values():
            executor.refresh()

    def _box(self, number: int, tensor: StageTensor) -> Box:
        """This rank's box of a tensor in a stage."""
        return tensor.boxes[self.stages[number].ranks.index(self.rank)]

    def _trained(self, number: int) -> Sequence[Tensor]:
        """The parameters of a stage whose gradients may be put off."""
        return self.executors[number].weights() if number in self._split else []

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
        executor = self.executors[number]
        leaves: dict[str, Tensor] = {}
        for entering in executor.inputs:
            key = ("tensor", self._maker[number, entering.name], entering.name, number, micro_batch)
            tensor = self._transfers.take(key, self._box(number, entering), entering.dtype)
            leaves[entering.name] = tensor.requires_grad_(entering.carries_gradient)
        given = {c.name: data(c.name, self._box(number, c), micro_batch) for c in executor.data}
        with splitting(self._trained(number)):
            made = executor.forward({**leaves, **given}, micro_batch)
        if executor.loss is not None:
            part = made[executor.loss].detach()
            self._losses[number] = self._losses[number] + part if number in self._losses else part
        self._leaves[number, micro_batch] = leaves
        self._made[number, micro_batch] = made

    def _run_backward(self, number: int, micro_batch: int, store: Deferred | None) -> None:
        executor = self.executors[number]
        made = self._made.pop((number, micro_batch))
        gradients = {executor.loss: torch.ones_like(made[executor.loss])} if executor.loss is not None else {}
        boxes = {leaving.name: self._box(number, leaving) for leaving in executor.outputs}
        for route in self._backward:
            if route.maker == number:
                key = ("gradient", number, route.name, route.reader, micro_batch)
                gradient = self._transfers.take(key, boxes[route.name], route.dtype)
                known = gradients.get(route.name)
                gradients[route.name] = gradient if known is None else known + gradient
        if number in self._answered:
            self._transfers.settle((number, micro_batch))
        names = [name for name in gradients if made[name].requires_grad]
        with splitting(self._trained(number), store):
            if names:  # a stage of frozen parameters alone has no backward pass
                torch.autograd.backward([made[name] for name in names], [gradients[name] for name in names])

    # -- tensors on the way --------------------------------------------------------------------------------------------

    def _send_on(self, number: int, micro_batch: int) -> None:
        """Begins to send and to receive what the forward pass of a stage made."""
        made = self._made.get((number, micro_batch), {})
        for route in self._forward:
            if route.maker == number:
                key = ("tensor", number, route.name, route.reader, micro_batch)
                self._transfers.post(route, made.get(route.name), under=key, sent_under=(number, micro_batch))

    def _send_back(self, number: int, micro_batch: int) -> None:
        """Begins to send and to receive the gradients that the backward pass of a stage made."""
        leaves = self._leaves.pop((number, micro_batch), {})
        for route in self._backward:
            if route.reader == number:
                leaf = leaves.get(route.name)
                gradient = leaf.grad if leaf is not None else None
                if leaf is not None and gradient is None:
                    gradient = torch.zeros_like(leaf)
                key = ("gradient", route.maker, route.name, number, micro_batch)
                self._transfers.post(route, gradient, under=key, sent_under="gradients")
        self._transfers.settle("gradients", PENDING_GRADIENTS)

    def _add_tied(self) -> None:
        """Adds up the gradients of parameters that several stages read."""
        own = {number: executor.tied_gradients() for number, executor in self.executors.items()}
        add_tied(self._tied, own, self._transfers, lambda n, name: self._box(n, self.stages[n].parameters[name]))
