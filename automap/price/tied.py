"""Tied parameters: those that two units read, such as an embedding that is the head as well.

Each rank that needs one holds it, and its gradient is added up between them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from automap.price.layout import Layout
from automap.price.tables import OP_SIGNATURES, S_PLACES, Tables
from automap.problem import Problem
from ir.factors import BROADCAST, PARTIAL

if TYPE_CHECKING:
    from automap.price.choice import Choice, Segment

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class TiedParameters:
    """Those of one problem, and what they cost."""

    def __init__(self, problem: Problem, tables: Tables) -> None:
        self.problem = problem
        self.tables = tables

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

    def homes(self, choice: Choice) -> list[tuple[str, int, Segment, int, Segment]]:
        """Parameters read by two units of the choice: name, rank and segment of the one, of the other."""
        wanted = {unit for _, one, other in self.parameters for unit in (one, other)}
        home: dict[int, tuple[int, Segment]] = {}
        num_ranks = len(choice.layout.stages)
        for number, segments in enumerate(choice.chunks if wanted else ()):
            for segment in segments:
                if segment.unit in wanted:
                    home.setdefault(segment.unit, (number % num_ranks, segment))
        found = []
        there: set[tuple[str, int]] = set()
        for name, one, other in self.parameters:
            if one in home and other in home:
                rank = home[other][0]
                # A rank that has the parameter for an earlier unit holds and reduces it once.
                first = rank if (name, rank) in there else home[one][0]
                there.add((name, rank))
                found.append((name, first, home[one][1], *home[other]))
        return found

    def rows(
        self,
        homes: Sequence[tuple[str, int, Segment, int, Segment]],
        layout: Layout,
        zero_axes: Mask,
        chosen: Ints | None = None,
    ) -> Floats:
        """What `combine` needs of tied parameters; `chosen` [operator rows, axes] replaces the segments' signatures."""
        rows = []
        for name, one, first, other, second in homes:
            elements = float(self.problem.graph.tensors[name].num_elements)
            row = [float(one), float(other)]
            for rank, segment in ((one, first), (other, second)):
                signatures = segment.chosen if chosen is None else chosen[segment.first : segment.last]
                split, zero = self._shard(name, segment, signatures, layout.stages[rank].axes, zero_axes)
                row.append(elements / split)
            row.append(elements / split / zero)
            rows.append([*row, *self._partial(name, second, signatures, layout.stages[other].axes)])
        return np.array(rows, dtype=np.float64).reshape(-1, 5 + len(zero_axes))

    def _shard(self, name: str, segment: Segment, chosen: Ints, axes: Floats, zero_axes: Mask) -> tuple[float, float]:
        """Over how many ranks a parameter is split in a unit, and over how many more ZeRO shards it."""
        tables = self.tables
        operator, slot = self.reader(name, segment.unit)
        split = zero = 1.0
        for a in range(len(axes)):
            signature = int(chosen[operator - segment.first, a])
            row = tables.signatures[tables.operators[operator, OP_SIGNATURES] + signature, S_PLACES] + slot
            # Undecided counts as split, as in the kernel.
            if signature < 0 or tables.places[row, 0] >= 0:
                split *= float(axes[a])
            elif zero_axes[a] and tables.places[row, 0] == BROADCAST:
                zero *= float(axes[a])
        return split, zero

    def _partial(self, name: str, segment: Segment, chosen: Ints, axes: Floats) -> list[float]:
        """[axes] part of a parameter's local gradient that is reduced over each axis in a unit, see C_REDUCE."""
        tables = self.tables
        operator, slot = self.user(name, segment.unit)
        found = [0.0] * len(axes)
        part = 1.0
        for a in reversed(range(len(axes))):
            signature = int(chosen[operator - segment.first, a])
            row = tables.signatures[tables.operators[operator, OP_SIGNATURES] + signature, S_PLACES] + slot
            is_sum = tables.places[row, 0] == BROADCAST and tables.places[row, 1] == PARTIAL
            if signature >= 0 and axes[a] > 1.0 and is_sum:
                found[a] = part
                part /= float(axes[a])
        return found

    def user(self, name: str, unit: int) -> tuple[int, int]:
        """Operator row and input slot that compute with parameter `name`, or with a view of it, in `unit`."""
        where, operators = self.tables.linkage.blocks.units[unit], self.problem.graph.operators
        row, slot = self.reader(name, unit)
        offset = row - int(self.tables.spans[where.type])
        while operators[where.start + offset].is_view:
            made = operators[where.start + offset].outputs[0]
            after = range(offset + 1, where.stop - where.start)
            following = next((k for k in after if made in operators[where.start + k].inputs), None)
            if following is None:
                break
            offset, slot = following, operators[where.start + following].inputs.index(made)
        return int(self.tables.spans[where.type]) + offset, slot

    def reader(self, name: str, unit: int) -> tuple[int, int]:
        """Operator row and input slot that read parameter `name` in `unit`."""
        key = (name, unit)
        if key not in self._readers:
            where = self.tables.linkage.blocks.units[unit]
            for offset in range(where.stop - where.start):
                op = self.problem.graph.operators[where.start + offset]
                if name in op.inputs:
                    self._readers[key] = (int(self.tables.spans[where.type]) + offset, op.inputs.index(name))
                    break
        return self._readers[key]

    @functools.cached_property
    def _readers(self) -> dict[tuple[str, int], tuple[int, int]]:
        return {}
