"""Tied parameters: those that two units read, such as an embedding that is the head as well.

Each rank that needs one holds it, and its gradient is added up between them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from automap.price.layout import Layout
from automap.price.tables import Tables
from automap.price.ties import E_HELD, E_REDUCE, T_COUNT, add_read, begin, read_too
from automap.problem import Problem

if TYPE_CHECKING:
    from automap.price.choice import Choice, Segment

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """A parameter that is read by two units of a choice."""

    name: str
    ranks: tuple[int, int]
    """Of the one and of the other; twice the other's where that has the parameter for an earlier unit anyway."""
    before: tuple[Segment, ...]
    """Units of the other's rank that read it before; of unlike ranks the one unit."""
    other: Segment


class TiedParameters:
    """Those of one problem, and what they cost."""

    def __init__(self, problem: Problem, tables: Tables) -> None:
        self.problem = problem
        self.tables = tables
        self._readers: dict[tuple[str, int], tuple[int, int, int, int]] = {}

    @functools.cached_property
    def parameters(self) -> tuple[tuple[str, int, int], ...]:
        """Parameters that two units read: name, first unit, other unit."""
        graph, readers = self.problem.graph, {}
        unit_of = {}
        for number, unit in enumerate(self.tables.linkage.blocks.units):
            for index in range(unit.start, unit.stop):
                unit_of[index] = number
        found = []
        for tensor in graph.parameters:
            readers = dict.fromkeys(unit_of[i] for i in graph.consumers[tensor.name] if i in unit_of)
            units = list(readers)
            found += [(tensor.name, units[0], other) for other in units[1:]]
        return tuple(found)

    def ties(self, choice: Choice) -> list[Tie]:
        """Parameters read by two units of the choice."""
        wanted = {unit for _, one, other in self.parameters for unit in (one, other)}
        home: dict[int, tuple[int, Segment]] = {}
        num_ranks = len(choice.layout.stages)
        for number, segments in enumerate(choice.chunks if wanted else ()):
            for segment in segments:
                if segment.unit in wanted:
                    home.setdefault(segment.unit, (number % num_ranks, segment))
        found = []
        there: dict[tuple[str, int], list[Segment]] = {}
        for name, one, other in self.parameters:
            if one in home and other in home:
                (first, segment), (rank, second) = home[one], home[other]
                before = [*([segment] if first == rank else []), *there.get((name, rank), [])]
                there.setdefault((name, rank), []).append(second)
                ranks = (rank if before else first, rank)
                found.append(Tie(name=name, ranks=ranks, before=tuple(before or [segment]), other=second))
        return found

    def rows(self, ties: Sequence[Tie], layout: Layout, zero_axes: Mask, chosen: Ints | None = None) -> Floats:
        """What `combine` needs of tied parameters; `chosen` [operator rows, axes] replaces the segments' signatures."""
        rows = np.zeros((len(ties), 3 + E_REDUCE + len(zero_axes)))
        alone, together = (np.empty((len(zero_axes), T_COUNT), dtype=np.int64) for _ in range(2))

        def read(tie: Tie, segment: Segment, reading: Ints) -> None:
            reader = np.array(self.reader(tie.name, segment.unit))
            if chosen is None:
                read_too(self.tables.arrays, reader, segment.first, segment.chosen, reading)
            else:
                read_too(self.tables.arrays, reader, 0, chosen, reading)

        for row, tie in zip(rows, ties, strict=True):
            elements = float(self.problem.graph.tensors[tie.name].num_elements)
            here, there = (layout.stages[rank].axes for rank in tie.ranks)
            row[:2] = tie.ranks
            begin(alone)
            read(tie, tie.other, alone)
            begin(together)
            for segment in tie.before:
                read(tie, segment, together)
            if tie.ranks[0] == tie.ranks[1]:
                add_read(together, elements, there, zero_axes, 1.0, row[3:])
                add_read(alone, elements, there, zero_axes, 1.0, row[3:])
                read(tie, tie.other, together)
                add_read(together, elements, there, zero_axes, -1.0, row[3:])
                continue
            mine, others = (np.zeros(E_REDUCE + len(zero_axes)) for _ in range(2))
            add_read(together, elements, here, zero_axes, 1.0, mine)
            add_read(alone, elements, there, zero_axes, 1.0, others)
            row[2] = max(mine[E_HELD], others[E_HELD])
        return rows

    def reader(self, name: str, unit: int) -> tuple[int, int, int, int]:
        """Operator row and input slot that read a parameter in a unit, and that compute with it or a view of it."""
        if (name, unit) not in self._readers:
            where, operators = self.tables.linkage.blocks.units[unit], self.problem.graph.operators
            base, row = int(self.tables.spans[where.type]), range(where.start, where.stop)
            read = next(i for i in row if name in operators[i].inputs)
            used, seen = read, name
            while operators[used].is_view:
                made = operators[used].outputs[0]
                following = next((i for i in row if i > used and made in operators[i].inputs), None)
                if following is None:
                    break
                used, seen = following, made
            self._readers[name, unit] = (
                base + read - where.start,
                operators[read].inputs.index(name),
                base + used - where.start,
                operators[used].inputs.index(seen),
            )
        return self._readers[name, unit]
