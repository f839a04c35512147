"""Settings of the service for the verbs that run it, with errors that name the variable."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from automap.errors import UserError

if TYPE_CHECKING:
    from service.settings import Settings


def read_settings() -> Settings:
    """The settings.

    Raises:
        UserError: names the variable that cannot be read.
    """
    from pydantic import ValidationError
    from pydantic_settings import SettingsError

    from service.problems import wanted
    from service.settings import Settings

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
