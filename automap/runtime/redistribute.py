"""Placements changed by real collectives, differentiably: all communication inside a stage.

`convert` brings a tensor to another placement and its gradient back; where nothing changes it adds no autograd node.
While a `record` is open, every collective of the forward and backward passes is written down, so that what runs can be
compared with what was priced. Units: bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from automap.runtime.mesh_groups import Axis
from automap.runtime.tensor_layout import Step
from ir.factors import PARTIAL, Placement


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective that ran."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send_recv."""
    axis: str
    """The name of the mesh axis over which it ran."""
    bytes: float
    """The size of the tensor on this rank before or after the collective, whichever is larger."""
    direction: str
    """forward, backward, recompute (the forward pass repeated in the backward pass) or update (after the optimizer)."""
    operator: str
    """The operator that required it; empty for the reductions at the end of a step."""
    tensor: str
    """The name of the tensor that was sent."""


@dataclass
class _State:
    logs: list[list[Sent]]
    direction: str = "forward"


_state = _State([])


@contextlib.contextmanager
def record() -> Iterator[list[Sent]]:
    """Writes down the collectives of this process while the context is open."""
    log: list[Sent] = []
    _state.logs.append(log)
    try:
        yield log
    finally:
        _state.logs.remove(log)


@contextlib.contextmanager
def direction(name: str) -> Iterator[None]:
    """Sets the direction that collectives are recorded with while the context is open."""
    before, _state.direction = _state.direction, name
    try:
        yield
    finally:
        _state.direction = before


Tag = tuple[str, str]
"""The names of the operator and of the tensor that a collective serves."""
NO_TAG: Tag = ("", "")


def note(kind: str, axis: Axis, amount: int, tag: Tag) -> None:
    """Records a collective of `amount` bytes."""
    for log in _state.logs:
        log.append(Sent(kind, axis.name, float(amount), _state.direction, *tag))


def all_reduce(x: Tensor, axis: Axis, tag: Tag = NO_TAG, *, largest: bool = False) -> Tensor:
    """The sum over the ranks of an axis, or the elementwise maximum."""
    made = x.clone(memory_format=torch.contiguous_format)
    all_reduce_in_place(made, axis, tag, largest=largest)
    return made


def all_reduce_in_place(x: Tensor, axis: Axis, tag: Tag = NO_TAG, *, largest: bool = False) -> None:
    """Writes the sum over the ranks of an axis, or the elementwise maximum, into a contiguous tensor."""
    note("all_reduce", axis, x.nbytes, tag)
    dist.all_reduce(x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, axis.group)


def all_gather(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], tag: Tag = NO_TAG) -> Tensor:
    """The parts of all ranks of an axis, concatenated along `dim`.

    Args:
        x: this rank's part.
        axis: the ranks.
        dim: the dim that is split.
        sizes: the size of `dim` on each rank.
        tag: the names for the record.
    """
    most = max(sizes)
    if x.shape[dim] < most:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], most - x.shape[dim], *x.shape[dim + 1 :])], dim)
    x = x.contiguous()
    flat = x.new_empty(axis.size * x.numel())
    dist.all_gather_single(flat, x.reshape(-1), axis.group)
    if dim == 0 and min(sizes) == most:
        made = flat.reshape(axis.size * most, *x.shape[1:])
    else:
        parts = flat.reshape(axis.size, *x.shape).unbind()
        made = torch.cat([p.narrow(dim, 0, size) for p, size in zip(parts, sizes, strict=True)], dim)
    note("all_gather", axis, made.nbytes, tag)
    return made


def reduce_scatter(x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], tag: Tag = NO_TAG) -> Tensor:
    """This rank's part, along `dim`, of the sum over the ranks of an axis; see `all_gather`."""
    note("reduce_scatter", axis, x.nbytes, tag)
    is_even = len(set(sizes)) == 1
    if dim == 0 and is_even:
        made = x.new_empty(sizes[0], *x.shape[1:])
        dist.reduce_scatter_single(made.reshape(-1), x.reshape(-1), group=axis.group)
        return made
    parts = [p.contiguous() for p in torch.split(x, list(sizes), dim)]
    made = torch.empty_like(parts[axis.index])
    if is_even:
        dist.reduce_scatter_single(made.reshape(-1), torch.cat([p.reshape(-1) for p in parts]), group=axis.group)
    else:
        dist.reduce_scatter(made, parts, group=axis.group)
    return made


def all_to_all(x: Tensor, step: Step, tag: Tag = NO_TAG) -> Tensor:
    """This rank's part of a tensor along `step.to_dim`, where `x` is its part along `step.dim`."""
    axis = step.axis
    given = [p.contiguous() for p in torch.split(x, list(step.to_sizes), step.to_dim)]
    shape = list(given[axis.index].shape)
    taken = []
    for size in step.sizes:
        shape[step.dim] = size
        taken.append(x.new_empty(shape))
    flat = torch.cat([p.reshape(-1) for p in given])
    found = flat.new_empty(sum(p.numel() for p in taken))
    dist.all_to_all_single(found, flat, [p.numel() for p in taken], [p.numel() for p in given], group=axis.group)
    note("all_to_all", axis, max(flat.nbytes, found.nbytes), tag)
    pieces = torch.split(found, [p.numel() for p in taken])
    return torch.cat([piece.reshape(p.shape) for piece, p in zip(pieces, taken, strict=True)], step.dim)


