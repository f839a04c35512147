"""fp8, mxfp8 and nvfp4: products with a weight alone run in them; options of the training software."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_graphs import build_gpt

from automap.cluster import parse_cluster
from automap.device_kinds import known_devices
from automap.errors import ClusterError, ProblemError, UserError
from automap.price.curves import gemm_curve, shared
from automap.price.kernels.array_types import record_of
from automap.price.kernels.attention import ALL_KEYS, AttentionShape, attention_s
from automap.price.kernels.gemm import gemm_s
from automap.price.kernels.operators import product_s
from automap.price.kernels.records import BATCHED_PRODUCT, PRODUCT, KernelRow
from automap.price.stage_layout import PipelineLayouts
from automap.problem import Problem

DIMS = np.array([1.0, 8192.0, 4096.0, 2048.0])
"""batch, m, n, k"""


def problem(cluster: str = "8xH100", **training: Any) -> Problem:
    return Problem.build(build_gpt(), parse_cluster(cluster), {"global_batch": 16, **training})


def hardware(precision: str, cluster: str = "1xH100", **training: Any) -> Any:
    return PipelineLayouts(problem(cluster, precision=precision, **training)).stage_layout((0,), (1, 1)).hardware


def product(kind: int, found: Any, dims: np.ndarray = DIMS) -> np.ndarray:
    times = np.zeros(3)
    product_s(record_of(KernelRow(kind=kind, left_gradient=1, right_gradient=1)), dims, found, times)
    return times[:2]


def test_a_product_with_a_weight_reads_bytes_and_writes_activations() -> None:
    device = next(d for d in known_devices() if d.name == "H100-80GB")
    curve = gemm_curve(device, "fp8")
    _, m, n, k = DIMS
    forward, backward = product(PRODUCT, hardware("fp8"))
    assert forward == gemm_s(m, n, k, 1.0, 1.0, 2.0, curve)
    # The gradient of the weight is added up in fp32.
    assert backward == gemm_s(m, k, n, 1.0, 1.0, 2.0, curve) + gemm_s(k, n, m, 1.0, 1.0, 4.0, curve)


@pytest.mark.parametrize(
    ("cluster", "precision", "slower"),
    [("1xA100", "bf16", 16.0), ("1xV100", "fp16", 125 / 15.7), ("1xA100", "fp32", 1.0)],
)
def test_misaligned_products_compute_on_plain_cores_and_move_their_bytes_at_full_rate(
    cluster: str, precision: str, slower: float
) -> None:
    """Once the arithmetic takes nearly all of the time; then it takes none."""
    found = hardware(precision, cluster)
    # Results are padded to the same number of tiles.
    even, odd = np.array([8.0, 4096.0, 4096.0, 4088.0]), np.array([8.0, 4095.0, 4095.0, 4088.0])
    ratio = product(BATCHED_PRODUCT, found, odd) / product(BATCHED_PRODUCT, found, even)
    assert ratio == pytest.approx([slower, slower], rel=0.02)
    found.products.flops_per_s = found.misaligned.flops_per_s = 1e30
    ratio = product(BATCHED_PRODUCT, found, odd) / product(BATCHED_PRODUCT, found, even)
    assert ratio == pytest.approx([1.0, 1.0], rel=0.002)


def test_all_else_runs_as_in_bf16() -> None:
    half, eighth = hardware("bf16"), hardware("fp8")
    assert product(BATCHED_PRODUCT, half).tolist() == product(BATCHED_PRODUCT, eighth).tolist()
    assert product(PRODUCT, eighth).sum() < 0.75 * product(PRODUCT, half).sum()
    shape = AttentionShape(1.0, 16.0, 16.0, 4096.0, 4096.0, 128.0, 128.0, ALL_KEYS, 2.0)
    assert half.element_bytes == eighth.element_bytes == 2.0
    for backward in (False, True):
        assert attention_s(shape, half.attention, backward) == attention_s(shape, eighth.attention, backward)
    one, other = (problem(precision=p) for p in ("bf16", "fp8"))
    assert (one.activation_bytes, one.state_bytes) == (other.activation_bytes, other.state_bytes)


def test_narrower_formats_are_faster() -> None:
    rates = {p: gemm_curve(parse_cluster("1xB200").device(0), p).flops_per_s for p in ("bf16", "fp8", "mxfp8", "nvfp4")}
    assert rates["bf16"] < rates["fp8"] == rates["mxfp8"] < rates["nvfp4"]
    assert rates["nvfp4"] == pytest.approx(shared("nvfp4_speedup") * rates["fp8"])
    assert product(PRODUCT, hardware("nvfp4", "1xB200")).sum() < product(PRODUCT, hardware("mxfp8", "1xB200")).sum()


@pytest.mark.parametrize("vector", [1, 2, 3])
def test_a_matrix_by_a_vector_needs_no_tensor_cores(vector: int) -> None:
    """Its dims are then no multiples of 8, as in the scan of a state-space model."""
    dims, wider = np.array([64.0, 1536.0, 1536.0, 1536.0]), np.array([64.0, 1536.0, 1536.0, 1536.0])
    dims[vector], wider[vector] = 1.0, 8.0
    assert (product(BATCHED_PRODUCT, hardware("bf16"), dims) <= product(BATCHED_PRODUCT, hardware("bf16"), wider)).all()


@pytest.mark.parametrize(("cluster", "precision"), [("8xA100", "fp8"), ("8xH100", "mxfp8"), ("8xH100", "nvfp4")])
def test_a_device_without_the_precision_is_refused(cluster: str, precision: str) -> None:
    with pytest.raises(ClusterError, match=f"no {precision} arithmetic") as fault:
        problem(cluster, precision=precision)
    assert (fault.value.field, fault.value.value) == ("training.precision", precision)
    assert "bf16" in fault.value.repair


def test_scales_of_rows_slow_products_and_belong_to_fp8() -> None:
    tensor, row = (product(PRODUCT, hardware("fp8", scaling=s)) for s in ("tensor", "row"))
    assert (row > tensor).all()
    for refused in ({"precision": "bf16", "scaling": "row"}, {"precision": "fp8", "scaling": "column"}):
        with pytest.raises(ProblemError, match="scaling") as fault:
            problem(**refused)
        assert isinstance(fault.value, UserError)


@pytest.mark.parametrize("trainer", ["megatron-deepspeed", "torchtitan", "megatron-core"])
def test_asynchronous_tensor_parallelism_hides_more(trainer: str) -> None:
    plain, asynchronous = (
        Problem.build(
            build_gpt(),
            parse_cluster("8xA100"),
            {"global_batch": 16, "trainer": trainer, "async_tensor_parallel": chosen},
        )
        for chosen in (False, True)
    )
    assert plain.tensor_overlap == plain.trainer.tensor_overlap
    assert asynchronous.tensor_overlap == pytest.approx(min(0.95, plain.trainer.tensor_overlap + 0.5))
    assert plain.tensor_overlap < asynchronous.tensor_overlap <= 0.95
