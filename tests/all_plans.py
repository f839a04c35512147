"""All plans of a small space, for tests that compare with brute force."""

from collections.abc import Iterator

import numpy as np

from automap.space.space import PlanSpace, Values


def every_plan(space: PlanSpace, prefix: Values = ()) -> Iterator[Values]:
    """The values of every plan that begins with `prefix`, in lexicographic order."""
    if len(prefix) == len(space.slots):
        yield prefix
        return
    for value in np.flatnonzero(space.legal(prefix)).tolist():
        yield from every_plan(space, (*prefix, value))
