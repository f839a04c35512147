"""Fitted curves as records: those of `automap/data/fitted` and those that `automap profile` measures of a host.

The forms that they are constants of are in `automap.price.gemm`, `attention` and `communication`. Knows no device.
Units are in the names; shares are of the rate that the device or link states.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from automap.errors import ClusterError

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
"""Kinds, by the numbers that the price has for them."""
QUIET = {"others": 0.05, "stolen": 0.01, "waiting": 0.05, "spread": 0.25}
"""Most of each of `Conditions` on a quiet host. Chosen: with a tenth of two cores in use by others, profiles say 0.09,
0, 0.05 and 0.12, with ten processes at work beside them 0.72, 0, 0.72 and 0.16 (2026-11-22)."""
_POSITIVE = frozenset({"compute_efficiency", "memory_efficiency", "efficiency", "cache_speedup", "grain", "backward"})
_AT_LEAST_ONE = frozenset({"norm", "overlap_exponent", "misaligned"})
_SHARES = frozenset({"split", "tail"})


def _check(record: Any, where: str, free: frozenset[str] = frozenset()) -> None:
    """Refuses constants that no fit gives: all are finite and none is below 0."""
    for name in (field.name for field in dataclasses.fields(record)):
        value = getattr(record, name)
        if not isinstance(value, int | float):
            continue
        wanted = "a number from 0 on"
        holds = math.isfinite(value) and value >= 0.0
        if name in _POSITIVE:
            wanted, holds = "a number above 0", holds and value > 0.0
        elif name in _AT_LEAST_ONE:
            wanted, holds = "a number from 1 on", holds and value >= 1.0
        elif name in _SHARES and name not in free:
            wanted, holds = "a number from 0 to 1", holds and value <= 1.0
        if not holds:
            raise ClusterError(
                "no constant of this curve",
                field=f"{where}.{name}",
                value=value,
                repair=f"Give {wanted}, or measure the host again with `automap profile`.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCurve:
    """Constants of `gemm_s` for one precision."""

    floor_us: float
    compute_efficiency: float
    memory_efficiency: float
    norm: float
    depth_elements: float
    split: float
    tail: float
    cache_speedup: float
    quantise_bytes: float = 0.0
    grain: float = 64.0
    """Rows and columns of a result are padded to multiples of this."""
    rows: int
    """Measurements that it was fitted to."""
    cross_validated: Mapping[str, float]
    """{median_error, p90_error}, shares, on measurements that were left out."""

    def __post_init__(self) -> None:
        _check(self, "kernels.gemm")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCurve:
    """Constants of `attention_s`."""

    floor_us: float
    compute_efficiency: float
    memory_efficiency: float
    tail: float
    small_head_elements: float
    backward: float | None = None
    """Arithmetic of the backward kernel over the forward one; None = `attention_backward` of `fitted/step.json`."""
    rows: int
    cross_validated: Mapping[str, float]

    def __post_init__(self) -> None:
        # The longest block counts once more where nothing runs beside it.
        _check(self, "kernels.attention", free=_SHARES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What was measured of one kind of device."""

    gemm: Mapping[str, GemmCurve]
    """Precision -> products in it."""
    attention: AttentionCurve


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCurve:
    """Constants of `host_link` for one kind of collective inside a host."""

    latency_us: float
    latency_growth: float
    efficiency: float
    small_group: float
    ramp: float
    rows: int
    cross_validated: Mapping[str, float]

    def __post_init__(self) -> None:
        _check(self, "collectives")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """How quiet a host was while it was measured; all are shares."""

    others: float
    """Of the time of its cores, what processes had that did not measure."""
    stolen: float
    """Of the time of its cores, what the hypervisor gave to other machines."""
    waiting: float
    """Of the time in which a process had nothing to do but compute, what it had no core for; 0 of GPUs."""
    spread: float
    """Of one kernel's repeats, the largest time less the least, over their median; the median over all kernels."""

    def __post_init__(self) -> None:
        _check(self, "cluster.constants.conditions")

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

    overlap_exponent: float | None = None
    """1 where the host itself computes."""
    host_backward: float | None = None
    micro_batch_ms: float | None = None
    kernel_us: float | None = None
    misaligned: float | None = None
    fallback_kernels: float | None = None
    optimizer_bytes: float | None = None
    host_us_per_operator: float | None = None
    host_us_per_collective: float | None = None
    send_host_ms: float | None = None
    step_overhead_ms: float | None = None
    elementwise_traffic: float | None = None
    loss_passes: float | None = None
    reserved_GiB: float | None = None  # noqa: N815
    errors: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    """What was measured -> {rows, median_error, p90_error} of the fit."""
    conditions: Conditions | None = None
    """Under which the host was measured; None of constants that come from elsewhere."""
    source: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        _check(self, "cluster.constants")

    def stated(self) -> dict[str, float]:
        """Those that are not None."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, int | float)}
