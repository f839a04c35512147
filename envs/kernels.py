"""The compiled pass that writes what an agent sees of many plans; `envs.features` prepares what it reads.

An observation is one row of float32: a `STATE` record, then an `ACTION` record for each action.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import float32, float64, int8, int64, void

from automap.bounds.kernels.known_plans import KNOWN
from automap.bounds.kernels.step_many import EPISODES
from automap.jit import borrowing
from automap.price.kernels.array_types import Ints, Rows, record_type, tuple_type
from automap.space.group_flow import UNKNOWN, GroupFlow
from automap.space.kernels.records import FirstSlots
from ir.factors import PARTIAL

Floats32 = Annotated[npt.NDArray[np.float32], float32[::1]]

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
"""Kinds of slots that an agent tells apart."""
MAX_LOG_RATIO = 3.0
"""Largest growth of the time bound that is told, as a logarithm (assumed): bounds further than e^3 from the best are
alike."""
LIMIT = 10.0
"""Largest absolute value of a feature (assumed)."""

GROUP = np.dtype(
    [
        ("flops", "f4"),  # share of the model's FLOPs
        ("parameters", "f4"),  # share of the model's parameters
        ("elements", "f4"),  # elements of the leader's output for one sample, as log10 / 8
        ("units", "f4"),  # share of the units that are of the group's unit type
        ("members", "f4"),  # number of members / 16
        ("has_flops", "f4"),  # whether the leader has FLOPs
        ("has_parameters", "f4"),  # whether a member reads a parameter
        ("signatures", "f4"),  # number of the leader's signatures / 8
    ]
)
"""Features of a linkage group."""
CLUSTER = np.dtype(
    [
        ("devices", "f4"),  # number of devices, as log2 / 8
        ("devices_per_host", "f4"),  # mean number of devices of a host, as log2 / 4
        ("kinds", "f4"),  # number of kinds of devices / 2
        ("memory_bandwidth", "f4"),  # lowest bandwidth of device memory in GB/s, as log10 / 4
        ("link_bandwidth", "f4"),  # lowest bandwidth inside a host in bytes/s, as log10 / 12
        ("state", "f4"),  # bytes of parameters, gradients and optimizer state over the memory of all devices
    ]
)
"""Features of the cluster and of how full the model makes it."""
SHAPE = np.dtype([(name, "f4") for name in ("pp", "tp", "dp", "micro_batches", "samples", "virtual", "middle")])
"""Features of a shape: each number as log2 / 4."""
STATE = np.dtype(
    [
        ("kind", "f4", (len(KINDS),)),  # 1 for the kind of the slot to decide
        ("progress", "f4"),  # number of the slot / number of slots
        ("time_bound", "f4"),  # log(lower bound on the step time / that of all plans)
        ("overflow", "f4"),  # lower bound on the overflow of memory
        ("to_reference", "f4"),  # log(step time of a good plan / lower bound)
        ("to_completion", "f4"),  # log(best completion at hand / lower bound)
        ("is_known", "f4"),  # whether a known plan agrees with all decisions so far
        ("place", "f4"),  # index of the slot among those of its kind / 8
        ("axis", "f4", (3,)),  # 1 for the axis of a signature: outermost, innermost, the one between them
        ("shape", SHAPE),  # the shape, once it is decided
        ("recompute", "f4", (3,)),  # share of the decided ranks, and of their units, in each recompute mode
        ("zero", "f4", (4,)),  # 1 for the ZeRO stage, once it is decided
        ("group", GROUP),  # the linkage group of a signature
        ("input_is_split", "f4"),  # whether the leader's input is split on the axis
        ("input_is_partial", "f4"),  # whether the leader's input is partial on the axis
        ("cluster", CLUSTER),
    ]
)
"""Features of the state of a plan."""
SIGNATURE = np.dtype(
    [
        ("divides_work", "f4"),  # whether each device computes only a part
        ("splits_batch", "f4"),  # whether the batch is split
        ("splits_parameter", "f4"),  # whether a parameter is split
        ("leaves_partial", "f4"),  # whether an output is partial
    ]
)
"""What a value of a linkage group means for its leader."""
ACTION = np.dtype(
    [
        ("growth", "f4"),  # growth of the logarithm of the time bound, at most MAX_LOG_RATIO
        ("overflow", "f4"),  # lower bound on the overflow of memory, from -1 to 2
        ("completion", "f4"),  # log(worth of the completion after the value / lower bound of the state), at most LIMIT
        ("loss", "f4"),  # 10 log(worth of that completion / the best one after any value), at most MAX_LOG_RATIO
        ("headroom", "f4"),  # log(worth of that completion / lower bound after the value), at most MAX_LOG_RATIO
        ("completed_overflow", "f4"),  # overflow of memory of that completion, from -1 to 2
        ("is_followed", "f4"),  # whether it is the value of the best known plan that agrees with the decisions so far
        ("number", "f4"),  # the number that the value stands for, see `Features`
        ("share", "f4"),  # value / number of values of the slot
        ("signature", SIGNATURE),
        ("keeps_input", "f4"),  # whether the leader takes its input in the placement in which it is made
    ]
)
"""Features of an action."""
STATE_FEATURES, ACTION_FEATURES = STATE.itemsize // 4, ACTION.itemsize // 4
"""Numbers of features of a state and of an action."""


def action_feature(name: str) -> int:
    """Index of a feature among those of an action."""
    fields = ACTION.fields
    assert fields is not None
    return int(fields[name][1]) // 4


class Facts(NamedTuple):
    """What the features of all plans of one space are made from. Placements: `ir.factors`, NONE and UNKNOWN."""

    num_axes: int
    """Number of mesh axes."""
    first: FirstSlots
    """Number of the first slot of each kind."""
    global_batch: int
    """Samples of a step."""
    first_bound_s: float
    """Lower bound on the step time of all plans, in seconds."""
    reference_s: float
    """Step time of a good plan, in seconds."""
    kind: Ints
    """[slots] index in `KINDS`."""
    group: Ints
    """[slots] number of the linkage group, 0 where there is none."""
    flow: GroupFlow
    """The flow between linkage groups."""
    ranks: Ints
    sizes: Ints
    degrees: Ints
    middles: Ints
    micro_batches: Ints
    virtuals: Ints
    """Numbers for which the values of the slots of the shape stand, see `SpaceArrays`."""
    recomputed: Annotated[npt.NDArray[np.float32], float32[:, ::1]]
    """[levels, modes] share of the units that each level of recomputation has in each mode."""
    place: Floats32
    """[slots] feature `STATE["place"]`."""
    num_values: Floats32
    """[slots] number of values."""
    cluster: Annotated[Rows, record_type(CLUSTER)[::1]]
    """[1] `CLUSTER`."""
    numbers: Annotated[npt.NDArray[np.float32], float32[:, ::1]]
    """[slots, values] feature `ACTION["number"]`."""
    groups: Annotated[Rows, record_type(GROUP)[::1]]
    """[groups] `GROUP`."""
    signatures: Annotated[Rows, record_type(SIGNATURE)[:, ::1]]
    """[groups, values] `SIGNATURE`."""


FACTS = tuple_type(Facts)


@borrowing(void(EPISODES, KNOWN, FACTS, float32[:, ::1], int8[:, ::1]))
def write_features(episodes, known, facts, observation, mask):
    """Writes the features of every plan, see `Features.write`."""
    num_slots = episodes.values.shape[1]
    for episode in range(episodes.position.shape[0]):
        slot, row = episodes.position[episode], observation[episode]
        row[:] = 0.0
        mask[episode, :] = 1 if slot == num_slots else 0
        if slot < num_slots:
            made = _placement_of_input(facts, episodes.values[episode], slot)
            state = row[:STATE_FEATURES].view(STATE)[0]
            _write_state(facts, episodes.values[episode], slot, episodes.bound[episode], made, state)
            state.to_completion = math.log(known.least[episode] / episodes.bound[episode, 0])
            state.is_known = known.is_known[episode]
            for i in range(STATE_FEATURES):
                row[i] = min(max(row[i], float32(-LIMIT)), float32(LIMIT))
            _write_actions(episodes, episode, known, facts, made, mask[episode], row[STATE_FEATURES:].view(ACTION))


@borrowing(int64(FACTS, int64[::1], int64), inner=True)
def _placement_of_input(facts, value, slot):
    """The placement in which the leader's input is made on the axis of a slot, or UNKNOWN."""
    if slot < facts.first.signature:
        return UNKNOWN
    group = facts.group[slot]
    source = facts.flow.source[group]
    at = facts.first.signature + source * facts.num_axes + (slot - facts.first.signature) % facts.num_axes
    if source < 0 or at >= slot:
        return UNKNOWN
    return facts.flow.made[group, value[at]]


