"""Proposals: plans of a network that was trained on other problems, without further training.

The network comes with the package (`agents/learning/pretrained_network`, made by `automap train-agent`). The first plan
is the one that it rates best. Noise on its ratings makes the others differ, more of it on the few decisions about the
mesh, on which all others depend. What has been found is known to the plans after it. No plan is proposed twice, nor one
whose bound says that it cannot be the best.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
"""Number of plans that are proposed at the beginning of a search."""
SIDE_BY_SIDE = 8
"""Number of plans that are decided side by side; the next ones know what these have found."""
LEAST_NOISE, MOST_NOISE = 0.5, 3.0
"""Scales of the Gumbel noise on ratings. Each plan has one, drawn between the two so that all magnitudes are alike.
With 1, actions are drawn with the chances that the network was taught (`agents.learning.dqn.taught_loss`)."""
MESH_NOISE = 1.5
"""Factor of the noise on decisions about the mesh, on which all others depend."""
MESH_KINDS = frozenset(("pp", "tp", "middle", "micro_batches", "virtual"))
"""Kinds of slots that decide the mesh."""


class Proposed(NamedTuple):
    """A plan that a network has decided, or has looked at as a whole on the way."""

    values: Values
    step_time_s: float
    overflow: float
    """Overflow of memory, as a share of a device's capacity; at most 0 where the plan fits."""
    expected_s: float
    """Step time that the network expects when it takes the last decision, in seconds; the plan's own where the network
    did not decide it."""


def fitting(found: Sequence[Proposed]) -> list[Values]:
    """The distinct proposals that fit, the best last."""
    seconds = {one.values: one.step_time_s for one in found if one.overflow <= 0.0}
    return sorted(seconds, key=lambda values: -seconds[values])


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
    """Proposes plans until there are enough or the incumbent's budget ends.

    Args:
        incumbent: takes every plan that is found.
        episodes: episodes of the problem, at their beginning; they learn of the plans that are found.
        tree: what of these episodes has been explored.
        network: rates the decisions.
        seed: seed of the noise.
        most: number of plans to propose.

    Returns:
        The plans that were found, also those that fit and that the episodes have only looked at.
    """
    space, rng, count = incumbent.space, np.random.default_rng(seed), 0
    noise = np.array([*(MESH_NOISE if slot.kind in MESH_KINDS else 1.0 for slot in space.slots), 0.0])
    scale = np.zeros(episodes.count)
    # The first plan is the one that is rated best; the others begin when it is known.
    goes_on = np.arange(episodes.count) == 0
    found: list[Proposed] = []
    priced: set[Values] = set()
    while count < most and not (incumbent.finished or tree.is_exhausted):
        observation = episodes.observe()
        rated = network.rate(observation)
        drawn = rng.gumbel(size=rated.shape)
        spread = noise[episodes.partial_plans.episodes.position] * scale
        bounds_s, actions = episodes.partial_plans.episodes.bound[:, 0].copy(), np.full(episodes.count, WAITING)
        for number in np.flatnonzero(goes_on).tolist():
            legal = tree.open_actions(number, np.flatnonzero(observation["action_mask"][number]))
            worth = rated[number, legal] + spread[number] * drawn[number, legal]
            actions[number] = legal[worth.argmax()]
            tree.take(number, int(actions[number]))
        _, done = episodes.step(actions)
        for number in np.flatnonzero(done).tolist():
            if count < most and not incumbent.finished:
                expected_s = bounds_s[number] * math.exp(-rated[number, actions[number]] / REWARD_SCALE)
                taken = _take(incumbent, episodes, number, priced, expected_s)
                fits = [one.step_time_s for one in taken if one.overflow <= 0.0]
                if incumbent.first_proposal is None and count == 0 and fits:
                    incumbent.first_proposal = min(fits), incumbent.seconds
                found += taken
                count += 1
            tree.finish(number)
        if done.any():
            begins = done if goes_on.all() else np.ones_like(done)
            scale[begins] = np.exp(rng.uniform(np.log(LEAST_NOISE), np.log(MOST_NOISE), int(begins.sum())))
            episodes.begin(begins)
            goes_on[:] = True
    return found


def _take(
    incumbent: Incumbent, episodes: Episodes, number: int, priced: set[Values], expected_s: float
) -> list[Proposed]:
    """Hands the plan of a finished episode, and the best completion that it saw, to the incumbent and the episodes.

    Returns:
        Both; the step time `expected_s` is expected of the first.
    """
    ended, seen = episodes.finished(number), episodes.best_completion(number)
    # Two episodes side by side may come to one plan.
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
