"""The parameters that the backward passes of a step reach; the gradients of all others stay None, as in one process.

Sums over ranks need a gradient on every rank, so zeros take the place of a missing one. If no rank has reached the
parameter, these zeros must be removed: an optimizer would let the weight decay and its moments fade. One rank may reach
fewer parameters than another, for instance where an expert has no tokens, so ranks exchange what they have reached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


class Reached:
    """Which parameters of a network the passes of a step reach, on this rank and on all ranks that train together."""

    def __init__(self, whole: nn.Module, ties: Mapping[str, str], device: torch.device) -> None:
        """Numbers the parameters, alike on every rank.

        Args:
            whole: the network before anything of it is dropped.
            ties: the names of shared parameters -> the first name of each.
            device: the device of this process.
        """
        self._numbers = {name: number for number, (name, _) in enumerate(whole.named_parameters())}
        self._ties, self._device = ties, device
        self._module = whole
        self._is_scattered, self._scattered = False, set[int]()

    def watch(self, module: nn.Module, stages: Sequence[nn.Module]) -> None:
        """Begins to follow the modules of this rank.

        Args:
            module: the modules of this rank, after ZeRO has split them.
            stages: the stages that hold them.
        """
        self._module = module
        for unit in dict.fromkeys(part for stage in stages for part in stage.modules()):
            if isinstance(unit, FSDPModule):
                self._is_scattered = True
                # FSDP2 must send the gradients of all parameters of a unit, or ranks would send different amounts.
                unit.set_reduce_scatter_unused_params(True, recurse=False)
                for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
                    group.post_backward = functools.partial(self._note, group, group.post_backward)

    def _note(self, group: Any, scatter: Callable[..., None], *unused: Any) -> None:
        """Notes which parameters of a unit have a gradient, before FSDP2 fills in zeros for the others."""
        for each in group.fsdp_params if group.reduce_grads else ():
            gradient = each._unsharded_param.grad if hasattr(each, "_unsharded_param") else None
            if gradient is not None or each.unsharded_accumulated_grad is not None:
                self._scattered.add(id(each.sharded_param))
        scatter(*unused)

    def _named(self) -> Iterator[tuple[int, nn.Parameter]]:
        """The number of each parameter of this rank."""
        for name, parameter in self._module.named_parameters():
            yield self._numbers[self._ties.get(name, name)], parameter

    def own(self) -> Tensor:
        """[parameters of the network] 1 for each that the passes of a step have reached on this rank, else 0.

        To be called after the last backward pass, before gradients are summed.
        """
        found = [0.0] * len(self._numbers)
        for number, parameter in self._named():
            is_scattered = self._is_scattered and isinstance(parameter, DTensor)
            if id(parameter) in self._scattered if is_scattered else parameter.grad is not None:
                found[number] = 1.0
        self._scattered.clear()
        return torch.tensor(found, dtype=torch.float64, device=self._device)

    def forget(self, counts: Tensor) -> None:
        """Sets the gradients that no rank has computed to None.

        Args:
            counts: the sum of `own` over the ranks that train together.
        """
        known = counts.tolist()
        for number, parameter in self._named():
            if not known[number]:
                parameter.grad = None
