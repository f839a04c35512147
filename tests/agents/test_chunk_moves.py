"""Units moved between chunks, against the exact price and against all cuts there are."""

import itertools

import numpy as np
import pytest

from agents.planners import chunk_moves
from agents.planners.chunk_moves import (
    FARTHEST,
    MOVES,
    SAFE,
    TOGETHER,
    _descend,
    _run_counts,
    _Steps,
    _together,
    best_cuts,
    moved,
    none_is_empty,
    shifts,
    with_cuts,
)
from agents.planners.pipeline_cuts import cut_anew
from agents.sampling.expert import grid_of
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace


def make(graph, cluster, batch=64, reserve=0, **fixed):
    hints = {"fix": {"tp": 1, "num_micro_batches": 8, **fixed}, "memory_reserve_bytes": reserve}
    training = {"global_batch": batch, "memory_confidence": 0.5}
    return PlanSpace(Problem.build(graph, parse_cluster(cluster), training, hints))


def drawn(space, seed):
    (row,) = space.random_batch(np.random.default_rng(seed), 1).tolist()
    return tuple(row)


def all_cuts(space, values):
    chunks = space.shape(values).num_chunks
    return np.array(list(itertools.combinations(range(1, space.num_units), chunks - 1)))


def exact(space, values, cuts):
    return space.price(np.array([with_cuts(space, values, ends) for ends in cuts.tolist()]))


def test_shifts_take_one_unit_from_a_chunk_and_give_it_to_another():
    ends, units = np.array([2, 3, 6]), 9
    found = shifts(ends, units)

    def lengths(of):
        return np.diff([0, *of, units])

    before, changes = lengths(ends), set()
    for row in found.tolist():
        assert lengths(row).min() > 0
        changes.add(tuple((lengths(row) - before).tolist()))
    # Chunk 1 has one unit and can give none.
    wanted = {(give, take) for give, take in itertools.permutations(range(4), 2) if give != 1}
    assert len(changes) == len(found) == len(wanted)
    assert {(change.index(-1), change.index(1)) for change in changes} == wanted


@pytest.mark.parametrize(("chunks", "is_any"), [(48, True), (51, True), (100, False), (400, False)])
def test_units_move_between_any_two_of_few_chunks_and_near_ones_of_many(chunks, is_any):
    units = 2 * chunks
    found = shifts(np.arange(2, units, 2), units)
    lengths = np.diff(found, axis=1, prepend=0, append=units)
    apart = np.abs(lengths.argmin(axis=1) - lengths.argmax(axis=1))
    assert (len(found) == chunks * (chunks - 1)) == is_any
    assert len({*map(tuple, found.tolist())}) == len(found)
    assert len(found) <= max(MOVES, 2 * FARTHEST * chunks)
    assert apart.max() >= min(chunks - 1, FARTHEST)


def test_moves_of_unlike_chunks_are_made_at_once():
    units, rng = 40, np.random.default_rng(0)
    for _ in range(20):
        ends = np.sort(rng.permutation(np.arange(1, units))[:11])
        changed = rng.permutation(shifts(ends, units))
        found = _together(ends, changed, units)
        assert none_is_empty(found, units).all() and found[0].tolist() == changed[0].tolist()
        of_chunks = np.diff(found - ends, axis=1, prepend=0, append=0)
        # Each has the moves of the one before it and one more, which takes a unit from one chunk for another.
        assert (np.abs(of_chunks) <= 1).all() and (of_chunks.sum(axis=1) == 0).all()
        counts = np.abs(of_chunks).sum(axis=1).tolist()
        assert counts[:2] == [2, 2] and counts == sorted(counts) and 2 < counts[-1] <= 2 * TOGETHER


