"""Events of a job: each change of its state and the progress of its searchers, in a Redis stream for each job.

An event is added in the transaction that changes the job, so events and changes always agree. A further stream,
`CHANGES`, names the streams to which events were added, so that one reader can serve all listeners. Knows nothing of
HTTP or of what a job does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import redis

Kind = Literal["state", "progress"]
CHANGES = "automap:changes"
_MOST_CHANGES = 10_000
"""About how many entries `CHANGES` keeps: many more than are added between two reads."""
MOST_EVENTS = 5_000
"""About how many events a job keeps. A job of one hour has about 700, see `Thinning`."""
_SHARE = 0.01
"""Share of the time so far that passes between two events of progress without anything better (assumed)."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a job."""

    id: str
    """Rises with time; two numbers joined by a dash, as in `1763876543210-0`."""
    kind: Kind
    """`state` or `progress`."""
    data: Mapping[str, Any]
    """Of `state`: state, attempt, at, problem; of `progress`: the fields of `agents.searcher.Progress`, and attempt."""

    @property
    def place(self) -> tuple[int, int]:
        """The id as numbers, which are in order."""
        return place_of(self.id)

    @property
    def ends(self) -> bool:
        """Whether the job has ended, so that no event follows."""
        return self.kind == "state" and self.data["state"] not in ("queued", "running")


def place_of(event_id: str) -> tuple[int, int]:
    """An event's id as numbers."""
    first, _, second = event_id.partition("-")
    return int(first), int(second or 0)


def add(pipe: Any, stream: str, kind: Kind, data: Mapping[str, Any]) -> None:
    """Adds an event to a transaction.

    Args:
        pipe: the transaction.
        stream: key of the job's stream.
        kind: kind of the event.
        data: its data, see `Event`.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    pipe.xadd(stream, {"kind": kind, "data": text}, maxlen=MOST_EVENTS, approximate=True)
    pipe.xadd(CHANGES, {"stream": stream}, maxlen=_MOST_CHANGES, approximate=True)


def read(client: redis.Redis, stream: str, after: str = "") -> list[Event]:
    """The events of a job in order; those after the event `after`, or all."""
    rows = cast("list[Any]", client.xrange(stream, min=f"({after}" if after else "-"))
    return [
        Event(row.decode(), cast("Kind", value[b"kind"].decode()), json.loads(value[b"data"])) for row, value in rows
    ]


def latest(client: redis.Redis, stream: str) -> str:
    """The id of the last entry of a stream; `0-0` where there is none."""
    rows = cast("list[Any]", client.xrevrange(stream, count=1))
    return str(rows[0][0].decode()) if rows else "0-0"


class Thinning:
    """Decides which reports of progress become events: all with a better plan, and others at growing intervals."""

    def __init__(self) -> None:
        self._told_s = -1.0
        self._best: dict[str, float | None] = {}

    def passes(self, progress: Mapping[str, Any]) -> bool:
        """Whether a report, as JSON types, becomes an event."""
        members: Mapping[str, Any] = progress.get("members") or {}
        best = {name: member["best_step_time_s"] for name, member in members.items()}
        best["*"] = progress["best_step_time_s"]
        seconds = progress["seconds"]
        is_better = best != self._best
        if not is_better and progress["fraction"] < 1.0 and seconds - self._told_s < _SHARE * seconds + 0.5:
            return False
        self._told_s, self._best = seconds, best
        return True
