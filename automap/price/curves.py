"""The fitted curves of devices as the vectors that `gemm_s` and `attention_s` take.

A device without measurements of its own runs the kernels of the kind that `curves_of` names, at its own datasheet
rates. Knows no plan. Units: seconds, bytes, FLOP/s.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from automap.cluster import GENERAL, Cluster, Device
from automap.fitted_curves import AttentionCurve, GemmCurve, fitted, published_curves
from automap.price.kernels.attention import A_COUNT
from automap.price.kernels.gemm import CACHE_SHARE, G_COUNT
from automap.records import from_json

Floats = npt.NDArray[np.float64]

FITTED_AS = {"fp16": "bf16", "bf16": "bf16", "tf32": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp8"}
"""Precision -> the measured one whose kernels it runs; fp32 has none."""


def shared(name: str) -> float:
    """A constant of `automap/data/fitted/step.json`, common to all devices and trainers."""
    return float(fitted("step")["constants"][name]["value"])


def constant(name: str, cluster: Cluster) -> float:
    """A constant that the cluster measured of itself, else the shared one."""
    own = None if cluster.constants is None else getattr(cluster.constants, name)
    return shared(name) if own is None else float(own)


@functools.cache
def _published(kind: str) -> Mapping[str, GemmCurve]:
    """Curves of products of a kind of device that has a data file, by precision."""
    found = published_curves("gemm")[kind]
    return {name: from_json(GemmCurve, curve, path=f"gemm.{kind}.{name}") for name, curve in found.items()}


@functools.cache
def _published_attention(kind: str) -> AttentionCurve:
    """The curve of fused attention on a kind of device; those without one have that of the kind that came before."""
    curves = published_curves("attention")
    kind = kind if kind in curves else "A100"
    return from_json(AttentionCurve, curves[kind], path=f"attention.{kind}")


def is_measured(device: Device) -> bool:
    """Whether the device's own kernels were measured; else the estimate's band is wider."""
    return device.kernels is not None or device.name.startswith(f"{device.curves_of}-")


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
    rate = device.flops(precision)
    if device.kernels is not None:
        own = device.kernels.gemm[precision]
        return _gemm_vector(device, own, rate * own.compute_efficiency)
    kinds = _published(device.curves_of)
    found = kinds.get(FITTED_AS.get(precision, "bf16"), kinds["bf16"])
    if precision == "nvfp4":
        rate = device.flops("fp8")
    share = shared("fp32_efficiency") if precision == "fp32" else found.compute_efficiency * device.sustained_clock
    if FITTED_AS.get(precision) == "fp8":
        share *= shared("fp8_speedup") * (shared("nvfp4_speedup") if precision == "nvfp4" else 1.0)
        share *= shared("row_scaled_rate") if scaling == "row" else 1.0
    return _gemm_vector(device, found, rate * share)


def _gemm_vector(device: Device, curve: GemmCurve, flops_per_s: float) -> Floats:
    """[G_COUNT] of a curve on a device, at this rate of large products."""
    bandwidth = device.hbm_bandwidth_GBps * 1e9
    vector = np.array(
        [
            curve.floor_us * 1e-6,
            flops_per_s,
            bandwidth * curve.memory_efficiency,
            curve.norm,
            curve.depth_elements,
            curve.split,
            curve.tail,
            device.num_multiprocessors,
            device.cache_MB * 1e6 * CACHE_SHARE,
            curve.cache_speedup,
            curve.quantise_bytes / bandwidth,
            curve.grain,
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
    if device.kernels is not None:
        # What ran is what was measured.
        found, rate = device.kernels.attention, 1.0
    else:
        found = _published_attention(device.curves_of)
        if portable:
            rate *= device.portable_attention
    vector = np.array(
        [
            found.floor_us * 1e-6,
            next(device.peak_TFLOPs[precision] for precision in GENERAL if precision in device.peak_TFLOPs)
            * 1e12
            * found.compute_efficiency
            * device.sustained_clock
            * rate,
            device.hbm_bandwidth_GBps * 1e9 * found.memory_efficiency,
            found.tail,
            found.small_head_elements,
            device.num_multiprocessors,
            shared("attention_backward") if found.backward is None else found.backward,
        ]
    )
    assert len(vector) == A_COUNT
    return vector
