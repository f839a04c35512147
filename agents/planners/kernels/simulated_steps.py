"""Step times of many pipelines from the seconds of their stages; compiled. Units: seconds."""

from __future__ import annotations

import numpy as np
from numba import float64, void

from automap.jit import kernel
from automap.price.kernels.pipeline import run_schedule
from automap.price.kernels.step_records import ORDER
from automap.schedule import BACKWARD, FORWARD


@kernel(void(ORDER, float64[:, :, ::1], float64[::1]))
def step_times(order, stages, out):
    """Runs the schedule of each of some pipelines without virtual stages, and ends it with what each stage does after
    its last micro-batch.

    Args:
        order: the order of the passes, in which backward passes are not split.
        stages: [pipelines, 3, stages] seconds of the forward pass and of the backward pass of a micro-batch, and after
            the last micro-batch. Infinite where there is no such stage.
        out: [pipelines] step times; infinite where a stage is; written.
    """
    count = stages.shape[2]
    seconds, nothing = np.zeros((4, count)), np.zeros(count)
    busy, ends, peak = np.empty(count), np.empty(count), np.empty(count)
    for number in range(stages.shape[0]):
        most = 0.0
        for stage in range(count):
            forward, backward = stages[number, 0, stage], stages[number, 1, stage]
            seconds[FORWARD, stage], seconds[BACKWARD, stage] = forward, backward
            busy[stage] = order.num_micro_batches * (forward + backward)
            most = max(most, busy[stage])
        if most < np.inf:
            run_schedule(order, seconds, nothing, nothing, busy, ends, peak)
            for stage in range(count):
                most = max(most, ends[stage] + stages[number, 2, stage])
        out[number] = most
