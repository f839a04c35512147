"""Hostile files over REST: each a problem document, and the service goes on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.problems import MEDIA_TYPE


def files() -> dict[str, bytes]:
    """Some of each sort, and bombs."""
    path = Path(__file__).resolve().parents[1] / "ir" / "hostile.py"
    spec = importlib.util.spec_from_file_location("automap_hostile", path)
    assert spec is not None and spec.loader is not None
    hostile: Any = importlib.util.module_from_spec(spec)
    sys.modules.setdefault("automap_hostile", hostile)
    spec.loader.exec_module(hostile)
    chosen = {name: data for i, (name, data) in enumerate(hostile.external_files()) if i % 8 == 0}
    for make in (hostile.odd_opsets, hostile.odd_sizes, hostile.odd_types):
        chosen |= {name: data for i, (name, data) in enumerate(make()) if i % 15 == 4}
    odd = dict(hostile.odd_bytes())
    chosen |= {name: odd[name] for name in ("zeros", "text", "json", "archive", "pickle", "twice", "first 20/40")}
    bombs = dict(hostile.bombs())
    for name in ("function laughs, depth 60", "a million nodes", "cycle", "dims 2^62 x 2^62", "rank 1000"):
        chosen[name] = bombs[name]()
    return chosen


@pytest.mark.slow
def test_hostile_uploads(api: httpx.Client, light: Callable[[str], bytes]) -> None:
    chosen = files()
    assert len(chosen) >= 24
    refused = 0
    for name, data in chosen.items():
        answer = api.post("/v1/models", content=data)
        assert answer.status_code < 500, (name, answer.text)
        if answer.status_code == 201:
            continue
        document = answer.json()
        assert answer.headers["content-type"] == MEDIA_TYPE, name
        assert 400 <= document["status"] == answer.status_code, name
        assert document["field"] and document["value"] and document["repair"], (name, document)
        assert "Traceback" not in answer.text and "/site-packages/" not in answer.text, name
        refused += 1
    assert refused >= 22
    assert api.get("/healthz").status_code == 200
    assert api.post("/v1/models?name=squeezenet", content=light("squeezenet")).status_code == 201
