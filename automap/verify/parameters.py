"""The parameters of a pipeline rank: their placements and their readers.

Derived from the plan document and the factor rules alone. Units: elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from automap.verify.model import Model
from automap.verify.reading import Chunk

Place = Mapping[str, str]
"""Axis -> the placement of a tensor, S(i), B or P."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One parameter on one pipeline rank."""

    chunk: Chunk
    """The stage of its last reader; all stages of a rank have one mesh."""
    place: Place
    """Axis of more than one rank -> S(i) or B. The parameter is whole where its readers require unlike placements."""
    unlike: frozenset[str]
    """The axes on which its readers require unlike placements."""
    readers: tuple[int, ...]
    """The first operator of each unit that reads it."""
    elements: float
    """The elements that one device holds without ZeRO."""

    @property
    def sharded_over(self) -> tuple[str, ...]:
        """The axes over which ZeRO shards the parameter, outermost first."""
        axes = self.chunk.stage.zero.axes if self.chunk.stage.zero.stage else ()
        return tuple(axis for axis in self.chunk.sizes if axis in axes and self.place.get(axis) == "B")

    @property
    def shard(self) -> float:
        """The elements that one device holds under ZeRO."""
        return self.elements / math.prod(self.chunk.sizes[axis] for axis in self.sharded_over)


def held_parameters(operators: Iterable[int], home: Mapping[int, Chunk], model: Model) -> dict[str, Held]:
    """The parameters that some operators of one rank read, by name.

    A unit requires a parameter in the placement of the first of its operators that reads it.

    Args:
        operators: the indices of operators of one rank.
        home: operator -> its stage, in which it is placed.
        model: the model of the problem.
    """
    found: dict[str, Held] = {}
    seen: set[tuple[str, int]] = set()
    for index in operators:
        for slot, name in enumerate(model.graph.operators[index].inputs):
            use = name, model.unit_of[index]
            if model.graph.tensors[name].role != "parameter" or use in seen:
                continue
            seen.add(use)
            chunk = home[index]
            live = [axis for axis, size in chunk.sizes.items() if size > 1]
            # A parameter that is read as P is held whole: the first rank reads it, the others read zeros.
            place = {a: chunk.placed[index][a].inputs[slot].replace("P", "B") for a in live}
            unlike: frozenset[str] = frozenset()
            readers: tuple[int, ...] = ()
            if name in found:
                before = found[name]
                unlike, readers = before.unlike | {a for a in live if place[a] != before.place[a]}, before.readers
                place = {a: "B" if a in unlike else p for a, p in place.items()}
            parts = math.prod(chunk.sizes[a] for a, p in place.items() if p.startswith("S"))
            found[name] = Held(
                chunk=chunk,
                place=place,
                unlike=unlike,
                readers=(*readers, index),
                elements=model.graph.tensors[name].num_elements / parts,
            )
    return found
