"""Checkpoints of a parallelised network that any plan of the same model can read.

Fused weights are written in the order of the user's module, and tied weights once. Every process writes its part.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from automap.errors import UserError
from automap.runtime.mesh_groups import Axis
from automap.runtime.trainer.gradients import local_of
from automap.runtime.trainer.roles import Roles
from automap.runtime.trainer.sharded_modules import interleave, weight_dim

INDEX = ".metadata"
"""The file of a checkpoint that says what is in the others (torch.distributed.checkpoint.filesystem)."""


class Checkpoint:
    """The weights, buffers and optimizer state of a network on this rank, by their names in files."""

    def __init__(
        self, module: nn.Module, roles: Roles, ties: Mapping[str, str], axis: Axis, shards: DeviceMesh | None,
        device: torch.device, names: Collection[str], beside: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        """Takes a network that is split already.

        Args:
            module: the modules that this rank holds.
            ties: the names of shared parameters -> the first name of each.
            axis: the sharding axis.
            shards: the mesh over which ZeRO splits parameters; None without ZeRO.
            names: the names of all parameters and buffers of the network, of which this rank may hold a part.
            beside: parameters of the network that no stage reads, by name.
        """
        self._beside = beside
        self._module, self._roles, self._ties = module, roles, ties
        self._axis, self._shards, self._device = axis, shards, device
        self._every = [name for name in names if name not in ties]

    def save(self, folder: Path, optimizer: torch.optim.Optimizer, more: Mapping[str, Any]) -> None:
        """Writes everything to a folder; a checkpoint that is there is replaced once the new one is complete."""
        write(folder, {**self._file_tensors(optimizer), "more": more})

    def load(self, folder: Path, optimizer: torch.optim.Optimizer, more: Mapping[str, Any]) -> dict[str, Any]:
        """Reads what `save` wrote; returns `more` as it was saved.

        Raises:
            UserError: see `read`.
        """
        check_names(folder, self._every)
        names: dict[Tensor, tuple[str]] = {
            p: (self._ties.get(name, name),) for name, p in self._module.named_parameters()
        }
        prepare_state(optimizer, folder, names)
        state = {**self._file_tensors(optimizer), "more": dict(more)}
        read(folder, state)
        with torch.no_grad():
            for key, value in self._tensors(optimizer).items():
                fused = self._fused_order(key)
                if fused is not None and value.dim():
                    local_of(value).copy_(self._own_part(state[key], *fused))
                elif state[key] is not value:
                    value.copy_(state[key])
        for name, parameter in self._module.named_parameters():
            take_numbers(optimizer, parameter, f"optimizer.{self._ties.get(name, name)}", state)
        found: dict[str, Any] = state["more"]
        return found

    def _tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Every tensor of this rank by its name in files."""
        found = {f"model.{name}": tensor for name, tensor in self._beside.items()}
        for name, parameter in self._module.named_parameters():
            found[f"model.{self._ties.get(name, name)}"] = parameter.detach()
            for key, value in states_of(optimizer, parameter).items():
                found[f"optimizer.{self._ties.get(name, name)}.{key}"] = value
        parameters = {name for name, _ in self._module.named_parameters(remove_duplicate=False)}
        for name, buffer in self._module.state_dict().items():
            if name not in parameters:
                found[f"model.{name}"] = buffer
        return found

    def _file_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The tensors of `_tensors`, with fused weights whole and in the order of the user's module."""
        state: dict[str, Any] = self._tensors(optimizer)
        for key, value in state.items():
            fused = self._fused_order(key)
            if fused is not None and value.dim():
                order, dim = fused
                state[key] = _whole(value).index_select(dim, torch.argsort(order))
        return state

    def _fused_order(self, key: str) -> tuple[Tensor, int] | None:
        """The order in which ranks hold the outputs of a fused weight, and their dim; None for other tensors."""
        for path, role in self._roles.modules.items():
            for name in ("weight", "bias") if role.pieces else ():
                if f".{path}.{name}." not in f".{key}.":
                    continue
                dim = weight_dim(self._module.get_submodule(path), role.kind, name)
                if dim is not None:
                    return torch.tensor(interleave(role.pieces, self._roles.axis_size), device=self._device), dim
        return None

    def _own_part(self, whole: Tensor, order: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole fused weight."""
        part = whole.index_select(dim, order).chunk(self._axis.size, dim)[self._axis.index]
        if self._shards is None:
            return part
        parts = part.chunk(self._shards.size())
        index = self._shards.get_local_rank()
        return parts[index] if index < len(parts) else part[:0]


def states_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What an optimizer keeps of a parameter, by name; plain numbers, such as a count of steps, as tensors.

    Raises:
        UserError: it keeps something else.
    """
    found = {}
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, int | float):
            found[key] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, Tensor):
            found[key] = value
        elif value is not None:
            raise UserError(
                "checkpoints hold tensors and numbers of an optimizer's state, and no other values",
                field=f"optimizer.state.{key}", value=type(value).__name__,
                repair="Keep it as a tensor or a number, or in a param_group, which is not saved.",
            )  # fmt: skip
    return found


def take_numbers(optimizer: torch.optim.Optimizer, parameter: Tensor, name: str, read: Mapping[str, Tensor]) -> None:
    """Sets the plain numbers that an optimizer keeps of a parameter to those of a checkpoint.

    Args:
        name: the name in files that those of the parameter begin with.
        read: what was read, by name.
    """
    states = optimizer.state.get(parameter, {})
    for key, value in states.items():
        if isinstance(value, int | float):
            states[key] = type(value)(read[f"{name}.{key}"].item())


