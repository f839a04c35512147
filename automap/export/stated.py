"""The settings of a plan that a trainer's configuration states, and the errors for what cannot be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, TypeAlias

from automap.errors import PlanError

NEAR = 0.9
"""Similarity of two keys, by difflib's ratio, from which on one counts as a misspelling of the other (assumed): one
missing letter in ten."""


Beside: TypeAlias = Callable[[str], str | None]
"""Name of a file that a configuration names -> its text; None if no such file is in the folder of the configuration."""


def nothing_beside(name: str) -> str | None:
    """A `Beside` for configurations without further files."""
    return None


@dataclass(kw_only=True, slots=True)
class Stated:
    """The settings that a configuration states."""

    target: str
    """The target whose trainer reads it."""
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of `automap.problem.Training`."""
    degrees: dict[str, Any] = field(default_factory=dict)
    """Fields of `automap.space.stated_strategy.Strategy`."""
    accumulated: int | None = None
    """Samples of each replica in a step, if the file states these in place of the global batch."""
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
    """Settings that were read from defaults of a script, which environment variables may change."""
    remarks: tuple[str, ...] = ()
    """Further sentences for the user."""
    beside: str = ""
    """Name of a file that was read with it; empty for none."""

    def complete_batch(self, num_devices: int, degrees: Mapping[str, Any]) -> None:
        """Adds the global batch, if the file states the samples of a replica instead.

        Args:
            num_devices: devices of the cluster; all of them train if the number of replicas is not stated.
            degrees: degrees that are stated in addition to the configuration, as in `degrees`.
        """
        said = {**self.degrees, **degrees}
        others = math.prod(said.get(name, 1) for name in ("tp", "pp", "cp"))
        if self.accumulated is not None and num_devices % others == 0:
            replicas = said.get("dp") or num_devices // others
            self.training.setdefault("global_batch", self.accumulated * replicas)

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about what was read, assumed and not read."""
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
    """Refuses unknown keys that are nearly equal to a known one: a misspelled key would have no effect unnoticed.

    Args:
        given: the keys of the file with their values.
        read: the keys that are read, or that are known to mean something else.
        path: prefix of the keys in error messages.
    """
    for name, value in given.items():
        near = [] if name in read else get_close_matches(name, read, 1, NEAR)
        if near:
            raise refuse(f"{path}{name}", "set" if value is None else value, "is unknown", f"Write {path}{near[0]}.")


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Refuses a value that is not among `choices`."""
    if value not in choices:
        raise refuse(name, value, "is not a value of this key", f"Use {', '.join(map(str, choices))}.")


def recomputes(name: str, again: Sequence[object], layers: Sequence[object]) -> str:
    """The recompute mode, `full` or `none`, of the modules that an exported file recomputes.

    A layer in which a stage ends is recomputed module by module.

    Args:
        name: the key, for error messages.
        again: paths of the modules.
        layers: paths of the layers.
    """
    paths = tuple(map(str, again))
    left = [str(layer) for layer in layers if not any(f"{path}.".startswith(f"{layer}.") for path in paths)]
    if paths and (left or not layers):
        raise refuse(name, list(again), "names only some of the layers", "Recompute all of them, or none.")
    return "full" if paths else "none"


def layers_of_stages(layers: Sequence[object], stages: Sequence[Sequence[object]]) -> tuple[int, ...]:
    """[stages] number of layers; a layer belongs to the first stage that has a part of it.

    Args:
        layers: paths of the layers.
        stages: paths of the modules of each stage.
    """
    firsts = [
        next((n for n, paths in enumerate(stages) if any(f"{path}.".startswith(f"{layer}.") for path in paths)), -1)
        for layer in layers
    ]
    return tuple(firsts.count(number) for number in range(len(stages)))


def whole(name: str, value: object) -> int:
    """A number of at least 1, from a text or a number."""
    try:
        if isinstance(value, bool) or int(str(value)) < 1:
            raise ValueError
        return int(str(value))
    except ValueError:
        raise refuse(
            name, value, "is not a whole number of 1 or more", "Write 1 or more, as a number: variables are not read."
        ) from None


def sgd_kind(name: str, momentum: object) -> str:
    """Which optimizer SGD is: `sgd` without momentum, which keeps no state, or `momentum`."""
    try:
        return "momentum" if float(str(momentum)) > 0.0 else "sgd"
    except ValueError:
        raise refuse(name, momentum, "is not a number", "Write a factor such as 0.9, or 0.") from None


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
    """Refuses states that are sharded among some of the replicas only."""
    if replicas > 1 and shards > 1:
        what = "sharding states among some of the replicas only (HSDP) cannot be priced"
        raise refuse(name, replicas, what, "Shard them over all replicas.")
