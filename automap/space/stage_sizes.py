"""Stage sizes: how many devices each stage of a pipeline may get where stages differ.

A cluster is dealt out in equal parts, at most `MAX_PARTS`, that do not straddle hosts; a stage has a whole number of
parts and of inner meshes, so that stages differ in the outer axis alone. The samples of a micro-batch are spread over
it as evenly as they go, at least one for each rank. Units: devices, samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from automap.cluster import Cluster

MAX_PARTS = 16
"""Parts that a cluster is dealt out in."""
MAX_UNEVEN_STAGES = 4
"""Stages of the longest pipeline whose stages may differ: longer ones gain little by it and have too many ways."""


def part_size(cluster: Cluster) -> int:
    """Devices of a part: the fewest that divide the cluster in at most `MAX_PARTS` and divide, or are, whole hosts."""
    devices = cluster.num_devices
    host = math.gcd(*(host.num_devices for host in cluster.hosts))
    return next(
        size
        for size in range(1, devices + 1)
        if devices % size == 0 and devices // size <= MAX_PARTS and (size % host == 0 or host % size == 0)
    )


def ways_to_fill(
    cluster: Cluster, inner: Sequence[int], middle: Sequence[int], samples: Sequence[int], *, splits_batch: bool
) -> npt.NDArray[np.bool_]:
    """Which parts of the cluster some stages can share out between them, each legal by itself.

    Args:
        cluster: whose devices are dealt out.
        inner: sizes of the inner axis.
        middle: sizes of the middle axis.
        samples: of a micro-batch.
        splits_batch: whether the middle axis splits the batch too, evenly.

    Returns:
        [inner, middle, samples, MAX_UNEVEN_STAGES, parts + 1] whether so many stages can have so many parts together.
    """
    size = part_size(cluster)
    parts = cluster.num_devices // size
    devices = size * np.arange(parts + 1)
    within = np.array(inner)[:, None, None, None] * np.array(middle)[:, None, None]
    outer = np.maximum(devices // within, 1)
    batch = np.array(samples)[:, None]
    alone = (devices % within == 0) & (devices > 0) & (outer <= batch)
    if splits_batch:
        alone &= -(-batch // outer) % np.array(middle)[:, None, None] == 0
    found = np.zeros((*alone.shape[:3], MAX_UNEVEN_STAGES, parts + 1), dtype=np.bool_)
    found[..., 0, 0] = True
    for stages in range(1, MAX_UNEVEN_STAGES):
        for mine in range(1, parts + 1):
            found[..., stages, mine:] |= alone[..., mine, None] & found[..., stages - 1, : parts + 1 - mine]
    return found
