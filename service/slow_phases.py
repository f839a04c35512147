"""Lines on stderr that name what takes long, on terminals and in logs alike."""

from __future__ import annotations

import sys
import threading
import time

import typer

from automap.errors import printable

SLOW_S = 3.0
"""Seconds after which a phase of the work is named (assumed): sooner, people still wait without wondering."""
AGAIN_S = 15.0
"""Seconds from one such line to the next (assumed)."""


class SlowPhases:
    """Names on stderr what the program does, once that has taken `SLOW_S`; for `automap.phases.listening`."""

    def __init__(self) -> None:
        # Kept, because exporters that are noisy run with another one.
        self._stderr = sys.stderr
        self._open: list[tuple[str, float]] = []
        self._spent: dict[str, float] = {}
        self._said_at: dict[str, float] = {}
        self._timer = threading.Timer(0.0, self._say)

    def __call__(self, text: str | None) -> None:
        """Begins the phase `text`, or ends the phase that began last."""
        self._timer.cancel()
        if text is None:
            ended, began = self._open.pop()
            self._spent[ended] = self._spent.get(ended, 0.0) + time.monotonic() - began
        else:
            self._open.append((text, time.monotonic()))
        self._wait()

    def _wait(self) -> None:
        if self._open:
            text, began = self._open[-1]
            due = self._said_at[text] + AGAIN_S if text in self._said_at else SLOW_S
            late = due - self._spent.get(text, 0.0) - (time.monotonic() - began)
            self._timer = threading.Timer(max(late, 0.0), self._say)
            self._timer.daemon = True
            self._timer.start()

    def _say(self) -> None:
        text, began = self._open[-1]
        self._said_at[text] = self._spent.get(text, 0.0) + time.monotonic() - began
        over_bar = "\r\x1b[2K" if self._stderr.isatty() else ""
        typer.echo(f"{over_bar}automap: {printable(text, 200)} ({self._said_at[text]:.0f} s) ...", file=self._stderr)
        self._wait()
