"""Pipeline schedules: the order of the actions of every pipeline rank, as arrays and in torch's notation.

A chunk is a run of consecutive operators; rank c mod ranks computes chunk c, so a rank has several chunks if there are
virtual stages. An action is written as chunk, letter, micro-batch: `0F3` is the forward pass, `0B3` the backward pass;
`0I3` and `0W3` are the two halves of a split backward pass, the gradients of the input and of the weights. A program
lists the actions of all ranks so that each action comes after those that it depends on. Durations are not known here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

import numpy as np

from automap.arrays import Ints
from automap.errors import PlanError

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB1P, ZB2P, EXPLICIT, EAGER = range(7)
"""Numbers of the kinds of schedules, as kernels know them."""
KINDS = {"gpipe": GPIPE, "1f1b": ONE_F_ONE_B, "interleaved": INTERLEAVED, "zb1p": ZB1P, "zb2p": ZB2P,
         "eager-1f1b": EAGER, "explicit": EXPLICIT}  # fmt: skip
"""Name of a kind in a plan -> its number."""
WRITTEN_KINDS = tuple(KINDS)[:-1]
"""Kinds whose order follows from the numbers of ranks, chunks and micro-batches."""
SPLIT_KINDS = ("zb1p", "zb2p")
"""Kinds that split backward passes into gradients of inputs and gradients of weights."""

FORWARD, BACKWARD, INPUT, WEIGHT = range(4)
"""Passes of an action: forward; backward as a whole, or its gradients of inputs and of weights apart."""
LETTERS = "FBIW"
"""The letter of each of these passes in a word such as `0F3` (stage 0, forward pass of micro-batch 3)."""
_WORD = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")

A_RANK, A_WORD, A_CHUNK, A_MICRO_BATCH, A_BEFORE = range(5)
"""Columns of a program, which has one row for each action. A_WORD: the pass. A_BEFORE: row of the action on a
neighbour's chunk that it waits for, or -1; it also waits for all earlier rows of its rank."""
A_COUNT = 5
"""Number of columns of a program."""
NO_PROGRAM: Ints = np.empty((0, A_COUNT), dtype=np.int64)
"""The program of schedules that are timed without a list of actions."""