def test_moves_that_did_not_gain_are_seldom_tried_again():
    """Chunks of one unit each but for two long ones, which are as long as time: units move away from these."""
    units, tried = 80, []

    class Steps:
        def ranks(self, ends):
            tried.append(len(ends))
            return np.diff(ends, axis=1, prepend=0, append=units).astype(float), np.zeros(len(ends))

    begin = np.sort([*range(2, 40), 60])
    (_, seconds), ends = _descend(Steps(), begin, units)
    assert seconds == np.diff(ends, prepend=0, append=units).max() < np.diff(begin, prepend=0, append=units).max()
    of_all = len(shifts(begin, units))
    assert sum(count > of_all // 2 for count in tried) < len(tried) / 2


def test_moves_end_no_slower_than_they_begin():
    """The norm over ranks, which is minimised first, leads away from the fastest cut, farther than two units."""
    steps = {5: [1.0] * 8, 6: [1.03] * 2 + [0.5] * 6, 7: [1.02] + [0.5] * 7, 8: [1.01] + [0.5] * 7}

    class Steps:
        def ranks(self, ends):
            seconds = [steps.get(end, [2.0] * 8) for (end,) in ends.tolist()]
            return np.array(seconds), np.zeros(len(ends))

    for begin in (5, 6, 7, 8):
        (overflow, seconds), ends = _descend(Steps(), np.array([begin]), 12)
        assert (overflow, seconds) == (0.0, max(steps[int(ends[0])]))
        assert seconds <= max(steps[begin])


@pytest.mark.parametrize(
    ("cluster", "fixed"),
    [
        ("1x4xA100", {"pp": 2, "virtual_stages": 2}),
        ("2x2xV100@10Gbit", {"pp": 2, "virtual_stages": 3, "zero": 1}),
        ("4x1xV100@10Gbit", {"pp": 4, "virtual_stages": 1}),
        ("2xV100-16GB+2xP100-16GB", {"pp": 2, "virtual_stages": 2}),
    ],
)
def test_steps_with_other_cuts_are_the_exact_price(gpt, cluster, fixed):
    """Nearly: a tied parameter may come to other ranks."""
    space, rng = make(gpt(layers=7), cluster, **fixed), np.random.default_rng(0)
    templates = grid_of(space)[0].tolist()
    assert templates
    for values in templates[:4]:
        cuts = rng.permutation(all_cuts(space, values))[:20]
        seconds, _ = _Steps(space, values).ranks(cuts)
        np.testing.assert_allclose(seconds.max(axis=1), exact(space, values, cuts)[:, 0], rtol=0.002)


@pytest.mark.parametrize(
    "fixed", [{"virtual_stages": 1, "schedule": "1f1b"}, {"virtual_stages": 2}, {"schedule": "gpipe"}]
)
def test_long_schedules_continue_as_a_straight_line(gpt, fixed):
    """512 micro-batches are not run, and still the best cut is known, and the times of most are exact."""
    space = make(gpt(layers=7), "4x1xV100@10Gbit", batch=1024, pp=4, num_micro_batches=512, **fixed)
    values = tuple(grid_of(space)[0][0].tolist())
    cuts = np.random.default_rng(0).permutation(all_cuts(space, values))[:20]
    steps, exact_prices = _Steps(space, values), exact(space, values, cuts)
    (_, _, pipeline) = steps._views[0]
    counts, weights = _run_counts(pipeline)
    assert max(counts) < 100 and np.isclose(np.dot(counts, weights), 512)
    found = steps.ranks(cuts)[0].max(axis=1)
    assert exact_prices[found.argmin(), 0] <= 1.001 * exact_prices[:, 0].min()
    off = np.abs(found / exact_prices[:, 0] - 1.0)
    assert np.median(off) < 1e-9 and off.max() < 0.02


def test_memory_with_other_cuts_is_the_exact_one(gpt):
    graph = gpt(layers=8, hidden=128, seq=128)
    space = make(graph, "2xA100-40GB", reserve=42_949_000_000, pp=2, virtual_stages=2)
    values = grid_of(space)[0][0].tolist()
    cuts = all_cuts(space, values)
    prices, (_, overflow) = exact(space, values, cuts), _Steps(space, values).ranks(cuts)
    # Of two ranks the fuller one overflows by so much, and both together by twice as much at most.
    worst = np.maximum(prices[:, 1], 0.0)
    assert worst.max() > 0.0
    assert (overflow >= worst).all() and (overflow <= 2.0 * (worst + SAFE)).all()


def test_units_move_to_nearly_the_best_of_all_cuts(gpt):
    """The embedding and the loss weigh as much as blocks, so that even chunks are far from the best."""
    space = make(gpt(layers=8, hidden=128, seq=128), "2x2xV100@10Gbit", pp=2, virtual_stages=2)
    gained = []
    for seed in range(5):
        values = drawn(space, seed)
        prices = exact(space, values, all_cuts(space, values))
        (before, _), (after, _) = space.price(np.array([values, moved(space, values)]))
        assert after <= before and after <= 1.01 * prices[prices[:, 1] <= 0.0, 0].min()
        gained.append(before / after)
    assert max(gained) > 1.05


def test_units_move_where_memory_is_short(gpt):
    """A tenth of all cuts fits, and the plan at hand does not."""
    graph = gpt(layers=8, hidden=128, seq=128)
    roomy = make(graph, "2xA100-40GB", pp=2, virtual_stages=2)
    values = grid_of(roomy)[0][0].tolist()
    prices = exact(roomy, values, all_cuts(roomy, values))
    capacity = roomy.evaluator.layout((1, 1), 2).stages[0].capacity
    used = (1.0 + prices[:, 1]) * capacity
    space = make(graph, "2xA100-40GB", reserve=int(capacity - np.quantile(used, 0.1)), pp=2, virtual_stages=2)
    prices = exact(space, values, all_cuts(space, values))
    fitting = prices[prices[:, 1] <= 0.0, 0]
    assert 0 < len(fitting) < 0.2 * len(prices)
    lopsided = with_cuts(space, values, [space.num_units - 3, space.num_units - 2, space.num_units - 1])
    (found,) = cut_anew(space, lopsided)
    (_, before), (after_s, after) = space.price(np.array([lopsided, found]))
    assert before > 0.0 >= after
    assert after_s <= 1.05 * fitting.min()


def test_the_best_cuts_are_the_best_of_all(gpt, monkeypatch):
    space = make(gpt(layers=7), "4x1xV100@10Gbit", pp=4, virtual_stages=1)
    values = tuple(grid_of(space)[0][0].tolist())
    cuts = all_cuts(space, values)
    prices = exact(space, values, cuts)
    found = best_cuts(space, values, 6)
    assert len(set(found)) == 6 and values not in found
    mine = space.price(np.array(found))
    others = cuts.tolist().index(space.cuts(values, 3))
    seconds = np.sort(np.delete(prices[:, 0], others))
    np.testing.assert_allclose(mine[:, 0], seconds[:6], rtol=0.002)
    # Of longer pipelines those in which two units move.
    monkeypatch.setattr(chunk_moves, "ALL_CUTS", 0)
    for near in best_cuts(space, values, 6):
        ends, other = np.array(space.cuts(near, 3)), np.array(space.cuts(values, 3))
        assert near != values and np.abs(ends - other).max() <= 2
        assert space.repair(near) == near


def test_only_cuts_change_and_stay_legal(gpt):
    space = make(gpt(layers=7), "1x4xA100", pp=2, virtual_stages=2)
    lopsided = list(drawn(space, 0))
    lopsided[space.first.cut : space.first.cut + 3] = [4, 0, 0]
    values, first = space.repair(lopsided), space.first
    found = moved(space, values)
    assert space.repair(found) == found
    changed = {at for at, (a, b) in enumerate(zip(values, found, strict=True)) if a != b}
    assert changed and changed <= set(range(first.cut, first.recompute))
    assert moved(space, found) == found


def test_one_stage_stays(mlp):
    space = PlanSpace(Problem.build(mlp(), parse_cluster("2xA100"), {"global_batch": 8}, {"fix": {"pp": 1}}))
    values = drawn(space, 0)
    assert moved(space, values) == values
