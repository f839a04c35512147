"""Neighbours of plans against the space's own masks, and against what each kind of move promises."""

import numpy as np
import pytest

from automap.problem import Problem
from automap.space.kernels import cuts
from automap.space.kernels import neighbours as moves
from automap.space.space import PlanSpace

CASES = [
    ("gpt", "2x4xA100", 16, {}, {}),
    ("gpt", "4xV100-16GB+4xP100", 8, {"virtual_stages": 1}, {}),
    ("gpt", "4xV100-16GB+4xP100", 64, {"pp": 4}, {}),
    ("gpt", "2x4xA100", 16, {"zero": 1, "recompute": "full"}, {}),
    ("squeezenet", "2x2xA100", 8, {}, {}),
    ("gpt", "4xA100", 8, {}, {"constraints": [{"scope": "h.1.*", "stage": 1}, {"scope": "h.0.*", "recompute": True}]}),
]


def spaces(gpt, light_graph, case):
    from automap.cluster import parse_cluster

    name, cluster, batch, fix, hints = case
    graph = gpt(layers=4) if name == "gpt" else light_graph(name)
    problem = Problem.build(graph, parse_cluster(cluster), {"global_batch": batch}, {"fix": fix, **hints})
    return PlanSpace(problem)


def only(kind):
    return [float(k == kind) for k in range(moves.M_COUNT)]


def ends(space, values):
    return space.cuts(values, space.shape(values).num_chunks - 1)


@pytest.mark.parametrize("case", CASES)
def test_neighbours_are_legal_and_differ(gpt, light_graph, case):
    s = spaces(gpt, light_graph, case)
    rng = np.random.default_rng(0)
    values = s.random_batch(rng, 40)
    donors = s.random_batch(rng, 8)
    for kind in range(moves.M_COUNT):
        moved = s.neighbours(rng, values, donors, only(kind))
        for row in moved.tolist():
            assert s.repair(row) == tuple(row)
    moved = s.neighbours(rng, values, donors)
    assert (moved != values).any(axis=1).mean() > 0.9


def test_one_decision_changes_alone(gpt, space):
    s = space(gpt(layers=4), "2x2xA100", 8)
    rng = np.random.default_rng(1)
    values = s.random_batch(rng, 300)
    moved = s.neighbours(rng, values, values[:1], only(moves.M_ONE))
    for old, new in zip(values.tolist(), moved.tolist(), strict=True):
        assert s.shape(old) == s.shape(new)
        stage = slice(s.first.schedule, s.first.cut)
        if old[stage] != new[stage]:
            # What follows from another number of devices is repaired.
            assert (
                sum(a != b for a, b in zip(old[stage], new[stage], strict=True)) == 1
                or old[stage][:2] == new[stage][:2]
            )
            continue
        apart = sum(a != b for a, b in zip(ends(s, old), ends(s, new), strict=True))
        rest = sum(a != b for a, b in zip(old[s.first.recompute :], new[s.first.recompute :], strict=True))
        assert apart + rest <= 1 or (apart == 0 and rest <= len(s.axes))


def test_devices_go_from_one_stage_to_another(gpt, space):
    s = space(gpt(layers=12), "8xA100", 64, pp=2, virtual_stages=1)
    rng = np.random.default_rng(2)
    values = s.random_batch(rng, 200)
    values[:, s.first.schedule + 2 : s.first.cut] = 0
    values = np.array([s.repair(row) for row in values.tolist()])
    moved = s.neighbours(rng, values, values[:1], only(moves.M_DEVICES))
    seen = {s.stage_devices(row) for row in moved.tolist()}
    assert {(3, 5), (5, 3)} <= seen
    assert all(sum(devices) == 8 for devices in seen)


def test_shifted_ends_leave_the_others_in_place(gpt, space):
    s = space(gpt(layers=24), "4xA100", 8, pp=4, virtual_stages=1)
    rng = np.random.default_rng(2)
    values = s.random_batch(rng, 200)
    values[:, s.first.cut : s.first.recompute] = 0
    moved = s.neighbours(rng, values, values[:1], only(moves.M_SHIFT))
    steps = set()
    for old, new in zip(values.tolist(), moved.tolist(), strict=True):
        assert old[s.first.recompute :] == new[s.first.recompute :]
        apart = [b - a for a, b in zip(ends(s, old), ends(s, new), strict=True) if a != b]
        assert len(apart) == 1
        steps |= {abs(a) for a in apart}
    assert steps == {1, 2}


@pytest.mark.parametrize("seed", range(3))
def test_cut_number_is_the_inverse_of_nth_cut(seed, monkeypatch):
    # Kernels of other kernels have no entry from Python: their source runs as it stands.
    for name in ("_near", "_target", "_is_left"):
        monkeypatch.setattr(cuts, name, getattr(cuts, name).py_func)
    nth_cut, cut_number = cuts.nth_cut.py_func, cuts.cut_number.py_func
    rng = np.random.default_rng(seed)
    weight = np.concatenate([[0.0], np.cumsum(rng.integers(1, 4, 20).astype(float))])
    for start in range(15):
        for left in range(2, 5):
            low, high = start + 1, 20 - left + 1
            ends = [nth_cut(weight, start, low, high, left, number) for number in range(max(0, high - low + 1))]
            assert sorted(ends) == list(range(low, high + 1))
            assert [cut_number(weight, start, low, high, left, end) for end in ends] == list(range(len(ends)))


def test_the_same_seed_gives_the_same_neighbours(gpt, space):
    s = space(gpt(), "2x2xA100", 8)
    values = s.random_batch(np.random.default_rng(0), 20)
    one, two = (s.neighbours(np.random.default_rng(5), values, values[:3]) for _ in range(2))
    assert np.array_equal(one, two)
    # One plan's neighbour does not depend on how many are asked for.
    assert np.array_equal(s.neighbours(np.random.default_rng(5), values[:7], values[:3]), one[:7])


def test_every_plan_of_a_small_space_can_be_reached(mlp, space):
    s = space(mlp((64, 128, 64)), "2xA100", 4, num_micro_batches=2, recompute="none", zero=0)
    pending, every = [()], set()
    while pending:
        prefix = pending.pop()
        if len(prefix) == len(s.slots):
            every.add(prefix)
            continue
        pending += [(*prefix, int(v)) for v in np.flatnonzero(s.legal(prefix))]
    rng = np.random.default_rng(0)
    reached = {s.random(rng)}
    # A donor of each shape: shapes are borrowed.
    donors = np.array(list({v[: s.first.cut]: v for v in sorted(every)}.values()))
    for _ in range(60):
        rows = np.array(sorted(reached))
        for _ in range(4):
            reached |= {tuple(row) for row in s.neighbours(rng, rows, donors).tolist()}
    assert reached == every
