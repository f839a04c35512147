"""Step times of many pipelines from the seconds of their stages; compiled. Units: seconds, bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import float64, void

from automap.jit import kernel
from automap.price.kernels.array_types import Floats3, tuple_type
from automap.price.kernels.pipeline import run_schedule
from automap.price.kernels.step_records import ORDER
from automap.price.kernels.tied_parameters import exchange_s
from automap.schedule import BACKWARD, FORWARD


class Pipelines(NamedTuple):
    """Some pipelines with equally many stages."""

    seconds: Floats3
    """[pipelines, 3, stages] seconds of the forward pass and of the backward pass of a micro-batch, and after the last
    micro-batch without the exchanges of tied parameters. Infinite where there is no such stage."""
    links: Floats3
    """[pipelines, 2, stages] seconds of an empty message from a device of each stage to the next one, and bytes/s;
    those of the last stage are to the first one, and are read only where there are tied parameters."""
    tied: Floats3
    """[pipelines, tied parameters, stages] bytes of the gradient of each tied parameter on a rank of each stage; 0 on a
    stage that does not hold it."""


@kernel(void(ORDER, tuple_type(Pipelines), float64[::1]))
def step_times(order, pipelines, out):
    """Runs the schedule of each of some pipelines without virtual stages, and ends it with what each stage does after
    its last micro-batch.

    Args:
        order: the order of the passes, in which backward passes are not split.
        pipelines: the pipelines.
        out: [pipelines] step times; infinite where a stage is; written.
    """
    count, ranks = pipelines.seconds.shape[2], np.arange(pipelines.seconds.shape[2])
    seconds, nothing = np.zeros((4, count)), np.zeros(count)
    busy, ends, peak = np.empty(count), np.empty(count), np.empty(count)
    holds = np.empty(count, np.bool_)
    for number in range(pipelines.seconds.shape[0]):
        most = 0.0
        for stage in range(count):
            forward, backward = pipelines.seconds[number, 0, stage], pipelines.seconds[number, 1, stage]
            seconds[FORWARD, stage], seconds[BACKWARD, stage] = forward, backward
            busy[stage] = order.num_micro_batches * (forward + backward)
            most = max(most, busy[stage])
        if most < np.inf:
            run_schedule(order, seconds, nothing, nothing, busy, ends, peak)
            ends += pipelines.seconds[number, 2]
            links = (pipelines.links[number, 0], pipelines.links[number, 1])
            for parameter in range(pipelines.tied.shape[1]):
                size, data = 0.0, 0.0
                for stage in range(count):
                    mine = pipelines.tied[number, parameter, stage]
                    holds[stage] = mine > 0.0
                    size, data = size + float64(holds[stage]), max(data, mine)
                if size > 1.0:
                    spent = exchange_s(size, data, holds, ranks, links)
                    for stage in range(count):
                        ends[stage] += spent * float64(holds[stage])
            for stage in range(count):
                most = max(most, ends[stage])
        out[number] = most
