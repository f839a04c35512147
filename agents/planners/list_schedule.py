"""List scheduling: in which order the ranks of a pipeline run their micro-batches, by an event simulation.

Ranks and the channels between them are resources that do one thing at a time and never wait while something is ready
for them. A backward pass goes before a forward pass, and among equals the earlier micro-batch goes first: the task
farthest along the chain of its micro-batch (SPP, Luo et al., INFOCOM 2022, arXiv 2204.10562; reconstructed from its
abstract and from experiments).

A rank may be given a number of registers. A forward pass takes one, and the backward pass of its micro-batch returns
it; without a free register no forward pass starts, so that a fast rank waits for the slow ones behind it. This is the
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
    """[stages] reduction of the gradients behind the last backward pass."""

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
    """[2 * stages - 1] a number of each stage and of the channel behind it in turn."""
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
    """[stages] most micro-batches between their forward and their backward pass."""


class _Side:
    """One direction through a stage or a channel, in which micro-batches come and go in their order."""

    __slots__ = ("arrived", "seconds", "started")

    def __init__(self, seconds: float, arrived: int = 0) -> None:
        self.seconds, self.arrived, self.started = seconds, arrived, 0

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
        registers: [stages] micro-batches that may be between their forward and their backward pass, at least 1 each;
            None = any number.
        forward_first: whether forward passes go before backward passes, as in GPipe. That is faster where the
            reduction of gradients of a late stage takes long.
    """
    count = len(stages.forward_s)
    # Resources in the order of the chain: stage 0, channel 0, stage 1, …; of each its way onward and its way back.
    onward, back = [_Side(float(stages.forward_s[0]), micro_batches)], [_Side(float(stages.backward_s[0]))]
    for stage in range(1, count):
        onward += [_Side(float(stages.onward_s[stage - 1])), _Side(float(stages.forward_s[stage]))]
        back += [_Side(float(stages.back_s[stage - 1])), _Side(float(stages.backward_s[stage]))]
    last = len(onward) - 1
    room = list(registers) if registers is not None else [micro_batches] * count
    alive, most = [0] * count, [0] * count
    order: list[list[str]] = [[] for _ in range(count)]
    is_busy = [False] * len(onward)
    ends = [0.0] * count
    events: list[tuple[float, int, bool]] = []
    touched = {0}
    now = 0.0

    def start(at: int) -> None:
        stage = at // 2
        is_full = at % 2 == 0 and alive[stage] >= room[stage]
        can_go, can_return = onward[at].waits and not is_full, back[at].waits
        if not (can_go or can_return):
            return
        is_back = can_return and not (forward_first and can_go)
        way = back[at] if is_back else onward[at]
        if at % 2 == 0:
            order[stage].append(f"{stage}{'B' if is_back else 'F'}{way.started}")
            alive[stage] += 0 if is_back else 1
            most[stage] = max(most[stage], alive[stage])
        way.started += 1
        is_busy[at] = True
        heapq.heappush(events, (now + way.seconds, at, is_back))

    while True:
        for at in touched:
            if not is_busy[at]:
                start(at)
        if not events:
            break
        touched = set()
        now = events[0][0]
        # All that ends at one moment is seen before anything starts, so that the order of equals decides nothing.
        while events and events[0][0] == now:
            _, at, is_back = heapq.heappop(events)
            is_busy[at] = False
            touched.add(at)
            if is_back and at % 2 == 0:
                alive[at // 2] -= 1
                ends[at // 2] = now
            following = at - 1 if is_back else at + 1
            if not is_back and at == last:
                back[at].arrived += 1
            elif following >= 0:
                (back if is_back else onward)[following].arrived += 1
                touched.add(following)
    seconds = float((np.array(ends) + stages.reduce_s).max())
    return Listed(tuple(map(tuple, order)), seconds, tuple(most))
