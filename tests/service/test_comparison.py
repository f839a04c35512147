from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.space.alternatives import ALONE, Alternative, alternatives
from automap.space.changes import nearest
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo
from service.command.comparison import limits
from service.command.main import main

GPT = "zoo:gpt:layers=4,hidden=256,heads=4,vocab_size=1024,seq_len=128"
WORDS = [GPT, "--cluster", "8xA100-80GB", "--global-batch", "64"]
OPTIONS = {
    "tensor parallel": "tp",
    "pipeline": "pp",
    "context parallel": "cp",
    "micro-batch": "micro_batch",
    "chunks of a pipeline rank": "virtual",
    "ZeRO": "zero",
    "recompute": "recompute",
    "schedule": "schedule",
}
"""Words of a change -> option of `automap estimate`."""


@pytest.fixture
def plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    paths = [str(tmp_path / "first.json"), str(tmp_path / "second.json")]
    assert main(["estimate", *WORDS, "--tp", "2", "--pp", "2", "--micro-batch", "2", "-o", paths[0]]) == 0
    assert main(["estimate", *WORDS, "--zero", "1", "--micro-batch", "4", "-o", paths[1]]) == 0
    capsys.readouterr()
    return paths


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_averaged_replicas_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / "first.json"), str(tmp_path / "second.json")]
    words = ["--cluster", "2x4xV100-16GB@10Gbit", "--global-batch", "64", "--micro-batch"]
    for path, degrees in zip(paths, (["2"], ["4", "--tp", "2"]), strict=True):
        assert main(["estimate", GPT, *words, *degrees, "--sync", "local_sgd", "-o", path]) == 0
    capsys.readouterr()
    explained = shown(capsys, "explain", paths[0], GPT)
    found = {one["about"]: one["step_time_s"] for one in explained["alternatives"]}
    larger = shown(capsys, "estimate", GPT, *words, "4", "--sync", "local_sgd")["estimate"]
    assert found["micro-batch 2 → 4"] == larger["step_time_s"]
    # Under ZeRO replicas cannot be apart.
    sharded = shown(capsys, "estimate", GPT, *words, "2", "--zero", "1")["estimate"]
    assert found["ZeRO 0 → 1, synchronous"] == sharded["step_time_s"]
    # Another period in the second file: its averages are priced, and not the synchronous plan.
    document = json.loads(Path(paths[1]).read_text())
    Path(paths[1]).write_text(json.dumps({**document, "sync": {"kind": "local_sgd", "period": 2}}))
    for pair in (paths, paths[::-1], [paths[0]] * 2):
        one = shown(capsys, "diff", *pair, GPT)
        saved_s = one["first"]["step_time_s"] - one["second"]["step_time_s"]
        assert sum(change["saved_s"] for change in one["changes"]) == pytest.approx(saved_s)
    changes = shown(capsys, "diff", *paths, GPT)["changes"]
    assert changes[0]["about"] == "replicas averaged every 4 steps (local_sgd) → synchronous"
    assert changes[-1]["about"] == "synchronous → replicas averaged every 2 steps (local_sgd)"


def test_every_alternative_is_what_estimate_says(plans: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "explain", plans[0], GPT)
    step_s = found["plan"]["estimate"]["step_time_s"]
    assert step_s == json.loads(Path(plans[0]).read_text())["estimate"]["step_time_s"]
    alternatives = found["alternatives"]
    assert [one["step_time_s"] for one in alternatives] == sorted(one["step_time_s"] for one in alternatives)
    priced = set()
    for one in alternatives:
        degrees = {"tp": "2", "pp": "2", "micro_batch": "2"}
        for change in one["about"].split(", "):
            name, _, value = change.partition(" → ")
            words = name.rpartition(" ")[0]
            # Without a pipeline there is no schedule.
            if words in OPTIONS and (words, value) != ("schedule", "none"):
                degrees[OPTIONS[words]] = value
                priced.add(words)
        if "sequence parallel" in one["about"]:
            continue
        options = [word for name, value in degrees.items() for word in (f"--{name.replace('_', '-')}", value)]
        plan = shown(capsys, "estimate", *WORDS, *options)
        assert one["step_time_s"] == plan["estimate"]["step_time_s"], one["about"]
        assert one["more_s"] == pytest.approx(one["step_time_s"] - step_s)
        assert one["shortage"] is None
    assert priced == {*OPTIONS}
    assert main(["explain", plans[0], GPT]) == 0
    page = capsys.readouterr().out
    assert page.startswith("strategy  pipeline 2 × 2 replicas × tensor parallel 2")
    assert page.count("\ninstead   ") == len(alternatives)


