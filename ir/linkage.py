"""Linkage: the operators of a unit whose signatures are decided, and those that follow from them without a conversion.

In every unit type (see `ir.blocks`) some operators are *leaders*:

- contractions, embeddings and losses;
- operators that read the tensor which crosses into the unit;
- operators that join two groups;
- operators that expand a tensor which is the same for all samples to a batch;
- a Dropout whose input may be P: its signature decides whether the sum is all-reduced or reduced and scattered.

Every other operator is a follower: it belongs to the group of the producer of its first activation input. For each
signature of the leader, a follower has the signature that requires its inputs in the placements that they have. There
is one exception: a tensor that is P, and that another follower requires whole, is not passed on as P. Views of
parameters follow their consumer. A leader with its followers is a linkage group (a term of the Auto-MAP paper).

The linkage is computed once for each graph and does not depend on devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ir.blocks import Blocks, find_units
from ir.factors import BROADCAST, PARTIAL, Placement, Signature, signatures, whole_signature
from ir.graph import Graph, Operator


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A leader with its followers."""

    leader: int
    """Offset of the leader in the unit."""
    members: tuple[int, ...]
    """Offsets of all operators of the group, the leader among them, ascending."""
    assignment: tuple[tuple[int, ...], ...]
    """Number of the leader's signature -> number of each member's signature, in the order of `members`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitLinkage:
    """The operators of one unit type with their signatures and groups."""

    signatures: tuple[tuple[Signature, ...], ...]
    """Offset in the unit -> signatures of the operator on one mesh axis."""
    groups: tuple[Group, ...]
    """Linkage groups in the order of their leaders."""
    boundary_in: str | None
    """Name (in the representative unit) of the tensor that crosses into the unit."""
    boundary_out: str | None
    """Name of the tensor that crosses out of it."""
    core: tuple[int, ...]
    """Offsets of the operators of attention cores: products of two activations and all operators between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Linkage:
    """Units of a graph and the linkage of each unit type."""

    blocks: Blocks
    types: tuple[UnitLinkage, ...]
    """Linkage by number of the unit type."""

    @property
    def num_groups(self) -> int:
        """Number of linkage groups over all unit types."""
        return sum(len(unit.groups) for unit in self.types)


def operator_signatures(graph: Graph, op: Operator) -> tuple[Signature, ...]:
    """Signatures of `op` on one mesh axis.

    These are the signatures of its factor rule that split the samples by the batch factor or not at all. (If the batch
    could not be traced, see "its batch cannot be traced", a dim with samples may have another factor.) A bias, which is
    an Add of one activation and one parameter, also has a signature from P to P: the parameter is then added on the
    first rank only.
    """
    samples = [graph.tensors[name].batch_dim for name in (*op.inputs, *op.outputs)]
    found = tuple(s for s in signatures(op.rule) if _keeps_samples(op, s, samples))
    if op.kind != "Add" or len(op.inputs) != 2:
        return found
    # Views and constants depend on parameters or constants only.
    makers = [graph.maker(name) for name in op.inputs]
    carries = [maker is not None and maker.is_live for maker in makers]
    if sum(carries) != 1 or any(graph.tensors[name].role == "input" for name in op.inputs):
        return found
    inputs = tuple(PARTIAL if c else BROADCAST for c in carries)
    return (
        *(s for s in found if s.inputs != (PARTIAL, PARTIAL)),
        Signature(factor=None, inputs=inputs, outputs=(PARTIAL,), input_gradients=(BROADCAST, BROADCAST)),
    )


def _keeps_samples(op: Operator, signature: Signature, samples: Sequence[int | None]) -> bool:
    """Whether no factor but the batch splits the dim of an operand that holds the samples."""
    if signature.factor is None or op.rule.factors[signature.factor].is_batch:
        return True
    placements = (*signature.inputs, *signature.outputs)
    return all(dim is None or placement != dim for placement, dim in zip(placements, samples, strict=True))


def link(graph: Graph, blocks: Blocks | None = None) -> Linkage:
    """The linkage of a graph; `blocks` are its units if they are already known."""
    blocks = blocks or find_units(graph)
    types: dict[int, UnitLinkage] = {}
    incoming = None
    for unit in blocks.units:
        if unit.type not in types:
            types[unit.type] = _Unit(graph, range(unit.start, unit.stop)).linkage(incoming, unit.boundary)
        incoming = unit.boundary
    return Linkage(blocks=blocks, types=tuple(types[kind] for kind in range(blocks.num_types)))


