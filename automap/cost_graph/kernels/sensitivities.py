"""Steps with one number of the unit costs changed, see `automap.cost_graph.sensitivities`."""

from __future__ import annotations

import numpy as np
from numba import float64, int64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.cost_records import RANK_COST, SETTINGS, UNIT_COST
from automap.price.kernels.step import step
from automap.price.kernels.step_records import PIPELINE, STAGE_ARRAYS, STEP_WORKSPACE


@borrowing(
    void(
        UNIT_COST[::1],
        float64[::1],
        int64[::1],
        float64[:, ::1],
        PIPELINE,
        STAGE_ARRAYS,
        SETTINGS,
        STEP_WORKSPACE,
        RANK_COST[:, :, ::1],
    ),
    inner=True,
)
def _step_changed(costs, numbers, columns, sizes, pipeline, stages, settings, workspace, out):
    width = numbers.shape[0] // costs.shape[0]
    for c in range(columns.shape[0]):
        for row in range(costs.shape[0]):
            at = row * width + columns[c]
            before = numbers[at]
            numbers[at] = before + sizes[c, row]
            step(costs, pipeline, stages, settings, False, workspace, out[c, row])
            numbers[at] = before


@kernel(
    void(
        UNIT_COST[::1],
        int64[::1],
        float64[:, ::1],
        PIPELINE,
        STAGE_ARRAYS,
        SETTINGS,
        STEP_WORKSPACE,
        RANK_COST[:, :, ::1],
    )
)
def step_changed(costs, columns, sizes, pipeline, stages, settings, workspace, out):
    """Bounds the step with one number of one unit cost changed, for each column and each row.

    Args:
        costs: [rows] unit costs, left as they were.
        columns: [columns] numbers of a unit cost that are changed.
        sizes: [columns, rows] what is added to them.
        out: [columns, rows, ranks] written.
    """
    _step_changed(costs, costs.view(np.float64), columns, sizes, pipeline, stages, settings, workspace, out)
