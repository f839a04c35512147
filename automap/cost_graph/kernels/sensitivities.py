"""The step after a change of one number of the unit costs, see `automap.cost_graph.sensitivities`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float64, void

from automap.jit import borrowing, kernel
from automap.price.kernels.array_types import Floats2, Ints, tuple_type
from automap.price.kernels.cost_records import RANK_COST, SETTINGS, UNIT_COST
from automap.price.kernels.step import step
from automap.price.kernels.step_records import PIPELINE, STAGE_ARRAYS, STEP_WORKSPACE


class Changes(NamedTuple):
    """Changes of single numbers of unit costs."""

    columns: Ints
    """[columns] the columns of unit costs that are changed, one at a time."""
    sizes: Floats2
    """[columns, rows] the number that is added in each row."""


@borrowing(
    void(
        UNIT_COST[::1],
        float64[::1],
        tuple_type(Changes),
        PIPELINE,
        STAGE_ARRAYS,
        SETTINGS,
        STEP_WORKSPACE,
        RANK_COST[:, :, ::1],
    ),
    inner=True,
)
def _step_changed(costs, numbers, changes, pipeline, stages, settings, workspace, out):
    width = numbers.shape[0] // costs.shape[0]
    for c in range(changes.columns.shape[0]):
        for row in range(costs.shape[0]):
            at = row * width + changes.columns[c]
            before = numbers[at]
            numbers[at] = before + changes.sizes[c, row]
            step(costs, pipeline, stages, settings, False, workspace, out[c, row])
            numbers[at] = before


@kernel(
    void(
        UNIT_COST[::1],
        tuple_type(Changes),
        PIPELINE,
        STAGE_ARRAYS,
        SETTINGS,
        STEP_WORKSPACE,
        RANK_COST[:, :, ::1],
    )
)
def step_changed(costs, changes, pipeline, stages, settings, workspace, out):
    """Writes a lower bound on the step, `automap.price.kernels.step`, for a change of each number of each unit cost.

    Args:
        costs: [rows] unit costs, restored at the end.
        changes: the changes.
        out: [columns, rows, ranks] written.
    """
    _step_changed(costs, costs.view(np.float64), changes, pipeline, stages, settings, workspace, out)
