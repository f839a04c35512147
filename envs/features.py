"""What an agent sees of a plan being decided: numbers whose count and meaning do not depend on the model.

Of the state: the decision at hand, the choices so far with their bounds, the linkage group at hand, the cluster.
Of every action: what it means for an operator or how large the number is that it chooses.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from automap.bounds.kernels.step_many import EpisodeArrays
from automap.space.decisions import DECISIONS, Decision
from automap.space.space import PlanSpace, Slot
from envs.observing import GROUP_FEATURES, KINDS, NONE, UNKNOWN, Facts, write_features
from ir.factors import PARTIAL

GIB = float(1 << 30)
Floats32 = npt.NDArray[np.float32]


class Features:
    """Features of the plans of one space."""

    def __init__(self, space: PlanSpace, first_bound_s: float, reference_s: float) -> None:
        """Prepares what does not change.

        Args:
            space: of the problem.
            first_bound_s: lower bound on every plan, seconds.
            reference_s: step time of a good plan, seconds.
        """
        self.space = space
        slots, arrays = space.slots, space.arrays
        groups = list(space.group_rows)
        most = max((len(values) for _, values in space.group_rows.values()), default=1)
        self._meaning = np.zeros((len(groups), most, 4), dtype=np.float32)
        self._wants = np.full((len(groups), most), NONE, dtype=np.int64)
        self._gives = np.full((len(groups), most), UNKNOWN, dtype=np.int64)
        self._source = np.full(len(groups), -1, dtype=np.int64)
        for number, key in enumerate(groups):
            self._read_group(groups, number, *key)
        decisions = {decision.kind: decision for decision in DECISIONS}
        most_values = max(slot.num_values for slot in slots)
        numbers = np.zeros((len(slots), most_values), dtype=np.float32)
        for number, slot in enumerate(slots):
            amounts = decisions[slot.kind].amounts(space)
            numbers[number, : len(amounts)] = amounts
        rows = [_group_features(space, *key) for key in groups]
        scalars = (
            *(len(space.axes), space.first_cut, space.first_recompute, space.zero_slot, space.first_signature),
            *(space.problem.cluster.num_devices, space.problem.training.global_batch),
        )
        self._facts = Facts(
            scalars=np.array(scalars, dtype=np.int64),
            kind=np.array([KINDS.index(decisions[s.kind].seen_as or s.kind) for s in slots], dtype=np.int64),
            group=np.array([groups.index((s.unit_type, s.group)) if s.group >= 0 else 0 for s in slots]),
            source=self._source,
            degrees=arrays.degrees,
            middles=arrays.middles,
            micro_batches=arrays.micro_batches,
            virtuals=arrays.virtuals,
            wants=self._wants,
            gives=self._gives,
            place=np.array([_index(decisions[s.kind], s) for s in slots], dtype=np.float32) / np.float32(8.0),
            num_values=np.array([slot.num_values for slot in slots], dtype=np.float32),
            cluster=_cluster_features(space),
            numbers=numbers,
            groups=np.array(rows, dtype=np.float32).reshape(len(groups), GROUP_FEATURES - 2),
            meaning=self._meaning,
            times=np.array([first_bound_s, reference_s]),
        )

    def _read_group(self, groups: list[tuple[int, int]], number: int, unit_type: int, group: int) -> None:
        """What the values of a group mean, and which group its leader's first input comes from."""
        space = self.space
        unit = space.linkage.types[unit_type]
        leader = unit.groups[group].leader
        op, table = space.operator(unit_type, leader), unit.signatures[leader]
        tensors = space.problem.graph.tensors
        source = _source(space, unit_type, leader)
        for value, signature in enumerate(table):
            factor = None if signature.factor is None else op.rule.factors[signature.factor]
            self._meaning[number, value] = (
                signature.divides_work,
                factor is not None and factor.is_batch,
                any(
                    p >= 0 and tensors[n].role == "parameter" for p, n in zip(signature.inputs, op.inputs, strict=True)
                ),
                PARTIAL in signature.outputs,
            )
            if source is not None:
                self._wants[number, value] = signature.inputs[source[1]]
        if source is None:
            return
        maker, _, output = source
        other = next(g for g, found in enumerate(unit.groups) if maker in found.members)
        members = unit.groups[other].members
        self._source[number] = groups.index((unit_type, other))
        # Each group has one source, so that what it gives is kept with the reader.
        for value, assigned in enumerate(unit.groups[other].assignment):
            self._gives[number, value] = unit.signatures[maker][assigned[members.index(maker)]].outputs[output]

    def write(self, episodes: EpisodeArrays, observation: Floats32, mask: npt.NDArray[np.int8]) -> None:
        """Writes what is seen of every plan; of a complete one zeros, and every action as legal.

        Args:
            episodes: the plans.
            observation: [episodes, STATE_FEATURES + actions * ACTION_FEATURES], written.
            mask: [episodes, actions], written: 0 for what is illegal and, unless that is all, for what cannot fit.
        """
        write_features(episodes, self._facts, observation, mask)


