from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from automap.cluster import parse_cluster
from automap.plan import AxisSharding, Plan, Schedule, Sync, Zero
from automap.problem import Problem
from ir.onnx.sandbox import import_model
from service.report import against, seconds, strategy, summary


@pytest.fixture(scope="module")
def plan(light: Callable[[str], bytes], search: Any) -> Plan:
    graph = import_model(light("squeezenet"))
    problem = Problem.build(graph, parse_cluster("8xV100-16GB"), {"global_batch": 64})
    found: Plan = search(problem, None, on_progress=lambda progress: None).plan
    return found


def test_strategies(plan: Plan) -> None:
    assert strategy(plan) == "dp 8 · 64 at once"
    stage = replace(plan.stages[0], mesh=(("dp", 2), ("tp", 2)), devices="0-3", zero=Zero(stage=1, axes=("dp",)))
    both = (stage, replace(stage, devices="4-7", recompute=("*",)))
    many = replace(plan, stages=both, num_micro_batches=4, samples_per_micro_batch=16)
    assert strategy(many) == "pp 2 × dp 2 × tp 2 · 4 micro-batches of 16 · ZeRO 1 · recompute nothing / full"
    chunks = replace(many, stages=both * 2, schedule=Schedule(kind="interleaved"))
    assert strategy(chunks).startswith("pp 2 (2 chunks each) × dp 2 × tp 2")
    assert strategy(chunks).endswith("interleaved")
    one = replace(plan, stages=(replace(stage, mesh=(("dp", 1),), devices="0", zero=Zero()),))
    assert strategy(one) == "one device · 64 at once"
    late = replace(plan, sync=Sync(kind="dasgd", period=4, delay=2))
    assert strategy(late) == "dp 8 · 64 at once · DaSGD, averaged every 4 steps, merged 2 steps later"
    local = replace(plan, sync=Sync(kind="local_sgd", period=1))
    assert strategy(local) == "dp 8 · 64 at once · local SGD, averaged every step"


def test_operators_that_go_their_own_way_are_named(plan: Plan) -> None:
    own = {name: {"dp": AxisSharding(inputs=("B", "B"), outputs=("B",))} for name in ("fc1", "fc2", "fc3")}
    split = replace(plan, stages=(replace(plan.stages[0], shardings=own),))
    assert strategy(split) == "dp 8 · 64 at once · fc1 and 2 more not split by batch"


def test_summary(plan: Plan) -> None:
    lines = dict(summary(plan))
    assert lines["step"] == "500 ms (between 400 ms and 600 ms)"
    assert "128 samples/s" in lines["speed"]
    assert lines["memory"] == "4.7 of 14.9 GiB (31%) on devices 0-7"
    assert lines["against"] == "2.00x pure data parallelism, 1.20x the best expert template"
    assert "fake" in lines["found by"]
    assert plan.search is not None
    lone = replace(plan, search=replace(plan.search, baselines={"dp": None, "expert": 1.0, "yours": 2.0}))
    assert against(lone) == "pure data parallelism does not fit, 2.00x the best expert template, 4.00x your plan"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.14159, "3.14 s"),
        (0.0123, "12.3 ms"),
        (4.2e-6, "4.2 µs"),
        (123456.0, "123,456 s"),
        (float("inf"), "inf s"),
        (0.0, "0 µs"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (9.996e-4, "1 ms"),
        (999.6, "1,000 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text
