"""Running statistics of normalisations, and other buffers that code changes in training, such as moving averages.

Every sample counts once in them, also if the plan runs a module more than once for it. Each replica has the statistics
of its own samples; a checkpoint has their mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Buffers = dict[str, Tensor | None]

_CHANGED: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""Module of the user whose code changes its buffers -> the names of these buffers."""


def find_changed(module: nn.Module, run: Callable[[], object]) -> None:
    """Finds the buffers that code changes, except those of normalisations; afterwards all have their old values.

    Args:
        module: a network in training.
        run: runs it forward.
    """
    parts = [part for part in module.modules() if not isinstance(part, _NormBase)]
    held = [
        (part, name, x, x._version, x.detach().clone())
        for part in parts
        for name, x in part._buffers.items()
        if x is not None
    ]
    if not held:
        return
    devices = {x.device for _, _, x, *_ in held if x.device.type != "cpu"}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=list(devices)), StatisticsKept(module):
            run()
    finally:
        for part, name, x, version, before in held:
            if part._buffers[name] is not x or x._version != version:
                _CHANGED.setdefault(part, set()).add(name)
                part._buffers[name] = x
                x.detach().copy_(before)


def changed_buffers(module: nn.Module) -> list[str]:
    """The paths of what `find_changed` has found."""
    parts = ((path, part) for path, part in module.named_modules() if part in _CHANGED)
    return [f"{path}.{name}".lstrip(".") for path, part in parts for name in sorted(_CHANGED[part])]


def _changing(module: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward pass changes buffers in training."""
    return (part for part in module.modules() if isinstance(part, _NormBase) or part in _CHANGED)


def counts_samples(module: nn.Module) -> bool:
    """Whether a module has running statistics, which its forward pass changes in training."""
    return any(True for _ in _changing(module))


class StatisticsKept:
    """A context in which a module runs in training without changing its running statistics; it can be entered
    repeatedly.

    Copies of the buffers are changed instead, since backward passes of other micro-batches may still use the originals.
    The copies begin with the values at the time when the context was made, because code that is recomputed reads these.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._begin = {
            (part, name): x.clone()
            for part in module.modules()
            for name in (_CHANGED.get(part, ()) if part.training else ())
            if (x := part._buffers[name]) is not None
        }
        self._before: list[list[tuple[nn.Module, Buffers]]] = []

    def __enter__(self) -> None:
        parts = [part for part in _changing(self._module) if part.training]
        self._before.append([(part, dict(part._buffers)) for part in parts])
        for part in parts:
            held = {name: self._begin.get((part, name), x) for name, x in part._buffers.items()}
            part._buffers.update({n: None if x is None else x.clone() for n, x in held.items()})

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, at: TracebackType | None) -> None:
        for part, buffers in self._before.pop():
            part._buffers.update(buffers)


@torch.no_grad()
def average_statistics(module: nn.Module, groups: Sequence[dist.ProcessGroup], *, of_norms: bool = True) -> None:
    """Gives all replicas the mean of their running statistics. A collective.

    Args:
        module: the modules of this rank, which are those of every rank of the groups.
        groups: one for each axis of replicas.
        of_norms: whether to average those of normalisations too, which training does not read.
    """
    for part in _changing(module):
        names = _CHANGED.get(part, part._buffers.keys() if of_norms else ())
        for x in (x for name, x in part._buffers.items() if name in names and x is not None and x.is_floating_point()):
            for group in groups:
                dist.all_reduce(x, group=group)
                x.div_(group.size())