def _index(decision: Decision, slot: Slot) -> int:
    return slot.index if decision.seen_index is None else decision.seen_index


def _source(space: PlanSpace, unit_type: int, leader: int) -> tuple[int, int, int] | None:
    """The nearest operator before a leader in its unit that makes one of its inputs: (maker, input slot, output)."""
    op = space.operator(unit_type, leader)
    for offset in range(leader - 1, -1, -1):
        maker = space.operator(unit_type, offset)
        shared = [(op.inputs.index(name), i) for i, name in enumerate(maker.outputs) if name in op.inputs]
        if shared and not maker.is_view:
            return (offset, *shared[0])
    return None


def _group_features(space: PlanSpace, unit_type: int, number: int) -> list[float]:
    """Of a linkage group: shares of FLOPs, parameters and activations, of the units, and what its leader is."""
    graph, units = space.problem.graph, space.linkage.blocks.units
    unit = space.linkage.types[unit_type]
    group = unit.groups[number]
    times = sum(u.type == unit_type for u in units)
    ops = [space.operator(unit_type, m) for m in group.members]
    leader = space.operator(unit_type, group.leader)
    weights = sum(
        graph.tensors[n].num_elements for op in ops for n in op.inputs if graph.tensors[n].role == "parameter"
    )
    return [
        sum(op.forward_flops.at(1) for op in ops) * times / max(graph.forward_flops, 1.0),
        weights * times / max(graph.num_parameters, 1),
        math.log10(max(graph.tensors[leader.outputs[0]].elements.at(1), 1.0)) / 8.0,
        times / len(units),
        len(group.members) / 16.0,
        float(leader.forward_flops.at(1) > 0),
        float(weights > 0),
        len(unit.signatures[group.leader]) / 8.0,
    ]


def _cluster_features(space: PlanSpace) -> Floats32:
    """Devices, devices a host, kinds; how many FLOPs a byte of memory traffic and of either link costs; memory."""
    cluster, problem = space.problem.cluster, space.problem
    devices = cluster.num_devices
    kinds = [cluster.devices[host.device] for host in cluster.hosts]
    return np.array(
        [
            math.log2(devices) / 8.0,
            math.log2(devices / len(cluster.hosts)) / 4.0,
            len({kind.name for kind in kinds}) / 2.0,
            math.log10(min(kind.hbm_bandwidth_GBps for kind in kinds)) / 4.0,
            math.log10(min(cluster.links[host.intra_node_link].bytes_per_s for host in cluster.hosts)) / 12.0,
            problem.graph.num_parameters
            * sum(problem.state_bytes)
            / (devices * min(k.memory_GiB for k in kinds) * GIB),
        ],
        dtype=np.float32,
    )
