"""Frozen dataclasses as JSON: strict reading with the path of the fault, writing, and JSON Schema.

A record's fields are strings, numbers, booleans, `Literal`s, optionals, tuples, string-keyed mappings and other
records. A number states its range in its type, `Annotated[int, Range(1, 16)]`. Reading refuses unknown keys, wrong
types and values out of range, and names the path (`stages[2].mesh`). It converts nothing except integers to floats and,
as in JSON Schema, 2.0 to an integer. The meaning of the records is not known here.
"""

from __future__ import annotations

import ast
import collections.abc
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeVar, Union

from automap.documents import DOCUMENT, check_document, joined
from ir.errors import UserError, meant, one_of


class Record(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


R = TypeVar("R", bound=Record)

_LEFT_OUT = "left_out"
LEFT_OUT = {_LEFT_OUT: True}
"""Metadata of a field that is written only where it has another value than its default."""


@dataclass(frozen=True, slots=True)
class Range:
    """Range of a number, for use in `Annotated`."""

    least: float
    most: float
    above: bool = False
    """Whether `least` itself is excluded."""

    def holds(self, value: Any) -> bool:
        """Whether `value` is in the range; NaN never is."""
        return bool((self.least < value if self.above else self.least <= value) and value <= self.most)

    def schema(self) -> dict[str, float]:
        """Keywords of JSON Schema."""
        return {"exclusiveMinimum" if self.above else "minimum": self.least, "maximum": self.most}

    def __str__(self) -> str:
        least, most = f"{self.least:.12g}", f"{self.most:.12g}"
        return f"a number above {least}, at most {most}" if self.above else f"a number from {least} to {most}"


@dataclass(frozen=True, slots=True)
class Length:
    """Allowed length of a text in characters, for use in `Annotated`."""

    most: int
    least: int = 0

    def holds(self, value: Any) -> bool:
        """Whether `value` is neither longer nor shorter."""
        return self.least <= len(value) <= self.most

    def schema(self) -> dict[str, int]:
        """Keywords of JSON Schema."""
        return {"minLength": self.least, "maxLength": self.most}

    def __str__(self) -> str:
        return f"a text of {self.least} to {self.most} characters"


@dataclass(frozen=True, slots=True)
class Items:
    """Largest number of items of a list or an object, for use in `Annotated`; more are refused unread."""

    most: int

    def holds(self, value: Any) -> bool:
        """Whether `value` has no more."""
        return not isinstance(value, list | tuple | dict) or len(value) <= self.most

    def schema(self) -> dict[str, int]:
        """Keywords of JSON Schema, each of which holds for one of the two types."""
        return {"maxItems": self.most, "maxProperties": self.most}

    def __str__(self) -> str:
        return f"at most {self.most:,}"


@dataclass(frozen=True, slots=True)
class DocumentOf:
    """Marks an object as the document of a record that is read later, for use in `Annotated`."""

    kind: type[Any]
    completed: tuple[str, ...] = ()
    """Fields that the record needs and that the document may leave to another one."""

    def definition(self, definitions: dict[str, Any], at: str) -> dict[str, Any]:
        """The schema of the document, see `definition`."""
        if not self.completed:
            return definition(self.kind, definitions, at=at)
        schema = _record(self.kind, definitions, at)
        return {**schema, "required": [name for name in schema["required"] if name not in self.completed]}


def to_json(value: Any) -> Any:
    """`value` as JSON types; records become objects with their fields in order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: to_json(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not f.metadata.get(_LEFT_OUT) or getattr(value, f.name) != f.default
        }
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
        UserError: (of type `error`) a key is unknown or missing, a value has the wrong type or is out of its range, or
            see `automap.documents.check_document`.
    """
    check_document(document, field=path, error=error)
    return typing.cast("R", _Reader(error).read(kind, document, path))


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false", dict: "an object"}


def _types(kind: Any) -> type[Any]:
    """The type that parsed JSON of a kind has, for kinds that may be members of a union."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _types(args[0])
    if origin is collections.abc.Mapping:
        return dict
    found: type[Any] = kind
    return found


@functools.cache
def _hints(kind: type[Any]) -> collections.abc.Mapping[str, Any]:
    """The annotations of a record. A data file holds many records of few types."""
    return typing.get_type_hints(kind, include_extras=True)


class _Reader:
    def __init__(self, error: type[UserError]) -> None:
        self.error = error

    def fail(self, path: str, value: object, expected: str) -> UserError:
        return self.error(f"expected {expected}", field=path or DOCUMENT, value=value, repair=f"Give {expected}.")

    def read(self, kind: Any, value: Any, path: str) -> Any:
        origin, args = typing.get_origin(kind), typing.get_args(kind)
        if kind is Any:
            return value
        if origin is Annotated:
            return self.read_limited(args, value, path)
        if origin in (Union, types.UnionType):
            return self.read_union(args, value, path)
        if origin is Literal:
            if value not in args:
                raise self.error(
                    "unknown value", field=path or DOCUMENT, value=value, repair=one_of(map(str, args), value)
                )
            return value
        if origin is tuple:
            return self.read_tuple(args, value, path)
        if origin is collections.abc.Mapping:
            if not isinstance(value, dict):
                raise self.fail(path, value, "an object")
            return {str(k): self.read(args[1], v, joined(path, str(k))) for k, v in value.items()}
        if dataclasses.is_dataclass(kind):
            return self.read_record(kind, value, path)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(path, value, _NAMES[kind] + (", not a string" if isinstance(value, str) else ""))
        return value

    def read_limited(self, args: tuple[Any, ...], value: Any, path: str) -> Any:
        for limit in args[1:]:
            if isinstance(limit, Items) and not limit.holds(value):
                raise self.error("too many", field=path, value=f"{len(value):,} items", repair=f"Give {limit}.")
        found = self.read(args[0], value, path)
        for limit in args[1:]:
            if isinstance(limit, Range | Length) and not limit.holds(found):
                raise self.error("out of range", field=path, value=value, repair=f"Give {limit}.")
        return found

    def read_union(self, args: tuple[Any, ...], value: Any, path: str) -> Any:
        """Reads a value by the member of the union that has its type; a single member beside null reports its own
        error."""
        if value is None and type(None) in args:
            return None
        kinds = [a for a in args if a is not type(None)]
        if len(kinds) == 1:
            return self.read(kinds[0], value, path)
        whole = isinstance(value, float) and value.is_integer()
        fitting = next((kind for kind in kinds if (int if whole else type(value)) is _types(kind)), None)
        if fitting is None:
            raise self.fail(path, value, " or ".join(_NAMES[_types(kind)] for kind in kinds))
        return self.read(fitting, value, path)

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
        hints = _hints(kind)
        if "schema" in fields and "schema" in value:  # first: another version of the form may have other keys
            self.read(hints["schema"], value["schema"], joined(path, "schema"))
        for key in value:
            if key not in fields:
                repair = f"{meant(list(fields), key)}Remove it, or use one of {', '.join(fields)}."
                raise self.error("unknown key", field=joined(path, str(key)), value=key, repair=repair)
        given = {}
        for name, f in fields.items():
            if name in value:
                given[name] = self.read(hints[name], value[name], joined(path, name))
            elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
                raise self.error("missing", field=joined(path, name), value="nothing", repair=f"Give {name!r}.")
        try:
            return kind(**given)
        except self.error as fault:
            # A record names a wrong field relative to itself.
            raise fault.at(joined(path, fault.field)) from None


def json_schema(kind: type[Any], *, title: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of the documents that `from_json(kind, ...)` reads."""
    definitions: dict[str, Any] = {}
    body = definition(kind, definitions, at="#/$defs/")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **body,
        "$defs": dict(sorted(definitions.items())),
    }


