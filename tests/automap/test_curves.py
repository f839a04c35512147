from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automap.cluster import parse_cluster
from automap.device_kinds import known_devices
from automap.fitted_curves import COLLECTIVES, fitted
from automap.price.curves import attention_curve, gemm_curve
from automap.price.evaluator import Evaluator
from automap.price.kernels.attention import ALL_KEYS, EARLIER_KEYS, AttentionShape, attention_s
from automap.price.kernels.collectives import collective_s, host_link
from automap.price.kernels.gemm import gemm_s
from automap.price.kernels.records import ALL_GATHER, ALL_REDUCE
from automap.problem import Problem
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo

DEVICES = {device.name: device for device in known_devices()}
SIZE = st.integers(1, 70_000)


def host(size: int) -> Any:
    return host_link(size, latency_s=8e-6, growth=0.2, bytes_per_s=225e9, small_group=0.3, ramp=2.5)


def _never_falls(price: Callable[..., float], sizes: list[float]) -> None:
    before = price(*sizes)
    assert np.isfinite(before)
    assert before > 0
    for i in range(len(sizes)):
        for step in (1, 63, 1000):
            more = [*sizes]
            more[i] += step
            assert price(*more) >= before * (1 - 1e-12)


@settings(max_examples=60)
@given(name=st.sampled_from(sorted(DEVICES)), m=SIZE, n=SIZE, k=SIZE, batch=st.integers(1, 300))
def test_larger_products_take_no_less_time(name: str, m: int, n: int, k: int, batch: int) -> None:
    device = DEVICES[name]
    curve = gemm_curve(device, min(device.peak_TFLOPs))
    _never_falls(lambda *s: gemm_s(*s, 2.0, 2.0, curve), [float(v) for v in (m, n, k, batch)])


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(name for name in DEVICES if {"fp32", "tf32"} <= DEVICES[name].peak_TFLOPs.keys())),
    m=SIZE,
    n=SIZE,
    k=SIZE,
)
def test_products_in_tf32_take_no_longer_than_in_fp32(name: str, m: int, n: int, k: int) -> None:
    """A library that may use TF32 may also leave it: GeForce cards have one peak for both."""
    narrow, wide = (gemm_s(m, n, k, 1.0, 4.0, 4.0, gemm_curve(DEVICES[name], kind)) for kind in ("tf32", "fp32"))
    assert narrow <= wide


def test_rows_of_odd_length_are_slow_on_tensor_cores_alone() -> None:
    """GPT-2's vocabulary of 50257 makes no step longer than it is in fp32, where plain cores run its head."""
    graph = zoo.build("gpt:layers=1,hidden=768,heads=12,seq_len=1024,vocab_size=50257")

    def step_s(device: str, precision: str) -> float:
        training = {"global_batch": 8, "precision": precision, "trainer": "ddp"}
        evaluator = Evaluator(Problem.build(graph, parse_cluster(f"1x1x{device}"), training))
        return evaluator.evaluate(hand_made(evaluator, Strategy(micro_batch=8))).step_time_s

    for device, narrow in (("P100", "fp16"), ("RTX4090", "bf16"), ("RTX3090", "tf32"), ("A100", "bf16")):
        assert step_s(device, narrow) <= step_s(device, "fp32")


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(DEVICES)),
    batch=st.integers(1, 64),
    heads=st.integers(1, 128),
    length=st.integers(1, 70_000),
    head=st.sampled_from([32, 64, 80, 108, 128, 256]),
    backward=st.booleans(),
    causal=st.booleans(),
)
def test_larger_attention_takes_no_less_time(
    name: str, batch: int, heads: int, length: int, head: int, backward: bool, causal: bool
) -> None:
    curve = attention_curve(DEVICES[name], min(DEVICES[name].peak_TFLOPs), rate=0.9, portable=False)

    def price(b: float, h: float, s: float, d: float) -> float:
        return float(
            attention_s(AttentionShape(b, h, h, s, s, d, d, EARLIER_KEYS if causal else ALL_KEYS, 2.0), curve, backward)
        )

    _never_falls(price, [float(v) for v in (batch, heads, length, head)])


