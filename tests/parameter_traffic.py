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

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from automap.plan import Plan
from automap.problem import Problem
from automap.verify.model import Model
from automap.verify.parameters import Held, held_parameters
from automap.verify.reading import Chunk, place_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The collectives of one kind over one axis for all parameters of a pipeline rank."""

    rank: int
    kind: Literal["all_reduce", "reduce_scatter", "all_gather"]
    axis: str
    what: Literal["weights", "gradients"]
    when: Literal["step", "micro_batch"]
    """How often the collectives run; ZeRO 3 gathers the weights of each unit twice a micro-batch, counted twice."""


class TrafficModel(Model):
    """The model of a problem, and the tensors of its graph that depend on no data."""

    @functools.cached_property
    def of_parameters(self) -> frozenset[str]:
        """Tensors that depend on no data: their gradients are summed over the micro-batches."""
        made = {tensor.name for tensor in self.graph.tensors.values() if tensor.role != "input"}
        made.difference_update(self.graph.producer)
        for op in self.graph.operators:
            if made.issuperset(op.inputs):
                made.update(op.outputs)
        return frozenset(made)


class ParameterTraffic:
    """Counts the traffic of plans of one problem, all of them without faults."""

    def __init__(self, problem: Problem) -> None:
        self._model = TrafficModel(problem)

    def collectives(self, plan: Plan) -> dict[Traffic, float]:
        """The elements of each kind of collective on every device of each pipeline rank."""
        chunks, model = place_chunks(plan, self._model), self._model
        home = {index: chunk for chunk in chunks for index in chunk.operators}
        found: dict[Traffic, float] = defaultdict(float)
        for rank in sorted({chunk.rank for chunk in chunks}):
            operators = [index for chunk in chunks if chunk.rank == rank for index in chunk.operators]
            for name, held in held_parameters(operators, home, model).items():
                for traffic, elements in _of(held, summed_over(name, held, home, model), rank):
                    found[traffic] += elements
        return found

    def exchanged(self, plan: Plan) -> dict[tuple[int, int], float]:
        """Two pipeline ranks -> the elements of gradients that they exchange of the parameters which both hold.

        The first rank that reads a parameter exchanges its gradient with each other rank that holds it.
        """
        chunks, model = place_chunks(plan, self._model), self._model
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


def summed_over(name: str, held: Held, home: Mapping[int, Chunk], model: TrafficModel) -> frozenset[str]:
    """The axes over which the gradient of a parameter must be summed.

    Args:
        name: the parameter.
        held: the parameter on one rank.
        home: see `held_parameters`.
        model: the model of the problem.
    """
    sums = {a for a in held.place for i in held.readers if _leaves_sum(name, i, a, home[i], model)}
    return held.unlike | sums


def _leaves_sum(name: str, index: int, axis: str, chunk: Chunk, model: TrafficModel) -> bool:
    """Whether an operator, or one behind it if it works on parameters alone, leaves a parameter's gradient partial."""
    op, placed = model.graph.operators[index], chunk.placed[index][axis]
    read = {placed.inputs[slot] for slot, given in enumerate(op.inputs) if given == name}
    if read != {"B"}:
        return False
    if op.is_live:
        if model.legal(index)[placed] is not None:
            # The axis splits a factor that the parameter does not have.
            return True
        if "P" in placed.inputs and op.rule.passing != "joint":
            # A product with a partial sum gives a partial gradient; a term that one rank adds has the whole gradient.
            return True
    if not model.of_parameters.issuperset(op.inputs):
        return False
    inside = (i for i in model.graph.consumers[op.outputs[0]] if model.unit_of.get(i) == model.unit_of[index])
    return any(_leaves_sum(op.outputs[0], i, axis, chunk, model) for i in inside)
