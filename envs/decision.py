"""What all environments share: one decision of the PlanSpace a step, masks, features, the telescoping reward.

`Episodes` steps many plans side by side on compiled kernels; `PlanEnv` shows one of them as a gymnasium environment.
The observation has a fixed size that does not depend on the model: what is decided now, the shape so far, the cluster,
and of every action what it does to the lower bounds on time and memory and what it means. The reward of a step is how
much it tightens the lower bound (in logs, times `REWARD_SCALE`); the last one goes to the price. The sum of an episode
is therefore REWARD_SCALE * log(first bound / step time), whatever the order: the best plan has the best return.
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
from envs.observing import ACTION_FEATURES, LIMIT, STATE_FEATURES

MAX_ACTIONS = 64
"""Actions of every environment; of a slot with more values the first 64 are offered (cuts: the 64 most even ones)."""
FREE_RANKS = 8
"""On longer pipelines a rank, but for the last one, recomputes no more than the one before it, which holds no fewer
micro-batches: else most decisions would be about recomputation."""
REWARD_SCALE = 10.0
"""Good plans differ by per cents, 0.01 in logs: scaled so that the differences outweigh Adam's noise."""
REFERENCE = 2.0
"""Step time of a good plan over the lower bound, where none is known. With e^3 what does not fit is so bad that the DQN
keeps away from where memory binds: two of four such problems ended 4 and 12 % further from the optimum."""
INFEASIBLE_PENALTY = 1.0
"""In logs: a plan that does not fit is worth less than one e times slower than the reference."""
OBSERVED = STATE_FEATURES + ACTION_FEATURES * MAX_ACTIONS
GROWTH, MEMORY = 0, 1
"""The first two features of an action: (capped) log growth of the time bound, and the bound on overflow."""

Observation = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """An episode that ended."""

    values: Values
    step_time_s: float
    overflow: float
    worth_s: float
    """What it is rewarded as."""
    log_gap: float
    """log(worth / lower bound on all plans): the return, but for its sign and scale."""
    num_decisions: int
    num_operator_decisions: int


class Decisions(abc.ABC):
    """Which slots of a space an agent decides, and what becomes of the others."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space

    @abc.abstractmethod
    def asks(self, slot: Slot) -> bool:
        """Whether the agent decides `slot`."""

    def preferred(self) -> Ints:
        """[slots] values of the other slots, where they are legal; `LATER` for signatures that wait for the shape."""
        return np.full(len(self.space.slots), -1, dtype=np.int64)

    def complete(self, head: Values, shape: Shape) -> Values:
        """`head`, all but the signatures, with the signatures preferred behind it, for those that wait for it.

        They may depend on the slots before the first cut, not on cuts, recomputation and ZeRO.
        """
        raise NotImplementedError


class Episodes:
    """Many plans being decided side by side.

    Attributes:
        num_decisions, num_operator_decisions: [episodes] decisions so far, and those about operators.
    """

    def __init__(
        self, decisions: Decisions, count: int, table: BoundTable | None = None, *, reference_s: float | None = None
    ) -> None:
        """Begins `count` episodes.

        Args:
            decisions: what is asked.
            count: of episodes.
            table: bounds of the space, to share.
            reference_s: step time of a good feasible plan, seconds; infeasible plans are rated against it.
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
            asks=decisions.asks,
            preferred=decisions.preferred(),
        )
        self._features = Features(self.space, self.first_bound_s, self.reference_s)
        self._is_operator = np.array([*(slot.kind == "signature" for slot in self.space.slots), False])
        self._completed: dict[bytes, Ints] = {}
        self.num_decisions = np.zeros(count, dtype=np.int64)
        self.num_operator_decisions = np.zeros(count, dtype=np.int64)
        self._complete()

    def begin(self, which: npt.NDArray[np.bool_]) -> None:
        """Begins new plans in the places `which`."""
        self.num_decisions[which] = self.num_operator_decisions[which] = 0
        episodes = self.partial_plans.episodes
        episodes.preferred[which] = self.decisions.preferred()
        self.partial_plans.step(np.where(which, BEGIN, WAIT))
        self._complete()

    def step(self, actions: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Takes one decision of every unfinished plan; a forbidden action is taken as the legal one nearest to it.

        Args:
            actions: [episodes] values of the slots to decide.

        Returns:
            [episodes] rewards, and which plans are now complete.
        """
        episodes = self.partial_plans.episodes
        # Actions stand for the places of the legal values that they come next to.
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
        """What became of a complete plan."""
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
        """The step time that a plan is rewarded as: its own, or worse than any feasible one if it does not fit."""
        if overflow <= 0.0:
            return step_time_s
        penalty = INFEASIBLE_PENALTY + min(2.0 * overflow, 2.0)
        return max(step_time_s, self.reference_s) * math.exp(penalty)

    def _complete(self) -> None:
        """Hands signatures to the plans that wait for them."""
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
        """[episodes, OBSERVED] features and [episodes, MAX_ACTIONS] masks; of a complete plan zeros, and all legal."""
        seen = np.empty((self.count, OBSERVED), dtype=np.float32)
        mask = np.empty((self.count, MAX_ACTIONS), dtype=np.int8)
        self._features.write(self.partial_plans.episodes, seen, mask)
        return {"observation": seen, "action_mask": mask}


class PlanEnv(gymnasium.Env[Observation, np.int64]):
    """One plan as a gymnasium environment; subclasses say what the agent decides.

    An action that the mask forbids is taken as the legal one nearest to it, so that any sampled action is harmless.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self, decisions: Decisions, table: BoundTable | None = None, *, reference_s: float | None = None
    ) -> None:
        """Builds an environment.

        Args:
            decisions: what is asked.
            table: bounds of the space, to share between environments.
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
            observation, reward, whether the plan is complete, False, and at the end {"finished": `Finished`}.
        """
        rewards, done = self.episodes.step(np.array([int(action)]))
        info = {"finished": self.episodes.finished(0)} if done[0] else {}
        return self._observe(), float(rewards[0]), bool(done[0]), False, info

    def _observe(self) -> Observation:
        return {name: rows[0] for name, rows in self.episodes.observe().items()}


def observation_space() -> Any:
    """Of every environment."""
    return spaces.Dict(
        {
            "observation": spaces.Box(-LIMIT, LIMIT, (OBSERVED,), np.float32),
            "action_mask": spaces.Box(0, 1, (MAX_ACTIONS,), np.int8),
        }
    )
