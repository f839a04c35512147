"""Adapts Megatron's pattern to trainers that shard whole modules, where its signatures split parts of modules."""

from __future__ import annotations

from collections.abc import Sequence

from automap.arrays import Ints
from automap.space.module_limits import (
    CONVOLUTIONS,
    agrees,
    can_run,
    chosen_signatures,
    is_whole,
    layers_of,
    placements_of,
    splits_norm,
    weights_behind,
)
from automap.space.space import PlanSpace
from ir.factors import BROADCAST, Placement, Signature
from ir.graph import Operator
from ir.groups import fused_groups


def for_modules(space: PlanSpace, column: Ints, grain: str) -> Ints:
    """Signatures on one axis, of which those that a trainer cannot run are replaced where possible.

    Groups outside of the repeated units then have all operands and results whole on every rank: that of the
    convolution that makes patches of images, since convolutions are split by no trainer of Megatron's pattern; that of
    a norm between two products of a head, for trainers that split linear layers alone; and those in which code between
    layers would read a tensor in another placement than it has. Inside of the units, tables such as T5's position
    biases are split by columns where all readers need a part of them.

    Args:
        space: the plan space of the model.
        column: [operator rows] signatures; not changed.
        grain: what the trainer splits, see `Target.grain`. Of a trainer that does not shard whole modules, convolutions
            alone are replaced.
    """
    fitting = _Fitting(space, column, grain)
    fitting.leave_whole_what_cannot_run()
    if grain != "operators":
        fitting.align()
    return fitting.column


