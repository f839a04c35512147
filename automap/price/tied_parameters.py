"""Tied parameters: parameters that two units read, such as an embedding that is the output layer as well.

Each pipeline rank with a unit that reads a tied parameter holds it, and these ranks add up its gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Ints
from automap.price.kernels.array_types import Rows
from automap.price.kernels.cost_records import READING_DTYPE, SHARE_DTYPE, TIE_DTYPE
from automap.price.kernels.tied_parameters import begin, read_too, write_share, write_tie
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.price.tables import Tables
from automap.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Tie:
    """A parameter that two units of a plan read, called the first and the other unit."""

    name: str
    """Name of the parameter."""
    ranks: tuple[int, int]
    """Pipeline ranks of the first and of the other unit. If the rank of the other unit holds the parameter for an
    earlier unit, both are that rank."""
    before: tuple[Segment, ...]
    """If the ranks are equal: earlier units of the rank that read the parameter. Else: all units of the first rank that
    do."""
    others: tuple[Segment, ...]
    """If the ranks are equal: the other unit. Else: all units of the other rank that read the parameter."""


class TiedParameters:
    """The tied parameters of one problem, and what they cost."""

    def __init__(self, problem: Problem, tables: Tables) -> None:
        self.problem = problem
        self.tables = tables
        self._readers: dict[tuple[str, int], int] = {}

    @functools.cached_property
    def parameters(self) -> tuple[tuple[str, int, int], ...]:
        """For each tied parameter and each further unit that reads it: its name, the first unit, the further unit."""
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
        """The ties of a plan."""
        units_of_ties = {unit for _, one, other in self.parameters for unit in (one, other)}
        home: dict[int, tuple[int, Segment]] = {}
        num_ranks = len(lowered.layout.stages)
        for number, segments in enumerate(lowered.chunks if units_of_ties else ()):
            for segment in segments:
                if segment.unit in units_of_ties:
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

    def rows(self, lowered: LoweredPlan, chosen: Ints | None = None, ties: Sequence[Tie] | None = None) -> Rows:
        """Rows of `TieRow` for the tied parameters of a plan.

        Args:
            lowered: the plan.
            chosen: [operators, axes] signatures in place of the plan's.
            ties: the ties of the plan, if they are known.
        """
        ties = self.ties(lowered) if ties is None else ties
        rows = np.zeros(len(ties), dtype=TIE_DTYPE)
        shares = np.empty(3, dtype=SHARE_DTYPE)
        known: dict[tuple[object, ...], Rows] = {}

        def read(name: str, segments: Sequence[Segment]) -> Rows:
            """[axes] the `ReadingRow` of a parameter by some units, computed from that by all but the last of them."""
            key = (name, *map(id, segments))
            if key not in known:
                if len(segments) > 1:
                    known[key] = read(name, segments[:-1]).copy()
                else:
                    known[key] = np.empty(len(lowered.axes), dtype=READING_DTYPE)
                    begin(known[key])
                segment = segments[-1]
                first, signatures = (segment.first, segment.chosen) if chosen is None else (0, chosen)
                read_too(self.tables.arrays, self.reader(name, segment.unit), first, signatures, known[key])
            return known[key]

        names = [found.name for found in ties]
        for row, found in zip(rows, ties, strict=True):
            tensor = self.problem.graph.tensors[found.name]
            elements, is_trained = float(tensor.num_elements), not tensor.frozen
            here, there = (lowered.stages[rank] for rank in found.ranks)
            row.rank, row.other_rank = found.ranks
            row.first = names.index(found.name)
            write_share(read(found.name, found.others), elements, is_trained, there, shares[1])
            write_share(read(found.name, found.before), elements, is_trained, here, shares[0])
            if found.ranks[0] == found.ranks[1]:
                write_share(read(found.name, (*found.before, found.others[0])), elements, is_trained, there, shares[2])
                write_tie(float(len(found.before)), shares, row)
            else:
                row.exchanged = max(float(s.parameters - s.frozen) for s in shares[:2])
        return rows

    def reader(self, name: str, unit: int) -> int:
        """First operand row of a unit's type that reads a parameter."""
        if (name, unit) not in self._readers:
            where, operators = self.tables.linkage.blocks.units[unit], self.problem.graph.operators
            read = next(i for i in range(where.start, where.stop) if name in operators[i].inputs)
            row = int(self.tables.spans[where.type]) + read - where.start
            first = int(self.tables.arrays.operators[row].first_operand)
            self._readers[name, unit] = first + operators[read].inputs.index(name)
        return self._readers[name, unit]