@settings(max_examples=60)
@given(kind=st.sampled_from(range(len(COLLECTIVES))), ranks=st.integers(2, 4096), data=st.integers(1, 2**34))
def test_more_bytes_take_no_less_time(kind: int, ranks: int, data: int) -> None:
    link = host(ranks)
    assert collective_s(kind, ranks, link, data + 1000.0) >= collective_s(kind, ranks, link, float(data)) > 0


def _slower_and_faster(price: Callable[[Any], float], curve: Any, *names: str) -> None:
    for name in names:
        faster = curve.copy()
        faster[name] *= 1.5
        assert price(faster) < price(curve)


def test_faster_parts_take_less_time() -> None:
    device = DEVICES["A100-80GB"]
    _slower_and_faster(
        lambda c: gemm_s(3000.0, 500.0, 700.0, 2.0, 2.0, 2.0, c),
        gemm_curve(device, "bf16"),
        "flops_per_s",
        "bytes_per_s",
    )
    _slower_and_faster(
        lambda c: attention_s(AttentionShape(2.0, 8.0, 8.0, 999.0, 999.0, 64.0, 64.0, EARLIER_KEYS, 2.0), c, True),
        attention_curve(device, "bf16", rate=1.0, portable=False),
        "flops_per_s",
        "bytes_per_s",
    )
    _slower_and_faster(lambda c: collective_s(ALL_REDUCE, 8.0, c, 1e7), host(8), "bytes_per_s")


def test_nothing_takes_no_time() -> None:
    device = DEVICES["A100-80GB"]
    assert gemm_s(0.0, 5.0, 5.0, 1.0, 2.0, 2.0, gemm_curve(device, "bf16")) == 0
    assert collective_s(ALL_GATHER, 1.0, host(1), 1e9) == 0
    curve = attention_curve(device, "bf16", rate=1.0, portable=False)
    assert attention_s(AttentionShape(1.0, 8.0, 8.0, 0.0, 0.0, 64.0, 64.0, EARLIER_KEYS, 2.0), curve, False) == 0


def test_a_large_product_runs_at_the_fitted_rate() -> None:
    device = DEVICES["A100-80GB"]
    share = fitted("gemm")["curves"]["A100"]["bf16"]["compute_efficiency"] * device.sustained_clock
    at_rate = 2 * 32768.0**3 / (312e12 * share)
    assert gemm_s(32768.0, 32768.0, 32768.0, 1.0, 2.0, 2.0, gemm_curve(device, "bf16")) == pytest.approx(
        at_rate, rel=0.06
    )


def test_devices_without_measurements_scale_with_their_rates() -> None:
    big = (32768.0, 32768.0, 32768.0, 1.0, 2.0, 2.0)
    v100, a100 = DEVICES["V100-16GB"], DEVICES["A100-80GB"]
    ratio = gemm_s(*big, gemm_curve(v100, "fp16")) / gemm_s(*big, gemm_curve(a100, "fp16"))
    wanted = (312 * a100.sustained_clock) / (125 * v100.sustained_clock)
    assert ratio == pytest.approx(wanted, rel=0.05)


def test_products_of_16_bits_are_faster_where_there_are_tensor_cores() -> None:
    """A P100 has none: products of fp16 are added up in fp32, at its rate. In long runs, no device exceeds its peak."""
    for name, device in DEVICES.items():
        precision = "bf16" if "bf16" in device.peak_TFLOPs else "fp16"
        if name == "cpu" or not {precision, "fp32"} <= set(device.peak_TFLOPs):
            continue
        rates = {p: float(gemm_curve(device, p).flops_per_s) for p in (precision, "fp32")}
        speedup = rates[precision] / rates["fp32"]
        assert speedup == pytest.approx(1.0, rel=0.01) if name == "P100-16GB" else speedup > 2.0, name
        assert rates[precision] < 0.9 * device.flops(precision), name


def test_products_of_8_bits_are_as_much_faster_as_their_peak_where_none_was_measured() -> None:
    """A Gaudi 2 has the curves of the A100, which has none in fp8."""
    device = DEVICES["Gaudi2-96GB"]
    rates = {p: float(gemm_curve(device, p).flops_per_s) / device.flops(p) for p in ("bf16", "fp8")}
    assert rates["fp8"] == pytest.approx(rates["bf16"])


