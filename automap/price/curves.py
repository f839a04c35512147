"""The fitted curves of devices as the records that `gemm_s` and `attention_s` take.

A device without measurements of its own runs the kernels of the kind that `curves_of` names, at its own datasheet
rates. Independent of the plan. Units: seconds, bytes, FLOP/s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from automap.cluster import Cluster
from automap.device_kinds import GENERAL, Device
from automap.families import KERNELS, kernels_of
from automap.fitted_curves import AttentionCurve, ConvolutionCurve, GemmCurve, fitted, published_curves
from automap.price.kernels.array_types import Record, record_of
from automap.price.kernels.gemm import CACHE_SHARE
from automap.price.kernels.stage_records import AttentionCurveRow, GemmCurveRow, PerPass
from automap.records import from_json

FITTED_AS = {"fp16": "bf16", "bf16": "bf16", "tf32": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp8"}
"""Precision -> the measured one whose kernels it runs; fp32 has none."""
PLAIN_SHARE = 1.0 / 16.0
"""Peak of the plain cores over that of the tensor cores, where a device's file states none (assumed: an A100's)."""


def shared(name: str) -> float:
    """A constant of `automap/data/fitted/step.json`, common to all devices and trainers."""
    return float(fitted("step")["constants"][name]["value"])


def constant(name: str, cluster: Cluster) -> float:
    """A constant as measured on the cluster by `automap profile`, if it was; else the shared one."""
    own = None if cluster.constants is None else getattr(cluster.constants, name)
    return shared(name) if own is None else float(own)


@functools.cache
def _published(kind: str) -> Mapping[str, GemmCurve]:
    """Curves of matrix products of a kind of device that has a data file, by precision."""
    found = published_curves("gemm")[kind]
    return {name: from_json(GemmCurve, curve, path=f"gemm.{kind}.{name}") for name, curve in found.items()}


@functools.cache
def _published_attention(kind: str) -> AttentionCurve:
    """The curve of fused attention on a kind of device; that of the A100 where it has none."""
    curves = published_curves("attention")
    kind = kind if kind in curves else "A100"
    return from_json(AttentionCurve, curves[kind], path=f"attention.{kind}")


@functools.cache
def _published_convolutions(kind: str) -> Mapping[str, ConvolutionCurve]:
    """Rates of convolutions on a kind of device, by precision; those of the H200 where it has none."""
    curves = published_curves("convolutions")
    kind = kind if kind in curves else "H200"
    return {
        name: from_json(ConvolutionCurve, curve, path=f"convolutions.{kind}.{name}")
        for name, curve in curves[kind].items()
    }


def is_measured(device: Device) -> bool:
    """Whether the device's own kernels were measured; else the estimate's band is wider."""
    return device.kernels is not None or kernels_of().get(device.name) == "own"


def transfer_error(devices: Iterable[Device]) -> float:
    """Error of the predicted kernels of devices whose own kernels were not measured, as a share of their time.

    Of several devices it is the largest error. A device without a data file counts as one of another vendor, since
    nothing is known of its kernels, until `automap profile` measures it.
    """
    found = {"own" if is_measured(device) else kernels_of().get(device.name, "foreign") for device in devices}
    least_sure = max(found, key=KERNELS.index)
    return 0.0 if least_sure == "own" else float(fitted("gemm")["cross_validated"]["transfer"][least_sure])


def gemm_curve(device: Device, precision: str, *, scaling: str = "tensor") -> Record:
    """The curve of matrix products on a device, a `GemmCurveRow`.

    Args:
        device: the rates are its own, at its sustained clock.
        precision: precision of the operands. In fp32, and in tf32 where that is no faster, the plain cores reach the
            share `plain_rate` of their peak. mxfp8 and nvfp4 run the kernels measured in fp8; nvfp4 faster by
            `nvfp4_speedup`.
        scaling: granularity of fp8's scales, `tensor` or `row`; products with one scale for each row run at the share
            `row_scaled_rate` of the rate.

    Raises:
        ClusterError: the device has no such precision.
    """
    rate = device.flops(precision)
    if device.kernels is not None:
        own = device.kernels.gemm[precision]
        return _gemm_record(device, own, rate * own.compute_efficiency)
    kinds = _published(device.curves_of)
    found = kinds.get(FITTED_AS.get(precision, "bf16"), kinds["bf16"])
    if precision == "nvfp4":
        rate = device.flops("fp8")
    # TF32 allows tensor cores and does not demand them: GeForce cards have one peak for both.
    if precision == "fp32" or (precision == "tf32" and tensor_speedup(device, precision) < 1.0):
        return _gemm_record(device, found, device.flops("fp32") * device.plain_rate)
    share = found.compute_efficiency * device.product_rate * device.sustained_clock
    if FITTED_AS.get(precision) == "fp8":
        # Measured kernels quantise for themselves alone; where none was measured, there is nothing to take away.
        share *= shared("fp8_speedup") if "fp8" in kinds else 1.0
        share *= shared("nvfp4_speedup") if precision == "nvfp4" else 1.0
        share *= shared("row_scaled_rate") if scaling == "row" else 1.0
    return _gemm_record(device, found, rate * share)


def tensor_speedup(device: Device, precision: str) -> float:
    """Rate of large products on tensor cores over that of plain cores in fp32.

    Infinite where the rate of the plain cores is not known: the device states no fp32 rate, or its own products were
    measured.
    """
    plain = device.peak_TFLOPs.get("fp32")
    if plain is None or device.kernels is not None:
        return math.inf
    reached = _published(device.curves_of)["bf16"].compute_efficiency * device.product_rate * device.sustained_clock
    return device.flops(precision) * reached / (plain * 1e12 * device.plain_rate)


def _gemm_record(device: Device, curve: GemmCurve, flops_per_s: float) -> Record:
    """The record of a curve on a device whose large products reach `flops_per_s`."""
    bandwidth = device.hbm_bandwidth_GBps * 1e9
    return record_of(
        GemmCurveRow(
            floor_s=curve.floor_us * 1e-6,
            flops_per_s=flops_per_s,
            bytes_per_s=bandwidth * curve.memory_efficiency,
            norm=curve.norm,
            depth=curve.depth_elements,
            split=curve.split,
            tail=curve.tail,
            multiprocessors=device.num_multiprocessors,
            cache_bytes=device.cache_MB * 1e6 * CACHE_SHARE,
            cache_speedup=curve.cache_speedup,
            quantise_s=curve.quantise_bytes / bandwidth,
            grain=curve.grain,
        )
    )


class ConvolutionRates(NamedTuple):
    """Rates of convolutions on a device: each [3], forward, of the gradients of images and of weights."""

    dense: PerPass
    """Rates over those of products of equal extents."""
    odd_first: PerPass
    """FLOP/s where channels are not a multiple of 16 bytes and are first in memory."""
    odd_last: PerPass
    grouped_first: PerPass
    """FLOP/s where groups have few channels."""
    grouped_last: PerPass


def convolution_rates(device: Device, precision: str) -> ConvolutionRates:
    """The rates of convolutions on a device.

    If the device's own products were measured, all convolutions run at their rate, since nothing else is known of it.
    """
    if device.kernels is not None:
        products = np.full(3, float(gemm_curve(device, precision).flops_per_s))
        return ConvolutionRates(np.ones(3), products, products, products, products)
    kinds = _published_convolutions(device.curves_of)
    curve = kinds[precision if precision in kinds else "half"]
    dense = np.array(curve.dense)
    if precision == "tf32" and not convolves_on_tensor_cores(device, precision):
        curve = kinds["fp32"]
        dense = np.array(curve.dense) * _products_per_s(device, "fp32") / _products_per_s(device, "tf32")
    plain = device.peak_TFLOPs.get("fp32", device.flops(precision) / 1e12 * PLAIN_SHARE) * 1e12 * device.sustained_clock
    return ConvolutionRates(
        dense=dense,
        odd_first=plain * np.array(curve.odd_first),
        odd_last=plain * np.array(curve.odd_last),
        grouped_first=plain * np.array(curve.grouped_first),
        grouped_last=plain * np.array(curve.grouped_last),
    )


def convolves_on_tensor_cores(device: Device, precision: str) -> bool:
    """Whether dense convolutions run on tensor cores. TF32 does not demand them: the library takes the cores on which
    the arithmetic of the three passes takes less time."""
    if precision != "tf32" or device.kernels is not None or "fp32" not in device.peak_TFLOPs:
        return precision != "fp32"
    kinds = _published_convolutions(device.curves_of)
    tensor, plain = (
        sum(1.0 / rate for rate in kinds[kind].dense) / _products_per_s(device, kind) for kind in ("tf32", "fp32")
    )
    return tensor < plain and tensor_speedup(device, precision) >= 1.0


def _products_per_s(device: Device, precision: str) -> float:
    """FLOP/s of large products."""
    return float(gemm_curve(device, precision).flops_per_s)


def _attention_flops(device: Device, precision: str, curve: AttentionCurve) -> float:
    """FLOP/s of large fused attention, at the clock of the datasheet.

    It was measured in the first precision of `GENERAL` that the device has. In another precision, its products take
    time in inverse proportion to the peaks, and its other work, such as exponentials, takes the same time (assumed).
    Operands of four bytes run without tensor cores, also where other products use TF32: PyTorch's kernel reaches 28 to
    47 TFLOP/s in both on an H200 (benchmarks/results/gpu_kernels-2026-11-27.txt).
    """
    precision = "fp32" if precision == "tf32" else precision
    measured = device.flops(next(general for general in GENERAL if general in device.peak_TFLOPs))
    beside = max(0.0, 1.0 / curve.compute_efficiency - 1.0) / measured
    # A host may be measured to be faster than its datasheet.
    return max(1.0, curve.compute_efficiency) / (1.0 / device.flops(precision) + beside)


def attention_curve(device: Device, precision: str, *, rate: float, portable: bool) -> Record:
    """The curve of fused attention on a device, an `AttentionCurveRow`.

    Args:
        device: the rates are its own, at its sustained clock.
        precision: precision of the kernel.
        rate: rate of the trainer's kernel over that of the measured one.
        portable: whether the trainer's kernel is written for all devices (FlashAttention 2, Triton) and does not use
            the newest instructions of this device.
    """
    if device.kernels is not None:
        # The device's own kernel was measured, so the factors for other kernels do not apply.
        found, rate = device.kernels.attention, 1.0
    else:
        found = _published_attention(device.curves_of)
        if portable:
            rate *= device.portable_attention
    clock = device.product_rate * device.sustained_clock
    return record_of(
        AttentionCurveRow(
            floor_s=found.floor_us * 1e-6,
            flops_per_s=_attention_flops(device, precision, found) * clock * rate,
            bytes_per_s=device.hbm_bandwidth_GBps * 1e9 * found.memory_efficiency,
            tail=found.tail,
            small_head=found.small_head_elements,
            multiprocessors=device.num_multiprocessors,
            backward=shared("attention_backward") if found.backward is None else found.backward,
        )
    )
