"""Fits the fused-attention curves of `automap.price.kernels.attention` to measured kernels, and says how well they
hold.

    python benchmarks/fit_attention.py [attention_forward_measured.csv] [--write]

--write puts them into automap/data/fitted/attention.json. Errors are those of rows left out, five parts in turn. Only
forward kernels with a causal mask were measured; what the backward pass costs beside them is fitted to training runs
and not here.
"""

from __future__ import annotations

import csv
from collections import defaultdict

import numpy as np
from fitting import Floats, asked, errors, fit, folds, measured_device, robust, write

from automap.device_kinds import Device
from automap.price.kernels.array_types import record_of
from automap.price.kernels.attention import EARLIER_KEYS, AttentionShape, attention_s
from automap.price.kernels.stage_records import AttentionCurveRow

NAMES = ("floor_us", "compute_efficiency", "memory_efficiency", "tail", "small_head_elements")
START = np.array([9.0, 0.65, 0.5, 0.6, 40.0])
LOW = np.array([0.1, 0.05, 0.05, 0.0, 0.0])
HIGH = np.array([50.0, 1.0, 1.0, 4.0, 400.0])


def predict(x: Floats, rows: Floats, device: Device) -> Floats:
    """Seconds of each row (batch, positions, heads, kv heads, head size)."""
    curve = record_of(
        AttentionCurveRow(
            floor_s=x[0] * 1e-6,
            flops_per_s=device.flops("bf16") * x[1],
            bytes_per_s=device.hbm_bandwidth_GBps * 1e9 * x[2],
            tail=x[3],
            small_head=x[4],
            multiprocessors=device.num_multiprocessors,
            backward=1.0,
        )
    )
    shapes = [AttentionShape(b, h, g, s, s, d, d, EARLIER_KEYS, 2.0) for b, s, h, g, d in rows[:, :5].tolist()]
    return np.array([attention_s(shape, curve, False) for shape in shapes])


def main() -> None:
    """Fits the curve of every device in the file."""
    options = asked(__doc__, "attention_forward_measured.csv")
    data: dict[str, list[list[float]]] = defaultdict(list)
    with options.data.open() as file:
        for row in csv.DictReader(file):
            sizes = [float(row[key]) for key in ("batch", "seq_len", "num_heads", "num_kv_heads", "head_dim")]
            data[row["gpu"].removesuffix("-SXM")].append([*sizes, float(row["latency_us"]) * 1e-6])
    curves: dict[str, object] = {}
    everything = []
    for gpu, listed in sorted(data.items()):
        rows, device = np.array(listed), measured_device(gpu)
        high = HIGH.copy()
        if len(np.unique(rows[:, 4])) == 1:
            high[-1] = 0.0

        def of(part: Floats, device: Device = device, high: Floats = high) -> Floats:
            start = np.minimum(START, high)
            return fit(
                lambda x, part_of: robust(np.log(predict(x, part, device) / part[:, 5]))[part_of], start, LOW, high
            )

        left_out = np.zeros(len(rows))
        for out in folds(len(rows)):
            left_out[out] = predict(of(rows[~out]), rows[out], device)
        everything.append(np.abs(left_out / rows[:, 5] - 1.0))
        found = errors(left_out, rows[:, 5])
        constants = {name: float(f"{value:.4g}") for name, value in zip(NAMES, of(rows), strict=True)}
        curves[gpu] = {**constants, "rows": len(rows), "cross_validated": found}
        print(f"{gpu:5} {len(rows):6} rows  median {found['median_error']:.1%}  p90 {found['p90_error']:.1%}")
    median = float(np.median(np.concatenate(everything)))
    print(f"all rows left out: median {median:.1%}")
    if options.write:
        write("attention", "benchmarks/fit_attention.py", options.data, curves, {"median_error": round(median, 4)})


if __name__ == "__main__":
    main()
