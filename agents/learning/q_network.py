"""The network of the DQN, for stable-baselines3; `agents.learning.network` has the same numbers without torch."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.dqn.policies import DQNPolicy, QNetwork

from agents.learning.network import FORBIDDEN
from envs.decision import COMPLETION, MAX_ACTIONS, REWARD_SCALE
from envs.kernels import ACTION_FEATURES, STATE_FEATURES


class MaskedQNetwork(QNetwork):
    """Q values of legal actions; `FORBIDDEN` for the others.

    One network rates every action by the features of the state and those of the action. What the completion behind the
    action reaches is known and is added to its output.
    """

    def __init__(self, *args: Any, dropout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        layers: list[torch.nn.Module] = []
        for layer in self.q_net:
            layers += [layer, torch.nn.Dropout(dropout)] if isinstance(layer, torch.nn.ReLU) else [layer]
        self.q_net = torch.nn.Sequential(*layers)
        last = layers[-1]
        assert isinstance(last, torch.nn.Linear)
        # An untrained network adds nothing to what completions reach.
        torch.nn.init.zeros_(last.weight)
        torch.nn.init.zeros_(last.bias)

    def forward(self, obs: Any) -> torch.Tensor:
        """[batch, actions] Q values; `obs` holds tensors [batch, ...]."""
        mask, seen = obs["action_mask"] > 0.5, obs["observation"]
        rows, actions = mask.nonzero(as_tuple=True)
        features = seen[:, STATE_FEATURES:].reshape(len(seen), MAX_ACTIONS, ACTION_FEATURES)[rows, actions]
        q = torch.full(mask.shape, float(FORBIDDEN))
        rated: torch.Tensor = q.index_put((rows, actions), self.rate(seen[rows, :STATE_FEATURES], features))
        return rated

    def rate(self, states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """[n] Q value of each action, [n, ACTION_FEATURES], in its state, [n, STATE_FEATURES]."""
        more: torch.Tensor = self.q_net(torch.cat([states, actions], dim=1))[:, 0]
        return more - REWARD_SCALE * actions[:, COMPLETION]


class Sizes(torch.nn.Module):
    """Tells stable-baselines3 the number of inputs of the network."""

    def __init__(self, observation_space: spaces.Dict) -> None:
        super().__init__()
        self.features_dim = STATE_FEATURES + ACTION_FEATURES


class MaskedPolicy(DQNPolicy):
    """DQNPolicy over `MaskedQNetwork`."""

    def __init__(self, *args: Any, dropout: float, **kwargs: Any) -> None:
        self.dropout = dropout
        super().__init__(*args, **kwargs)

    def make_q_net(self) -> QNetwork:
        """A network; it is called twice, for the online and for the target network."""
        arguments = self._update_features_extractor(self.net_args, features_extractor=None)
        arguments["action_space"] = spaces.Discrete(1)
        return MaskedQNetwork(**arguments, dropout=self.dropout).to(self.device)
