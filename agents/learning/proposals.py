"""Proposals: plans of a network that was trained on other problems, without further training.

The network comes with the package (`agents/learning/pretrained_network`, made by `automap train-agent`). The first plan
takes the actions that the network rates best. For the other plans, noise is added to the ratings, and more noise to
those of the few decisions about the mesh, on which all others depend. Completions of later plans use the plans found
before. No plan is proposed twice, and none whose lower bound is above the step time of the best plan.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from agents.incumbent import Incumbent
from agents.learning.checkpoint import read_network
from agents.learning.network import ProposalNetwork
from agents.learning.search_tree import SearchTree
from automap.errors import ProblemError
from automap.space.space import Values
from envs.decision import REWARD_SCALE, WAITING, Episodes

LOG = logging.getLogger("automap.search")
NETWORK = Path(__file__).parent / "pretrained_network"
"""Folder of the network that comes with the package."""
PROPOSALS = 64
"""Number of plans that are proposed at the beginning of a search (assumed)."""
SIDE_BY_SIDE = 8
"""Number of plans that are decided at the same time (assumed)."""
LEAST_NOISE, MOST_NOISE = 0.5, 3.0
"""Scales of the Gumbel noise on ratings. Each plan has one, drawn between the two so that all magnitudes are alike.
With 1, actions are drawn with the chances that the network was taught (`agents.learning.dqn.taught_loss`)."""
MESH_NOISE = 1.5
"""Factor of the noise on decisions about the mesh, on which all others depend (assumed)."""
MESH_KINDS = frozenset(("pp", "tp", "middle", "micro_batches", "virtual"))
"""Kinds of slots that decide the mesh."""


class Proposed(NamedTuple):
    """A plan that a network has decided, or the best completion that it has seen while it decided one."""

    values: Values
    step_time_s: float
    overflow: float
    """Overflow of memory, as a share of a device's capacity; at most 0 where the plan fits."""
    expected_s: float
    """Step time in seconds that the network expects when it takes the last decision; that of the plan itself for a
    completion."""


def fitting(found: Sequence[Proposed]) -> list[Values]:
    """The distinct proposals that fit, the best last."""
    seconds = {one.values: one.step_time_s for one in found if one.overflow <= 0.0}
    return sorted(seconds, key=lambda values: -seconds[values])


def note_first(incumbent: Incumbent, found: Sequence[Proposed]) -> None:
    """Notes the best of the plans that a network finds first, and when, where one of them fits."""
    seconds = [one.step_time_s for one in found if one.overflow <= 0.0]
    if incumbent.first_proposal is None and seconds:
        incumbent.first_proposal = min(seconds), incumbent.seconds


def readable(folder: Path) -> ProposalNetwork | None:
    """The network in a folder; None, after a warning that names the fault, where it cannot be read."""
    try:
        return read_network(folder)
    except ProblemError as fault:
        LOG.warning("the search goes on without the network's proposals: %s", fault)
        return None


def propose(
    incumbent: Incumbent, episodes: Episodes, tree: SearchTree, network: ProposalNetwork, *, seed: int, most: int
) -> list[Proposed]:
    """Proposes plans until there are enough or the incumbent's budget ends, see `Proposals`.

    Args:
        incumbent, episodes, tree, network, seed: see `Proposals`.
        most: number of plans to propose.

    Returns:
        The plans that were found.
    """
    proposals = Proposals(incumbent, episodes, tree, network, seed=seed)
    note_first(incumbent, proposals.go_on(1))
    proposals.go_on(most - 1)
    return proposals.found


