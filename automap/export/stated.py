"""What the configuration of a trainer says of a plan, and how what cannot be read is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from automap.errors import PlanError


@dataclass(kw_only=True, slots=True)
class Stated:
    """What a configuration says of a plan."""

    target: str
    """The target whose trainer reads it."""
    training: dict[str, Any] = field(default_factory=dict)
    """Fields of `automap.problem.Training`."""
    degrees: dict[str, Any] = field(default_factory=dict)
    """Fields of `automap.space.stated_strategy.Strategy`."""
    tokens: int | None = None
    """Tokens of a sample."""
    document: Mapping[str, Any] | None = None
    """A whole plan with its shards (`automap.export.onnx_devices`), in place of degrees."""
    ignored: tuple[str, ...] = ()
    """Names of what was not read."""


def refuse(name: str, value: object, message: str, repair: str) -> PlanError:
    """The error for a key of a configuration."""
    return PlanError(message, field=f"from.{name}", value=value, repair=repair)


def whole(name: str, value: object) -> int:
    """A number of at least 1, from a text or a number."""
    try:
        if isinstance(value, bool) or int(str(value)) < 1:
            raise ValueError
        return int(str(value))
    except ValueError:
        raise refuse(name, value, "is no number of 1 or more", "Write the number itself, not a variable.") from None


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
        what = "replicas of which a part shares the states are not priced"
        raise refuse(name, replicas, what, "Share them over all replicas.")