def move(x: Tensor, steps: Sequence[Step], tag: Tag = NO_TAG) -> Tensor:
    """The tensor after some steps (`automap.runtime.tensor_layout.TensorLayouts.steps`), without a gradient."""
    for step in steps:
        axis = step.axis
        if step.kind == "all_reduce":
            x = all_reduce(x, axis, tag)
        elif step.kind == "all_gather":
            x = all_gather(x, axis, step.dim, step.sizes, tag)
        elif step.kind == "reduce_scatter":
            x = reduce_scatter(x, axis, step.dim, step.sizes, tag)
        elif step.kind == "all_to_all":
            x = all_to_all(x, step, tag)
        elif step.kind == "slice":
            x = x.narrow(step.dim, sum(step.sizes[: axis.index]), step.sizes[axis.index])
        elif step.kind == "pad":
            shape = list(x.shape)
            shape[step.dim] = sum(step.sizes)
            whole = x.new_zeros(shape)
            whole.narrow(step.dim, sum(step.sizes[: axis.index]), x.shape[step.dim]).copy_(x)
            x = whole
        else:
            # The first rank copies too: all ranks must save the same for the backward pass.
            x = torch.zeros_like(x) if axis.index else x.clone()
    return x


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Sequence[Step], back: Sequence[Step], tag: Tag) -> Tensor:
        ctx.back, ctx.tag = back, tag
        return move(x, there, tag) if there else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with direction("backward"):
            return move(gradients[0], ctx.back, ctx.tag), None, None, None


def convert(x: Tensor, there: Sequence[Step], back: Sequence[Step], tag: Tag = NO_TAG) -> Tensor:
    """A tensor after the steps `there`, whose gradient takes the steps `back`; `x` itself where both are empty."""
    if not (back and x.requires_grad):
        back = ()
    if not (there or back):
        return x
    if not x.requires_grad:
        return move(x, there, tag)
    found: Tensor = _Convert.apply(x, tuple(there), tuple(back), tag)  # type: ignore[no-untyped-call]
    return found


def sum_over(x: Tensor, axes: Sequence[Axis], gradient: Placement, tag: Tag = NO_TAG) -> Tensor:
    """The sum of `x` over some axes, on all of their ranks, differentiable.

    Args:
        x: this rank's term.
        axes: the mesh axes, summed one after the other.
        gradient: the placement in which the gradient of the sum arrives: P where each rank has a term of it, which is
            summed as well, B where every rank has the whole.
        tag: the names for the record.
    """
    for axis in axes:
        step = (Step("all_reduce", axis),)
        x = convert(x, step, step if gradient == PARTIAL else (), tag)
    return x


def largest_over(x: Tensor, axes: Sequence[Axis], tag: Tag = NO_TAG) -> Tensor:
    """The elementwise maximum over some axes, on all of their ranks, without a gradient."""
    x = x.detach()
    for axis in axes:
        x = all_reduce(x, axis, tag, largest=True)
    return x


def exchange_rows(
    x: Tensor,
    axis: Axis,
    dim: int,
    held: Sequence[tuple[int, int]],
    wanted: Sequence[tuple[int, int]],
    tag: Tag = NO_TAG,
) -> Tensor:
    """The range of `dim` that each rank requires, summed over all ranks that hold a part of it, else zeros.

    Args:
        x: this rank's part of the tensor.
        axis: the ranks.
        dim: the dim that is split.
        held: [ranks] the range (start, stop) of `dim` that each rank holds.
        wanted: [ranks] the range (start, stop) of `dim` that each rank requires.
        tag: the names for the record.
    """

    def common(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
        low, high = max(one[0], other[0]), min(one[1], other[1])
        return (low, high) if low < high else (one[0], one[0])

    me = axis.index
    gives = [common(held[me], w) for w in wanted]
    takes = [common(wanted[me], h) for h in held]
    shape = list(x.shape)
    row = x.numel() // shape[dim]
    flat = torch.cat([x.narrow(dim, low - held[me][0], high - low).reshape(-1) for low, high in gives])
    found = flat.new_empty(sum(high - low for low, high in takes) * row)
    dist.all_to_all_single(
        found, flat, [(high - low) * row for low, high in takes], [(high - low) * row for low, high in gives],
        group=axis.group,
    )  # fmt: skip
    moved = sum((high - low) * row for i, (low, high) in enumerate(takes) if i != me)
    note("send_recv", axis, moved * x.element_size(), tag)
    shape[dim] = wanted[me][1] - wanted[me][0]
    made = x.new_zeros(shape)
    for (low, high), part in zip(takes, torch.split(found, [(high - low) * row for low, high in takes]), strict=True):
        if high > low:
            shape[dim] = high - low
            made.narrow(dim, low - wanted[me][0], high - low).add_(part.reshape(shape))
    return made
