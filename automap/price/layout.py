"""Layout: where the stages of a pipeline stand on a cluster, and what their axes and boundaries cost.

Links become (latency, bandwidth) pairs here; concurrent groups divide the NICs of a host evenly. Units: seconds,
bytes/s, FLOP/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from automap.cluster import Cluster, Device, group_link
from automap.price.attention import A_COUNT, A_FLOPS
from automap.price.curves import attention_curve, gemm_curve, shared
from automap.price.gemm import G_COUNT, G_FLOPS
from automap.price.kernels import (
    H_ATTENTION,
    H_BANDWIDTH,
    H_COUNT,
    H_ELEMENT,
    H_ELEMENTWISE,
    H_EXPOSED,
    H_FALLBACK,
    H_GEMM,
    H_HOST_BACKWARD,
    H_HOST_COLLECTIVE_S,
    H_HOST_S,
    H_KERNEL_S,
    H_LOSS,
    H_MISALIGNED,
    H_OVERLAP_EXPONENT,
    H_WAIT_EXPONENT,
)
from automap.problem import Problem

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """One pipeline rank: its devices as a mesh."""

    devices: tuple[int, ...]
    axes: Floats
    """[axes] ranks of each mesh axis."""
    latency_s: Floats
    """[axes]"""
    bytes_per_s: Floats
    """[axes]"""
    hardware: Floats
    """[H_COUNT] of the slowest device and of the trainer, see `automap.price.kernels`."""
    capacity: float
    """Bytes of the smallest device that a plan may use."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All pipeline ranks and the links between consecutive ones."""

    stages: tuple[StageLayout, ...]
    send_latency_s: Floats
    """[ranks] to the next rank; the last one to the first, for virtual stages."""
    send_bytes_per_s: Floats
    """[ranks] for each device of the rank."""
    uniform: bool
    """Whether all ranks cost the same."""


def stage_layout(problem: Problem, devices: Sequence[int], mesh: Sequence[int]) -> StageLayout:
    """The mesh `mesh` over `devices`, last axis on consecutive devices."""
    cluster = problem.cluster
    grid = np.array(devices).reshape(tuple(mesh))
    latency, bandwidth = [], []
    for axis in range(len(mesh)):
        groups = np.moveaxis(grid, axis, -1).reshape(-1, mesh[axis]).tolist()
        shared = _sharing(cluster, groups)
        # Equal groups cost the same: price one of each set of hosts.
        distinct = {tuple(sorted(cluster.node_of[r] for r in group)): group for group in groups}
        links = [group_link(cluster, group, sharing=shared) for group in distinct.values()]
        latency.append(max(link.latency_s for link in links))
        bandwidth.append(min(link.bytes_per_s for link in links))
    kinds = {cluster.device(d).name: cluster.device(d) for d in devices}.values()
    capacity = min(k.memory_bytes for k in kinds) - problem.hints.memory_reserve_bytes
    return StageLayout(
        devices=tuple(devices),
        axes=np.array(mesh, dtype=np.float64),
        latency_s=np.array(latency),
        bytes_per_s=np.array(bandwidth),
        hardware=_hardware(problem, tuple(kinds)),
        capacity=capacity,
    )


