"""Legal signatures of a linkage group on one mesh, independent of the rest of a plan; compiled."""

from __future__ import annotations

import numpy as np
from numba import boolean, float64, int64

from automap.jit import borrowing, kernel
from automap.space.kernels.draft import DRAFT, legal_signatures, pick
from automap.space.kernels.layout import set_mesh
from automap.space.kernels.records import COMPILED


@borrowing(int64(COMPILED, int64, DRAFT, boolean[:, ::1], int64[::1], int64[:, ::1]), inner=True)
def _values_on_mesh(compiled, group, draft, masks, value, found):
    """`values_on_mesh` with memory for the legal values of each axis, [axes, values], and for one value of each."""
    num_axes, num_values = masks.shape
    for axis in range(num_axes):
        pick(compiled.space, group, axis, -1, draft)
    legal_signatures(compiled, group, 0, draft, masks[0])
    axis, count = 0, 0
    while axis >= 0:
        value[axis] += 1
        if value[axis] == num_values:
            value[axis] = -1
            pick(compiled.space, group, axis, -1, draft)
            axis -= 1
        elif masks[axis, value[axis]]:
            pick(compiled.space, group, axis, value[axis], draft)
            if axis + 1 < num_axes:
                axis += 1
                legal_signatures(compiled, group, axis, draft, masks[axis])
            else:
                for a in range(num_axes):
                    found[count, a] = value[a]
                count += 1
    return count


@kernel(int64(COMPILED, float64[::1], int64, int64, DRAFT, int64[:, ::1]))
def values_on_mesh(compiled, sizes, samples, group, draft, found):
    """Lists the combinations of values of a linkage group's slots that are legal on a mesh, in ascending order.

    Args:
        sizes: [axes] ranks of each mesh axis.
        samples: samples of a micro-batch, which must divide evenly.
        group: number of the group.
        draft: scratch of this caller; its layout and the picks of the group are written.
        found: [combinations, axes] written.

    Returns:
        Number of combinations.
    """
    num_axes = draft.picked.shape[1]
    set_mesh(sizes, samples, draft.layout)
    masks = np.empty((num_axes, compiled.space.groups[group].num_values), np.bool_)
    return _values_on_mesh(compiled, group, draft, masks, np.full(num_axes, -1), found)
