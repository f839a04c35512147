"""Group costs: what each linkage group adds to its unit on the devices of a rank, and what passes between groups.

Nothing here depends on cuts, recomputation, the ZeRO stage or the schedule, so that skeletons on one mesh share it. See
`automap.cost_graph.graph`. Costs are rows of numbers, the fields of `UnitCostRow`. Units: seconds, bytes, elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from automap.arrays import Floats, Ints
from automap.cost_graph.factors import Conversion, Exchange, Factor, Saved
from automap.cost_graph.kernels.group_costs import BACK, THERE, GroupValues, bring_back, bring_there, vary
from automap.cost_graph.weighted_graph import JointClasses
from automap.price.kernels.array_types import Rows, columns_of, numbers_of
from automap.price.kernels.collectives import SUMMED, UNKNOWN
from automap.price.kernels.cost_records import UNIT_COST_DTYPE, UNIT_COST_WIDTH
from automap.price.kernels.records import ATTENTION, BOUNDARY, CARRIED, INSIDE
from automap.price.kernels.shard_unit import saved_share
from automap.price.kernels.stage_records import Stage, Unit
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.space.space import PlanSpace, Values
from ir.factors import BROADCAST, PARTIAL

NO_MEMBERS = np.empty(0, dtype=np.int64)
NO_ASSIGNMENT = np.empty((1, 0), dtype=np.int64)
LARGEST_PLACEMENT = 16
"""Number of placements of a tensor on one axis, counted from UNKNOWN; no tensor has more dims."""
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
    return tuple(space.legal_signatures(skeleton, group) for group in range(len(space.group_rows)))


class GroupCosts:
    """Costs of the groups of all unit types on the devices of one pipeline rank.

    Attributes:
        nodes: the groups in the order of the signature slots.
        first_node: [types + 1] number of the first node of each unit type.
        bases: for each unit type, [modes, columns] cost of a unit with every signature undecided.
        classes: joint classes of the values of the nodes.
    """

    def __init__(
        self, space: PlanSpace, legal: Sequence[Ints], stage: Stage, modes: Sequence[str] = RECOMPUTE_MODES
    ) -> None:
        """Builds the nodes; factors are built on first use.

        Args:
            legal: values of each group, see `joint_values`; none: there are no nodes, and no bases.
            stage: the devices.
            modes: recompute modes for which nodes have costs; without all of them there are conversions alone.
        """
        self.space, self._modes = space, tuple(modes)
        self._tables = tables = space.evaluator.tables.arrays
        # Columns: to read a field of one record after the other takes ten times as long.
        self._operators, self._operands = _columns(tables.operators), _columns(tables.operands)
        self._tensors, self._signatures = _columns(tables.tensors), _columns(tables.signatures)
        self._placement_rows = _columns(tables.placements)
        self._stage = stage
        self.first_node = np.cumsum([0, *(len(u.groups) for u in space.linkage.types)])
        self._group_of = np.full(len(self._tables.operators), -1, dtype=np.int64)
        for (unit_type, group), (members, _) in space.group_rows.items():
            self._group_of[members] = self.first_node[unit_type] + group
        self.bases = self.undecided(self._modes) if legal else np.zeros((0, len(self._modes), UNIT_COST_WIDTH))
        self.nodes = tuple(self._build_nodes(legal)) if legal else ()
        self.classes = JointClasses()
        self._factors: dict[tuple[int, int, bool], tuple[Factor, ...]] = {}
        self._brought: dict[tuple[object, ...], Floats] = {}

    def inside(self, unit_type: int) -> tuple[Factor, ...]:
        """Factors between groups of one unit."""
        key = (unit_type, -1, False)
        if key not in self._factors:
            copies = self._copies(unit_type) if len(self._modes) == len(RECOMPUTE_MODES) else ()
            self._factors[key] = (*self._inside(unit_type), *copies)
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
        """[values, columns] what makes the tensor that crosses into a unit whole before it is sent, where it is a sum.

        Args:
            before: type of the unit before it; the values are those of the node there that makes the tensor.
        """
        placements = self._placements(int(self.space.evaluator.tables.boundary_out[before]))[:, 0]
        ways, codes = _classes(np.where(placements == PARTIAL, SUMMED, placements))
        unknown = np.full((1, len(self.space.axes)), UNKNOWN, dtype=np.int64)
        nothing = GroupValues(NO_MEMBERS, NO_ASSIGNMENT, np.zeros_like(unknown))
        costs = self._vary(unit_type, nothing, np.concatenate([ways, unknown]), self._modes[:1])[0, 0]
        found: Floats = (costs[:-1] - costs[-1:])[codes]
        return found

    def undecided(self, modes: Sequence[str]) -> Floats:
        """[types, modes, columns] costs of a unit with every signature undecided, under some recompute modes."""
        incoming = np.full((1, len(self.space.axes)), UNKNOWN, dtype=np.int64)
        nothing = GroupValues(NO_MEMBERS, NO_ASSIGNMENT, np.zeros_like(incoming))
        types = range(len(self.space.linkage.types))
        return np.array([self._vary(kind, nothing, incoming, modes)[:, 0, 0] for kind in types])

    def _vary(self, unit_type: int, group: GroupValues, incoming: Ints, modes: Sequence[str]) -> Floats:
        """[modes, values, ways, columns] unit costs, see `vary`."""
        first, last = (int(x) for x in self.space.evaluator.tables.spans[unit_type : unit_type + 2])
        masks = np.array([self.space.evaluator.masks(unit_type)[mode] for mode in modes])
        out = np.empty((len(masks), len(group.values), len(incoming)), dtype=UNIT_COST_DTYPE)
        crossing = int(self.space.evaluator.tables.boundary_out[unit_type])
        unit = Unit(first, last, np.empty((last - first, len(self.space.axes)), dtype=np.int64))
        vary(self._tables, unit, self._stage, masks, group, incoming, crossing, out)
        return numbers_of(out)

    # -- nodes --------------------------------------------------------------------------------------------------------

    def _build_nodes(self, legal: Sequence[Ints]) -> Iterator[Node]:
        unknown = np.full((1, len(self.space.axes)), UNKNOWN, dtype=np.int64)
        for number, ((unit_type, group), (members, assignment)) in enumerate(self.space.group_rows.items()):
            values = legal[number]
            group_values = GroupValues(members, assignment, values)
            costs = self._vary(unit_type, group_values, unknown, self._modes)[:, :, 0]
            yield Node(unit_type=unit_type, group=group, values=values, costs=costs - self.bases[unit_type][:, None])

    # -- placements ---------------------------------------------------------------------------------------------------

    def _placements(self, row: int) -> Ints:
        """[values, 2, axes] placements of an operand and of its gradient under each value of its operator's node."""
        owner = int(self._operands["operator"][row])
        node = self.nodes[int(self._group_of[owner])]
        members, assignment = self.space.group_rows[node.unit_type, node.group]
        signatures = assignment[:, int(np.flatnonzero(members == owner)[0])] + self._operators["first_signature"][owner]
        at = self._signatures["first_placement"][signatures] + row - self._operators["first_operand"][owner]
        places = np.stack([self._placement_rows["placement"][at], self._placement_rows["gradient"][at]], axis=1)
        found: Ints = places[node.values].transpose(0, 2, 1).copy()
        if row >= self._operators["first_output"][owner]:
            found[:, 1] = np.where(found[:, 0] == PARTIAL, BROADCAST, found[:, 0])
        alone = self._stage.axes <= 1.0
        found[:, :, alone] = UNKNOWN
        return found

    def _bytes(self, tensor: int, placements: Ints) -> Floats:
        """[ways] bytes of a tensor on one rank under each of the placements, [ways, axes]."""
        whole = self._whole_bytes(tensor)
        split = (placements >= 0) | (placements == UNKNOWN)
        found: Floats = whole / np.where(split, self._stage.axes, 1.0).prod(axis=1)
        return found

    def _whole_bytes(self, tensor: int) -> float:
        """Bytes of a whole tensor."""
        elements = self._tensors["fixed_elements"][tensor]
        elements += self._tensors["elements_per_sample"][tensor] * self._stage.samples
        return float(elements * self._tensors["element_bytes"][tensor])

    # -- factors ------------------------------------------------------------------------------------------------------

    def _operand_rows(self, unit_type: int) -> range:
        first, last = (int(x) for x in self.space.evaluator.tables.spans[unit_type : unit_type + 2])
        return range(int(self._operators["first_operand"][first]), int(self._operators["end"][last - 1]))

    def _role(self, row: int) -> int:
        return int(self._tensors["role"][self._operands["tensor"][row]])

    def _readers(self, unit_type: int, *, enters: bool) -> dict[int, list[int]]:
        """Tensor -> operand rows that read it: of tensors that enter the unit, or of those that its operators make."""
        found: dict[int, list[int]] = {}
        for row in self._operand_rows(unit_type):
            if row < self._operators["first_output"][self._operands["operator"][row]]:
                is_entering = self._role(row) in (BOUNDARY, CARRIED)
                if is_entering if enters else not is_entering and self._operands["maker"][row] >= 0:
                    found.setdefault(int(self._operands["tensor"][row]), []).append(row)
        return found

    def _inside(self, unit_type: int) -> Iterator[Conversion]:
        """Conversions of tensors that one group of a unit makes and another reads."""
        for reading in self._readers(unit_type, enters=False).values():
            made = int(self._operands["maker"][reading[0]])
            yield from self._ways(unit_type, reading, made, self._placements(made)[:, 0], is_inside=True)

    def _crossing(self, unit_type: int, before: int, opens: bool) -> Iterator[Factor]:
        """Conversions of the tensors that cross into a unit, and the cost of saving them as they come."""
        made = int(self.space.evaluator.tables.boundary_out[before])
        maker = int(self._operands["operator"][made])
        placements = self._placements(made)[:, 0]
        crossing = placements
        if opens:
            crossing = np.where(placements == PARTIAL, SUMMED, placements)
            placements = np.where(placements == PARTIAL, BROADCAST, placements)
        for tensor, reading in self._readers(unit_type, enters=True).items():
            arriving = placements
            if self._role(reading[0]) == CARRIED:
                keeps = (placements == UNKNOWN) | (placements == self._tensors["batch_dim"][tensor])
                arriving = np.where(keeps, placements, BROADCAST)
            yield from self._ways(unit_type, reading, made, arriving, is_inside=False)
        if len(self._modes) < len(RECOMPUTE_MODES):
            return
        ways, codes = _classes(crossing)
        unknown = np.full((1, len(self.space.axes)), UNKNOWN, dtype=np.int64)
        nothing = GroupValues(NO_MEMBERS, NO_ASSIGNMENT, np.zeros_like(unknown))
        costs = self._vary(unit_type, nothing, np.concatenate([ways, unknown]), self._modes)[:, 0]
        yield Saved(
            nodes=(int(self._group_of[maker]),),
            codes=(codes,),
            table=np.ascontiguousarray((costs[:, :-1] - costs[:, -1:]).transpose(1, 0, 2)),
            columns=ALL_COLUMNS,
        )

    def _ways(
        self, unit_type: int, reading: list[int], made: int, placements: Ints, *, is_inside: bool
    ) -> Iterator[Conversion]:
        """Conversions of one tensor to the operands that read it, in their order.

        Args:
            reading: operand rows that read the tensor.
            made: operand row of the output that makes it.
            placements: [values, axes] its placement under each value of the node that makes it.
            is_inside: whether an operator of the same unit makes it.
        """
        maker = int(self._operands["operator"][made])
        source = int(self._group_of[maker])
        sources, source_codes = _classes(placements)
        required = [self._placements(row) for row in reading]
        requests, codes = _classes(np.concatenate(required))
        by_row = np.split(codes, np.cumsum([len(a) for a in required])[:-1])
        is_parametric = is_inside and bool(self._operators["is_parametric"][maker])
        masks = self.space.evaluator.masks(unit_type)
        first = int(self.space.evaluator.tables.spans[unit_type])
        before: tuple[int, Ints] | None = None
        for number, (row, code) in enumerate(zip(reading, by_row, strict=True)):
            owner = int(self._operands["operator"][row])
            node = int(self._group_of[owner])
            plain = Conversion(
                nodes=(source, node),
                codes=(source_codes, code),
                exchange=self._exchange(row, sources, requests, is_parametric),
                repeated=np.array(
                    [
                        masks[mode][owner - first] and (not is_inside or masks[mode][maker - first])
                        for mode in RECOMPUTE_MODES
                    ],
                    dtype=np.bool_,
                ),
                sums=(sources == PARTIAL).any(axis=1),
            )
            is_own = is_inside and node == source
            if before is None:
                if not is_own:
                    yield plain
            elif not (is_own and before[0] == node):
                # The reader before it may require the same placement.
                nodes, ways = (source, before[0], node), (source_codes, before[1], code)
                yield replace(plain, nodes=nodes, codes=ways, is_charged=is_own, is_certain=number == 1)
            before = (node, code)

    def _exchange(self, row: int, sources: Ints, requests: Ints, is_parametric: bool) -> Exchange:
        """What brings a tensor to an operand and its gradient back; tensors of one size share the tables.

        Args:
            row: operand row that reads the tensor.
            sources: [ways, axes] placements of the tensor.
            requests: [requests, 2, axes] required placements, and placements in which the gradient is handed back.
            is_parametric: whether it depends on parameters alone, so that a partial gradient stays so.
        """
        arrays, stage = self._tables, self._stage
        tensor, owner = int(self._operands["tensor"][row]), int(self._operands["operator"][row])
        is_ring = bool(stage.hardware.ring > 0.0 and arrays.kernels["kind"][owner] in (ATTENTION, INSIDE))
        size = (self._whole_bytes(tensor), is_ring)
        required, of_required = _classes(np.ascontiguousarray(requests[:, 0]))
        gradients, of_gradient = _classes(np.ascontiguousarray(requests[:, 1]))
        key: tuple[object, ...] = (size, sources.tobytes(), required.tobytes())
        if key not in self._brought:
            self._brought[key] = np.empty((len(sources), len(required), len(THERE)))
            bring_there(arrays, row, sources, required, stage, self._brought[key])
        there = self._brought[key]
        key = (size, sources.tobytes(), gradients.tobytes(), int(self._tensors["has_gradient"][tensor]), is_parametric)
        if key not in self._brought:
            self._brought[key] = np.empty((len(sources), len(gradients), len(BACK)))
            bring_back(arrays, row, sources, gradients, is_parametric, stage, self._brought[key])
        return Exchange(there=there, back=self._brought[key], required=of_required, gradient=of_gradient)

    def _copies(self, unit_type: int) -> Iterator[Saved]:
        """Saved copies of one tensor, of neighbours in the order of reading: counted once where they are alike."""
        first = int(self.space.evaluator.tables.spans[unit_type])
        keeps_results = self.space.problem.trainer.keeps_results
        for row in self._operand_rows(unit_type):
            if not self._operands["is_saved"][row]:
                continue
            earlier = int(self._operands["same_memory"][row])
            while earlier >= 0 and not self._operands["is_saved"][earlier]:
                earlier = int(self._operands["same_memory"][earlier])
            owners = [int(self._operands["operator"][r]) for r in (earlier, row)]
            nodes = [int(self._group_of[owner]) for owner in owners]
            if earlier < 0 or nodes[0] == nodes[1]:
                continue
            found = [_classes(self._placements(r)[:, 0]) for r in (earlier, row)]
            amounts, least = [], []
            for r, (ways, _) in zip((earlier, row), found, strict=True):
                tensor, share = int(self._operands["tensor"][r]), self._saved_share(r)
                amounts.append(share * self._bytes(tensor, ways))
                split = np.full((1, ways.shape[1]), UNKNOWN, dtype=np.int64)
                least.append(share * float(self._bytes(tensor, split)[0]))
            alike = amounts[0][:, None] == amounts[1][None]
            if self._operands["tensor"][earlier] == self._operands["tensor"][row]:
                alike &= (found[0][0][:, None] == found[1][0][None]).all(axis=2)
            # Each node by itself is charged with what it saves beyond the least copy that must be saved.
            amount = np.where(alike, min(least) - amounts[1][None], min(least))
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
                for mask in (self.space.evaluator.masks(unit_type)[mode] for mode in RECOMPUTE_MODES)
            ]
            yield Saved(
                nodes=(nodes[0], nodes[1]),
                codes=(found[0][1], found[1][1]),
                table=amount[:, :, None, None] * np.array([[1.0, float(saved)] for saved in is_saved]),
                columns=SAVED_COLUMNS,
            )

    def _saved_share(self, row: int) -> float:
        """Bytes that are saved of an operand over those of the activation."""
        kernel = self._tables.kernels[self._operands["operator"][row]]
        return float(saved_share(kernel, self._stage.hardware))


def _columns(rows: Rows) -> dict[str, Ints]:
    """The fields of some rows, each as an array."""
    return {name: rows[name] for name in rows.dtype.names or ()}


def _classes(placements: Ints) -> tuple[Ints, Ints]:
    """The distinct ones of some placements, [ways, ...], and [placements] the way of each."""
    flat = placements.reshape(len(placements), -1) - UNKNOWN
    code = flat @ (LARGEST_PLACEMENT ** np.arange(flat.shape[1]))
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return np.ascontiguousarray(placements[first]), inverse.reshape(-1)
