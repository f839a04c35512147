"""Ranks of a test that each return what a function of theirs finds."""

import os
import traceback
from pathlib import Path

import forked_ranks
import rank_device
import torch


def _rank(rank, size, folder, function, arguments):
    torch.set_num_threads(1)
    rank_device.meet(rank, size, folder)
    try:
        found = function(*arguments)
    except Exception:
        found = traceback.format_exc()  # the parent judges it
    torch.save(rank_device.on_cpu(found), Path(folder) / f"{rank}.pt")
    os._exit(0)


def returned(function, size, folder, *arguments):
    """[rank] what a function of a module returns on every rank; a traceback is an error of the test."""
    forked_ranks.start(_rank, size, str(folder), function, arguments)
    found = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]
    for rank, one in enumerate(found):
        assert not isinstance(one, str), f"rank {rank}: {one}"
    return found
