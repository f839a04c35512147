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

from ir.errors import ModelError, ModelTooExpensive, UserError

__all__ = ["ClusterError", "ModelError", "ModelTooExpensive", "NothingFits", "PlanError", "ProblemError", "UserError"]


class ClusterError(UserError):
    """The cluster cannot be read or makes no sense."""


class ProblemError(UserError):
    """Training settings or hints that do not hold together or do not fit the model and the cluster."""


class PlanError(UserError):
    """A plan that is malformed, illegal or for another problem."""


class NothingFits(UserError):
    """No plan of the space fits into device memory."""