class Proposals:
    """Proposes plans; the first one alone, so that the others know what it has found.

    Attributes:
        episodes: episodes of the problem.
        found: the plans so far, and the best completions that fit.
    """

    def __init__(
        self, incumbent: Incumbent, episodes: Episodes, tree: SearchTree, network: ProposalNetwork, *, seed: int
    ) -> None:
        """Begins.

        Args:
            incumbent: takes every plan that is found.
            episodes: episodes of the problem, at their beginning; they learn of the plans that are found.
            tree: what these episodes have explored.
            network: rates the decisions.
            seed: seed of the noise.
        """
        self.episodes, self.found = episodes, list[Proposed]()
        self._incumbent, self._tree, self._network = incumbent, tree, network
        self._rng = np.random.default_rng(seed)
        self._noise = np.array(
            [*(MESH_NOISE if slot.kind in MESH_KINDS else 1.0 for slot in incumbent.space.slots), 0.0]
        )
        self._scale = np.zeros(episodes.count)
        # The first plan follows the ratings without noise; the others begin when it is known.
        self._goes_on = np.arange(episodes.count) == 0
        self._begins = np.zeros(episodes.count, dtype=np.bool_)

    @property
    def look_aheads(self) -> int:
        """Number of completions that were priced."""
        return int(self.episodes.known.arrays.priced[0])

    def go_on(self, most: int) -> list[Proposed]:
        """Proposes plans until there are enough or the incumbent's budget ends.

        Args:
            most: number of further plans to propose.

        Returns:
            What these have found.
        """
        count, before, incumbent = 0, len(self.found), self._incumbent
        while count < most and not (incumbent.finished or self._tree.is_exhausted):
            if self._begins.any():
                self._begin()
            done, expected_s = self._step()
            for number in np.flatnonzero(done).tolist():
                if count < most and not incumbent.finished:
                    self.found += take(incumbent, self.episodes, number, self._tree.priced, float(expected_s[number]))
                    count += 1
                self._tree.finish(number)
            self._begins = done if self._goes_on.all() or not done.any() else np.ones_like(done)
        return self.found[before:]

    def _begin(self) -> None:
        """Begins the next plans where others have ended, each with a scale of noise of its own."""
        begins, self._begins = self._begins, np.zeros_like(self._begins)
        scales = self._rng.uniform(np.log(LEAST_NOISE), np.log(MOST_NOISE), int(begins.sum()))
        self._scale[begins] = np.exp(scales)
        self.episodes.begin(begins)
        self._goes_on[:] = True

    def _step(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
        """Takes one decision of every plan.

        Returns:
            [episodes] whether each plan is complete, and [episodes] the step time expected after each decision, in
            seconds.
        """
        episodes = self.episodes
        observation, partial = episodes.observe(), episodes.partial_plans.episodes
        rated = self._network.rate(observation)
        drawn = self._rng.gumbel(size=rated.shape)
        spread = self._noise[partial.position] * self._scale
        actions = np.full(episodes.count, WAITING)
        expected_s = partial.bound[:, 0].copy()
        for number in np.flatnonzero(self._goes_on).tolist():
            legal = self._tree.open_actions(number, np.flatnonzero(observation["action_mask"][number]))
            worth = rated[number, legal] + spread[number] * drawn[number, legal]
            actions[number] = legal[worth.argmax()]
            expected_s[number] *= math.exp(-rated[number, actions[number]] / REWARD_SCALE)
            self._tree.take(number, int(actions[number]))
        _, done = episodes.step(actions)
        return done, expected_s


def take(
    incumbent: Incumbent, episodes: Episodes, number: int, priced: set[Values], expected_s: float
) -> list[Proposed]:
    """Gives the plan of a finished episode, and its best completion, to the incumbent and to the episodes.

    Returns:
        Both; the step time `expected_s` is expected of the first.
    """
    ended, seen = episodes.finished(number), episodes.best_completion(number)
    # Two episodes that run at the same time may end with the same plan.
    if ended.values not in priced:
        priced.add(ended.values)
        incumbent.add(ended.values, ended.step_time_s, ended.overflow)
    episodes.known.add(ended.values, (ended.step_time_s, ended.overflow))
    found = [Proposed(ended.values, ended.step_time_s, ended.overflow, expected_s)]
    if seen is not None:
        values, seconds = seen
        incumbent.add_from(incumbent.searcher, values, seconds, 0.0)
        episodes.known.add(values, (seconds, 0.0))
        found.append(Proposed(values, seconds, 0.0, seconds))
    return found
