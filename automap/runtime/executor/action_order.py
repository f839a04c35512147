"""The actions of a schedule, and one order of the actions of all ranks, or a refusal before anything runs.

An action runs when it is the next of every rank of its stage, since its collectives need them all, and the actions that
it depends on have run. Independent of tensors and of time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from automap.errors import PlanError
from automap.plan import Plan, parse_devices
from automap.schedule import (
    A_CHUNK,
    A_MICRO_BATCH,
    A_WORD,
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    LETTERS,
    WEIGHT,
    arrange,
    read_order,
)

SHOWN = 4
"""The number of ranks that a message names."""


class Action(NamedTuple):
    """One pass of a stage over a micro-batch."""

    word: int
    """FORWARD, BACKWARD, INPUT or WEIGHT of `automap.schedule`."""
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS[self.word]}{self.micro_batch}"


def action_lists(plan: Plan) -> dict[int, list[Action]]:
    """Rank -> the actions of a process in order; a process has the number of its device.

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


def order_actions(
    lists: Mapping[int, Sequence[Action]],
    ranks: Sequence[Sequence[int]],
    forward: Mapping[int, Sequence[int]],
    backward: Mapping[int, Sequence[int]],
) -> tuple[Action, ...]:
    """One order of all actions in which every action follows those that it depends on.

    In a round every rank runs one action at most, so that the order is close to the order in time.

    Args:
        lists: rank -> its actions, in order.
        ranks: [stages] the ranks of each stage.
        forward: stage -> the stages whose forward passes it depends on.
        backward: stage -> the stages whose backward passes it depends on.

    Raises:
        PlanError: the ranks would wait for each other forever; names the action that each of them waits at.
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
    """What an action still waits for; empty if nothing."""
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
        repair="Put an action after those that it waits for, in the same order on all ranks of a stage.",
    )
