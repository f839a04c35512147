"""Many plans of one space at once: values of the space's slots in, seconds and overflow out, all compiled.

`tie_many` computes only the costs of tied parameters beyond those of their readers.
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
        exact: whether the schedule of complete plans is simulated; otherwise the results are lower bounds on all
            completions.
        out: [n, 2] written: seconds of a step, and the bytes by which the fullest device exceeds its memory, as a share
            of that memory.
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
    """Writes the costs of tied parameters in plans beyond those of their readers, see `TiedParameters`.

    Args:
        values: [n, slots].
        out: [n, ties] written. `excess` counts if both ranks are the same, else `exchanged`.
    """
    _tie_all(compiled, values, out, new_workspace(compiled))
