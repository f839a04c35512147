"""Frozen dataclasses as JSON: strict reading with the path of the fault, writing, and JSON Schema.

A record's fields are strings, numbers, booleans, `Literal`s, optionals, tuples, string-keyed mappings and other
records. Reading refuses unknown keys and wrong types and names the path (`stages[2].mesh`); it never coerces but
int to float. The module knows nothing of what the records mean.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from typing import Any, ClassVar, Literal, Protocol, TypeVar, Union

from ir.errors import UserError


class Record(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


R = TypeVar("R", bound=Record)


def to_json(value: Any) -> Any:
    """`value` as JSON types; records become objects with their fields in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, collections.abc.Mapping):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(v) for v in value]
    return value


def from_json(kind: type[R], document: object, *, path: str, error: type[UserError] = UserError) -> R:
    """Reads a record of type `kind`.

    Args:
        kind: a frozen dataclass.
        document: parsed JSON.
        path: how the user names the document, the start of the paths in errors.
        error: the exception to raise.

    Raises:
        UserError: (of type `error`) a key is unknown or missing or a value has the wrong type.
    """
    return typing.cast("R", _Reader(error).read(kind, document, path))


class _Reader:
    def __init__(self, error: type[UserError]) -> None:
        self.error = error

    def fail(self, path: str, value: object, expected: str) -> UserError:
        return self.error(f"expected {expected}", field=path, value=value, repair=f"Give {expected}.")

    def read(self, kind: Any, value: Any, path: str) -> Any:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return value
        if origin in (Union, types.UnionType):
            if value is None and type(None) in args:
                return None
            return self.read(next(a for a in args if a is not type(None)), value, path)
        if origin is Literal:
            if value not in args:
                raise self.fail(path, value, "one of " + ", ".join(str(a) for a in args))
            return value
        if origin is tuple:
            return self.read_tuple(args, value, path)
        if origin is collections.abc.Mapping:
            if not isinstance(value, dict):
                raise self.fail(path, value, "an object")
            return {str(k): self.read(args[1], v, f"{path}.{k}") for k, v in value.items()}
        if dataclasses.is_dataclass(kind):
            return self.read_record(kind, value, path)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
            raise self.fail(path, value, names[kind])
        return value

    def read_tuple(self, args: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise self.fail(path, value, "a list")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(self.read(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
        if len(value) != len(args):
            raise self.fail(path, value, f"a list of {len(args)}")
        return tuple(self.read(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, value, strict=True)))

    def read_record(self, kind: Any, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            raise self.fail(path, value, "an object")
        fields = {f.name: f for f in dataclasses.fields(kind)}
        hints = typing.get_type_hints(kind)
        for key in value:
            if key not in fields:
                raise self.error(
                    "unknown key",
                    field=f"{path}.{key}",
                    value=key,
                    repair="Remove it, or use one of " + ", ".join(fields) + ".",
                )
        given = {}
        for name, f in fields.items():
            if name in value:
                given[name] = self.read(hints[name], value[name], f"{path}.{name}")
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise self.error("missing", field=f"{path}.{name}", value="nothing", repair=f"Give {name!r}.")
        return kind(**given)


def json_schema(kind: type[Any], *, title: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of the documents that `from_json(kind, ...)` reads."""
    definitions: dict[str, Any] = {}
    body = _schema(kind, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **body,
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return {}
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if a is type(None) else _schema(a, definitions) for a in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": _schema(args[0], definitions)}
        items = [_schema(a, definitions) for a in args]
        return {"type": "array", "prefixItems": items, "minItems": len(args), "maxItems": len(args)}
    if origin is collections.abc.Mapping:
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}
            hints = typing.get_type_hints(kind)
            fields = dataclasses.fields(kind)
            required = [
                f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
            ]
            definitions[name] = {
                "type": "object",
                "properties": {f.name: _schema(hints[f.name], definitions) for f in fields},
                "required": required,
                "additionalProperties": False,
            }
        return {"$ref": f"#/$defs/{name}"}
    return {"type": {str: "string", int: "integer", float: "number", bool: "boolean"}[kind]}
