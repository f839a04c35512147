"""Ranks of a test: processes that are forked from one that has imported everything they use.

That process is started once for each process of tests, whatever its files are, so all files share the list of imports.
"""

import faulthandler
import multiprocessing
import os
import sys

import torch.multiprocessing as mp

PRELOADED = ["runtime_preload", "trainer_ranks", "loader_ranks", "frozen_preload"]
LIMIT_S = 600.0
"""Seconds after which a rank is ended, since it may wait for ever (assumed: the longest take a minute)."""


def start(function, size, *arguments):
    """Calls `function(rank, size, *arguments)` in `size` processes and waits for their end; raises what they raise.

    A rank that has not ended after `LIMIT_S` writes where its threads are, and ends with exit code 1, which is raised.
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    multiprocessing.set_forkserver_preload(PRELOADED)
    try:
        mp.start_processes(_run, (function, size, *arguments), size, start_method="forkserver")
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _run(rank, function, *arguments):
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    function(rank, *arguments)
