"""What all environments share: one decision of the PlanSpace a step, masks, features, the telescoping reward.

The observation has a fixed size that does not depend on the model: what is decided now, what each legal value does to
the lower bounds on time and memory, the shape so far, and a hashed history of the choices. The reward of a step is how
much it tightens the lower bound (in logs, times `REWARD_SCALE`); the last one goes to the price. The sum over an
episode is therefore REWARD_SCALE * log(first bound / step time), whatever the order: the best plan has the best return.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from automap.prefix import BoundTable, Prefix
from automap.price.evaluator import Outcome
from automap.space import PlanSpace, Slot
from envs.pruning import batch_split, influential_groups

MAX_ACTIONS = 64
"""Actions of every environment; of a slot with more values the first 64 are offered (cuts: the 64 most even ones)."""
REWARD_SCALE = 10.0
"""Good plans differ by per cents, 0.01 in logs: scaled so that the differences outweigh Adam's noise."""
MAX_LOG_RATIO = 3.0
"""Bounds and prices further than a factor e^3 from the best are all equally bad."""
INFEASIBLE_PENALTY = 1.0
"""In logs: a plan that does not fit is worth less than one e times slower than the reference."""
NUM_FEATURES = 48
HISTORY = 64
MAX_GROUPS = 48
"""Linkage groups that an episode decides; an episode stays below 200 decisions."""

_KINDS = ("pp", "tp", "micro_batches", "virtual", "cut", "recompute", "zero", "signature")
_ACTION_FEATURES = 3

Observation = dict[str, npt.NDArray[Any]]


def bound_slice() -> slice:
    """Where an observation holds, for each action, the (capped) log growth of the time bound."""
    return slice(NUM_FEATURES + HISTORY, NUM_FEATURES + HISTORY + MAX_ACTIONS)


