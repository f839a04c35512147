"""Checkpoints: a folder with an agent's numbers (safetensors) and a description (JSON). Nothing in it is code.

`agent.safetensors` holds the network, its target copy and Adam's moments; `agent.json` holds the sizes of the network,
the hyperparameters, and what the writer adds: how far a search has come, or what a network was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from stable_baselines3 import DQN

from agents.learning.hyperparameters import Hyperparameters
from automap.errors import ProblemError
from envs.kernels import ACTION_FEATURES, STATE_FEATURES

SCHEMA = "automap.agent/1"
TENSORS, ABOUT = "agent.safetensors", "agent.json"
_NETWORK, _TARGET, _MOMENTS = "network.", "target.", "moments."


def write_checkpoint(
    agent: DQN, parameters: Hyperparameters, folder: Path, about: Mapping[str, Any], *, only_network: bool = False
) -> None:
    """Writes an agent.

    Args:
        agent: the agent.
        parameters: its hyperparameters.
        folder: made if it does not exist.
        about: further entries of the JSON document.
        only_network: leave out what only further learning needs.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {_NETWORK + name: value for name, value in agent.q_net.state_dict().items()}
    if not only_network:
        tensors |= {_TARGET + name: value for name, value in agent.q_net_target.state_dict().items()}
        for index, state in agent.policy.optimizer.state_dict()["state"].items():
            tensors |= {f"{_MOMENTS}{index}.{name}": value for name, value in state.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / TENSORS)
    document = {"schema": SCHEMA, "network": _network(parameters), "hyperparameters": asdict(parameters)}
    (folder / ABOUT).write_text(json.dumps({**document, **about}, indent=1) + "\n")


def read_checkpoint(agent: DQN, parameters: Hyperparameters, folder: Path) -> dict[str, Any]:
    """Reads the numbers of an agent from a checkpoint of the same network, and returns the JSON document.

    Raises:
        ProblemError: a file is missing or damaged, or the checkpoint is of another network.
    """
    try:
        about: dict[str, Any] = json.loads((folder / ABOUT).read_text())
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as fault:
        raise _refused(folder, f"cannot be read: {fault}") from None
    if about.get("schema") != SCHEMA or about.get("network") != _network(parameters):
        raise _refused(folder, f"is of another network, {about.get('network')}; this one is {_network(parameters)}")
    try:
        agent.q_net.load_state_dict(_part(tensors, _NETWORK))
        agent.q_net_target.load_state_dict(_part(tensors, _TARGET) or _part(tensors, _NETWORK))
    except RuntimeError as fault:
        raise _refused(folder, str(fault)) from None
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in _part(tensors, _MOMENTS).items():
        index, kind = name.split(".")
        moments.setdefault(int(index), {})[kind] = value
    optimizer = agent.policy.optimizer
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return about


def _network(parameters: Hyperparameters) -> dict[str, Any]:
    """The sizes by which networks are told apart."""
    return {
        "state_features": STATE_FEATURES,
        "action_features": ACTION_FEATURES,
        "num_signs": parameters.num_signs,
        "hidden": list(parameters.hidden),
    }


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _refused(folder: Path, why: str) -> ProblemError:
    return ProblemError(
        f"the checkpoint {why}",
        field="checkpoint",
        value=str(folder),
        repair="Name another folder, or remove this one.",
    )
