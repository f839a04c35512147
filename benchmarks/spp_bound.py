"""SPP's bound on random instances: how far list scheduling is above a bound that no order can beat.

    python benchmarks/spp_bound.py [--instances 10000] [--seed 0]

An instance has layers, devices and bandwidths drawn at random, and a number of micro-batches. Its devices are ordered
by recursive minimum cuts, the layers are divided for every number of stages, and the micro-batches are listed. The step
is compared with (1 + (4 S - 4) / M) times M times the load of the slowest resource, plus the longest reduction of
gradients; with the lower bound of its stages; and, for the best number of stages, with a bound that no partition on
this order can beat. One instance in ten is also divided by brute force. The committed figures are in
benchmarks/results/.
"""

import argparse
import itertools
from typing import NamedTuple

import numpy as np

from agents.planners.device_partition import StageOf, partitions
from agents.planners.list_schedule import Stages, list_schedule
from automap.arrays import Floats
from automap.space.device_order import min_cut_order

MOST_BRUTE = 200
"""Partitions of an instance that are tried one by one, at most."""


class Instance(NamedTuple):
    """A model and a network."""

    forward_s: Floats
    backward_s: Floats
    crossing: Floats
    """[layers + 1] bytes of activations before each layer."""
    parameters: Floats
    bandwidth: Floats
    micro_batches: int

    def seconds(self, behind: int, place: int, size: int) -> Floats:
        """See `StageSeconds`."""
        both = _spans(self.forward_s + self.backward_s) / size
        return both + self.reduced(place, size) / self.micro_batches

    def reduced(self, place: int, size: int) -> Floats:
        """Seconds of a ring all-reduce of the gradients of each span."""
        within = self.bandwidth[place : place + size, place : place + size]
        slowest = within[~np.eye(size, dtype=bool)].min(initial=np.inf)
        return 2.0 * (size - 1.0) / size * np.nan_to_num(_spans(self.parameters), posinf=0.0) / slowest

    def channel(self, place: int, size: int, following: int) -> Floats:
        """See `ChannelSeconds`: there and back."""
        middle = place + size
        slowest = self.bandwidth[place:middle, middle : middle + following].min()
        return 2.0 * self.crossing / (size * following * slowest)

    def stages(self, stages: tuple[StageOf, ...]) -> Stages:
        """The times of a partition."""
        both = [[of[s.first : s.last].sum() / s.devices for s in stages] for of in (self.forward_s, self.backward_s)]
        pairs = list(itertools.pairwise(stages))
        onward = np.array([0.5 * self.channel(a.place, a.devices, b.devices)[b.first] for a, b in pairs])
        reduce_s = [self.reduced(s.place, s.devices)[s.first, s.last] for s in stages]
        return Stages(
            forward_s=np.array(both[0]),
            backward_s=np.array(both[1]),
            onward_s=onward,
            back_s=onward,
            reduce_s=np.array(reduce_s),
        )


def _spans(of_layers: Floats) -> Floats:
    sums = np.concatenate([[0.0], np.cumsum(of_layers)])
    found = sums[None, :] - sums[:, None]
    found[np.tril_indices(len(sums))] = np.inf
    return found


def drawn(rng: np.random.Generator) -> Instance:
    """A random instance with 2 to 10 layers on 1 to 6 devices, its devices in the order of minimum cuts."""
    layers, devices = int(rng.integers(2, 11)), int(rng.integers(1, 7))
    forward_s = rng.exponential(1.0, layers)
    bandwidth = rng.uniform(0.1, 2.0, (devices, devices)) ** 2
    bandwidth = np.minimum(bandwidth, bandwidth.T)
    order = list(min_cut_order(bandwidth))
    return Instance(
        forward_s=forward_s,
        backward_s=forward_s * rng.uniform(1.0, 3.0, layers),
        crossing=np.concatenate([[0.0], rng.exponential(rng.choice([0.01, 0.1, 1.0]), layers)]),
        parameters=rng.exponential(rng.choice([0.0, 0.1, 1.0]), layers),
        bandwidth=bandwidth[np.ix_(order, order)],
        micro_batches=int(2 ** rng.integers(0, 6)),
    )


def brute_force(instance: Instance, count: int) -> float | None:
    """The least load of all partitions into `count` stages, or None where there are too many."""
    layers, devices = len(instance.forward_s), len(instance.bandwidth)
    cuts = list(itertools.combinations(range(1, layers), count - 1))
    shares = list(itertools.combinations(range(1, devices), count - 1))
    if len(cuts) * len(shares) > MOST_BRUTE:
        return None
    best = np.inf
    for cut, share in itertools.product(cuts, shares):
        at, on = (0, *cut, layers), (0, *share, devices)
        size = np.diff(on).tolist()
        loads = [instance.seconds(1, on[n], size[n])[at[n], at[n + 1]] for n in range(count)]
        loads += [instance.channel(on[n], size[n], size[n + 1])[at[n + 1]] for n in range(count - 1)]
        best = min(best, max(loads))
    return float(best)


def main() -> None:
    """Draws instances, and prints how far the steps are from the bounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    to_bound, to_lower, to_best, above, over, equal, brute = [], [], [], 0, 0, 0, 0
    for number in range(given.instances):
        instance = drawn(rng)
        layers, devices, batches = len(instance.forward_s), len(instance.bandwidth), instance.micro_batches
        steps, loads = [], []
        sizes = range(1, devices + 1)
        for found in partitions(layers, devices, sizes, instance.seconds, instance.channel, devices):
            count = len(found.stages)
            stages = instance.stages(found.stages)
            step_s = min(list_schedule(stages, batches, forward_first=first).seconds for first in (False, True))
            factor = 1.0 + (4 * count - 4) / batches
            bound_s = factor * batches * stages.load_s + float(stages.reduce_s.max())
            to_bound.append(step_s / bound_s)
            to_lower.append(step_s / stages.lower_bound_s(batches))
            above += to_bound[-1] > 1.0 + 1e-9
            over += to_lower[-1] > factor * (1.0 + 1e-9)
            steps.append(step_s)
            loads.append(found.load_s)
            least = brute_force(instance, count) if number % 10 == 0 else None
            if least is not None:
                brute += 1
                equal += abs(found.load_s - least) <= 1e-9 * least
        # Of any plan on this order each micro-batch keeps the slowest resource busy for the least load at least.
        to_best.append(min(steps) / (batches * min(loads)))
    lower = np.array(to_lower)
    print(f"{given.instances} instances, {len(to_bound)} partitions, seed {given.seed}")
    print(f"step over (1 + (4 S - 4) / M) M C + A:  largest {max(to_bound):.3f}, above 1 in {above} partitions")
    print(f"step over the lower bound of its stages above 1 + (4 S - 4) / M: {over} partitions")
    print(
        f"step over the lower bound of its stages:  median {np.median(lower):.3f}, 95 % within "
        f"{np.quantile(lower, 0.95):.3f}, largest {lower.max():.3f}"
    )
    print(f"best step over M times the least load on the order:  median {np.median(to_best):.3f}")
    print(f"partitions that equal brute force: {equal} of {brute}")


if __name__ == "__main__":
    main()
