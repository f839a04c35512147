"""What an agent sees of a plan being decided: numbers whose count and meaning do not depend on the model.

Of the state: the decision at hand, the choices so far with their bounds, the linkage group at hand, the cluster.
Of every action: what it means for an operator or how large the number is that it chooses.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from automap.price.walk import Walks
from automap.space import PlanSpace, Slot
from ir.factors import PARTIAL

KINDS = (
    "pp",
    "tp",
    "middle",
    "micro_batches",
    "virtual",
    "schedule",
    "order",
    "devices",
    "cut",
    "recompute",
    "zero",
    "signature",
)
"""Of slots."""
GROUP_FEATURES = 10
CLUSTER_FEATURES = 6
STATE_FEATURES = len(KINDS) + 5 + 3 + 7 + 3 + 4 + GROUP_FEATURES + CLUSTER_FEATURES
ACTION_FEATURES = 9
"""Growth, memory (see `envs.decision`); number, share; divides work, splits the batch, splits a weight, leaves a sum,
takes its input as it comes."""

GIB = float(1 << 30)
Floats32 = npt.NDArray[np.float32]
NONE, UNKNOWN = -9, -8
"""Placements of a value that is not there, and of one that nothing says."""


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
        self.first_bound_s, self.reference_s = first_bound_s, reference_s
        slots = space.slots
        # Shares of unlike devices go on with what `devices` began; their index tells them apart.
        self._kind = np.array([KINDS.index("devices" if slot.kind == "shares" else slot.kind) for slot in slots])
        self._index = np.array([8 if s.kind == "shares" else s.index for s in slots], dtype=np.float32) / 8.0
        groups = list(space.group_rows)
        self._group = np.array([groups.index((s.unit_type, s.group)) if s.group >= 0 else 0 for s in slots])
        self._cluster = _cluster_features(space)
        self._groups = np.array([_group_features(space, *key) for key in groups], dtype=np.float32)
        most = max((len(values) for _, values in space.group_rows.values()), default=1)
        self._meaning = np.zeros((len(groups), most, 4), dtype=np.float32)
        self._wants = np.full((len(groups), most), NONE, dtype=np.int64)
        self._gives = np.full((len(groups), most), UNKNOWN, dtype=np.int64)
        self._source = np.full(len(groups), -1, dtype=np.int64)
        for number, key in enumerate(groups):
            self._read_group(groups, number, *key)
        most_values = max(slot.num_values for slot in slots)
        self._numbers = np.zeros((len(slots), most_values), dtype=np.float32)
        for number, slot in enumerate(slots):
            self._numbers[number, : slot.num_values] = _numbers(space, slot)
        self._values = np.array([slot.num_values for slot in slots], dtype=np.float32)

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

    def of_states(self, walks: Walks) -> Floats32:
        """[walks, STATE_FEATURES]"""
        space = self.space
        slot = np.minimum(walks.position, len(space.slots) - 1)
        count = len(slot)
        out = np.zeros((count, STATE_FEATURES), dtype=np.float32)
        rows = np.arange(count)
        out[rows, self._kind[slot]] = 1.0
        at = len(KINDS)
        bound = walks.bound[:, 0]
        out[:, at] = walks.position / len(space.slots)
        out[:, at + 1] = np.log(bound / self.first_bound_s)
        out[:, at + 2] = walks.bound[:, 1]
        out[:, at + 3] = np.log(self.reference_s / bound)
        out[:, at + 4] = self._index[slot]
        at += 5
        is_signature = walks.position >= space.first_signature
        axes = len(space.axes)
        axis = (slot - space.first_signature) % axes
        # Outer, inner, and where there are three the one between them.
        out[rows, at + np.where(axis == 0, 0, np.where(axis == axes - 1, 1, 2))] = is_signature
        at += 3
        shaped = walks.position >= space.first_cut
        if shaped.any():
            out[shaped, at : at + 7] = self._shapes(walks.values[shaped])
            modes = walks.values[:, space.first_recompute : space.zero_slot]
            decided = np.arange(space.first_recompute, space.zero_slot) < walks.position[:, None]
            for mode in range(3):
                share = ((modes == mode) & decided).sum(axis=1) / np.maximum(1, decided.sum(axis=1))
                out[:, at + 7 + mode] = share
            behind = walks.position > space.zero_slot
            out[rows[behind], at + 10 + walks.values[behind, space.zero_slot]] = 1.0
        at += 14
        if is_signature.any():
            group = self._group[slot[is_signature]]
            out[is_signature, at : at + GROUP_FEATURES - 2] = self._groups[group]
            given = self._given(walks, slot)[is_signature]
            out[is_signature, at + GROUP_FEATURES - 2] = given >= 0
            out[is_signature, at + GROUP_FEATURES - 1] = given == PARTIAL
        out[:, at + GROUP_FEATURES :] = self._cluster
        return out

    def _given(self, walks: Walks, slot: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """[walks] the placement in which the leader's input comes on the axis."""
        space, axes = self.space, len(self.space.axes)
        group = self._group[slot]
        source = self._source[group]
        axis = (slot - space.first_signature) % axes
        at = np.clip(space.first_signature + source * axes + axis, 0, len(space.slots) - 1)
        known = (source >= 0) & (at < walks.position) & (slot >= space.first_signature)
        value = walks.values[np.arange(len(slot)), at]
        found: npt.NDArray[np.int64] = np.where(
            known, self._gives[group, np.clip(value, 0, self._gives.shape[1] - 1)], UNKNOWN
        )
        return found

    def _shapes(self, values: npt.NDArray[np.int64]) -> Floats32:
        found = np.empty((len(values), 7), dtype=np.float32)
        for row, value in enumerate(values):
            shape = self.space.shape(value)
            numbers = (shape.pp, shape.tp, shape.dp, shape.num_micro_batches, shape.samples, shape.virtual)
            found[row] = [math.log2(max(n, 1)) / 4.0 for n in (*numbers, shape.middle)]
        return found

    def of_actions(self, walks: Walks) -> Floats32:
        """[walks, actions, ACTION_FEATURES - 2]"""
        most = walks.legal.shape[1]
        slot = np.minimum(walks.position, len(self.space.slots) - 1)
        out = np.zeros((len(slot), most, ACTION_FEATURES - 2), dtype=np.float32)
        width = min(most, self._numbers.shape[1])
        out[:, :width, 0] = self._numbers[slot, :width]
        out[:, :, 1] = np.arange(most) / self._values[slot][:, None]
        is_signature = walks.position >= self.space.first_signature
        if is_signature.any():
            group = self._group[slot[is_signature]]
            width = min(most, self._meaning.shape[1])
            out[is_signature, :width, 2:6] = self._meaning[group, :width]
            given = self._given(walks, slot)[is_signature]
            out[is_signature, :width, 6] = self._wants[group, :width] == given[:, None]
        # Only legal actions mean anything.
        legal = np.zeros((len(slot), most), dtype=np.bool_)
        valid = np.arange(most) < walks.offered[:, None]
        legal[np.nonzero(valid)[0], walks.legal[valid]] = True
        out[~legal] = 0.0
        return out


def _numbers(space: PlanSpace, slot: Slot) -> npt.NDArray[np.float64]:
    """[values] of a slot, in logs where they are counts."""
    meshes = space.meshes
    counts = {
        "pp": meshes.degrees,
        "tp": meshes.degrees,
        "middle": meshes.middles,
        "micro_batches": meshes.micro_batches,
        "virtual": meshes.virtuals,
    }
    if slot.kind in counts:
        return np.log2(np.array(counts[slot.kind], dtype=np.float64)) / 8.0
    return np.arange(slot.num_values) / 8.0 if slot.kind in ("recompute", "zero") else np.zeros(slot.num_values)


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
