"""Layout: where the stages of a pipeline stand on a cluster, and what their axes and boundaries cost.

Links become the vectors of `collective_s` here; the devices of a host divide its NICs evenly. Units: seconds,
bytes/s, FLOP/s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from automap.cluster import Cluster, Device, GroupLink, group_link
from automap.price.attention import A_COUNT, A_FLOPS
from automap.price.communication import (
    V_BYTES_PER_S,
    V_COUNT,
    V_EXCHANGE_BYTES_PER_S,
    V_GATHER_BYTES_PER_S,
    V_RING_S,
    V_TREE_S,
    V_WAIT,
    host_link,
)
from automap.price.curves import attention_curve, gemm_curve, shared
from automap.price.gemm import G_COUNT, G_FLOPS
from automap.price.vectors import (
    H_ATTENTION,
    H_BANDWIDTH,
    H_COUNT,
    H_ELEMENT,
    H_ELEMENTWISE,
    H_EXPERT_RATE,
    H_EXPOSED,
    H_EXPOSED_EXCHANGE,
    H_FALLBACK,
    H_GEMM,
    H_HOST_BACKWARD,
    H_HOST_COLLECTIVE_S,
    H_HOST_S,
    H_KEPT,
    H_KERNEL_S,
    H_LOSS,
    H_MISALIGNED,
    H_OVERLAP_EXPONENT,
    H_QUANTISE_KERNELS,
    H_REGATHERS,
    H_RING,
    H_ROUTING,
    H_ROUTING_KERNELS,
    H_SCATTERED,
    H_WEIGHT_ELEMENT,
    H_WEIGHTS,
)
from automap.problem import WEIGHT_BYTES, Problem

Floats = npt.NDArray[np.float64]

WAITED_FOR = 7.0
"""Ranks of which one may be late: those of a host beside one's own; larger groups were not seen to wait longer."""


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """One pipeline rank: its devices as a mesh."""

    devices: tuple[int, ...]
    axes: Floats
    """[axes] ranks of each mesh axis."""
    links: Floats
    """[axes, V_COUNT]"""
    hardware: Floats
    """[H_COUNT] of the slowest device and of the trainer, see `automap.price.vectors`."""
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
    links, share = np.empty((len(mesh), V_COUNT)), problem.trainer.gather_bandwidth_share
    for axis in range(len(mesh)):
        groups = np.moveaxis(grid, axis, -1).reshape(-1, mesh[axis]).tolist()
        # Equal groups cost the same: price one of each set of hosts.
        distinct = {tuple(sorted(cluster.node_of[r] for r in group)): group for group in groups}
        found = np.array([link_vector(group_link(cluster, g), share) for g in distinct.values()])
        links[axis] = found.max(axis=0)
        for rate in (V_BYTES_PER_S, V_GATHER_BYTES_PER_S, V_EXCHANGE_BYTES_PER_S):
            links[axis, rate] = found[:, rate].min()
    kinds = {cluster.device(d).name: cluster.device(d) for d in devices}.values()
    capacity = min(k.memory_bytes for k in kinds) - problem.hints.memory_reserve_bytes
    return StageLayout(
        devices=tuple(devices),
        axes=np.array(mesh, dtype=np.float64),
        links=links,
        hardware=_hardware(problem, tuple(kinds)),
        capacity=capacity,
    )


