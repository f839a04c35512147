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

from automap.price.kernels.tied_parameters import (
    E_AXES,
    E_HELD,
    T_COUNT,
    TIE_EXCHANGED,
    TIE_OTHER,
    add_read,
    begin,
    read_too,
    tie,
    tie_columns,
)
from automap.price.stage_layout import PipelineLayout
from automap.price.tables import OP_OPERANDS, Tables
from automap.problem import Problem

if TYPE_CHECKING:
    from automap.price.lowered_plan import LoweredPlan, Segment

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
    """Units of the other's rank that read it before; of unlike ranks all units of the one's."""
    others: tuple[Segment, ...]
    """The other unit; of unlike ranks all units of its rank."""


class TiedParameters:
    """Those of one problem, and what they cost."""

    def __init__(self, problem: Problem, tables: Tables) -> None:
        self.problem = problem
        self.tables = tables
        self._readers: dict[tuple[str, int], int] = {}

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

    def ties(self, lowered: LoweredPlan) -> list[Tie]:
        """Parameters read by two units of the choice."""
        wanted = {unit for _, one, other in self.parameters for unit in (one, other)}
        home: dict[int, tuple[int, Segment]] = {}
        num_ranks = len(lowered.layout.stages)
        for number, segments in enumerate(lowered.chunks if wanted else ()):
            for segment in segments:
                if segment.unit in wanted:
                    home.setdefault(segment.unit, (number % num_ranks, segment))
        read = [tie for tie in self.parameters if tie[1] in home and tie[2] in home]
        there: dict[tuple[str, int], dict[int, Segment]] = {}
        for name, *units in read:
            for unit in units:
                rank, segment = home[unit]
                there.setdefault((name, rank), {})[unit] = segment
        found = []
        for name, one, other in read:
            first, rank = home[one][0], home[other][0]
            mine = there[name, rank]
            before = tuple(segment for unit, segment in mine.items() if unit < other)
            if before:
                found.append(Tie(name=name, ranks=(rank, rank), before=before, others=(mine[other],)))
            else:
                firsts, others = tuple(there[name, first].values()), tuple(mine.values())
                found.append(Tie(name=name, ranks=(first, rank), before=firsts, others=others))
        return found

    def rows(self, ties: Sequence[Tie], layout: PipelineLayout, zero_axes: Mask, chosen: Ints | None = None) -> Floats:
        """What `combine` needs of tied parameters; `chosen` [operator rows, axes] replaces the segments' signatures."""
        rows = np.zeros((len(ties), tie_columns(len(zero_axes))))
        alone, together = (np.empty((len(zero_axes), T_COUNT), dtype=np.int64) for _ in range(2))

        def read(found: Tie, segment: Segment, reading: Ints) -> None:
            reader = self.reader(found.name, segment.unit)
            if chosen is None:
                read_too(self.tables.arrays, reader, segment.first, segment.chosen, reading)
            else:
                read_too(self.tables.arrays, reader, 0, chosen, reading)

        for row, found in zip(rows, ties, strict=True):
            elements = float(self.problem.graph.tensors[found.name].num_elements)
            here, there = (layout.stages[rank].axes for rank in found.ranks)
            row[: TIE_OTHER + 1] = found.ranks
            before, other, both = np.zeros((3, E_AXES + 3 * len(zero_axes)))
            begin(alone)
            for segment in found.others:
                read(found, segment, alone)
            add_read(alone, elements, there, zero_axes, other)
            begin(together)
            for segment in found.before:
                read(found, segment, together)
            add_read(together, elements, here, zero_axes, before)
            if found.ranks[0] == found.ranks[1]:
                read(found, found.others[0], together)
                add_read(together, elements, there, zero_axes, both)
                tie(float(len(found.before)), before, other, both, row)
            else:
                row[TIE_EXCHANGED] = max(before[E_HELD], other[E_HELD])
        return rows

    def reader(self, name: str, unit: int) -> int:
        """Operand row of a unit's type that reads a parameter first."""
        if (name, unit) not in self._readers:
            where, operators = self.tables.linkage.blocks.units[unit], self.problem.graph.operators
            read = next(i for i in range(where.start, where.stop) if name in operators[i].inputs)
            row = int(self.tables.spans[where.type]) + read - where.start
            first = int(self.tables.arrays.operators[row, OP_OPERANDS])
            self._readers[name, unit] = first + operators[read].inputs.index(name)
        return self._readers[name, unit]
