"""Output of the verbs of the command line: plans and JSON documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from automap.errors import PlanError

if TYPE_CHECKING:
    from automap.plan import Plan


def write_plan(plan: Plan, output: Path | None) -> None:
    """Writes a plan to the file that the user names, if there is one.

    Raises:
        PlanError: the file cannot be written.
    """
    if output is not None:
        try:
            output.write_text(json.dumps(plan.to_json(), indent=1) + "\n")
        except OSError as fault:
            raise PlanError(
                f"cannot be written ({fault.strerror})", field="output", value=str(output), repair="Name another file."
            ) from None


def show_plan(plan: Plan, output: Path | None, *, as_json: bool) -> None:
    """Writes a plan and shows it, to a person or to a program."""
    from service.report import summary

    write_plan(plan, output)
    if as_json:
        print_json(plan.to_json())
        return
    for label, text in summary(plan):
        typer.echo(f"{label:9} {text}")
    for line in plan.why:
        typer.echo(f"{'why':9} {line}")
    for line in plan.warnings:
        typer.echo(f"{'warning':9} {line}", err=True)
    if output is not None:
        typer.echo(f"{'plan':9} {output}")


def print_json(document: object) -> None:
    """Prints one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=1))
