"""The main program of a rank of `automap.runtime.launch.launcher`, which reports its result in a file.

A rank dies with its parent.
"""

from __future__ import annotations

import errno
import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from ir.lifetime import die_with_parent

SAY_WHERE = signal.SIGUSR1
"""The signal on which a rank writes its stack into its log."""
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "Cannot allocate memory")
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Connection refused")


def fault(error: BaseException) -> dict[str, Any]:
    """The report of an exception: {error: an outcome of `automap.runtime.launch.launcher`, message}."""
    from ir.errors import UserError

    text = f"{type(error).__name__}: {error}"
    if isinstance(error, UserError):
        return {"error": "refused", "message": text}
    if isinstance(error, MemoryError) or any(words in text for words in _OUT_OF_MEMORY):
        return {"error": "out_of_memory", "message": text}
    if getattr(error, "errno", None) == errno.EADDRINUSE or "Address already in use" in text:
        return {"error": "port_in_use", "message": text}
    if any(words in text for words in _PEER_LOST):
        return {"error": "peer_lost", "message": text}
    if "Timed out waiting" in text or isinstance(error, TimeoutError):
        return {"error": "time_limit", "message": text}
    return {"error": "crashed", "message": "".join(traceback.format_exception(error)[-6:])}


def main(arguments: list[str]) -> int:
    """Runs a task, with the arguments that `launch` passes; returns the exit code."""
    place, rank, num_ranks, task, parent, memory_bytes = arguments
    die_with_parent(signal.SIGKILL, int(parent))
    faulthandler.register(SAY_WHERE, all_threads=False)
    if int(memory_bytes):
        resource.setrlimit(resource.RLIMIT_DATA, (int(memory_bytes), int(memory_bytes)))
    folder = Path(place)
    module, _, function = task.partition(":")
    try:
        argument = json.loads((folder / "argument.json").read_text("utf-8"))
        run = getattr(importlib.import_module(module), function)
        said = {"result": run(folder, int(rank), int(num_ranks), argument)}
    except Exception as error:
        said = fault(error)
    written = folder / f"rank-{rank}.part"
    written.write_text(json.dumps(said), "utf-8")
    written.rename(folder / f"rank-{rank}.json")
    return int("error" in said)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of communication libraries must not keep a rank alive that has reported.
    os._exit(code)
