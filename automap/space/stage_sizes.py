"""Stage sizes: the numbers of devices that each stage of a pipeline may have if stages differ in size.

A cluster is divided into at most `MAX_PARTS` equal parts, each inside one host or made of whole hosts. A stage has a
whole number of parts and of inner meshes, so that stages differ in the outer axis alone. The samples of a micro-batch
are divided over that axis as evenly as possible, with at least one for each rank. Units: devices, samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from automap.arrays import Mask
from automap.cluster import Cluster

MAX_PARTS = 16
"""Largest number of parts of a cluster (assumed)."""
MAX_UNEVEN_STAGES = 4
"""Largest number of stages of pipelines whose stages may differ in size (assumed). Longer pipelines gain little from
it, and have too many combinations of sizes."""


def part_size(cluster: Cluster) -> int:
    """Devices of a part: the smallest number with at most `MAX_PARTS` parts, each inside one host or of whole hosts."""
    devices = cluster.num_devices
    host = math.gcd(*(host.num_devices for host in cluster.hosts))
    return next(
        size
        for size in range(1, devices + 1)
        if devices % size == 0 and devices // size <= MAX_PARTS and (size % host == 0 or host % size == 0)
    )


def ways_to_fill(
    cluster: Cluster, inner: Sequence[int], middle: Sequence[int], samples: Sequence[int], *, splits_batch: bool
) -> Mask:
    """The total numbers of parts that several stages can have, if each has a legal size.

    Args:
        cluster: cluster whose devices the stages share.
        inner: sizes of the inner axis.
        middle: sizes of the middle axis.
        samples: numbers of samples of a micro-batch.
        splits_batch: whether the middle axis splits the batch too, evenly.

    Returns:
        [inner, middle, samples, MAX_UNEVEN_STAGES, parts + 1] whether this number of stages (from 1) can have this
        total number of parts.
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
