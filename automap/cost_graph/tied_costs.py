"""Tied parameters in a cost graph: costs that depend on all units which read one parameter.

The price of a unit assumes that no other unit reads its parameters. If several units of a rank read the same parameter,
the rank holds it once. If units of two ranks read it, the ranks sum its gradient (`automap.price.tied_parameters`). The
cost depends on the signatures of all readers: if one requires a part of the parameter and another one the whole, the
rank holds the whole.

So the cost is not a sum over pairs of nodes. It is approximated around one plan by these terms: the change by each
value of one reader; the change by two readers together; and, for three or more readers, the remaining saving where all
of them require the same placement, divided equally among the pairs. The approximation is exact for changes of one
reader, and of two readers if there are no others. Units: elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.factors import Saved
from automap.cost_graph.routes import Routes
from automap.cost_graph.unit_rows import EXCHANGED, UnitRows
from automap.price.kernels.array_types import columns_of
from automap.price.kernels.cost_records import UNIT_COST_DTYPE
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace, Values

SHARED = (
    "parameters", "zero_parameters", "reduced", "gathered", "scattered", "frozen", "zero_frozen", "gathered_frozen",
)  # fmt: skip
"""Fields of `TiedShareRow`, of the same names in a unit cost."""
COLUMNS = np.array([*columns_of(UNIT_COST_DTYPE, *SHARED), EXCHANGED], dtype=np.int64)
"""Columns of the costs of tied parameters."""

MOST_PAIRS = 64
"""Largest number of pairs of classes of two readers that are all counted (assumed)."""
MOST_TOGETHER = 1_024
"""Largest number of classes of all readers together that require one placement and are all counted (assumed)."""

Change = tuple[tuple[int, int], ...]
"""A change of a plan: (number of a reader, class of its values) for some readers of a parameter, ascending."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reader:
    """A node of the cost graph that reads a tied parameter."""

    node: int
    codes: Ints
    """[values] class of each value. Values of one class require the same placement and produce the same gradient
    placement."""
    values: Ints
    """[classes, axes] signatures of a value of each class."""
    placements: tuple[bytes, ...]
    """[classes] the placement that is required of the parameter."""


