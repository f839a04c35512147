"""Many plans of one space at once: values of the space's slots in, seconds and overflow out, all compiled."""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import kernel
from automap.price.kernels.records import TABLES
from automap.price.kernels.unit_workspace import new_unit_workspace
from automap.space.compile import N_FIRST_SIGNATURE, SPACE
from automap.space.kernels.price_one import price_laid
from automap.space.kernels.unit_cache import UNIT_CACHE
from automap.space.kernels.workspace import new_workspace, pick, set_frame


@kernel(void(TABLES, SPACE, UNIT_CACHE, int64[:, ::1], boolean, float64[:, ::1]))
def price_many(tables, space, cache, values, exact, out):
    """Seconds and overflow of plans.

    Args:
        tables: see `Tables.arrays`.
        space: see `compile_space`.
        cache: of the problem.
        values: [n, slots]; signatures may be -1, undecided.
        exact: simulate the schedule of complete plans; otherwise bound them, and all completions, from below.
        out: [n, 2] seconds of a step; largest share of its memory by which a device overflows. Written.
    """
    num_axes = space.obeys.shape[0]
    workspace = new_workspace(tables, space)
    units = new_unit_workspace(tables, num_axes, 0)
    for plan in range(values.shape[0]):
        value = values[plan]
        set_frame(space, value, workspace)
        for group in range(space.groups.shape[0]):
            for axis in range(num_axes):
                slot = space.scalars[N_FIRST_SIGNATURE] + group * num_axes + axis
                pick(space, group, axis, value[slot], workspace)
        price_laid(tables, space, cache, value, workspace, units, exact, out[plan])
