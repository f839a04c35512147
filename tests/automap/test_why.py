"""Reasons say what the breakdown says, and what they promise comes true."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from automap.cluster import parse_cluster
from automap.price.estimate import annotate, estimate_lowered
from automap.price.evaluator import Evaluator
from automap.price.explain import NUM_REASONS, reasons
from automap.price.lowered_plan import LoweredPlan
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo

GPT = "gpt:layers=8,hidden=512,heads=8,seq_len=256,vocab_size=2048"
UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}


def case(cluster: str = "1x8xA100", spec: str = GPT, batch: int = 64, **stated: Any) -> tuple[LoweredPlan, Evaluator]:
    training = {"global_batch": batch, "trainer": stated.pop("trainer", "megatron-lm")}
    evaluator = Evaluator(Problem.build(zoo.build(spec), parse_cluster(cluster), training))
    return hand_made(evaluator, Strategy(**stated)), evaluator


def said(lowered: LoweredPlan, evaluator: Evaluator) -> tuple[str, ...]:
    return reasons(lowered, evaluator, evaluator.evaluate(lowered))


def seconds_in(text: str) -> float:
    number, unit = text.split()
    return float(number.replace(",", "")) * UNITS[unit]


STATED: list[dict[str, Any]] = [
    {},
    {"tp": 4, "recompute": "full"},
    {"tp": 2, "pp": 4, "sequence_parallel": True},
    {"zero": 3, "cluster": "2x4xV100@25Gbit"},
    {"zero": 1, "cp": 2},
    {"pp": 2, "virtual": 2, "trainer": "megatron-core"},
]


@pytest.mark.parametrize("stated", STATED)
def test_three_largest_parts_in_order_with_their_seconds(stated: dict[str, Any]) -> None:
    lowered, evaluator = case(**stated)
    estimate = estimate_lowered(lowered, evaluator)
    parts = dict(estimate.breakdown_s)
    exposed = parts.pop("exposed_communication")
    found = []
    for text in said(lowered, evaluator):
        share, seconds = re.match(r"(?:less than )?(\d+)% of the step \(([\d.,]+ \w+)\) is ", text).groups()  # type: ignore[union-attr]
        found.append(seconds_in(seconds))
        assert float(share) == pytest.approx(
            100 * found[-1] / estimate.step_time_s, abs=1.0 if "less" in text[:4] else 0.6
        )
    assert len(found) == NUM_REASONS
    assert found == sorted(found, reverse=True)
    everything = sorted([*parts.values(), *exposed.values()], reverse=True)
    assert sum(parts.values()) + sum(exposed.values()) == pytest.approx(estimate.step_time_s)
    assert found == pytest.approx(everything[:NUM_REASONS], rel=0.01)


@pytest.mark.parametrize(
    ("trainer", "hidden"), [("deepspeed", "nothing hides them"), ("torchtitan", "up to 100% hides")]
)
def test_what_hides_collectives_of_zero_is_told(trainer: str, hidden: str) -> None:
    told = said(*case(zero=3, cluster="2x4xV100@25Gbit", trainer=trainer))
    (text,) = (text for text in told if " is ZeRO 3 on dp " in text)
    assert hidden in text and "0% hides" not in text.replace("100%", "")


def test_a_small_part_is_not_told_as_none() -> None:
    told = said(*case())
    assert any(text.startswith("less than 1% of the step (") for text in told), told
    assert not any(text.startswith("0% of the step") for text in told)


@pytest.mark.parametrize("stated", STATED)
def test_parts_of_compute_add_up(stated: dict[str, Any]) -> None:
    lowered, evaluator = case(**stated)
    text = next(t for t in said(lowered, evaluator) if " is compute: " in t)
    whole = seconds_in(re.search(r"step \(([\d.,]+ \w+)\)", text)[1])  # type: ignore[index]
    listed = text.split(" is compute: ")[1].split(". The peak")[0].split("; ")
    total = sum(seconds_in(re.search(r"([\d.,]+ (?:s|ms|µs))(?: |$)", part)[1]) for part in listed)  # type: ignore[index]
    assert total == pytest.approx(whole, rel=0.03)


def test_products_reach_less_than_large_ones() -> None:
    lowered, evaluator = case(micro_batch=2)
    text = next(t for t in said(lowered, evaluator) if " is compute: " in t)
    share, large = re.search(r"products .*? at (\d+)% of the peak \(large ones reach (\d+)%\)", text).groups()  # type: ignore[union-attr]
    assert 0 < int(share) < int(large) < 100
    assert "The peak is 312 TFLOP/s" in text


def test_what_would_help_is_true() -> None:
    """The step that the sentence promises is what the changed plan costs."""
    lowered, evaluator = case(micro_batch=1, recompute="full")
    text = next(t for t in said(lowered, evaluator) if "Keeping all activations" in t)
    promised = seconds_in(re.search(r"would make the step ([\d.,]+ \w+), ([\d.]+)% less", text)[1])  # type: ignore[index]
    kept, _ = case(micro_batch=1)
    assert promised == pytest.approx(evaluator.evaluate(kept).step_time_s, rel=0.006)
    lowered, evaluator = case(pp=4, micro_batch=4)
    text = next(t for t in said(lowered, evaluator) if "bubble" in t)
    assert "4 ranks (pp), 8 micro-batches, 1f1b" in text
    # Equal ranks wait (pp - 1) / micro-batches of their work.
    assert "37.5% of their work" in text


def test_what_would_not_fit_is_not_promised() -> None:
    large = "gpt:layers=24,hidden=4096,heads=32,seq_len=2048,vocab_size=2048"
    lowered, evaluator = case("1x8xV100-16GB", large, 64, tp=8, micro_batch=8, recompute="full")
    text = " ".join(said(lowered, evaluator))
    assert "Keeping all activations would save" in text
    assert "overflow the memory by" in text


def test_collectives_name_axis_link_and_bytes() -> None:
    """Megatron's f and g: four all-reduces a layer, of samples x sequence x hidden in two bytes."""
    lowered, evaluator = case(tp=8, micro_batch=8)
    text = next(t for t in said(lowered, evaluator) if "all-reduces on tp" in t)
    assert "tp (8 ranks inside a host, nvlink3" in text
    size = 8 * 256 * 512 * 2 / 1e6
    mean = float(re.search(r"of ([\d.]+) MB on average", text)[1])  # type: ignore[index]
    assert 0.95 * size < mean <= size  # the loss adds a few of its statistics
    count = int(re.search(r"(\d+) a micro-batch", text)[1])  # type: ignore[index]
    assert 4 * 8 <= count <= 4 * 8 + 4


