"""Code that users compile by `module.compile()`, and functions that torch's compiler must not compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def uncompiled(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """A function that stays outside of compiled code around it, such as one that communicates."""
    found: Callable[Given, Returned] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


def compiling_nothing(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """A function that runs modules as if nothing of them were compiled.

    Code is compiled for the samples of a step then, and not for those that a network is checked with.
    """

    @functools.wraps(function)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return run
