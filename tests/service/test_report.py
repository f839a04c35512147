from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from automap.cluster import parse_cluster
from automap.comparisons import Beside
from automap.plan import AxisSharding, AxisUse, Degrees, Plan, Schedule, Sync, Zero
from automap.problem import Problem
from automap.search_record import LEFT_BY_TARGET, LEFT_IDLE
from ir.onnx.sandbox import import_model
from service.report import against, side_by_side, summary
from service.strategy import data_parallel, strategy


@pytest.fixture(scope="module")
def plan(light: Callable[[str], bytes], search: Any) -> Plan:
    graph = import_model(light("squeezenet"))
    problem = Problem.build(graph, parse_cluster("8xV100-16GB"), {"global_batch": 64})
    found: Plan = search(problem, None, on_progress=lambda progress: None).plan
    return used(found)


def used(plan: Plan, *, expert_axes: tuple[str, ...] = (), **uses: str) -> Plan:
    """The plan with the uses of the axes of its first stage, which all stages have; of those left out: data."""
    sizes = {axis: size for axis, size in plan.stages[0].mesh if size > 1}
    axes = {axis: uses.get(axis, "data") for axis in sizes}
    of = {use: math.prod(sizes[axis] for axis in axes if axes[axis] == use) for use in get_args(AxisUse)}
    degrees = Degrees(
        **of,
        expert=math.prod(sizes[axis] for axis in expert_axes),
        sequence_parallel=False,
        pipeline=1,
        virtual_stages=1,
        zero=0,
        micro_batch=max(1, plan.samples_per_micro_batch // of["data"]),
        accumulation_steps=plan.num_micro_batches,
        sequence_length=None,
        axes=axes,  # type: ignore[arg-type]
        expert_axes=expert_axes,
    )
    return replace(plan, degrees=(degrees,))


COLUMNS = {"fc*": {"tp": AxisSharding(inputs=("B", "S(1)"), outputs=("S(2)",))}}


def test_a_strategy_names_the_use_of_every_axis(plan: Plan) -> None:
    assert strategy(plan) == "8 replicas · 1 micro-batch of 64"
    stage = replace(plan.stages[0], mesh=(("dp", 2), ("tp", 2)), devices="0-3", zero=Zero(stage=1, axes=("dp",)))
    stage = replace(stage, shardings=COLUMNS)
    both = (stage, replace(stage, devices="4-7", recompute=("*",)))
    many = replace(plan, stages=both, num_micro_batches=4, samples_per_micro_batch=16)
    assert strategy(used(many, tp="tensor")) == (
        "pipeline 2 × 2 replicas × tensor parallel 2 · 4 micro-batches of 16 · ZeRO 1 · recompute nothing / full"
    )
    chunks = replace(many, stages=both * 2, schedule=Schedule(kind="interleaved"))
    chunks = used(chunks, tp="tensor")
    assert strategy(chunks).startswith("pipeline 2 (2 chunks each) × 2 replicas × tensor parallel 2")
    assert strategy(chunks).endswith("interleaved")
    one = replace(plan, stages=(replace(stage, mesh=(("dp", 1),), devices="0", zero=Zero(), shardings={}),))
    assert strategy(used(one)) == "1 of 8 devices · one device · 1 micro-batch of 64"
    late = replace(plan, sync=Sync(kind="dasgd", period=4, delay=2))
    assert strategy(late) == "8 replicas · 1 micro-batch of 64 · DaSGD, averaged every 4 steps, merged 2 steps later"
    local = replace(plan, sync=Sync(kind="local_sgd", period=1))
    assert strategy(local) == "8 replicas · 1 micro-batch of 64 · local SGD, averaged every step"


def test_an_axis_is_named_by_what_it_does(plan: Plan) -> None:
    def of(
        *mesh: tuple[str, int], samples: int = 64, uses: dict[str, str] | None = None, spread: str = "", **more: Any
    ) -> str:
        stage = replace(plan.stages[0], mesh=mesh, **more)
        made = replace(plan, stages=(stage,), samples_per_micro_batch=samples)
        return strategy(used(made, expert_axes=(spread,) if spread else (), **uses or {}))

    assert of(("dp", 4), ("tp", 2), batch_axes=("dp", "tp")) == "8 replicas in 4 groups of 2 · 1 micro-batch of 64"
    assert of(("tp", 8), batch_axes=("tp",)) == "8 replicas · 1 micro-batch of 64"
    assert of(("dp", 2), ("cp", 4), batch_axes=("dp", "cp")) == "8 replicas in 2 groups of 4 · 1 micro-batch of 64"
    lost = of(("dp", 2), ("tp", 4), batch_axes=("tp",), uses={"dp": "repeated"})
    assert lost == "4 replicas × all work repeated by 2 · 1 micro-batch of 64"
    some = {"head": {"dp": COLUMNS["fc*"]["tp"]}}
    lost = of(("dp", 2), ("tp", 4), batch_axes=("tp",), uses={"dp": "repeated"}, shardings=some)
    assert lost == "4 replicas × most work repeated by 2, all but head · 1 micro-batch of 64"
    lost = of(("dp", 2), ("tp", 4), batch_axes=("dp", "tp"), uses={"dp": "repeated"})
    assert lost == "4 replicas × most work repeated by 2 · 1 micro-batch of 64"
    # An axis that splits weights is tensor parallelism, whatever it is called, and its operators are no exceptions.
    columns = {"fc*": {"dp": COLUMNS["fc*"]["tp"]}}
    tensor = of(("dp", 4), ("tp", 2), shardings=columns, batch_axes=("dp", "tp"), uses={"dp": "tensor"})
    assert tensor == "2 replicas × tensor parallel 4 · 1 micro-batch of 64"
    assert of(("dp", 8), samples=60) == "8 replicas · 1 micro-batch of 60 · 7 to 8 samples a rank"
    assert of(("dp", 8), samples=6) == "8 replicas · 1 micro-batch of 6 · at most 1 sample a rank, none on some"
    # A rank has what its group has, shared with the others of the group: 127 samples on 8 devices are 15 or 16 each.
    groups = of(("dp", 2), ("ep", 4), batch_axes=("dp", "ep"), samples=127)
    assert groups == "8 replicas in 2 groups of 4 · 1 micro-batch of 127 · 15 to 16 samples a rank"
    lost = of(("ep", 8), batch_axes=(), uses={"ep": "repeated"}, spread="ep")
    assert lost.startswith("experts over 8 × all other work repeated by 8")
    split = {"h.*.experts": {"ep": AxisSharding(inputs=("S(0)",), outputs=("S(0)",))}}
    experts = of(("dp", 2), ("ep", 4), batch_axes=("dp", "ep"), shardings=split, spread="ep")
    assert experts == "8 replicas in 2 groups of 4 × experts over 4 · 1 micro-batch of 64"
    assert of(("dp", 2), ("cp", 4), uses={"cp": "context"}) == "2 replicas × context parallel 4 · 1 micro-batch of 64"
    part = Zero(stage=3, axes=("dp",))
    sharded = of(("dp", 4), ("tp", 2), batch_axes=("dp", "tp"), zero=part)
    assert sharded == "8 replicas in 4 groups of 2 · 1 micro-batch of 64 · ZeRO 3 over 4"


def test_a_plan_that_was_never_priced_is_described_by_its_own_words(plan: Plan) -> None:
    stage = replace(plan.stages[0], mesh=(("dp", 4), ("tp", 2)))
    assert strategy(replace(plan, stages=(stage,), degrees=())) == "dp 4 × tp 2 · 1 micro-batch of 64"


def test_operators_that_go_their_own_way_are_named(plan: Plan) -> None:
    own = {name: {"dp": AxisSharding(inputs=("B", "B"), outputs=("B",))} for name in ("fc1", "fc2", "fc3")}
    split = replace(plan, stages=(replace(plan.stages[0], shardings=own),))
    assert strategy(split) == "8 replicas · 1 micro-batch of 64 · fc1 and 2 more not split by batch, repeated"
    own["fc2"] = {"dp": AxisSharding(inputs=("B", "S(1)"), outputs=("S(1)",))}
    split = replace(plan, stages=(replace(plan.stages[0], shardings=own),))
    assert strategy(split).endswith("fc1 and 2 more not split by batch, 2 of them repeated")


def test_bounds_say_of_which_plans_they_are(plan: Plan) -> None:
    assert plan.estimate is not None and plan.search is not None
    known = replace(plan, search=replace(plan.search, lower_bound_s=0.4))
    assert dict(summary(known))["bound"] == "no plan that this search can decide takes less than 400 ms, 20% less"
    any_plan = replace(plan, search=replace(plan.search, lower_bound_s=plan.estimate.lower_bound_s))
    assert dict(summary(any_plan))["bound"].startswith("no plan of this model on this cluster takes less than 100 ms")
    proven = replace(plan, search=replace(plan.search, proven=True))
    assert dict(summary(proven))["bound"] == "no plan that this search can decide is faster: proven"
    tied = replace(plan, search=replace(plan.search, proven=True, fastest_s=0.49))
    assert dict(summary(tied))["bound"] == "the fastest plan that this search can decide takes 490 ms, 2% less: proven"


def test_a_tie_is_called_one(plan: Plan) -> None:
    assert plan.search is not None
    tied = replace(plan, search=replace(plan.search, fastest_s=0.49, baselines={"dp": 0.495, "expert": 0.6}))
    assert against(tied) == (
        "1.20x the best expert template, as fast as pure data parallelism and the fastest plan found (0.98x, a tie)"
    )
    slower = replace(plan, search=replace(plan.search, found_by="expert", baselines={"expert": 0.5, "yours": 0.4}))
    assert against(slower).endswith("1.00x the best expert template, 0.80x your plan")
    assert dict(summary(slower))["found by"].startswith("the templates in ")


def test_other_plans_stand_beside_the_best_with_their_ties(plan: Plan) -> None:
    assert plan.search is not None
    pipeline = Beside(strategy="pipeline 2", step_time_s=0.49, memory=0.5, tie=True)
    replicas = Beside(strategy="8 replicas", step_time_s=0.505, memory=0.9, tie=True, data_parallel="DDP")
    slow = Beside(strategy="tensor parallel 8", step_time_s=0.75, memory=0.25, tie=False)
    # The fake plan is data parallel itself.
    one = replace(plan, stages=plan.stages * 2, search=replace(plan.search, beside=(pipeline, replicas, slow)))
    assert side_by_side(one) == [
        ("others", "490 ms (−2.0%, a tie), 50% of the memory: pipeline 2"),
        ("", "505 ms (+1.0%, a tie), 90% of the memory: 8 replicas"),
        ("", "750 ms (+50.0%), 25% of the memory: tensor parallel 8"),
        ("simplest", "pure data parallelism is as fast, as far as the estimate can tell: use DDP"),
    ]
    assert one.search is not None
    slower = replace(one, search=replace(one.search, beside=(pipeline, replace(replicas, tie=False))))
    assert [label for label, _ in side_by_side(slower)] == ["others", ""]
    with_target = replace(one, training=replace(one.training, target="megatron-core"))
    assert [label for label, _ in side_by_side(with_target)] == ["others", "", ""]
    assert side_by_side(plan) == [("simplest", "this plan is pure data parallelism: use DDP")]


def test_what_runs_pure_data_parallelism(plan: Plan) -> None:
    (stage,) = plan.stages

    def of(zero: int = 0, *mesh: tuple[str, int], **uses: str) -> str | None:
        own = replace(stage, mesh=mesh or stage.mesh, zero=Zero(stage=zero, axes=("dp",)))
        return data_parallel(used(replace(plan, stages=(own,)), **uses))

    assert [of(zero) for zero in (0, 1, 3)] == ["DDP", "DDP with ZeRO 1", "FSDP"]
    assert of(0, ("dp", 2), ("tp", 4)) is None, "gradients that are reduced inside hosts first are more than DDP does"
    assert of(0, ("tp", 8), tp="tensor") is None
    spread = replace(plan, degrees=(replace(plan.degrees[0], expert=8),))
    assert data_parallel(spread) is None, "DDP keeps all experts on every device"
    assert data_parallel(replace(plan, sync=Sync(kind="local_sgd", period=1))) is None


def test_idle_devices_are_said(plan: Plan) -> None:
    some = replace(plan, stages=(replace(plan.stages[0], devices="0-3", mesh=(("dp", 4),)),))
    some = used(some)
    assert strategy(some) == "4 of 8 devices · 4 replicas · 1 micro-batch of 64"
    text = "4 of 8: more would not make it faster, as far as the estimate can tell"
    assert dict(summary(some))["devices"] == text
    fixed = replace(some, warnings=(f"hints.fix, dp 4, leaves 4 of 8 devices {LEFT_IDLE}",))
    assert dict(summary(fixed))["devices"] == "4 of 8: the degrees in hints.fix leave the others idle"
    target = replace(some, warnings=(f"the target accelerate leaves 4 of 8 devices {LEFT_BY_TARGET}",))
    text = "4 of 8: the target has no plan of this model with this batch on all of them"
    assert dict(summary(target))["devices"] == text


def test_the_summary_has_a_line_for_each_figure_of_a_plan(plan: Plan) -> None:
    lines = dict(summary(plan))
    assert lines["batch"] == "8 samples a device, 64 samples a step"
    assert lines["step"] == "500 ms (between 400 ms and 600 ms)"
    assert "128 samples/s" in lines["speed"]
    assert lines["memory"] == "4.7 of 14.9 GiB (31%) on devices 0-7"
    assert lines["against"] == "2.00x pure data parallelism, 1.20x the best expert template"
    assert "fake" in lines["found by"]
    assert plan.search is not None
    lone = replace(plan, search=replace(plan.search, baselines={"dp": None, "expert": 1.0, "yours": 2.0}))
    text = "pure data parallelism does not fit into memory, 2.00x the best expert template, 4.00x your plan"
    assert against(lone) == text
    small = replace(plan, search=replace(plan.search, baselines={"expert": 1.0}))
    assert against(small).startswith("pure data parallelism is not possible with this batch or these hints, 2.00x")


def test_tables_that_are_split_beside_the_batch_are_named(plan: Plan) -> None:
    """A plan that states what splits the batch, since more operators split their weights."""
    (stage,) = plan.stages
    tables = {f"emb.{i}/Gather": {"tp": AxisSharding(inputs=("S(1)", "B"), outputs=("S(1)",))} for i in range(3)}
    product = {"top/Gemm": {"tp": AxisSharding(inputs=("S(0)", "B"), outputs=("S(0)",))}}
    own = replace(stage, mesh=(("tp", 8),), batch_axes=(), shardings={**product, **tables})
    found = used(replace(plan, stages=(own,)), tp="data")
    assert "emb.0/Gather and 2 more not split by batch" in strategy(found)
    assert data_parallel(found) is None, "its tables do not fit on every device"


@pytest.mark.parametrize(
    ("mfu", "text"), [(0.5662, "56.6%"), (0.001, "0.1%"), (0.00041, "0.041%"), (4.2e-6, "0.00042%")]
)
def test_a_small_share_of_the_peak_is_not_shown_as_none(plan: Plan, mfu: float, text: str) -> None:
    assert plan.estimate is not None
    some = replace(plan, estimate=replace(plan.estimate, mfu=mfu))
    assert dict(summary(some))["speed"].endswith(f"MFU {text}")


@pytest.mark.parametrize(
    ("first_s", "text"),
    [(0.5001, "as fast as this one"), (0.51, "2.0% above this one"), (0.485, "3.0% below this one, a tie")],
)
def test_the_first_plan_is_compared_with_the_one_that_is_returned(plan: Plan, first_s: float, text: str) -> None:
    assert plan.search is not None
    some = replace(plan, search=replace(plan.search, first_s=first_s, first_after_s=0.56))
    assert dict(summary(some))["at first"].split(", ", 1)[1] == f"{text}, after 560 ms"
