"""The root of the errors that a user can repair, and those of reading a model.

    UserError                 names the field, the value and the repair
    └── ModelError            the model file or what the request says about it
        └── ModelTooExpensive the import ran into a limit (size, counts, memory, time)

The rest of the tree hangs below `UserError` in `automap/errors.py`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Self

NUM_MEANT = 3
"""Largest number of names that an error asks about (assumed)."""


class UserError(Exception):
    """An input that the user can repair.

    Attributes:
        field: what was wrong, as the user names it (`model`, `cluster`, `training.global_batch` ...).
        value: what it was, shortened; an empty text is "nothing", and None is "null" as in JSON.
        repair: what to do about it, one sentence.
    """

    def __init__(self, message: str, *, field: str, value: object, repair: str) -> None:
        super().__init__(message)
        self.message = printable(message, 1000)
        self.field = printable(field, 200)
        self.value = printable(_shown(value), 200)
        self.repair = printable(repair, 1000)

    def __str__(self) -> str:
        return f"{self.field}: {self.message} (got {self.value}). {self.repair}"

    @property
    def texts(self) -> dict[str, str]:
        """Message, field, value and repair by name; `type(error)(**error.texts)` is the same error."""
        return {name: getattr(self, name) for name in ("message", "field", "value", "repair")}

    def at(self, field: str) -> Self:
        """The same error under the name that the field has where the value was given."""
        return type(self)(**(self.texts | {"field": field}))

    def __reduce__(self) -> tuple[object, ...]:
        return (partial(type(self), **self.texts), ())


def _shown(value: object) -> str:
    """A value in words: of those that JSON and Python spell differently, null, true and false."""
    if isinstance(value, str):
        return value or "nothing"
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def printable(text: str, length: int) -> str:
    """`text`, shortened and printable: names in a file may hold control characters, which must reach no terminal.

    Args:
        text: any text.
        length: most characters of it that are kept.
    """
    if len(text) > length:
        text = text[: length - 3] + "..."
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class ModelError(UserError):
    """The model cannot be read, or something in it is missing."""


class ModelTooExpensive(ModelError):
    """Reading the model ran into a limit."""


def one_of(names: Iterable[str], given: object) -> str:
    """The repair of a name that is not known: the names that there are, and first the one that was probably meant."""
    known = list(names)
    if len(known) == 1:
        return f"Use {known[0]}."
    return f"{meant(known, given)}Use one of {', '.join(known)}."


def meant(names: Sequence[str], given: object) -> str:
    """Asks whether the name that is most like an unknown one was meant, or one of which this is a whole word, with a
    blank at its end; empty = there are none."""
    whole = [name for name in names if str(given).lower() in re.split(r"[\W_]+", name.lower())]
    near = list(dict.fromkeys([*nearest(names, given, most=1), *whole]))[:NUM_MEANT]
    return f"Did you mean {' or '.join(near)}? " if near else ""


def nearest(names: Iterable[str], given: object, *, most: int) -> list[str]:
    """The names that are like an unknown one, in any case of letters, the most alike first; at most `most`."""
    lowered = {name.lower(): name for name in reversed(list(names))}
    # A key of a document may be a megabyte.
    return [lowered[name] for name in difflib.get_close_matches(str(given)[:200].lower(), lowered, n=most)]


def refuse(message: str, value: object, repair: str) -> ModelError:
    """The error for something in the model itself, to be raised by the caller.

    Hostile files have things without names: the error says so in place of their name.
    """
    return ModelError(message, field="model", value="an empty name" if value == "" else value, repair=repair)


def too_expensive(message: str, value: object, repair: str) -> ModelTooExpensive:
    """The error for a model that runs into a limit, to be raised by the caller."""
    return ModelTooExpensive(message, field="model", value=value, repair=repair)


def ask_for_batch(name: str, rank: int) -> str:
    """A repair that asks which dim of an input is the batch, if it seems not to be the first one.

    Args:
        name: the input; empty = the file has none.
        rank: the number of its dims.
    """
    lead = "A network of one sample is exported with a leading dim of samples."
    if not name or rank < 2:
        return lead
    return (
        f"If the first dim of {name} is not the batch, say which dim is: `--batch-dim {name}=1`, in a request "
        f'"batch_dims": {{"{name}": 1}}. {lead}'
    )
