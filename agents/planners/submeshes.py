"""Numbers of devices that the stages of a pipeline may have, for planners that divide a cluster among stages.

The time of such a planner grows with the second or third power of how many different sizes it tries. On a large cluster
it therefore tries only some. A submesh is the devices of one stage. Submeshes tile a cluster if they are all equally
large and together have all its devices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from agents.planners.stage_table import StageTable
from automap.space.mesh_shapes import FEW_TIMES
from automap.space.shape import divisors
from automap.space.space import PlanSpace

FEW_DEVICES = 16
"""Largest number of devices for which stages of all sizes are tried (assumed: the time grows with the third power of
the number of sizes)."""
MOST_STEPS = 24
"""Largest number of sizes of stages on more than `FEW_DEVICES` devices that have few submeshes (assumed)."""
FEWEST_TILES = 5
"""Least number of sizes of submeshes to choose from (assumed); a prime number of devices has hardly any."""
FEWEST_MORE = 1.2
"""Least factor between sizes of stages that do not tile a large cluster (assumed)."""
MOST_SUBMESHES = 32
"""Largest number of submeshes of a cluster (assumed): the time of planners grows with its square."""


def tiles_suffice(devices: int, tiles: Sequence[int]) -> bool:
    """Whether a large cluster has enough sizes of submeshes that tile it, so that stages need no other sizes."""
    return devices > FEW_DEVICES and len(tiles) >= FEWEST_TILES


def has_few_pipelines(space: PlanSpace) -> bool:
    """Whether the plan space of a large cluster has few pipelines.

    In a pipeline of the space all stages have equally many devices, except the first one, which may have fewer. So
    there are few pipelines if few numbers divide the devices of the cluster. There are also few if few numbers of
    micro-batches divide the batch: most of them are more than `FEW_TIMES` the next smaller one.
    """
    devices, counts = space.meshes.devices, space.meshes.micro_batches
    if devices <= FEW_DEVICES:
        return False
    are_far = [more > FEW_TIMES * fewer for fewer, more in itertools.pairwise(counts)]
    return 2 * sum(are_far) > len(are_far) or not tiles_suffice(devices, submeshes(devices))


def stepped_sizes(table: StageTable) -> tuple[int, list[int]]:
    """Sizes of stages for clusters with few submeshes: multiples of a step.

    The step is a number of whole hosts, or an equal part of one, of which the cluster has at most `MOST_STEPS`. All
    stages begin at a multiple of it. The last stage also has the devices after the last multiple.

    Returns:
        The step, and the possible numbers of devices of a stage.
    """
    devices, cluster = len(table.order), table.space.problem.cluster
    host = math.gcd(*(host.num_devices for host in cluster.hosts))
    least = -(-devices // MOST_STEPS)
    step = next((part for part in divisors(host) if part >= least), -(-least // host) * host)
    rest = devices % step
    sizes = set(range(step, devices + 1, step)) | set(range(step + rest, devices + 1, step))
    return step, sorted(sizes.intersection(table.sizes))


def aligned_sizes(table: StageTable) -> list[int]:
    """Sizes of `submeshes` with which some strategy is possible."""
    possible = set(table.sizes)
    return [size for size in submeshes(len(table.order)) if size in possible]


def untiled_sizes(table: StageTable) -> list[int]:
    """Sizes of stages that need not tile the cluster: multiples of a step, the least one of `aligned_sizes` that is an
    equal part of a host, or whole hosts. Stages of other sizes let none behind them have whole hosts.

    Of these multiples it takes the `aligned_sizes`, and those with which the fullest replica has fewer samples than
    with the next smaller one. Where there are many, each is at least `FEWEST_MORE` times the one before.
    """
    tiles, host = aligned_sizes(table), math.gcd(*(one.num_devices for one in table.space.problem.cluster.hosts))
    step, last, found = min((it for it in tiles if host % it == 0 or it % host == 0), default=1), 0, list[int]()
    for size in sorted({*range(step, len(table.order) + 1, step)}.intersection(table.sizes)):
        has_fewer = size == step or -(-table.samples // size) < -(-table.samples // (size - step))
        if has_fewer and size >= FEWEST_MORE * last:
            found.append(size)
            last = size
    return sorted({*found, *tiles}.intersection(range(0, len(table.order) + 1, step)))


def submeshes(devices: int) -> list[int]:
    """Sizes of submeshes that divide a cluster into at most `MOST_SUBMESHES` equal parts."""
    return [size for size in divisors(devices) if size >= -(-devices // MOST_SUBMESHES)]
