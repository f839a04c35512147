"""Labels: the best plans that are known of generated problems, and the folder in which they are kept.

A folder holds files `labels-<n>.jsonl`, one label a line. Each file has one writer at a time, so several processes may
fill one folder, and an interruption costs at most the line that was being written. Units: seconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from agents.learning.problems import VERSION, GeneratedProblem, outline
from automap.errors import ProblemError, UserError
from automap.records import from_json, to_json

LOG = logging.getLogger("automap.search")


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """The best plan that a teacher has found for a generated problem."""

    seed: int
    """Seed of the problem."""
    version: str
    """What the generator draws from this seed, see `drawn_version`."""
    digest: str
    """The problem with its graph, see `agents.learning.problems.problem_digest`."""
    fits: bool
    """Whether a plan was found that fits into memory; the fields of plans are None if not."""
    values: tuple[int, ...] | None = None
    """[slots] the plan, as values of the `PlanSpace` of the problem."""
    step_time_s: float | None = None
    """Step time of the plan."""
    expert_s: float | None = None
    """Step time of the best template; None if no template fits."""
    lower_bound_s: float | None = None
    """Step time that no plan of the problem goes below."""
    found_by: str | None = None
    """Searcher that found the plan; None where a planner has found a faster one outside the space."""
    proven: bool = False
    """Whether no plan of the space is faster by more than the plan was simplified, see `teacher.simplify`."""
    seconds: float
    """Duration of the search."""
    network: str | None = None
    """Digest of the network from whose proposals, beside those of the shipped one, the search began; None if there was
    none. See `agents.learning.checkpoint.network_digest`."""

    def is_of(self, generated: GeneratedProblem) -> bool:
        """Whether the label was made for exactly this problem."""
        return self.digest == generated.digest


def drawn_version(seed: int) -> str:
    """Version of the generator together with what it draws from a seed, as 16 hexadecimal digits.

    It is found without building the problem, and differs wherever model, cluster or training differ.
    """
    text = f"{VERSION} {outline(seed).description}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_labels(folder: Path) -> dict[int, Label]:
    """The labels of a folder by seed; of several labels of one seed, the fastest, of equally fast ones the first.

    Lines that were cut short are left out. So are labels of another version of the generator, with one warning.
    """
    found: dict[int, Label] = {}
    num_old = 0
    for label in _lines(folder):
        if label.version != drawn_version(label.seed):
            num_old += 1
        elif label.seed not in found or is_better(label, found[label.seed]):
            found[label.seed] = label
    if num_old:
        LOG.warning("%s: %d labels of another version of the generator are left out", folder, num_old)
    return found


def seeds_of(folder: Path, network: str) -> set[int]:
    """Seeds of the problems whose search has begun from the proposals of a network, given by its digest."""
    return {
        label.seed
        for label in _lines(folder)
        if label.network == network and label.version == drawn_version(label.seed)
    }  # fmt: skip


def is_better(label: Label, other: Label) -> bool:
    """Whether a label has a faster plan than another one; the slowest is to have none."""
    infinite = float("inf")
    return (label.step_time_s or infinite) < (other.step_time_s or infinite)


def _lines(folder: Path) -> Iterator[Label]:
    for path in sorted(folder.glob("labels-*.jsonl")):
        for line in path.read_text("utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError, UserError):
                yield from_json(Label, json.loads(line), path=path.name)


class LabelWriter:
    """Writes labels to a file of its own in a folder, which it makes where there is none."""

    def __init__(self, folder: Path) -> None:
        """Takes the first file that no other writer has, and removes the line at its end that was cut short.

        Raises:
            ProblemError: the folder cannot be made or written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = next(
                file for n in itertools.count() if (file := _locked(folder / f"labels-{n}.jsonl")) is not None
            )
        except OSError as fault:
            raise ProblemError(
                f"cannot be written ({fault.strerror})",
                field="folder",
                value=str(folder),
                repair="Name another folder.",
            ) from None

    def write(self, label: Label) -> None:
        """Adds a label."""
        self._file.write(json.dumps(to_json(label)).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> LabelWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _locked(path: Path) -> BinaryIO | None:
    """The file, locked and ready to append whole lines; None where another writer has it."""
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    file.seek(0)
    file.truncate(file.read().rfind(b"\n") + 1)
    return file