def test_choices_are_those_of_the_trainer_that_the_plan_was_searched_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-LM has ZeRO 0 and 1 and the schedules 1F1B and interleaved (docs/exports.md)."""
    path = tmp_path / "plan.json"
    fixed = tmp_path / "hints.json"
    fixed.write_text('{"fix": {"tp": 2, "pp": 2, "dp": 2, "num_micro_batches": 8, "schedule": "1f1b", "zero": 0}}')
    words = ["--target", "megatron-core", "--budget", "20", "--hints", str(fixed), "-o", str(path)]
    assert main(["search", *WORDS, *words]) == 0
    capsys.readouterr()
    own = {one["about"] for one in shown(capsys, "explain", str(path), GPT)["alternatives"]}
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "training": {**document["training"], "target": "any"}}))
    every = {one["about"] for one in shown(capsys, "explain", str(path), GPT)["alternatives"]}
    beyond = {"ZeRO 0 → 2", "ZeRO 0 → 3", "schedule 1f1b → gpipe", "schedule 1f1b → zb1p", "schedule 1f1b → zb2p"}
    assert beyond <= every and not beyond & own
    assert {"ZeRO 0 → 1", "recompute none → full", "chunks of a pipeline rank 1 → 2"} <= own
    assert any(about.startswith("tensor parallel 2 → 4") for about in own)
    # Megatron-LM splits weights with the sequence between them.
    fixed.write_text('{"fix": {"tp": 1, "pp": 2, "dp": 4, "num_micro_batches": 8, "schedule": "1f1b", "zero": 0}}')
    assert main(["search", *WORDS, *words]) == 0
    capsys.readouterr()
    own = {one["about"] for one in shown(capsys, "explain", str(path), GPT)["alternatives"]}
    assert "tensor parallel 1 → 2, sequence parallel off → on, replicas 4 → 2" in own


def test_the_limit_that_is_near_is_named(plans: list[str]) -> None:
    plan = Plan.from_json(json.loads(Path(plans[0]).read_text()))
    assert plan.estimate is not None
    step_s, *rows = plan.estimate.step_time_s, *plan.estimate.memory_bytes
    full = replace(rows[0], capacity=rows[0].total + 1e9, reserve=1e9)
    plan = replace(plan, estimate=replace(plan.estimate, memory_bytes=(*rows[1:], full), lower_bound_s=0.75 * step_s))

    def choice(more: float, shortage: str | None) -> Alternative:
        return Alternative(about="", step_time_s=(1.0 + more) * step_s, more_s=more * step_s, shortage=shortage)

    free = [choice(-0.1, None), choice(0.1, "devices 0-3")]
    memory, bound = limits(plan, free)
    assert f"devices {full.devices} are 100% full" in memory and memory.endswith("every faster choice below fits")
    assert bound == "time: no plan of this model on this cluster saves more than 25% of the step"
    assert limits(plan, [*free, choice(-0.2, "devices 0-3")])[0].endswith("a faster choice below would not fit")
    assert limits(plan, [choice(0.1, "x")])[0].endswith("no choice below is faster")
    assert limits(plan, [choice(-0.2, "x"), choice(-0.3, "x")])[0].endswith("2 faster choices below would not fit")


def test_layers_stay_as_they_are_while_something_else_changes() -> None:
    problem = Problem.build(zoo.build(GPT.removeprefix("zoo:")), "8xA100-80GB", {"global_batch": 64})
    evaluator = Evaluator(problem)
    uneven = hand_made(evaluator, Strategy(pp=2, layers=(3, 1), micro_batch=2))
    found = {one.about: one for one in alternatives(uneven, evaluator)}
    even = hand_made(evaluator, Strategy(pp=2, micro_batch=2))
    assert found["layers of each chunk uneven → even"].step_time_s == evaluator.evaluate(even).step_time_s
    zero = hand_made(evaluator, Strategy(pp=2, layers=(3, 1), micro_batch=2, zero=1))
    assert found["ZeRO 0 → 1"].step_time_s == evaluator.evaluate(zero).step_time_s
    assert all("layers" not in about for about in found if "pipeline" not in about and "chunk" not in about)


def test_choices_are_made_on_the_devices_and_with_the_shares_of_the_plan() -> None:
    problem = Problem.build(
        zoo.build(GPT.removeprefix("zoo:")), parse_cluster("4xA100-40GB+4xT4-16GB"), {"global_batch": 64}
    )
    evaluator = Evaluator(problem)
    fast = Strategy(micro_batch=16, devices=(0, 1, 2, 3))
    shared = Strategy(micro_batch=8, shares=((12, 12, 12, 12, 4, 4, 4, 4),))
    for strategy in (fast, shared):
        lowered = hand_made(evaluator, strategy)
        assert nearest(lowered, evaluator) == strategy
        found = {one.about: one for one in alternatives(lowered, evaluator)}
        assert ALONE not in found
        zero = hand_made(evaluator, replace(strategy, zero=1))
        assert found["ZeRO 0 → 1"].step_time_s == evaluator.evaluate(zero).step_time_s
        others = {
            fast: ("devices 4 → 8, micro-batch 16 → 8, replicas 4 → 8", Strategy(micro_batch=8)),
            shared: ("shares of the samples unequal → even", Strategy(micro_batch=8)),
        }
        about, other = others[strategy]
        assert found[about].step_time_s == evaluator.evaluate(hand_made(evaluator, other)).step_time_s
    uneven = replace(shared, shares=((12, 12, 12, 12, 4, 4, 4, 8),))
    with pytest.raises(PlanError, match="64 samples of a micro-batch among 8 replicas"):
        hand_made(evaluator, uneven)


def test_every_number_of_samples_of_unequal_replicas_is_a_choice() -> None:
    problem = Problem.build(zoo.build(GPT.removeprefix("zoo:")), "7xT4", {"global_batch": 64})
    evaluator = Evaluator(problem)
    found = {one.about for one in alternatives(hand_made(evaluator, Strategy(micro_batch=5)), evaluator)}
    assert {"micro-batch 5 → 10", "micro-batch 5 → 3"} <= found


def test_the_changes_add_up_to_the_difference(plans: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = shown(capsys, "diff", *plans, GPT)
    before, after = (found[name]["step_time_s"] for name in ("first", "second"))
    assert sum(change["saved_s"] for change in found["changes"]) == pytest.approx(before - after)
    assert {"ZeRO 0 → 1"} < {change["about"] for change in found["changes"]}
    back = shown(capsys, "diff", *reversed(plans), GPT)
    assert sum(change["saved_s"] for change in back["changes"]) == pytest.approx(after - before)
    assert main(["diff", *plans, GPT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(found["changes"])
    assert not shown(capsys, "diff", plans[0], plans[0], GPT)["changes"]


def test_plans_of_other_problems_are_not_compared(
    plans: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "third.json")
    assert main(["estimate", GPT, "--cluster", "8xA100-80GB", "--global-batch", "32", "-o", path]) == 0
    capsys.readouterr()
    assert main(["diff", plans[0], path, GPT]) == 2
    assert "third.json has another training: global_batch 32 and not 64" in capsys.readouterr().err
