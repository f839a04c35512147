"""The random numbers that code draws without a generator of its own: those of torch, numpy and Python."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

NUMPY_SEEDS = 2**32
"""The number of seeds of numpy's common generator, as `numpy.random.seed` says."""
DRAWS = {torch.rand, torch.rand_like, torch.bernoulli, Tensor.uniform_, Tensor.bernoulli_}
"""Functions of torch whose numbers decide what code leaves out; the modules of dropout draw otherwise."""
OTHER_DRAWS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (random, ("random", "uniform")),
    (np.random, ("rand", "random", "random_sample", "uniform")),
)
"""Modules, and those functions of theirs."""
EXTREMES = 0.0, 1.0 - 2.0**-8
"""The least random number between 0 and 1, and the largest one that all formats of numbers hold."""


@contextlib.contextmanager
def begun_with(seed: int, device: torch.device) -> Iterator[None]:
    """A context in which the common generators begin with a seed; afterwards they are as they were.

    Args:
        seed: below 2^64.
        device: the device of the network, whose generator is one of them.
    """
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=generators_of(device)):
            torch.manual_seed(seed)
            np.random.seed(seed % NUMPY_SEEDS)
            random.seed(seed)
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def generators_of(device: torch.device) -> list[torch.device]:
    """The devices beside the CPU whose generators a network draws from."""
    return [device] if device.type == "cuda" else []


@contextlib.contextmanager
def all_are(number: float) -> Iterator[None]:
    """A context in which all random numbers between 0 and 1 are the same, those of dropout excepted."""
    with contextlib.ExitStack() as stack:
        for module, names in OTHER_DRAWS:
            for name in names:
                drawn = functools.partial(_filled, getattr(module, name), number)
                stack.enter_context(mock.patch.object(module, name, drawn))
        stack.enter_context(_AllAre(number))
        yield


def _filled(draw: Callable[..., Any], number: float, *args: Any, **kwargs: Any) -> Any:
    found = draw(*args, **kwargs)
    return np.full_like(found, number) if isinstance(found, np.ndarray) else number


class _AllAre(TorchFunctionMode):
    """Makes all random numbers of torch between 0 and 1 equal."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.fill_(self._number) if func in DRAWS else found
