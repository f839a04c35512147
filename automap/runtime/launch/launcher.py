"""Launches one process for each rank on this machine, ends all of them whatever happens, and gives a typed outcome.

Every rank is a session of its own and dies with its parent. Ranks meet through a file, so that no port is needed.
Results and faults come back as JSON, one file a rank. The launcher knows nothing of plans and never imports torch.
Units: seconds, bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from automap.runtime.launch import rank as rank_process

OutcomeKind = Literal[
    "stopped", "refused", "out_of_memory", "port_in_use", "crashed", "time_limit", "no_result", "peer_lost", "ok"
]
"""The outcome of a launch. Where ranks end differently, the outcome that is first in this list is the cause.

`stopped`: the caller ended the launch. `refused`: an error about the plan or the model that names the repair.
`crashed`: an exception or a signal. `no_result`: a rank ended with code 0 and without a result. `peer_lost`: a
connection broke and no rank reported why.
"""
_SEVERITY = {kind: place for place, kind in enumerate(get_args(OutcomeKind))}
_End = Literal["all", "failed", "time_limit", "stopped"]
"""The reason why the launcher stops waiting."""
_POLL_S = 0.05
"""The seconds between two looks at the ranks (assumed)."""
_SHOWN_CHARACTERS = 2000
"""The number of characters of a rank's output that a message shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of a launch."""

    time_s: float = 300.0
    """The wall-clock time from the start of the processes, seconds."""
    memory_bytes: int | None = None
    """The private memory of each process, bytes; None = no limit."""
    grace_s: float = 1.0
    """The time that other ranks have to report after one has failed, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launched:
    """The end of a launch."""

    outcome: OutcomeKind
    message: str
    """What went wrong, for a reader; empty if the outcome is `ok`."""
    results: tuple[Any, ...]
    """[ranks] what each rank returned; empty unless the outcome is `ok`."""
    time_s: float


def launch(
    task: str,
    argument: Mapping[str, Any],
    num_ranks: int,
    limits: Limits,
    folder: Path | None = None,
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> Launched:
    """Runs a function on every rank and waits for the end of all.

    Args:
        task: `module:function`, which is called as function(folder, rank, num_ranks, argument) and returns a JSON
            document. Ranks may meet in the file `folder / "store"`.
        argument: the last argument of the function, a JSON document.
        num_ranks: the number of processes.
        limits: the limits of time and memory.
        folder: an empty folder for exchange with the ranks; None = a temporary one.
        should_stop: called every `_POLL_S` seconds; once it returns true, the ranks are ended.

    Returns:
        The outcome. No process of a rank is left running.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="automap-ranks-")))
        (folder / "argument.json").write_text(json.dumps(argument), "utf-8")
        start = time.monotonic()
        processes = stack.enter_context(_processes(task, num_ranks, limits, folder))
        end = _wait(processes, folder, start + limits.time_s, limits.grace_s, should_stop)
        codes = [_exit_code(process.pid) for process in processes]
        seconds = time.monotonic() - start
        kind, message = _judge(codes, folder, limits, end)
        results = tuple(_read(folder, rank)["result"] for rank in range(num_ranks)) if kind == "ok" else ()
        return Launched(outcome=kind, message=message, results=results, time_s=seconds)


@contextlib.contextmanager
def _processes(task: str, num_ranks: int, limits: Limits, folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The processes of the ranks; at the end of the context they and their children are killed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(num_ranks):
            command = [sys.executable, "-m", rank_process.__name__, str(folder), str(rank), str(num_ranks), task,
                       str(os.getpid()), str(limits.memory_bytes or 0)]  # fmt: skip
            with (folder / f"rank-{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, start_new_session=True, env=environment, stdin=subprocess.DEVNULL,
                                     stdout=log, stderr=log)
                )  # fmt: skip
        yield processes
    finally:
        # All are killed before any is waited for: until then no other process can get its number.
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            process.wait()


def _wait(
    processes: Sequence[subprocess.Popen[bytes]],
    folder: Path,
    deadline: float,
    grace_s: float,
    should_stop: Callable[[], bool],
) -> _End:
    """Waits until all ranks have ended, one has failed and the grace is over, time is up, or the caller stops."""
    failed_at: float | None = None
    while True:
        codes = [_exit_code(process.pid) for process in processes]
        now = time.monotonic()
        if None not in codes:
            return "all"
        if should_stop():
            return "stopped"
        if failed_at is None and any(
            code is not None and (code or not _path(folder, rank).exists()) for rank, code in enumerate(codes)
        ):
            failed_at = now
        if failed_at is not None and now > failed_at + grace_s:
            return "failed"
        if failed_at is None and now > deadline:
            for process, code in zip(processes, codes, strict=True):
                if code is None:
                    os.kill(process.pid, rank_process.SAY_WHERE)
            time.sleep(min(grace_s, 10 * _POLL_S))
            return "time_limit"
        time.sleep(_POLL_S)


def _exit_code(pid: int) -> int | None:
    """The exit code of a child, negative for a signal; None while it runs. The child is not reaped."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _judge(codes: Sequence[int | None], folder: Path, limits: Limits, end: _End) -> tuple[OutcomeKind, str]:
    """The outcome of a launch and a text about it: the most severe one of all ranks, unless the launcher ended them.

    Args:
        codes: [ranks] exit codes, see `_exit_code`.
        folder: where ranks have written their reports and logs.
        limits: those of the launch.
        end: how it ended.
    """
    if end == "stopped":
        return "stopped", "ended because the caller wanted it"
    if end == "time_limit":
        where = "; ".join(f"rank {r}: {_log(folder, r)}" for r, code in enumerate(codes) if code is None)
        return "time_limit", f"not done after {limits.time_s:g} s; {where}"
    found: list[tuple[OutcomeKind, str]] = [
        (kind, f"rank {rank}: {message}") for rank, code in enumerate(codes)
        for kind, message in [_of_rank(rank, code, folder)]
    ]  # fmt: skip
    kind, message = min(found, key=lambda item: _SEVERITY[item[0]])
    return kind, "" if kind == "ok" else message


def _of_rank(rank: int, code: int | None, folder: Path) -> tuple[OutcomeKind, str]:
    """The outcome of one rank and a text about it, from its report, else from its exit code."""
    said = _read(folder, rank)
    if "error" in said:
        return said["error"], said["message"]
    if code is None:
        return "peer_lost", "did not end by itself after another rank had failed"
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", by hand or because the host ran out of memory" if name == "SIGKILL" else ""
        return "crashed", f"ended by {name}{hint}. {_log(folder, rank)}"
    if code:
        return "crashed", f"exit code {code}. {_log(folder, rank)}"
    return ("ok", "") if "result" in said else ("no_result", f"ended without a result. {_log(folder, rank)}")


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _read(folder: Path, rank: int) -> dict[str, Any]:
    path = _path(folder, rank)
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def _log(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.log").read_text("utf-8", errors="replace")[-_SHOWN_CHARACTERS:].strip()