def definition(kind: Any, definitions: dict[str, Any], *, at: str) -> dict[str, Any]:
    """The schema of a type. Schemas of records are added to `definitions` by name and referred to under `at`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)

    def inner(part: Any) -> dict[str, Any]:
        return definition(part, definitions, at=at)

    if kind is Any:
        return {}
    if origin is Annotated:
        return _annotated(args, definitions, at)
    if origin in (Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if a is type(None) else inner(a) for a in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": inner(args[0])}
        return {"type": "array", "prefixItems": [inner(a) for a in args], "minItems": len(args), "maxItems": len(args)}
    if origin is collections.abc.Mapping:
        return {"type": "object", "additionalProperties": inner(args[1])}
    if dataclasses.is_dataclass(kind):
        name = kind.__name__  # type: ignore[union-attr]
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _record(kind, definitions, at)
        return {"$ref": f"{at}{name}"}
    return {"type": {str: "string", int: "integer", float: "number", bool: "boolean"}[kind]}


def _annotated(args: tuple[Any, ...], definitions: dict[str, Any], at: str) -> dict[str, Any]:
    found = definition(args[0], definitions, at=at)
    for said in args[1:]:
        if isinstance(said, DocumentOf):
            found = said.definition(definitions, at)
        else:
            found = {**found, **({"description": said} if isinstance(said, str) else said.schema())}
    return found


def _record(kind: Any, definitions: dict[str, Any], at: str) -> dict[str, Any]:
    hints, told = _hints(kind), _told(kind)
    fields = dataclasses.fields(kind)
    properties = {}
    for field in fields:
        description = {"description": told[field.name]} if field.name in told else {}
        # A description in the type of the field, for this one document, has precedence.
        properties[field.name] = description | definition(hints[field.name], definitions, at=at)
    first, _, _ = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    return {
        "type": "object",
        "description": " ".join(first.split()),
        "properties": properties,
        "required": [
            f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        ],
        "additionalProperties": False,
    }


def _told(kind: type[Any]) -> dict[str, str]:
    """Field of a record -> the text that stands below it in its source, on one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for line, text in itertools.pairwise(tree.body):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(text, ast.Expr):
            found[line.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
