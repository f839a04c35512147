"""Fitted curves as records: those of `automap/data/fitted` and those that `automap profile` measures of a host.

The forms that they are constants of are in `automap.price.kernels.gemm`, `attention` and `communication`. Knows no
device. Units are in the names; shares are of the rate that the device or link states.
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
"""Kinds, by the numbers that the price has for them."""
QUIET = {"others": 0.05, "stolen": 0.01, "waiting": 0.05, "spread": 0.25}
"""Most of each of `Conditions` on a quiet host. Chosen: with a tenth of two cores in use by others, profiles say 0.09,
0, 0.05 and 0.12, with ten processes at work beside them 0.72, 0, 0.72 and 0.16 (2026-11-22)."""
Efficiency = Annotated[float, Range(1e-6, 100)]
"""Share of a stated rate. A fit goes above 1 where the rate was stated too low, such as that of memory by a stream that
no cache serves; a hundredfold is no rate."""
Share = Annotated[float, Range(0, 1)]
Microseconds = Annotated[float, Range(0, 1e9)]
Milliseconds = Annotated[float, Range(0, 1e6)]
"""Both up to 17 minutes."""
Amount = Annotated[float, Range(0, 1e6)]
"""Bytes, elements, kernels or passes, for each of something."""
AtLeastOne = Annotated[float, Range(1, 1e6)]
Rows = Annotated[int, Range(0, 2**31 - 1)]
Errors = Mapping[str, Annotated[float, Range(0, 2**31 - 1)]]
"""Shares, and the number of measurements under `rows`."""


@functools.cache
def fitted(name: str) -> Mapping[str, Any]:
    """A file of `automap/data/fitted`."""
    text = resources.files("automap").joinpath("data", "fitted", f"{name}.json").read_text()
    document: Mapping[str, Any] = read_document(text)
    return document


def published_curves(name: str) -> Mapping[str, Any]:
    """Kind of device -> what was fitted to its measurements, of a file of `automap/data/fitted`."""
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
    """Measurements that it was fitted to."""
    cross_validated: Errors
    """{median_error, p90_error}, shares, on measurements that were left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCurve:
    """Constants of `attention_s`."""

    floor_us: Microseconds
    compute_efficiency: Efficiency
    memory_efficiency: Efficiency
    tail: Annotated[float, Range(0, 100)]
    """Above 1 where the longest block counts once more, since nothing runs beside it."""
    small_head_elements: Amount
    backward: Annotated[float, Range(1e-3, 1e3)] | None = None
    """Arithmetic of the backward kernel over the forward one; None = `attention_backward` of `fitted/step.json`."""
    rows: Rows
    cross_validated: Errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What was measured of one kind of device."""

    gemm: Mapping[str, GemmCurve]
    """Precision -> products in it."""
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
    """How quiet a host was while it was measured; all are shares."""

    others: Share
    """Of the time of its cores, what processes had that did not measure."""
    stolen: Share
    """Of the time of its cores, what the hypervisor gave to other machines."""
    waiting: Share
    """Of the time in which a process had nothing to do but compute, what it had no core for; 0 of GPUs."""
    spread: Amount
    """Of one kernel's repeats, the largest time less the least, over their median; the median over all kernels."""

    def seen(self) -> tuple[str, ...]:
        """What was not as on a quiet host, in words; empty if all was."""
        texts = {
            "others": f"other processes had {self.others:.0%} of the time of the cores",
            "stolen": f"the hypervisor gave {self.stolen:.0%} of the time of the cores to other machines",
            "waiting": f"processes that computed waited for a core {self.waiting:.0%} of the time",
            "spread": f"repeats of one kernel were {self.spread:.0%} apart",
        }
        return tuple(text for name, text in texts.items() if getattr(self, name) > QUIET[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Constants of one cluster; each takes the place of that of the same name, of `fitted/step.json` or the trainer.

    None = as there.
    """

    overlap_exponent: Annotated[float, Range(1, 100)] | None = None
    """1 where the host itself computes."""
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
    errors: Mapping[str, Errors] = dataclasses.field(default_factory=dict)
    """What was measured -> {rows, median_error, p90_error} of the fit."""
    conditions: Conditions | None = None
    """Under which the host was measured; None of constants that come from elsewhere."""
    source: Mapping[str, str] | None = None

    def stated(self) -> dict[str, float]:
        """Those that are not None."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}
