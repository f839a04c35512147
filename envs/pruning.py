"""Pruning: which decisions an agent is asked. Every rule says what it can lose.

- `influential_groups` (lossy): groups that carry little of the model's work and parameters split the batch.
- Legality, forced slots and memory bounds (lossless) are those of `PlanSpace` and `Prefix`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from automap.counting import count_decades
from automap.space import PlanSpace


def influence(space: PlanSpace) -> dict[tuple[int, int], float]:
    """(unit type, group) -> its share of the model's FLOPs and parameters."""
    graph = space.problem.graph
    units = space.linkage.blocks.units
    shares: dict[tuple[int, int], float] = {}
    for unit_type, unit in enumerate(space.linkage.types):
        times = sum(u.type == unit_type for u in units)
        for number, group in enumerate(unit.groups):
            ops = [space.operator(unit_type, m) for m in group.members]
            flops = sum(op.forward_flops.at(1) for op in ops) / max(graph.forward_flops, 1.0)
            weights = sum(
                graph.tensors[n].num_elements for op in ops for n in op.inputs if graph.tensors[n].role == "parameter"
            ) / max(graph.num_parameters, 1)
            shares[unit_type, number] = times * (flops + weights)
    return shares


def influential_groups(space: PlanSpace, limit: int) -> frozenset[tuple[int, int]]:
    """The `limit` linkage groups with the largest share of FLOPs and parameters, as (unit type, group).

    Can lose the optimum only where a group outside the list gains from anything but a batch split.
    """
    shares = influence(space)
    ranked = sorted(shares, key=lambda key: (-shares[key], key))
    return frozenset(ranked[:limit])


def batch_split(space: PlanSpace) -> npt.NDArray[np.int64]:
    """[slots] the value of each signature that splits the batch, -1 where there is none."""
    found = np.full(len(space.slots), -1, dtype=np.int64)
    for number, slot in enumerate(space.slots):
        if slot.kind == "signature":
            unit = space.linkage.types[slot.unit_type]
            leader = unit.groups[slot.group].leader
            rule = space.operator(slot.unit_type, leader).rule
            factors = [signature.factor for signature in unit.signatures[leader]]
            split = [v for v, factor in enumerate(factors) if factor is not None and rule.factors[factor].is_batch]
            found[number] = split[0] if split else -1
    return found


def decades_pruned(space: PlanSpace, *, max_actions: int, max_groups: int) -> float:
    """log10 of the number of plans that `HybridEnv` can reach.

    Of every decision only the first `max_actions` values are offered, and only the `max_groups` most influential groups
    are decided; legality, forced decisions and equal units decided once are already part of the space. Decisions that
    memory bounds mask while a plan is built are still counted.
    """
    return count_decades(space, limit=max_actions, groups=influential_groups(space, max_groups))
