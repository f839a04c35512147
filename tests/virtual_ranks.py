"""Ranks of one mesh axis in one process: a tensor is the list of what each rank holds.

`convert` is the one communication: it changes a placement and carries gradients back in the dual placement. Programs of
the ranks meet nowhere else, so that differentiating all of them together gives each rank's own backward pass.
"""

import contextlib
from collections.abc import Iterator

import torch

from ir.factors import BROADCAST, PARTIAL, gradient_placement

COLLECTIVES = {("S", "B"): "all_gather", ("P", "B"): "all_reduce", ("P", "S"): "reduce_scatter",
               ("S", "S"): "all_to_all", ("B", "S"): None, ("B", "P"): None, ("S", "P"): None}  # fmt: skip
"""What turns one placement into another; None = nothing is sent."""


def letter(placement):
    return {BROADCAST: "B", PARTIAL: "P"}.get(placement, "S")


def collective(source, target):
    """Name of the collective of `move`, None where nothing is sent."""
    return None if source == target else COLLECTIVES[letter(source), letter(target)]


_logs: list[list[tuple[str, str, int]]] = []


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[str, str, int]]]:
    """Writes down what is sent meanwhile: (collective, forward or backward, elements of the larger side)."""
    log: list[tuple[str, str, int]] = []
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


def _record(name, direction, parts, made):
    for log in _logs if name else []:
        log.append((name, direction, max(parts[0].numel(), made[0].numel())))


def place(whole, placement, ranks, generator):
    """`whole` in a placement; the parts of a partial tensor are random but for their sum."""
    if placement >= 0:
        parts = whole.chunk(ranks, placement)
        assert len(parts) == ranks, (whole.shape, placement, ranks)
        return [part.clone() for part in parts]
    if placement == BROADCAST:
        return [whole.clone() for _ in range(ranks)]
    parts = [torch.randn(whole.shape, dtype=whole.dtype, generator=generator) for _ in range(ranks - 1)]
    return [*parts, whole - sum(parts)]


def assemble(parts, placement):
    """The whole of a tensor from what the ranks hold; replicas must agree."""
    if placement >= 0:
        return torch.cat(parts, placement)
    if placement == PARTIAL:
        return sum(parts)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=1e-9, atol=1e-9, equal_nan=True, msg="replicas differ")
    return parts[0]


def move(parts, source, target):
    """Another placement of the same tensor."""
    if source == target:
        return [part.clone() for part in parts]
    ranks = len(parts)
    if source >= 0 and target == PARTIAL:
        # Zeros around what each rank holds.
        return [torch.cat([p if i == r else torch.zeros_like(p) for i, p in enumerate(parts)], source)
                for r in range(ranks)]  # fmt: skip
    whole = torch.cat(parts, source) if source >= 0 else sum(parts) if source == PARTIAL else None
    if target >= 0:
        return [(parts[r] if whole is None else whole).chunk(ranks, target)[r].clone() for r in range(ranks)]
    wholes = parts if whole is None else [whole] * ranks
    if target == BROADCAST:
        return [part.clone() for part in wholes]
    return [wholes[0].clone(), *(torch.zeros_like(wholes[0]) for _ in range(ranks - 1))]


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, source, target, gradient, *parts):
        ctx.source, ctx.gradient = source, gradient
        made = tuple(move(parts, source, target))
        _record(collective(source, target), "forward", parts, made)
        return made

    @staticmethod
    def backward(ctx, *gradients):
        dual = gradient_placement(ctx.source)
        made = move(gradients, ctx.gradient, dual)
        _record(collective(ctx.gradient, dual), "backward", gradients, made)
        return None, None, None, *made


def convert(parts, source, target, gradient=None):
    """`move`, differentiable.

    Args:
        parts: what each rank holds.
        source: their placement.
        target: wanted placement.
        gradient: in which the users of the result hand its gradient back: PARTIAL where each rank uses a whole
            result for its own share of work; default the dual of `target`.
    """
    gradient = gradient_placement(target) if gradient is None else gradient
    return list(_Convert.apply(source, target, gradient, *parts))


def total(parts, gradient):
    """Sum over the ranks, known to all."""
    return convert(parts, PARTIAL, BROADCAST, gradient)


def agree(parts, reduction):
    """Another reduction than the sum, elementwise over the ranks and without gradient."""
    found = reduction(torch.stack([part.detach() for part in parts]), 0)
    _record("all_reduce", "forward", parts, [found])
    return found


def largest(parts):
    """Elementwise maximum over the ranks, without gradient."""
    return agree(parts, torch.amax)
