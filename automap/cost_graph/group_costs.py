"""Group costs: the cost that each linkage group adds to its unit, and the costs of conversions between groups.

These costs do not depend on cuts, the ZeRO stage or the schedule, and are listed for each recompute mode, so all
skeletons on one mesh share them. See `automap.cost_graph.graph`. A cost is a row of numbers, the fields of
`UnitCostRow`. Units: seconds, bytes, elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from automap.arrays import Floats, Ints, Mask
from automap.cost_graph.factors import Conversion, Exchange, Factor, Saved
from automap.cost_graph.kernels.group_costs import BACK, THERE, Around, GroupValues, bring_back, bring_there, vary
from automap.cost_graph.routes import Copies, Route, Routes, Ways
from automap.price.kernels.array_types import columns_of, numbers_of
from automap.price.kernels.collectives import SUMMED, UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST_DTYPE, UNIT_COST_WIDTH
from automap.price.kernels.records import ATTENTION, INSIDE
from automap.price.kernels.shard_unit import saved_share
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace, Values
from ir.factors import BROADCAST

NO_MEMBERS = np.empty(0, dtype=np.int64)
NO_ASSIGNMENT = np.empty((1, 0), dtype=np.int64)
ALL_COLUMNS = np.arange(UNIT_COST_WIDTH)
SAVED_COLUMNS = np.array(columns_of(UNIT_COST_DTYPE, "live_bytes", "saved_bytes"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One linkage group and its joint values."""

    unit_type: int
    """Unit type of the group."""
    group: int
    """Number of the group in its unit type."""
    values: Ints
    """[values, axes] legal values of the group's slots on all axes."""
    costs: Floats
    """[modes, values, columns] costs that the group adds to a unit of its type under each recompute mode."""


def joint_values(space: PlanSpace, skeleton: Values) -> tuple[Ints, ...]:
    """For each group, [values, axes] legal values of its slots on all axes. Only meshes and samples matter for them."""
    decided = np.array(skeleton, dtype=np.int64)
    return tuple(space.legal_signatures(decided, group) for group in range(len(space.group_rows)))


