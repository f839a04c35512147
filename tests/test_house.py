"""The house rules that sizes can tell: short modules and functions, short lists of parameters, no room too large."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ir", "automap", "envs", "agents", "service")
MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 8
MAX_SHARE = 1 / 3
"""Share of all lines that one room may hold: a folder directly below a package, or the files beside such folders."""

FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def functions() -> list[tuple[Path, list[str], Function]]:
    """Every function, with its file and the file's lines."""
    found = []
    for path in FILES:
        text = path.read_text()
        lines = text.splitlines()
        found += [(path, lines, node) for node in ast.walk(ast.parse(text)) if isinstance(node, Function)]
    return found


def place(path: Path, function: Function) -> str:
    return f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"


def takes_options(function: Function) -> bool:
    """Whether the parameters of a function are options of the command line, or of a request to the service."""
    parameters = (*function.args.args, *function.args.kwonlyargs)
    annotations = [ast.unparse(parameter.annotation) for parameter in parameters if parameter.annotation]
    return any("typer." in text or text.endswith(("Option", "Argument")) or "Query(" in text for text in annotations)


def test_no_module_is_long() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    long = {name: count for name, count in lines.items() if count > MAX_MODULE_LINES}
    assert not long, f"split these modules, each by the nouns in it: {long}"


def test_no_function_is_long_without_a_reason() -> None:
    long = []
    for path, lines, function in functions():
        count = (function.end_lineno or 0) - function.lineno + 1
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        above = (lines[function.lineno - 2], lines[first - 2] if first > 1 else "")
        if count > MAX_FUNCTION_LINES and not any(line.strip().startswith("# long: ") for line in above):
            long.append(f"{place(path, function)}: {count} lines")
    assert not long, f"split these functions, or say why not in a comment `# long: ...` directly above: {long}"


def test_no_function_has_many_parameters() -> None:
    many = []
    for path, _, function in functions():
        stated = function.args
        count = len([*stated.posonlyargs, *stated.args, *stated.kwonlyargs])
        if stated.args and stated.args[0].arg in ("self", "cls"):
            count -= 1
        if count > MAX_PARAMETERS and not takes_options(function):
            many.append(f"{place(path, function)}: {count} parameters")
    assert not many, f"make records of what belongs together: {many}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_holds_more_than_a_third_of_the_code(package: str) -> None:
    rooms: Counter[str] = Counter()
    for path in FILES:
        parts = path.relative_to(ROOT).parts
        rooms["/".join(parts[:2]) if len(parts) > 2 else f"{parts[0]}/*.py"] += len(path.read_text().splitlines())
    large = {
        room: count for room, count in rooms.items() if room.startswith(package) and count > MAX_SHARE * rooms.total()
    }
    assert not large, f"cut these rooms, of {rooms.total()} lines in all: {large}"


def test_texts_are_utf_8_whatever_the_locale_says() -> None:
    """Pages and scripts have signs that are not ASCII, which not every locale can write or read."""
    missing = []
    for path in FILES:
        if path.name == "jit.py":
            continue  # it reads itself, in ASCII, and each change of it compiles all kernels anew
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            wanted = {"read_text": 1, "write_text": 2}.get(call.func.attr)
            if wanted is not None and len(call.args) < wanted and not any(k.arg == "encoding" for k in call.keywords):
                missing.append(f"{path.relative_to(ROOT)}:{call.lineno}")
    assert not missing, f"say that these texts are UTF-8: {missing}"
