"""Published training runs: what a file of the `published_runs` format says of each run.

A run has the sections `stack` (the trainer), `model`, `cluster`, `strategy` and `measured`. Nothing is interpreted
here. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automap.documents import read_file
from automap.errors import ProblemError

SECTIONS = ("model", "cluster", "strategy", "measured")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured training run."""

    id: str
    group: str
    """The group of runs that errors are reported for."""
    stack: str
    """The name of the trainer."""
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    strategy: Mapping[str, Any]
    iteration_s: float
    """The measured step time."""
    peak_memory_bytes: float | None
    """The measured peak memory of a device, if the source states it."""
    source: str = ""
    """Where the run was published."""

    @property
    def choice_group(self) -> tuple[Any, ...]:
        """A key that runs share which differ in their plan alone."""
        model = tuple(sorted((k, str(v)) for k, v in self.model.items() if k != "params"))
        cluster = tuple(sorted((k, str(v)) for k, v in self.cluster.items()))
        return self.stack, model, cluster, self.strategy.get("global_batch"), self.strategy.get("precision")


def load_runs(path: Path) -> tuple[Run, ...]:
    """The runs of a file.

    Raises:
        ProblemError: the file is not a list of runs.
    """
    document = read_file(path, field="runs", error=ProblemError)
    if not isinstance(document, list):
        raise ProblemError("not a list", field="runs", value=str(path), repair="Give a JSON list of runs.")
    return tuple(_run(item, f"runs[{i}]") for i, item in enumerate(document))


def _run(item: object, path: str) -> Run:
    if not isinstance(item, dict):
        raise ProblemError("not an object", field=path, value=item, repair="Give an object with id, group and so on.")
    for key, kind in (("id", str), ("group", str), ("stack", str), *((name, dict) for name in SECTIONS)):
        if not isinstance(item.get(key), kind):
            raise ProblemError(
                "missing or of the wrong type", field=f"{path}.{key}", value=item.get(key),
                repair=f"Give {'an object' if kind is dict else 'a string'}.",
            )  # fmt: skip
    seconds, peak = item["measured"].get("iteration_s"), item["measured"].get("peak_memory_GB")
    for name, value in (("iteration_s", seconds), ("peak_memory_GB", peak)):
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not number and not (name == "peak_memory_GB" and value is None):
            raise ProblemError(
                "not a positive number", field=f"{path}.measured.{name}", value=value,
                repair="Give a positive number.",
            )  # fmt: skip
    return Run(
        id=item["id"],
        group=item["group"],
        stack=item["stack"],
        model=item["model"],
        cluster=item["cluster"],
        strategy=item["strategy"],
        iteration_s=float(seconds),
        peak_memory_bytes=None if peak is None else float(peak) * 1e9,
        source=str(item.get("source") or ""),
    )
