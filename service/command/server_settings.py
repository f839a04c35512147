"""Settings of the service for the verbs that run it, with errors that name the variable."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from automap.errors import UserError

if TYPE_CHECKING:
    from service.settings import Settings

ALIKE = 0.75
"""How alike two names are, by difflib's ratio, so that one is taken for the other misspelled (assumed): REQUIRE_KEY and
REQUIRE_KEYS have 0.96. Kubernetes sets variables such as AUTOMAP_PORT for a Service of the name automap, which are like
no setting."""


def read_settings() -> Settings:
    """The settings.

    Raises:
        UserError: names the variable that cannot be read, or that seems to be a setting misspelled.
    """
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from service.problems import wanted
    from service.settings import Settings

    _check_names({f"AUTOMAP_{field.upper()}" for field in Settings.model_fields})
    try:
        return Settings()
    except SettingsError as fault:
        named = re.search(r'"(\w+)"', str(fault))
        name = f"AUTOMAP_{named[1].upper()}" if named else "AUTOMAP_..."
        repair = """Write JSON, as in '["automap.example.org", "127.0.0.1"]'."""
        raise UserError("cannot be read", field=name, value=os.environ.get(name, ""), repair=repair) from None
    except ValidationError as fault:
        first = fault.errors()[0]
        field = str(first["loc"][0])
        name = "AUTOMAP_" + field.upper()
        if first["type"] == "string_pattern_mismatch":
            example = Settings.model_fields[field].examples or [""]
            repair = f"Write it as in {example[0]}."
            raise UserError("not of the right form", field=name, value=first["input"], repair=repair) from None
        message, repair = wanted(first["type"], first.get("ctx", {})) or (first["msg"], f"Set {name} to another value.")
        raise UserError(message, field=name, value=first.get("input"), repair=repair) from None


def _check_names(known: Collection[str]) -> None:
    """Refuses variables whose names are nearly those of settings: a limit or a key that is not asked for would go
    unnoticed."""
    parts = {name.removeprefix("AUTOMAP_"): name for name in known}
    for name in sorted(map(str.upper, os.environ)):
        if name.startswith("AUTOMAP_") and name not in known:
            near = difflib.get_close_matches(name.removeprefix("AUTOMAP_"), parts, n=1, cutoff=ALIKE)
            if near:
                # Without its value, which may be a password.
                repair = f"Did you mean {parts[near[0]]}? docs/service.md lists the settings."
                raise UserError("there is no such setting", field=name, value=name, repair=repair)
