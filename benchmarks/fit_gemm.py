"""Fits the matrix-product curves of `automap.price.kernels.gemm` to measured kernels, and says how well they hold.

    python benchmarks/fit_gemm.py [gemm_measured.csv] [--write]

--write puts them into automap/data/fitted/gemm.json, and the rate of memory into automap/data/devices. Errors are those
of rows left out, five parts in turn; rates are shares of the datasheet's. The rows are forward products; their
transposes serve the two gradients.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from fitting import Floats, asked, errors, fit, folds, measured_device, robust, write

import automap
from automap.device_kinds import Device
from automap.price.kernels.array_types import Record, record_of
from automap.price.kernels.gemm import CACHE_SHARE, GRAIN, gemm_s
from automap.price.kernels.stage_records import GemmCurveRow

NAMES = ("floor_us", "compute_efficiency", "memory_efficiency", "norm", "depth_elements", "split", "tail")
NAMES += ("cache_speedup", "quantise_bytes")
START = np.array([4.0, 0.8, 0.8, 2.0, 150.0, 0.4, 0.3, 1.2, 1.5])
LOW = np.array([0.1, 0.05, 0.05, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
HIGH = np.array([50.0, 1.0, 1.0, 6.0, 4000.0, 1.0, 1.0, 6.0, 8.0])
ARCHITECTURE = {"A100": "Ampere", "H100": "Hopper", "H200": "Hopper", "B200": "Blackwell", "L40S": "Ada"}
"""Measured kind -> architecture, as NVIDIA names it."""
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0}


def curve(x: Floats, device: Device, dtype: str) -> Record:
    """The curve that `gemm_s` takes, from the constants in the order of NAMES."""
    bandwidth = device.hbm_bandwidth_GBps * 1e9
    return record_of(
        GemmCurveRow(
            floor_s=x[0] * 1e-6,
            flops_per_s=device.flops(dtype) * x[1],
            bytes_per_s=bandwidth * x[2],
            norm=x[3],
            depth=x[4],
            split=x[5],
            tail=x[6],
            multiprocessors=device.num_multiprocessors,
            cache_bytes=device.cache_MB * 1e6 * CACHE_SHARE,
            cache_speedup=x[7],
            quantise_s=x[8] / bandwidth,
            grain=GRAIN,
        )
    )


def predict(x: Floats, rows: Floats, device: Device, dtype: str) -> Floats:
    """Seconds of each row (m, n, k)."""
    found = curve(x, device, dtype)
    size = ELEMENT_BYTES[dtype]
    return np.array([gemm_s(m, n, k, 1.0, size, 2.0, found) for m, n, k in rows[:, :3]])


def transfer(data: Mapping[str, Floats], curves: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """By how much products of one kind of device are off when priced by the curve of another.

    Args:
        data: kind -> rows in bf16.
        curves: kind -> type -> its constants.

    Returns:
        What a device without measurements adds to the band (`automap.families.KERNELS`). alike: mean over all pairs of
        the absolute median log ratio. unlike: root mean square, over the pairs of different architectures, of the log
        ratio of the sums of all times, as steps are sums. foreign: the largest of these; no other vendor was measured,
        so it is an assumption that its devices are as far off as the two kinds that are furthest apart.
    """
    medians, sums = [], []
    for gpu, rows in data.items():
        for other in sorted(curves.keys() - {gpu}):
            x = np.array([curves[other]["bf16"][name] for name in NAMES])
            seconds = predict(x, rows, measured_device(gpu), "bf16")
            medians.append(abs(float(np.median(np.log(seconds / rows[:, 3])))))
            if ARCHITECTURE[gpu] != ARCHITECTURE[other]:
                sums.append(abs(math.log(float(seconds.sum() / rows[:, 3].sum()))))
    found = {
        "alike": float(np.mean(medians)),
        "unlike": float(np.sqrt(np.mean(np.square(sums)))),
        "foreign": max(sums),
    }
    return {kernels: round(error, 3) for kernels, error in found.items()}


def write_memory(curves: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes the memory rate that products reach into the files of devices; the A100's rate where none was measured."""
    for path in sorted((Path(automap.__file__).parent / "data" / "devices").glob("*.json")):
        document = json.loads(path.read_text())
        if document["name"] == "cpu":  # a host is profiled
            continue
        kind = document["curves_of"]
        known = kind if kind in curves else "A100"
        text = f"{known}: what memory-bound products reach (bf16, automap/data/fitted/gemm.json)"
        is_own = document["name"].startswith(f"{known}-")
        document["memory_efficiency"] = round(curves[known]["bf16"]["memory_efficiency"], 2)
        document["source"]["memory_efficiency"] = f"measured on {text}" if is_own else f"assumed: measured on {text}"
        path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    """Fits the curve of every device and type in the file."""
    options = asked(__doc__, "gemm_measured.csv")
    data: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    with options.data.open() as file:
        for row in csv.DictReader(file):
            sizes = [float(row[key]) for key in ("m", "n", "k")]
            data[row["gpu"].removesuffix("-SXM"), row["dtype"]].append([*sizes, float(row["latency_us"]) * 1e-6])
    curves: dict[str, dict[str, dict[str, Any]]] = {}
    everything = []
    for (gpu, dtype), listed in sorted(data.items()):
        rows, device = np.array(listed), measured_device(gpu)
        high = HIGH.copy()
        if dtype != "fp8":
            high[-1] = 0.0

        def of(part: Floats, device: Device = device, dtype: str = dtype, high: Floats = high) -> Floats:
            return fit(
                lambda x, part_of: robust(np.log(predict(x, part, device, dtype) / part[:, 3]), 0.04)[part_of],
                np.minimum(START, high),
                LOW,
                high,
            )

        left_out = np.zeros(len(rows))
        for out in folds(len(rows)):
            left_out[out] = predict(of(rows[~out]), rows[out], device, dtype)
        everything.append(np.abs(left_out / rows[:, 3] - 1.0))
        found = errors(left_out, rows[:, 3])
        constants = {name: float(f"{value:.4g}") for name, value in zip(NAMES, of(rows), strict=True)}
        curves.setdefault(gpu, {})[dtype] = {**constants, "rows": len(rows), "cross_validated": found}
        print(f"{gpu:5} {dtype:5} {len(rows):6} rows  median {found['median_error']:.1%}  p90 {found['p90_error']:.1%}")
    median = float(np.median(np.concatenate(everything)))
    print(f"all rows left out: median {median:.1%}")
    shift = transfer({gpu: np.array(listed) for (gpu, dtype), listed in data.items() if dtype == "bf16"}, curves)
    print("one kind by the curve of another: off by " + ", ".join(f"{k} {v:.1%}" for k, v in shift.items()))
    if options.write:
        write(
            "gemm",
            "benchmarks/fit_gemm.py",
            options.data,
            curves,
            {"median_error": round(median, 4), "transfer": shift},
        )
        write_memory(curves)


if __name__ == "__main__":
    main()
