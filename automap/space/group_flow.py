"""Flow between linkage groups: which group makes a tensor that another group reads, and in which placements.

With it, a decision about one group can be continued by matching decisions about the groups after it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from automap.price.kernels.array_types import Ints, Ints2, Mask, Mask2, tuple_type
from automap.space.space import PlanSpace

NONE, UNKNOWN = -9, -8
"""Placements of a tensor that does not exist, and of one whose placement is not decided yet."""


class GroupFlow(NamedTuple):
    """The dependence of the signatures of linkage groups on each other. Groups are numbered as in `SpaceArrays`."""

    kind: Ints
    """[groups] unit type of each group."""
    is_alone: Mask
    """[groups] whether the unit has no other group."""
    source: Ints
    """[groups] number of the group that makes an input of the group's leader, or -1."""
    required: Ints2
    """[groups, values] placement that the leader requires of this input, or `NONE`."""
    made: Ints2
    """[groups, values of `source`] placement in which this input is made, or `UNKNOWN`."""
    batch: Ints
    """[groups] value that splits the batch, or -1."""
    divides: Mask2
    """[groups, values] whether the signature divides the work among the devices."""


FLOW = tuple_type(GroupFlow)
"""Numba's type of `GroupFlow`."""


def group_flow(space: PlanSpace) -> GroupFlow:
    """The flow between the linkage groups of a space."""
    groups = list(space.group_rows)
    most = max((len(values) for _, values in space.group_rows.values()), default=1)
    flow = GroupFlow(
        kind=np.array([unit_type for unit_type, _ in groups], dtype=np.int64),
        is_alone=np.array([len(space.linkage.types[unit_type].groups) == 1 for unit_type, _ in groups], dtype=np.bool_),
        source=np.full(len(groups), -1, dtype=np.int64),
        required=np.full((len(groups), most), NONE, dtype=np.int64),
        made=np.full((len(groups), most), UNKNOWN, dtype=np.int64),
        batch=np.full(len(groups), -1, dtype=np.int64),
        divides=np.zeros((len(groups), most), dtype=np.bool_),
    )
    for number, (unit_type, group) in enumerate(groups):
        unit = space.linkage.types[unit_type]
        leader = unit.groups[group].leader
        op, table = space.operator(unit_type, leader), unit.signatures[leader]
        source = _source(space, unit_type, leader)
        for value, signature in enumerate(table):
            flow.divides[number, value] = signature.divides_work
            by_batch = signature.factor is not None and op.rule.factors[signature.factor].is_batch
            if by_batch and flow.batch[number] < 0:
                flow.batch[number] = value
            if source is not None:
                flow.required[number, value] = signature.inputs[source[1]]
        if source is None:
            continue
        maker, _, output = source
        other = next(g for g, found in enumerate(unit.groups) if maker in found.members)
        members = unit.groups[other].members
        flow.source[number] = groups.index((unit_type, other))
        # Each group has at most one such input, so its placements are stored at the reader.
        for value, assigned in enumerate(unit.groups[other].assignment):
            flow.made[number, value] = unit.signatures[maker][assigned[members.index(maker)]].outputs[output]
    return flow


def _source(space: PlanSpace, unit_type: int, leader: int) -> tuple[int, int, int] | None:
    """The nearest operator before a leader in its unit that makes one of its inputs, as (maker, input, output)."""
    op = space.operator(unit_type, leader)
    for offset in range(leader - 1, -1, -1):
        maker = space.operator(unit_type, offset)
        shared = [(op.inputs.index(name), i) for i, name in enumerate(maker.outputs) if name in op.inputs]
        if shared and not maker.is_view:
            return (offset, *shared[0])
    return None
