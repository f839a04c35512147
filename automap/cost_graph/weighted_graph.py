"""Weighted graphs: a cost graph with every cost times its weight, so that all costs add up to one number.

`WeightedGraph` has tables over classes of values. There are few classes: on three mesh axes a group has up to some
hundred values, but the tensor between two groups has some dozen placements. `Scalars` has tables over the values
themselves, for solvers, when few values remain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.kernels.classes import number_classes

Codes = tuple[Ints, ...]


def classes_of(codes: Ints) -> tuple[Ints, Ints]:
    """[classes] index of the first occurrence of each distinct number in `codes`, [n], in ascending order of the
    numbers; and [n] the class of each number."""
    known, first, classes = np.empty((3, len(codes)), dtype=np.int64)
    count = number_classes(np.ascontiguousarray(codes, dtype=np.int64), known, first, classes)
    return first[:count], classes


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """A cost that depends on the values of two or three distinct nodes, by classes of values.

    With two nodes the cost is `table[codes[0][v0], codes[1][v1]]`. With three nodes it is
    `table[codes[0][v0], codes[2][v2]]`, but 0 where codes[1][v1] = codes[2][v2]; no entry is negative then.
    """

    nodes: tuple[int, ...]
    """Numbers of the nodes, in any order."""
    codes: Codes
    """For each node, [values] class of each value."""
    table: Floats
    """[classes of the first node, classes of the last node] costs."""

    def over(self, left: Sequence[Ints]) -> tuple[tuple[int, ...], Floats]:
        """The nodes, ascending, and the table of costs over the values `left` of each node."""
        codes = [codes[left[n]] for codes, n in zip(self.codes, self.nodes, strict=True)]
        found = self.table[codes[0]][:, codes[-1]]
        if len(codes) == 3:
            found = found[:, None] * (codes[1][:, None] != codes[2])
        order = sorted(range(len(codes)), key=self.nodes.__getitem__)
        return tuple(self.nodes[i] for i in order), found.transpose(order)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scalars:
    """A weighted graph with tables over values, as the input of a solver."""

    constant: float
    """Sum of the costs that depend on no node."""
    nodes: tuple[Floats, ...]
    """For each node, [values] cost of each value."""
    factors: tuple[tuple[tuple[int, ...], Floats], ...]
    """For each factor its distinct nodes, ascending, and the table of costs over their values."""

    def value(self, picked: Sequence[int]) -> float:
        """Cost of an assignment, [nodes] number of the value of each node."""
        total = self.constant + sum(float(costs[v]) for costs, v in zip(self.nodes, picked, strict=True))
        return total + sum(float(table[tuple(picked[n] for n in nodes)]) for nodes, table in self.factors)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedGraph:
    """A weighted graph with tables over classes of values."""

    constant: float
    """Sum of the costs that depend on no node."""
    nodes: tuple[Floats, ...]
    """For each node, [values] cost of each value."""
    terms: tuple[Term, ...]
    """Costs of several nodes; of two nodes there is one term at most."""

    def scalars(self, left: Sequence[Ints]) -> Scalars:
        """The graph over some values of each node."""
        factors: dict[tuple[int, ...], Floats] = {}
        for term in self.terms:
            around, table = term.over(left)
            factors[around] = factors[around] + table if around in factors else table
        nodes = tuple(costs[keep] for costs, keep in zip(self.nodes, left, strict=True))
        return Scalars(constant=self.constant, nodes=nodes, factors=tuple(factors.items()))


@dataclass(frozen=True, slots=True)
class JointClasses:
    """Joint classes: the distinct combinations of several classes of one node's values.

    They are cached, because graphs are weighted many times with the same classes.
    """

    _found: dict[tuple[int, ...], tuple[Codes, Ints, Codes]] = field(default_factory=dict)
    """By the identities of the arrays of classes: these arrays, kept so that their identities stay theirs; and the two
    results of `of`."""

    def of(self, codes: Codes) -> tuple[Ints, Codes]:
        """[values] the joint class of each value; and for each array of `codes`, [joint classes] its class."""
        key = tuple(map(id, codes))
        if key not in self._found:
            joint = np.zeros(len(codes[0]), dtype=np.int64)
            for some in codes:
                joint = joint * (int(some.max()) + 1) + some
                # Joint classes are renumbered at each step, so that the products stay small.
                first, joint = classes_of(joint)
            self._found[key] = codes, joint, tuple(some[first] for some in codes)
        _, joint, parts = self._found[key]
        return joint, parts


class GraphBuilder:
    """Adds up weighted costs.

    Attributes:
        nodes: for each node, [values] its costs so far.
    """

    def __init__(self, nodes: list[Floats], classes: JointClasses) -> None:
        """Starts with the costs of the nodes.

        Args:
            nodes: for each node, [values] its costs; changed.
            classes: cache of joint classes.
        """
        self.nodes = nodes
        self._classes = classes
        self._pairs: dict[tuple[int, int], list[tuple[Ints, Ints, Floats]]] = {}
        self._three: list[Term] = []

    def add(self, nodes: Sequence[int], codes: Codes, table: Floats, *, is_charged: bool = False) -> None:
        """Adds a cost.

        Args:
            nodes: one to three nodes, of which two may be the same.
            codes: for each of them, [values] class of each value.
            table: [classes] of one node; [classes of the first one, classes of the last one] of several.
            is_charged: with three nodes, whether the costs of nodes contain this cost already, so that it is subtracted
                where the term is 0. Two of the nodes must be the same then.
        """
        if not table.any():
            return
        if len(nodes) == 1:
            self.nodes[nodes[0]] += table[codes[0]]
        elif len(nodes) == 2 and nodes[0] == nodes[1]:
            self.nodes[nodes[0]] += table[codes[0], codes[1]]
        elif len(nodes) == 2:
            self._add_pair(nodes, codes, table)
        elif len(set(nodes)) == 3:
            assert not is_charged, "a cost that a node counts already is that of a tensor which it makes itself"
            self._three.append(Term(nodes=tuple(nodes), codes=codes, table=table))
        else:
            self._add_repeated(nodes, codes, table, is_charged)

    def _add_repeated(self, nodes: Sequence[int], codes: Codes, table: Floats, is_charged: bool) -> None:
        """Adds a cost of three nodes of which two are the same, by the joint classes of that node."""
        distinct = list(dict.fromkeys(nodes))
        joints = [self._classes.of(tuple(c for c, n in zip(codes, nodes, strict=True) if n == one)) for one in distinct]
        # [joint classes of the first node, of the second one] the class at each place.
        shape = [len(parts[0]) for _, parts in joints]
        at: list[Ints] = []
        used = [0] * len(distinct)
        for one in nodes:
            number = distinct.index(one)
            part = joints[number][1][used[number]]
            used[number] += 1
            at.append(part.reshape([-1 if i == number else 1 for i in range(len(distinct))]))
        over = np.broadcast_to(table[at[0], at[2]] * ((at[1] != at[2]) - float(is_charged)), shape)
        self.add(distinct, tuple(joint for joint, _ in joints), np.ascontiguousarray(over))

    def _add_pair(self, nodes: Sequence[int], codes: Codes, table: Floats) -> None:
        first, last = nodes
        entry = (codes[0], codes[1], table) if first < last else (codes[1], codes[0], table.T)
        self._pairs.setdefault((min(first, last), max(first, last)), []).append(entry)

    def graph(self, constant: float) -> WeightedGraph:
        """The graph, all tables of two nodes added up.

        Args:
            constant: sum of the costs that depend on no node.
        """
        terms = []
        for nodes, entries in self._pairs.items():
            rows, columns, table = entries[0]
            if len(entries) > 1:
                rows, row_parts = self._classes.of(tuple(row for row, _, _ in entries))
                columns, column_parts = self._classes.of(tuple(column for _, column, _ in entries))
                table = np.zeros((len(row_parts[0]), len(column_parts[0])))
                for (_, _, part), row, column in zip(entries, row_parts, column_parts, strict=True):
                    table += part[row][:, column]
            terms.append(Term(nodes=nodes, codes=(rows, columns), table=table))
        return WeightedGraph(constant=constant, nodes=tuple(self.nodes), terms=(*terms, *self._three))
