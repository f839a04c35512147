"""Compiles the kernels that Python calls, two at a time, or reads them from their cache; run once by `make setup`."""

import importlib
import multiprocessing
from collections.abc import Iterable
from pathlib import Path

import automap
from automap.jit import KERNELS, Kernel
from automap.phases import listening
from service.slow_phases import SlowPhases


def main() -> None:
    """Makes all kernels ready, so that no later call waits for a compilation."""
    root = Path(automap.__file__).parent.parent
    folders = [root / "automap", root / "envs", root / "agents"]
    paths = [path.relative_to(root).with_suffix("") for folder in folders for path in folder.rglob("*.py")]
    names = [".".join(path.parts) for path in paths]
    for name in names:
        if ".kernels" in name:
            importlib.import_module(name)
    kernels = sorted(KERNELS, key=lambda kernel: kernel.size)
    if all(kernel.is_cached for kernel in kernels):
        load(kernels)
        return
    # Many kernels call the same ones, and wait while another process makes them. So one process begins with the small
    # ones and one with the large ones; a third would mostly wait.
    other = multiprocessing.get_context("fork").Process(target=load, args=(reversed(kernels),))
    other.start()
    with listening(SlowPhases()):
        load(kernels)
    other.join()


def load(kernels: Iterable[Kernel]) -> None:
    """Reads or makes the machine code of kernels, one after another."""
    for kernel in kernels:
        kernel.load()


if __name__ == "__main__":
    main()
