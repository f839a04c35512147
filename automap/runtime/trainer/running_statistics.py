"""Running statistics of normalisations, which count every sample once, whatever a plan runs more than once.

Each replica gathers those of its own samples. A checkpoint has one set of them, which is the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Buffers = dict[str, Tensor | None]


def counts_samples(module: nn.Module) -> bool:
    """Whether a module has running statistics, which its forward pass changes in training."""
    return any(isinstance(part, _NormBase) for part in module.modules())


class StatisticsKept:
    """A context in which a module is trained without a change of its running statistics; it may be entered often.

    Copies are changed in place of them, since backward passes of other micro-batches may be under way.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before: list[list[tuple[_NormBase, Buffers]]] = []

    def __enter__(self) -> None:
        norms = [part for part in self._module.modules() if isinstance(part, _NormBase) and part.training]
        self._before.append([(part, dict(part._buffers)) for part in norms])
        for part in norms:
            part._buffers.update({n: None if x is None else x.clone() for n, x in part._buffers.items()})

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        for part, buffers in self._before.pop():
            part._buffers.update(buffers)


@torch.no_grad()
def average_statistics(module: nn.Module, groups: Sequence[dist.ProcessGroup]) -> None:
    """Gives all replicas the mean of their running statistics. A collective.

    Args:
        module: the modules of this rank, which are those of every rank of the groups.
        groups: one for each axis of replicas.
    """
    norms = [part for part in module.modules() if isinstance(part, _NormBase)]
    for x in (x for part in norms for x in part.buffers(recurse=False) if x.is_floating_point()):
        for group in groups:
            dist.all_reduce(x, group=group)
            x.div_(group.size())
