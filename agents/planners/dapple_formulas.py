"""The formulas of DAPPLE's planner: the latency of a pipeline, and where a stage may be placed.

Fan et al., "DAPPLE: A Pipelined Data Parallel Approach for Training Large Models" (PPoPP 2021, arXiv 2007.01045),
sections 4.1 and 4.2.2. Stages of computation and of communication alternate. Units: seconds, bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from automap.arrays import Floats

Counts = tuple[int, ...]
"""Devices of each host."""


class Network(Protocol):
    """What a planner needs to know about links."""

    def reduce_s(self, counts: Counts) -> float:
        """Seconds of the all-reduce of a byte over `counts` devices of each host."""

    def send_s(self, senders: Counts, receivers: Counts) -> float:
        """Seconds of sending a byte, shared by all senders, from one stage to the next."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What a model costs with micro-batches of one size."""

    num_micro_batches: float
    """M: micro-batches of a step; not always a whole number."""
    most_replicas: int
    """Largest number of devices that can share a micro-batch."""
    forward_s: Floats
    """[replicas + 1, layers + 1] entry [r, i]: seconds of the forward pass of the first i layers, for a micro-batch
    that r replicas share; row 0 is not used."""
    backward_s: Floats
    """[replicas + 1, layers + 1] the same for the backward pass."""
    crossing_bytes: Floats
    """[layers + 1] activations of a whole micro-batch that cross a cut after so many layers."""
    gradient_bytes: Floats
    """[layers + 1] gradients of the first so many layers."""
    state_bytes: Floats
    """[layers + 1] parameters, gradients and optimizer state of the first so many layers."""
    saved_bytes: Floats
    """[layers + 1] activations that the first so many layers save for a whole micro-batch."""
    overlap: float = 0.0
    """Largest share of the gradients' all-reduce that the last backward pass of a stage hides; 0 in the paper's
    equations."""
    overlap_alone: float = 1.0
    """The same for pure data parallelism, which the paper compares with, overlap included."""


class Placed(NamedTuple):
    """One stage of a plan."""

    end: int
    """Number of layers of the model before its end."""
    counts: Counts
    """Devices of each host."""


class Planned(NamedTuple):
    """A pipeline with its predicted latency."""

    seconds: float
    """L: time of one step."""
    stages: tuple[Placed, ...]
    """Stages in order."""


# -- placement: section 4.2.2 -------------------------------------------------------------------------------------


def placements(free: Counts, sizes: Counts, wanted: int) -> list[Counts]:
    """The devices of each host that a stage of `wanted` devices takes, by the three policies; equal ones once.

    Args:
        free: devices of each host that are still free.
        sizes: devices of each host.
        wanted: at most as many as are free.
    """
    hosts = range(len(sizes))
    fresh = [h for h in hosts if free[h] == sizes[h]]
    used = [h for h in hosts if 0 < free[h] < sizes[h]]
    found = [
        # Fresh first: whole machines, so that replicas have fast links.
        _fill(free, wanted, [*fresh, *used]),
        # Append first: machines that are used already, so that few fragments remain.
        _fill(free, wanted, [*used, *fresh]),
        # Scatter first: evenly over the used machines, or over all if all are fresh.
        _spread(free, wanted, used if sum(free[h] for h in used) >= wanted else [*used, *fresh]),
    ]
    return list(dict.fromkeys(found))


def _fill(free: Counts, wanted: int, hosts: Sequence[int]) -> Counts:
    taken = [0] * len(free)
    for host in hosts:
        taken[host] = min(free[host], wanted)
        wanted -= taken[host]
    return tuple(taken)


def _spread(free: Counts, wanted: int, hosts: Sequence[int]) -> Counts:
    taken = [0] * len(free)
    left = list(hosts)
    while wanted:
        # The hosts with least room come first, so that what they lack is spread over the others.
        left.sort(key=lambda host: free[host])
        host = left.pop(0)
        taken[host] = min(free[host], wanted // (len(left) + 1))
        if not left:
            taken[host] = wanted
        wanted -= taken[host]
    return tuple(taken)


# -- latency: section 4.1 -----------------------------------------------------------------------------------------


def latency(forward: Sequence[Floats], backward: Sequence[Floats], reduce: Sequence[Floats], count: float) -> Floats:
    """L = Tw + Ts + Te of pipelines, with the pivot stage Q of Algorithm 1.

    Args:
        forward: F_s of each stage s, of computation or communication, each [pipelines].
        backward: B_s of each stage.
        reduce: AR(P_s, g_s) of each stage; 0 for stages of communication.
        count: M, micro-batches of a step.

    Returns:
        [pipelines] seconds.
    """
    last = len(forward) - 1
    done_f = np.concatenate([np.zeros((1, *np.shape(forward[0]))), np.cumsum(forward, axis=0)])
    done_b = np.concatenate([np.zeros((1, *np.shape(backward[0]))), np.cumsum(backward, axis=0)])
    # Algorithm 1: the pivot is the last stage, unless an earlier one is slower by more than all between the two.
    pivot = np.full(np.shape(forward[0]), last)
    steady = (count - 1.0) * (forward[last] + backward[last])
    between = np.zeros_like(steady)
    for s in range(last - 1, -1, -1):
        mine = (count - 1.0) * (forward[s] + backward[s])
        is_slower = mine > steady + between
        pivot = np.where(is_slower, s, pivot)
        steady = np.where(is_slower, mine, steady)
        between = np.where(is_slower, 0.0, between + forward[s] + backward[s])
    at = pivot[None]
    # Equation 1: Tw = sum of F_s up to Q, Ts = (M - 1) (F_Q + B_Q).
    warm_up = np.take_along_axis(done_f, at + 1, axis=0)[0]
    # Te = max over s of AR(P_s, g_s) + (s <= Q: sum of B_a from s to Q; s > Q: minus that from Q to s).
    through, before = np.take_along_axis(done_b, at + 1, axis=0)[0], np.take_along_axis(done_b, at, axis=0)[0]
    ending = np.full_like(steady, -np.inf)
    for s in range(last + 1):
        own = np.where(s <= pivot, through - done_b[s], before - done_b[s + 1])
        np.maximum(ending, reduce[s] + own, out=ending)
    found: Floats = warm_up + steady + ending
    return found
