"""The devices of the stages of a pipeline, and the links of their axes and boundaries.

Links are `LinkRow` records, for `collective_s`. The devices of a host divide its NICs evenly. Units: seconds, bytes/s,
FLOP/s.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from automap.arrays import Floats, Ints
from automap.cluster import Cluster
from automap.device_kinds import Device
from automap.execution import FULL, HALF, casts_weights
from automap.group_links import group_link
from automap.price.curves import (
    attention_curve,
    constant,
    convolution_rates,
    gemm_curve,
    shared,
    tensor_speedup,
)
from automap.price.kernels.array_types import Record, Rows, record_of
from automap.price.kernels.stage_records import HARDWARE_DTYPE, LINK_DTYPE, HardwareRow
from automap.price.kernels.step_records import StageArrays
from automap.price.link_records import Sends, link_record
from automap.price.visible_keys import has_ring
from automap.problem import WEIGHT_BYTES, Problem


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of device in a stage with several kinds."""

    ranks: tuple[int, ...]
    """Indices along the stage's outer axis whose devices are of this kind."""
    stage: StageLayout
    """The stage as if all of its devices were of this kind; but its speed is the sum over all kinds."""
    number: int
    """Number of `stage` among the distinct stages, see `PipelineLayouts`."""


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """One pipeline rank: its devices as a mesh."""

    devices: tuple[int, ...]
    axes: Floats
    """[axes] ranks of each mesh axis."""
    links: Rows
    """[axes] link of a group of each mesh axis, see `LinkRow`."""
    hardware: Record
    """Constants of the slowest device and of the trainer, see `HardwareRow`."""
    capacity: float
    """Bytes of the smallest device that a plan may use."""
    speed: float
    """FLOP/s of all devices together, if each is as slow as the slowest one, over the FLOP/s of the fastest device of
    the cluster."""
    kinds: tuple[Kind, ...] = ()
    """Kinds of devices along the outer axis, the slowest first; empty where all ranks of it are equal."""
    seen_by: tuple[int, ...] = ()
    """In a layout of `PipelineLayout.seen`: the devices of the kind as which the stage is priced; else empty."""


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """All pipeline ranks and the links between consecutive ones."""

    stages: tuple[StageLayout, ...]
    """[ranks] the stage of each rank."""
    numbers: tuple[int, ...]
    """[ranks] number of each stage among the distinct stages, see `PipelineLayouts`."""
    send_latency_s: Floats
    """[ranks] seconds of an empty message to the next rank; that of the last rank is to the first one, for virtual
    stages."""
    send_bytes_per_s: Floats
    """[ranks] bandwidth from each device of the rank to the next rank."""
    views: dict[tuple[int, tuple[bool, ...]], PipelineLayout] = field(default_factory=dict, repr=False)
    """Results of `seen`."""

    def seen(self, view: int, shared: tuple[bool, ...]) -> PipelineLayout:
        """The layout in which stages with several kinds of devices consist of one kind alone.

        Args:
            view: number of the kind; a stage with fewer kinds gets its last one.
            shared: [ranks] whether each kind of device in the stage has its own share of the samples; other stages stay
                as they are.
        """
        key = (view, shared)
        if key not in self.views:
            stages, numbers = list(self.stages), list(self.numbers)
            for rank, stage in enumerate(self.stages):
                if shared[rank] and stage.kinds:
                    kind = stage.kinds[min(view, len(stage.kinds) - 1)]
                    places = np.array(stage.devices).reshape(int(stage.axes[0]), -1)
                    mine = tuple(places[list(kind.ranks)].reshape(-1).tolist())
                    stages[rank] = replace(kind.stage, devices=stage.devices, seen_by=mine)
                    numbers[rank] = kind.number
            self.views[key] = replace(self, stages=tuple(stages), numbers=tuple(numbers), views={})
        return self.views[key]

    @property
    def uniform(self) -> bool:
        """Whether all ranks cost the same."""
        return len(set(self.numbers)) == 1

    @functools.cached_property
    def arrays(self) -> StageArrays:
        """Stages and boundaries of all ranks, as `step` reads them."""
        return StageArrays(
            axes=np.array([stage.axes for stage in self.stages]),
            links=np.array([stage.links for stage in self.stages], dtype=LINK_DTYPE),
            hardware=np.array([stage.hardware for stage in self.stages], dtype=HARDWARE_DTYPE),
            capacity=np.array([float(stage.capacity) for stage in self.stages]),
            send_latency_s=self.send_latency_s,
            send_bytes_per_s=self.send_bytes_per_s,
        )