class TiedCosts:
    """Costs of the large tied parameters of a skeleton."""

    def __init__(self, space: PlanSpace, units: UnitRows, routes: Routes) -> None:
        self.space = space
        ties: dict[str, list[int]] = {}
        for number in units.large_ties:
            ties.setdefault(units.ties[number].name, []).append(number)
        self._ties = list(ties.values())
        self._readers = [tuple(self._readers_of(name, units, routes)) for name in ties]

    def _readers_of(self, name: str, units: UnitRows, routes: Routes) -> Iterator[Reader]:
        """The distinct nodes that read a parameter."""
        evaluator, arrays = self.space.evaluator, self.space.evaluator.tables.arrays
        owners, next_readers = arrays.operands["operator"], arrays.operands["next_reader"]
        segments = (s for tie in units.ties if tie.name == name for s in (*tie.before, *tie.others))
        chains: dict[int, list[int]] = {}
        for unit in dict.fromkeys(segment.unit for segment in segments):
            chain = [evaluator.tied.reader(name, unit)]
            # Views of the parameter pass on the gradient of their results.
            while arrays.operators["is_free"][owners[chain[-1]]] and next_readers[chain[-1]] >= 0:
                chain.append(int(next_readers[chain[-1]]))
            nodes = [int(routes.group_of[owners[row]]) for row in chain]
            if nodes[0] >= 0:
                chains.setdefault(nodes[0], [row for row, node in zip(chain, nodes, strict=True) if node == nodes[0]])
        for node, chain in chains.items():
            # An axis with one device on this rank may have several on another one.
            placed = [routes.decided(row) for row in chain]
            _, first, codes = np.unique(
                np.concatenate([some.reshape(len(some), -1) for some in placed], axis=1),
                axis=0,
                return_index=True,
                return_inverse=True,
            )
            required = tuple(one.tobytes() for one in placed[0][first, 0])
            yield Reader(node=node, codes=codes, values=routes.values[node][first], placements=required)

    def around(self, picked: Sequence[int], plan: Values) -> Iterator[tuple[Saved, int]]:
        """The factors around a plan, each with the number of its tie.

        Args:
            picked: [nodes] number of the value of each node in the plan.
            plan: the plan.
        """
        for ties, readers in zip(self._ties, self._readers, strict=True):
            if len(readers) < 2:
                continue
            alone, pairs = self._tables(ties, readers, plan)
            for place, tie in enumerate(ties):
                for reader, table in zip(readers, alone, strict=True):
                    yield _factor((reader,), table[:, place]), tie
                for (one, other), table in pairs.items():
                    if table[:, :, place].any():
                        yield _factor((readers[one], readers[other]), table[:, :, place]), tie

    def _tables(
        self, ties: Sequence[int], readers: Sequence[Reader], plan: Values
    ) -> tuple[list[Floats], dict[tuple[int, int], Floats]]:
        """Differences of costs if readers of one parameter change in a plan.

        Returns:
            For each reader, [classes, ties, `COLUMNS`] the difference if it alone changes to each class; for each pair
            of readers, [classes, classes, ties, `COLUMNS`] the difference if both change, less those of each alone.
        """
        numbers = range(len(readers))
        of_one: list[Change] = [((n, c),) for n in numbers for c in range(len(readers[n].values))]
        of_two = [
            ((one, c), (other, d))
            for one, other in itertools.combinations(numbers, 2)
            for c, d in _paired(readers[one], readers[other])
        ]
        of_all: list[Change] = []
        if len(readers) > 2:
            of_all = [tuple(enumerate(classes)) for classes in _alike(readers)]
        changes: list[Change] = [(), *of_one, *of_two, *of_all]
        cost = dict(zip(changes, self._costs(ties, readers, plan, changes), strict=True))
        base = cost[()]
        alone = [np.array([cost[(n, c),] for c in range(len(readers[n].values))]) - base for n in numbers]
        pairs = {
            (one, other): np.zeros((len(alone[one]), len(alone[other]), *base.shape))
            for one, other in itertools.combinations(numbers, 2)
        }
        for (one, c), (other, d) in of_two:
            pairs[one, other][c, d] = cost[(one, c), (other, d)] - base - alone[one][c] - alone[other][d]
        # If all readers change, the difference beyond the single and paired parts is divided among the pairs.
        rests: dict[tuple[int, int, int, int], list[Floats]] = {}
        for change in of_all:
            its_pairs = [(one, other, c, d) for (one, c), (other, d) in itertools.combinations(change, 2)]
            parts = base + sum(alone[n][c] for n, c in change) + sum(pairs[i, j][c, d] for i, j, c, d in its_pairs)
            for pair in its_pairs:
                rests.setdefault(pair, []).append((cost[change] - parts) / len(its_pairs))
        for (one, other, c, d), shares in rests.items():
            # Several classes of the other readers may require the same placement.
            pairs[one, other][c, d] += np.mean(shares, axis=0)
        return alone, pairs

    def _costs(self, ties: Sequence[int], readers: Sequence[Reader], plan: Values, changes: Sequence[Change]) -> Floats:
        """[changes, ties, `COLUMNS`] costs of ties in a plan after each change.

        If both units are on one rank, the costs are negative: less than those of two parameters. Otherwise they are the
        elements of the all-reduce among the ranks that hold the parameter: the most that one of them holds.
        """
        plans, width = np.tile(np.array(plan, dtype=np.int64), (len(changes), 1)), len(self.space.axes)
        for row, change in zip(plans, changes, strict=True):
            for number, of_class in change:
                at = self.space.first.signature + readers[number].node * width
                row[at : at + width] = readers[number].values[of_class]
        rows = self.space.ties(plans)[:, ties]
        is_one_rank = (rows["rank"] == rows["other_rank"])[:, :, None]
        excess = np.concatenate([rows["excess"][name].reshape(*rows.shape, -1) for name in SHARED], axis=2)
        exchanged = rows["exchanged"].max(axis=1)[:, None, None]
        return np.concatenate([np.where(is_one_rank, -excess, 0.0), np.where(is_one_rank, 0.0, exchanged)], axis=2)


def _paired(one: Reader, other: Reader) -> Iterator[tuple[int, int]]:
    """Pairs of classes for which a difference is computed: all, or, if these are too many, those in which both require
    the same placement."""
    takes_all = len(one.values) * len(other.values) <= MOST_PAIRS
    for c, d in itertools.product(range(len(one.values)), range(len(other.values))):
        if takes_all or one.placements[c] == other.placements[d]:
            yield c, d


def _alike(readers: Sequence[Reader]) -> Iterator[tuple[int, ...]]:
    """Combinations of classes in which all readers require the same placement; if these are too many, those of the
    first classes of each reader."""
    for required in dict.fromkeys(readers[0].placements):
        classes = [[c for c, one in enumerate(reader.placements) if one == required] for reader in readers]
        if math.prod(map(len, classes)) > MOST_TOGETHER:
            classes = [some[:1] for some in classes]
        yield from itertools.product(*classes)


def _factor(readers: Sequence[Reader], table: Floats) -> Saved:
    """The factor of some readers with these costs, [classes, (classes,) `COLUMNS`]."""
    repeated = np.repeat(np.expand_dims(table, -2), len(RECOMPUTE_MODES), axis=-2)
    nodes, codes = tuple(reader.node for reader in readers), tuple(reader.codes for reader in readers)
    return Saved(nodes=nodes, codes=codes, table=repeated, columns=COLUMNS)
