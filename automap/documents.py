"""JSON from users: the one reader of files, request bodies and Python values.

A document that was read contains finite numbers, Unicode text and no duplicate keys, and is nested no deeper than
`MAX_DEPTH`, so that it can be stored and written again. Records are not known here; `automap.records` reads them from
documents.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ir.errors import UserError

MAX_DEPTH = 64
"""Levels of nesting that are read. Documents of this project have at most 9: a plan with a timeline in hints of a
job."""
MAX_DIGITS = 400
"""Digits of an integer. A longer one exceeds the largest double, 1.8e308, and takes quadratic time to read."""
SHOWN = 40
"""Characters of a text that is not JSON which the error shows."""
DOCUMENT = "document"
"""Name of a document in errors if the user has none for it."""


class _Twice(dict[str, Any]):
    """An object with a duplicate key, which is `key`."""

    key = ""


def read_document(text: str | bytes, *, field: str = "", error: type[UserError] = UserError) -> Any:
    """The document of a JSON text.

    Args:
        text: JSON; bytes are UTF-8.
        field: how the user names the document, the start of the paths in errors; empty where it has no name.
        error: the exception to raise.

    Raises:
        UserError: (of type `error`) the text is not JSON, has a duplicate key or a value that `check_document` refuses.
    """
    start = text[:SHOWN]
    return _read(text, field, error, shown=start if isinstance(start, str) else start.decode(errors="replace"))


def read_file(path: Path, *, field: str, error: type[UserError]) -> Any:
    """The document of a JSON file, of stdin where the path is `-`; see `read_document`.

    Raises:
        UserError: (of type `error`) the file cannot be opened, or as in `read_document`.
    """
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as fault:
        repair = "Name a readable JSON file."
        raise error(f"cannot be read ({fault.strerror})", field=field, value=str(path), repair=repair) from None
    return _read(data, field, error, shown=str(path))


def check_document(document: object, *, field: str = "", error: type[UserError] = UserError) -> None:
    """Refuses values that JSON or a double cannot represent: NaN, infinities, larger integers, text that is not
    Unicode.

    Args:
        document: dicts, lists, tuples, strings and numbers; other values are not checked.
        field: see `read_document`.
        error: see `read_document`.

    Raises:
        UserError: (of type `error`) names the path of the first such value.
    """
    _check(document, field, MAX_DEPTH, error)


def _read(text: str | bytes, field: str, error: type[UserError], shown: str) -> Any:
    try:
        document = json.loads(
            text if isinstance(text, str) else text.decode("utf-8-sig"),
            object_pairs_hook=_object,
            parse_int=lambda digits: int(digits) if len(digits) <= MAX_DIGITS else float(digits),
        )
    except RecursionError:
        raise _too_deep(field, error) from None
    except ValueError as fault:
        why = f"not UTF-8 at byte {fault.start}" if isinstance(fault, UnicodeDecodeError) else str(fault)
        why = why if text.strip() else "it is empty"
        repair = "Write one JSON document in UTF-8."
        raise error(f"cannot be read as JSON ({why})", field=field or DOCUMENT, value=shown, repair=repair) from None
    check_document(document, field=field, error=error)
    return document


def joined(path: str, key: str) -> str:
    """The path of `key` inside `path`; an empty key is shown as quotes, so that no path is empty."""
    shown = key or '""'
    return f"{path}.{shown}" if path else shown


def _check(value: object, path: str, levels: int, error: type[UserError]) -> None:
    """Refuses texts, numbers and nesting that a document may not have; `levels` is how much deeper it may be nested."""
    if isinstance(value, str):
        _check_text(value, path, error)
    elif isinstance(value, int | float):
        _check_number(value, path, error)
    elif isinstance(value, Mapping | list | tuple):
        if levels == 0:
            raise _too_deep(path, error)
        if isinstance(value, _Twice):
            field = joined(path, value.key)
            repair = "Keep one of the two."
            raise error("this key is given twice in one object", field=field, value=value.key, repair=repair)
        for item_path, item in _items(value, path, error):
            _check(item, item_path, levels - 1, error)


def _items(
    value: Mapping[Any, object] | Sequence[object], path: str, error: type[UserError]
) -> Iterator[tuple[str, object]]:
    """(path, item) of everything in an object or a list; refuses keys that are not Unicode text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                _check_text(key, path, error)
            yield joined(path, str(key)), item
    else:
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item


def _check_text(text: str, path: str, error: type[UserError]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        repair = "Write both halves, or the character itself."
        raise error(
            "half of a surrogate pair, which is not Unicode text", field=path or DOCUMENT, value=text, repair=repair
        ) from None


def _check_number(value: float, path: str, error: type[UserError]) -> None:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if not math.isfinite(number):
        repair = "Give a finite number."
        raise error("not a finite number of at most 1.8e308", field=path or DOCUMENT, value=number, repair=repair)


def _too_deep(path: str, error: type[UserError]) -> UserError:
    # The path itself may be thousands of levels long; its beginning is enough.
    return error(
        "nested too deeply",
        field=path or DOCUMENT,
        value=f"more than {MAX_DEPTH} levels",
        repair=f"Nest lists and objects at most {MAX_DEPTH} deep.",
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    seen = set[str]()
    twice = _Twice(found)
    twice.key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
    return twice