def pattern(kind: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> tuple[int, int]:
    """Base and step of a warm-up: rank r does base + step * (ranks - 1 - r) forwards before its first backward.

    GPipe: all forwards first. 1F1B: as many as ranks follow (Megatron-LM; DAPPLE's early backward with warm-up policy
    PA). Eager 1F1B: twice as many (DAPPLE's policy PB; arXiv 2211.05322), so that exchanges between ranks hide under
    other micro-batches. Interleaved: Megatron-LM's. ZB-1p and ZB-2p: the handcrafted schedules H1 and H2 of Qi et al.,
    "Zero Bubble Pipeline Parallelism", 2024; on rank r gradients of weights are step * r micro-batches later than
    gradients of inputs.
    """
    if kind == GPIPE:
        return num_micro_batches - 1, 1
    if kind == INTERLEAVED:
        virtual = num_chunks // num_ranks
        if num_micro_batches == num_ranks:
            return virtual * num_micro_batches - 1, 2
        return (virtual - 1) * num_ranks, 2
    return 0, 2 if kind in (ZB2P, EAGER) else 1


def arrange(kind: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Ints:
    """The program of a kind, [actions, A_COUNT].

    Args:
        kind: any but EXPLICIT.
        num_ranks: pipeline ranks.
        num_chunks: a multiple of the ranks; the ranks themselves unless interleaved.
        num_micro_batches: of one step; a multiple of the ranks if there are more chunks than ranks.
    """
    virtual = num_chunks // num_ranks
    base, step = pattern(kind, num_ranks, num_chunks, num_micro_batches)
    number = np.arange(virtual * num_micro_batches)
    # Ranks take turns by micro-batches, as many as there are ranks, before they go on to their next chunk.
    local = number % (num_ranks * virtual) // num_ranks
    micro_batch = number // (num_ranks * virtual) * num_ranks + number % num_ranks
    back = num_micro_batches - 1 - micro_batch if kind == GPIPE else micro_batch
    rows, keys = [], []
    for rank in range(num_ranks):
        # In one sweep a rank does a backward and then a forward; what they wait for was done in the sweep before, or,
        # where the warm-up grows by one a rank, by the rank before in this one.
        begin = (step - 1) * rank
        turn = number + begin + base + step * (num_ranks - 1 - rank) + 1
        split = kind in (ZB1P, ZB2P)
        parts = [(FORWARD, number + begin, 2, local, micro_batch)]
        parts += [(INPUT if split else BACKWARD, turn, 0, virtual - 1 - local, back)]
        parts += [(WEIGHT, turn + step * rank, 1, virtual - 1 - local, back)] if split else []
        for word, sweep, phase, chunk, micro in parts:
            table = np.empty((len(number), A_COUNT), dtype=np.int64)
            table[:, A_RANK], table[:, A_WORD], table[:, A_MICRO_BATCH] = rank, word, micro
            table[:, A_CHUNK] = chunk * num_ranks + rank
            rows.append(table)
            keys.append(np.column_stack([np.full(len(number), phase), np.full(len(number), rank), sweep]))
    return _linked(np.concatenate(rows)[np.lexsort(np.concatenate(keys).T)], num_chunks, num_micro_batches)


def _linked(program: Ints, num_chunks: int, num_micro_batches: int) -> Ints:
    """Writes the last column of `program`, and returns it."""
    word, chunk, micro_batch = program[:, A_WORD], program[:, A_CHUNK], program[:, A_MICRO_BATCH]
    # Row 0 holds forwards, row 1 gradients of inputs; the chunks before the first and after the last stay -1.
    place = np.full((2, num_chunks + 2, num_micro_batches), -1, dtype=np.int64)
    made = word != WEIGHT
    way = (word != FORWARD).astype(np.int64)
    place[way[made], chunk[made] + 1, micro_batch[made]] = np.flatnonzero(made)
    program[:, A_BEFORE] = np.where(made, place[way, chunk + 2 * way, micro_batch], -1)
    return program


def write_order(kind: str, num_ranks: int, num_chunks: int, num_micro_batches: int) -> tuple[tuple[str, ...], ...]:
    """The actions of each rank under a schedule, in torch's words: what `schedule.order` of an explicit plan holds.

    Args:
        kind: gpipe, 1f1b, eager-1f1b, interleaved, zb1p or zb2p.
        num_ranks: pipeline ranks.
        num_chunks: as many, or a multiple if interleaved.
        num_micro_batches: of one step; a multiple of the ranks if interleaved.
    """
    return words(arrange(KINDS[kind], num_ranks, num_chunks, num_micro_batches), num_ranks)


def words(program: Ints, num_ranks: int) -> tuple[tuple[str, ...], ...]:
    """The actions of each rank of a program, in torch's words."""
    chunks, micro_batches = (int(program[:, column].max(initial=-1)) + 1 for column in (A_CHUNK, A_MICRO_BATCH))
    heads = [f"{chunk}{letter}" for letter in LETTERS for chunk in range(chunks)]
    tails = [str(number) for number in range(micro_batches)]
    found = []
    for places in of_ranks(program, num_ranks):
        mine = program[places]
        which = (mine[:, A_WORD] * chunks + mine[:, A_CHUNK]).tolist()
        numbers = map(tails.__getitem__, mine[:, A_MICRO_BATCH].tolist())
        found.append(tuple(map(operator.add, map(heads.__getitem__, which), numbers)))
    return tuple(found)


def of_ranks(program: Ints, num_ranks: int) -> list[Ints]:
    """Where the actions of each rank stand in a program, in their order."""
    by_rank = np.argsort(program[:, A_RANK], kind="stable")
    return np.split(by_rank, np.searchsorted(program[by_rank, A_RANK], np.arange(1, num_ranks)))


def read_order(order: Sequence[Sequence[str]], num_ranks: int, num_chunks: int, num_micro_batches: int) -> Ints:
    """The program of an explicit order, [actions, A_COUNT].

    Args:
        order: per pipeline rank its actions in torch's words.
        num_ranks: pipeline ranks.
        num_chunks: a multiple of the ranks; chunk c lives on rank c mod ranks.
        num_micro_batches: of one step.

    Raises:
        PlanError: an action cannot be read, is on the wrong rank, appears twice or is missing; or ranks wait for each
            other.
    """
    if len(order) != num_ranks:
        raise _refuse("", len(order), f"not one list for each of {num_ranks} ranks", "Give a list for each rank.")
    if sum(map(len, order)) < num_chunks * num_micro_batches:
        raise _refuse(
            "",
            sum(map(len, order)),
            f"too few actions for {num_chunks} chunks and {num_micro_batches} micro-batches",
            "Give each chunk a forward and a backward of every micro-batch.",
        )
    lists = [
        [_action(text, rank, place, num_ranks, num_chunks, num_micro_batches) for place, text in enumerate(line)]
        for rank, line in enumerate(order)
    ]
    _check_complete(lists, num_ranks, num_chunks, num_micro_batches)
    rows = [(rank, *action, -1) for rank, action in _served(lists, num_chunks, num_micro_batches)]
    return _linked(np.array(rows, dtype=np.int64).reshape(-1, A_COUNT), num_chunks, num_micro_batches)


Action = tuple[int, int, int]
"""Number of the letter in `LETTERS`, chunk, micro-batch."""


def _refuse(place: str, value: object, message: str, repair: str) -> PlanError:
    return PlanError(message, field=f"plan.schedule.order{place}", value=value, repair=repair)


def _text(action: Action) -> str:
    return f"{action[1]}{LETTERS[action[0]]}{action[2]}"


def _action(text: str, rank: int, place: int, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Action:
    found = _WORD.fullmatch(text)
    where = f"[{rank}][{place}]"
    if found is None:
        raise _refuse(where, text, "not an action", "Write chunk, F, B, I or W, and micro-batch, as in 0F3.")
    word, chunk, micro_batch = LETTERS.index(found[2]), int(found[1]), int(found[3])
    if chunk >= num_chunks or micro_batch >= num_micro_batches:
        raise _refuse(
            where,
            text,
            "no such chunk or micro-batch",
            f"There are {num_chunks} chunks and {num_micro_batches} micro-batches, counted from 0.",
        )
    if chunk % num_ranks != rank:
        raise _refuse(where, text, f"chunk {chunk} is not on rank {rank}", f"Move it to rank {chunk % num_ranks}.")
    return word, chunk, micro_batch


def _check_complete(lists: Sequence[Sequence[Action]], num_ranks: int, num_chunks: int, num_micro_batches: int) -> None:
    """Refuses a schedule unless every chunk and micro-batch has one forward, and one backward or both its halves."""
    # One bit for each letter.
    have = np.zeros((num_chunks, num_micro_batches), dtype=np.int64)
    for rank, actions in enumerate(lists):
        seen: set[Action] = set()
        for place, action in enumerate(actions):
            if action in seen:
                raise _refuse(f"[{rank}][{place}]", _text(action), "stands there twice", "Remove one.")
            seen.add(action)
        if actions:
            word, chunk, micro_batch = np.array(actions, dtype=np.int64).T
            np.add.at(have, (chunk, micro_batch), 1 << word)
    whole, split = (1 << FORWARD) + (1 << BACKWARD), (1 << FORWARD) + (1 << INPUT) + (1 << WEIGHT)
    for chunk, micro_batch in np.argwhere((have != whole) & (have != split)).tolist():
        found = [_text((word, chunk, micro_batch)) for word in range(4) if have[chunk, micro_batch] >> word & 1]
        raise _refuse(
            f"[{chunk % num_ranks}]",
            " ".join(found),
            f"chunk {chunk} and micro-batch {micro_batch} need F, and either B or both I and W",
            "Add what is missing, or remove what is too much.",
        )


def _served(lists: Sequence[Sequence[Action]], num_chunks: int, num_micro_batches: int) -> list[tuple[int, Action]]:
    """All (rank, action) in an order in which every action comes after its dependencies."""
    size = num_chunks * num_micro_batches
    # Finished passes by chunk and micro-batch: in `onward` forward passes of the previous chunk, in `back` backward
    # passes of the chunk. The input of the first chunk and the gradient of the last chunk are available at once.
    onward = bytearray(b"\1" * num_micro_batches + bytes(size))
    back = bytearray(bytes(size) + b"\1" * num_micro_batches)
    cursor = [0] * len(lists)
    found: list[tuple[int, Action]] = []
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(lists):
            at = cursor[rank]
            while at < len(actions):
                word, chunk, micro_batch = action = actions[at]
                here = chunk * num_micro_batches + micro_batch
                after = here + num_micro_batches
                if word == FORWARD:
                    if not onward[here]:
                        break
                    onward[after] = 1
                elif word == WEIGHT:
                    if not back[here]:
                        break
                else:
                    if not (onward[after] and back[after]):
                        break
                    back[here] = 1
                found.append((rank, action))
                at += 1
            progressed = progressed or at > cursor[rank]
            cursor[rank] = at
    waiting = [rank for rank, actions in enumerate(lists) if cursor[rank] < len(actions)]
    if waiting:
        rank = waiting[0]
        others = "".join(f"; rank {r} waits at {_text(lists[r][cursor[r]])}" for r in waiting[1:])
        word, chunk, micro_batch = action = lists[rank][cursor[rank]]
        if word == FORWARD:
            needed = f"forward of chunk {chunk - 1}"
        elif word == WEIGHT:
            needed = f"gradient of chunk {chunk}"
        elif not onward[(chunk + 1) * num_micro_batches + micro_batch]:
            needed = f"forward of chunk {chunk}"
        else:
            needed = f"gradient of chunk {chunk + 1}"
        raise _refuse(
            f"[{rank}][{cursor[rank]}]",
            _text(action),
            f"rank {rank} waits forever: {_text(action)} needs the {needed} and micro-batch {micro_batch}, "
            "which is never reached" + others,
            "Move it back, or what it needs forward.",
        )
    return found
