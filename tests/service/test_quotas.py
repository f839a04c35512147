from __future__ import annotations

import contextlib
import random

import pytest
from fastapi import HTTPException

from service.http.quotas import Places


@pytest.mark.parametrize(("total", "kept"), [(16, 4), (4, 1), (1, 0), (3, 0)])
def test_no_tenant_takes_the_places_that_are_kept_for_others(total: int, kept: int) -> None:
    draw, places = random.Random(0), Places(total, kept)
    open_places: list[tuple[str, contextlib.ExitStack]] = []
    refusals = {"full": 0, "kept": 0}
    for _ in range(2000):
        tenant = draw.choice("aaaaaaaaaabcdefghijklmnopqrst")
        held = [name for name, _ in open_places]
        if held and draw.random() < 0.3:
            open_places.pop(draw.randrange(len(held)))[1].close()
            continue
        stack, free = contextlib.ExitStack(), total - len(held)
        if free > (kept if tenant in held else 0):
            stack.enter_context(places.one(tenant))
            open_places.append((tenant, stack))
            continue
        with pytest.raises(HTTPException) as caught:
            stack.enter_context(places.one(tenant))
        assert caught.value.status_code == 503 and caught.value.headers == {"Retry-After": "5"}
        refusals["kept" if free else "full"] += 1
    assert refusals["full"] and bool(refusals["kept"]) == bool(kept)
    for _, stack in open_places:
        stack.close()
    with contextlib.ExitStack() as stack:  # none was lost on the way
        for number in range(total):
            stack.enter_context(places.one(f"tenant {number}"))


def test_an_upload_that_fails_gives_its_place_back() -> None:
    places = Places(1, 0)
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), places.one("a"):
            raise ValueError("broken")
