"""How the best step time of each searcher fell during a search, thinned out to a few moments that a plan keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST_MOMENTS = 32
"""Largest number of moments of a searcher that a plan keeps: no more steps are told apart in a picture (assumed)."""


def history(by_searcher: Mapping[str, Sequence[tuple[int, float, float]]]) -> dict[str, tuple[tuple[int, float], ...]]:
    """What `SearchRecord.history` holds.

    Time is counted in plans and not in seconds, so that a search repeated with the same budget in evaluations makes the
    same plan.

    Args:
        by_searcher: see `SearchResult.by_searcher`.
    """
    return {name: tuple((count, step_s) for count, _, step_s in _thinned(own)) for name, own in by_searcher.items()}


def _thinned(own: Sequence[tuple[int, float, float]]) -> Sequence[tuple[int, float, float]]:
    """At most `MOST_MOMENTS` of the moments, with the first and the last."""
    if len(own) <= MOST_MOMENTS:
        return own
    return [own[round(number * (len(own) - 1) / (MOST_MOMENTS - 1))] for number in range(MOST_MOMENTS)]
