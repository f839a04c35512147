"""Scripts of the shell as trees of commands: shfmt parses them, the parser of mvdan/sh in a program of its own.

Nodes are the maps of `shfmt --to-json`, whose names are those of the Go package `mvdan.cc/sh/v3/syntax`.
"""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import files
from typing import Any, TypeAlias

from automap.errors import PlanError
from automap.export.stated import refuse

Node: TypeAlias = Mapping[str, Any]
"""A command, a word or a part of one."""
MAX_DEPTH = 40
"""Levels of commands and words inside one another that are followed: more than scripts have (assumed)."""
MAX_LENGTH = 1 << 16
"""Characters of a script: more than scripts have (assumed), and parsed within a second."""
_MAX_MEMORY, _MAX_SECONDS = 1 << 28, 5
"""What the parser may take: 180 MB and 2 seconds are the most that it took for `MAX_LENGTH` (measured)."""
_MAX_WAIT_S = 60.0
"""Seconds that are waited for the parser, whose processor seconds pass more slowly on a busy host (assumed)."""


@cache
def _program() -> str:
    (found,) = (file for file in files("shfmt-py") or () if file.name == "shfmt")
    return str(found.locate())


def parse(text: str) -> list[Node]:
    """The statements of a script.

    Raises:
        PlanError: it is not a script, or too large.
    """
    if len(text) > MAX_LENGTH:
        raise broken("the script", f"has more than {MAX_LENGTH} characters")
    source = text.encode("utf-8", "replace")
    while True:
        comments: list[Node] = []
        found = _parsed(source, comments)
        # For bash a comment ends with its line, also after a backslash; shfmt 3.14 reads on.
        ends = [place(comment, "Hash") + len(comment["Text"].rstrip("\n").encode()) for comment in comments]
        if not ends:
            return found
        for end in ends:
            source = source[:end] + b" " + source[end + 1 :]


def _parsed(source: bytes, comments: list[Node]) -> list[Node]:
    """The statements of a script; adds its comments that end in a backslash to a list."""

    def noted(node: dict[str, Any]) -> dict[str, Any]:
        if "Hash" in node and node.get("Text", "").rstrip("\n").endswith("\\"):
            comments.append(node)
        return node

    command = [_program(), "--to-json", "-ln", "bash"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={}
    ) as process:
        # It reads nothing before it is limited, because it is given nothing.
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (_MAX_MEMORY, _MAX_MEMORY))
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (_MAX_SECONDS, _MAX_SECONDS))
        try:
            tree, errors = process.communicate(source, _MAX_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise broken("the script", f"could not be read within {_MAX_WAIT_S:g} s") from None
    try:
        if process.returncode == 0:
            found: list[Node] = json.loads(tree, object_hook=noted).get("Stmts") or []
            return found
    except RecursionError:
        pass
    line, _, what = (
        errors.decode("utf-8", "replace").partition("\n")[0].removeprefix("<standard input>:").partition(":")
    )
    if not line.isdigit():
        raise broken("the script", "is nested too deeply, or too large")
    value = source.split(b"\n")[int(line) - 1].decode("utf-8", "replace").strip()
    raise broken(value, f"cannot be read by the shell at line {line}: {what.partition(': ')[2]}")


def broken(value: str, what: str) -> PlanError:
    """The error for a script that the shell would not read, or that comes to too much."""
    repair = "Close every quote, parenthesis and block, or give a script of bash."
    return refuse("script", value[:60], what, repair)


def place(node: Node, key: str = "Pos") -> int:
    """The byte of its script at which a node begins, or ends with the key `End`."""
    return int(node[key]["Offset"])


def literal(word: Node | None) -> str | None:
    """The text of a word that is written without quotes and substitutions; None for other words."""
    parts = (word or {}).get("Parts", ())
    return "".join(part.get("Value", "") for part in parts) if all(part["Type"] == "Lit" for part in parts) else None


def leaves(statements: list[Node]) -> bool:
    """Whether statements end the script or the function."""
    return any(literal(first) in ("exit", "return") for first in map(_first_word, _flat(statements)))


def _flat(statements: list[Node]) -> Iterator[Node]:
    for statement in statements:
        command = statement.get("Cmd", {})
        if command.get("Type") == "Block":
            yield from _flat(command["Stmts"])
        else:
            yield command


def _first_word(command: Node) -> Node | None:
    return next(iter(command.get("Args", ())), None) if command.get("Type") == "CallExpr" else None
