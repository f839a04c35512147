"""The root of the errors that a user can repair, and those of reading a model.

    UserError                 names the field, the value and the repair
    └── ModelError            the model file or what the request says about it
        └── ModelTooExpensive the import ran into a limit (size, counts, memory, time)

The rest of the tree hangs below `UserError` in `automap/errors.py`.
"""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave that the user can repair.

    Attributes:
        field: what was wrong, as the user names it (`model`, `cluster`, `training.global_batch` ...).
        value: what it was, shortened.
        repair: what to do about it, one sentence.
    """

    def __init__(self, message: str, *, field: str, value: object, repair: str) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        text = value if isinstance(value, str) else repr(value)
        self.value = text if len(text) <= 200 else text[:197] + "..."
        self.repair = repair

    def __str__(self) -> str:
        return f"{self.field}: {self.message} (got {self.value}). {self.repair}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.field, self.value, self.repair))


def _rebuild(kind: type[UserError], message: str, field: str, value: str, repair: str) -> UserError:
    return kind(message, field=field, value=value, repair=repair)


class ModelError(UserError):
    """The model cannot be read or lacks something."""


class ModelTooExpensive(ModelError):
    """Reading the model ran into a limit."""
