"""Random numbers beside split layers: what ranks hold alike is dropped alike, what they hold in parts independently.

Whether a module of dropout works on whole data or on parts is seen from its input: ranks that split a layer have equal
inputs, or not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis

SAME = 1e-6
"""The relative difference of sums up to which two ranks have the same input (assumed): rounding is alike on ranks."""
SEEDS = 2**62
"""The number of seeds that masks are drawn with; each fits into 64 bits."""


@contextlib.contextmanager
def alike(axis: Axis, device: torch.device) -> Iterator[None]:
    """A step in which the ranks of an axis draw the same random numbers, and other ranks other ones.

    The first rank's generator decides. Afterwards the generators of the caller are as they were, but for one number
    drawn from them. Replicas would otherwise drop alike: scripts seed all processes in one way, so that they build the
    same network. A process that is alone draws what it would draw without a plan.
    """
    if dist.get_world_size() == 1:
        yield
        return
    first = dist.get_rank() if axis.group is None else dist.get_global_rank(axis.group, 0)
    seed = torch.randint(SEEDS, ()).to(device)
    if axis.group is not None:
        dist.broadcast(seed, first, group=axis.group)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int(seed) + first)
        yield


def drop_independently(module: nn.Module, run: Callable[[], object], axis: Axis) -> None:
    """Lets modules of dropout draw other numbers on each rank where their inputs are parts.

    Args:
        module: a network whose layers are split over the axis.
        run: runs it on the same samples on all ranks.

    Raises:
        PlanError: a module is used on whole data and on parts.
    """
    found = {path: child for path, child in module.named_modules() if isinstance(child, _DropoutNd) and child.p > 0.0}
    if not found or axis.group is None:
        return
    seen: dict[str, list[Tensor]] = {path: [] for path in found}

    def note(path: str, child: nn.Module, args: tuple[Any, ...]) -> None:
        wide = args[0].detach().double()
        seen[path].append(torch.stack([wide.sum(), wide.abs().sum()]))

    hooks = [child.register_forward_pre_hook(functools.partial(note, path)) for path, child in found.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    for path, sums in seen.items():
        is_split = [_differs(some, axis) for some in sums]
        if len(set(is_split)) > 1:
            raise PlanError(
                "is used on whole data and on parts of split layers", field=f"module.{path}", value="Dropout",
                repair="Use two modules.",
            )  # fmt: skip
        if any(is_split):
            found[path].forward = functools.partial(_independent, found[path].forward, axis)


def _differs(sums: Tensor, axis: Axis) -> bool:
    """Whether ranks have other sums; the same answer on all of them."""
    sums = sums if sums.device.type == "cpu" else sums.float()
    low, high = sums.clone(), sums.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=axis.group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=axis.group)
    return bool((high - low).max() > SAME * high[1])


def _independent(forward: Callable[[Tensor], Tensor], axis: Axis, x: Tensor) -> Tensor:
    """Dropout with numbers of this rank. The seed comes from the common ones, which recomputation draws again."""
    seed = int(torch.randint(SEEDS, ()))
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        torch.manual_seed(seed + 1 + axis.index)
        return forward(x)