@borrowing(void(FACTS, int64[::1], int64, float64[::1], int64, record_type(STATE)), inner=True)
def _write_state(facts, value, slot, bound, made, state):
    """Writes the features of the state of a plan.

    Args:
        facts: of the space.
        value: [slots] decided values.
        slot: the slot to decide.
        bound: [2] lower bounds of time and overflow.
        made: placement in which the leader's input is made.
        state: zeros; written.
    """
    state.kind[facts.kind[slot]] = 1.0
    state.progress = slot / value.shape[0]
    state.time_bound = math.log(bound[0] / facts.first_bound_s)
    state.overflow = bound[1]
    state.to_reference = math.log(facts.reference_s / bound[0])
    state.place = facts.place[slot]
    state.cluster = facts.cluster[0]
    if slot >= facts.first.cut:
        _write_shape(facts, value, state.shape)
        decided = min(slot, facts.first.zero) - facts.first.recompute
        for rank in range(decided):
            level = value[facts.first.recompute + rank]
            for mode in range(facts.recomputed.shape[1]):
                state.recompute[mode] += facts.recomputed[level, mode] / float32(decided)
        if slot > facts.first.zero:
            state.zero[value[facts.first.zero]] = 1.0
    if slot >= facts.first.signature:
        axis = (slot - facts.first.signature) % facts.num_axes
        state.axis[0 if axis == 0 else 1 if axis == facts.num_axes - 1 else 2] = 1.0
        state.group = facts.groups[facts.group[slot]]
        state.input_is_split = made >= 0
        state.input_is_partial = made == PARTIAL


