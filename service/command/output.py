"""Output of the verbs of the command line: plans and JSON documents."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from automap.errors import PlanError, printable
from service.output_files import replace_file

if TYPE_CHECKING:
    from automap.plan import Plan


def write_plan(plan: Plan, output: Path | None) -> None:
    """Writes a plan to the file that the user names, if there is one.

    Raises:
        PlanError: the file cannot be written. What stood there before stays, and the error says where the plan is kept.
    """
    if output is not None:
        text = json.dumps(plan.to_json(), indent=1) + "\n"
        try:
            replace_file(output, text)
        except OSError as fault:
            raise PlanError(
                f"cannot be written ({fault.strerror})", field="output", value=str(output), repair=_keep(text)
            ) from None


def _keep(text: str) -> str:
    """Keeps a plan that took long to find among the temporary files; returns what the user can do."""
    number, name = tempfile.mkstemp(prefix="automap-plan-", suffix=".json")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        Path(name).unlink()
        return "Name another file."
    return f"The plan is kept in {name}: copy it from there."


LONGEST = 4000
"""Most characters of a line (assumed): names in a file may be of any length."""


def say(*lines: str, err: bool = False) -> None:
    """Prints lines for people on stdout, or on stderr.

    What is not printable is shown escaped, line feeds too: a name from a file neither steers the terminal nor becomes a
    line of its own.
    """
    for line in lines:
        typer.echo(printable(line, LONGEST), err=err)


def show_plan(plan: Plan, output: Path | None, *, as_json: bool) -> None:
    """Writes a plan and shows it, to a person or to a program."""
    from service.report import summary

    write_plan(plan, output)
    if as_json:
        print_json(plan.to_json())
        return
    for label, text in summary(plan):
        say(f"{label:9} {text}")
    for line in plan.why:
        say(f"{'why':9} {line}")
    for line in plan.warnings:
        say(f"{'warning':9} {line}", err=True)
    if output is not None:
        say(f"{'plan':9} {output}")


def print_json(document: object) -> None:
    """Prints one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=1))
