"""Routes: the placements of tensors between the linkage group that makes them and the groups that read them.

Each joint value of a group's slots fixes the placements of its tensors. A route lists the distinct placements of one
tensor, called ways, the distinct placements that one reader may require, and which values have which of them. Routes
depend on the legal values and on which axes have a single device, but not on costs. Many meshes have the same routes,
which are then computed once; `automap.cost_graph.group_costs` computes the costs for each mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from automap.arrays import Ints, Mask
from automap.cost_graph.weighted_graph import JointClasses, classes_of
from automap.price.kernels.array_types import Rows
from automap.price.kernels.collectives import SUMMED, UNKNOWN
from automap.price.kernels.records import BOUNDARY, CARRIED
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace
from ir.factors import BROADCAST, PARTIAL

LARGEST_PLACEMENT = 16
"""Number of placements of a tensor on one axis, counted from UNKNOWN; no tensor has more dims."""


class Ways(NamedTuple):
    """Distinct placements of a tensor."""

    placements: Ints
    """[ways, axes] the placements."""
    codes: Ints
    """[values] the way under each value of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One tensor and one reader: an `automap.cost_graph.factors.Conversion` without its costs.

    A request consists of the placement that the reader requires and of the gradient placement that it produces.
    """

    nodes: tuple[int, ...]
    """See `Conversion`."""
    codes: tuple[Ints, ...]
    """See `Conversion`."""
    row: int
    """Operand row that reads the tensor."""
    sources: Ints
    """[ways, axes] placements in which the tensor is made."""
    required: Ints
    """[required placements, axes] the distinct ones of all requests."""
    gradients: Ints
    """[placements of the gradient, axes] the distinct ones of all requests."""
    of_required: Ints
    """[requests] required placement."""
    of_gradient: Ints
    """[requests] placement of the gradient."""
    is_parametric: bool
    """Whether the tensor depends on parameters alone; then a partial gradient is not reduced here."""
    repeated: Mask
    """See `Conversion`."""
    sums: Mask
    """See `Conversion`."""
    is_charged: bool = False
    """See `Conversion`."""
    is_certain: bool = True
    """See `Conversion`."""


class Copies(NamedTuple):
    """Copies of one tensor that two consecutive readers save for the backward pass."""

    rows: tuple[int, int]
    """Operand rows, the earlier one first."""
    nodes: tuple[int, int]
    """The node of each."""
    ways: tuple[Ways, Ways]
    """Placements of each."""
    may_be_alike: Mask
    """[ways of the first, ways of the second] whether copies of equal size are the same memory."""
    is_saved: Mask
    """[modes] whether the copies are saved for the backward pass."""


class Routes:
    """The routes of all tensors under some legal values.

    Attributes:
        values: for each node, [values, axes] legal values of the group's slots.
        first_node: [types + 1] number of the first node of each unit type.
        group_of: [operator rows] number of the node of each operator; -1 = none.
        joint: joint classes of the values of the nodes.
    """

    def __init__(self, space: PlanSpace, values: Sequence[Ints], alone: Mask) -> None:
        """Prepares the computation of routes, each of which is computed at first use.

        Args:
            space: the plan space.
            values: for each group, its legal values.
            alone: [axes] whether an axis has a single device.
        """
        self.space, self.values, self._alone = space, tuple(values), alone
        self._tables = tables = space.evaluator.tables.arrays
        # Whole columns: reading a field of one record after the other takes ten times as long.
        self._operators, self._operands = _columns(tables.operators), _columns(tables.operands)
        self._tensors, self._signatures = _columns(tables.tensors), _columns(tables.signatures)
        self._placement_rows = _columns(tables.placements)
        self.first_node = np.cumsum([0, *(len(u.groups) for u in space.linkage.types)])
        self.group_of = np.full(len(tables.operators), -1, dtype=np.int64)
        for (unit_type, group), (members, _) in space.group_rows.items():
            self.group_of[members] = self.first_node[unit_type] + group
        self._groups = list(space.group_rows.values())
        self.joint = JointClasses()
        self._inside: dict[int, tuple[Route, ...]] = {}
        self._crossing: dict[tuple[int, int, bool], tuple[Route, ...]] = {}
        self._copies: dict[int, tuple[Copies, ...]] = {}
        self._crossed: dict[tuple[int, bool], Ways] = {}
        self._placed: dict[int, Ints] = {}
        self._ways: dict[int, Ways] = {}
        self._alike: dict[tuple[int, bytes], Ints] = {}

    def inside(self, unit_type: int) -> tuple[Route, ...]:
        """Routes of tensors that one group of a unit makes and another one reads."""
        if unit_type not in self._inside:
            self._inside[unit_type] = tuple(self._find_inside(unit_type))
        return self._inside[unit_type]

    def crossing(self, unit_type: int, before: int, opens: bool) -> tuple[Route, ...]:
        """Routes of the tensors that cross into a unit.

        Args:
            before: type of the unit before it, which makes such a tensor.
            opens: whether the unit is the first of a chunk: a partial tensor is reduced before it is sent.
        """
        key = (unit_type, before, opens)
        if key not in self._crossing:
            self._crossing[key] = tuple(self._find_crossing(*key))
        return self._crossing[key]

    def copies(self, unit_type: int) -> tuple[Copies, ...]:
        """Saved copies of one tensor by consecutive readers."""
        if unit_type not in self._copies:
            self._copies[unit_type] = tuple(self._find_copies(unit_type))
        return self._copies[unit_type]

    def saved(self, unit_type: int) -> tuple[int, Ways] | None:
        """The saved operand of a unit that reads the crossing tensor, if the backward pass of the unit before needs
        that too, and its placements; None unless there is exactly one such operand."""
        rows = [row for row in self._operand_rows(unit_type) if self._operands["is_held"][row]]
        tensor = self._operands["tensor"][rows[0]] if rows else -1
        found = [
            row
            for row in self._operand_rows(unit_type)
            if self._operands["is_saved"][row] and self._tensors["root"][self._operands["tensor"][row]] == tensor
        ]
        if len(found) != 1 or self._operands["tensor"][found[0]] != tensor:
            return None
        return found[0], self._ways_of(found[0])

    def maker(self, before: int) -> int:
        """The node that makes the tensor that crosses out of a unit of a type."""
        return int(self.group_of[self._operands["operator"][self.space.evaluator.tables.boundary_out[before]]])

    def crossed(self, before: int, *, opens: bool) -> Ways:
        """Placements of the tensor that crosses out of a unit of a type.

        Args:
            opens: whether it is sent to another chunk; a partial sum is reduced before that.
        """
        if (before, opens) not in self._crossed:
            placements = self.placements(int(self.space.evaluator.tables.boundary_out[before]))[:, 0]
            if opens:
                placements = np.where(placements == PARTIAL, SUMMED, placements)
            self._crossed[before, opens] = _classes(placements)
        return self._crossed[before, opens]

    # -- placements ---------------------------------------------------------------------------------------------------

    def placements(self, row: int) -> Ints:
        """[values, 2, axes] placements of an operand and of its gradient under each value of its operator's node.

        They are UNKNOWN on axes with a single device.
        """
        if row not in self._placed:
            self._placed[row] = self.decided(row)
            self._placed[row][:, :, self._alone] = UNKNOWN
        return self._placed[row]

    def decided(self, row: int) -> Ints:
        """[values, 2, axes] the same on all axes."""
        owner = int(self._operands["operator"][row])
        node = int(self.group_of[owner])
        members, assignment = self._groups[node]
        signatures = assignment[:, int(np.flatnonzero(members == owner)[0])] + self._operators["first_signature"][owner]
        at = self._signatures["first_placement"][signatures] + row - self._operators["first_operand"][owner]
        places = np.stack([self._placement_rows["placement"][at], self._placement_rows["gradient"][at]], axis=1)
        found: Ints = places[self.values[node]].transpose(0, 2, 1).copy()
        if row >= self._operators["first_output"][owner]:
            found[:, 1] = np.where(found[:, 0] == PARTIAL, BROADCAST, found[:, 0])
        return found

    def _ways_of(self, row: int) -> Ways:
        """Distinct placements of an operand."""
        if row not in self._ways:
            self._ways[row] = _classes(self.placements(row)[:, 0])
        return self._ways[row]

    def _shared(self, placements: Ints) -> Ints:
        """An array with these placements that all routes share, so that equal arrays are identical objects."""
        return self._alike.setdefault((placements.shape[1], placements.tobytes()), placements)

    # -- operands -----------------------------------------------------------------------------------------------------

    def _operand_rows(self, unit_type: int) -> range:
        first, last = (int(x) for x in self.space.evaluator.tables.spans[unit_type : unit_type + 2])
        return range(int(self._operators["first_operand"][first]), int(self._operators["end"][last - 1]))

    def _role(self, row: int) -> int:
        return int(self._tensors["role"][self._operands["tensor"][row]])

    def _readers(self, unit_type: int, *, enters: bool) -> dict[int, list[int]]:
        """For each tensor that enters the unit, or else that its operators make, the operand rows that read it."""
        found: dict[int, list[int]] = {}
        for row in self._operand_rows(unit_type):
            if row < self._operators["first_output"][self._operands["operator"][row]]:
                is_entering = self._role(row) in (BOUNDARY, CARRIED)
                if is_entering if enters else not is_entering and self._operands["maker"][row] >= 0:
                    found.setdefault(int(self._operands["tensor"][row]), []).append(row)
        return found

    # -- routes -------------------------------------------------------------------------------------------------------

    def _find_inside(self, unit_type: int) -> Iterator[Route]:
        for reading in self._readers(unit_type, enters=False).values():
            made = int(self._operands["maker"][reading[0]])
            yield from self._of_tensor(unit_type, reading, made, self._ways_of(made), is_inside=True)

    def _find_crossing(self, unit_type: int, before: int, opens: bool) -> Iterator[Route]:
        made = int(self.space.evaluator.tables.boundary_out[before])
        placements = self.placements(made)[:, 0]
        if opens:
            placements = np.where(placements == PARTIAL, BROADCAST, placements)
        for tensor, reading in self._readers(unit_type, enters=True).items():
            arriving = placements
            if self._role(reading[0]) == CARRIED:
                keeps = (placements == UNKNOWN) | (placements == self._tensors["batch_dim"][tensor])
                arriving = np.where(keeps, placements, BROADCAST)
            yield from self._of_tensor(unit_type, reading, made, _classes(arriving), is_inside=False)

    def _of_tensor(
        self, unit_type: int, reading: list[int], made: int, ways: Ways, *, is_inside: bool
    ) -> Iterator[Route]:
        """Routes of one tensor to the operands that read it, in their order.

        Args:
            reading: operand rows that read the tensor.
            made: operand row of the output that makes it.
            ways: its placements under the values of the node that makes it.
            is_inside: whether an operator of the same unit makes it.
        """
        maker = int(self._operands["operator"][made])
        source, sources = int(self.group_of[maker]), self._shared(ways.placements)
        by_row = [self.placements(row) for row in reading]
        requests, codes = _classes(np.concatenate(by_row))
        required, of_required = _classes(np.ascontiguousarray(requests[:, 0]))
        gradients, of_gradient = _classes(np.ascontiguousarray(requests[:, 1]))
        required, gradients, sums = self._shared(required), self._shared(gradients), (sources == PARTIAL).any(axis=1)
        is_parametric = is_inside and bool(self._operators["is_parametric"][maker])
        masks = self.space.evaluator.masks(unit_type)
        first = int(self.space.evaluator.tables.spans[unit_type])
        before: tuple[int, Ints] | None = None
        of_rows = np.split(codes, np.cumsum([len(some) for some in by_row])[:-1])
        for number, (row, code) in enumerate(zip(reading, of_rows, strict=True)):
            owner = int(self._operands["operator"][row])
            node = int(self.group_of[owner])
            repeated = [
                masks[mode][owner - first] and (not is_inside or masks[mode][maker - first]) for mode in RECOMPUTE_MODES
            ]
            plain = Route(
                nodes=(source, node),
                codes=(ways.codes, code),
                row=row,
                sources=sources,
                required=required,
                gradients=gradients,
                of_required=of_required,
                of_gradient=of_gradient,
                is_parametric=is_parametric,
                repeated=np.array(repeated, dtype=np.bool_),
                sums=sums,
            )
            is_own = is_inside and node == source
            if before is None:
                if not is_own:
                    yield plain
            elif not (is_own and before[0] == node):
                # The reader before it may require the same placement.
                nodes, classes = (source, before[0], node), (ways.codes, before[1], code)
                yield replace(plain, nodes=nodes, codes=classes, is_charged=is_own, is_certain=number == 1)
            before = (node, code)

    def _find_copies(self, unit_type: int) -> Iterator[Copies]:
        first = int(self.space.evaluator.tables.spans[unit_type])
        keeps_results = self.space.problem.trainer.keeps_results
        masks = [self.space.evaluator.masks(unit_type)[mode] for mode in RECOMPUTE_MODES]
        for row in self._operand_rows(unit_type):
            if not self._operands["is_saved"][row]:
                continue
            earlier = int(self._operands["same_memory"][row])
            while earlier >= 0 and not self._operands["is_saved"][earlier]:
                earlier = int(self._operands["same_memory"][earlier])
            owners = [int(self._operands["operator"][r]) for r in (earlier, row)]
            nodes = [int(self.group_of[owner]) for owner in owners]
            if earlier < 0 or nodes[0] == nodes[1]:
                continue
            ways = self._ways_of(earlier), self._ways_of(row)
            alike = np.ones((len(ways[0].placements), len(ways[1].placements)), dtype=np.bool_)
            if self._operands["tensor"][earlier] == self._operands["tensor"][row]:
                alike = (ways[0].placements[:, None] == ways[1].placements[None]).all(axis=2)
            keeper = int(self._tensors["producer"][self._tensors["root"][self._operands["tensor"][row]]])
            is_saved = [
                all(
                    not (
                        (mask[owner - first] or (keeps_results and mask.any()))
                        and keeper >= first
                        and mask[keeper - first]
                    )
                    for owner in owners
                )
                and not (mask.all() and self._role(row) in (BOUNDARY, CARRIED))
                for mask in masks
            ]
            yield Copies((earlier, row), (nodes[0], nodes[1]), ways, alike, np.array(is_saved, dtype=np.bool_))


def _columns(rows: Rows) -> dict[str, Ints]:
    """The fields of some rows, each as an array."""
    return {name: rows[name] for name in rows.dtype.names or ()}


def _classes(placements: Ints) -> Ways:
    """The distinct rows of some placements, [values, ...], and the number of the distinct row for each value."""
    flat = placements.reshape(len(placements), -1) - UNKNOWN
    code = flat @ (LARGEST_PLACEMENT ** np.arange(flat.shape[1]))
    first, codes = classes_of(code)
    return Ways(np.ascontiguousarray(placements[first]), codes)
