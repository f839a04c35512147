"""The tree of errors.

UserError                     names the field, the value and the repair          (exit 2, HTTP 422)
├── ModelError                the model file, or the request's description of it
│   └── ModelTooExpensive     reading the model exceeded a limit
├── ClusterError              the cluster text or file
├── ProblemError              training settings or hints, or a mismatch with the model
├── PlanError                 a plan that is malformed, illegal or for another problem
└── NothingFits               no plan fits into memory; says by how much             (exit 3)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ir.errors import ModelError, ModelTooExpensive, UserError, meant, nearest, one_of, printable

__all__ = [
    "ClusterError",
    "ModelError",
    "ModelTooExpensive",
    "NothingFits",
    "PlanError",
    "ProblemError",
    "UserError",
    "meant",
    "nearest",
    "one_of",
    "printable",
]


class ClusterError(UserError):
    """A cluster that cannot be read or is inconsistent."""


class ProblemError(UserError):
    """Training settings or hints that contradict each other or do not fit the model and the cluster."""


class PlanError(UserError):
    """A plan that is malformed, illegal or for another problem."""


class NothingFits(UserError):
    """No plan of the space fits into device memory.

    Attributes:
        nearest: the plan with the least overflow, as JSON.
        changes: changes of the problem that make some plan fit, the cheapest first, each with the keys field, value,
            about and step_time_s.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str,
        value: object,
        repair: str,
        nearest: Mapping[str, Any] | None = None,
        changes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(message, field=field, value=value, repair=repair)
        self.nearest = nearest
        self.changes = tuple(changes)
