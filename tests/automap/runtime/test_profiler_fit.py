"""Fits of a profile: timings made by the forms themselves give their constants back."""

import numpy as np
import pytest
from price_cases import attention_curve_of, gemm_curve_of

from automap.fitted_curves import COLLECTIVES
from automap.price.kernels.attention import EARLIER_KEYS, AttentionShape, attention_s
from automap.price.kernels.collectives import collective_s, host_link
from automap.price.kernels.gemm import CACHE_SHARE, gemm_s
from automap.runtime.profiler.fit import errors, fit_attention, fit_collective, fit_gemm, fit_linear

FLOPS, BYTES_PER_S = 8e10, 1e10


def noisy(seconds, share=0.0, seed=0):
    """Times with a relative spread."""
    return seconds * np.exp(share * np.random.default_rng(seed).standard_normal(len(seconds)))


def gemm_rows(curve, count=80):
    """[rows, 5] of `fit_gemm`, in fp32."""
    random = np.random.default_rng(1)
    shapes = np.column_stack(
        [random.choice([1, 4, 16], count), random.choice([8, 24, 40, 88, 200, 512, 1000], (count, 3))]
    )
    return shapes, np.array([gemm_s(m, n, k, b, 4.0, 4.0, curve) for b, m, n, k in shapes.astype(float)])


def test_products_give_their_curve_back():
    cache = 32e6
    known = gemm_curve_of(
        3e-6, 0.8 * FLOPS, 0.5 * BYTES_PER_S, 2.0, 10.0, 0.1, 0.0, 1, cache * CACHE_SHARE, 3.0, 0.0, 16.0
    )
    shapes, seconds = gemm_rows(known)
    found = fit_gemm(
        np.column_stack([shapes, seconds]),
        flops=FLOPS,
        bytes_per_s=BYTES_PER_S,
        element_bytes=4.0,
        num_multiprocessors=1,
        cache_bytes=cache,
    )
    assert found.grain == 16.0
    assert found.compute_efficiency == pytest.approx(0.8, rel=0.02)
    assert found.floor_us == pytest.approx(3.0, rel=0.05)
    assert found.rows == 80
    assert found.cross_validated["p90_error"] < 0.03


def test_attention_gives_its_curve_back():
    known = attention_curve_of(20e-6, 0.6 * FLOPS, 0.5 * BYTES_PER_S, 0.2, 30.0, 1.0, 2.5)
    rows = [
        [
            h,
            s,
            d,
            *(
                attention_s(AttentionShape(1.0, h, h, s, s, d, d, EARLIER_KEYS, 4.0), known, way)
                for way in (False, True)
            ),
        ]
        for h in (4.0, 16.0)
        for s in (128.0, 256.0, 512.0, 1024.0)
        for d in (32.0, 64.0, 128.0)
    ]
    found = fit_attention(
        np.array(rows), flops=FLOPS, bytes_per_s=BYTES_PER_S, element_bytes=4.0, num_multiprocessors=1
    )
    assert found.compute_efficiency == pytest.approx(0.6, rel=0.02)
    assert found.backward == pytest.approx(2.5, rel=0.02)
    assert found.cross_validated["p90_error"] < 0.02


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_collectives_give_their_curve_back(kind):
    ramp = 0.0 if kind == "send_recv" else 3.0
    rows = []
    for ranks in (2, 4, 8):
        link = host_link(ranks, latency_s=1e-4, growth=0.3, bytes_per_s=0.4 * BYTES_PER_S, small_group=0.5, ramp=ramp)
        rows += [[ranks, 2.0**p, collective_s(COLLECTIVES.index(kind), ranks, link, 2.0**p)] for p in range(10, 26, 2)]
    found = fit_collective(kind, np.array(rows), BYTES_PER_S)
    assert found.latency_us == pytest.approx(100.0, rel=0.02)
    assert found.latency_growth == pytest.approx(0.3, rel=0.05)
    assert found.efficiency / (1 + found.small_group / 4) == pytest.approx(0.4 / (1 + 0.5 / 4), rel=0.02)
    assert found.cross_validated["p90_error"] < 0.01


def test_one_size_of_groups_says_nothing_of_others():
    link = host_link(2, latency_s=1e-4, growth=0.0, bytes_per_s=2e9, small_group=0.0, ramp=0.0)
    rows = np.array([[2, 2.0**p, collective_s(0, 2.0, link, 2.0**p)] for p in range(10, 26)])
    found = fit_collective("all_reduce", rows, BYTES_PER_S)
    assert (found.latency_growth, found.small_group) == (0.0, 0.0)
    assert found.efficiency == pytest.approx(0.2, rel=0.01)


def test_errors_left_out_are_those_of_the_noise():
    """A spread of 10 % has a median absolute value of 6.7 %."""
    link = host_link(2, latency_s=1e-4, growth=0.0, bytes_per_s=2e9, small_group=0.0, ramp=0.0)
    sizes = 2.0 ** np.linspace(10, 26, 200)
    seconds = noisy(np.array([collective_s(0, 2.0, link, size) for size in sizes]), 0.1)
    found = fit_collective("all_reduce", np.column_stack([np.full(200, 2.0), sizes, seconds]), BYTES_PER_S)
    assert found.cross_validated["median_error"] == pytest.approx(0.067, abs=0.015)


def test_amounts_of_a_linear_price_are_found_and_none_is_negative():
    base, slope = np.array([1.0, 2.0, 0.5, 3.0]), np.array([[1.0, 0.0], [2.0, 1.0], [0.0, 1.0], [1.0, 3.0]])
    reference = np.array([0.1, 10.0])
    found, off = fit_linear(lambda x: base + slope @ x, base + slope @ [0.25, 3.0], reference, 1)
    assert found == pytest.approx([0.25, 3.0])
    assert off == {"rows": 4, "median_error": pytest.approx(0.0, abs=1e-9), "p90_error": pytest.approx(0.0, abs=1e-9)}
    found, _ = fit_linear(lambda x: base + slope @ x, base + slope @ [0.25, -0.1], reference, 1)
    assert found[1] == 0.0


def test_a_price_that_is_not_linear_is_met_after_some_rounds():
    base = np.array([1.0, 2.0, 0.5])
    amounts = np.array([2.0])

    def price(x):
        return (base**3 + (np.arange(1.0, 4.0) * x[0]) ** 3) ** (1 / 3)

    found, off = fit_linear(price, price(amounts), np.array([1.0]), 8)
    assert found == pytest.approx(amounts, rel=0.05)
    assert off["median_error"] < 0.05


def test_errors_are_absolute_and_relative():
    found = errors(np.array([1.1, 2.0, 2.7]), np.array([1.0, 2.0, 3.0]))
    assert found["median_error"] == pytest.approx(0.1)
