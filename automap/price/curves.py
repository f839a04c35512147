"""The fitted curves of devices as the vectors that `gemm_s` and `attention_s` take.

A device without measurements of its own runs the kernels of the kind that `curves_of` names, at its own datasheet
rates. Knows no plan. Units: seconds, bytes, FLOP/s.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from automap.cluster import Device
from automap.price.attention import A_COUNT
from automap.price.gemm import CACHE_SHARE, G_COUNT

Floats = npt.NDArray[np.float64]

FITTED_AS = {"fp16": "bf16", "bf16": "bf16", "tf32": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp8"}
"""Precision -> the measured one whose kernels it runs; fp32 has none."""


@functools.cache
def fitted(name: str) -> Mapping[str, Any]:
    """A file of `automap/data/fitted`."""
    document: Mapping[str, Any] = json.loads(
        resources.files("automap").joinpath("data", "fitted", f"{name}.json").read_text()
    )
    return document


def shared(name: str) -> float:
    """A constant of `automap/data/fitted/step.json`, common to all devices and trainers."""
    return float(fitted("step")["constants"][name]["value"])


def is_measured(device: Device) -> bool:
    """Whether the device's own kernels were measured; else the estimate's band is wider."""
    return device.name.startswith(f"{device.curves_of}-")


def gemm_curve(device: Device, precision: str, *, scaling: str = "tensor") -> Floats:
    """[G_COUNT] what `gemm_s` takes.

    Args:
        device: the rates are its own, at its sustained clock.
        precision: of the operands. In fp32 the tensor cores rest: the plain cores reach nearly all of their peak. mxfp8
            and nvfp4 run the kernels measured in fp8; nvfp4 faster by `nvfp4_speedup`.
        scaling: `tensor` or `row`, of fp8: a row's scales take `row_scaled_rate` of the rate.

    Raises:
        ClusterError: the device has no such precision.
    """
    kinds = fitted("gemm")["curves"][device.curves_of]
    found = kinds.get(FITTED_AS.get(precision, "bf16"), kinds["bf16"])
    bandwidth = device.hbm_bandwidth_GBps * 1e9
    rate = device.flops(precision)
    if precision == "nvfp4":
        rate = device.flops("fp8")
    share = shared("fp32_efficiency") if precision == "fp32" else found["compute_efficiency"] * device.sustained_clock
    if FITTED_AS.get(precision) == "fp8":
        share *= shared("fp8_speedup") * (shared("nvfp4_speedup") if precision == "nvfp4" else 1.0)
        share *= shared("row_scaled_rate") if scaling == "row" else 1.0
    vector = np.array(
        [
            found["floor_us"] * 1e-6,
            rate * share,
            bandwidth * found["memory_efficiency"],
            found["norm"],
            found["depth_elements"],
            found["split"],
            found["tail"],
            device.num_multiprocessors,
            device.cache_MB * 1e6 * CACHE_SHARE,
            found["cache_speedup"],
            found["quantise_bytes"] / bandwidth,
        ]
    )
    assert len(vector) == G_COUNT
    return vector


def attention_curve(device: Device, *, rate: float, portable: bool) -> Floats:
    """[A_COUNT] what `attention_s` takes.

    Args:
        device: the rates are its own, at its sustained clock.
        rate: of the trainer's kernel over the measured one.
        portable: the trainer's kernel is written for all devices (FlashAttention 2, Triton) and uses none of the
            instructions that came with this one.
    """
    kinds = fitted("attention")["curves"]
    # Kernels were measured on four kinds; others have those of the nearest one that came before.
    found = kinds[device.curves_of if device.curves_of in kinds else "A100"]
    if portable:
        rate *= device.portable_attention
    vector = np.array(
        [
            found["floor_us"] * 1e-6,
            device.peak_TFLOPs.get("bf16", device.peak_TFLOPs.get("fp16", device.peak_TFLOPs["fp32"]))
            * 1e12
            * found["compute_efficiency"]
            * device.sustained_clock
            * rate,
            device.hbm_bandwidth_GBps * 1e9 * found["memory_efficiency"],
            found["tail"],
            found["small_head_elements"],
            device.num_multiprocessors,
            shared("attention_backward"),
        ]
    )
    assert len(vector) == A_COUNT
    return vector
