"""Compiles all kernels of this installation, or reads them from their cache.

`automap.jit` starts this program on the other processor cores where a kernel is not in the cache. Its arguments are the
process that it must not outlive, its place among the processes that share the work, and their number.
"""

from __future__ import annotations

import importlib
import signal
import sys
from pathlib import Path

import automap
from automap import jit
from ir import lifetime


def main(number: int = 0, of: int = 1) -> None:
    """Makes all kernels ready, so that no later call waits for a compilation.

    Args:
        number: place of this process among those that share the work, from 0.
        of: how many they are.
    """
    root = Path(automap.__file__).parent.parent
    folders = [root / "automap", root / "envs", root / "agents"]
    paths = [path.relative_to(root).with_suffix("") for folder in folders for path in folder.rglob("*.py")]
    for name in (".".join(path.parts) for path in paths):
        if ".kernels" in name:
            importlib.import_module(name)
    kernels = sorted(jit.KERNELS, key=lambda kernel: kernel.size)
    first = number * len(kernels) // of
    others_make = []
    for kernel in (*kernels[first:], *kernels[:first]):
        if kernel.is_being_made:
            others_make.append(kernel)
        else:
            kernel.load()
    for kernel in others_make:
        kernel.load()


if __name__ == "__main__":
    parent, number, of = map(int, sys.argv[1:])
    lifetime.die_with_parent(signal.SIGTERM, parent)
    jit.Kernel.shares_work = False
    main(number, of)