_RATES = ("bytes_per_s", "gather_bytes_per_s")
"""Fields of `LinkRow` of which the least is the worst; of all other fields the largest is."""


def _unlike(cluster: Cluster, groups: Ints) -> dict[bytes, list[int]]:
    """One of each set of equal groups, by a key that equal groups have in common.

    Groups are equal if their ranks have equal places on equal hosts. With measured bandwidths all groups differ.

    Args:
        cluster: the cluster.
        groups: [groups, ranks] devices.
    """
    if cluster.bandwidth_GBps is not None:
        return {group.tobytes(): group.tolist() for group in groups}
    hosts = np.sort(cluster.places[groups], axis=1)
    # The kind of each rank's host, and whether it is another host than that of the rank before.
    rows = np.concatenate([cluster.alike[hosts], np.diff(hosts, axis=1) > 0], axis=1)
    found = {row.tobytes(): number for number, row in enumerate(rows)}
    return {key: groups[number].tolist() for key, number in found.items()}


def _rate(problem: Problem, kind: Device) -> float:
    """FLOP/s that large matrix products reach on a device."""
    return float(gemm_curve(kind, problem.base_precision).flops_per_s)


def _peak_over_plain(problem: Problem, kinds: Sequence[Device]) -> float:
    """Largest ratio of the peak of a device to that of its plain cores in fp32, at least 1; devices that state no fp32
    peak do not count."""
    peaks = [(kind.flops(problem.base_precision), kind.peak_TFLOPs.get("fp32")) for kind in kinds]
    return max([1.0, *(peak / (plain * 1e12) for peak, plain in peaks if plain is not None)])


def _hardware(problem: Problem, kinds: Sequence[Device]) -> Record:
    """The `HardwareRow` of a stage with devices of some kinds: for each number, that of the worst kind."""
    trainer, cluster = problem.trainer, problem.cluster
    products = [gemm_curve(kind, problem.base_precision) for kind in kinds]
    weights = [gemm_curve(kind, problem.precision, scaling=problem.training.scaling) for kind in kinds]
    attentions = [
        attention_curve(kind, problem.base_precision, rate=trainer.attention_rate, portable=trainer.portable_attention)
        for kind in kinds
    ]
    convolutions = [convolution_rates(kind, problem.base_precision) for kind in kinds]
    # Without tensor cores, other arithmetic runs at the rate of products. So it does on hosts that were measured, since
    # nothing else is known of them.
    is_slower = problem.base_precision != "fp32" and all(kind.kernels is None for kind in kinds)
    # Products whose rows tensor cores do not support take at most as long as on the plain cores.
    has_slow_rows = problem.base_precision != "fp32" and not trainer.pads_products
    most = max(1.0, *(tensor_speedup(kind, problem.base_precision) for kind in kinds)) if has_slow_rows else 1.0

    def slowest(curves: Sequence[Record]) -> Record:
        return min(curves, key=lambda curve: float(curve.flops_per_s))

    misaligned = slowest(products).copy()
    misaligned.flops_per_s /= min(constant("misaligned", cluster), _peak_over_plain(problem, kinds))

    return record_of(
        HardwareRow(
            products=slowest(products),
            misaligned=misaligned,
            weights=slowest(weights),
            attention=slowest(attentions),
            bytes_per_s=min(kind.hbm_bandwidth_GBps * 1e9 * kind.memory_efficiency for kind in kinds),
            elementwise_passes=trainer.elementwise_traffic,
            loss_passes=trainer.loss_passes,
            loss_bytes=trainer.loss_bytes,
            kernel_s=constant("kernel_us", cluster) * 1e-6,
            element_bytes=problem.activation_bytes,
            fallback_kernels=constant("fallback_kernels", cluster),
            host_kernel_s=trainer.host_us_per_operator * 1e-6,
            host_backward=constant("host_backward", cluster),
            host_collective_s=trainer.host_us_per_collective * 1e-6,
            overlap_exponent=constant("overlap_exponent", cluster),
            exposed=1.0 - problem.tensor_overlap,
            scatters_sends=float(trainer.scattered_sends),
            regathers=float(trainer.regathers),
            weight_element_bytes=problem.weight_bytes,
            quantise_kernels=shared("quantise_kernels") if problem.precision in WEIGHT_BYTES else 0.0,
            routing_passes=trainer.routing_passes,
            routing_kernels=shared("routing_kernels"),
            exposed_exchange=1.0 - problem.exchange_overlap,
            joins_exchanges=float(trainer.dispatcher != "axis"),
            copies_once=float(trainer.dispatcher == "rank"),
            launches_singly=float(not trainer.groups_experts),
            ring=float(has_ring(problem)),
            expert_rate=shared("expert_rate"),
            saved_share=problem.weight_bytes / problem.activation_bytes if trainer.keeps_quantised else 1.0,
            keeps_results=float(trainer.keeps_results),
            other_rate=shared("other_rate") if is_slower else 1.0,
            convolution_rates=np.min([one.dense for one in convolutions], axis=0),
            odd_first=np.min([one.odd_first for one in convolutions], axis=0),
            odd_last=np.min([one.odd_last for one in convolutions], axis=0),
            grouped_first=np.min([one.grouped_first for one in convolutions], axis=0),
            grouped_last=np.min([one.grouped_last for one in convolutions], axis=0),
            short_rows=min(shared("short_rows"), most),
            odd_rows=min(shared("odd_rows"), most),
            weight_cast_bytes=FULL + HALF if casts_weights(problem) else 0.0,
        )
    )


