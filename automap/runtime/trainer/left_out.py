"""Code that leaves out whole blocks at random in training, as LayerDrop and stochastic depth by branches do.

Each rank draws for itself. Under ZeRO a rank that leaves out a block gathers no weights of it, and the others wait for
ever; a stage of a pipeline may end in a block that is left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from automap.errors import PlanError
from automap.runtime.trainer.module_tree import called_parts
from automap.runtime.trainer.running_statistics import StatisticsKept
from automap.runtime.trainer.training_graph import scores_of

DRAWS = {torch.rand, torch.rand_like, torch.bernoulli, Tensor.uniform_, Tensor.bernoulli_}
"""Functions whose numbers decide what code leaves out; the modules of dropout draw otherwise."""


class _AllAre(TorchFunctionMode):
    """Makes all random numbers between 0 and 1 equal."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.fill_(self._number) if func in DRAWS else found


def check_all_run(module: nn.Module, units: Sequence[str], inputs: list[Tensor], names: tuple[str, ...]) -> None:
    """Refuses a network that runs a block or leaves it out, as random numbers say.

    Args:
        module: a network in training.
        units: the paths of its blocks.
        inputs: inputs of some samples.
        names: see `scores_of`.

    Raises:
        PlanError: names the block.
    """
    low, high = (_called(module, units, inputs, names, number) for number in (0.0, 1.0))
    for path in units:
        if (path in low) != (path in high):
            raise PlanError(
                "is left out at random, by each rank for itself, which neither ZeRO nor a pipeline can follow",
                field=f"module.{path}", value="a block that does not always run",
                repair="Set the rate to 0, as in config.layerdrop = 0.0, or search with hints.fix zero 0 and pp 1.",
            )  # fmt: skip


def _called(
    module: nn.Module, units: Sequence[str], inputs: list[Tensor], names: tuple[str, ...], number: float
) -> set[str]:
    """The blocks that run where all random numbers are the same; nothing of the network changes."""
    found: set[str] = set()
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {x.device for x in inputs if x.device.type != "cpu"}
    with contextlib.ExitStack() as stack:
        for path in units:
            for part in called_parts(module.get_submodule(path)):
                hook = part.register_forward_pre_hook(functools.partial(_note, found, path))
                stack.callback(hook.remove)
        stack.enter_context(torch.random.fork_rng(devices=list(devices)))
        stack.enter_context(StatisticsKept(module))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_AllAre(number))
        scores_of(module, inputs, names)
    for buffer, before in buffers:
        if not torch.equal(buffer, before):
            buffer.copy_(before)
    return found


def _note(found: set[str], path: str, module: nn.Module, args: Any) -> None:
    found.add(path)
