"""Simulates the step of a pipeline with each of many cuts, given the costs of all units on all ranks; compiled.

Units: seconds, shares of memory.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from numba import float64, int64, void

from automap.jit import borrowing
from automap.price.kernels.array_types import Ints2, Ints3, Rows, tuple_type
from automap.price.kernels.cost_records import RANK_COST, SETTINGS, UNIT_COST
from automap.price.kernels.step import rank_overflow, step
from automap.price.kernels.step_records import PIPELINE, STAGE_ARRAYS, STEP_WORKSPACE, Pipeline


class UnitsOfRanks(NamedTuple):
    """What units cost on each rank, and how the rank recomputes them."""

    costs: Annotated[Rows, UNIT_COST[::1]]
    """[rows] unit costs."""
    rows: Ints3
    """[ranks, modes, units] the row in `costs` of each unit on each rank under each recompute mode; full recomputation
    is the last mode. Equal units have the same row."""
    levels: Ints2
    """[ranks, 3] the level of recomputation of each rank: the mode of the last units of a chunk, that of its first
    units, and how many steps these are. A step is the share 1 / `steps` of the units of a chunk."""
    steps: int
    """Number of steps in a whole chunk."""


@borrowing(
    void(
        tuple_type(UnitsOfRanks),
        PIPELINE,
        STAGE_ARRAYS,
        SETTINGS,
        STEP_WORKSPACE,
        RANK_COST[::1],
        int64[:, ::1],
        float64[:, :, ::1],
    )
)
def steps_with_cuts(units, pipeline, stages, settings, workspace, result, ends, out):
    """Finds the time and the memory of each rank with each of some cuts.

    Args:
        units: what units cost on each rank.
        pipeline: the pipeline, with memory for one part for each unit; consecutive units with the same row become one
            part; written.
        stages: arrays of the stages.
        settings: the settings of the price under the plan's ZeRO stage.
        workspace: memory for the simulation; written.
        result: [ranks] memory for the costs of each rank; written.
        ends: [cuts, chunks - 1] ends of all chunks but the last.
        out: [cuts, ranks, 2] seconds until each rank is done, and its overflow of memory; written.
    """
    num_ranks, num_chunks = pipeline.num_ranks, pipeline.num_chunks
    full, num_units = units.rows.shape[1] - 1, units.rows.shape[2]
    for cut in range(ends.shape[0]):
        begin, count = 0, 0
        for chunk in range(num_chunks):
            rank, end = chunk % num_ranks, ends[cut, chunk] if chunk < num_chunks - 1 else num_units
            light, heavy, steps = units.levels[rank]
            turn = begin + (2 * steps * (end - begin) + units.steps) // (2 * units.steps)
            for unit in range(begin, end):
                mode = heavy if unit < turn else light
                row = units.rows[rank, mode, unit]
                if unit == begin or row != pipeline.parts[count - 1].row:
                    part = pipeline.parts[count]
                    part.chunk, part.row, part.times = chunk, row, 0
                    part.is_recomputed = 1 if mode == full else 0
                    count += 1
                pipeline.parts[count - 1].times += 1
            begin = end
        some = Pipeline(
            pipeline.order,
            num_ranks,
            num_chunks,
            pipeline.zero_axes,
            pipeline.parts[:count],
            pipeline.tied,
            pipeline.stages,
            pipeline.boundaries,
        )
        step(units.costs, some, stages, settings, True, workspace, result)
        for rank in range(num_ranks):
            out[cut, rank, 0] = result[rank].end_s
            out[cut, rank, 1] = rank_overflow(result[rank])
