"""What a profile measures of a host whose every time follows one of the price's forms."""

import numpy as np
from price_cases import gemm_curve_of

from automap.fitted_curves import COLLECTIVES
from automap.price.kernels.collectives import collective_s, host_link
from automap.price.kernels.gemm import gemm_s

STREAM, FLOPS = 1e10, 8e10


def two_ranks():
    """What two ranks of a made-up host report: every time follows one of the price's forms."""
    random = np.random.default_rng(0)
    curve = gemm_curve_of(3e-6, FLOPS, 0.5 * STREAM, 2.0, 10.0, 0.0, 0.0, 1, 32e6 * 0.2, 2.0, 0.0, 8.0)
    shapes = [[1.0, *random.choice([8.0, 40.0, 200.0, 1000.0], 3)] for _ in range(20)]
    link = host_link(2, latency_s=1e-4, growth=0.0, bytes_per_s=1e9, small_group=0.0, ramp=0.0)
    sizes = [2.0**p for p in (10, 14, 20, 25)]
    rank = {
        "device": {"name": "A CPU @ 2", "memory_bytes": 4 << 30, "reserved_bytes": 0, "num_multiprocessors": 1,
                   "cache_bytes": 32_000_000},
        "stream": STREAM,
        "gemm": {"fp32": [[*s, gemm_s(*s[1:], s[0], 4.0, 4.0, curve)] for s in shapes]},
        "attention": [[h, s, 64.0, 1e-9 * h * s * s, 3e-9 * h * s * s] for h in (4, 16) for s in (128, 256, 512, 1024)],
        "collectives": {
            kind: [[2.0, size, collective_s(number, 2.0, link, size)] for size in sizes]
            for number, kind in enumerate(COLLECTIVES)
        },
        "adam_s_per_element": 5e-9,
        "loss": [1e6, 1e6, 1e-3],
        "backward_ratio": 0.8,
        "host": {"cores": 2, "passed_s": 60.0, "own_s": 55.0, "busy_s": 111.0, "stolen_s": 0.0},
        "computed_s": 50.0,
        "worked_s": 49.8,
        "spreads": [0.02, 0.05, 0.1],
        "steps": [0.01, 0.03, 0.02, 0.04, 0.05, *[None] * 13],
    }  # fmt: skip
    return [rank, rank]
