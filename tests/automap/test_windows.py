"""Windows of attention in the price: what kernels read against masks written down with numpy, and who skips it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from small_graphs import build_gpt

from automap.bounds.partial_plans import BoundTable, PartialPlan
from automap.bounds.priced_templates import priced_templates
from automap.cluster import parse_cluster
from automap.cost_graph.families import families
from automap.cost_graph.family_bounds import FamilyBounds
from automap.price.curves import attention_curve
from automap.price.estimate import estimate_lowered, lower_bound_s
from automap.price.evaluator import Evaluator
from automap.price.explain import reasons
from automap.price.kernels.attention import (
    ALL_KEYS,
    BLOCK,
    EARLIER_KEYS,
    AttentionShape,
    Visible,
    attention_s,
)
from automap.price.kernels.records import ATTENTION
from automap.price.visible_keys import has_ring, visible_keys, visible_shares
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from automap.trainers import trainers

FULL = (9999, 9999)
CAUSAL = (9999, 0)
SKIPS, DOES_NOT = "megatron-core", "ddp"


def problem_of(windows: list[tuple[int, int]], trainer: str = SKIPS, cluster: str = "4xA100", **sizes: int) -> Problem:
    sizes = {"seq": 2048, "layers": len(windows), **sizes}
    graph = build_gpt(windows=windows, **sizes)
    return Problem.build(graph, parse_cluster(cluster), {"global_batch": 8, "trainer": trainer})


def found(windows: list[tuple[int, int]], trainer: str = SKIPS, **sizes: int) -> list[Visible]:
    return list(visible_keys(problem_of(windows, trainer, **sizes)).values())


def step_s(problem: Problem, **stated: Any) -> float:
    evaluator = Evaluator(problem)
    return estimate_lowered(hand_made(evaluator, Strategy(**stated)), evaluator).step_time_s


def written_down(window: tuple[int, int], length: int) -> np.ndarray:
    ahead = np.arange(length) - np.arange(length)[:, None]
    return (ahead >= -window[0]) & (ahead <= window[1])


@pytest.mark.parametrize("length", [640, 2048])
@pytest.mark.parametrize("window", [(63, 0), (511, 0), (64, 64), (300, 20), (600, 0), (0, 0)])
def test_what_is_read_is_what_the_mask_shows(window: tuple[int, int], length: int) -> None:
    (visible,) = found([window], seq=length)
    mask = written_down(window, length)
    hidden = np.pad(~mask, ((0, 0), (1, 1)))
    # Where what is seen begins or ends in the middle of the keys.
    edges = (hidden[:, 1:] != hidden[:, :-1]).sum(axis=1) - hidden[:, 1] - hidden[:, -2]
    counted = mask.sum(axis=1) - 0.5 * edges
    assert visible.edges == pytest.approx(edges.mean())
    assert visible.share == pytest.approx(counted.mean() / length)
    assert visible.widest == pytest.approx(counted.max() / length)
    # Keys that any query of a block sees: what the kernel reads, to the key.
    blocks = mask.reshape(-1, int(BLOCK), length).any(axis=1).sum(axis=1)
    assert visible.share * length + visible.edges * BLOCK / 2 == pytest.approx(blocks.mean(), rel=0.05)


def test_masks_without_a_window_are_what_they_were() -> None:
    for trainer in trainers():
        assert found([FULL, CAUSAL], trainer) == [ALL_KEYS, EARLIER_KEYS]
    # A window as long as the samples hides what a causal mask hides.
    assert found([(2047, 0), (2047, 2047)]) == [EARLIER_KEYS, ALL_KEYS]
    assert found([(2046, 0)])[0].share == pytest.approx(0.5, rel=1e-3)


def test_the_kernel_is_the_formula() -> None:
    device = parse_cluster("1xA100").device(0)
    curve = attention_curve(device, "bf16", rate=1.0, portable=False)
    (visible,) = found([(511, 0)], seq=8192)

    def seconds(visible: Visible, backward: bool) -> float:
        return float(
            attention_s(AttentionShape(2.0, 8.0, 8.0, 8192.0, 8192.0, 64.0, 64.0, visible, 2.0), curve, backward)
        )

    small = float(curve.small_head)
    blocks, depth = 2 * 8 * math.ceil(8192 / BLOCK), (64 + small) * 128 / (128 + small)
    rate = curve.flops_per_s / curve.multiprocessors
    mean = 4 * BLOCK * depth * (visible.share * 8192 + visible.edges * BLOCK / 2)
    longest = 4 * BLOCK * depth * (511.5 + BLOCK)  # the first query that sees 512 keys
    for backward, more in ((False, 1.0), (True, float(curve.backward))):
        work = more * (blocks / curve.multiprocessors * mean + curve.tail * longest) / rate
        moved = (2.5 if backward else 1.0) * 2 * 2 * 64 * 2 * 8 * 8192 * 2.0 / curve.bytes_per_s
        assert seconds(visible, backward) == pytest.approx(curve.floor_s + work + moved)
        narrow, wide = (seconds(v, backward) for v in found([(255, 0), (1023, 0)], seq=8192))
        causal, whole = seconds(EARLIER_KEYS, backward), seconds(ALL_KEYS, backward)
        assert narrow < seconds(visible, backward) < wide < causal < whole


STRATEGIES: list[dict[str, Any]] = [
    {}, {"tp": 2}, {"tp": 4, "sequence_parallel": True}, {"cp": 2}, {"cp": 4}, {"pp": 2, "recompute": "full"},
    {"zero": 1, "tp": 2, "recompute": "selective"},
]  # fmt: skip


@pytest.mark.parametrize("stated", STRATEGIES, ids=str)
def test_a_window_saves_time_where_the_kernel_skips_it(stated: dict[str, Any]) -> None:
    causal, window, full, both = (
        [step_s(problem_of([w] * 4, trainer), **stated) for trainer in (SKIPS, DOES_NOT)]
        for w in (CAUSAL, (127, 0), FULL, (127, 127))
    )
    assert window[0] < causal[0] and both[0] < full[0]
    assert window[1] == causal[1] and both[1] == full[1]


@pytest.mark.parametrize("trainer", [name for name, trainer in trainers().items() if not trainer.skips_windows])
def test_trainers_that_do_not_skip_price_windows_alike(trainer: str) -> None:
    prices = [step_s(problem_of([w, w], trainer)) for w in (CAUSAL, (127, 0))]
    assert prices[0] == prices[1]
    assert lower_bound_s(problem_of([(127, 0)] * 2, trainer)) == lower_bound_s(problem_of([CAUSAL] * 2, trainer))


def test_a_kernel_that_skips_windows_gathers_what_a_ring_would_carry() -> None:
    """Transformer Engine has no ring there: the transfers are no longer hidden."""
    for window, rings in ((CAUSAL, True), (FULL, True), ((4000, 0), True), ((127, 0), False), ((127, 127), False)):
        problem = problem_of([CAUSAL, window])
        assert has_ring(problem) == rings
        evaluator = Evaluator(problem)
        lowered = hand_made(evaluator, Strategy(cp=4))
        assert lowered.layout.stages[0].hardware.ring == rings
    assert not has_ring(problem_of([CAUSAL], DOES_NOT))


def test_layers_of_one_type_cost_their_mean() -> None:
    """Gemma's layers take turns; they are units of one type, whose kernels are priced once."""
    turns = problem_of([(127, 0), CAUSAL] * 2)
    tables = Evaluator(turns).tables.arrays
    (row,) = [row for row in tables.kernels if row["kind"] == ATTENTION]
    window, causal, *_ = visible_keys(turns).values()
    assert causal == EARLIER_KEYS
    assert row["visible_share"] == pytest.approx((window.share + causal.share) / 2)
    assert row["visible_edges"] == pytest.approx((window.edges + causal.edges) / 2)
    steps = [step_s(problem_of([w] * 4)) for w in ((127, 0), CAUSAL)]
    assert step_s(turns) == pytest.approx(sum(steps) / 2, rel=0.01)


