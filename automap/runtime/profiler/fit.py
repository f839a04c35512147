"""Fits the constants of the price's curves to the rows of a profile, by least squares.

Residuals are logarithms of predicted over measured times, and large ones count little. Errors are those of rows that a
fit did not see, five parts in turn. Units: seconds, bytes, FLOP/s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.optimize import least_squares, nnls

from automap.arrays import Floats, Mask
from automap.fitted_curves import COLLECTIVES, AttentionCurve, CollectiveCurve, GemmCurve
from automap.price.kernels.array_types import record_of
from automap.price.kernels.attention import EARLIER_KEYS, AttentionShape, attention_s
from automap.price.kernels.collectives import collective_s, host_link
from automap.price.kernels.gemm import CACHE_SHARE, gemm_s
from automap.price.kernels.stage_records import AttentionCurveRow, GemmCurveRow

Predict = Callable[[Floats, Floats], Floats]
"""(constants, rows) -> seconds of each row. Constants are in the order of `GEMM`, `ATTENTION` or `COLLECTIVE`."""

PARTS = 5
"""The number of parts of a cross-validation (assumed)."""
WIDTH = 0.1
"""The residual above which residuals count less than in full (assumed)."""
GRAINS = (8.0, 16.0, 32.0, 64.0)
"""The alignments of dims that are tried (assumed: from a vector of a CPU to the tile of a GPU's kernel)."""
GEMM = {
    "floor_us": (3.0, 0.05, 200.0),
    "compute_efficiency": (0.8, 0.02, 1.5),
    "memory_efficiency": (0.8, 0.02, 4.0),
    "norm": (1.5, 1.0, 6.0),
    "depth_elements": (20.0, 0.0, 4000.0),
    "split": (0.1, 0.0, 1.0),
    "tail": (0.1, 0.0, 1.0),
    "cache_speedup": (2.0, 1.0, 10.0),
}
"""Constant -> its start, its least and its largest value in the fit (assumed)."""
ATTENTION = {
    "floor_us": (10.0, 0.05, 2000.0),
    "compute_efficiency": (0.5, 0.01, 1.5),
    "memory_efficiency": (0.5, 0.02, 4.0),
    "tail": (0.3, 0.0, 3.0),
    "small_head_elements": (20.0, 0.0, 400.0),
    "backward": (3.0, 0.5, 20.0),
}
"""The same of the curve of attention (assumed)."""
COLLECTIVE = {
    "latency_us": (50.0, 0.5, 50000.0),
    "latency_growth": (0.2, 0.0, 20.0),
    "efficiency": (0.5, 0.002, 5.0),
    "small_group": (0.3, 0.0, 6.0),
    "ramp": (2.5, 0.0, 400.0),
}
"""The same of the curve of a collective (assumed)."""
OF_GROUP_SIZE = ("latency_growth", "small_group")
"""Constants that groups of a single size cannot determine."""


def fit(predict: Predict, rows: Floats, measured: Floats, bounds: Mapping[str, tuple[float, float, float]]) -> Floats:
    """The constants, in the order of `bounds`, that explain measurements best.

    Args:
        predict: (constants, rows) -> the time of each row.
        rows: [rows, ...] the sizes of what was timed.
        measured: [rows] the measured times.
        bounds: constant -> start, least and largest value; equal bounds fix the constant.
    """
    start, low, high = np.array(list(bounds.values())).T
    free = high > low

    def residuals(y: Floats) -> Floats:
        x = start.copy()
        x[free] = y
        return np.asarray(np.log(predict(x, rows) / measured), dtype=np.float64)

    best = least_squares(
        residuals,
        start[free],
        bounds=(low[free], high[free]),
        x_scale=np.maximum(start[free], 0.05 * (high - low)[free]),
        loss="soft_l1",
        f_scale=WIDTH,
        max_nfev=60,
    )
    x: Floats = start.copy()
    x[free] = best.x
    return x


def cross_validated(
    predict: Predict, rows: Floats, measured: Floats, bounds: Mapping[str, tuple[float, float, float]]
) -> dict[str, float]:
    """{median_error, p90_error} of rows that a fit to the others did not see; with few rows, of the rows of the fit."""
    if len(rows) < 2 * PARTS:
        return errors(predict(fit(predict, rows, measured, bounds), rows), measured)
    part = np.random.default_rng(0).permutation(len(rows)) % PARTS
    seconds = np.zeros(len(rows))
    for out in range(PARTS):
        x = fit(predict, rows[part != out], measured[part != out], bounds)
        seconds[part == out] = predict(x, rows[part == out])
    return errors(seconds, measured)


def errors(predicted: Floats, measured: Floats) -> dict[str, float]:
    """{median_error, p90_error}: the median and the 90th percentile of the absolute relative error."""
    error = np.abs(predicted / measured - 1.0)
    return {"median_error": rounded(np.median(error)), "p90_error": rounded(np.percentile(error, 90))}


def rounded(value: Any) -> float:
    """The value with four significant digits."""
    return float(f"{float(value):.4g}")


def _record(x: Floats, bounds: Mapping[str, Any]) -> dict[str, Any]:
    return {name: rounded(value) for name, value in zip(bounds, x, strict=True)}


def fit_gemm(
    rows: Floats,
    *,
    flops: float,
    bytes_per_s: float,
    element_bytes: float,
    num_multiprocessors: int,
    cache_bytes: float,
) -> GemmCurve:
    """The curve of matrix products in one precision.

    Args:
        rows: [rows, 5] batch, m, n, k, seconds.
        flops: the peak rate that the curve's efficiency refers to, FLOP/s.
        bytes_per_s: the memory bandwidth that the curve's efficiency refers to.
        element_bytes: the size of an element of operands and result.
        num_multiprocessors: the number of multiprocessors of the device.
        cache_bytes: the size of its last-level cache.
    """
    shapes, measured = rows[:, :4], rows[:, 4]

    def predicted(grain: float) -> Predict:
        def predict(constants: Floats, shapes: Floats) -> Floats:
            value = dict(zip(GEMM, constants, strict=True))
            curve = record_of(
                GemmCurveRow(
                    floor_s=value["floor_us"] * 1e-6,
                    flops_per_s=flops * value["compute_efficiency"],
                    bytes_per_s=bytes_per_s * value["memory_efficiency"],
                    norm=value["norm"],
                    depth=value["depth_elements"],
                    split=value["split"],
                    tail=value["tail"],
                    multiprocessors=num_multiprocessors,
                    cache_bytes=cache_bytes * CACHE_SHARE,
                    cache_speedup=value["cache_speedup"],
                    quantise_s=0.0,
                    grain=grain,
                )
            )
            return np.array([gemm_s(m, n, k, b, element_bytes, element_bytes, curve) for b, m, n, k in shapes])

        return predict

    def cost(grain: float) -> float:
        constants = fit(predicted(grain), shapes, measured, GEMM)
        residuals = np.log(predicted(grain)(constants, shapes) / measured)
        return float(np.sum(np.sqrt(1.0 + (residuals / WIDTH) ** 2)))

    grain = min(GRAINS, key=cost)
    predict = predicted(grain)
    return GemmCurve(
        **_record(fit(predict, shapes, measured, GEMM), GEMM),
        grain=grain,
        rows=len(rows),
        cross_validated=cross_validated(predict, shapes, measured, GEMM),
    )


def fit_attention(
    rows: Floats, *, flops: float, bytes_per_s: float, element_bytes: float, num_multiprocessors: int
) -> AttentionCurve:
    """The curve of fused attention.

    Args:
        rows: [rows, 5] heads of all samples, positions, head size, seconds forward, seconds backward; causal.
        element_bytes: the size of one element.
        num_multiprocessors: the number of multiprocessors of the device.
    """
    # [2 rows, 4] the shape, and whether the pass is the backward one.
    ways = np.concatenate([np.column_stack([rows[:, :3], np.full(len(rows), way)]) for way in (0.0, 1.0)])
    measured = np.concatenate([rows[:, 3], rows[:, 4]])

    def predict(constants: Floats, shapes: Floats) -> Floats:
        value = dict(zip(ATTENTION, constants, strict=True))
        curve = record_of(
            AttentionCurveRow(
                floor_s=value["floor_us"] * 1e-6,
                flops_per_s=flops * value["compute_efficiency"],
                bytes_per_s=bytes_per_s * value["memory_efficiency"],
                tail=value["tail"],
                small_head=value["small_head_elements"],
                multiprocessors=num_multiprocessors,
                backward=value["backward"],
            )
        )
        return np.array(
            [
                attention_s(
                    AttentionShape(1.0, heads, heads, positions, positions, size, size, EARLIER_KEYS, element_bytes),
                    curve,
                    is_backward > 0.0,
                )
                for heads, positions, size, is_backward in shapes.tolist()
            ]
        )

    return AttentionCurve(
        **_record(fit(predict, ways, measured, ATTENTION), ATTENTION),
        rows=len(ways),
        cross_validated=cross_validated(predict, ways, measured, ATTENTION),
    )


def fit_collective(kind: str, rows: Floats, bytes_per_s: float) -> CollectiveCurve:
    """The curve of one kind of collective.

    Args:
        kind: a kind of `COLLECTIVES`.
        rows: [rows, 3] ranks, bytes, seconds.
        bytes_per_s: the bandwidth that the curve's efficiency refers to.
    """
    number = COLLECTIVES.index(kind)
    bounds = dict(COLLECTIVE)
    if len(np.unique(rows[:, 0])) == 1:
        bounds |= dict.fromkeys(OF_GROUP_SIZE, (0.0, 0.0, 0.0))
    if kind == "send_recv":
        # Transfers between pipeline stages are priced by latency and bandwidth alone.
        bounds["ramp"] = (0.0, 0.0, 0.0)

    def predict(constants: Floats, shapes: Floats) -> Floats:
        value = dict(zip(COLLECTIVE, constants, strict=True))

        def seconds(ranks: float, data: float) -> float:
            link = host_link(
                int(ranks),
                latency_s=value["latency_us"] * 1e-6,
                growth=value["latency_growth"],
                bytes_per_s=bytes_per_s * value["efficiency"],
                small_group=value["small_group"],
                ramp=value["ramp"],
            )
            return float(collective_s(number, ranks, link, data))

        return np.array([seconds(ranks, data) for ranks, data in shapes])

    return CollectiveCurve(
        **_record(fit(predict, rows[:, :2], rows[:, 2], bounds), bounds),
        rows=len(rows),
        cross_validated=cross_validated(predict, rows[:, :2], rows[:, 2], bounds),
    )


def fit_linear(
    price: Callable[[Floats], Floats], measured: Floats, reference: Floats, rounds: int
) -> tuple[Floats, dict[str, float]]:
    """The non-negative amounts at which the prices of some steps are nearest to their measured times.

    Args:
        price: [amounts] -> [steps] the priced times.
        measured: [steps] the measured times.
        reference: [amounts] their usual sizes; the price is taken as linear between 0 and there.
        rounds: the number of linearisations, each at the amounts found before; 1 where the price is linear.

    Returns:
        [amounts], and {rows, median_error, p90_error} with each step left out in turn.
    """
    at = np.zeros_like(reference)
    for _ in range(rounds):
        base = price(at)
        slope = np.stack([(price(at + step) - base) / step.sum() for step in np.diag(reference)], axis=1)
        base = base - slope @ at

        def solve(chosen: Mask, base: Floats = base, slope: Floats = slope, unit: Floats = reference) -> Floats:
            weighed = slope[chosen] * unit / measured[chosen, None]
            amounts, _ = nnls(weighed, np.maximum(0.0, measured - base)[chosen] / measured[chosen])
            found: Floats = amounts * unit
            return found

        at = solve(np.full(len(measured), True))
    left_out = [base[i] + slope[i] @ solve(np.arange(len(measured)) != i) for i in range(len(measured))]
    return at, {"rows": len(measured), **errors(np.array(left_out), measured)}
