"""Features: what an agent sees of a plan that is being decided, numbers whose count does not depend on the model.

The features of the state are about the decision at hand, the choices so far with their bounds, the linkage group at
hand, and the cluster. The features of every action say what it means for an operator, or how large the number is that
it chooses. `envs.kernels` lists them.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from automap.bounds.kernels.known_plans import KnownArrays
from automap.bounds.kernels.step_many import EpisodeArrays
from automap.space.decisions import DECISIONS, Decision
from automap.space.group_flow import GroupFlow
from automap.space.space import PlanSpace, Slot
from envs.kernels import (
    CLUSTER,
    GROUP,
    KINDS,
    SIGNATURE,
    Facts,
    write_features,
)
from ir.factors import PARTIAL

GIB = float(1 << 30)
Floats32 = npt.NDArray[np.float32]
Records = npt.NDArray[np.void]


class Features:
    """Features of the plans of one space."""

    def __init__(self, space: PlanSpace, flow: GroupFlow, first_bound_s: float, reference_s: float) -> None:
        """Prepares what does not change.

        Args:
            space: plan space of the problem.
            flow: flow between its linkage groups.
            first_bound_s: lower bound on the step time of every plan, in seconds.
            reference_s: step time of a good plan, in seconds.
        """
        slots, arrays = space.slots, space.arrays
        groups, decisions = list(space.group_rows), {decision.kind: decision for decision in DECISIONS}
        signatures = np.zeros(flow.required.shape, dtype=SIGNATURE)
        for number, key in enumerate(groups):
            _read_signatures(space, signatures[number], *key)
        numbers = np.zeros((len(slots), max(slot.num_values for slot in slots)), dtype=np.float32)
        for number, slot in enumerate(slots):
            amounts = decisions[slot.kind].amounts(space)
            numbers[number, : len(amounts)] = amounts
        self._facts = Facts(
            num_axes=len(space.axes),
            first=space.first,
            global_batch=space.problem.training.global_batch,
            first_bound_s=first_bound_s,
            reference_s=reference_s,
            kind=np.array([KINDS.index(decisions[s.kind].seen_as or s.kind) for s in slots], dtype=np.int64),
            group=np.array([groups.index((s.unit_type, s.group)) if s.group >= 0 else 0 for s in slots]),
            flow=flow,
            ranks=arrays.ranks,
            sizes=arrays.sizes,
            degrees=arrays.degrees,
            middles=arrays.middles,
            micro_batches=arrays.micro_batches,
            virtuals=arrays.virtuals,
            recomputed=space.levels.shares().astype(np.float32),
            place=np.array([_index(decisions[s.kind], s) for s in slots], dtype=np.float32) / np.float32(8.0),
            num_values=np.array([slot.num_values for slot in slots], dtype=np.float32),
            cluster=np.array([_cluster_features(space)], dtype=CLUSTER),
            numbers=numbers,
            groups=np.array([_group_features(space, *key) for key in groups], dtype=GROUP),
            signatures=signatures,
        )

    def write(
        self, episodes: EpisodeArrays, known: KnownArrays, observation: Floats32, mask: npt.NDArray[np.int8]
    ) -> None:
        """Writes the features of every plan; for a complete plan zeros, and every action as allowed.

        Args:
            episodes: the plans.
            known: completions after their legal values.
            observation: [episodes, STATE_FEATURES + actions * ACTION_FEATURES], written.
            mask: [episodes, actions], written: 0 for actions that are illegal, and for those that cannot fit into
                memory unless that is all of them.
        """
        write_features(episodes, known, self._facts, observation, mask)


def _index(decision: Decision, slot: Slot) -> int:
    return slot.index if decision.seen_index is None else decision.seen_index


def _group_features(space: PlanSpace, unit_type: int, number: int) -> tuple[float, ...]:
    """The fields of `GROUP` of a linkage group."""
    graph, units = space.problem.graph, space.linkage.blocks.units
    unit = space.linkage.types[unit_type]
    group = unit.groups[number]
    times = sum(u.type == unit_type for u in units)
    ops = [space.operator(unit_type, m) for m in group.members]
    leader = space.operator(unit_type, group.leader)
    weights = sum(
        graph.tensors[n].num_elements for op in ops for n in op.inputs if graph.tensors[n].role == "parameter"
    )
    return (
        sum(op.forward_flops.at(1) for op in ops) * times / max(graph.forward_flops, 1.0),
        weights * times / max(graph.num_parameters, 1),
        math.log10(max(graph.tensors[leader.outputs[0]].elements.at(1), 1.0)) / 8.0,
        times / len(units),
        len(group.members) / 16.0,
        float(leader.forward_flops.at(1) > 0),
        float(weights > 0),
        len(unit.signatures[group.leader]) / 8.0,
    )


def _cluster_features(space: PlanSpace) -> tuple[float, ...]:
    """The fields of `CLUSTER`."""
    cluster, problem = space.problem.cluster, space.problem
    devices = cluster.num_devices
    kinds = [cluster.devices[host.device] for host in cluster.hosts]
    state_bytes = problem.whole_state_bytes
    return (
        math.log2(devices) / 8.0,
        math.log2(devices / len(cluster.hosts)) / 4.0,
        len({kind.name for kind in kinds}) / 2.0,
        math.log10(min(kind.hbm_bandwidth_GBps for kind in kinds)) / 4.0,
        math.log10(min(cluster.links[host.intra_node_link].bytes_per_s for host in cluster.hosts)) / 12.0,
        state_bytes / (devices * min(kind.memory_GiB for kind in kinds) * GIB),
    )


def _read_signatures(space: PlanSpace, found: Records, unit_type: int, group: int) -> None:
    """Writes what the values of a linkage group mean for its leader, [values]."""
    unit = space.linkage.types[unit_type]
    leader = unit.groups[group].leader
    op, tensors = space.operator(unit_type, leader), space.problem.graph.tensors
    for value, signature in enumerate(unit.signatures[leader]):
        factor = None if signature.factor is None else op.rule.factors[signature.factor]
        found[value] = (
            signature.divides_work,
            factor is not None and factor.is_batch,
            any(p >= 0 and tensors[n].role == "parameter" for p, n in zip(signature.inputs, op.inputs, strict=True)),
            PARTIAL in signature.outputs,
        )
