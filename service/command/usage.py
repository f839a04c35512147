"""Errors in the words of the command line: they name the option, the value and the repair.

The parser's own words say neither the value nor how to write it. All other errors name fields of a request, which
users of the command line have not written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import typer

from automap.errors import UserError
from service.problems import wanted

ALIKE = 0.75
"""How alike two options are, by difflib's ratio, so that one is proposed for the other (assumed): --tpp and --tp have
0.89; --target and --parameters have 0.6, which is enough for the parser."""


OTHER_NAMES = {"searchers": "searcher", "dims": "dim", "batch_dims": "batch-dim", "sync_modes": "sync"}
"""Field of a request -> its option, where the two have different names."""
KEYED = ("--dim", "--batch-dim", "--over")
"""Options with one value for each of several names, which a field has behind a dot."""
FILES = ("--hints", "--plan")
"""Options that name a file, whose own fields an error names behind a dot."""


def of_option(fault: UserError, words: Sequence[str]) -> UserError:
    """An error whose field is the option that states it, if the command line has this option; else the same error.

    Args:
        fault: the error. What its field names in a file, such as `hints.fix.tp`, keeps its name.
        words: the command line, without the name of the program.
    """
    stated = "baseline" if fault.field == "hints.baseline" else fault.field.removeprefix("training.")
    first, *rest = re.sub(r"\[\d+\]", "", stated).split(".")
    option = f"--{OTHER_NAMES.get(first, first).replace('_', '-')}"
    given = {{"-o": "--output"}.get(word, word.partition("=")[0]) for word in words}
    found = next((name for name in (option, f"{option}s") if name in given), None)
    if found is None or (found in FILES and rest):
        return fault
    return fault.at(" ".join([found, *rest]) if found in KEYED else found)


def is_help(fault: typer.TyperException) -> bool:
    """Whether the parser has shown its help because nothing was asked for, which is not an error to speak of."""
    return not fault.message and getattr(fault, "param", None) is None


def usage_error(fault: typer.TyperException, words: Sequence[str]) -> UserError:
    """The error for what the parser refuses.

    Args:
        fault: what it says.
        words: the command line, without the name of the program.
    """
    context = getattr(fault, "ctx", None)
    see = f"`{'automap' if context is None else context.command_path} --help` lists what can be written."
    if (param := getattr(fault, "param", None)) is not None:
        return _of_parameter(fault, param, see)
    if (option := getattr(fault, "option_name", None)) is not None and hasattr(fault, "possibilities"):
        meant = " or ".join(difflib.get_close_matches(option, fault.possibilities or (), cutoff=ALIKE))
        repair = f"Did you mean {meant}? {see}" if meant else see
        return UserError("there is no such option", field="option", value=option, repair=repair)
    return UserError(fault.format_message().rstrip("."), field="command", value=" ".join(words), repair=see)


def _of_parameter(fault: typer.TyperException, param: Any, see: str) -> UserError:
    """The error for the value of one option or argument."""
    field = param.metavar or param.name.upper() if param.param_type_name == "argument" else max(param.opts, key=len)
    if not fault.message:
        return UserError("missing", field=field, value="nothing", repair=f"Give {field}. {see}")
    # The parser reads values with pydantic, whose error says what stood there.
    errors = getattr(fault.__cause__, "errors", None)
    first: dict[str, Any] = errors()[0] if errors is not None else {}
    said = wanted(str(first.get("type")), first.get("ctx", {})) or (fault.message.rstrip("."), see)
    return UserError(said[0], field=field, value=str(first.get("input", "...")), repair=said[1])