class _Fitting:
    """Replaces signatures of linkage groups by others that a trainer of whole modules can run."""

    def __init__(self, space: PlanSpace, column: Ints, grain: str) -> None:
        self.space, self.grain = space, grain
        self.graph, self.layers = space.problem.graph, layers_of(space.problem.graph, grain)
        self.column = column.copy()
        types = [unit.type for unit in space.linkage.blocks.units]
        self.once = {kind for kind in types if types.count(kind) == 1}
        self.groups = [_Group(space, unit_type, *rows) for (unit_type, _), rows in space.group_rows.items()]
        attention = [group for group in fused_groups(self.graph) if group.kind == "attention"]
        inside = {self.graph.operators[index].name for group in attention for index in group.members}
        self.around = {
            id(group)
            for group in self.groups
            if group.unit_type in self.once
            and inside.isdisjoint(op.name for op, _ in group.signatures(group.values[0]))
        }
        self.group_of = {row: group for group in self.groups for row in group.members.tolist()}
        spans, units = space.evaluator.tables.spans, space.linkage.blocks.units
        self.row_of = {
            self.graph.operators[index].name: int(spans[unit.type]) + index - unit.start
            for unit in units
            for index in range(unit.start, unit.stop)
        }
        self.done: set[int] = set()

    def leave_whole_what_cannot_run(self) -> None:
        """Replaces groups outside of the repeated units."""
        for group in self.groups:
            if group.unit_type in self.once and not self._all_run(group, self.column[group.members]):
                self._leave_whole(group)

    def align(self) -> None:
        """Replaces groups until no code between layers reads a tensor in another placement than it has; none if groups
        that could be replaced do not suffice."""
        before = self.column.copy()
        while faults := self._unlike():
            ways = (self._follow_readers, self._share, self._leave_readers_whole, self._leave_maker_whole)
            changed = [any(way(name) for way in ways) for name in faults]
            if not any(changed):
                self.column = before
                return

    def _unlike(self) -> list[str]:
        """The tensors that code between layers reads in another placement than they have, and the weights that linear
        layers share and split differently."""
        chosen = dict(chosen_signatures(self.space, self.column))
        found = [name for name in self.graph.tensors if not agrees(self.graph, name, chosen, self.layers, self.grain)]
        weights = self.graph.parameters if self.grain == "linear" else ()
        return found + [weight.name for weight in weights if len(self._wanted(weight.name)) > 1]

    def _wanted(self, name: str) -> set[Placement]:
        """The placements in which operators read a tensor."""
        return {place for op, signature in self._readers(name) for place in placements_of(op, signature, name)}

    def _all_run(self, group: _Group, values: Ints) -> bool:
        return all(not op.is_live or self._allows(op, signature) for op, signature in group.signatures(values))

    def _allows(self, op: Operator, signature: Signature) -> bool:
        if self.grain == "operators":
            return op.kind not in CONVOLUTIONS
        if self.grain == "linear" and splits_norm(self.graph, op, signature):
            return False
        return can_run(self.graph, op, signature, self.layers)

    def _leave_whole(self, group: _Group) -> bool:
        """Gives the group signatures that leave everything whole; returns whether it has any."""
        self.done.add(id(group))
        for values in group.values:
            if all(is_whole(signature) for _, signature in group.signatures(values)):
                self.column[group.members] = values
                return True
        return False

    def _follow_readers(self, name: str) -> bool:
        """Splits a group that has its operands whole as all readers of its result need it; returns whether it did."""
        maker = self.graph.maker(name)
        group = None if maker is None else self.group_of.get(self.row_of.get(maker.name, -1))
        if maker is None or group is None or id(group) in self.done:
            return False
        wanted, now = self._wanted(name), self.column[group.members]
        if len(wanted) != 1 or not all(is_whole(signature) for _, signature in group.signatures(now)):
            return False
        makes = group.members.tolist().index(self.row_of[maker.name])
        for values in group.values:
            signatures = group.signatures(values)
            placed = signatures[makes][1].outputs[maker.outputs.index(name)]
            if placed in wanted and self._all_run(group, values) and self._takes_whole(group, signatures):
                self.column[group.members] = values
                self.done.add(id(group))
                return True
        return False

    def _takes_whole(self, group: _Group, signatures: Sequence[tuple[Operator, Signature]]) -> bool:
        """Whether signatures of a group need the tensors from outside of it whole, except for weights."""
        made = {name for op, _ in signatures for name in op.outputs}
        return all(
            placement == BROADCAST or name in made or any(weights_behind(self.graph, name))
            for op, signature in signatures
            for name, placement in zip(op.inputs, signature.inputs, strict=True)
        )

    def _readers(self, name: str) -> list[tuple[Operator, Signature]]:
        tables, spans = self.space.linkage.types, self.space.evaluator.tables.spans
        types, found = self.space.evaluator.tables.type_of, []
        for index in self.graph.consumers[name]:
            op = self.graph.operators[index]
            if not op.is_constant and op.name in self.row_of:
                row = self.row_of[op.name]
                kind = int(types[row])
                found.append((op, tables[kind].signatures[row - int(spans[kind])][self.column[row]]))
        return found

    def _share(self, name: str) -> bool:
        """Splits a weight in one group as in the others that read it, a head as its table; returns whether it did."""
        if self.graph.tensors[name].role != "parameter":
            return False
        for op, signature in sorted(self._readers(name), key=lambda reader: reader[0].kind == "Gather"):
            group = self.group_of.get(self.row_of[op.name])
            if group is None or id(group) not in self.around or id(group) in self.done:
                continue
            others = self._wanted(name) - {*placements_of(op, signature, name)}
            for values in group.values:
                signatures = group.signatures(values)
                (own,) = (each for each in signatures if each[0].name == op.name)
                splits = others.issuperset(placements_of(*own, name)) and BROADCAST not in others
                if splits and self._all_run(group, values) and self._takes_whole(group, signatures):
                    self.column[group.members] = values
                    self.done.add(id(group))
                    return True
        return False

    def _leave_readers_whole(self, name: str) -> bool:
        """Leaves whole what is outside of the layers and reads a tensor, with all that reads the same weights;
        returns whether something changed."""
        changed, names = False, [name]
        while names:
            for op, _ in self._readers(names.pop()):
                group = self.group_of.get(self.row_of[op.name])
                if group is None or id(group) not in self.around or id(group) in self.done:
                    continue
                changed |= self._leave_whole(group)
                names += [
                    weight
                    for member, _ in group.signatures(self.column[group.members])
                    for operand in member.inputs
                    for weight in {operand, *weights_behind(self.graph, operand)}
                    if any(weights_behind(self.graph, operand)) and weight in self.graph.tensors
                ]
        return changed

    def _leave_maker_whole(self, name: str) -> bool:
        """Leaves whole what makes a tensor outside of the layers; returns whether something changed."""
        maker = self.graph.maker(name)
        group = None if maker is None else self.group_of.get(self.row_of.get(maker.name, -1))
        is_open = group is not None and id(group) in self.around and id(group) not in self.done
        return group is not None and is_open and self._leave_whole(group)


class _Group:
    """A linkage group of the operators of a unit type."""

    def __init__(self, space: PlanSpace, unit_type: int, members: Ints, values: Ints) -> None:
        self.unit_type, self.members, self.values = unit_type, members, values
        first = int(space.evaluator.tables.spans[unit_type])
        tables = space.linkage.types[unit_type].signatures
        self._operators = [(space.operator(unit_type, row - first), tables[row - first]) for row in members.tolist()]

    def signatures(self, values: Ints) -> list[tuple[Operator, Signature]]:
        """The operators of the first unit of the type with the signatures of some values, one for each member."""
        return [(op, table[number]) for number, (op, table) in zip(values.tolist(), self._operators, strict=True)]
