"""List scheduling: an event simulation that finds the order in which the ranks of a pipeline run their micro-batches.

Ranks and the channels between them are resources. A resource runs one task at a time and never waits while a task is
ready for it. Of several ready tasks, backward passes come before forward passes, and earlier micro-batches before later
ones: the task that is farthest along the chain of its micro-batch (SPP, Luo et al., INFOCOM 2022, arXiv 2204.10562;
reconstructed from its abstract and from experiments).

A rank may be given a number of registers. A forward pass takes one, and the backward pass of its micro-batch returns
it; without a free register no forward pass starts, so that a fast rank waits for the slow ones after it. This is the
back-pressure of OneFlow's actors (arXiv 2110.15032, section 5): with one register a pipeline runs one micro-batch at a
time, with as many as ranks follow it is DAPPLE's 1F1B, and without a limit it is SPP's schedule. Units: seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from automap.arrays import Floats


@dataclass(frozen=True, kw_only=True)
class Stages:
    """What the stages of a synchronous pipeline take for one micro-batch."""

    forward_s: Floats
    """[stages] forward pass."""
    backward_s: Floats
    """[stages] backward pass."""
    onward_s: Floats
    """[stages - 1] activations on their way to the next stage."""
    back_s: Floats
    """[stages - 1] gradients on their way back, over the same channel."""
    reduce_s: Floats
    """[stages] reduction of the gradients after the last backward pass."""

    @property
    def load_s(self) -> float:
        """Largest time that a stage or a channel is busy for one micro-batch: SPP's bottleneck."""
        busy, channel = self.forward_s + self.backward_s, self.onward_s + self.back_s
        return max(float(busy.max()), float(channel.max(initial=0.0)))

    def lower_bound_s(self, micro_batches: int) -> float:
        """No order of the micro-batches is faster.

        A stage, or a channel, is not reached before the first micro-batch has come through all stages before it, then
        it does all its work, and then the last gradient has to go back through them, where gradients are reduced.
        """
        # Stages and channels in the order of the chain.
        onward = _woven(self.forward_s, self.onward_s)
        back = _woven(self.backward_s, self.back_s)
        before = np.concatenate([[0.0], np.cumsum(onward)[:-1]])
        # The longest way from the end of a resource's last backward pass to the end of the step.
        drain, reduce_s = np.zeros(len(back)), _woven(self.reduce_s, np.zeros(len(self.onward_s)))
        drain[0] = reduce_s[0]
        for at in range(1, len(back)):
            drain[at] = max(reduce_s[at], drain[at - 1] + back[at - 1])
        return float((before + micro_batches * (onward + back) + drain).max())


def _woven(stages: Floats, channels: Floats) -> Floats:
    """[2 * stages - 1] a number of each stage and of the channel after it in turn."""
    found = np.zeros(2 * len(stages) - 1)
    found[::2], found[1::2] = stages, channels
    return found


class Listed(NamedTuple):
    """An order of micro-batches."""

    order: tuple[tuple[str, ...], ...]
    """Actions of each rank in torch's words, see `automap.schedule`."""
    seconds: float
    """When the last gradients are reduced."""
    alive: tuple[int, ...]
    """[stages] largest number of micro-batches in flight."""


class _Side:
    """One direction through a stage or a channel, in which micro-batches come and go in their order."""

    __slots__ = ("arrived", "seconds", "started")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.arrived = self.started = 0

    @property
    def waits(self) -> bool:
        return self.started < self.arrived


def list_schedule(
    stages: Stages, micro_batches: int, registers: Sequence[int] | None = None, *, forward_first: bool = False
) -> Listed:
    """The order in which list scheduling runs the micro-batches of a step.

    Args:
        stages: times of one micro-batch.
        micro_batches: of the step.
        registers: [stages] largest number of micro-batches in flight that is allowed, at least 1 each;
            None = any number.
        forward_first: whether forward passes go before backward passes, as in GPipe. That is faster where the
            reduction of gradients of a late stage takes long.
    """
    run = _Run(stages, micro_batches, registers, forward_first)
    run.to_the_end()
    seconds = float((np.array(run.ends) + stages.reduce_s).max())
    return Listed(tuple(map(tuple, run.order)), seconds, tuple(run.most))


class _Run:
    """The simulation of a step.

    Its resources are numbered in the order of the chain: 0 is stage 0, 1 the channel after it, 2 is stage 1, and so
    on. Even numbers are stages.
    """

    def __init__(
        self, stages: Stages, micro_batches: int, registers: Sequence[int] | None, forward_first: bool
    ) -> None:
        count = len(stages.forward_s)
        self.forward_first = forward_first
        self.onward = [_Side(seconds) for seconds in _woven(stages.forward_s, stages.onward_s).tolist()]
        self.back = [_Side(seconds) for seconds in _woven(stages.backward_s, stages.back_s).tolist()]
        self.onward[0].arrived = micro_batches
        self.room = list(registers) if registers is not None else [micro_batches] * count
        self.alive = [0] * count
        """[stages] micro-batches in flight."""
        self.most = [0] * count
        """[stages] the largest number of these so far."""
        self.order: list[list[str]] = [[] for _ in range(count)]
        self.ends = [0.0] * count
        """[stages] when the last backward pass ended."""
        self.is_busy = [False] * len(self.onward)
        self.now = 0.0
        self.events: list[tuple[float, int, bool]] = []
        """A heap of what is running: (when it ends, resource, whether it is a backward pass or gradients)."""

    def to_the_end(self) -> None:
        """Runs all micro-batches."""
        touched = {0}
        while True:
            for at in touched:
                if not self.is_busy[at]:
                    self.start(at)
            if not self.events:
                return
            # All tasks that end at the same time are handled before any task starts, so their order does not matter.
            touched = set()
            self.now = self.events[0][0]
            while self.events and self.events[0][0] == self.now:
                _, at, is_back = heapq.heappop(self.events)
                touched |= self.end(at, is_back)

    def start(self, at: int) -> None:
        """Starts the next task of a free resource, if one is ready."""
        stage, is_stage = at // 2, at % 2 == 0
        is_full = is_stage and self.alive[stage] >= self.room[stage]
        can_go, can_return = self.onward[at].waits and not is_full, self.back[at].waits
        if not (can_go or can_return):
            return
        is_back = can_return and not (self.forward_first and can_go)
        side = self.back[at] if is_back else self.onward[at]
        if is_stage:
            self.order[stage].append(f"{stage}{'B' if is_back else 'F'}{side.started}")
            self.alive[stage] += 0 if is_back else 1
            self.most[stage] = max(self.most[stage], self.alive[stage])
        side.started += 1
        self.is_busy[at] = True
        heapq.heappush(self.events, (self.now + side.seconds, at, is_back))

    def end(self, at: int, is_back: bool) -> set[int]:
        """Hands the micro-batch that a resource has finished to the next one; returns resources that may start."""
        self.is_busy[at] = False
        if is_back and at % 2 == 0:
            self.alive[at // 2] -= 1
            self.ends[at // 2] = self.now
        if not is_back and at == len(self.onward) - 1:
            # The backward pass of a micro-batch follows its forward pass on the last stage.
            self.back[at].arrived += 1
            return {at}
        following = at - 1 if is_back else at + 1
        if following < 0:
            return {at}
        (self.back if is_back else self.onward)[following].arrived += 1
        return {at, following}