class PlanEnv(gymnasium.Env[Observation, np.int64], abc.ABC):
    """Walks the decisions of a PlanSpace; subclasses say which slots the agent decides.

    An action that the mask forbids is taken as the legal one nearest to it, so that any sampled action is harmless.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, space: PlanSpace, table: BoundTable | None = None, *, reference_s: float | None = None) -> None:
        """Builds an environment.

        Args:
            space: of the problem.
            table: bounds of the space, to share between environments.
            reference_s: step time of a good feasible plan, seconds; infeasible plans are rated against it.
        """
        self.space = space
        self.table = table or BoundTable(space)
        self.first_bound_s = self.table.of_prefix[()].time_s
        self.reference_s = reference_s or self.first_bound_s * math.exp(MAX_LOG_RATIO)
        size = NUM_FEATURES + HISTORY + _ACTION_FEATURES * MAX_ACTIONS
        observation_space: Any = spaces.Dict(
            {
                "observation": spaces.Box(-10.0, 10.0, (size,), np.float32),
                "action_mask": spaces.Box(0, 1, (MAX_ACTIONS,), np.int8),
            }
        )
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(MAX_ACTIONS)
        self.num_decisions = 0
        self.num_operator_decisions = 0
        self._weights = space.evaluator.unit_weights
        self._group_features = _group_features(space)
        self._prefix: Prefix | None = None
        self._history = np.zeros(HISTORY, dtype=np.float32)
        self._remembered = 0

    # -- what subclasses decide ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def decides(self, slot: Slot) -> bool:
        """Whether the agent decides `slot`; the others take `default`."""

    @abc.abstractmethod
    def default(self, prefix: Prefix) -> int:
        """The value of a slot that the agent does not decide."""

    # -- gymnasium ----------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins a plan."""
        super().reset(seed=seed, options=options)
        self._prefix = Prefix(self.space, self.table)
        self._history = np.zeros(HISTORY, dtype=np.float32)
        self._remembered = 0
        self.num_decisions = self.num_operator_decisions = 0
        self._advance()
        return self._observe(), {}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Decides one slot.

        Returns:
            observation, reward, whether the plan is complete, False, and at the end {"values", "outcome"}.
        """
        prefix = self._prefix
        assert prefix is not None, "reset first"
        legal = prefix.legal()
        legal = legal[legal < MAX_ACTIONS]
        value = int(legal[np.abs(legal - int(action)).argmin()])
        before = prefix.bound.time_s
        self.num_decisions += 1
        self.num_operator_decisions += self.space.slots[prefix.position].kind == "signature"
        prefix.decide(value)
        self._advance()
        if not prefix.done:
            return self._observe(), self._gain(before, prefix.bound.time_s), False, False, {}
        outcome = prefix.outcome()
        info = {
            "values": tuple(prefix.values),
            "outcome": outcome,
            "worth_s": self.worth_s(outcome),
            "num_decisions": self.num_decisions,
            "num_operator_decisions": self.num_operator_decisions,
        }
        return self._observe(), self._gain(before, self.worth_s(outcome)), True, False, info

    def suggest(self, values: Sequence[int]) -> int:
        """The action that follows a known plan from here."""
        assert self._prefix is not None, "reset first"
        return int(values[self._prefix.position])

    def worth_s(self, outcome: Outcome) -> float:
        """The step time that a plan is rewarded as: its own, or worse than any feasible one if it does not fit."""
        if outcome.fits:
            return outcome.step_time_s
        penalty = INFEASIBLE_PENALTY + min(2.0 * outcome.overflow, 2.0)
        return max(outcome.step_time_s, self.reference_s) * math.exp(penalty)

    def _gain(self, before: float, after: float) -> float:
        return REWARD_SCALE * math.log(before / after)

    def _advance(self) -> None:
        prefix = self._prefix
        assert prefix is not None
        while not prefix.done and not self.decides(self.space.slots[prefix.position]):
            prefix.force(self.default(prefix))
        prefix.refresh()

    # -- observation ---------------------------------------------------------------------------------------------

    def _observe(self) -> Observation:
        prefix = self._prefix
        assert prefix is not None
        features = np.zeros(NUM_FEATURES, dtype=np.float32)
        growth = np.zeros(MAX_ACTIONS, dtype=np.float32)
        memory = np.zeros(MAX_ACTIONS, dtype=np.float32)
        mask = np.zeros(MAX_ACTIONS, dtype=np.int8)
        if prefix.done:
            mask[:] = 1
        else:
            offered = prefix.legal() < MAX_ACTIONS
            legal = prefix.legal()[offered]
            bounds = prefix.bounds()[offered]
            growth[legal] = np.minimum(np.log(bounds[:, 0] / prefix.bound.time_s), MAX_LOG_RATIO)
            memory[legal] = np.clip(bounds[:, 1], -1.0, 2.0)
            # What provably cannot fit is masked, unless nothing can.
            fits = bounds[:, 1] <= 0.0
            mask[legal[fits] if fits.any() else legal] = 1
            self._describe(prefix, features)
        observation = np.concatenate(
            [features, self._remember(prefix.values), growth, memory, mask.astype(np.float32)], dtype=np.float32
        )
        return {"observation": np.clip(observation, -10.0, 10.0), "action_mask": mask}

    def _describe(self, prefix: Prefix, out: npt.NDArray[np.float32]) -> None:
        slot = self.space.slots[prefix.position]
        # A middle axis, which most spaces lack, has the last features.
        out[_KINDS.index(slot.kind) if slot.kind in _KINDS else NUM_FEATURES - 1] = 1.0
        at = len(_KINDS)
        out[at] = prefix.position / len(self.space.slots)
        out[at + 1] = math.log(prefix.bound.time_s / self.first_bound_s)
        out[at + 2] = prefix.bound.overflow
        out[at + 3] = math.log(self.reference_s / prefix.bound.time_s)
        out[at + 4] = slot.index / 8.0
        if slot.kind == "signature":
            out[{"dp": at + 5, "tp": at + 6}.get(self.space.axes[slot.index], NUM_FEATURES - 2)] = 1.0
        at += 7
        shape = prefix.shape
        if shape is not None:
            numbers = (shape.pp, shape.tp, shape.dp, shape.num_micro_batches, shape.samples, shape.virtual)
            out[at : at + 6] = [math.log2(n) / 4.0 for n in numbers]
            out[NUM_FEATURES - 3] = math.log2(shape.middle) / 4.0
            modes = prefix.values[self.space.first_recompute : self.space.zero_slot]
            out[at + 6 : at + 9] = [modes.count(m) / max(1, len(modes)) for m in range(3)]
            if prefix.position > self.space.zero_slot:
                out[at + 9 + prefix.values[self.space.zero_slot]] = 1.0
        at += 13
        if slot.kind == "signature":
            group = self._group_features[slot.unit_type, slot.group]
            out[at : at + len(group)] = group
            at += len(group)
            out[at : at + 2] = self._inputs(prefix, slot)

    def _inputs(self, prefix: Prefix, slot: Slot) -> tuple[float, float]:
        """How the leader's input arrives on the axis: (split?, partial?)."""
        unit = self.space.linkage.types[slot.unit_type]
        group = unit.groups[slot.group]
        op = self.space.operator(slot.unit_type, group.leader)
        first = int(self.space.evaluator.tables.spans[slot.unit_type])
        for offset in range(group.leader - 1, -1, -1):
            maker = self.space.operator(slot.unit_type, offset)
            shared = [i for i, name in enumerate(maker.outputs) if name in op.inputs]
            signature = int(prefix.chosen[first + offset, slot.index])
            if shared and signature >= 0 and not maker.is_view:
                placement = unit.signatures[offset][signature].outputs[shared[0]]
                return float(placement >= 0), float(placement == -2)
        return 0.0, 0.0

    def _remember(self, values: Sequence[int]) -> npt.NDArray[np.float32]:
        """The choices so far as a sum of fixed random signs, one vector for each (slot, value)."""
        for position in range(self._remembered, len(values)):
            self._history += _signs(position, values[position])
        self._remembered = len(values)
        return self._history / 8.0