def write(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes what every process holds to a folder; what is there is replaced once all is written.

    Raises:
        UserError: a process cannot write there; on all of them.
    """
    fresh = Path(f"{folder}.writing")
    _on_first_process(folder, lambda: shutil.rmtree(fresh, ignore_errors=True))
    try:
        save(dict(state), checkpoint_id=fresh)
    except CheckpointException as fault:
        _on_first_process(folder, lambda: shutil.rmtree(fresh, ignore_errors=True))  # A full disk has room again.
        raise _unwritable(folder, *_first_failure(fault)) from None
    _on_first_process(folder, lambda: _replace(folder, fresh))


def read(folder: Path, state: dict[str, Any]) -> None:
    """Reads what `write` wrote, in place of the values of `state`.

    Raises:
        UserError: the folder is missing or damaged, or its checkpoint is one of another network or optimizer.
    """
    absent = [False] * dist.get_world_size()
    dist.all_gather_object(absent, not (folder / INDEX).is_file())
    if any(absent):
        # torch would write traces of it into the log.
        before = Path(f"{folder}.before")
        found = f"; {before} is there, which was to be replaced" if (before / INDEX).is_file() else ""
        raise _unreadable(folder, absent.index(True), f"No such file, {INDEX}{found}")
    try:
        load(state, checkpoint_id=folder)
    except CheckpointException as fault:
        raise _unreadable(folder, *_first_failure(fault)) from None


def check_names(folder: Path, names: Collection[str]) -> None:
    """Refuses a checkpoint that has more than a network, such as one with more layers.

    Args:
        folder: its folder.
        names: the names of all parameters and buffers of the network.

    Raises:
        UserError: names one that the network lacks.
    """
    more = sorted({n.removeprefix("model.") for n in _held(folder) or () if n.startswith("model.")}.difference(names))
    if more:
        raise UserError(
            f"is the checkpoint of another network: it holds {more[0]}"
            f"{f' and {len(more) - 1} more' if more[1:] else ''}, which this one lacks",
            field="folder", value=str(folder), repair="Give a checkpoint of the same network.",
        )  # fmt: skip


def _held(folder: Path) -> Collection[str] | None:
    """The names of what a checkpoint holds; None = `read` refuses it."""
    try:
        return FileSystemReader(folder).read_metadata().state_dict_metadata.keys()
    except Exception:  # `read` says what is wrong with it.
        return None


def _held_states(folder: Path) -> set[str] | None:
    """The names of the parameters of which a checkpoint holds the state of an optimizer; None = `read` refuses it."""
    held = _held(folder)
    if held is None:
        return None
    return {name.removeprefix("optimizer.").rpartition(".")[0] for name in held if name.startswith("optimizer.")}


def _first_failure(fault: CheckpointException) -> tuple[int, str]:
    """The first process that torch could not write or read a checkpoint on, and why."""
    rank, (failure, _) = min(fault.failures.items(), key=lambda one: one[0])
    return rank, f"{type(failure).__name__}, {' '.join(str(failure).split()) or 'a file ends too early'}"


def _unwritable(folder: Path, rank: int, why: str) -> UserError:
    return UserError(
        f"a checkpoint cannot be written there: process {rank} says {why}", field="folder", value=str(folder),
        repair="Give a folder that all processes can write to, with room for weights and the optimizer's state.",
    )  # fmt: skip


def _unreadable(folder: Path, rank: int, why: str) -> UserError:
    return UserError(
        f"no checkpoint that this network and optimizer can read: process {rank} says {why}",
        field="folder",
        value=str(folder),
        repair="Give the folder of a complete checkpoint of the same network and kind of optimizer.",
    )


def _on_first_process(folder: Path, work: Callable[[], None]) -> None:
    """The first process works for a checkpoint in a folder, the others wait for it.

    Raises:
        UserError: the work has failed; on all processes.
    """
    failed = [""]
    if dist.get_rank() == 0:
        try:
            work()
        except OSError as fault:
            failed = [f"{type(fault).__name__}, {fault}"]
    dist.broadcast_object_list(failed, 0)
    if failed[0]:
        raise _unwritable(folder, 0, failed[0])


def _replace(folder: Path, fresh: Path) -> None:
    """Puts a complete new folder in the place of an old one. One of them is complete at any moment, even if the process
    ends."""
    before = Path(f"{folder}.before")
    if folder.exists():
        shutil.rmtree(before, ignore_errors=True)
        folder.rename(before)
    fresh.rename(folder)
    shutil.rmtree(before, ignore_errors=True)


def _whole(value: Tensor) -> Tensor:
    """The whole tensor; it is gathered over the shards of ZeRO first, with one plain all-gather an axis."""
    if not isinstance(value, DTensor):
        return value.clone()
    outer = [Replicate()] * (value.device_mesh.ndim - 1)
    return value.redistribute(placements=[*outer, value.placements[-1]]).full_tensor()


def prepare_state(optimizer: torch.optim.Optimizer, folder: Path, names: Mapping[Tensor, Collection[str]]) -> None:
    """Makes an optimizer have the state that is to be read from a folder, with any values.

    It allocates its state by a step of zero gradients and zero rates. Where the checkpoint was written before the first
    step of an optimizer, or that keeps no state, it begins anew, as does the state of a parameter that had none, since
    no pass had reached it.

    Args:
        names: what the optimizer updates -> the names in files of the parameters of which this holds a part.
    """
    held = _held_states(folder)
    every = [p for group in optimizer.param_groups for p in group["params"]]
    had = [p for p in every if held is None or not held.isdisjoint(names.get(p, ()))]
    if held is None or any(not optimizer.state.get(p) for p in had):
        optimizer.state.clear()
        _allocate(optimizer, had)
    for parameter in set(every).difference(had):
        optimizer.state.pop(parameter, None)


def _allocate(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Makes the state of some parameters; all others have none."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = None
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
