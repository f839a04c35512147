"""Live output on stderr, Ctrl-C and SIGTERM. Silent where stderr is not a terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from automap.amounts import in_seconds
from automap.errors import printable


class Show(Protocol):
    """Updates the line: who searches, share of the budget spent, plans priced, best step time so far."""

    def __call__(self, label: str, fraction: float, evaluations: int, best_s: float | None) -> None:
        """Shows the progress."""


@contextlib.contextmanager
def progress_line(title: str = "") -> Iterator[Show]:
    """A progress bar that goes away at the end."""
    if not sys.stderr.isatty():
        yield lambda label, fraction, evaluations, best_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    about = TextColumn("{task.description}", markup=False)
    columns = (about, BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    more = (TextColumn("{task.fields[found]}"), TimeElapsedColumn())
    with Progress(*columns, *more, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title or "reading", total=1.0, found="")

        def show(label: str, fraction: float, evaluations: int, best_s: float | None) -> None:
            best = "nothing fits yet" if best_s is None else f"best {in_seconds(best_s)}"
            found = f"{evaluations:,} plans · {best}" if evaluations else ""
            bar.update(task, completed=fraction, description=printable(f"{title} {label}".strip(), 80), found=found)

        yield show


def show_job(show: Show, job: Mapping[str, Any]) -> None:
    """Shows the progress of a job of the service."""
    progress = job["progress"] or {}
    fraction = 1.0 if job["state"] not in ("queued", "running") else progress.get("fraction", 0.0)
    label = progress.get("searcher", job["state"])
    show(label, fraction, progress.get("evaluations", 0), progress.get("best_step_time_s"))


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether Ctrl-C was pressed, or SIGTERM came, as `timeout` and batch systems send it.

    The second one ends the program.
    """
    pressed = False

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = {number: signal.signal(number, press) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def counting_bar(title: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar; call the function that it yields with a text, once for each of `total` things that is done, and
    with another total where more is known."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    about = TextColumn("{task.description}", markup=False)
    columns = (about, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    more = (TimeRemainingColumn(), TextColumn("{task.fields[last]}", markup=False))
    with Progress(
        *columns, *more, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(title, total=total, last="")
        yield lambda last, of=total: bar.update(task, advance=1, total=of, last=printable(last, 80))
