"""What all environments share: one decision of the plan space a step, with masks, features and a telescoping reward.

`Episodes` steps many plans side by side with compiled kernels; `PlanEnv` shows one of them as a gymnasium environment.
The observation has a fixed size that does not depend on the model. It describes the decision to take, the shape so far,
the cluster, and for every action its meaning and its effect on the lower bounds of time and memory.

The reward of a step is REWARD_SCALE * log(bound before / bound after), where the bound is the lower bound on the step
time; after the last step, the price takes its place. So the sum over an episode is REWARD_SCALE * log(first bound /
step time), in whatever order decisions are taken, and the best plan has the best return.
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

from automap.bounds.kernels.step_many import BEGIN, WAIT
from automap.bounds.known_plans import KnownPlans, worth_s
from automap.bounds.partial_plans import BoundTable, PartialPlans
from automap.bounds.priced_templates import priced_templates
from automap.problem import Problem
from automap.space.space import PlanSpace, Slot, Values
from automap.space.target_limits import plan_space
from envs.features import Features
from envs.kernels import ACTION_FEATURES, LIMIT, STATE_FEATURES, action_feature

MAX_ACTIONS = 64
"""Number of actions of every environment (assumed). If a slot has more values, the first 64 are offered; for a cut
these are the most even ones."""
NUM_CUTS = 256
"""Number of cuts that are offered for all chunks of a pipeline together: 64 ends for each of 4 chunks, 16 for each of
16."""
FREE_RANKS = 8
"""Number of pipeline ranks whose recomputation is decided freely (assumed). On longer pipelines a rank, except the last
one, recomputes no more than the rank before it, which holds no fewer micro-batches; otherwise most decisions would be
about recomputation."""
REWARD_SCALE = 10.0
"""Factor of all rewards (assumed). Good plans differ by some per cent, which is 0.01 in logarithms; with the factor,
such differences are larger than the noise of Adam."""
REFERENCE = 2.0
"""Assumed step time of a good plan, as a multiple of the lower bound, where no good plan is known. With e^3 instead,
plans that do not fit have so bad rewards that the DQN avoids plans which nearly fill the memory: two of four such
problems ended 4 and 12 % further from the optimum."""
OBSERVED = STATE_FEATURES + ACTION_FEATURES * MAX_ACTIONS
"""Number of features of an observation."""
COMPLETION, LOSS = (action_feature(name) for name in ("completion", "loss"))
"""Indices of these features of an action, see `envs.kernels.ACTION`."""

WAITING = -1
"""In place of an action: the plan is left as it is."""

Observation = dict[str, npt.NDArray[Any]]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The outcome of an episode that has ended."""

    values: Values
    """Values of the complete plan."""
    step_time_s: float
    """Step time of the plan, corrected by real runs where there are some."""
    overflow: float
    """Overflow of memory, as a share of a device's capacity; at most 0 where the plan fits."""
    worth_s: float
    """Step time by which the plan is rewarded, see `automap.bounds.known_plans.worth_s`: longer if it does not fit."""
    log_gap: float
    """log(`worth_s` / lower bound of all plans); the return is -`REWARD_SCALE` times this."""
    num_decisions: int
    """Number of decisions that were taken."""
    num_operator_decisions: int
    """Number of those that are about operators."""


class Decisions(abc.ABC):
    """Which slots of a space an agent decides. The others follow the best known plan that agrees with its decisions."""

    def __init__(self, space: PlanSpace) -> None:
        self.space = space

    @abc.abstractmethod
    def decides(self, slot: Slot) -> bool:
        """Whether the agent decides `slot`."""

    def known(self, values: Ints, prices: Floats) -> tuple[Ints, Floats]:
        """The plans that the agent knows at first.

        Args:
            values: [n, slots] templates.
            prices: [n, 2] their prices.

        Returns:
            [m, slots] plans, at least one, and [m, 2] their prices.
        """
        return values, prices


