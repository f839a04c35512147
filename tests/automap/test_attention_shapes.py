"""Shapes of fused attention: two products of unlike depth, and keys and values that several heads share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from price_cases import attention_curve_of

from automap.price.kernels.attention import ALL_KEYS, AttentionShape, attention_s
from automap.price.kernels.records import ATTENTION, VALUES, K
from automap.space.space import PlanSpace
from ir import zoo

MakeSpace = Callable[..., PlanSpace]
DEPTHS = (192.0, 128.0)
"""Elements of a head of queries and keys, and of values, in DeepSeek-V3 (its configuration)."""


def seconds(size: float, value_size: float, *, backward: bool, kv_heads: float = 16.0, rate: float = 1e30) -> float:
    """Seconds of a kernel on a device with this memory rate, without a floor."""
    curve = attention_curve_of(0.0, 1e15, rate, 0.5, 40.0, 132.0, 2.5)
    shape = AttentionShape(2.0, 16.0, kv_heads, 4096.0, 4096.0, size, value_size, ALL_KEYS, 2.0)
    return float(attention_s(shape, curve, backward))


def test_both_products_take_the_time_of_their_own_shapes() -> None:
    """Forward one product has each depth. Of the five backward, scores, queries' and keys' gradients have that of keys,
    weights' and values' gradients that of values."""
    size, value_size = DEPTHS
    for backward, share in ((False, 0.5), (True, 0.6)):
        alike = [seconds(depth, depth, backward=backward) for depth in DEPTHS]
        expected = share * alike[0] + (1.0 - share) * alike[1]
        assert seconds(size, value_size, backward=backward) == pytest.approx(expected)


def test_keys_and_values_are_read_once_for_all_heads_that_share_them() -> None:
    rate = 1e12
    for backward, times in ((False, 1.0), (True, 2.5)):
        own, shared = (seconds(64.0, 64.0, backward=backward, kv_heads=kv_heads, rate=rate) for kv_heads in (16.0, 4.0))
        # Keys and values of 12 heads less: 2 samples, 4,096 positions, 64 elements of 2 bytes, twice.
        assert own - shared == pytest.approx(times * 2 * 12 * 4096 * 64 * 2 * 2 / rate)


@pytest.mark.parametrize(
    ("spec", "depths", "kv_share"),
    [
        ("llama:layers=1,hidden=256,heads=8,ffn=512,seq_len=128,vocab_size=512", (32.0, 32.0), 1.0),
        ("llama:layers=1,hidden=256,heads=8,kv_heads=2,ffn=512,seq_len=128,vocab_size=512", (32.0, 32.0), 0.25),
        (
            "moe:layers=1,hidden=256,heads=8,head_dim=32,value_dim=16,kv_rank=64,rope_dim=16,ffn=64,experts=4,"
            "seq_len=128,vocab_size=512",
            (48.0, 16.0),
            1.0,
        ),
    ],
)
def test_models_say_what_their_heads_are(
    space: MakeSpace, spec: str, depths: tuple[float, float], kv_share: float
) -> None:
    s = space(zoo.build(spec), "1xH100", 8, training={"trainer": "megatron-core", "precision": "bf16"})
    kernels = s.evaluator.tables.arrays.kernels
    rows = kernels[kernels["kind"] == ATTENTION]
    assert len(rows) == 1
    assert (rows["extents"][0, K], rows["extents"][0, VALUES]) == depths
    assert rows["kv_share"][0] == kv_share
