"""Random numbers of networks whose layers are split over ranks.

A single process draws one number for each element of a tensor. With split layers the result must be distributed in the
same way: for a tensor that all ranks hold whole, they must draw equal numbers; for a tensor of which each rank holds a
part, they must draw independent ones. Which of the two holds is seen from the shapes of the random tensors before and
after layers are split. This covers all operators that torch marks as random: those of dropout and attention, and those
that the code of a user calls, such as `torch.bernoulli`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.fx
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer.common_generators import EXTREMES, all_are, begun_with, generators_of
from automap.runtime.trainer.compiled_code import uncompiled
from automap.runtime.trainer.running_statistics import StatisticsKept

SEEDS = 2**62
"""Number of different seeds; each fits into 64 bits."""


class Draw(NamedTuple):
    """A call of a random operator."""

    what: str
    """The name of the operator, and the line of code that calls it."""
    shape: tuple[int, ...]
    """The shape of what it returns."""
    has_generator: bool
    """Whether the code passes a generator of its own."""


Draws = dict[str, list[Draw]]
"""Path of a module -> the draws of its own code in a forward pass, without those of modules inside it, in order."""


@contextlib.contextmanager
def alike(axis: Axis, device: torch.device) -> Iterator[None]:
    """A context for a step in which the ranks of an axis draw equal random numbers, and all other ranks different ones.

    Scripts usually seed all processes alike, so that they build the same network; without this context, replicas would
    draw equal numbers. The global generators of torch, numpy and Python are seeded from torch's generator of the first
    rank of the axis. Afterwards they are as they were, except that one number was drawn from that one. A single process
    draws what it would draw without a plan.
    """
    if dist.get_world_size() == 1:
        yield
        return
    first = dist.get_rank() if axis.group is None else dist.get_global_rank(axis.group, 0)
    drawn = torch.randint(SEEDS, ()).to(device)
    if axis.group is not None:
        dist.broadcast(drawn, first, group=axis.group)
    with begun_with(int(drawn) + first, device):
        yield


def draws_of(module: nn.Module, run: Callable[[], object], *, training: bool = True) -> Draws:
    """The draws of a network in training or in evaluation; afterwards it and all generators are as they were.

    It runs once with the least random numbers and once with the largest, so that blocks which code leaves out at random
    run at least once. Of code that draws in both runs, the run counts in which it draws more often. All processes draw
    the same numbers, so that code which decides by them decides alike.

    Args:
        module: a network.
        run: runs it.
        training: whether it is run in training.

    Raises:
        PlanError: code passes a generator of its own.
    """
    device, inside, found = next(module.parameters()).device, [""], Draws()

    def enter(path: str, *unused: Any) -> None:
        inside.append(path)

    def leave(*unused: Any) -> None:
        inside.pop()

    hooks, before = [], {child: child.training for child in module.modules()}
    for path, child in module.named_modules():
        hooks.append(child.register_forward_pre_hook(functools.partial(enter, path)))
        hooks.append(child.register_forward_hook(leave, always_call=True))
    try:
        statistics = StatisticsKept(module.train(training))
        for number in EXTREMES:
            watching = Watching(device, inside)
            with begun_with(0, device), torch.no_grad(), statistics, all_are(number), watching:
                run()
            for path, draws in watching.draws.items():
                found[path] = max(found.get(path, []), draws, key=len)
    finally:
        for hook in hooks:
            hook.remove()
        for child, was_training in before.items():
            child.training = was_training
    for path, draws in found.items():
        for draw in draws:
            if draw.has_generator:
                raise PlanError(
                    f"{draw.what} draws from a generator that code gives: replicas would draw alike, and ranks that"
                    " split a layer differently or alike, as their generators stand",
                    field=f"module.{path}".rstrip("."), value=type(module.get_submodule(path)).__name__,
                    repair="Leave out generator=. Numbers that are the same in all steps are a buffer of the module.",
                )  # fmt: skip
    return found


def draw_independently(module: nn.Module, whole: Draws, split: Draws, axis: Axis) -> None:
    """Makes ranks draw independent numbers where they draw for parts of tensors.

    Args:
        module: a network whose layers are split over the axis.
        whole: its draws before layers were split.
        split: its draws now.
        axis: the sharding axis.

    Raises:
        PlanError: the code of one module draws both for whole tensors and for parts.
    """
    numbers = _OfParts(axis, next(module.parameters()).device)
    named = dict(module.named_modules())
    for path, draws in split.items():
        are_parts = _are_parts(whole.get(path, ()), draws)
        if len(set(are_parts)) > 1:
            one, two = (draws[are_parts.index(is_part)].what for is_part in (False, True))
            raise PlanError(
                f"draws random numbers for whole tensors ({one}) and for parts of split ones ({two})",
                field=f"module.{path}".rstrip("."), value=type(named[path]).__name__,
                repair="Put one of the two into a module of its own, such as nn.Dropout.",
            )  # fmt: skip
        # Modules inside this one are decided by their own draws.
        named[path].forward = uncompiled(functools.partial(numbers.run, named[path].forward, are_parts[0]))


def _are_parts(whole: Sequence[Draw], split: Sequence[Draw]) -> list[bool]:
    """Whether each draw is for a part of a tensor; code that draws once for each head draws less often on split
    heads."""
    if len(whole) != len(split):
        return [True] * len(split)
    return [one.shape != two.shape for one, two in zip(whole, split, strict=True)]


def can_draw(node: torch.fx.Node) -> bool:
    """Whether a node of a traced program can draw random numbers."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    packet = getattr(torch.ops.aten, str(name), None) if node.op in ("call_function", "call_method") else None
    return packet is not None and any(is_random(getattr(packet, overload)) for overload in packet.overloads())


