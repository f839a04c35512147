"""Activations of a transformer layer against the closed forms of arXiv 2205.05198, Table 2."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from automap.cluster import parse_cluster
from automap.price.estimate import estimate_lowered
from automap.price.evaluator import Evaluator
from automap.price.kernels.records import REDUCE_SCATTER
from automap.price.lowered_plan import LoweredPlan
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures
from automap.verify import verify
from ir import zoo

LENGTH, HIDDEN, HEADS, BATCH = 512, 256, 8, 4
SCORES = 5 * HEADS * LENGTH / HIDDEN


def _megatron(
    tp: int,
    *,
    sequence_parallel: bool,
    recompute: str,
    trainer: str,
    precision: str = "fp16",
    device: str = "A100",
    family: str = "gpt:dropout_percent=10",
) -> tuple[Evaluator, LoweredPlan]:
    """Megatron's plan of four layers on one stage."""
    spec = f"{family},layers=4,hidden={HIDDEN},heads={HEADS},seq_len={LENGTH},vocab_size=1024"
    training = {"global_batch": BATCH, "precision": precision, "trainer": trainer}
    problem = Problem.build(zoo.build(spec), parse_cluster(f"1x{tp}x{device}-80GB"), training)
    evaluator = Evaluator(problem)
    space = PlanSpace(problem, evaluator)
    shape = next(s for s in space.shapes if (s.tp, s.pp, s.num_micro_batches) == (tp, 1, 1))
    prefix = space.even_values(shape, recompute=recompute, zero=0)
    return evaluator, space.lowered(megatron_signatures(space, shape, prefix, sequence_parallel=sequence_parallel))


def _layer_bytes(tp: int, **settings: Any) -> float:
    """Bytes of the third layer, in multiples of sequence x batch x hidden."""
    evaluator, lowered = _megatron(tp, **settings)
    calls, parts = evaluator.distinct_units(lowered)
    middle = max(parts, key=lambda part: int(part.times)).row
    return float(evaluator.unit_costs(lowered, calls)[middle].saved_bytes) / (LENGTH * BATCH * HIDDEN)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "expected"),
    [
        (False, "none", lambda t: 10 + (24 + SCORES) / t),
        (True, "none", lambda t: (34 + SCORES) / t),
        (True, "selective", lambda t: 34 / t),
        (False, "full", lambda t: 2.0),
        (True, "full", lambda t: 2 / t),
    ],
)
def test_a_layer_keeps_what_the_paper_counts(tp, sequence_parallel, recompute, expected):
    found = _layer_bytes(tp, sequence_parallel=sequence_parallel, recompute=recompute, trainer="megatron-lm")
    assert found == pytest.approx(expected(tp))


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize(("family", "counts"), [("gpt:dropout_percent=10", True), ("llama:kv_heads=8", False)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("trainer", ["megatron-lm", "alpa", "generic"])
def test_a_layer_that_runs_again_holds_no_more_than_one_that_does_not(tp, family, counts, sequence_parallel, trainer):
    """While it runs again, a layer holds its input, which it has kept, and all else that it would have kept: together
    what arXiv 2205.05198 counts without recomputation, and not the input for a second time."""
    found = {}
    for recompute in ("none", "full"):
        settings = {"sequence_parallel": sequence_parallel, "trainer": trainer, "family": family}
        evaluator, lowered = _megatron(tp, recompute=recompute, **settings)
        calls, parts = evaluator.distinct_units(lowered)
        middle = max(parts, key=lambda part: int(part.times)).row
        found[recompute] = evaluator.unit_costs(lowered, calls)[middle]
    unit = LENGTH * BATCH * HIDDEN
    together = float(found["full"].saved_bytes + found["full"].live_bytes)
    assert together == pytest.approx(float(found["none"].saved_bytes), rel=1e-12)
    assert float(found["full"].saved_bytes) < together
    if counts and trainer == "megatron-lm":
        kept = (34 + SCORES) / tp if sequence_parallel else 10 + (24 + SCORES) / tp
        assert together / unit == pytest.approx(kept)


def test_only_a_trainer_that_gathers_again_keeps_its_own_part():
    """Two products read a gathered input of two bytes an element."""
    again = _layer_bytes(4, sequence_parallel=True, recompute="none", trainer="megatron-lm")
    whole = _layer_bytes(4, sequence_parallel=True, recompute="none", trainer="alpa")
    assert whole - again == pytest.approx(4 * (1 - 1 / 4))


@pytest.mark.parametrize("tp", [1, 2])
def test_operands_that_were_quantised_are_kept_so(tp):
    """One byte instead of two for the inputs of qkv and of both products of the MLP (1 + 1 + 4 elements of hidden size
    a token); the output of attention is kept in bf16 by attention and quantised by the product behind it."""
    sizes = {
        (trainer, precision): _layer_bytes(
            tp, sequence_parallel=True, recompute="none", trainer=trainer, precision=precision, device="H100"
        )
        for trainer in ("megatron-core", "torchtitan")
        for precision in ("bf16", "fp8")
    }
    assert sizes["megatron-core", "bf16"] == pytest.approx(34 / tp)
    assert sizes["megatron-core", "fp8"] == pytest.approx((34 - 6 + 1) / tp)
    assert sizes["torchtitan", "fp8"] == sizes["torchtitan", "bf16"]


@pytest.mark.parametrize("trainer", ["megatron-lm", "megatron-core", "automap"])
def test_the_first_layer_keeps_its_part_of_the_embedding(trainer):
    """Under full recomputation every layer keeps two bytes of its input, divided over the sequence; the embedding's sum
    is scattered once. AutoMAP's own trainer keeps the sum, and scatters it again."""
    evaluator, lowered = _megatron(
        4, sequence_parallel=True, recompute="full", trainer=trainer, family="llama:kv_heads=4"
    )
    kept, again = [], []
    for _, segment, incoming in evaluator.surroundings(lowered):
        row = evaluator.unit_cost(segment, incoming, lowered.stages[0])
        if len(segment.chosen) > 5:
            kept.append(float(row.saved_bytes) / (LENGTH * BATCH * HIDDEN))
            again.append(float(row.recompute_comm_s[REDUCE_SCATTER]))
    assert kept[0] - kept[1] == pytest.approx(2 - 2 / 4 if trainer == "automap" else 0) and kept[1] == kept[2]
    # Every layer scatters what attention made; the first one of AutoMAP's trainer scatters the embedding's sum as well.
    assert (again[0] > again[1]) == (trainer == "automap") and again[1] == again[2] > 0.0
    plan = replace(to_plan(lowered, evaluator), estimate=estimate_lowered(lowered, evaluator))
    # An independent count, operator by operator, of what each rank holds.
    assert verify(evaluator.problem, plan) == ()
