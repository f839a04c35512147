"""Members: searchers of a portfolio in processes of their own.

A member is a fresh interpreter that reads its task from a file and tells its parent what it finds, one JSON
document a line. Nothing is forked, so that whatever threads the parent has do no harm. It dies with its parent, and its
parent ends it by killing it. Run by `python -m agents.portfolio.members`.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from automap.records import from_json, to_json
from ir.lifetime import die_with_parent
from ir.serialize import graph_to_bytes

if TYPE_CHECKING:
    from agents.incumbent import Incumbent
    from automap.problem import Problem
    from automap.space.space import PlanSpace

LOG = logging.getLogger("automap.search")
Kind = Literal["mcmc", "dqn", "elimination", "ilp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a member does."""

    kind: Kind
    seed: int
    evaluations: int | None
    """Plans that it prices; None = until it is ended."""
    known: tuple[tuple[int, ...], ...]
    """Plans to begin from, the best first."""
    reference_s: float | None
    """Step time of a good plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How far a member is."""

    evaluations: int = 0
    best: tuple[int, ...] | None = None
    """Values of its best plan that fits."""
    best_s: float | None = None
    nearest: tuple[int, ...] | None = None
    """Values of the plan that overflows least while none fits."""
    overflow: float | None = None
    is_last: bool = False

    @staticmethod
    def of(incumbent: Incumbent, *, is_last: bool) -> Report:
        """What an incumbent holds."""
        has_best, has_near = incumbent.best is not None, incumbent.nearest is not None
        return Report(
            evaluations=incumbent.evaluations,
            best=incumbent.best,
            best_s=incumbent.best_s if has_best else None,
            nearest=incumbent.nearest,
            overflow=incumbent.least_overflow if has_near else None,
            is_last=is_last,
        )


def work(space: PlanSpace, task: Task, on_report: Callable[[Report], None]) -> None:
    """Does a task in this process.

    Args:
        space: of the problem.
        task: what to do.
        on_report: called a few times a second, and at the end.
    """
    import numpy as np

    from agents.incumbent import Incumbent
    from agents.searcher import Budget

    incumbent = Incumbent(
        space,
        Budget(evaluations=task.evaluations),
        searcher=task.kind,
        on_progress=lambda progress: on_report(Report.of(incumbent, is_last=False)),
        should_stop=lambda: False,
    )
    plans = [tuple(plan) for plan in task.known]
    if task.kind == "dqn":
        from agents.learning.dqn import run_dqn

        run_dqn(space, incumbent, seed=task.seed, reference_s=task.reference_s, demonstrations=plans)
    elif task.kind == "elimination":
        from agents.planners.elimination import run_elimination

        run_elimination(space, incumbent, start=plans)
    elif task.kind == "ilp":
        from agents.planners.ilp import run_ilp

        run_ilp(space, incumbent, start=plans)
    else:
        from agents.sampling.mcmc import run_mcmc

        known = np.array(plans, dtype=np.int64).reshape(len(plans), len(space.slots))
        run_mcmc(space, incumbent, seed=task.seed, known=known, prices=space.price(known))
    on_report(Report.of(incumbent, is_last=True))


class Member:
    """A running process; `report` is the last that was heard of it."""

    def __init__(self, problem: Problem, task: Task) -> None:
        self.task = task
        self.report = Report()
        self._heard = b""
        head = {
            "parent": os.getpid(),
            "cluster": problem.cluster.to_json(),
            "training": to_json(problem.training),
            "hints": to_json(problem.hints),
            "task": to_json(task),
        }
        # A file, not a pipe: the member takes a second to start, and nobody waits for it.
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(head).encode() + b"\n" + graph_to_bytes(problem.graph))
            file.seek(0)
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", "agents.portfolio.members"),
                stdin=file,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
        assert self._process.stdout is not None
        self.out: IO[bytes] = self._process.stdout
        os.set_blocking(self.out.fileno(), False)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.out.closed

    def listen(self) -> Report:
        """Hears what the member has said since; does not wait."""
        while not self.finished:
            try:
                said = os.read(self.out.fileno(), 1 << 16)
            except BlockingIOError:
                break
            *lines, self._heard = (self._heard + said).split(b"\n")
            if lines:
                self.report = from_json(Report, json.loads(lines[-1]), path="report")
            if not said:
                self.end()
                if not self.report.is_last:
                    LOG.warning("a member, %s, ended early with status %s", self.task.kind, self._process.returncode)
        return self.report

    def end(self) -> None:
        """Kills the member; returns once it is gone."""
        self.out.close()
        self._process.kill()
        self._process.wait()


def wait(members: Iterable[Member], timeout_s: float) -> None:
    """Waits until one of the members speaks or ends, at most `timeout_s` seconds."""
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member.out, selectors.EVENT_READ)
        selector.select(timeout_s)


def _environment() -> dict[str, str]:
    """The parent's, with one thread, and with the packages that it runs."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main() -> None:
    """The member's side."""
    head: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    die_with_parent(signal.SIGKILL, head["parent"])
    say = _own_output()
    from automap.cluster import parse_cluster
    from automap.hints import Hints
    from automap.problem import Problem, Training
    from automap.space.space import PlanSpace
    from ir.serialize import graph_from_bytes

    # The graph has its loss and the user's costs already: nothing is built anew.
    problem = Problem(
        graph=graph_from_bytes(sys.stdin.buffer.read()),
        cluster=parse_cluster(head["cluster"]),
        training=from_json(Training, head["training"], path="training"),
        hints=from_json(Hints, head["hints"], path="hints"),
    )
    work(PlanSpace(problem), from_json(Task, head["task"], path="task"), say)


def _own_output() -> Callable[[Report], None]:
    """Writes reports to what was standard output; whatever libraries print goes elsewhere."""
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(report: Report) -> None:
        said.write(json.dumps(to_json(report)) + "\n")
        said.flush()

    return say


if __name__ == "__main__":
    main()