def test_gradients_name_their_bytes_and_the_hosts() -> None:
    lowered, evaluator = case("2x4xV100@10Gbit")
    text = next(t for t in said(lowered, evaluator) if "gradients" in t)
    parameters = evaluator.problem.graph.num_parameters
    sent = 2.0 if evaluator.problem.precision == "fp16" else 4.0
    assert f"{parameters * sent / 1e6:.3g} MB on dp (8 ranks on 2 hosts, ethernet-10" in text


def test_zero_3_says_what_it_gathers() -> None:
    lowered, evaluator = case("2x4xV100@10Gbit", zero=3)
    text = next(t for t in said(lowered, evaluator) if "ZeRO 3" in t)
    # Embedding and head share a weight and gather it each.
    elements = evaluator.problem.graph.num_parameters + 2048 * 512
    assert f"gathers of {elements * 2 / 1e6:.3g} MB of weights" in text


def test_plans_carry_their_reasons() -> None:
    lowered, evaluator = case(tp=2)
    plan = annotate(to_plan(lowered, evaluator), lowered, evaluator)
    assert plan.why == said(lowered, evaluator)
    assert plan.estimate == estimate_lowered(lowered, evaluator)


def test_any_plan_of_a_space_has_reasons() -> None:
    rng = np.random.default_rng(3)
    for spec in (
        GPT,
        "moe:layers=2,hidden=128,heads=4,kv_heads=4,ffn=256,experts=4,seq_len=64,vocab_size=512",
        "resnet50",
    ):
        for cluster in ("2x4xV100@25Gbit", "4xV100-32GB+4xP100"):
            problem = Problem.build(zoo.build(spec), parse_cluster(cluster), {"global_batch": 32})
            space = PlanSpace(problem)
            for _ in range(6):
                lowered = space.lowered(space.random(rng))
                outcome = space.evaluator.evaluate(lowered)
                found = reasons(lowered, space.evaluator, outcome)
                assert 1 <= len(found) <= NUM_REASONS
                assert all(" of the step (" in text for text in found)
                assert "nan" not in " ".join(found)
                assert float(outcome.ranks["end_s"].max()) == outcome.step_time_s
