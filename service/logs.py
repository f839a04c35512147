"""Log lines, for people or as JSON, each with the request or job that it belongs to; never with a key or a password."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from contextvars import ContextVar
from typing import Any, Literal

from automap.errors import printable

Format = Literal["text", "json"]
REQUEST: ContextVar[str] = ContextVar("request", default="")
"""Id of the request that is answered."""
JOB: ContextVar[str] = ContextVar("job", default="")
"""Id of the job that is run."""
LONGEST = 4000
"""Most characters of a line (assumed)."""
_SECRETS = re.compile(r"amk_\w+|(?<=//)[^/@\s]*(?=@)|(?i:(?<=bearer )\S+)")
"""API keys, names and passwords in URLs, and what follows `Bearer`."""


def without_secrets(text: str) -> str:
    """A text in which keys and passwords are dots."""
    return _SECRETS.sub("...", text)


class _Json(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z"
        line = {"at": at, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        line |= {name: value for name, value in (("request", REQUEST.get()), ("job", JOB.get())) if value}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        line |= getattr(record, "fields", {})
        return without_secrets(json.dumps(line))


class _Text(logging.Formatter):
    """A line for people."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The message on one line: what clients and files have named must neither steer a terminal nor make lines."""
        return printable(super().formatMessage(record), LONGEST)

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """A traceback, whose lines stay lines."""
        return "\n".join(printable(line, LONGEST) for line in super().formatException(ei).split("\n"))

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        tags = [f"{name}={value}" for name, value in (("request", REQUEST.get()), ("job", JOB.get())) if value]
        return without_secrets(" ".join([super().format(record), *tags]))


def configure(level: str, form: Format) -> None:
    """Sends all log lines of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # Who was refused and what was changed is written whatever the level.
    logging.getLogger("automap.audit").setLevel(logging.INFO)