@borrowing(void(FACTS, int64[::1], record_type(SHAPE)), inner=True)
def _write_shape(facts, value, shape):
    """Writes the features of the shape that the first values decide."""
    num_axes = facts.num_axes
    tp = facts.degrees[value[1]]
    middle = facts.middles[value[2]] if num_axes == 3 else 1
    count = facts.micro_batches[value[num_axes]]
    shape.pp = math.log2(facts.ranks[value[0]]) / 4.0
    shape.tp = math.log2(tp) / 4.0
    shape.dp = math.log2(facts.sizes[value[0]] // (tp * middle)) / 4.0
    shape.micro_batches = math.log2(count) / 4.0
    shape.samples = math.log2(facts.global_batch // count) / 4.0
    shape.virtual = math.log2(facts.virtuals[value[num_axes + 1]]) / 4.0
    shape.middle = math.log2(middle) / 4.0


@borrowing(void(EPISODES, int64, KNOWN, FACTS, int64, int8[::1], record_type(ACTION)[::1]), inner=True)
def _write_actions(episodes, episode, known, facts, made, mask, actions):
    """Writes the features of the legal actions and allows them; where some may fit into memory, only those.

    Args:
        episodes: the plans.
        episode: number of the plan.
        known: completions after the legal actions.
        facts: of the space.
        made: placement in which the leader's input is made.
        mask: [actions] zeros; written.
        actions: [actions] zeros; written.
    """
    slot, bound, ahead = episodes.position[episode], episodes.bound[episode], episodes.action_bounds[episode]
    group = facts.group[slot]
    worth, best = known.worth[episode], known.least[episode]
    fits = False
    for i in range(episodes.offered[episode]):
        fits = fits or ahead[i, 1] <= 0.0
    for i in range(episodes.offered[episode]):
        value = episodes.legal[episode, i]
        action = actions[value]
        mask[value] = not fits or ahead[i, 1] <= 0.0
        action.growth = min(math.log(max(ahead[i, 0], 1e-30) / bound[0]), MAX_LOG_RATIO)
        action.overflow = min(max(ahead[i, 1], -1.0), 2.0)
        action.completion = min(math.log(worth[i] / bound[0]), LIMIT)
        action.loss = min(10.0 * math.log(worth[i] / best), MAX_LOG_RATIO)
        action.headroom = min(math.log(worth[i] / max(ahead[i, 0], 1e-30)), MAX_LOG_RATIO)
        action.completed_overflow = min(max(known.completed[episode, i, 1], -1.0), 2.0)
        action.is_followed = known.is_followed[episode, i]
        action.number = facts.numbers[slot, value]
        action.share = value / facts.num_values[slot]
        if slot >= facts.first.signature:
            action.signature = facts.signatures[group, value]
            action.keeps_input = facts.flow.required[group, value] == made
