"""Stages and curves for tests of the price's formulas by themselves."""

import numpy as np

from automap.price.kernels.array_types import records_of
from automap.price.kernels.stage_records import (
    ATTENTION_CURVE_DTYPE,
    GEMM_CURVE_DTYPE,
    HARDWARE_DTYPE,
    LINK_DTYPE,
    Stage,
)


def stage_of(sizes, link=None):
    """A stage with these mesh sizes and one link on all axes, of 1 s and 1 byte/s unless given. Its hardware hides no
    collective, and all its other numbers are 0."""
    links = np.empty(len(sizes), dtype=LINK_DTYPE)
    links[:] = records_of(np.ones((1, LINK_DTYPE.itemsize // 8)), LINK_DTYPE)[0] if link is None else link
    hardware, nothing = np.zeros(1, dtype=HARDWARE_DTYPE)[0], np.zeros(len(sizes), dtype=np.bool_)
    hardware.exposed = hardware.exposed_exchange = 1.0
    return Stage(np.array(sizes, dtype=float), links, hardware, nothing, 1.0)


def link_of(latency_s, bytes_per_s):
    """A link with these latencies and rates of the kinds of collectives, without a ramp."""
    link = np.zeros(1, dtype=LINK_DTYPE)[0]
    link.latency_s[:], link.bytes_per_s[:], link.host_time = latency_s, bytes_per_s, 1.0
    link.gather_bytes_per_s = np.max(bytes_per_s)
    return link


def gemm_curve_of(*constants):
    """The curve of products with these constants, in the order of `GemmCurveRow`."""
    return records_of(np.array([constants], dtype=float), GEMM_CURVE_DTYPE)[0]


def attention_curve_of(*constants):
    """The curve of attention with these constants, in the order of `AttentionCurveRow`."""
    return records_of(np.array([constants], dtype=float), ATTENTION_CURVE_DTYPE)[0]
