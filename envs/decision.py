"""What all environments share: one decision of the plan space a step, with masks, features and a telescoping reward.

`Episodes` steps many plans side by side with compiled kernels; `PlanEnv` shows one of them as a gymnasium environment.
The observation has a fixed size that does not depend on the model: the decision at hand, the shape so far, the cluster,
and for every action its effect on the lower bounds of time and memory and its meaning. The reward of a step is minus
the growth of the lower bound on the step time (of its logarithm, times `REWARD_SCALE`); the last step goes from the
bound to the price. The sum over an episode is therefore REWARD_SCALE * log(first bound / step time), in whatever order
decisions are taken: the best plan has the best return.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from automap.bounds.kernels.step_many import BEGIN, GO_ON, WAIT
from automap.bounds.partial_plans import BoundTable, PartialPlans
from automap.space.shape import Shape
from automap.space.space import PlanSpace, Slot, Values
from envs.features import Features
from envs.kernels import ACTION_FEATURES, LIMIT, STATE_FEATURES

MAX_ACTIONS = 64
"""Number of actions of every environment. Of a slot with more values the first 64 are offered; for cuts these are the
64 most even ones."""
FREE_RANKS = 8
"""Number of pipeline ranks whose recomputation is decided freely. On longer pipelines a rank, except the last one,
recomputes no more than the rank before it, which holds no fewer micro-batches; otherwise most decisions would be about
recomputation."""
REWARD_SCALE = 10.0
"""Factor of all rewards. Good plans differ by per cents, 0.01 in logarithms: the factor makes these differences larger
than the noise of Adam."""
REFERENCE = 2.0
"""Assumed step time of a good plan over the lower bound, where no good plan is known. With e^3, plans that do not fit
are rated so badly that the DQN avoids plans which nearly fill the memory: two of four such problems ended 4 and 12 %
further from the optimum."""
INFEASIBLE_PENALTY = 1.0
"""Logarithm of the ratio of step times by which a plan that does not fit is worth less than the reference, at least."""
OBSERVED = STATE_FEATURES + ACTION_FEATURES * MAX_ACTIONS
"""Number of features of an observation."""
GROWTH = 0
"""Index of the feature `growth` of an action, see `envs.kernels.ACTION`."""

Observation = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The outcome of an episode that has ended."""

    values: Values
    """Values of the complete plan."""
    step_time_s: float
    """Step time of the plan."""
    overflow: float
    """Overflow of memory, as a share of a device's capacity; at most 0 where the plan fits."""
    worth_s: float
    """Step time as which the plan is rewarded, see `Episodes.worth_s`."""
    log_gap: float
    """log(worth / lower bound on all plans): the return without its sign and scale."""
    num_decisions: int
    """Number of decisions that were taken."""
    num_operator_decisions: int
    """Number of those that are about operators."""


