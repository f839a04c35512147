"""Says which process of a training has ended, and how, where others lose their connection to it.

A process that ends by an error leaves the last line of this error in the store of the process group. If it ends in
another way, such as by a signal, processes on the same host read its exit code from `/proc`, where the kernel keeps it
until the parent of the process has read it (proc(5)).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from automap.errors import PlanError

LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused",
    "remote process exited", "NCCL communicator was aborted", "unhandled system error",
)  # fmt: skip
"""What errors of gloo and NCCL say where another process has ended."""
KEY = "automap: process {}"
LOOK_S = 0.02
"""Seconds between looks for a process that has ended (assumed)."""
MOST_LOOKS = 25
"""Number of looks at most (assumed): torchrun soon ends the others."""
STATE, EXIT_CODE = 0, 49
"""Places of these after the name of a process in its stat file (proc(5): fields 3 and 52)."""


Trainer = TypeVar("Trainer")
Given = ParamSpec("Given")
Returned = TypeVar("Returned")
METHODS = ("step", "evaluate", "clip_gradients", "finish", "save", "load")
"""The methods of trainers that talk to other processes."""


class ProcessLost(RuntimeError):
    """Another process of the training has ended."""


def announce() -> None:
    """Tells the other processes of the default group where this one runs, and when it ends by an error."""
    _tell({"host": socket.gethostname(), "pid": os.getpid()})
    if getattr(sys.excepthook, "func", None) is not _end_by:
        sys.excepthook = functools.partial(_end_by, sys.excepthook)


def _tell(said: Mapping[str, Any]) -> None:
    # The store of torch's default group has no public name.
    dist.distributed_c10d._get_default_store().set(KEY.format(dist.get_rank()), json.dumps(said))


def _end_by(
    before: Callable[..., None], kind: type[BaseException], fault: BaseException, at: TracebackType | None
) -> None:
    """What Python calls for an error that nothing catches."""
    if not isinstance(fault, ProcessLost):
        with contextlib.suppress(RuntimeError, ValueError):  # The group, or its store, may be gone.
            _tell({"error": traceback.format_exception_only(kind, fault)[-1].strip()})
    before(kind, fault, at)


def names_the_ended(trainer: type[Trainer]) -> type[Trainer]:
    """A trainer whose `METHODS` raise `ProcessLost`, which names the ended process, in place of connection errors."""
    for name in METHODS:
        setattr(trainer, name, naming_the_ended(getattr(trainer, name)))
    return trainer


def naming_the_ended(method: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """A function that raises `ProcessLost` if it fails because another process has ended; other errors stay."""

    @functools.wraps(method)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        try:
            return method(*args, **kwargs)
        except (RuntimeError, PlanError) as fault:  # Networks that do not run are an error of the plan.
            found = ended() if dist.is_initialized() and _is_lost(fault) else ""
            if not found:
                raise
            raise ProcessLost(f"{found}; process {dist.get_rank()} lost its connection to it") from fault

    return run


def _is_lost(fault: BaseException | None) -> bool:
    """Whether an error, or an error that caused it, says that another process has ended: pipelines wrap errors."""
    if fault is None:
        return False
    return any(words in str(fault) for words in LOST) or _is_lost(fault.__cause__ or fault.__context__)


def ended() -> str:
    """Which other process has ended and how, in a few words; empty where none is known to have."""
    for _ in range(MOST_LOOKS):
        for rank in range(dist.get_world_size()):
            how = _end_of(rank) if rank != dist.get_rank() else ""
            if how:
                return f"process {rank} has ended {how}"
        time.sleep(LOOK_S)
    return ""


def _end_of(rank: int) -> str:
    """How a process ended; empty where it runs, or nothing is known of it."""
    try:
        store = dist.distributed_c10d._get_default_store()
        said: dict[str, Any] = json.loads(store.get(KEY.format(rank))) if store.check([KEY.format(rank)]) else {}
    except RuntimeError:  # The store may have ended with its process.
        return ""
    if "error" in said:
        return f"by {said['error']}"
    return _exit_of(said["pid"]) if said.get("host") == socket.gethostname() else ""


def _exit_of(pid: int) -> str:
    """How a process of this host ended; empty where it runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(") ")[2].split()
    except OSError:
        return "without a trace" if Path("/proc/self/stat").exists() else ""
    if fields[STATE] not in "ZX":
        return ""
    code = os.waitstatus_to_exitcode(int(fields[EXIT_CODE]))
    return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
