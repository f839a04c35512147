"""Random: plans drawn by uniform choices among the legal values of each decision; the yardstick of a learner."""

from __future__ import annotations

import numpy as np

from agents.incumbent import Incumbent
from agents.searcher import SearchResult, SearchTask

DRAWN = 64
"""Number of plans that are drawn and priced in one call (assumed)."""


def search_random(task: SearchTask) -> SearchResult:
    """The best of as many random plans as the budget allows; see `Searcher`."""
    incumbent = Incumbent.begin(task, "random")
    incumbent.price_start(task)
    rng = np.random.default_rng(task.seed)
    while not incumbent.finished:
        count = DRAWN if incumbent.left is None else min(DRAWN, incumbent.left)
        incumbent.price(incumbent.space.random_batch(rng, count))
    return incumbent.result(seed=task.seed)
