"""Checkpoints: a folder with an agent's numbers (safetensors) and a description (JSON). Nothing in it is code.

`agent.safetensors` holds the network, its target copy and Adam's moments; `agent.json` holds the features that the
network reads and its sizes, the hyperparameters, and what the writer adds: how far a search has come, or what a network
was trained on. A network alone is read without torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from agents.learning.hyperparameters import Hyperparameters
from agents.learning.network import ProposalNetwork
from automap.errors import ProblemError
from envs.kernels import ACTION, ACTION_FEATURES, STATE, STATE_FEATURES

if TYPE_CHECKING:
    from stable_baselines3 import DQN

SCHEMA = "automap.agent/2"
TENSORS, ABOUT = "agent.safetensors", "agent.json"
_NETWORK, _TARGET, _MOMENTS = "network.", "target.", "moments."

Tensors = dict[str, np.ndarray]


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
    document = {"schema": SCHEMA, "network": _network(parameters), "hyperparameters": asdict(parameters)}
    text = json.dumps({**document, **about}, indent=1) + "\n"
    # Each file is complete or not there, whenever the writer is interrupted.
    for name, write in (
        (TENSORS, lambda path: save_file({key: value.numpy() for key, value in tensors.items()}, path)),
        (ABOUT, lambda path: path.write_text(text, "utf-8")),
    ):
        write(folder / f"{name}.new")
        (folder / f"{name}.new").replace(folder / name)


def read_network(folder: Path) -> ProposalNetwork:
    """Reads the network of a checkpoint, without torch; it has the default sizes of `Hyperparameters`.

    Raises:
        ProblemError: a file is missing or damaged, or the checkpoint is of another network.
    """
    _, tensors = _read(Hyperparameters(), folder)
    try:
        return ProposalNetwork(_part(tensors, _NETWORK))
    except (KeyError, ValueError) as fault:
        raise _refused(folder, f"has no network: {fault}") from None


def network_digest(folder: Path) -> str:
    """What tells the network of a checkpoint from others: 16 hexadecimal digits of the digest of its numbers.

    Raises:
        ProblemError: the file cannot be read.
    """
    try:
        return hashlib.sha256((folder / TENSORS).read_bytes()).hexdigest()[:16]
    except OSError as fault:
        raise _refused(folder, f"cannot be read: {fault}") from None


def read_checkpoint(agent: DQN, parameters: Hyperparameters, folder: Path) -> dict[str, Any]:
    """Reads the numbers of an agent from a checkpoint of the same network, and returns the JSON document.

    Raises:
        ProblemError: a file is missing or damaged, or the checkpoint is of another network.
    """
    import torch

    about, arrays = _read(parameters, folder)
    tensors = {name: torch.from_numpy(value) for name, value in arrays.items()}
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


def read_about(folder: Path) -> dict[str, Any]:
    """The JSON document of a checkpoint.

    Raises:
        ProblemError: it cannot be read, or is not a description of a network.
    """
    try:
        about = json.loads((folder / ABOUT).read_text("utf-8"))
    except (OSError, ValueError) as fault:
        raise _refused(folder, f"cannot be read: {fault}") from None
    if not isinstance(about, dict):
        raise _refused(folder, "does not describe a network")
    return about


def _read(parameters: Hyperparameters, folder: Path) -> tuple[dict[str, Any], Tensors]:
    """The JSON document and the tensors of a checkpoint."""
    about = read_about(folder)
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, ValueError, SafetensorError) as fault:
        raise _refused(folder, f"cannot be read: {fault}") from None
    if about.get("schema") != SCHEMA:
        raise _refused(folder, f"is of version {about.get('schema')}; this program reads {SCHEMA}")
    if about.get("network") != _network(parameters):
        raise _refused(folder, f"is of another network, {about.get('network')}; this one is {_network(parameters)}")
    return about, tensors


def _network(parameters: Hyperparameters) -> dict[str, Any]:
    """What networks are told apart by: the features that they read, and their sizes."""
    return {
        "state_features": [STATE_FEATURES, *(STATE.names or ())],
        "action_features": [ACTION_FEATURES, *(ACTION.names or ())],
        "hidden": list(parameters.hidden),
    }


def _part(tensors: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _refused(folder: Path, why: str) -> ProblemError:
    return ProblemError(
        f"the checkpoint {why}",
        field="checkpoint",
        value=str(folder),
        repair="Name another folder, or remove this one.",
    )