class GroupCosts:
    """Costs of the groups of all unit types on the devices of one pipeline rank.

    Attributes:
        nodes: the groups in the order of the signature slots.
        first_node: [types + 1] number of the first node of each unit type.
        bases: for each unit type, [modes, columns] cost of a unit with every signature undecided.
        classes: joint classes of the values of the nodes.
        routes: the routes of tensors.
    """

    def __init__(
        self,
        space: PlanSpace,
        legal: Sequence[Ints],
        stage: Stage,
        modes: Sequence[str] = RECOMPUTE_MODES,
        routes: Routes | None = None,
    ) -> None:
        """Builds the nodes; factors are built on first use.

        Args:
            space: the plan space.
            legal: values of each group, see `joint_values`; empty: there are no nodes and no bases.
            stage: mesh, links, hardware and samples.
            modes: recompute modes for which nodes have costs; unless they are all modes, conversions are the only
                factors.
            routes: the routes of tensors under these values, from a stage that has one device on the same axes as this
                one; None: they are computed.
        """
        self.space, self._modes = space, tuple(modes)
        self._tables, self._stage = space.evaluator.tables.arrays, stage
        self._has_rings = float(stage.hardware.ring) > 0.0
        self.routes = routes or Routes(space, legal, alone(stage))
        self.first_node, self.classes = self.routes.first_node, self.routes.joint
        self.bases = self.undecided(self._modes) if legal else np.zeros((0, len(self._modes), UNIT_COST_WIDTH))
        self.nodes = tuple(self._build_nodes(legal)) if legal else ()
        self._factors: dict[tuple[int, int, bool], tuple[Factor, ...]] = {}
        self._brought: dict[tuple[object, ...], Floats] = {}

    def inside(self, unit_type: int) -> tuple[Factor, ...]:
        """Factors between groups of one unit."""
        key = (unit_type, -1, False)
        if key not in self._factors:
            copies = self.routes.copies(unit_type) if len(self._modes) == len(RECOMPUTE_MODES) else ()
            self._factors[key] = (
                *map(self._conversion, self.routes.inside(unit_type)),
                *map(self._saved_copies, copies),
            )
        return self._factors[key]

    def crossing(self, unit_type: int, before: int, opens: bool) -> tuple[Factor, ...]:
        """Factors between a unit and the one before it.

        Args:
            before: type of the unit before it.
            opens: whether the unit is the first of a chunk: a partial tensor is reduced before it is sent.
        """
        key = (unit_type, before, opens)
        if key not in self._factors:
            is_made = before >= 0 and self.space.evaluator.tables.boundary_out[before] >= 0
            self._factors[key] = tuple(self._crossing(unit_type, before, opens)) if is_made else ()
        return self._factors[key]

    def sums(self, unit_type: int, before: int) -> Floats:
        """[values, columns] costs to all-reduce the tensor that crosses into a unit before it is sent, where it is P.

        Args:
            before: type of the unit before it; the values are those of the node there that makes the tensor.
        """
        crossed = self.routes.crossed(before, opens=True)
        found: Floats = self._of_ways(unit_type, crossed, self._modes[:1])[0][crossed.codes]
        return found

    def undecided(self, modes: Sequence[str]) -> Floats:
        """[types, modes, columns] costs of a unit with every signature undecided, under some recompute modes."""
        incoming = np.full((1, len(self.space.axes)), UNKNOWN, dtype=np.int64)
        nothing = GroupValues(NO_MEMBERS, NO_ASSIGNMENT, np.zeros_like(incoming))
        types = range(len(self.space.linkage.types))
        return np.array([self._vary(kind, nothing, incoming, modes)[:, 0, 0] for kind in types])

    def _of_ways(self, unit_type: int, crossed: Ways, modes: Sequence[str]) -> Floats:
        """[modes, ways, columns] additional costs of a unit for each placement of the tensor that crosses into it."""
        unknown = np.full((1, len(self.space.axes)), UNKNOWN, dtype=np.int64)
        nothing = GroupValues(NO_MEMBERS, NO_ASSIGNMENT, np.zeros_like(unknown))
        costs = self._vary(unit_type, nothing, np.concatenate([crossed.placements, unknown]), modes)[:, 0]
        found: Floats = costs[:, :-1] - costs[:, -1:]
        return found

    def _vary(self, unit_type: int, group: GroupValues, incoming: Ints, modes: Sequence[str]) -> Floats:
        """[modes, values, ways, columns] unit costs, see `vary`."""
        first, last = (int(x) for x in self.space.evaluator.tables.spans[unit_type : unit_type + 2])
        masks, numbers = self.space.evaluator.recomputed.distinct(unit_type, tuple(modes))
        out = np.empty((len(masks), len(group.values), len(incoming)), dtype=UNIT_COST_DTYPE)
        crossing = int(self.space.evaluator.tables.boundary_out[unit_type])
        unit = Unit(first, last, np.empty((last - first, len(self.space.axes)), dtype=np.int64))
        vary(self._tables, unit, self._stage, group, Around(masks, incoming, crossing), out)
        found: Floats = numbers_of(out)
        return found if len(masks) == len(numbers) else found[numbers]

    def _build_nodes(self, legal: Sequence[Ints]) -> Iterator[Node]:
        unknown = np.full((1, len(self.space.axes)), UNKNOWN, dtype=np.int64)
        for number, ((unit_type, group), (members, assignment)) in enumerate(self.space.group_rows.items()):
            values = legal[number]
            group_values = GroupValues(members, assignment, values)
            costs = self._vary(unit_type, group_values, unknown, self._modes)[:, :, 0]
            yield Node(unit_type=unit_type, group=group, values=values, costs=costs - self.bases[unit_type][:, None])

    # -- factors ------------------------------------------------------------------------------------------------------

    def _crossing(self, unit_type: int, before: int, opens: bool) -> Iterator[Factor]:
        """Conversions of the tensors that cross into a unit, and the costs of saving these tensors as they cross."""
        yield from map(self._conversion, self.routes.crossing(unit_type, before, opens))
        if len(self._modes) < len(RECOMPUTE_MODES):
            return
        crossed = self.routes.crossed(before, opens=opens)
        yield Saved(
            nodes=(self.routes.maker(before),),
            codes=(crossed.codes,),
            table=np.ascontiguousarray(self._of_ways(unit_type, crossed, self._modes).transpose(1, 0, 2)),
            columns=ALL_COLUMNS,
        )
        yield from self._saved(unit_type, before, opens)

    def _saved(self, unit_type: int, before: int, opens: bool) -> Iterator[Saved]:
        """The cost of the crossing tensor for the backward pass of the unit before, where this unit saves the tensor in
        another placement."""
        found, crossed = self.routes.saved(unit_type), self.routes.crossed(before, opens=opens)
        if found is None or self._saved_share(found[0]) != 1.0:
            return
        row, ways = found
        arrives = np.where(crossed.placements == SUMMED, BROADCAST, crossed.placements)
        came, wanted = arrives[:, None], ways.placements[None]
        unlike = came != wanted
        if self._stage.hardware.regathers > 0.0:
            unlike &= ~((wanted == BROADCAST) & (came >= 0))
        is_kept = unlike[:, :, ~alone(self._stage)].any(axis=2)
        amount = self._bytes(int(self._tables.operands["tensor"][row]), arrives)[:, None] * is_kept
        again = [float(self.space.evaluator.masks(unit_type)[mode].all()) for mode in RECOMPUTE_MODES]
        yield Saved(
            nodes=(self.routes.maker(before), int(self.routes.group_of[self._tables.operands["operator"][row]])),
            codes=(crossed.codes, ways.codes),
            table=amount[:, :, None, None] * (1.0 - np.array(again))[:, None],
            columns=SAVED_COLUMNS[1:],
        )

    def _conversion(self, route: Route) -> Conversion:
        """The conversion of a route, with its costs. Tensors share the tables if they have the same size, the same dim
        of samples, and the same number of experts to which each token goes."""
        arrays, stage, row = self._tables, self._stage, route.row
        tensor, owner = arrays.operands["tensor"][row], arrays.operands["operator"][row]
        is_ring = self._has_rings and int(arrays.kernels["kind"][owner]) in (ATTENTION, INSIDE)
        of_tensor = arrays.tensors[tensor]
        alike = (self._whole_bytes(tensor), int(of_tensor["batch_dim"]), float(of_tensor["copies"]), is_ring)
        ways = (*alike, id(route.sources))
        key: tuple[object, ...] = (*ways, id(route.required))
        if key not in self._brought:
            self._brought[key] = np.empty((len(route.sources), len(route.required), len(THERE)))
            bring_there(arrays, row, route.sources, route.required, stage, self._brought[key])
        there = self._brought[key]
        key = (*ways, id(route.gradients), int(arrays.tensors["has_gradient"][tensor]), route.is_parametric)
        if key not in self._brought:
            self._brought[key] = np.empty((len(route.sources), len(route.gradients), len(BACK)))
            bring_back(arrays, row, route.sources, route.gradients, route.is_parametric, stage, self._brought[key])
        return Conversion(
            nodes=route.nodes,
            codes=route.codes,
            exchange=Exchange(
                there=there, back=self._brought[key], required=route.of_required, gradient=route.of_gradient
            ),
            repeated=route.repeated,
            sums=route.sums,
            is_charged=route.is_charged,
            is_certain=route.is_certain,
        )

    def _saved_copies(self, copies: Copies) -> Saved:
        """The cost of saved copies of one tensor, where equal copies count once."""
        amounts, least = [], []
        for row, (placements, _) in zip(copies.rows, copies.ways, strict=True):
            tensor, share = int(self._tables.operands["tensor"][row]), self._saved_share(row)
            amounts.append(share * self._bytes(tensor, placements))
            split = np.full((1, placements.shape[1]), UNKNOWN, dtype=np.int64)
            least.append(share * float(self._bytes(tensor, split)[0]))
        alike = copies.may_be_alike & (amounts[0][:, None] == amounts[1][None])
        # The cost of each node alone contains the bytes that it saves beyond the smallest copy that must be saved.
        amount = np.where(alike, min(least) - amounts[1][None], min(least))
        return Saved(
            nodes=copies.nodes,
            codes=(copies.ways[0].codes, copies.ways[1].codes),
            table=amount[:, :, None, None] * np.array([[1.0, float(saved)] for saved in copies.is_saved]),
            columns=SAVED_COLUMNS,
        )

    def _bytes(self, tensor: int, placements: Ints) -> Floats:
        """[ways] bytes of a tensor on one rank under each of the placements, [ways, axes]."""
        whole = self._whole_bytes(tensor)
        split = (placements >= 0) | (placements == UNKNOWN)
        found: Floats = whole / np.where(split, self._stage.axes, 1.0).prod(axis=1)
        return found

    def _whole_bytes(self, tensor: int) -> float:
        """Bytes of a whole tensor."""
        tensors = self._tables.tensors
        elements = tensors["fixed_elements"][tensor] + tensors["elements_per_sample"][tensor] * self._stage.samples
        return float(elements * tensors["element_bytes"][tensor])

    def _saved_share(self, row: int) -> float:
        """Saved bytes of an operand over the bytes of the activation."""
        operand = self._tables.operands[row]
        return float(saved_share(operand, self._tables.kernels[operand["operator"]], self._stage.hardware))


def alone(stage: Stage) -> Mask:
    """[axes] whether an axis of a stage has a single device."""
    found: Mask = stage.axes <= 1.0
    return found
