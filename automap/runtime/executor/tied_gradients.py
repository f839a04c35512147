"""Gradients of parameters that several stages read, added up between these stages: an all-reduce of a ring's bytes.

Stages may hold such a parameter in unlike layouts, so that no collective of the communication library fits. The whole
tensor is cut into as many blocks as there are holders. Each holder adds up one block: it receives this block from the
others and sends them the sum. With n holders a rank sends 2 (n - 1) / n of its bytes, as in a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from automap.runtime.executor.point_to_point import PointToPoint
from automap.runtime.executor.routes import Route, StageBorder, route_between
from automap.runtime.executor.transfer_plan import TensorLayout, inside, overlap
from automap.runtime.tensor_layout import Box, StageTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A part of a parameter, and the holder that adds up its gradient."""

    box: Box
    """The block in the whole tensor."""
    parts: TensorLayout
    """Rank of this holder -> its part of the block."""
    coming: tuple[Route, ...]
    """The gradient from each holder to this one, which is among them."""
    going: tuple[Route, ...]
    """The sum from this holder to each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TiedParameter:
    """A parameter that several stages read."""

    holders: tuple[tuple[int, ...], ...]
    """The stages that hold it alike: on the same ranks, in the same layout."""
    blocks: tuple[Block, ...]


def tied_parameters(stages: Sequence[StageBorder]) -> dict[str, TiedParameter]:
    """The trained parameters that several stages read, by name."""
    readers: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        for name, tensor in stage.parameters.items():
            if tensor.carries_gradient:
                readers.setdefault(name, []).append(number)
    return {name: _tied(stages, name, numbers) for name, numbers in sorted(readers.items()) if len(numbers) > 1}


def _tied(stages: Sequence[StageBorder], name: str, readers: Sequence[int]) -> TiedParameter:
    """The tied parameter `name`, which the stages with the numbers `readers` read."""
    tensors = {number: stages[number].parameters[name] for number in readers}
    tensor = tensors[readers[0]]
    alike: dict[tuple[tuple[int, ...], tuple[Box, ...]], list[int]] = {}
    for number, read in tensors.items():
        alike.setdefault((stages[number].ranks, tuple(read.boxes)), []).append(number)
    holders = tuple(tuple(numbers) for numbers in alike.values())
    layouts = [stages[first].layouts(tensors[first]) for first, *_ in holders]
    blocks = []
    for owner, block in enumerate(_blocks(list(tensors.values()), len(holders))):
        parts = [_within(layout, block) for layout in layouts[owner]]

        coming = tuple(
            route_between(tensor, (holder[0], holders[owner][0]), layout, parts)
            for holder, layout in zip(holders, layouts, strict=True)
        )
        going = tuple(
            route_between(tensor, (holders[owner][0], holder[0]), parts, [_within(one, block) for one in layout])
            for holder, layout in zip(holders, layouts, strict=True)
        )
        held = {rank: box for some in parts for rank, box in some.items()}
        blocks.append(Block(box=block, parts=held, coming=coming, going=going))
    return TiedParameter(holders=holders, blocks=tuple(blocks))


def _blocks(tensors: Sequence[StageTensor], count: int) -> Iterator[Box]:
    """At most `count` blocks of a tensor, as equal as possible, along its longest dim that no stage splits, if any."""
    boxes = [box for tensor in tensors for box in tensor.boxes]
    whole = tuple((0, size) for size in tensors[0].shape)
    if not whole:
        yield whole
        return
    dim = max(range(len(whole)), key=lambda d: (all(box[d] == whole[d] for box in boxes), whole[d][1]))
    size = whole[dim][1]
    for number in range(count):
        span = size * number // count, size * (number + 1) // count
        if span[0] < span[1]:
            yield (*whole[:dim], span, *whole[dim + 1 :])


def _within(layout: TensorLayout, block: Box) -> dict[int, Box]:
    """Rank -> the part of a block that it holds, for each rank that holds some of it."""
    parts = {rank: overlap(box, block) for rank, box in layout.items()}
    return {rank: part for rank, part in parts.items() if part is not None}


def add_tied(
    tied: Mapping[str, TiedParameter],
    own: Mapping[int, Mapping[str, Tensor]],
    transfers: PointToPoint,
    box_of: Callable[[int, str], Box],
) -> None:
    """Makes the gradients of this rank those of all stages. Each sum is made once, so that all stages have equal ones.

    Args:
        tied: as `tied_parameters` returns it.
        own: stage of this rank -> parameter -> its gradient, which is changed.
        transfers: the sends and receives of this rank.
        box_of: (stage of this rank, parameter) -> this rank's box of it.
    """
    terms = {
        (name, numbers[0]): sum((own[n][name] for n in numbers[1:]), start=own[numbers[0]][name])
        for name, parameter in tied.items()
        for numbers in parameter.holders
        if numbers[0] in own
    }
    for name, parameter in tied.items():
        for number, block in enumerate(parameter.blocks):
            for route in block.coming:
                key = ("term", name, number, route.maker)
                transfers.post(route, terms.get((name, route.maker)), under=key, sent_under="terms")
    for name, parameter in tied.items():
        for number, block in enumerate(parameter.blocks):
            part, total = block.parts.get(transfers.rank), None
            if part is not None:
                keys = [("term", name, number, route.maker) for route in block.coming]
                first, *others = (transfers.take(key, part, block.coming[0].dtype) for key in keys)
                total = sum(others, start=first)
            for route in block.going:
                transfers.post(route, total, under=("sum", name, number, route.reader), sent_under="sums")
    transfers.settle("terms")  # before the gradients that they are parts of are changed
    for name, parameter in tied.items():
        for numbers in (numbers for numbers in parameter.holders if numbers[0] in own):
            whole = box_of(numbers[0], name)
            for number, block in enumerate(parameter.blocks):
                part = overlap(whole, block.box)
                if part is None:
                    continue
                total = transfers.take(("sum", name, number, numbers[0]), part, block.coming[0].dtype)
                for stage in numbers:
                    own[stage][name][inside(part, whole)].copy_(total)
    transfers.settle("sums")
