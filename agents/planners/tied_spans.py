"""Tied parameters of spans: what spans of consecutive units hold of parameters that several units read.

A stage holds such a parameter once, however many of its units read it, and all stages with such a unit add up its
gradient. `agents.planners.span_costs` sums over units; this module knows what these sums count too much. "Span" stands
for [units + 1, units + 1], and entry [i, j] is about the units i to j - 1. Units: elements of parameters.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from agents.planners.kernels.tied_spans import Readers, tied_spans
from automap.arrays import Floats, Ints, Mask
from automap.price.evaluator import Evaluator
from automap.price.kernels.cost_records import MAX_AXES
from automap.price.kernels.stage_records import Stage


class TiedSpans(NamedTuple):
    """What spans hold of tied parameters on one stage."""

    parameters: Floats
    """[4, units + 1, units + 1] what the sums over the units of a span count too much: parameters that a rank holds
    without ZeRO, those that it holds under ZeRO, the frozen ones of the former, and the frozen ones of the latter."""
    reduced: Floats
    """[`MAX_AXES`, units + 1, units + 1] the same of the gradients that are reduced over each axis."""
    gathered: Floats
    """[`MAX_AXES`, units + 1, units + 1] the same of the trained parameters that ZeRO gathers over each axis."""
    exchanged: Floats
    """[tied parameters, units + 1, units + 1] elements of the gradient of each tied parameter on a rank with the span;
    0 where no unit of the span reads it, or where it is not trained."""
    is_shared: Mask
    """[tied parameters, units + 1, units + 1] whether some unit outside of the span reads the parameter."""


class TiedUnits:
    """The units of a model that read tied parameters, with their signatures."""

    def __init__(self, evaluator: Evaluator, chosen: Ints) -> None:
        """Finds the units.

        Args:
            evaluator: evaluator of the problem.
            chosen: [operator rows, axes] signatures of all units of each type.
        """
        self._evaluator, self._chosen = evaluator, chosen
        tied, tensors = evaluator.tied, evaluator.problem.graph.tensors
        readers: dict[str, list[int]] = {}
        for name, one, other in tied.parameters:
            readers.setdefault(name, [one]).append(other)
        in_order = [(name, unit) for name, units in readers.items() for unit in sorted(units)]
        self._readers = Readers(
            first=np.cumsum([0, *map(len, readers.values())]),
            units=np.array([unit for _, unit in in_order], dtype=np.int64),
            rows=np.array([tied.reader(*one) for one in in_order], dtype=np.int64),
            elements=np.array([float(tensors[name].num_elements) for name in readers]),
            trained=np.array([not tensors[name].frozen for name in readers], dtype=np.bool_),
        )

    @functools.cached_property
    def _is_shared(self) -> Mask:
        places, first = np.arange(len(self._evaluator.blocks.units) + 1), self._readers.first
        ends = self._readers.units[first[:-1]], self._readers.units[first[1:] - 1]
        begins_behind, ends_before = (places > ends[0][:, None])[:, :, None], (places <= ends[1][:, None])[:, None]
        return np.asarray(begins_behind | ends_before)

    @property
    def num_parameters(self) -> int:
        """Number of tied parameters."""
        return len(self._readers.elements)

    def spans(self, stage: Stage, zero: int) -> TiedSpans:
        """What spans hold of the parameters.

        Args:
            stage: the stage, with the axes over which ZeRO shards.
            zero: ZeRO stage.
        """
        # Without tied parameters, one zero stands for all spans.
        size = len(self._evaluator.blocks.units) + 1 if self.num_parameters else 1
        excess, exchanged = np.zeros((4 + 2 * MAX_AXES, size, size)), np.zeros((self.num_parameters, size, size))
        tied_spans(
            self._evaluator.tables.arrays,
            self._readers,
            self._chosen,
            stage,
            zero > 0,
            excess,
            exchanged,
        )
        return TiedSpans(excess[:4], excess[4::2], excess[5::2], exchanged, self._is_shared)
