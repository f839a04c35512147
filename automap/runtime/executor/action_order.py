"""Lower: the action lists of all ranks as one order that every rank walks, or a refusal before anything runs.

An action runs when it is the next of every rank of its stage, whose collectives need them all, and has what it waits
for. Knows no tensors and no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from automap.errors import PlanError
from automap.schedule import BACKWARD, FORWARD, INPUT, LETTERS, WEIGHT

SHOWN = 4
"""Ranks that a message names."""


class Action(NamedTuple):
    """What a stage does with a micro-batch."""

    word: int
    """FORWARD, BACKWARD, INPUT or WEIGHT of `automap.schedule`."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.word]}{self.micro_batch}"


def lower(
    lists: Mapping[int, Sequence[Action]],
    ranks: Sequence[Sequence[int]],
    forward: Mapping[int, Sequence[int]],
    backward: Mapping[int, Sequence[int]],
) -> tuple[Action, ...]:
    """One order of all actions in which each has what it needs.

    In a round every rank does one action at most, so that the order is close to that in time.

    Args:
        lists: rank -> what it does, in order.
        ranks: [stages] the ranks of each.
        forward: stage -> the stages whose forward passes it waits for.
        backward: stage -> the stages whose backward passes it waits for.

    Raises:
        PlanError: the ranks wait for each other forever; names what each of them waits at.
    """
    cursor = dict.fromkeys(lists, 0)
    done: set[Action] = set()
    order: list[Action] = []
    while True:
        heads = {rank: lists[rank][at] for rank, at in cursor.items() if at < len(lists[rank])}
        if not heads:
            return tuple(order)
        ready = [
            action
            for action in dict.fromkeys(heads.values())
            if all(heads.get(rank) == action for rank in ranks[action.stage])
            and not _missing(action, done, forward, backward)
        ]
        if not ready:
            raise _deadlock(heads, done, forward, backward)
        for action in ready:
            for rank in ranks[action.stage]:
                cursor[rank] += 1
        order += ready
        done.update(ready)


def _missing(
    action: Action, done: set[Action], forward: Mapping[int, Sequence[int]], backward: Mapping[int, Sequence[int]]
) -> str:
    """What an action still waits for, empty if nothing."""
    word, stage, micro_batch = action
    needed: list[tuple[Action, ...]]
    if word == FORWARD:
        needed = [(Action(FORWARD, source, micro_batch),) for source in forward.get(stage, ())]
    elif word == WEIGHT:
        needed = [(Action(INPUT, stage, micro_batch),)]
    else:
        needed = [(Action(FORWARD, stage, micro_batch),)]
        needed += [
            (Action(BACKWARD, later, micro_batch), Action(INPUT, later, micro_batch))
            for later in backward.get(stage, ())
        ]
    return next((" or ".join(map(str, ways)) for ways in needed if done.isdisjoint(ways)), "")


def _deadlock(
    heads: Mapping[int, Action],
    done: set[Action],
    forward: Mapping[int, Sequence[int]],
    backward: Mapping[int, Sequence[int]],
) -> PlanError:
    waits = []
    for rank, action in heads.items():
        missing = _missing(action, done, forward, backward)
        waits.append(f"rank {rank} waits at {action} for " + (missing or "the other ranks of its stage"))
    more = f", and {len(waits) - SHOWN} more ranks" if len(waits) > SHOWN else ""
    return PlanError(
        f"deadlock: {'; '.join(waits[:SHOWN])}{more}",
        field="plan.schedule.order",
        value=" ".join(str(action) for action in list(heads.values())[:SHOWN]),
        repair="Put what is waited for before what waits, alike on all ranks of a stage.",
    )