_SIGNS: dict[tuple[int, int], npt.NDArray[np.float32]] = {}


def _signs(position: int, value: int) -> npt.NDArray[np.float32]:
    key = (position, value)
    if key not in _SIGNS:
        rng = np.random.default_rng([position, value])
        _SIGNS[key] = rng.integers(0, 2, HISTORY).astype(np.float32) * 2.0 - 1.0
    return _SIGNS[key]


def _group_features(space: PlanSpace) -> dict[tuple[int, int], npt.NDArray[np.float32]]:
    """Of each linkage group: shares of FLOPs, parameters and activations, of the units, and what its leader is."""
    graph, found = space.problem.graph, {}
    units = space.linkage.blocks.units
    flops = max(graph.forward_flops, 1.0)
    parameters = max(graph.num_parameters, 1)
    for unit_type, unit in enumerate(space.linkage.types):
        times = sum(u.type == unit_type for u in units)
        for number, group in enumerate(unit.groups):
            ops = [space.operator(unit_type, m) for m in group.members]
            leader = space.operator(unit_type, group.leader)
            mine = sum(op.forward_flops.at(1) for op in ops) * times / flops
            weights = sum(
                graph.tensors[n].num_elements for op in ops for n in op.inputs if graph.tensors[n].role == "parameter"
            )
            size = graph.tensors[leader.outputs[0]].elements.at(1)
            found[unit_type, number] = np.array(
                [
                    mine,
                    weights * times / parameters,
                    math.log10(max(size, 1.0)) / 8.0,
                    times / len(units),
                    len(group.members) / 16.0,
                    float(leader.forward_flops.at(1) > 0),
                    float(weights > 0),
                    len(unit.signatures[group.leader]) / 8.0,
                ],
                dtype=np.float32,
            )
    return found


class HybridEnv(PlanEnv):
    """The whole plan in one episode: shape, cuts, recompute, ZeRO, then each influential linkage group.

    Of a model with more than `MAX_GROUPS` groups the most influential ones are decided; the others split the batch
    (`envs.pruning.influential_groups`).
    """

    def __init__(self, space: PlanSpace, table: BoundTable | None = None, *, reference_s: float | None = None) -> None:
        super().__init__(space, table, reference_s=reference_s)
        self.groups = influential_groups(space, MAX_GROUPS)

    def decides(self, slot: Slot) -> bool:
        """All but the groups of little influence."""
        return slot.kind != "signature" or (slot.unit_type, slot.group) in self.groups

    def default(self, prefix: Prefix) -> int:
        """Split the batch where that is legal."""
        return batch_split(self.space, prefix)