def _hardware(problem: Problem, kinds: Sequence[Device]) -> Floats:
    """[H_COUNT] what the kernels of a stage on devices of `kinds` depend on."""
    trainer = problem.trainer
    products = [gemm_curve(kind, problem.precision) for kind in kinds]
    attentions = [
        attention_curve(kind, rate=trainer.attention_rate, portable=trainer.portable_attention) for kind in kinds
    ]
    vector = np.empty(H_COUNT)
    vector[H_GEMM : H_GEMM + G_COUNT] = min(products, key=lambda curve: float(curve[G_FLOPS]))
    vector[H_ATTENTION : H_ATTENTION + A_COUNT] = min(attentions, key=lambda curve: float(curve[A_FLOPS]))
    vector[H_BANDWIDTH] = min(kind.hbm_bandwidth_GBps * 1e9 * kind.memory_efficiency for kind in kinds)
    vector[H_ELEMENTWISE] = trainer.elementwise_traffic
    vector[H_LOSS] = shared("loss_passes")
    vector[H_KERNEL_S] = shared("kernel_us") * 1e-6
    vector[H_ELEMENT] = problem.activation_bytes
    vector[H_MISALIGNED] = shared("misaligned")
    vector[H_FALLBACK] = shared("fallback_kernels")
    vector[H_HOST_S] = trainer.host_us_per_operator * 1e-6
    vector[H_HOST_BACKWARD] = shared("host_backward")
    vector[H_HOST_COLLECTIVE_S] = trainer.host_us_per_collective * 1e-6
    vector[H_WAIT_EXPONENT] = shared("group_wait_exponent")
    vector[H_OVERLAP_EXPONENT] = shared("overlap_exponent")
    vector[H_EXPOSED] = 1.0 - trainer.tensor_overlap
    return vector


def build_layout(problem: Problem, stages: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Layout:
    """The layout of pipeline ranks given as (devices, mesh)."""
    laid = []
    known: dict[tuple[object, ...], StageLayout] = {}
    for devices, mesh in stages:
        # Ranks that stand alike on alike hosts are laid out once; only their device numbers differ.
        hosts = [problem.cluster.node_of[d] for d in devices]
        key = (
            tuple(mesh),
            tuple(h - hosts[0] for h in hosts),
            tuple(problem.cluster.hosts[h] for h in dict.fromkeys(hosts)),
        )
        if problem.cluster.bandwidth_GBps is not None or key not in known:
            known[key] = stage_layout(problem, devices, mesh)
        same = known[key]
        laid.append(
            StageLayout(
                devices=tuple(devices),
                axes=same.axes,
                latency_s=same.latency_s,
                bytes_per_s=same.bytes_per_s,
                hardware=same.hardware,
                capacity=same.capacity,
            )
        )
    latency, bandwidth = [], []
    for rank, stage in enumerate(laid):
        following = laid[(rank + 1) % len(laid)]
        delay, rate = _send(problem.cluster, stage.devices, following.devices) if len(laid) > 1 else (0.0, np.inf)
        latency.append(delay)
        bandwidth.append(rate)
    first = laid[0]
    uniform = all(
        stage.axes is first.axes and stage.hardware is first.hardware and stage.latency_s is first.latency_s
        for stage in laid
    )
    return Layout(
        stages=tuple(laid), send_latency_s=np.array(latency), send_bytes_per_s=np.array(bandwidth), uniform=uniform
    )


def _sharing(cluster: Cluster, groups: Sequence[Sequence[int]]) -> int:
    """How many groups that span hosts use the NICs of the busiest host."""
    use: dict[int, int] = {}
    for group in groups:
        hosts = {cluster.node_of[rank] for rank in group}
        if len(hosts) > 1:
            for host in hosts:
                use[host] = use.get(host, 0) + 1
    return max(use.values(), default=1)


def _send(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]) -> tuple[float, float]:
    """Latency and bandwidth of each sender when all send at once, device i to device i (or to its share)."""
    pairs = [(s, receivers[i * len(receivers) // len(senders)]) for i, s in enumerate(senders)]
    out: dict[int, int] = {}
    for s, r in pairs:
        if cluster.node_of[s] != cluster.node_of[r]:
            out[cluster.node_of[s]] = out.get(cluster.node_of[s], 0) + 1
    latency, bandwidth = 0.0, float("inf")
    for s, r in pairs:
        link = group_link(cluster, (s, r), sharing=out.get(cluster.node_of[s], 1))
        latency = max(latency, link.latency_s)
        bandwidth = min(bandwidth, link.bytes_per_s)
    return latency, bandwidth
