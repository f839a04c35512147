"""Constants of fitted curves as records: from `automap/data/fitted`, or measured on a host by `automap profile`.

The formulas that use them are in `automap.price.kernels.gemm`, `attention` and `communication`. Units are in the names;
shares are relative to the rate that the device or link states.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any

from automap.documents import read_document
from automap.records import Range

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
"""Kinds of collectives, in the order of their numbers in the price."""
QUIET = {"others": 0.05, "stolen": 0.01, "waiting": 0.05, "spread": 0.25}
"""Largest values of `Conditions` on a quiet host. Chosen: with a tenth of two cores in use by others, profiles report
0.09, 0, 0.05 and 0.12; with ten busy processes beside them 0.72, 0, 0.72 and 0.16 (2026-11-22)."""
Efficiency = Annotated[float, Range(1e-6, 100)]
"""Share of a stated rate. It may exceed 1 if the stated rate is too low, such as a memory bandwidth that was measured
without caches."""
Share = Annotated[float, Range(0, 1)]
Microseconds = Annotated[float, Range(0, 1e9)]
Milliseconds = Annotated[float, Range(0, 1e6)]
"""Both types allow up to 17 minutes."""
Amount = Annotated[float, Range(0, 1e6)]
"""A number of bytes, elements, kernels or passes for each unit of something else."""
AtLeastOne = Annotated[float, Range(1, 1e6)]
Rows = Annotated[int, Range(0, 2**31 - 1)]
Errors = Mapping[str, Annotated[float, Range(0, 2**31 - 1)]]
"""Errors as shares, and the number of measurements under `rows`."""


@functools.cache
def fitted(name: str) -> Mapping[str, Any]:
    """A file of `automap/data/fitted`."""
    text = resources.files("automap").joinpath("data", "fitted", f"{name}.json").read_text("utf-8")
    document: Mapping[str, Any] = read_document(text)
    return document


def published_curves(name: str) -> Mapping[str, Any]:
    """Kind of device -> constants fitted to its measurements, from a file of `automap/data/fitted`."""
    found: Mapping[str, Any] = fitted(name)["curves"]
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCurve:
    """Constants of `gemm_s` for one precision."""

    floor_us: Microseconds
    compute_efficiency: Efficiency
    memory_efficiency: Efficiency
    norm: Annotated[float, Range(1, 100)]
    depth_elements: Amount
    split: Share
    tail: Share
    cache_speedup: Annotated[float, Range(1e-3, 1e3)]
    quantise_bytes: Amount = 0.0
    grain: Annotated[float, Range(1, 4096)] = 64.0
    """Rows and columns of a result are padded to multiples of this."""
    rows: Rows
    """Number of measurements that the curve was fitted to."""
    cross_validated: Errors
    """{median_error, p90_error} as shares, on measurements that were left out of the fit."""


Passes = tuple[
    Annotated[float, Range(1e-6, 1e3)], Annotated[float, Range(1e-6, 1e3)], Annotated[float, Range(1e-6, 1e3)]
]
"""A quantity of the forward pass, of the gradient of the input and of the gradient of the weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionCurve:
    """Rates of convolutions in one precision; where images have channels `last` or `first` in memory."""

    dense: Passes
    """Rates over those of products of equal extents."""
    odd_last: Passes
    """Rates over the fp32 peak where channels are not a multiple of 16 bytes."""
    odd_first: Passes
    grouped_last: Passes
    """Rates over the fp32 peak where groups have fewer channels than 16 bytes hold, such as one."""
    grouped_first: Passes


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCurve:
    """Constants of `attention_s`."""

    floor_us: Microseconds
    compute_efficiency: Efficiency
    memory_efficiency: Efficiency
    tail: Annotated[float, Range(0, 100)]
    """Weight of the longest block; above 1 if nothing runs beside it."""
    small_head_elements: Amount
    backward: Annotated[float, Range(1e-3, 1e3)] | None = None
    """Arithmetic of the backward kernel relative to the forward kernel; None = `attention_backward` of
    `fitted/step.json`."""
    rows: Rows
    cross_validated: Errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Measured kernel curves of one kind of device."""

    gemm: Mapping[str, GemmCurve]
    """Precision -> curve of matrix products."""
    attention: AttentionCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCurve:
    """Constants of `host_link` for one kind of collective inside a host."""

    latency_us: Microseconds
    latency_growth: Amount
    efficiency: Efficiency
    small_group: Amount
    ramp: Amount
    rows: Rows
    cross_validated: Errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """How busy a host was while it was measured. All values are shares."""

    others: Share
    """Share of the cores' time that other processes used."""
    stolen: Share
    """Share of the cores' time that the hypervisor gave to other machines."""
    waiting: Share
    """Share of its computing time that a measuring process waited for a core; 0 for GPUs."""
    spread: Amount
    """Largest minus least time over the median time of the repeats of a kernel; median over all kernels."""

    def seen(self) -> tuple[str, ...]:
        """Descriptions of the values that are higher than on a quiet host."""
        texts = {
            "others": f"other processes had {self.others:.0%} of the time of the cores",
            "stolen": f"the hypervisor gave {self.stolen:.0%} of the time of the cores to other machines",
            "waiting": f"processes that computed waited for a core {self.waiting:.0%} of the time",
            "spread": f"repeats of one kernel were {self.spread:.0%} apart",
        }
        return tuple(text for name, text in texts.items() if getattr(self, name) > QUIET[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Constants of one cluster; each replaces the constant of that name of `fitted/step.json` or of the trainer.

    None keeps the general constant.
    """

    overlap_exponent: Annotated[float, Range(1, 100)] | None = None
    """Exponent of the overlap of host and device; 1 if the host itself computes."""
    host_backward: Amount | None = None
    micro_batch_ms: Milliseconds | None = None
    kernel_us: Microseconds | None = None
    misaligned: AtLeastOne | None = None
    fallback_kernels: Amount | None = None
    optimizer_bytes: Amount | None = None
    host_us_per_operator: Microseconds | None = None
    host_us_per_collective: Microseconds | None = None
    send_host_ms: Milliseconds | None = None
    step_overhead_ms: Milliseconds | None = None
    elementwise_traffic: Amount | None = None
    loss_passes: Amount | None = None
    reserved_GiB: Amount | None = None  # noqa: N815
    memory_spread: Amount | None = None
    errors: Mapping[str, Errors] = dataclasses.field(default_factory=dict)
    """Name of a measurement -> {rows, median_error, p90_error} of the fit."""
    conditions: Conditions | None = None
    """How busy the host was while it was measured; None if the constants come from elsewhere."""
    source: Mapping[str, str] | None = None

    def stated(self) -> dict[str, float]:
        """Constants that are not None, by name."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}
