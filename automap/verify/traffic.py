"""The collectives of parameters and gradients in a step, counted from the definitions of data parallelism and ZeRO.

A gradient that is partial on an axis is summed over it. ZeRO (arXiv 1910.02054) splits the state of a parameter over
the ranks that hold it whole, whether they work on different samples or repeat each other:

    0   gradients are all-reduced once a step
    1   gradients are scattered once a step; each rank updates its shard; the weights are gathered once a step
    2   gradients are scattered in every micro-batch; the weights are gathered once a step
    3   gradients are scattered, and the weights gathered in the forward and in the backward pass, in every micro-batch

Over several axes the innermost goes first, and an outer one has only the shard that is left; axes of ZeRO go before
others. In every micro-batch each unit has its own gathers and scatters; once a step a parameter is sent once, however
many units read it. Units: elements on one device before or after the collective, whichever are more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from automap.verify.model import Model
from automap.verify.parameters import Held, held_parameters, summed_over
from automap.verify.reading import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The collectives of one kind over one axis for all parameters of a pipeline rank."""

    rank: int
    kind: Literal["all_reduce", "reduce_scatter", "all_gather"]
    axis: str
    what: Literal["weights", "gradients"]
    when: Literal["step", "micro_batch"]
    """How often the collectives run; ZeRO 3 gathers the weights of each unit twice a micro-batch, counted twice."""


def count_traffic(chunks: Sequence[Chunk], model: Model) -> dict[Traffic, float]:
    """The elements of each kind of collective on every device of each pipeline rank.

    Args:
        chunks: the stages of a plan, with every operator placed.
        model: the model of the problem.
    """
    home = {index: chunk for chunk in chunks for index in chunk.operators}
    found: dict[Traffic, float] = defaultdict(float)
    for rank in sorted({chunk.rank for chunk in chunks}):
        operators = [index for chunk in chunks if chunk.rank == rank for index in chunk.operators]
        for name, held in held_parameters(operators, home, model).items():
            for traffic, elements in _of(held, summed_over(name, held, home, model), rank):
                found[traffic] += elements
    return found


def exchanged(chunks: Sequence[Chunk], model: Model) -> dict[tuple[int, int], float]:
    """Two pipeline ranks -> the elements of gradients that they exchange of the parameters which both hold.

    The first rank that reads a parameter exchanges its gradient with each other rank that holds it.
    """
    home = {index: chunk for chunk in chunks for index in chunk.operators}
    ranks = range(max(chunk.rank for chunk in chunks) + 1)
    held = [
        held_parameters([i for chunk in chunks if chunk.rank == rank for i in chunk.operators], home, model)
        for rank in ranks
    ]
    found: dict[tuple[int, int], float] = defaultdict(float)
    for name in dict.fromkeys(name for some in held for name in some):
        readers = [i for i in model.graph.consumers[name] if i in home]
        first = home[min(readers)].rank
        for rank in ranks:
            if rank != first and name in held[rank]:
                found[first, rank] += max(held[first][name].elements, held[rank][name].elements)
    return dict(found)


def _of(held: Held, summed: frozenset[str], rank: int) -> Iterator[tuple[Traffic, float]]:
    """The collectives of one parameter, with their elements."""
    zero, sizes = held.chunk.stage.zero.stage, held.chunk.sizes
    left = held.elements
    for axis in reversed(held.sharded_over):
        when: Literal["step", "micro_batch"] = "micro_batch" if zero >= 2 else "step"
        if axis in summed:
            scatter = Traffic(rank=rank, kind="reduce_scatter", axis=axis, what="gradients", when=when)
            yield scatter, left * (len(held.readers) if zero >= 2 else 1)
        when = "micro_batch" if zero == 3 else "step"
        times = 2 * len(held.readers) if zero == 3 else 1
        yield Traffic(rank=rank, kind="all_gather", axis=axis, what="weights", when=when), times * left
        left /= sizes[axis]
    for axis in reversed(list(sizes)):
        if axis in summed and axis not in held.sharded_over:
            yield Traffic(rank=rank, kind="all_reduce", axis=axis, what="gradients", when="step"), left
            left /= sizes[axis]