class Decisions(abc.ABC):
    """Which slots of a space an agent decides, and which values the others take."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space

    @abc.abstractmethod
    def decides(self, slot: Slot) -> bool:
        """Whether the agent decides `slot`."""

    def preferred(self) -> Ints:
        """[slots] values of the other slots, where they are legal; `LATER` for signatures that depend on the shape."""
        return np.full(len(self.space.slots), -1, dtype=np.int64)

    def complete(self, head: Values, shape: Shape) -> Values:
        """The values of a plan whose signatures are `LATER`, once its shape is decided.

        Args:
            head: values of all slots before the first signature.
            shape: shape of the plan.

        Returns:
            `head` and the signatures, which may depend on the slots before the first cut, but not on cuts,
            recomputation and ZeRO.
        """
        raise NotImplementedError


class Episodes:
    """Many plans that are decided side by side.

    Attributes:
        num_decisions: [episodes] number of decisions so far.
        num_operator_decisions: [episodes] number of those that are about operators.
        first_bound_s: lower bound on the step time of all plans, in seconds.
        reference_s: step time of a good plan, in seconds, against which infeasible plans are rated.
    """

    def __init__(
        self, decisions: Decisions, count: int, table: BoundTable | None = None, *, reference_s: float | None = None
    ) -> None:
        """Begins `count` episodes.

        Args:
            decisions: which slots are decided.
            count: number of episodes.
            table: lower bounds of the space, if they have been computed already.
            reference_s: step time of a good plan that fits, in seconds; None = unknown.
        """
        self.space, self.decisions, self.count = decisions.space, decisions, count
        table = table or BoundTable(self.space)
        self.first_bound_s = table.first.time_s
        self.reference_s = reference_s or self.first_bound_s * REFERENCE
        self.partial_plans = PartialPlans(
            table,
            count,
            most=MAX_ACTIONS,
            free_ranks=FREE_RANKS,
            asks=decisions.decides,
            preferred=decisions.preferred(),
        )
        self._features = Features(self.space, self.first_bound_s, self.reference_s)
        self._is_operator = np.array([*(slot.kind == "signature" for slot in self.space.slots), False])
        self._completed: dict[bytes, Ints] = {}
        self.num_decisions = np.zeros(count, dtype=np.int64)
        self.num_operator_decisions = np.zeros(count, dtype=np.int64)
        self._complete()

    def begin(self, which: npt.NDArray[np.bool_]) -> None:
        """Begins new plans in the episodes where `which`, [episodes], is true."""
        self.num_decisions[which] = self.num_operator_decisions[which] = 0
        episodes = self.partial_plans.episodes
        episodes.preferred[which] = self.decisions.preferred()
        self.partial_plans.step(np.where(which, BEGIN, WAIT))
        self._complete()

    def step(self, actions: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Takes one decision of every unfinished plan. Where an action is not legal, the nearest legal one is taken.

        Args:
            actions: [episodes] value for the slot to decide.

        Returns:
            [episodes] rewards; [episodes] whether each plan is now complete.
        """
        episodes = self.partial_plans.episodes
        # Kernels take the index of a value among the legal ones.
        behind = np.arange(episodes.legal.shape[1]) >= episodes.offered[:, None]
        places = (np.abs(episodes.legal - actions[:, None]) + MAX_ACTIONS * behind).argmin(axis=1)
        before = episodes.bound[:, 0].copy()
        was_done = self.partial_plans.done
        self.num_decisions += ~was_done
        self.num_operator_decisions += self._is_operator[episodes.position]
        self.partial_plans.step(np.where(was_done, WAIT, places))
        self._complete()
        done = self.partial_plans.done
        after = episodes.bound[:, 0].copy()
        for number in np.flatnonzero(done & ~was_done):
            after[number] = self.worth_s(*episodes.bound[number].tolist())
        return np.where(was_done, 0.0, REWARD_SCALE * np.log(before / after)), done

    def finished(self, number: int) -> Finished:
        """The outcome of an episode whose plan is complete."""
        episodes = self.partial_plans.episodes
        seconds, overflow = episodes.bound[number].tolist()
        return Finished(
            values=tuple(episodes.values[number].tolist()),
            step_time_s=seconds,
            overflow=overflow,
            worth_s=self.worth_s(seconds, overflow),
            log_gap=math.log(self.worth_s(seconds, overflow) / self.first_bound_s),
            num_decisions=int(self.num_decisions[number]),
            num_operator_decisions=int(self.num_operator_decisions[number]),
        )

    def worth_s(self, step_time_s: float, overflow: float) -> float:
        """Step time as which a plan is rewarded: its own, or more than that of any good plan if it does not fit."""
        if overflow <= 0.0:
            return step_time_s
        penalty = INFEASIBLE_PENALTY + min(2.0 * overflow, 2.0)
        return max(step_time_s, self.reference_s) * math.exp(penalty)

    def _complete(self) -> None:
        """Decides the signatures that depend on the shape, of the plans whose shape is decided."""
        episodes, first = self.partial_plans.episodes, self.space.first_signature
        waiting = (episodes.offered == 0) & ~self.partial_plans.done
        if not waiting.any():
            return
        for number in np.flatnonzero(waiting):
            placed = episodes.values[number, : self.space.first_cut].tobytes()
            if placed not in self._completed:
                head = tuple(episodes.values[number, :first].tolist())
                completed = self.decisions.complete(head, self.space.shape(head))
                self._completed[placed] = np.array(completed[first:], dtype=np.int64)
            episodes.preferred[number, first:] = self._completed[placed]
        self.partial_plans.step(np.where(waiting, GO_ON, WAIT))

    def observe(self) -> Observation:
        """The features, [episodes, OBSERVED], and the masks of actions, [episodes, MAX_ACTIONS].

        For a complete plan all features are 0 and all actions are allowed.
        """
        seen = np.empty((self.count, OBSERVED), dtype=np.float32)
        mask = np.empty((self.count, MAX_ACTIONS), dtype=np.int8)
        self._features.write(self.partial_plans.episodes, seen, mask)
        return {"observation": seen, "action_mask": mask}


class PlanEnv(gymnasium.Env[Observation, np.int64]):
    """One plan as a gymnasium environment; subclasses say which slots the agent decides.

    Where the mask forbids an action, the nearest legal one is taken, so that any sampled action is harmless.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self, decisions: Decisions, table: BoundTable | None = None, *, reference_s: float | None = None
    ) -> None:
        """Builds an environment.

        Args:
            decisions: which slots are decided.
            table: lower bounds of the space, if they have been computed already.
            reference_s: see `Episodes`.
        """
        self.space = decisions.space
        self.episodes = Episodes(decisions, 1, table, reference_s=reference_s)
        self.observation_space = observation_space()
        self.action_space = spaces.Discrete(MAX_ACTIONS)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begins a plan."""
        super().reset(seed=seed, options=options)
        self.episodes.begin(np.array([True]))
        return self._observe(), {}

    def step(self, action: np.int64 | int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Decides one slot.

        Returns:
            Observation, reward, whether the plan is complete, False (episodes are never truncated), and at the end
            {"finished": `Finished`}.
        """
        rewards, done = self.episodes.step(np.array([int(action)]))
        info = {"finished": self.episodes.finished(0)} if done[0] else {}
        return self._observe(), float(rewards[0]), bool(done[0]), False, info

    def _observe(self) -> Observation:
        return {name: rows[0] for name, rows in self.episodes.observe().items()}


def observation_space() -> Any:
    """The observation space of every environment."""
    return spaces.Dict(
        {
            "observation": spaces.Box(-LIMIT, LIMIT, (OBSERVED,), np.float32),
            "action_mask": spaces.Box(0, 1, (MAX_ACTIONS,), np.int8),
        }
    )
