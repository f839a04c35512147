"""Checks that a network has the same gradients when its layers are split: equal scores do not show that.

A tensor that changes its placement at the wrong place may have the right values in the forward pass, and gradients that
lack the terms of other ranks. Compared are the norms of the gradients of each parameter, which do not depend on how it
is split.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automap.errors import PlanError
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer.gradients import local_of, sum_gradients
from automap.runtime.trainer.split_check import PROBE_ULPS, SIZES_OF_RANKS, Split, evaluating, runs
from ir.graph import Graph
from ir.loss import class_dim_of

SHARE = 0.01
"""The share of its norm by which a gradient may differ (assumed): rounding stays below it in deep networks, and the
terms that a rank lacks are more."""


class GradientCheck:
    """Compares the gradients of a network before and after its layers are split, where memory allows that.

    Args:
        graph: the graph of the network.
        module: the network, which is still whole.
        inputs: what it is run on.
        names: see `scores_of`.
        scores: what it makes of the inputs.
    """

    def __init__(
        self, graph: Graph, module: nn.Module, inputs: list[Tensor], names: tuple[str, ...], scores: Tensor
    ) -> None:
        self._norms = functools.partial(_gradient_norms, module, inputs, names, scores)
        self._scores = scores
        # cuDNN has no backward pass of recurrent layers in evaluation mode.
        is_recurrent = scores.is_cuda and any(isinstance(part, nn.RNNBase) for part in module.modules())
        has_room = _has_room(graph, len(scores), scores.device)
        self._whole = self._norms() if has_room and not is_recurrent else None

    def check(self, split: Split) -> None:
        """Refuses the network if a gradient differs now that it is split. A collective.

        Args:
            split: how it is split.

        Raises:
            PlanError: names the parameter with the largest difference.
        """
        if self._whole is None:
            return
        found, wanted = self._norms(split), self._whole
        eps = max(torch.finfo(self._scores.dtype).eps, torch.finfo(torch.float32).eps)
        rounding = PROBE_ULPS * eps * max(wanted.values(), default=0.0)
        limits = {name: SHARE * norm + rounding for name, norm in wanted.items()}
        wrong = {n: abs(found.get(n, 0.0) - norm) / limits[n] for n, norm in wanted.items() if limits[n]}
        worst = max(wrong, key=wrong.__getitem__, default="")
        differs = torch.tensor(float(bool(wrong) and not wrong[worst] <= 1.0), device=self._scores.device)
        dist.all_reduce(differs)
        if differs:
            raise PlanError(
                f"has other gradients on split layers than whole, for instance that of {worst}", field="module",
                value=f"a norm of {found.get(worst, 0.0):.3g} in place of {wanted[worst]:.3g}",
                repair=f"{SIZES_OF_RANKS} Or search a plan that splits no weights: hints.fix.tp 1.",
            )  # fmt: skip


def _has_room(graph: Graph, samples: int, device: torch.device) -> bool:
    """Whether all processes have memory for a backward pass of the whole network. A collective.

    Args:
        graph: the graph of the network, whose tensors are all counted, in float32.
        samples: the number of samples that the network is run on.
        device: where it is run.
    """
    needed = sum(math.prod(tensor.shape_at(samples)) for tensor in graph.tensors.values()) * torch.float32.itemsize
    if device.type == "cuda":
        free = float(torch.cuda.mem_get_info(device)[0])
    else:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = pages / int(os.environ.get("LOCAL_WORLD_SIZE") or dist.get_world_size())
    lacks = torch.tensor(float(needed > free), device=device)
    dist.all_reduce(lacks)
    return not lacks


def _gradient_norms(
    module: nn.Module, inputs: list[Tensor], names: tuple[str, ...], like: Tensor, split: Split | None = None
) -> dict[str, float]:
    """The norm of the gradient of each trained parameter, without dropout, for random gradients of the scores.

    Args:
        module: the network; afterwards its parameters have no gradients.
        inputs: what it is run on.
        names: see `scores_of`.
        like: the scores of the whole network.
        split: how the network is split; None = it is whole.
    """
    given = torch.randn(like.shape, generator=torch.Generator().manual_seed(0)).to(like)
    summed: set[str] = set()
    if split is not None:
        roles, axis = split
        summed = roles.summed
        given = given.chunk(axis.size, class_dim_of(like.ndim))[axis.index] if roles.splits_classes else given
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    squares: dict[str, Tensor] = {}
    # A gradient is needed no longer than until its norm is known, unless other ranks hold terms of it.
    noted = [
        p.register_post_accumulate_grad_hook(functools.partial(_note, squares, name))  # type: ignore[no-untyped-call]
        for name, p in trained.items()
        if name not in summed
    ]
    try:
        with evaluating(module):
            scores = runs(module, inputs, names)
            if scores.requires_grad:
                scores.backward(given)  # type: ignore[no-untyped-call]
    finally:
        for handle in noted:
            handle.remove()
    if split is not None:
        _sum_over_ranks({name: p for name, p in trained.items() if name in summed}, trained, squares, axis)
    return {name: math.sqrt(square) for name, square in squares.items()}


def _note(squares: dict[str, Tensor], name: str, parameter: nn.Parameter) -> None:
    """Notes the square of a gradient's norm, and frees the gradient."""
    assert parameter.grad is not None
    gradient = local_of(parameter.grad)
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    own = torch.linalg.vector_norm(values, dtype=torch.float64).square()
    squares[name] = squares.get(name, torch.zeros_like(own)) + own
    parameter.grad = None


def _sum_over_ranks(
    summed: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter], squares: dict[str, Tensor], axis: Axis
) -> None:
    """Completes the squares: of gradients that have terms on all ranks, and of those of which each rank has a part."""
    assert axis.group is not None
    sum_gradients(summed.values(), axis.group)
    for name, parameter in summed.items():
        _note(squares, name, parameter)
    parts = [name for name, p in trained.items() if isinstance(p, DTensor)]
    if parts:
        none = torch.zeros((), dtype=torch.float64, device=next(iter(trained.values())).device)
        every = torch.stack([squares.get(name, none) for name in parts])
        dist.all_reduce(every, group=axis.group)
        squares.update(zip(parts, every, strict=True))