def test_its_arithmetic_is_what_is_explained() -> None:
    """Pairs that are skipped are no arithmetic: the kernel seems no faster than it can be."""
    for window in ((127, 0), (1023, 1023)):
        problem = problem_of([window] * 4, seq=8192, hidden=512)
        evaluator = Evaluator(problem)
        lowered = hand_made(evaluator, Strategy())
        (text,) = [r for r in reasons(lowered, evaluator, evaluator.evaluate(lowered)) if "fused attention" in r]
        tail = text.split("fused attention")[1]
        reached, large = (float(part.split("%")[0].split()[-1]) for part in tail.split("%")[:2])
        assert 0.0 < reached <= large
        shares = visible_shares(problem)
        assert sum(share < 0.5 for share in shares.values()) == len(shares)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("windows", "cluster"),
    [
        ([(15, 0)] * 3, "4xA100"),
        ([(7, 7), FULL, FULL], "2x2xV100@25Gbit"),
        ([(63, 0), CAUSAL, (63, 0)], "4xA100"),
    ],
)
def test_no_plan_is_faster_than_its_bounds(windows: list[tuple[int, int]], cluster: str) -> None:
    s = PlanSpace(problem_of(windows, cluster=cluster, seq=512, hidden=32))
    table, rng = BoundTable(s), np.random.default_rng(3)
    least = lower_bound_s(s.problem)
    for _ in range(12):
        values = s.random(rng)
        seconds = s.evaluator.evaluate(s.lowered(values)).step_time_s
        prefix = PartialPlan(s, table)
        while not prefix.done:
            assert prefix.bound.time_s <= seconds * (1 + 1e-12)
            prefix.decide(values[prefix.position])
        assert least <= seconds
    bounds = FamilyBounds(s)
    plans = np.concatenate([s.random_batch(rng, 40), priced_templates(s)[0][::5]])
    prices = s.price(plans)[:, 0]
    of_shape = {}
    for family in families(s, s.shapes):
        bound = bounds.bound(family, np.inf)
        for shape in family.shapes:
            of_shape[shape] = min(of_shape.get(shape, np.inf), bound)
    assert all(of_shape[s.shape(v)] <= p * (1 + 1e-9) for v, p in zip(plans.tolist(), prices.tolist(), strict=True))
