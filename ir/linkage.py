"""Linkage: the operators of a unit whose signatures are decided, and those that follow without a conversion.

In every unit type (see `ir.blocks`) some operators are *leaders*: contractions, embeddings and losses, operators that
read the tensor which crosses into the unit, joins of two groups, and a Dropout of what may be a sum (its signature
decides whether the sum is reduced whole or scattered). Every other operator follows the producer of its first
activation input: for each signature of the leader its own signature is the one that takes its inputs as they are. A
leader with its followers is a linkage group (the word of the Auto-MAP paper). Parameter views follow their consumer.

Computed once a graph; knows nothing of devices.
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
    """Offsets of the operators of attention cores: products of two activations and all between them."""


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

    Beside those of its factor rule, a bias (an Add of one activation and one parameter) has one that passes a partial
    activation on: the parameter is then added on the first rank only.
    """
    found = signatures(op.rule)
    if op.kind != "Add" or len(op.inputs) != 2:
        return found
    carries = [graph.tensors[name].role == "activation" and not _from_view(graph, name) for name in op.inputs]
    if sum(carries) != 1 or any(graph.tensors[name].role == "input" for name in op.inputs):
        return found
    inputs = tuple(PARTIAL if c else BROADCAST for c in carries)
    return (
        *(s for s in found if s.inputs != (PARTIAL, PARTIAL)),
        Signature(factor=None, inputs=inputs, outputs=(PARTIAL,), input_gradients=(BROADCAST, BROADCAST)),
    )


def _from_view(graph: Graph, name: str) -> bool:
    """Whether a tensor depends on parameters or constants only."""
    index = graph.producer.get(name)
    if index is None:
        return False
    producer = graph.operators[index]
    return producer.is_view or producer.is_constant


def link(graph: Graph, blocks: Blocks | None = None) -> Linkage:
    """The linkage of a graph; `blocks` are its units where they are known already."""
    blocks = blocks or find_units(graph)
    types: list[UnitLinkage] = []
    order: dict[int, int] = {}
    for position, unit in enumerate(blocks.units):
        order.setdefault(unit.type, position)
    for kind in range(blocks.num_types):
        position = order[kind]
        unit = blocks.units[position]
        incoming = blocks.units[position - 1].boundary if position else None
        types.append(_link_unit(graph, range(unit.start, unit.stop), incoming, unit.boundary))
    return Linkage(blocks=blocks, types=tuple(types))


def _link_unit(graph: Graph, span: range, incoming: str | None, outgoing: str | None) -> UnitLinkage:
    ops = [graph.operators[i] for i in span]
    tables = [operator_signatures(graph, op) for op in ops]
    producer = {name: k for k, op in enumerate(ops) for name in op.outputs}
    parents = [_activations(graph, op, producer, ops) for op in ops]
    group_of: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    for k, op in enumerate(ops):
        if op.is_view:
            continue
        leaders = {group_of[producer[name]] for name in parents[k]}
        ends_sum = op.kind == "Dropout" and _may_be_sum(tables, producer, op.inputs[0])
        if op.forward_flops.at(1) > 0 or incoming in op.inputs or len(leaders) != 1 or ends_sum:
            group_of[k] = k
        else:
            group_of[k] = group_of[producer[parents[k][0]]]
        members.setdefault(group_of[k], []).append(k)
    for k in range(len(ops) - 1, -1, -1):
        if ops[k].is_view:
            users = [j for j in range(k + 1, len(ops)) if ops[k].outputs[0] in ops[j].inputs and j in group_of]
            group_of[k] = group_of[users[0]] if users else k
            members.setdefault(group_of[k], []).append(k)
    groups = tuple(
        _assign(ops, tables, sorted(members[leader]), leader, parents, producer) for leader in sorted(members)
    )
    return UnitLinkage(
        signatures=tuple(tables),
        groups=groups,
        boundary_in=incoming,
        boundary_out=outgoing,
        core=_core(graph, ops, parents, producer),
    )


