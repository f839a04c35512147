"""Many plans of one space at once: values of the space's slots in, seconds and overflow out, all compiled.

`tie_many` works out only what tied parameters cost beside their readers.
"""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.cost_records import TIE
from automap.space.kernels.draft import pick_all
from automap.space.kernels.layout import decide_stages
from automap.space.kernels.price_one import price_one, tie
from automap.space.kernels.records import COMPILED
from automap.space.kernels.workspace import WORKSPACE, new_workspace, set_rows


@borrowing(void(COMPILED, int64[::1], WORKSPACE), inner=True)
def _take(compiled, value, workspace):
    """Writes layout, rows and signatures of a plan into the workspace."""
    decide_stages(compiled.space, value, value.shape[0], workspace.draft.layout)
    set_rows(compiled.space, value, workspace)
    pick_all(compiled.space, value, value.shape[0], workspace.draft)


@borrowing(void(COMPILED, int64[:, ::1], boolean, float64[:, ::1], WORKSPACE), inner=True)
def _price_all(compiled, values, exact, out, workspace):
    for plan in range(values.shape[0]):
        value = values[plan]
        _take(compiled, value, workspace)
        price_one(compiled, value, workspace, exact, out[plan])


@kernel(void(COMPILED, int64[:, ::1], boolean, float64[:, ::1]))
def price_many(compiled, values, exact, out):
    """Seconds and overflow of plans.

    Args:
        values: [n, slots]; signatures may be -1, undecided.
        exact: simulate the schedule of complete plans; otherwise bound them, and all completions, from below.
        out: [n, 2] seconds of a step; largest share of its memory by which a device overflows. Written.
    """
    _price_all(compiled, values, exact, out, new_workspace(compiled))


@borrowing(void(COMPILED, int64[:, ::1], TIE[:, ::1], WORKSPACE), inner=True)
def _tie_all(compiled, values, out, workspace):
    for plan in range(values.shape[0]):
        _take(compiled, values[plan], workspace)
        tie(compiled, workspace)
        for t in range(out.shape[1]):
            out[plan, t] = workspace.tied[t]


@kernel(void(COMPILED, int64[:, ::1], TIE[:, ::1]))
def tie_many(compiled, values, out):
    """What parameters that two units read cost in plans beside their readers, see `TiedParameters`.

    Args:
        values: [n, slots].
        out: [n, ties] written. Of `excess` and `exchanged` only one holds: the first where both ranks are the same.
    """
    _tie_all(compiled, values, out, new_workspace(compiled))
