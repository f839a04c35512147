"""Entity tags (RFC 9110, sections 8.8.3 and 13.1.2): a client that has an answer already need not get it again."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import Header, Response

IfNoneMatch = Annotated[str, Header(description="ETag of the answer that the client has.")]
UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "The answer is still as If-None-Match says."}}
"""`responses` of a route whose answers have a tag."""


def etag(answer: bytes) -> str:
    """The tag of an answer. Weak: the same answer may be compressed on its way."""
    return f'W/"{hashlib.sha256(answer).hexdigest()[:32]}"'


def matches(header: str, tag: str) -> bool:
    """Whether If-None-Match names a tag, by the weak comparison that RFC 9110 wants here."""
    given = [one.strip().removeprefix("W/") for one in header.split(",")]
    return "*" in given or tag.removeprefix("W/") in given


def answer(body: str | bytes, if_none_match: str, tag: str = "") -> Response:
    """A JSON answer with its tag; 304 without the body where the client has the same answer.

    Args:
        body: the answer.
        if_none_match: the header of the request.
        tag: the tag of the body, where it is known.
    """
    data = body.encode() if isinstance(body, str) else body
    tag = tag or etag(data)
    # A browser keeps it for its user alone, and asks each time whether it has changed.
    headers = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if matches(if_none_match, tag):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type="application/json", headers=headers)