class PipelineLayouts:
    """The layouts of a problem; equal meshes in equal places on equal hosts share one stage.

    Attributes:
        problem: model, cluster and training.
        stages: the distinct stages by number; all other stages differ from one of them in their device numbers alone.
            A stage is followed by those of its `kinds`.
        sends: latency and bandwidth from a stage to the next one.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stages: list[StageLayout] = []
        self._hardware: dict[tuple[str, ...], Record] = {}
        self._links: dict[bytes, Record] = {}
        self._patterns: dict[tuple[bytes, bytes], int] = {}
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}
        self.sends = Sends(problem)

    def pattern(self, devices: Ints) -> int:
        """Number of the pattern in which devices, [devices], are placed on hosts; equal for equal patterns."""
        cluster = self.problem.cluster
        hosts = cluster.places[devices]
        key = ((hosts - hosts[0]).tobytes(), cluster.alike[hosts].tobytes())
        if cluster.bandwidth_GBps is not None:
            key = (devices.tobytes(), b"")
        return self._patterns.setdefault(key, len(self._patterns))

    def number(self, pattern: int, devices: Ints, mesh: Sequence[int]) -> int:
        """Number of the distinct stage that is a mesh over devices, [devices], of this pattern."""
        key = (pattern, tuple(mesh))
        if key not in self._numbers:
            self._numbers[key] = len(self.stages)
            stage = self.stage_layout(devices.tolist(), mesh)
            self.stages.append(stage)
            kinds = self._kinds(stage)
            numbers = range(len(self.stages), len(self.stages) + len(kinds))
            self.stages += [alike for _, alike in kinds]
            self.stages[self._numbers[key]] = replace(
                stage,
                kinds=tuple(
                    Kind(ranks=ranks, stage=alike, number=number)
                    for (ranks, alike), number in zip(kinds, numbers, strict=True)
                ),
            )
        return self._numbers[key]

    def stage_layout(self, devices: Sequence[int], mesh: Sequence[int]) -> StageLayout:
        """The stage of a mesh over devices; the last axis has consecutive devices."""
        problem, cluster = self.problem, self.problem.cluster
        links = self._axis_links(np.array(devices).reshape(tuple(mesh)))
        hosts = dict.fromkeys(cluster.alike[cluster.places[np.asarray(devices)]].tolist())
        names = tuple(dict.fromkeys(cluster.hosts[host].device for host in hosts))
        hardware = self._hardware_of(names)
        return StageLayout(
            devices=tuple(devices),
            axes=np.array(mesh, dtype=np.float64),
            links=links,
            hardware=hardware,
            capacity=problem.usable_bytes([cluster.devices[name] for name in names]),
            speed=len(devices) * (float(hardware.products.flops_per_s) / self._fastest),
        )

    def _axis_links(self, grid: Ints) -> Rows:
        """[axes] the link of the slowest group of each axis of a mesh of devices, since all groups wait for it."""
        links = np.empty(grid.ndim, dtype=LINK_DTYPE)
        for axis, size in enumerate(grid.shape):
            distinct = _unlike(self.problem.cluster, np.moveaxis(grid, axis, -1).reshape(-1, size))
            found = np.array([self._link(key, group) for key, group in distinct.items()], dtype=LINK_DTYPE)
            for name in LINK_DTYPE.names or ():
                worst = np.min if name in _RATES else np.max
                links[name][axis] = worst(found[name], axis=0)
        return links

    def _link(self, key: bytes, group: Sequence[int]) -> Record:
        """The link of a group; groups of one key have equal links."""
        if key not in self._links:
            link = group_link(self.problem.cluster, group)
            self._links[key] = link_record(link, self.problem.trainer.gather_bandwidth_share)
        return self._links[key]

    def _hardware_of(self, names: tuple[str, ...]) -> Record:
        """`_hardware` of the kinds of devices with these names, computed once."""
        if names not in self._hardware:
            self._hardware[names] = _hardware(self.problem, [self.problem.cluster.devices[name] for name in names])
        return self._hardware[names]

    @functools.cached_property
    def _rates(self) -> dict[str, float]:
        """FLOP/s that large matrix products reach on each kind of device, by name."""
        return {name: _rate(self.problem, device) for name, device in self.problem.cluster.devices.items()}

    @property
    def _fastest(self) -> float:
        return max(self._rates.values())

    def _kinds(self, stage: StageLayout) -> list[tuple[tuple[int, ...], StageLayout]]:
        """For each kind of device, the slowest first: its ranks along the outer axis, and the stage for `Kind.stage`.

        The list is empty where all ranks are equal.
        """
        problem, cluster, outer = self.problem, self.problem.cluster, int(stage.axes[0])
        grid = np.array(stage.devices).reshape(stage.axes.astype(np.int64))
        hosts = cluster.alike[cluster.places[np.array(stage.devices)]].reshape(outer, -1)
        if outer == 1 or len({cluster.hosts[host].device for host in np.unique(hosts).tolist()}) == 1:
            return []
        found: dict[frozenset[str], list[int]] = {}
        for rank, mine in enumerate(hosts.tolist()):
            found.setdefault(frozenset(cluster.hosts[host].device for host in mine), []).append(rank)
        if len(found) == 1:
            return []
        devices = {names: tuple(cluster.devices[name] for name in sorted(names)) for names in found}
        rate = {names: min(self._rates[name] for name in names) for names in found}
        inner = len(stage.devices) // outer
        speed = sum(len(ranks) * inner * rate[names] for names, ranks in found.items()) / self._fastest
        kinds = []
        for names in sorted(found, key=lambda names: (rate[names], sorted(names))):
            hardware, capacity = self._hardware_of(tuple(sorted(names))), problem.usable_bytes(devices[names])
            # Groups of the outer axis contain all kinds; those of the other axes contain one kind each.
            links = np.concatenate([stage.links[:1], self._axis_links(grid[found[names]])[1:]])
            alike = replace(stage, hardware=hardware, capacity=capacity, speed=speed, links=links)
            kinds.append((tuple(found[names]), alike))
        return kinds

    def of(self, stages: Sequence[tuple[Sequence[int], Sequence[int]]]) -> PipelineLayout:
        """The layout of pipeline ranks given as (devices, mesh)."""
        devices = [np.asarray(mine, dtype=np.int64) for mine, _ in stages]
        patterns = [self.pattern(mine) for mine in devices]
        numbers = [
            self.number(pattern, mine, mesh) for pattern, mine, (_, mesh) in zip(patterns, devices, stages, strict=True)
        ]
        sends = [(0.0, np.inf)]
        if len(stages) > 1:
            following = [*range(1, len(stages)), 0]
            sends = [
                self.sends.of((patterns[rank], patterns[after]), devices[rank], devices[after])
                for rank, after in enumerate(following)
            ]
        return PipelineLayout(
            stages=tuple(
                replace(self.stages[number], devices=tuple(mine.tolist()))
                for number, mine in zip(numbers, devices, strict=True)
            ),
            numbers=tuple(numbers),
            send_latency_s=np.array([latency for latency, _ in sends]),
            send_bytes_per_s=np.array([rate for _, rate in sends]),
        )
