"""The step of a plan as a trace for Perfetto (https://ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from automap.arrays import Floats, Ints

Action = tuple[str, float, float]
"""Torch's word for an action of a pipeline rank, and the seconds at which it begins and ends."""

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the inputs",
    "W": "backward of the weights",
}
"""Letter of an action -> what is computed."""
MICROSECONDS = 1e6


def read_action(word: str) -> tuple[int, str, int]:
    """Stage, letter and micro-batch of an action such as `2F13`."""
    match = re.fullmatch(r"(\d+)([A-Z]+)(\d+)", word)
    assert match is not None, word
    return int(match[1]), match[2], int(match[3])


class Passes(NamedTuple):
    """The actions of a pipeline rank in order, as arrays of one length."""

    stages: Ints
    letters: np.ndarray[Any, np.dtype[np.str_]]
    micro_batches: Ints
    begins: Floats
    ends: Floats


def read_actions(actions: Sequence[Action]) -> Passes:
    """All actions of a pipeline rank. One by one, the thousands of a large plan take three times as long."""
    words, begins, ends = zip(*actions, strict=True)
    parts = re.findall(r"(\d+)([A-Z]+)(\d+)", " ".join(words))
    assert len(parts) == len(words), "a word is not an action"
    stages, letters, micro_batches = zip(*parts, strict=True)
    return Passes(
        np.array(list(map(int, stages))),
        np.array(letters),
        np.array(list(map(int, micro_batches))),
        np.array(begins),
        np.array(ends),
    )


def trace(name: str, timeline: Sequence[Sequence[Action]]) -> dict[str, Any]:
    """A trace in Chrome's JSON format (Trace Event Format): a process for each pipeline rank.

    Args:
        name: name of the model.
        timeline: of each pipeline rank, the actions in order.
    """
    events: list[dict[str, Any]] = []
    for rank, actions in enumerate(timeline):
        label = {"name": f"pipeline rank {rank}"}
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": label})
        for word, begin, end in actions:
            stage, letter, micro_batch = read_action(word)
            events.append(
                {
                    "ph": "X",
                    "name": word,
                    "cat": KINDS.get(letter, letter),
                    "pid": rank,
                    "tid": 0,
                    "ts": begin * MICROSECONDS,
                    "dur": (end - begin) * MICROSECONDS,
                    "args": {"stage": stage, "micro_batch": micro_batch},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"model": name}}