class Episodes:
    """Many plans that are decided side by side.

    Attributes:
        asked: [slots] which slots the agent decides.
        num_decisions: [episodes] number of decisions so far.
        num_operator_decisions: [episodes] number of those that are about operators.
        first_bound_s: lower bound on the step time of all plans, in seconds.
        reference_s: step time of a good plan, in seconds, against which infeasible plans are rated.
    """

    def __init__(
        self,
        decisions: Decisions,
        count: int,
        table: BoundTable | None = None,
        *,
        known: tuple[Ints, Floats] | None = None,
    ) -> None:
        """Begins `count` episodes.

        Args:
            decisions: which slots are decided.
            count: number of episodes.
            table: lower bounds of the space, if they have been computed already.
            known: [n, slots] plans that are known at first and [n, 2] their prices; None = the templates of the space.
        """
        self.space, self.decisions, self.count = decisions.space, decisions, count
        table = table or BoundTable(self.space)
        self.first_bound_s = table.first.time_s
        values, prices = decisions.known(*(known or priced_templates(self.space)))
        self.known = KnownPlans(
            self.space,
            values,
            prices,
            episodes=count,
            most=MAX_ACTIONS,
            reference_s=self.first_bound_s * REFERENCE,
        )
        self.reference_s = self.known.reference_s
        self.partial_plans = PartialPlans(
            table,
            count,
            most=MAX_ACTIONS,
            num_cuts=NUM_CUTS,
            free_ranks=FREE_RANKS,
            asks=decisions.decides,
            preferred=self.known.best,
        )
        self.asked = self.partial_plans.episodes.asked[0].copy()
        self._features = Features(self.space, self.known.arrays.flow, self.first_bound_s, self.reference_s)
        self._is_operator = np.array([*(slot.kind == "signature" for slot in self.space.slots), False])
        self.num_decisions = np.zeros(count, dtype=np.int64)
        self.num_operator_decisions = np.zeros(count, dtype=np.int64)
        self._step(np.full(count, BEGIN))

    def begin(self, which: npt.NDArray[np.bool_]) -> None:
        """Begins new plans in the episodes where `which`, [episodes], is true."""
        self.num_decisions[which] = self.num_operator_decisions[which] = 0
        self._step(np.where(which, BEGIN, WAIT))
        empty = which & self.partial_plans.done & (self.partial_plans.episodes.asked != self.asked).any(axis=1)
        if empty.any():
            self.partial_plans.episodes.asked[empty] = self.asked
            self.begin(empty)

    def confine(self, number: int, lead: Values | None, window: tuple[int, int] | None = None) -> None:
        """Sets which slots the agent decides in the next plan of an episode, and which plan the others follow.

        Args:
            number: number of the episode.
            lead: legal plan whose values the other slots take, as far as they are legal; it becomes a known plan. None
                = the best known plan.
            window: of the slots that the agent decides, only those from the first number to before the second; None =
                all.
        """
        if lead is not None:
            row = np.array([lead], dtype=np.int64)
            seconds, overflow = self.known.corrected(row, self.space.price(row))[0].tolist()
            self.known.add(lead, (seconds, overflow))
        self.known.lead(number, lead)
        asked = np.zeros_like(self.asked)
        some = slice(None) if window is None else slice(*window)
        asked[some] = self.asked[some]
        self.partial_plans.episodes.asked[number] = asked

    def _step(self, actions: Ints) -> None:
        """Takes actions as `automap.bounds.kernels.completions.step_and_complete` does."""
        self.known.step(self.partial_plans, actions)

    def step(self, actions: Ints) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Takes one decision of every unfinished plan. Where an action is not legal, the nearest legal one is taken.

        Args:
            actions: [episodes] value for the slot to decide, or `WAITING`.

        Returns:
            [episodes] rewards; [episodes] whether each plan is now complete.
        """
        episodes = self.partial_plans.episodes
        # Kernels take the index of a value among the legal ones.
        behind = np.arange(episodes.legal.shape[1]) >= episodes.offered[:, None]
        places = (np.abs(episodes.legal - actions[:, None]) + MAX_ACTIONS * behind).argmin(axis=1)
        before = episodes.bound[:, 0].copy()
        waits = self.partial_plans.done | (actions == WAITING)
        self.num_decisions += ~waits
        self.num_operator_decisions += ~waits & self._is_operator[episodes.position]
        self._step(np.where(waits, WAIT, places))
        done = self.partial_plans.done
        after = np.where(done, worth_s(self._prices(), self.reference_s), episodes.bound[:, 0])
        return np.where(waits, 0.0, REWARD_SCALE * np.log(before / after)), done

    def _prices(self) -> Floats:
        """[episodes, 2] corrected seconds, and overflow, of the complete plans."""
        episodes = self.partial_plans.episodes
        return self.known.corrected(episodes.values, episodes.bound)

    def finished(self, number: int) -> Finished:
        """The outcome of an episode whose plan is complete."""
        episodes, price = self.partial_plans.episodes, self._prices()[number : number + 1]
        seconds, overflow = price[0].tolist()
        worth = float(worth_s(price, self.reference_s)[0])
        return Finished(
            values=tuple(episodes.values[number].tolist()),
            step_time_s=seconds,
            overflow=overflow,
            worth_s=worth,
            log_gap=math.log(worth / self.first_bound_s),
            num_decisions=int(self.num_decisions[number]),
            num_operator_decisions=int(self.num_operator_decisions[number]),
        )

    def best_completion(self, number: int) -> tuple[Values, float] | None:
        """The fastest completion that fits, of those that an episode has priced, and its step time in seconds; None
        where none fits."""
        arrays = self.known.arrays
        seconds = float(arrays.best_s[number])
        return (tuple(arrays.best_values[number].tolist()), seconds) if seconds < math.inf else None

    def observe(self) -> Observation:
        """The features, [episodes, OBSERVED], and the masks of actions, [episodes, MAX_ACTIONS].

        For a complete plan all features are 0 and all actions are allowed.
        """
        seen = np.empty((self.count, OBSERVED), dtype=np.float32)
        mask = np.empty((self.count, MAX_ACTIONS), dtype=np.int8)
        self._features.write(self.partial_plans.episodes, self.known.arrays, seen, mask)
        return {"observation": seen, "action_mask": mask}


class PlanEnv(gymnasium.Env[Observation, np.int64]):
    """One plan as a gymnasium environment; subclasses say which slots the agent decides.

    Where the mask forbids an action, the nearest legal one is taken, so that any sampled action is harmless.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, decisions: Decisions, table: BoundTable | None = None) -> None:
        """Builds an environment; the templates of the space are priced for it.

        Args:
            decisions: which slots are decided.
            table: lower bounds of the space, if they have been computed already.
        """
        self.space = decisions.space
        self.episodes = Episodes(decisions, 1, table)
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


def space_of(problem: Problem | PlanSpace) -> PlanSpace:
    """The plan space of a problem, which may be given itself."""
    return problem if isinstance(problem, PlanSpace) else plan_space(problem)


def observation_space() -> Any:
    """The observation space of every environment."""
    return spaces.Dict(
        {
            "observation": spaces.Box(-LIMIT, LIMIT, (OBSERVED,), np.float32),
            "action_mask": spaces.Box(0, 1, (MAX_ACTIONS,), np.int8),
        }
    )
