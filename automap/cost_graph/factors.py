"""Factors: what several linkage groups cost together, by classes of their values.

A factor has one to three nodes; a node may occur more than once. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.cost_graph.kernels.group_costs import AGAIN, BACK, THERE


class Payers(NamedTuple):
    """Unit rows that pay the same factors."""

    rows: Ints
    """[n] unit rows."""
    modes: Ints
    """[n] number of the recompute mode of each."""


class Worth:
    """What one unit of each cost is worth to some payers, and exchanges that have been weighed by it.

    Attributes:
        of_modes: [modes, columns] worth in all rows of each recompute mode.
    """

    def __init__(self, of_modes: Floats, before: Worth | None = None) -> None:
        """Begins to weigh.

        Args:
            of_modes: [modes, columns] worth in all rows of each recompute mode.
            before: an earlier worth to the same payers. What it has weighed is taken over where only other columns than
                those of exchanges are worth something else, as memory is from one price of it to the next.
        """
        self.of_modes = of_modes
        self._there, self._back = of_modes[:, THERE].sum(axis=0), of_modes[:, BACK].sum(axis=0)
        self._again = of_modes[:, AGAIN]
        self._weighed: dict[tuple[object, ...], Floats] = {}
        if before is not None and all(
            np.array_equal(mine, other)
            for mine, other in ((self._there, before._there), (self._back, before._back), (self._again, before._again))
        ):
            self._weighed = before._weighed

    def weigh(self, exchange: Exchange, repeated: Mask) -> Floats:
        """[ways, requests] costs of an exchange; readers of one tensor share them.

        Args:
            repeated: [modes] whether recomputation repeats the exchange.
        """
        tables = (exchange.there, exchange.back, exchange.required, exchange.gradient)
        key = (*map(id, tables), repeated.tobytes())
        if key not in self._weighed:
            self._weighed[key] = exchange.weighed(self._there + repeated @ self._again, self._back)
        return self._weighed[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Costs of bringing a tensor from each of its placements to each of several requests, and its gradient back.

    A request is a required placement and a placement in which the gradient is handed back. What one of them costs does
    not depend on the other.
    """

    there: Floats
    """[ways, required placements, columns] costs of bringing the tensor, see `THERE`."""
    back: Floats
    """[ways, placements of the gradient, columns] costs of bringing the gradient back, see `BACK`."""
    required: Ints
    """[requests] required placement."""
    gradient: Ints
    """[requests] placement of the gradient."""

    def weighed(self, there: Floats, back: Floats) -> Floats:
        """[ways, requests] costs in all, given what one unit of each column is worth."""
        found: Floats = (self.there @ there)[:, self.required] + (self.back @ back)[:, self.gradient]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The conversions of one tensor to one reader.

    With two nodes the cost is that of the way codes[0][v0] and the request codes[1][v1]. With three nodes it is that of
    codes[0][v0] and codes[2][v2], but 0 where the last node requires the placement that the second one requires:
    codes[1][v1] = codes[2][v2].
    """

    nodes: tuple[int, ...]
    """Numbers of the nodes: that which makes the tensor, the reader before this one, the reader."""
    codes: tuple[Ints, ...]
    """For each node, [values] class of each value: the way of the first one, requests of the others."""
    exchange: Exchange
    """The costs."""
    repeated: Mask
    """[modes] whether recomputation repeats the conversion."""
    sums: Mask
    """[ways] whether the tensor is made as a sum on some axis."""
    is_charged: bool = False
    """Whether the last node's own cost contains the conversion, so that the factor takes it off where it is 0."""
    is_certain: bool = True
    """Whether the cost is never more than the true one: of a third reader of a tensor it is more where that requires
    again what the first one required."""

    def weighed(self, worth: Worth) -> Floats:
        """[ways, requests] costs of all that pay."""
        return worth.weigh(self.exchange, self.repeated)

    def add(self, costs: Floats, picked: Sequence[int], mode: int, share: float = 1.0) -> None:
        """Adds a share of the costs of an assignment, [nodes], under a recompute mode to a unit's costs, [columns]."""
        code = [int(codes[picked[n]]) for codes, n in zip(self.codes, self.nodes, strict=True)]
        if len(code) == 3:
            share *= float(code[1] != code[2]) - self.is_charged
        there = share * self.exchange.there[code[0], self.exchange.required[code[-1]]]
        costs[THERE] += there
        costs[BACK] += share * self.exchange.back[code[0], self.exchange.gradient[code[-1]]]
        if self.repeated[mode]:
            costs[AGAIN] += there


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """What one or two groups cost by what is saved for the backward pass, under each recompute mode."""

    nodes: tuple[int, ...]
    """Numbers of the nodes."""
    codes: tuple[Ints, ...]
    """For each node, [values] class of each value."""
    table: Floats
    """[classes, (classes,) modes, columns] costs."""
    columns: Ints
    """Columns of a unit cost in which the table's columns are."""

    def weighed(self, worth: Worth) -> Floats:
        """[classes, (classes)] costs of all that pay."""
        classes = self.table.shape[:-2]
        found: Floats = self.table.reshape(*classes, -1) @ worth.of_modes[:, self.columns].reshape(-1)
        return found

    def add(self, costs: Floats, picked: Sequence[int], mode: int) -> None:
        """Adds the costs of an assignment, [nodes], under a recompute mode to a unit's costs, [columns]."""
        code = tuple(int(codes[picked[n]]) for codes, n in zip(self.codes, self.nodes, strict=True))
        costs[self.columns] += self.table[code][mode]


Factor = Conversion | Saved
