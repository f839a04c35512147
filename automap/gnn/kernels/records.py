"""A problem as arrays, for compiled code. Units: seconds, bytes, bytes a second."""

from __future__ import annotations

from typing import NamedTuple

from automap.price.kernels.array_types import Floats, Floats2, Ints, tuple_type


class GnnArrays(NamedTuple):
    """Tasks, flows and machines by number, and the volumes of some iterations."""

    rate_out: Floats
    """[machines] rate at which each sends."""
    rate_in: Floats
    """[machines] rate at which each receives."""
    order: Ints
    """[tasks] numbers of the tasks, each after those that it waits for within an iteration."""
    is_store: Ints
    """[tasks] 1 for graph stores, which only send."""
    source: Ints
    """[flows] task that sends."""
    target: Ints
    """[flows] task that receives."""
    lag: Ints
    """[flows] number of iterations from the one that sends to the one that uses the flow."""
    coflow: Ints
    """[flows] number of the group of flows that wait for each other."""
    out_begin: Ints
    """[tasks + 1] where the flows of a source begin in `out_flows`."""
    out_flows: Ints
    """[flows] numbers of the flows by source."""
    in_begin: Ints
    """[tasks + 1] where the flows of a target begin in `in_flows`."""
    in_flows: Ints
    """[flows] numbers of the flows by target."""
    fed_begin: Ints
    """[tasks + 1] where the workers of a sampler begin in `fed`."""
    fed: Ints
    """[...] workers that each sampler feeds; a task that is not a sampler has none."""
    mean_bytes: Floats
    """[flows] mean volume."""
    mean_time_s: Floats
    """[tasks] mean seconds of computing."""
    bytes: Floats2
    """[iterations, flows] volumes."""
    time_s: Floats2
    """[iterations, tasks] seconds of computing."""
    prefetch: int
    """Mini-batches that a sampler may be ahead of its workers."""


GNN = tuple_type(GnnArrays)
"""numba's type of `GnnArrays`."""
