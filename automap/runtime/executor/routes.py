"""The tensors that pass between the stages of a pipeline, and the one order of actions in which all ranks pass them.

Every rank finds the same routes from the plan alone. Stages may have unlike meshes and may share ranks. Nothing here
communicates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from automap.runtime.executor.action_order import Action, order_actions
from automap.runtime.executor.transfer_plan import Piece, TensorLayout, transfer
from automap.runtime.tensor_layout import StageTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBorder:
    """What other stages must know of a stage."""

    ranks: tuple[int, ...]
    """The ranks of the stage in the order of its mesh."""
    inputs: tuple[StageTensor, ...]
    """Tensors that other stages make."""
    outputs: tuple[StageTensor, ...]
    """Tensors that other stages read."""
    parameters: Mapping[str, StageTensor] = field(default_factory=dict)
    """Parameters that the stage reads, by name."""
    replicas: tuple[int, ...] = ()
    """[ranks] the number of each rank's replica, where replicas are trained apart; then equal in all stages."""

    def layouts(self, tensor: StageTensor) -> list[TensorLayout]:
        """Rank -> its box of a tensor, for each replica that is trained apart, or for all ranks together."""
        replicas = self.replicas or (0,) * len(self.ranks)
        where = list(zip(replicas, self.ranks, tensor.boxes, strict=True))
        return [{rank: box for r, rank, box in where if r == replica} for replica in range(max(replicas) + 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """A tensor from the stage that makes it to one that reads it, or its gradient on the way back."""

    name: str
    maker: int
    """The number of the stage that makes the tensor."""
    reader: int
    """The number of the stage that reads the tensor."""
    sources: TensorLayout
    """Rank -> the box that it sends from; for a gradient, ranks of the reader."""
    pieces: tuple[Piece, ...]
    dtype: torch.dtype


def route_between(
    tensor: StageTensor, ends: tuple[int, int], sources: Sequence[TensorLayout], targets: Sequence[TensorLayout]
) -> Route:
    """The route of a tensor between two layouts.

    Args:
        tensor: the tensor.
        ends: the numbers of the stage that makes it and of the stage that reads it.
        sources: rank -> the box that it sends from, for each replica that is trained apart, or for all ranks together.
        targets: rank -> the box that it receives, for the same replicas.
    """
    maker, reader = ends
    return Route(
        name=tensor.name,
        maker=maker,
        reader=reader,
        sources={rank: box for layout in sources for rank, box in layout.items()},
        pieces=tuple(piece for pair in zip(sources, targets, strict=True) for piece in transfer(*pair)),
        dtype=tensor.dtype,
    )


def forward_routes(stages: Sequence[StageBorder]) -> tuple[Route, ...]:
    """The routes of all tensors between stages, by maker, name and reader."""
    return tuple(_route(*ends) for ends in _crossings(stages))


def backward_routes(stages: Sequence[StageBorder]) -> tuple[Route, ...]:
    """The routes of all gradients between stages, by maker, name and reader of the tensor."""
    return tuple(_route(*ends, is_back=True) for ends in _crossings(stages) if ends[2].carries_gradient)


Ends = tuple[Sequence[StageBorder], int, StageTensor, int, StageTensor]
"""All stages; the maker and the tensor as it makes it; the reader and the tensor as it reads it."""


def _crossings(stages: Sequence[StageBorder]) -> Iterator[Ends]:
    for maker, source in enumerate(stages):
        for made in source.outputs:
            for reader, target in enumerate(stages):
                for read in target.inputs:
                    if read.name == made.name and reader != maker:
                        yield stages, maker, made, reader, read


def _route(
    stages: Sequence[StageBorder], maker: int, made: StageTensor, reader: int, read: StageTensor, *,
    is_back: bool = False,
) -> Route:  # fmt: skip
    """The route of a tensor from its maker to a reader; of its gradient from the reader to the maker if `is_back`."""
    sources, targets = stages[maker].layouts(made), stages[reader].layouts(read)
    if is_back:
        sources, targets = targets, sources
    return route_between(made, (maker, reader), sources, targets)


def global_order(lists: Mapping[int, Sequence[Action]], stages: Sequence[StageBorder]) -> tuple[Action, ...]:
    """One order of the actions of all ranks, see `order_actions`.

    Args:
        lists: rank -> its actions, in order.

    Raises:
        PlanError: the ranks would wait for each other forever.
    """
    forward: dict[int, list[int]] = {}
    backward: dict[int, list[int]] = {}
    for route in forward_routes(stages):
        forward.setdefault(route.reader, []).append(route.maker)
    for route in backward_routes(stages):
        backward.setdefault(route.maker, []).append(route.reader)
    return order_actions(lists, [stage.ranks for stage in stages], forward, backward)
