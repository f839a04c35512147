"""Random numbers beside split layers: what ranks hold alike is dropped alike, what they hold in parts independently.

Whether a module of dropout works on whole data or on parts is seen from its input: ranks that split a layer have equal
inputs, or not. So is that of functions which code of a module calls, such as attention with dropout of its weights.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer.compiled_code import uncompiled
from automap.runtime.trainer.evaluation import DROPOUTS
from automap.runtime.trainer.running_statistics import StatisticsKept
from automap.runtime.trainer.split_check import evaluating

SAME = 1e-6
"""The relative difference up to which two ranks have the same numbers (assumed): rounding is alike on ranks."""
NUMBERS = 4096
"""How many numbers of an input are compared (assumed)."""
SEEDS = 2**62
"""The number of seeds that masks are drawn with; each fits into 64 bits."""
DROPPING = {*DROPOUTS, F.scaled_dot_product_attention}
"""Functions that drop of their first argument in training."""


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
    """Lets dropout draw other numbers on each rank where its inputs are parts.

    Args:
        module: a network whose layers are split over the axis.
        run: runs it on the same samples on all ranks.

    Raises:
        PlanError: a module, or the code of one, drops of whole data and of parts.
    """
    if axis.group is None:
        return
    with torch.no_grad(), evaluating(module):
        _of_modules(module, run, axis)
    before = {child: child.training for child in module.modules()}
    devices = {parameter.device for parameter in module.parameters() if parameter.device.type == "cuda"}
    try:
        with torch.no_grad(), StatisticsKept(module.train()), torch.random.fork_rng(devices=list(devices)):
            torch.manual_seed(0)  # What ranks hold alike stays so.
            _of_code(module, run, axis)
    finally:
        for child, training in before.items():
            child.training = training


def _of_modules(module: nn.Module, run: Callable[[], object], axis: Axis) -> None:
    """Modules of dropout."""
    found = {path: child for path, child in module.named_modules() if isinstance(child, _DropoutNd) and child.p > 0.0}
    seen: dict[str, list[Tensor]] = {path: [] for path in found}

    def note(path: str, child: nn.Module, args: tuple[Any, ...]) -> None:
        seen[path].append(_sample(args[0]))

    hooks = [child.register_forward_pre_hook(functools.partial(note, path)) for path, child in found.items()]
    try:
        run() if found else None
    finally:
        for hook in hooks:
            hook.remove()
    for path in _split_ones(seen, axis, "Use two modules."):
        found[path].forward = functools.partial(_independent, found[path].forward, axis)


def _of_code(module: nn.Module, run: Callable[[], object], axis: Axis) -> None:
    """Functions that code of other modules calls in training."""
    named, inside = dict(module.named_modules()), [""]
    seen: dict[str, list[Tensor]] = {}

    def enter(path: str, *unused: Any) -> None:
        inside.append(path)

    def leave(*unused: Any) -> None:
        inside.pop()

    def note(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generators = _states(args[0].device)
        found = function(*args, **kwargs)
        if not all(map(torch.equal, generators, _states(args[0].device))):
            seen.setdefault(inside[-1], []).append(_sample(args[0]))
        return found

    hooks = []
    for path, child in named.items():
        hooks.append(child.register_forward_pre_hook(functools.partial(enter, path)))
        hooks.append(child.register_forward_hook(leave, always_call=True))
    try:
        with _Dropping(note):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    in_code = {path: samples for path, samples in seen.items() if not isinstance(named[path], _DropoutNd)}
    are_split = _split_ones(in_code, axis, "Use modules of dropout.")
    for path in in_code if are_split else ():
        # Code of a module inside of another one has the numbers that its own data call for.
        draw = functools.partial(_independent_call, axis) if path in are_split else _plain
        named[path].forward = uncompiled(functools.partial(_in_code, named[path].forward, _Dropping(draw)))


def _split_ones(seen: Mapping[str, Sequence[Tensor]], axis: Axis, repair: str) -> set[str]:
    """The paths of modules that drop of parts; the same ones on all ranks.

    Args:
        seen: path -> samples of the inputs of its dropouts.
        repair: what to do about modules that drop of whole data, too.
    """
    found = set()
    for path, samples in seen.items():
        is_split = [_differs(one, axis) for one in samples]
        if len(set(is_split)) > 1:
            raise PlanError(
                "is used on whole data and on parts of split layers", field=f"module.{path}", value="Dropout",
                repair=repair,
            )  # fmt: skip
        if any(is_split):
            found.add(path)
    return found


class _Dropping(TorchFunctionMode):
    """A context in which functions that drop are called by another function."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        call = functools.partial(self._call, func) if func in DROPPING and args else func
        return call(*args, **(kwargs or {}))


def _in_code(forward: Callable[..., Any], dropping: _Dropping, *args: Any, **kwargs: Any) -> Any:
    with dropping:
        return forward(*args, **kwargs)


def _plain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call that contexts around it do not see."""
    with torch._C.DisableTorchFunction():
        return function(*args, **kwargs)


def _independent_call(axis: Axis, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _independent(functools.partial(_plain, function), axis, *args, **kwargs)


def _states(device: torch.device) -> list[Tensor]:
    """What the next random numbers of a device follow from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _sample(x: Tensor) -> Tensor:
    """[NUMBERS] some numbers of a tensor, from all over it; zeros stand for those that it does not have.

    Sums would tell nothing of weights of attention, whose rows all have the sum 1.
    """
    flat = x.detach().flatten()
    found = flat[:: max(1, flat.numel() // NUMBERS)][:NUMBERS]
    return F.pad(found, (0, NUMBERS - found.numel())).double()


def _differs(sample: Tensor, axis: Axis) -> bool:
    """Whether ranks have other numbers; the same answer on all of them."""
    sample = sample if sample.device.type == "cpu" else sample.float()
    low, high = sample.clone(), sample.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=axis.group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=axis.group)
    return bool((high - low).max() > SAME * torch.maximum(high, -low).max())


def _independent(forward: Callable[..., Any], axis: Axis, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Dropout with numbers of this rank. The seed comes from the common ones, which recomputation draws again."""
    seed = int(torch.randint(SEEDS, ()))
    with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
        torch.manual_seed(seed + 1 + axis.index)
        return forward(x, *args, **kwargs)
