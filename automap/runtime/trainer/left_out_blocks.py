"""Code that leaves out whole blocks in training: at random, as LayerDrop and stochastic depth do, or by its samples.

Each rank decides this for itself. Under ZeRO, a rank that skips a block still takes part in its collectives
(`stand_ins`). In a pipeline, a stage may end in such a block; that is refused here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from automap.errors import PlanError
from automap.runtime.trainer.common_generators import EXTREMES, all_are, begun_with
from automap.runtime.trainer.module_tree import called_parts
from automap.runtime.trainer.running_statistics import StatisticsKept
from automap.runtime.trainer.training_graph import scores_of


class Call(NamedTuple):
    """A call of a block of a network."""

    path: str
    has_gradient: bool
    """Whether the input of the block gets a gradient."""


def order_of_blocks(
    module: nn.Module, units: Sequence[str], inputs: list[Tensor], names: tuple[str, ...], *, are_all_needed: bool
) -> list[Call]:
    """The calls of the blocks of a network, in the order in which its code makes them.

    A block that the network skips in this call has the position after the block before it in the network.

    Args:
        module: a network in training.
        units: the paths of its blocks.
        inputs: inputs of some samples.
        names: see `scores_of`.
        are_all_needed: whether to refuse a network in which random numbers decide whether a block runs.

    Raises:
        PlanError: names the block.
    """
    low, high = (_called(module, units, inputs, names, number) for number in EXTREMES)
    for path in units if are_all_needed else ():
        if any(path == call.path for call in low) != any(path == call.path for call in high):
            raise PlanError(
                "is left out at random, by each rank for itself, which no pipeline can follow",
                field=f"module.{path}", value="a block that does not always run",
                repair="Set the rate to 0, as in config.layerdrop = 0.0, or search with hints.fix pp 1.",
            )  # fmt: skip
    found = max(low, high, key=len)
    for number, path in enumerate(units):
        if all(path != call.path for call in found):
            before = [place for place, call in enumerate(found) if call.path in units[:number]]
            place = before[-1] + 1 if before else 0
            found.insert(place, Call(path, bool(before) or not found or found[0].has_gradient))
    return found


def _called(
    module: nn.Module, units: Sequence[str], inputs: list[Tensor], names: tuple[str, ...], number: float
) -> list[Call]:
    """The calls of blocks in a pass in which all random numbers are equal; nothing of the network changes."""
    found: list[Call] = []
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with contextlib.ExitStack() as stack:
        for path in units:
            for part in called_parts(module.get_submodule(path)):
                hook = part.register_forward_pre_hook(functools.partial(_note, found, path), with_kwargs=True)
                stack.callback(hook.remove)
        stack.enter_context(begun_with(0, inputs[0].device))
        stack.enter_context(StatisticsKept(module))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(all_are(number))
        scores_of(module, inputs, names)
    for buffer, before in buffers:
        if not torch.equal(buffer, before):
            buffer.detach().copy_(before)
    return found


def _note(found: list[Call], path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    has_gradient = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves((args, kwargs)))
    found.append(Call(path, has_gradient))
