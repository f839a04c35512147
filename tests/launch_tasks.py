"""What ranks do in the tests of launches; imports no torch."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

from automap.errors import PlanError

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def do(folder, rank, num_ranks, argument):
    """What `argument` says for this rank; writes its process, and those it starts, into `folder`."""
    pids = [os.getpid()]
    what = argument.get(str(rank), "fine")
    if what == "hang with a child":
        pids.append(subprocess.Popen(SLEEP).pid)
    (folder / f"pids-{rank}").write_text(" ".join(map(str, pids)))
    if "ready" in argument:
        with Path(argument["ready"]).open("w") as pipe:
            pipe.write(f"{os.getpid()}\n")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while what.startswith("hang"):
        signal.pause()
    if what == "leave":
        os._exit(0)
    if what == "grow":
        return len([bytearray(2**22) for _ in range(4096)])
    raised = {
        "port": OSError(errno.EADDRINUSE, "Address already in use"),
        "lost": RuntimeError("Connection closed by peer [127.0.0.1]:1"),
        "refuse": PlanError("too large", field="plan.stages", value=3, repair="Use 2."),
        "raise": ValueError("a mistake"),
    }
    if what in raised:
        raise raised[what]
    return {"rank": rank, "of": num_ranks}