def _may_be_sum(tables: Sequence[tuple[Signature, ...]], producer: dict[str, int], name: str) -> bool:
    """Whether some signature of its producer leaves tensor `name` partial."""
    return name in producer and any(PARTIAL in signature.outputs for signature in tables[producer[name]])


def _activations(graph: Graph, op: Operator, producer: dict[str, int], ops: Sequence[Operator]) -> tuple[str, ...]:
    """Names of the inputs that operators of the same unit compute from data."""
    return tuple(name for name in op.inputs if name in producer and not ops[producer[name]].is_view)


def _assign(
    ops: Sequence[Operator],
    tables: Sequence[tuple[Signature, ...]],
    members: list[int],
    leader: int,
    parents: Sequence[tuple[str, ...]],
    producer: dict[str, int],
) -> Group:
    rows = []
    for chosen in range(len(tables[leader])):
        picked = {leader: chosen}
        for k in members:
            if k != leader and not ops[k].is_view:
                picked[k] = _follow(ops, tables, k, parents[k], producer, picked)
        for k in reversed(members):
            if ops[k].is_view:
                picked[k] = _follow_consumer(ops, tables, k, members, picked)
        rows.append(tuple(picked[k] for k in members))
    return Group(leader=leader, members=tuple(members), assignment=tuple(rows))


def _follow(
    ops: Sequence[Operator],
    tables: Sequence[tuple[Signature, ...]],
    k: int,
    inputs: tuple[str, ...],
    producer: dict[str, int],
    picked: dict[int, int],
) -> int:
    """Number of the signature of follower `k` that takes its first activation as it is and most of the others."""

    def given(name: str) -> Placement:
        maker = producer[name]
        return tables[maker][picked[maker]].outputs[ops[maker].outputs.index(name)]

    wanted = [(ops[k].inputs.index(name), given(name)) for name in inputs]
    best, best_score = None, (-1, False, -1)
    for index, signature in enumerate(tables[k]):
        if signature.inputs[wanted[0][0]] != wanted[0][1]:
            continue
        matches = sum(signature.inputs[slot] == placement for slot, placement in wanted)
        # Behind a whole or partial input nothing new is split.
        score = (matches, not signature.divides_work or wanted[0][1] >= 0, -index)
        if score > best_score:
            best, best_score = index, score
    return whole_signature(tables[k]) if best is None else best


def _follow_consumer(
    ops: Sequence[Operator],
    tables: Sequence[tuple[Signature, ...]],
    k: int,
    members: Sequence[int],
    picked: dict[int, int],
) -> int:
    output = ops[k].outputs[0]
    for user in members:
        if user in picked and output in ops[user].inputs:
            placement = tables[user][picked[user]].inputs[ops[user].inputs.index(output)]
            for index, signature in enumerate(tables[k]):
                if signature.outputs[0] == placement:
                    return index
    return whole_signature(tables[k])


def _core(
    graph: Graph, ops: Sequence[Operator], parents: Sequence[tuple[str, ...]], producer: dict[str, int]
) -> tuple[int, ...]:
    """Operators on paths between two products of activations (attention scores and context), both ends included."""
    products = [
        op.forward_flops.at(1) > 0 and sum(graph.tensors[name].role == "activation" for name in parents[k]) >= 2
        for k, op in enumerate(ops)
    ]
    behind = [False] * len(ops)
    for k in range(len(ops)):
        behind[k] = products[k] or any(behind[producer[name]] for name in parents[k])
        if behind[k] and not products[k] and ops[k].forward_flops.at(1) > 0:
            behind[k] = False
    ahead = [False] * len(ops)
    consumers: list[list[int]] = [[] for _ in ops]
    for k in range(len(ops)):
        for name in parents[k]:
            consumers[producer[name]].append(k)
    for k in range(len(ops) - 1, -1, -1):
        ahead[k] = products[k] or (ops[k].forward_flops.at(1) == 0 and any(ahead[j] for j in consumers[k]))
    core = tuple(k for k in range(len(ops)) if behind[k] and ahead[k])
    return core if sum(products) >= 2 else ()
