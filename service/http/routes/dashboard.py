"""The dashboard: serves the files of the page, which lie beside this package. Its data come over the REST API."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

from service.http.access import access
from service.http.etag import matches
from service.http.routes.common import refusal

router = APIRouter(include_in_schema=False)

_FOLDER = Path(__file__).resolve().parents[1] / "dashboard"
_KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_HEADERS = {
    # Scripts and styles of the service itself and nothing else; pictures of plans come as data.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@functools.cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Name of each file -> its bytes and its tag. Nothing else is served."""
    found = {path.name: path.read_bytes() for path in _FOLDER.iterdir() if path.suffix in _KINDS}
    return {name: (data, f'"{hashlib.sha256(data).hexdigest()[:32]}"') for name, data in found.items()}


@router.get("/")
@access("anybody")
def page(request: Request) -> Response:
    """The page."""
    return _file(request, "index.html")


@router.get("/dashboard/{name}")
@access("anybody")
def file(request: Request, name: str) -> Response:
    """A script, a style or a picture of the page."""
    return _file(request, name)


def _file(request: Request, name: str) -> Response:
    if name not in _files():
        repair = "The page at / names the files that there are."
        raise refusal(404, "No such file", field="name", value=name[:80], repair=repair)
    data, tag = _files()[name]
    headers = {**_HEADERS, "ETag": tag}
    if matches(request.headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=_KINDS[Path(name).suffix], headers=headers)
