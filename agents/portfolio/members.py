"""Members: searchers of a portfolio in processes of their own.

A member is a fresh Python process that reads its task from a file and reports what it finds, one JSON document a line.
Nothing is forked, so that threads of the parent do no harm. A member ends when its parent ends, and its parent ends it
by killing it. The process runs `python -m agents.portfolio.members`.
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
from importlib import import_module
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
class MemberTask:
    """What a member does."""

    kind: Kind
    """Searcher that the member runs."""
    seed: int
    """Seed of its random choices."""
    evaluations: int | None
    """Number of plans that it prices; None = it goes on until it is killed."""
    start: tuple[tuple[int, ...], ...]
    """Values of the plans with which it begins, the best first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How far a member has come."""

    evaluations: int = 0
    """Number of plans priced so far."""
    best: tuple[int, ...] | None = None
    """Values of its best plan that fits."""
    best_s: float | None = None
    """Step time of that plan, in seconds."""
    nearest: tuple[int, ...] | None = None
    """Values of the plan that overflows memory least, while none fits."""
    overflow: float | None = None
    """Overflow of that plan, as a share of a device's memory."""
    is_last: bool = False
    """Whether the member has ended."""

    @staticmethod
    def of(incumbent: Incumbent, *, is_last: bool) -> Report:
        """The report of a member whose search has this incumbent."""
        has_best, has_near = incumbent.best is not None, incumbent.nearest is not None
        return Report(
            evaluations=incumbent.evaluations,
            best=incumbent.best,
            best_s=incumbent.best_s if has_best else None,
            nearest=incumbent.nearest,
            overflow=incumbent.least_overflow if has_near else None,
            is_last=is_last,
        )


def work(space: PlanSpace, task: MemberTask, on_report: Callable[[Report], None]) -> None:
    """Does a member's task in this process.

    Args:
        space: plan space of the problem.
        task: what to do.
        on_report: called a few times a second, and at the end.
    """
    from agents.incumbent import Incumbent
    from agents.searcher import Budget

    incumbent = Incumbent(
        space,
        Budget(evaluations=task.evaluations),
        searcher=task.kind,
        on_progress=lambda progress: on_report(Report.of(incumbent, is_last=False)),
    )
    # JSON has made lists of the plans.
    start = [tuple(plan) for plan in task.start]
    # Each kind imports only what it needs: the DQN brings torch, the ILP brings scipy.
    if task.kind == "dqn":
        from agents.learning.dqn import run_dqn
        from agents.sampling.expert import grid_of

        run_dqn(incumbent, seed=task.seed, templates=grid_of(space), start=start, proposals=0)
    elif task.kind == "mcmc":
        from agents.sampling.mcmc import run_mcmc

        run_mcmc(incumbent, seed=task.seed, start=start)
    else:
        from agents.planners.skeleton_turns import run_skeletons
        from agents.planners.skeletons import SkeletonSearch

        planner = import_module(f"agents.planners.{task.kind}")
        run_skeletons(SkeletonSearch(incumbent, planner.propose), start)
    on_report(Report.of(incumbent, is_last=True))


class Member:
    """A running member.

    Attributes:
        task: what it does.
        report: its last report.
    """

    def __init__(self, problem: Problem, task: MemberTask) -> None:
        self.task = task
        self.report = Report()
        self._unread = b""
        head = {
            "parent": os.getpid(),
            "cluster": problem.cluster.to_json(),
            "training": to_json(problem.training),
            "hints": to_json(problem.hints),
            "task": to_json(task),
        }
        # A file, not a pipe: the member takes a second to start, and nothing here waits for it.
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
        """Whether no report will follow."""
        return self.out.closed

    def listen(self) -> Report:
        """Reads what the member has reported since the last call, without waiting, and returns its last report."""
        while not self.finished:
            try:
                read = os.read(self.out.fileno(), 1 << 16)
            except BlockingIOError:
                break
            *lines, self._unread = (self._unread + read).split(b"\n")
            if lines:
                self.report = from_json(Report, json.loads(lines[-1]), path="report")
            if not read:
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
    """Waits until one of the members reports or ends, at most `timeout_s` seconds."""
    with selectors.DefaultSelector() as selector:
        for member in members:
            selector.register(member.out, selectors.EVENT_READ)
        selector.select(timeout_s)


def _environment() -> dict[str, str]:
    """The environment of the parent, with one thread and with the packages that the parent runs."""
    paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")
    return {**os.environ, **threads, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def main() -> None:
    """Runs a member: reads its task from standard input and writes reports to standard output."""
    head: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    die_with_parent(signal.SIGKILL, head["parent"])
    write = _own_output()
    from automap.cluster import parse_cluster
    from automap.hints import Hints
    from automap.problem import Problem, Training
    from automap.space.target_limits import plan_space
    from ir.serialize import graph_from_bytes

    # The graph has its loss and the user's costs already: nothing is built again.
    problem = Problem(
        graph=graph_from_bytes(sys.stdin.buffer.read()),
        cluster=parse_cluster(head["cluster"]),
        training=from_json(Training, head["training"], path="training"),
        hints=from_json(Hints, head["hints"], path="hints"),
    )
    work(plan_space(problem), from_json(MemberTask, head["task"], path="task"), write)


def _own_output() -> Callable[[Report], None]:
    """Returns a writer of reports to standard output; what libraries print goes to standard error from now on."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(report: Report) -> None:
        output.write(json.dumps(to_json(report)) + "\n")
        output.flush()

    return write


if __name__ == "__main__":
    main()
