import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automap.price.schedule import KINDS, rank_order, run_schedule


def run(kind, pp, m, forward, backward, send=None, kept=None):
    chunks = len(forward)
    ends, busy, peak = np.zeros(pp), np.zeros(pp), np.zeros(pp)
    run_schedule(
        KINDS[kind],
        pp,
        m,
        np.array(forward, float),
        np.array(backward, float),
        np.zeros(chunks) if send is None else np.array(send, float),
        np.ones(chunks) if kept is None else np.array(kept, float),
        ends,
        busy,
        peak,
    )
    return ends, busy, peak


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 8, 24])
@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_uniform_stages_meet_the_closed_form(kind, pp, m):
    ends, _, peak = run(kind, pp, m, [1.0] * pp, [2.0] * pp)
    assert ends.max() == pytest.approx((m + pp - 1) * 3.0)
    in_flight = [m] * pp if kind == "gpipe" else [min(m, pp - r) for r in range(pp)]
    assert peak.tolist() == in_flight


@pytest.mark.parametrize(("pp", "v"), [(2, 2), (4, 2), (4, 4), (8, 3)])
@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_interleaving_divides_the_bubble_by_the_virtual_stages(pp, v, rounds):
    m = pp * rounds
    ends, busy, _ = run("interleaved", pp, m, [1.0 / v] * (pp * v), [2.0 / v] * (pp * v))
    assert ends.max() == pytest.approx(3.0 * m + 3.0 * (pp - 1) / v)
    assert busy == pytest.approx(np.full(pp, 3.0 * m))


@pytest.mark.parametrize(("kind", "pp", "v", "m"), [("gpipe", 3, 1, 5), ("1f1b", 4, 1, 7), ("interleaved", 4, 3, 8)])
def test_orders_hold_every_action_once_and_forward_first(kind, pp, v, m):
    for rank in range(pp):
        order = np.zeros((2 * v * m, 3), np.int64)
        rank_order(KINDS[kind], rank, pp, pp * v, m, order)
        actions = [tuple(map(int, row)) for row in order]
        chunks = [rank + pp * i for i in range(v)]
        assert sorted(actions) == sorted((b, c, j) for b in (0, 1) for c in chunks for j in range(m))
        for c in chunks:
            for j in range(m):
                assert actions.index((0, c, j)) < actions.index((1, c, j))


def longest_path(kind, pp, m, forward, backward, send):
    """The step as a longest path, by relaxation until nothing moves: an oracle that shares no code."""
    chunks = len(forward)
    v = chunks // pp
    orders = []
    for rank in range(pp):
        order = np.zeros((2 * v * m, 3), np.int64)
        rank_order(KINDS[kind], rank, pp, chunks, m, order)
        orders.append([tuple(map(int, row)) for row in order])
    end = {action: 0.0 for order in orders for action in order}
    changed = True
    while changed:
        changed = False
        for order in orders:
            for i, (b, c, j) in enumerate(order):
                start = end[order[i - 1]] if i else 0.0
                if not b and c:
                    start = max(start, end[0, c - 1, j] + send[c - 1])
                if b and c < chunks - 1:
                    start = max(start, end[1, c + 1, j] + send[c])
                finish = start + (backward[c] if b else forward[c])
                if finish > end[b, c, j] + 1e-12:
                    end[b, c, j] = finish
                    changed = True
    return max(end.values())


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_simulation_is_the_longest_path_and_monotone(data):
    kind = data.draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    pp = data.draw(st.integers(1, 4))
    v = data.draw(st.integers(1, 3)) if kind == "interleaved" else 1
    m = pp * data.draw(st.integers(1, 3)) if kind == "interleaved" else data.draw(st.integers(1, 6))
    times = st.lists(st.floats(0.01, 5.0), min_size=pp * v, max_size=pp * v)
    forward, backward, send = data.draw(times), data.draw(times), data.draw(times)
    ends, _, _ = run(kind, pp, m, forward, backward, send)
    assert ends.max() == pytest.approx(longest_path(kind, pp, m, forward, backward, send))
    slower = list(forward)
    slower[data.draw(st.integers(0, pp * v - 1))] += data.draw(st.floats(0.0, 3.0))
    assert run(kind, pp, m, slower, backward, send)[0].max() >= ends.max() - 1e-12


def by_events(kind, pp, m, forward, backward, send):
    """Serves every rank's list as inputs arrive, one action after the other."""
    chunks = len(forward)
    lists = []
    for rank in range(pp):
        order = np.empty((2 * chunks // pp * m, 3), dtype=np.int64)
        rank_order(KINDS[kind], rank, pp, chunks, m, order)
        lists.append([tuple(int(v) for v in row) for row in order])
    done: dict[tuple[int, int, int], float] = {}
    ends, cursor = [0.0] * pp, [0] * pp
    while any(cursor[r] < len(lists[r]) for r in range(pp)):
        for rank in range(pp):
            while cursor[rank] < len(lists[rank]):
                back, chunk, micro = lists[rank][cursor[rank]]
                before = (back, chunk + 1 if back else chunk - 1, micro)
                first = chunk == (chunks - 1 if back else 0)
                if not first and before not in done:
                    break
                ready = 0.0 if first else done[before] + send[chunk if back else chunk - 1]
                ends[rank] = max(ready, ends[rank]) + (backward if back else forward)[chunk]
                done[back, chunk, micro] = ends[rank]
                cursor[rank] += 1
    return ends


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["1f1b", "gpipe", "interleaved"]), pp=st.integers(1, 6), m=st.integers(1, 9), data=st.data()
)
def test_any_stages_meet_the_simulation_by_events(kind, pp, m, data):
    virtual = data.draw(st.integers(1, 3)) if kind == "interleaved" else 1
    m = m * pp if kind == "interleaved" else m
    seconds = st.lists(st.floats(0.0, 3.0), min_size=pp * virtual, max_size=pp * virtual)
    forward, backward, send = data.draw(seconds), data.draw(seconds), data.draw(seconds)
    ends, _, _ = run(kind, pp, m, forward, backward, send)
    assert ends.tolist() == by_events(kind, pp, m, forward, backward, send)
