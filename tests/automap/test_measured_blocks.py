"""Times of whole blocks that the user measured, in place of the modelled ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from automap.bounds.partial_plans import BoundTable, PartialPlan
from automap.cluster import parse_cluster
from automap.errors import ProblemError
from automap.price.estimate import estimate_lowered, lower_bound_s
from automap.price.evaluator import Evaluator
from automap.price.explain import reasons
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.templates import templates
from ir import zoo
from ir.factors import whole_signature
from ir.graph import Graph

LAYERS, BATCH = 4, 16
BLOCK = {"scope": "h.*", "tp": 2, "samples": 4, "forward_s": 0.5, "backward_s": 1.25}


@pytest.fixture(scope="module")
def graph() -> Graph:
    return zoo.build(f"gpt:layers={LAYERS},hidden=256,heads=4,seq_len=128,vocab_size=512")


def problem_of(graph: Graph, *blocks: dict[str, Any], cluster: str = "1x4xA100") -> Problem:
    return Problem.build(graph, parse_cluster(cluster), {"global_batch": BATCH}, {"measured_blocks": list(blocks)})


def compute_s(graph: Graph, *blocks: dict[str, Any], **stated: Any) -> float:
    evaluator = Evaluator(problem_of(graph, *blocks))
    lowered = hand_made(evaluator, Strategy(**stated))
    return float(evaluator.evaluate(lowered).ranks[0]["compute_s"])


@pytest.mark.parametrize(("recompute", "again"), [("none", 0.0), ("full", 0.5)])
def test_plans_with_that_tp_and_micro_batch_take_the_measured_time(graph: Graph, recompute: str, again: float) -> None:
    """dp 2, tp 2, two micro-batches of four samples a replica: the blocks take 0.5 s + 1.25 s, or 0.5 s more."""
    stated = {"tp": 2, "micro_batch": 4, "recompute": recompute}
    one, other = (compute_s(graph, BLOCK | {"forward_s": f, "backward_s": 1.25}, **stated) for f in (0.5, 0.75))
    each = 2.0 if recompute == "full" else 1.0
    assert other - one == pytest.approx(2 * LAYERS * 0.25 * each, rel=1e-9)
    modelled = compute_s(graph, **stated)
    # Embedding and head are priced as ever; they and their share of the model are less than all of it.
    rest = one - 2 * LAYERS * (0.5 + 1.25 + again)
    assert 0.0 < rest < modelled


@pytest.mark.parametrize(
    "stated",
    [
        {"tp": 2, "micro_batch": 2},
        {"tp": 2, "micro_batch": 8},
        {"tp": 4, "micro_batch": 4},
        {"tp": 1, "micro_batch": 4},
        {"tp": 2, "cp": 2, "micro_batch": 4},
    ],
)
def test_other_plans_are_priced_as_ever(graph: Graph, stated: dict[str, Any]) -> None:
    assert compute_s(graph, BLOCK, **stated) == compute_s(graph, **stated)


def test_a_plan_that_does_not_divide_the_blocks_is_priced_as_ever(graph: Graph) -> None:
    """The axis is there, but its ranks all do the same: nobody measured that."""
    plain, measured = (PlanSpace(problem_of(graph, *blocks)) for blocks in ((), (BLOCK,)))
    values = next(list(v) for s, v in templates(plain) if (s.pp, s.tp, s.dp, s.num_micro_batches) == (1, 2, 2, 2))
    divided = [s.evaluator.evaluate(s.lowered(values)).step_time_s for s in (plain, measured)]
    assert divided[0] != divided[1]
    for position, slot in enumerate(plain.slots):
        if slot.kind == "signature" and slot.index == 1:
            unit = plain.linkage.types[slot.unit_type]
            values[position] = whole_signature(unit.signatures[unit.groups[slot.group].leader])
    values = list(plain.repair(values))
    one, other = (s.evaluator.evaluate(s.lowered(values)).step_time_s for s in (plain, measured))
    assert one == other


def test_slower_blocks_make_slower_steps(graph: Graph) -> None:
    seconds = [1e-5, 1e-3, 0.1, 10.0]
    for name in ("forward_s", "backward_s"):
        found = [compute_s(graph, BLOCK | {name: s}, tp=2, micro_batch=4) for s in seconds]
        assert found == sorted(found)
        assert len(set(found)) == len(found)


def test_bounds_of_beginnings_hold_and_all_ways_of_pricing_agree(graph: Graph) -> None:
    """Far faster and far slower than modelled: no beginning of a plan promises more than its end takes."""
    rng = np.random.default_rng(0)
    for factor in (1e-4, 10.0):
        block = BLOCK | {"forward_s": 0.001 * factor, "backward_s": 0.002 * factor}
        space = PlanSpace(problem_of(graph, block))
        bound, table = lower_bound_s(space.problem), BoundTable(space)
        chosen = [v for s, v in templates(space) if (s.tp, s.dp, s.num_micro_batches) == (2, 2, 2)][:4]
        for values in (*chosen, *(space.random(rng) for _ in range(6))):
            exact = space.evaluator.evaluate(space.lowered(values)).step_time_s
            assert space.price(np.array([values]))[0, 0] == exact
            assert exact >= bound
            prefix = PartialPlan(space, table)
            while not prefix.done:
                assert prefix.bound.time_s <= exact * (1 + 1e-9)
                prefix.decide(values[prefix.position])
            assert prefix.bound.time_s == exact


def test_why_names_measured_blocks(graph: Graph) -> None:
    evaluator = Evaluator(problem_of(graph, BLOCK))
    lowered = hand_made(evaluator, Strategy(tp=2, micro_batch=4))
    first = reasons(lowered, evaluator, evaluator.evaluate(lowered))[0]
    assert "measured blocks 14 s" in first
    assert "whole blocks 100%" in first


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tp": 0}, "tp"),
        ({"samples": 0}, "samples"),
        ({"forward_s": 0.0}, "forward_s"),
        ({"backward_s": float("nan")}, "backward_s"),
        ({"scope": "nowhere"}, "scope"),
        ({"scope": "h.1"}, "scope"),
        ({"scope": "h.*.mlp.c_fc"}, "scope"),
        ({"scope": "**"}, "scope"),
    ],
)
def test_bad_blocks_are_refused_by_name(graph: Graph, changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Evaluator(problem_of(graph, BLOCK | changes))
    assert caught.value.field == f"hints.measured_blocks[0].{field}"
    assert caught.value.repair


def test_the_same_measurement_twice_is_refused(graph: Graph) -> None:
    with pytest.raises(ProblemError, match="measured twice"):
        problem_of(graph, BLOCK, BLOCK)


def test_estimates_are_of_the_same_floats(graph: Graph) -> None:
    evaluator = Evaluator(problem_of(graph, BLOCK))
    lowered = hand_made(evaluator, Strategy(tp=2, micro_batch=4))
    assert estimate_lowered(lowered, evaluator).step_time_s == evaluator.evaluate(lowered).step_time_s
