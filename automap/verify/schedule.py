"""Rules about the schedule: the order of each rank, derived here for every kind, and run with queues between ranks.

An action is (letter, stage, micro-batch): F forward, B backward, or I and W, the gradients of inputs and of weights.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence

from automap.plan import Plan
from automap.verify.reading import Violation, num_ranks

Action = tuple[str, int, int]

_WORD = re.compile(r"(\d+)([FBIW])(\d+)")


def rank_orders(plan: Plan) -> list[list[Action]]:
    """[pipeline ranks] the actions of each rank, in order.

    Raises:
        ValueError: the kind does not suit the plan, or a word of an explicit order is not an action.
    """
    ranks, chunks, count = num_ranks(plan), len(plan.stages), plan.num_micro_batches
    kind, order = plan.schedule.kind, plan.schedule.order
    if (kind == "explicit") != (order is not None):
        raise ValueError(f"{kind} {'needs' if order is None else 'has no'} order")
    if order is not None:
        return [[_read(word) for word in line] for line in order]
    if kind == "interleaved":
        if count % ranks:
            raise ValueError(f"{count} micro-batches are not a multiple of {ranks} pipeline ranks")
        return [_interleaved(rank, ranks, chunks // ranks, count) for rank in range(ranks)]
    if chunks != ranks:
        raise ValueError(f"{kind} has no virtual stages, but {chunks} stages go round {ranks} pipeline ranks")
    if kind == "gpipe":
        return [
            [("F", r, m) for m in range(count)] + [("B", r, m) for m in reversed(range(count))] for r in range(ranks)
        ]
    if kind == "1f1b":
        return [_alternating(r, ranks - 1 - r, count) for r in range(ranks)]
    if kind == "eager-1f1b":
        return [_alternating(r, 2 * (ranks - 1 - r), count) for r in range(ranks)]
    return [_zero_bubble(r, ranks, 2 if kind == "zb2p" else 1, count) for r in range(ranks)]


def _read(word: str) -> Action:
    found = _WORD.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} is not an action")
    return found[2], int(found[1]), int(found[3])


def _alternating(rank: int, warm_up: int, count: int) -> list[Action]:
    """1F1B: forward passes of the warm-up, then one of each, then the remaining backward passes."""
    forward = deque(("F", rank, m) for m in range(count))
    backward = deque(("B", rank, m) for m in range(count))
    order = [forward.popleft() for _ in range(min(warm_up, count))]
    while forward:
        order += [forward.popleft(), backward.popleft()]
    return [*order, *backward]


def _interleaved(rank: int, ranks: int, virtual: int, count: int) -> list[Action]:
    """Interleaved 1F1B of Megatron-LM (arXiv 2104.04473): `ranks` micro-batches on a stage, then the next stage."""
    total = virtual * count
    # The local stage and the micro-batch of the k-th pass of a rank.
    turns = [(k // ranks % virtual, k // (ranks * virtual) * ranks + k % ranks) for k in range(total)]
    forward = deque(("F", local * ranks + rank, m) for local, m in turns)
    backward = deque(("B", (virtual - 1 - local) * ranks + rank, m) for local, m in turns)
    warm_up = total if count == ranks else min(total, 2 * (ranks - 1 - rank) + (virtual - 1) * ranks)
    order = [forward.popleft() for _ in range(warm_up)]
    while forward:
        order += [forward.popleft(), backward.popleft()]
    return [*order, *backward]


def _zero_bubble(rank: int, ranks: int, depth: int, count: int) -> list[Action]:
    """H1 (depth 1) and H2 (depth 2) of Qi et al. (2024): W lags behind I by `depth` micro-batches for each rank."""
    ahead, lag = depth * (ranks - 1 - rank) + 1, depth * rank
    order: list[Action] = [("F", rank, m) for m in range(min(ahead, count))]
    for m in range(count):
        order.append(("I", rank, m))
        if m >= lag:
            order.append(("W", rank, m - lag))
        if m + ahead < count:
            order.append(("F", rank, m + ahead))
    return order + [("W", rank, m) for m in range(max(0, count - lag), count)]


def check_order(plan: Plan) -> Iterator[Violation]:
    """Checks that every pass is present once and on its own rank, and that no rank waits forever."""
    try:
        orders = rank_orders(plan)
    except ValueError as fault:
        yield Violation("schedule", str(fault))
        return
    found = [*_complete(plan, orders)]
    yield from found or _run(orders, len(plan.stages))


def _complete(plan: Plan, orders: Sequence[Sequence[Action]]) -> Iterator[Violation]:
    ranks, chunks = num_ranks(plan), len(plan.stages)
    if len(orders) != ranks:
        yield Violation("schedule.order", f"{len(orders)} lists for {ranks} pipeline ranks")
        return
    have = Counter(action for order in orders for action in order)
    for rank, order in enumerate(orders):
        for letter, chunk, m in order:
            word = f"{chunk}{letter}{m}"
            if chunk >= chunks or m >= plan.num_micro_batches or chunk % ranks != rank:
                yield Violation(f"schedule.order[{rank}]", f"{word} does not belong on this rank")
                return
            if have[letter, chunk, m] > 1:
                yield Violation(f"schedule.order[{rank}]", f"{word} stands there twice")
                return
    for chunk in range(chunks):
        for m in range(plan.num_micro_batches):
            letters = "".join(letter for letter in "FBIW" if have[letter, chunk, m])
            if letters not in ("FB", "FIW"):
                there = " and ".join(letters)
                yield Violation(
                    f"schedule.order[{chunk % ranks}]",
                    f"stage {chunk} has {there or 'nothing'} of micro-batch {m}; it needs F and B, or F, I and W",
                )
                return


def _run(orders: Sequence[Sequence[Action]], chunks: int) -> Iterator[Violation]:
    """Runs the lists of all ranks; the result of a pass waits in a queue of its receiver until it is used."""
    lists = [deque(order) for order in orders]
    arrived: set[Action] = set()
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for waiting in lists:
            while waiting and not _missing(waiting[0], chunks, arrived, done):
                letter, chunk, m = action = waiting.popleft()
                done.add(action)
                if letter in "FBI":
                    arrived.add(("F", chunk + 1, m) if letter == "F" else ("B", chunk - 1, m))
                moved = True
    for rank, waiting in enumerate(lists):
        if waiting:
            letter, chunk, m = waiting[0]
            what = f"{chunk}{letter}{m} waits forever for {_missing(waiting[0], chunks, arrived, done)}"
            yield Violation(f"schedule.order[{rank}]", what)


def _missing(action: Action, chunks: int, arrived: set[Action], done: set[Action]) -> str:
    """What an action still waits for; empty if nothing."""
    letter, chunk, m = action
    if letter == "F":
        return "" if chunk == 0 or ("F", chunk, m) in arrived else f"the result of stage {chunk - 1}"
    if letter == "W":
        return "" if ("I", chunk, m) in done else f"{chunk}I{m}"
    if ("F", chunk, m) not in done:
        return f"{chunk}F{m}"
    return "" if chunk == chunks - 1 or ("B", chunk, m) in arrived else f"the gradient of stage {chunk + 1}"


def peaks(orders: Sequence[Sequence[Action]], kept: Mapping[int, float]) -> list[float]:
    """[pipeline ranks] the largest number of bytes that each rank saves at one time.

    Args:
        orders: the orders of `rank_orders`.
        kept: stage -> the bytes that a micro-batch saves from its forward pass until its backward pass, or until W if
            the gradients of weights are computed separately.
    """
    found = []
    for order in orders:
        held = most = 0.0
        for letter, chunk, _ in order:
            if letter == "F":
                held += kept[chunk]
                most = max(most, held)
            elif letter in "BW":
                held -= kept[chunk]
        found.append(most)
    return found
