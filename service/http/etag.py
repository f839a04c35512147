"""Entity tags (RFC 9110, sections 8.8.3 and 13.1.2): a client that has an answer already need not get it again."""

from __future__ import annotations

import hashlib


def etag(answer: bytes) -> str:
    """The tag of an answer. Weak: the same answer may be compressed on its way."""
    return f'W/"{hashlib.sha256(answer).hexdigest()[:32]}"'


def matches(header: str, tag: str) -> bool:
    """Whether If-None-Match names a tag, by the weak comparison that RFC 9110 wants here."""
    given = [one.strip().removeprefix("W/") for one in header.split(",")]
    return "*" in given or tag.removeprefix("W/") in given
