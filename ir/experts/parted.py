"""Merges experts that are separate modules, each of which computes its part of the dispatched slots (DeepSpeed-MoE).

The operators and parameters of all experts are replaced by one of each, with a dim of experts; the concatenation of
their results is removed.
"""

from __future__ import annotations

from ir.experts.dense import Dense
from ir.experts.emit import Layer
from ir.experts.routing import choice
from ir.graph import Graph, Operator
from ir.operators.experts import COMBINE, DISPATCH
from ir.rewrite import Rewrite


class Slots(Layer):
    """A layer whose experts compute all slots, empty ones included, as in the file."""

    @property
    def routed(self) -> int:
        """Number of slots of all experts for one sample."""
        attributes = next(
            dict(op.attributes) for op in self.graph if op.kind == DISPATCH and op.inputs[1] == self.chosen.name
        )
        return int(attributes["num_experts"]) * int(attributes["capacity"])


class Parted(Dense):
    """The rewrite of the experts of one dispatch, found backward from the concatenation of their results."""

    def __init__(self, rewrite: Rewrite, combine: int) -> None:
        """Takes the index of the `Combine` operator, which returns the results to the tokens."""
        graph = rewrite.graph
        joined, chosen, _ = graph.operators[combine].inputs
        found = choice(graph, graph.operators[graph.producer[chosen]])
        assert found is not None  # the indices of a Combine are always those chosen by a router
        super().__init__(Slots(rewrite, *found))
        self.rewrite, self.joined = rewrite, joined

    def follow(self) -> bool:
        """Rewrites the experts if there is one result per expert and all operators are recognised.

        Returns:
            whether the experts were rewritten.
        """
        op = self.graph.maker(self.joined)
        if op is None or op.kind != "Concat" or dict(op.attributes)["axis"] != 0 or len(op.inputs) != self.experts:
            return False
        slots = self._lift(op.inputs)
        if slots is None:
            return False
        self.layer.put(self.graph.producer[self.joined])
        self.rewrite.renamed[self.joined] = slots
        return True

    def _lifted(self, names: tuple[str, ...]) -> str | None:
        return self._parts(names) or super()._lifted(names)

    def _shared(self, names: tuple[str, ...]) -> str | None:
        return None

    def _parts(self, names: tuple[str, ...]) -> str | None:
        """Name of the dispatched slots if `names` are their parts, one per expert and in order; otherwise None."""
        makers = [op for op in map(self.graph.maker, names) if op is not None]
        sources = {op.inputs[0] for op in makers}
        if len(makers) != self.experts or len(sources) != 1:
            return None
        (source,) = sources
        dispatch = self.graph.maker(source)
        while dispatch is not None and dispatch.kind == "Identity":
            dispatch = self.graph.maker(dispatch.inputs[0])
        places = [_place(op, name) for op, name in zip(makers, names, strict=True)]
        is_whole = self.graph.tensors[source].shape[0] == self.experts and places == list(range(self.experts))
        return source if dispatch is not None and dispatch.kind == DISPATCH and is_whole else None


def _place(op: Operator, name: str) -> int | None:
    """Index of the expert whose slots an operator extracts as tensor `name`; None if it does something else."""
    attributes = dict(op.attributes)
    if op.kind == "Split" and attributes["axis"] == 0 and set(attributes["split"]) == {1}:
        return op.outputs.index(name)
    if op.kind == "Slice" and attributes["axes"] == (0,):
        start, stop = attributes["starts"][0], attributes["ends"][0]
        return int(start) if stop == start + 1 else None
    place = attributes.get("indices") if op.kind == "Gather" and attributes.get("axis", 0) == 0 else None
    return place if isinstance(place, int) else None


def joins(graph: Graph) -> list[int]:
    """Indices of the `Combine` operators whose operand concatenates the results of single experts."""
    makers = [(index, graph.maker(op.inputs[0])) for index, op in enumerate(graph.operators) if op.kind == COMBINE]
    return [index for index, maker in makers if maker is not None and maker.kind == "Concat"]