def is_random(operator: Any) -> bool:
    """Whether an operator of torch can draw random numbers: one with a rate of 0 draws none."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that records draws, by the module whose code runs."""

    def __init__(self, device: torch.device, inside: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: Draws = {}
        self._device, self._inside = device, inside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        path = self._inside[-1]
        number = len(self.draws.get(path, ()))
        # Seeded for each draw, because earlier draws may have drawn fewer numbers in another run.
        torch.manual_seed(zlib.crc32(f"{path} {number}".encode()))
        before, has_generator = self._states(), any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values()))
        found = func(*args, **kwargs)
        made = next((x for x in (found if isinstance(found, tuple | list) else [found]) if isinstance(x, Tensor)), None)
        if made is not None and (has_generator or not all(map(torch.equal, before, self._states()))):
            name = f"{func._schema.name.removeprefix('aten::')}{_line()}"
            self.draws.setdefault(path, []).append(Draw(name, tuple(made.shape), has_generator))
        return found

    def _states(self) -> list[Tensor]:
        """The states of all generators."""
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, generators_of(self._device))]


class _OfParts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which the ranks of an axis draw independent numbers, except in code that draws for whole tensors.

    The seed of a rank is computed from numbers that all ranks draw alike, so that recomputation finds the same seed.
    """

    def __init__(self, axis: Axis, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._axis, self._device = axis, device
        self._parts: list[bool] = []

    def run(self, forward: Callable[..., Any], is_part: bool, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of a module.

        Args:
            forward: that of the module.
            is_part: whether its code draws for parts.
            args: what it is given.
            kwargs: what it is given by name.
        """
        begins = is_part and True not in self._parts
        self._parts.append(is_part)
        try:
            with self if begins else contextlib.nullcontext():
                return forward(*args, **kwargs)
        finally:
            self._parts.pop()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._parts[-1] or not is_random(func):
            return func(*args, **kwargs)
        seed = int(torch.randint(SEEDS, ()))
        with torch.random.fork_rng(devices=generators_of(self._device)):
            torch.manual_seed(seed + 1 + self._axis.index)
            return func(*args, **kwargs)


def _line() -> str:
    """The line of the innermost forward of a module that runs, outside of torch."""
    torch_folder, frame = str(Path(torch.__file__).parent), sys._getframe()
    while frame is not None:
        code = frame.f_code
        if isinstance(frame.f_locals.get("self"), nn.Module) and not code.co_filename.startswith(torch_folder):
            return f" in {Path(code.co_filename).name} line {frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