class _Unit:
    """One unit: operators by their offset, and for each leader's signature the signatures of its followers."""

    def __init__(self, graph: Graph, span: range) -> None:
        self.graph = graph
        self.ops = [graph.operators[i] for i in span]
        self.tables = [operator_signatures(graph, op) for op in self.ops]
        self.producer = {name: k for k, op in enumerate(self.ops) for name in op.outputs}
        self.parents = [
            tuple(n for n in op.inputs if n in self.producer and not self.ops[self.producer[n]].is_view)
            for op in self.ops
        ]
        """For each operator, names of the inputs that operators of the unit compute from data."""
        self.multiplies = [op.forward_flops.at(1) > 0 for op in self.ops]

    def linkage(self, incoming: str | None, outgoing: str | None) -> UnitLinkage:
        """The groups of the unit, between the tensors that cross into it and out of it."""
        members = self._members(incoming)
        return UnitLinkage(
            signatures=tuple(self.tables),
            groups=tuple(self._group(leader, sorted(members[leader])) for leader in sorted(members)),
            boundary_in=incoming,
            boundary_out=outgoing,
            core=self._core(),
        )

    def _members(self, incoming: str | None) -> dict[int, list[int]]:
        """Leader -> the operators of its group."""
        group_of: dict[int, int] = {}
        members: dict[int, list[int]] = {}
        for k, op in enumerate(self.ops):
            if op.is_view:
                continue
            leaders = {group_of[self.producer[name]] for name in self.parents[k]}
            ends_sum = op.kind == "Dropout" and self._may_be_sum(op.inputs[0])
            leads = self.multiplies[k] or self._looks_up(op) or incoming in op.inputs or len(leaders) != 1
            leads = leads or ends_sum or self._begins_samples(op)
            group_of[k] = k if leads else group_of[self.producer[self.parents[k][0]]]
            members.setdefault(group_of[k], []).append(k)
        for k in range(len(self.ops) - 1, -1, -1):
            if self.ops[k].is_view:
                output = self.ops[k].outputs[0]
                users = (j for j in range(k + 1, len(self.ops)) if output in self.ops[j].inputs and j in group_of)
                group_of[k] = group_of.get(next(users, -1), k)
                members.setdefault(group_of[k], []).append(k)
        return members

    def _looks_up(self, op: Operator) -> bool:
        """Whether an operator looks up rows of a parameter; the indices may be computed."""
        return op.kind == "Gather" and len(op.inputs) > 1 and self.graph.tensors[op.inputs[0]].role == "parameter"

    def _begins_samples(self, op: Operator) -> bool:
        """Whether an operator expands tensors that are the same for all samples, such as a class token, to a batch."""
        tensors = self.graph.tensors
        has_samples = [any(tensors[n].batch_dim is not None for n in names) for names in (op.inputs, op.outputs)]
        return has_samples == [False, True]

    def _may_be_sum(self, name: str) -> bool:
        """Whether a tensor is P under some signature of its producer."""
        return name in self.producer and any(PARTIAL in s.outputs for s in self.tables[self.producer[name]])

    def _group(self, leader: int, members: list[int]) -> Group:
        rows = []
        for chosen in range(len(self.tables[leader])):
            picked = {leader: chosen}
            for k in members:
                if k != leader and not self.ops[k].is_view:
                    picked[k] = self._follow(k, picked)
            for k in reversed(members):
                if self.ops[k].is_view:
                    picked[k] = self._follow_consumer(k, members, picked)
            rows.append(tuple(picked[k] for k in members))
        return Group(leader=leader, members=tuple(members), assignment=tuple(rows))

    def _follow(self, k: int, picked: dict[int, int]) -> int:
        """Number of the signature of follower `k` that requires its first activation, and as many others as possible,
        in the placements that they have."""

        def given(name: str) -> Placement:
            maker = self.producer[name]
            return self.tables[maker][picked[maker]].outputs[self.ops[maker].outputs.index(name)]

        inputs = [(self.ops[k].inputs.index(name), given(name)) for name in self.parents[k]]
        first, placement = inputs[0]
        if placement == PARTIAL and self._is_reduced(self.parents[k][0], picked):
            placement = BROADCAST
        best, best_score = None, (-1, False, -1)
        for index, signature in enumerate(self.tables[k]):
            if signature.inputs[first] != placement:
                continue
            matches = sum(signature.inputs[slot] == required for slot, required in inputs)
            # If the input is B or P, no new dim is split.
            score = (matches, not signature.divides_work or placement >= 0, -index)
            if score > best_score:
                best, best_score = index, score
        return whole_signature(self.tables[k]) if best is None else best

    def _is_reduced(self, name: str, picked: dict[int, int]) -> bool:
        """Whether a follower requires a tensor that is P as B, as the square in a norm does; it is then reduced once
        for all followers."""
        return any(
            operand == name and required == BROADCAST
            for j, index in picked.items()
            for operand, required in zip(self.ops[j].inputs, self.tables[j][index].inputs, strict=True)
        )

    def _follow_consumer(self, k: int, members: Sequence[int], picked: dict[int, int]) -> int:
        """Number of the signature of view `k` whose result is placed as its first decided consumer requires."""
        output = self.ops[k].outputs[0]
        for user in members:
            if user in picked and output in self.ops[user].inputs:
                required = self.tables[user][picked[user]].inputs[self.ops[user].inputs.index(output)]
                for index, signature in enumerate(self.tables[k]):
                    if signature.outputs[0] == required:
                        return index
        return whole_signature(self.tables[k])

    def _core(self) -> tuple[int, ...]:
        """Operators on paths between two products of activations (attention scores and context), with both products."""
        num, tensors = len(self.ops), self.graph.tensors
        products = [
            self.multiplies[k] and sum(tensors[name].role == "activation" for name in self.parents[k]) >= 2
            for k in range(num)
        ]
        behind, ahead = [False] * num, [False] * num
        consumers: list[list[int]] = [[] for _ in self.ops]
        for k in range(num):
            sources = [self.producer[name] for name in self.parents[k]]
            behind[k] = products[k] or (not self.multiplies[k] and any(behind[source] for source in sources))
            for source in sources:
                consumers[source].append(k)
        for k in range(num - 1, -1, -1):
            ahead[k] = products[k] or (not self.multiplies[k] and any(ahead[j] for j in consumers[k]))
        return tuple(k for k in range(num) if behind[k] and ahead[k]) if sum(products) >= 2 else ()