def _hardware(problem: Problem, kinds: Sequence[Device]) -> Floats:
    """[H_COUNT] what the kernels of a stage on devices of `kinds` depend on."""
    trainer = problem.trainer
    products = [gemm_curve(kind, problem.base_precision) for kind in kinds]
    weights = [gemm_curve(kind, problem.precision, scaling=problem.training.scaling) for kind in kinds]
    attentions = [
        attention_curve(kind, rate=trainer.attention_rate, portable=trainer.portable_attention) for kind in kinds
    ]
    vector = np.empty(H_COUNT)
    vector[H_GEMM : H_GEMM + G_COUNT] = min(products, key=lambda curve: float(curve[G_FLOPS]))
    vector[H_WEIGHTS : H_WEIGHTS + G_COUNT] = min(weights, key=lambda curve: float(curve[G_FLOPS]))
    vector[H_ATTENTION : H_ATTENTION + A_COUNT] = min(attentions, key=lambda curve: float(curve[A_FLOPS]))
    vector[H_BANDWIDTH] = min(kind.hbm_bandwidth_GBps * 1e9 * kind.memory_efficiency for kind in kinds)
    vector[H_ELEMENTWISE] = trainer.elementwise_traffic
    vector[H_LOSS] = trainer.loss_passes
    vector[H_KERNEL_S] = shared("kernel_us") * 1e-6
    vector[H_ELEMENT] = problem.activation_bytes
    vector[H_MISALIGNED] = shared("misaligned")
    vector[H_FALLBACK] = shared("fallback_kernels")
    vector[H_HOST_S] = trainer.host_us_per_operator * 1e-6
    vector[H_HOST_BACKWARD] = shared("host_backward")
    vector[H_HOST_COLLECTIVE_S] = trainer.host_us_per_collective * 1e-6
    vector[H_OVERLAP_EXPONENT] = shared("overlap_exponent")
    vector[H_SCATTERED] = float(trainer.scattered_sends)
    vector[H_REGATHERS] = float(trainer.regathers)
    vector[H_EXPOSED] = 1.0 - problem.tensor_overlap
    vector[H_EXPOSED_EXCHANGE] = 1.0 - trainer.exchange_overlap
    vector[H_WEIGHT_ELEMENT] = problem.weight_bytes
    vector[H_KEPT] = problem.weight_bytes / problem.activation_bytes if trainer.keeps_quantised else 1.0
    vector[H_QUANTISE_KERNELS] = shared("quantise_kernels") if problem.precision in WEIGHT_BYTES else 0.0
    vector[H_ROUTING] = shared("routing_passes")
    vector[H_ROUTING_KERNELS] = shared("routing_kernels")
    vector[H_EXPERT_RATE] = shared("expert_rate")
    vector[H_RING] = float(trainer.ring_attention)
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
                links=same.links,
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
        stage.axes is first.axes and stage.hardware is first.hardware and stage.links is first.links for stage in laid
    )
    return Layout(
        stages=tuple(laid), send_latency_s=np.array(latency), send_bytes_per_s=np.array(bandwidth), uniform=uniform
    )


def link_vector(link: GroupLink, gather_share: float) -> Floats:
    """[V_COUNT] what `collective_s` takes of a group.

    Inside a host small groups lack a part of the rate and small messages climb slowly; between hosts rings wait for
    every rank and trees for every level. ZeRO's gathers reach `gather_share` of the line rate there.
    """
    latency = shared("node_latency_us") * 1e-6
    if link.hosts > 1:
        vector = np.zeros(V_COUNT)
        vector[V_BYTES_PER_S] = link.bytes_per_s
        vector[V_RING_S] = latency + shared("ring_us") * 1e-6 * (link.size - 1.0)
        vector[V_TREE_S] = latency + shared("tree_level_us") * 1e-6 * math.log2(link.hosts)
    else:
        vector = host_link(
            link.size,
            latency_s=latency / shared("node_over_device"),
            growth=shared("latency_growth"),
            bytes_per_s=link.bytes_per_s,
            small_group=shared("small_group"),
            ramp=shared("ramp"),
        )
    vector[V_EXCHANGE_BYTES_PER_S] = link.exchange_bytes_per_s if link.hosts > 1 else vector[V_BYTES_PER_S]
    vector[V_WAIT] = min(link.size - 1.0, WAITED_FOR) ** shared("group_wait_exponent")
    is_between = link.hosts > 1
    vector[V_GATHER_BYTES_PER_S] = link.line_bytes_per_s * gather_share if is_between else vector[V_BYTES_PER_S]
    return vector


def _send(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]) -> tuple[float, float]:
    """Latency and bandwidth of each sender when all send at once, device i to device i (or to its share)."""
    latency, bandwidth = 0.0, float("inf")
    pairs = [(sender, receivers[i * len(receivers) // len(senders)]) for i, sender in enumerate(senders)]
    if cluster.bandwidth_GBps is None:
        # Pairs on the same two hosts are alike.
        pairs = list({(cluster.node_of[a], cluster.node_of[b]): (a, b) for a, b in pairs}.values())
    for sender, receiver in pairs:
        link = group_link(cluster, (sender, receiver))
        latency = max(latency, float(link_vector(link, 1.0)[V_TREE_S]))
        host = cluster.hosts[cluster.node_of[sender]]
        inside = shared("send_share") * cluster.links[host.intra_node_link].bytes_per_s
        is_named = link.hosts > 1 or cluster.bandwidth_GBps is not None
        bandwidth = min(bandwidth, link.bytes_per_s if is_named else inside)
    return latency, bandwidth
