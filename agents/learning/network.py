"""The network that proposes plans, without torch: the same numbers as `agents.learning.q_network.MaskedQNetwork`.

Every search begins with proposals, and importing torch takes longer than a short search.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from envs.decision import COMPLETION, MAX_ACTIONS, REWARD_SCALE, Observation
from envs.kernels import ACTION_FEATURES, STATE_FEATURES

Floats32 = npt.NDArray[np.float32]

FORBIDDEN = np.float32(-1e9)
"""Q value of a masked action."""


def legal_rows(observation: Observation) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Floats32]:
    """The legal actions of all episodes.

    Returns:
        [n] number of the episode, [n] action, [n, ACTION_FEATURES] features of the action; in this order.
    """
    rows, actions = np.nonzero(observation["action_mask"])
    seen = observation["observation"]
    features = seen[:, STATE_FEATURES:].reshape(len(seen), MAX_ACTIONS, ACTION_FEATURES)
    return rows, actions, features[rows, actions]


class ProposalNetwork:
    """A network of linear layers with rectifiers between them, which rates legal actions."""

    def __init__(self, tensors: Mapping[str, Floats32]) -> None:
        """Takes the tensors of `MaskedQNetwork.q_net`: `q_net.<layer>.weight` and `q_net.<layer>.bias`."""
        layers = sorted({int(name.split(".")[1]) for name in tensors})
        self._layers = [(tensors[f"q_net.{n}.weight"].T.copy(), tensors[f"q_net.{n}.bias"]) for n in layers]

    def rate(self, observation: Observation) -> Floats32:
        """[episodes, MAX_ACTIONS] Q values; `FORBIDDEN` for masked actions."""
        rows, actions, features = legal_rows(observation)
        (weights, bias), *others = self._layers
        # The state is the same for all actions of an episode.
        states = observation["observation"][:, :STATE_FEATURES] @ weights[:STATE_FEATURES] + bias
        found = states[rows] + features @ weights[STATE_FEATURES:]
        for weights, bias in others:
            found = np.maximum(found, 0.0) @ weights + bias
        rated = np.full(observation["action_mask"].shape, FORBIDDEN)
        rated[rows, actions] = found[:, 0] - np.float32(REWARD_SCALE) * features[:, COMPLETION]
        return rated
