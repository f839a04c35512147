"""Chooses the cases that `make test` leaves to `make test-long`: more cases of a kind of which it tests others."""

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(kept: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases, in their order, with the mark `long` on all that are not among `kept`."""
    kept = list(kept)
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        found.append(case if case in kept else pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.long]))
    return found
