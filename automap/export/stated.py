"""What the configuration of a trainer says of a plan, and how what cannot be read is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias

from automap.errors import PlanError

NEAR = 0.9
"""Likeness of two keys from which on one is taken for a slip (assumed): a letter that is missing in ten."""


Beside: TypeAlias = Callable[[str], str | None]
"""Name of a file that a configuration names -> its text; None where it does not lie beside the configuration."""


def nothing_beside(name: str) -> str | None:
    """No file lies beside the configuration."""
    return None


@dataclass(kw_only=True, slots=True)
class Stated:
    """What a configuration says of a plan."""

    target: str
    """The target whose trainer reads it."""
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of `automap.problem.Training`."""
    degrees: dict[str, Any] = field(default_factory=dict)
    """Fields of `automap.space.stated_strategy.Strategy`."""
    accumulated: int | None = None
    """Samples of each replica in a step, where the file says them and not the global batch."""
    tokens: int | None = None
    """Tokens of a sample."""
    num_layers: int | None = None
    """Layers of the model."""
    document: Mapping[str, Any] | None = None
    """A whole plan with its shards (`automap.export.onnx_devices`), in place of degrees."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Further sizes of the model, by their names in Megatron-LM's arguments."""
    ignored: tuple[str, ...] = ()
    """Names of what was not read."""
    defaults: tuple[str, ...] = ()
    """What was read and may be otherwise: defaults that the environment of a script may change."""
    remarks: tuple[str, ...] = ()
    """What else the user should know."""
    beside: str = ""
    """Name of a file that was read with it; empty for none."""

    def complete_batch(self, num_devices: int, degrees: Mapping[str, Any]) -> None:
        """Adds the global batch, where the file says the samples of a replica.

        Args:
            num_devices: devices of the cluster, which all train where nothing says how many replicas there are.
            degrees: what is stated beside the configuration, as in `degrees`.
        """
        said = {**self.degrees, **degrees}
        others = math.prod(said.get(name, 1) for name in ("tp", "pp", "cp"))
        if self.accumulated is not None and num_devices % others == 0:
            replicas = said.get("dp") or num_devices // others
            self.training.setdefault("global_batch", self.accumulated * replicas)

    @property
    def notes(self) -> list[str]:
        """What the user should know of how it was read."""
        notes = [f"read with {self.beside} beside it"] if self.beside else []
        notes += [f"not read: {', '.join(self.ignored)}"] if self.ignored else []
        notes += self.remarks
        if self.defaults:
            notes.append(f"defaults of the script, which its environment may change: {', '.join(self.defaults)}")
        return notes


def refuse(name: str, value: object, message: str, repair: str) -> PlanError:
    """The error for a key of a configuration."""
    return PlanError(message, field=f"from.{name}", value=value, repair=repair)


def check_names(given: Mapping[str, Any], read: Collection[str], path: str = "") -> None:
    """Refuses keys that nobody reads and that are nearly one that is read: a slip of the pen would go unnoticed.

    Args:
        given: what the file says.
        read: the keys that are read, or that are known to mean something else.
        path: what stands before the keys where the user is told.
    """
    for name, value in given.items():
        near = [] if name in read else get_close_matches(name, read, 1, NEAR)
        if near:
            raise refuse(f"{path}{name}", "set" if value is None else value, "is unknown", f"Write {path}{near[0]}.")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuses a value that is none of some."""
    if value not in choices:
        raise refuse(name, value, "is not a value of this key", f"Use {', '.join(map(str, choices))}.")


def whole(name: str, value: object) -> int:
    """A number of at least 1, from a text or a number."""
    try:
        if isinstance(value, bool) or int(str(value)) < 1:
            raise ValueError
        return int(str(value))
    except ValueError:
        raise refuse(
            name, value, "is no number of 1 or more", "Write 1 or more, as a number: variables are not read."
        ) from None


def sgd_kind(name: str, momentum: object) -> str:
    """Which optimizer SGD is: `sgd` without momentum, which keeps no state, or `momentum`."""
    try:
        return "momentum" if float(str(momentum)) > 0.0 else "sgd"
    except ValueError:
        raise refuse(name, momentum, "is no number", "Write a factor such as 0.9, or 0.") from None


def section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a document that has keys; empty where there is none."""
    found = document.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise refuse(name, found, "has no keys", "Write it as a map of keys and values.")
    return found


def ranks_of(given: Mapping[str, Any], path: str, prefix: str, ending: str) -> dict[str, int]:
    """Entries of a section that are numbers of ranks, without prefix and ending; -1 is left out."""
    names = [name for name in given if name.startswith(prefix) and name.endswith(ending) and given[name] != -1]
    return {n.removeprefix(prefix).removesuffix(ending): whole(path + n, given[n]) for n in names}


def check_shards(name: str, replicas: int, shards: int) -> None:
    """Refuses replicas of which a part shares the states."""
    if replicas > 1 and shards > 1:
        what = "sharding states among some of the replicas only (HSDP) cannot be priced"
        raise refuse(name, replicas, what, "Shard them over all replicas.")
