"""The tree of errors.

UserError                     names the field, the value and the repair            (exit 2, HTTP 422)
├── ModelError                the model file, or what the request says about it
│   └── ModelTooExpensive     reading it ran into a limit
├── ClusterError              the cluster text or file
├── ProblemError              training or hints, or their fit to the model
├── PlanError                 a plan that is malformed or for another problem
└── NothingFits               every plan overflows memory: the nearest and by how much  (exit 3)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ir.errors import ModelError, ModelTooExpensive, UserError

__all__ = ["ClusterError", "ModelError", "ModelTooExpensive", "NothingFits", "PlanError", "ProblemError", "UserError"]


class ClusterError(UserError):
    """The cluster cannot be read or makes no sense."""


class ProblemError(UserError):
    """Training settings or hints that do not hold together or do not fit the model and the cluster."""


class PlanError(UserError):
    """A plan that is malformed, illegal or for another problem."""


class NothingFits(UserError):
    """No plan of the space fits into device memory.

    Attributes:
        nearest: the plan that overflows least, as JSON.
        changes: what would make some plan fit, the cheapest first, each {field, value, about, step_time_s}.
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
