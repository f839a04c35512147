"""The operators of a unit that each recompute mode recomputes, under the target of a problem."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from automap.arrays import Ints, Mask
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.price.tables import Tables
from automap.problem import Problem
from ir.layers import layer_types, layers_of_modules


class RecomputeMasks:
    """The masks of one problem, each computed at first use."""

    def __init__(self, problem: Problem, tables: Tables) -> None:
        self._graph, self._target = problem.graph, problem.target
        self._tables, self._blocks = tables, tables.linkage.blocks
        self._known: dict[int, Mapping[str, Mask]] = {}
        self._distinct: dict[tuple[int, tuple[str, ...]], tuple[Mask, Ints]] = {}

    def of(self, unit_type: int) -> Mapping[str, Mask]:
        """Recompute mode -> [operators] whether each operator of a unit type is recomputed."""
        if unit_type not in self._known:
            rows = self._tables.rows(unit_type)
            nothing = np.zeros(len(rows), dtype=np.bool_)
            self._known[unit_type] = dict.fromkeys(RECOMPUTE_MODES, nothing)
            if not self.is_frozen(unit_type):
                full = np.full(len(rows), self._runs_whole_again is None or unit_type in self._runs_whole_again)
                if self._target is not None and self._target.grain != "operators":
                    full[self._between_modules(unit_type)] = False
                core = self._tables.core[rows.start : rows.stop].copy()
                self._known[unit_type] = {"none": nothing, "selective": core, "full": full}
        return self._known[unit_type]

    def distinct(self, unit_type: int, modes: tuple[str, ...]) -> tuple[Mask, Ints]:
        """[masks, operators] the distinct masks of some modes, and [modes] the number of each mode's mask.

        Modes may have the same mask: without attention, selective recomputation recomputes nothing.
        """
        key = unit_type, modes
        if key not in self._distinct:
            of_modes = [self.of(unit_type)[mode] for mode in modes]
            found = {mask.tobytes(): mask for mask in of_modes}
            numbers = [list(found).index(mask.tobytes()) for mask in of_modes]
            self._distinct[key] = np.array(list(found.values())), np.array(numbers, dtype=np.int64)
        return self._distinct[key]

    def is_frozen(self, unit_type: int) -> bool:
        """Whether a unit has no backward pass, since nothing in it or before it is trained; it is never recomputed."""
        graph, unit = self._graph, self._blocks.representative(unit_type)
        return not any(graph.runs_backward(op) for op in graph.operators[unit.start : unit.stop] if op.is_live)

    @functools.cached_property
    def _runs_whole_again(self) -> frozenset[int] | None:
        """The types of units that may be recomputed as a whole; None = all."""
        if self._target is None or not self._target.layers_only:
            return None
        is_whole = self._target.grain != "operators"
        return (layers_of_modules if is_whole else layer_types)(self._graph, self._blocks)

    def _between_modules(self, unit_type: int) -> Mask:
        """[operators] whether an operator saves activations and belongs to no module but the whole model.

        Such operators are not recomputed where modules are.
        """
        graph, unit = self._graph, self._blocks.representative(unit_type)
        return np.array(
            [
                not op.scope and op.outputs[0] != graph.outputs[-1] and graph.keeps_activations(op)
                for op in graph.operators[unit.start : unit.stop]
            ]
        )