def test_attention_is_slower_where_products_are() -> None:
    """Without tensor cores its products take as much longer as the peaks differ, the rest as long as with them."""
    device = DEVICES["A100-80GB"]
    curves = {p: attention_curve(device, p, rate=1.0, portable=False) for p in ("bf16", "tf32", "fp32")}
    seconds = {p: 1.0 / float(curve.flops_per_s) for p, curve in curves.items()}
    peaks = {p: device.flops(p) * device.sustained_clock for p in curves}
    beside = {p: seconds[p] - 1.0 / peaks[p] for p in curves}
    assert beside["fp32"] == pytest.approx(beside["bf16"]) == pytest.approx(beside["tf32"])
    assert seconds["fp32"] > 5.0 * seconds["bf16"] and min(beside.values()) > 0.0


def test_portable_attention_is_slower_on_newer_devices_only() -> None:
    for name, expected in (("A100-80GB", 1.0), ("H100-80GB", DEVICES["H100-80GB"].portable_attention)):
        native, portable = (attention_curve(DEVICES[name], "bf16", rate=1.0, portable=p) for p in (False, True))
        assert portable.flops_per_s / native.flops_per_s == pytest.approx(expected)


def test_curves_keep_what_was_promised_of_rows_left_out() -> None:
    assert fitted("attention")["cross_validated"]["median_error"] <= 0.10
    assert fitted("collectives")["cross_validated"]["median_error"] <= 0.10
    assert fitted("gemm")["cross_validated"]["median_error"] <= 0.08


@pytest.mark.parametrize("name", sorted(set(DEVICES) - {"cpu"}))
def test_memory_runs_at_the_rate_that_products_were_measured_to_reach(name: str) -> None:
    curves = fitted("gemm")["curves"]
    kind = DEVICES[name].curves_of
    found = curves[kind if kind in curves else "A100"]["bf16"]["memory_efficiency"]
    assert DEVICES[name].memory_efficiency == round(found, 2)


MEASURED = {
    ("A100-80GB", "bf16"): 264.5,
    ("A100-80GB", "fp32"): 19.1,
    ("A100-PCIe-80GB", "bf16"): 252.9,
    ("H100-80GB", "bf16"): 786.5,
    ("H200-141GB", "bf16"): 790.3,
    ("H20-96GB", "bf16"): 141.9,
    ("B200-180GB", "bf16"): 1696.0,
    ("L40S-48GB", "bf16"): 269.2,
    ("L40S-48GB", "fp32"): 46.9,
    ("RTX3090-24GB", "bf16"): 76.5,
    ("RTX3090-24GB", "fp32"): 24.7,
    ("RTX4090-24GB", "bf16"): 167.2,
    ("RTX5090-32GB", "bf16"): 239.1,
    ("RTXA6000-48GB", "bf16"): 123.3,
    ("T4-16GB", "fp32"): 4.3,
    ("MI250X-64GB", "bf16"): 147.0,
    ("MI300X-192GB", "bf16"): 725.0,
    ("MI325X-256GB", "bf16"): 784.9,
    ("Gaudi3-128GB", "bf16"): 1288.8,
}
"""TFLOP/s of single large products, as GitHub zzc0721/torch-performance-test-data and stas00/ml-engineering state them
(read 2026-11-30; of MI300X the mean of two)."""


@pytest.mark.parametrize(("name", "precision"), MEASURED)
def test_large_products_are_as_fast_as_others_measured_them(name: str, precision: str) -> None:
    device = dataclasses.replace(DEVICES[name], sustained_clock=1.0)
    seconds = gemm_s(16384.0, 16384.0, 16384.0, 1.0, 2.0, 2.0, gemm_curve(device, precision))
    assert 2e-12 * 16384.0**3 / seconds == pytest.approx(MEASURED[name, precision], rel=0.12)


def test_tensor_cores_are_faster_in_tf32_than_plain_ones_in_fp32() -> None:
    """Also on GeForce cards, whose datasheets state one peak for both: an RTX 3090 Ti was measured to reach 33 and 21
    TFLOP/s (GitHub bewantbe/busy-gemm-benchmark)."""
    for name in ("RTX3090-24GB", "RTX4090-24GB", "A100-80GB", "H100-80GB"):
        tensor, plain = (float(gemm_curve(DEVICES[name], each).flops_per_s) for each in ("tf32", "fp32"))
        assert tensor > 1.1 * plain
