"""Factors: costs that depend on the values of several linkage groups, by classes of these values.

A factor has one to three nodes; a node may occur more than once. The same factor may add its cost to several unit rows
(`automap.cost_graph.unit_rows`): these rows *pay* it. Units: seconds, bytes.
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
    """[n] number of each row's recompute mode."""


class Worth:
    """Weights of costs for some payers, and the exchanges that have been weighted with them.

    The weight of a column is the objective's increase for one more second, byte or element in it.

    Attributes:
        of_modes: [modes, columns] weights, summed over all paying rows of each recompute mode.
    """

    def __init__(self, of_modes: Floats, before: Worth | None = None) -> None:
        """Stores the weights.

        Args:
            of_modes: [modes, columns] weights, summed over all paying rows of each recompute mode.
            before: earlier weights for the same payers. Its weighted exchanges are reused if the weights of their
                columns have not changed, as from one price of memory to the next.
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
        """[ways, requests] weighted costs of an exchange, computed once for all readers of a tensor.

        Args:
            exchange: the exchange.
            repeated: [modes] whether recomputation repeats it.
        """
        tables = (exchange.there, exchange.back, exchange.required, exchange.gradient)
        key = (*map(id, tables), repeated.tobytes())
        if key not in self._weighed:
            self._weighed[key] = exchange.weighed(self._there + repeated @ self._again, self._back)
        return self._weighed[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """Costs of resharding a tensor from each of its placements, called ways, to meet each of several requests.

    A request consists of the placement that a reader requires and of the gradient placement that the reader produces.
    The forward cost depends on the first of them alone, and the backward cost on the second alone.
    """

    there: Floats
    """[ways, required placements, columns] costs of resharding the tensor, see `THERE`."""
    back: Floats
    """[ways, placements of the gradient, columns] costs of resharding its gradient, see `BACK`."""
    required: Ints
    """[requests] required placement."""
    gradient: Ints
    """[requests] placement of the gradient."""

    def weighed(self, there: Floats, back: Floats) -> Floats:
        """[ways, requests] weighted costs of both passes.

        Args:
            there: weights of the columns of `THERE`.
            back: weights of the columns of `BACK`.
        """
        found: Floats = (self.there @ there)[:, self.required] + (self.back @ back)[:, self.gradient]
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The conversion of one tensor for one reader.

    Let vi be the value of node i. With two nodes, the cost is that of the way codes[0][v0] and the request
    codes[1][v1]. With three nodes, it is that of the way codes[0][v0] and the request codes[2][v2], but 0 if
    codes[1][v1] = codes[2][v2]: the reader before has the same request, and the tensor is converted once.
    """

    nodes: tuple[int, ...]
    """Numbers of the nodes: the maker of the tensor, with three nodes the reader before this one, and the reader."""
    codes: tuple[Ints, ...]
    """For each node, [values] class of each value: of the first node the way, of the others the request."""
    exchange: Exchange
    """The costs."""
    repeated: Mask
    """[modes] whether recomputation repeats the conversion."""
    sums: Mask
    """[ways] whether the tensor is P on some axis where it is made."""
    is_charged: bool = False
    """Whether the last node's own cost contains the conversion; the factor then subtracts it where the cost is 0."""
    is_certain: bool = True
    """Whether the cost is never above the true one. For the third reader of a tensor it may be: the factor does not
    know whether the first reader had the same request."""

    def weighed(self, worth: Worth) -> Floats:
        """[ways, requests] weighted costs, summed over all payers."""
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
    """Costs of one or two groups for activations saved for the backward pass, under each recompute mode."""

    nodes: tuple[int, ...]
    """Numbers of the nodes."""
    codes: tuple[Ints, ...]
    """For each node, [values] class of each value."""
    table: Floats
    """[classes, (classes,) modes, columns] costs."""
    columns: Ints
    """Columns of a unit cost in which the table's columns are."""

    def weighed(self, worth: Worth) -> Floats:
        """[classes, (classes)] weighted costs, summed over all payers."""
        classes = self.table.shape[:-2]
        found: Floats = self.table.reshape(*classes, -1) @ worth.of_modes[:, self.columns].reshape(-1)
        return found

    def add(self, costs: Floats, picked: Sequence[int], mode: int) -> None:
        """Adds the costs of an assignment, [nodes], under a recompute mode to a unit's costs, [columns]."""
        code = tuple(int(codes[picked[n]]) for codes, n in zip(self.codes, self.nodes, strict=True))
        costs[self.columns] += self.table[code][mode]


Factor = Conversion | Saved
