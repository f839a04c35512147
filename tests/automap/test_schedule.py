"""Compiled schedules against closed forms and against a simulation by events that shares no code with them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automap.price.kernels.pipeline import count_actions, run_program, run_schedule
from automap.price.kernels.step_records import Order
from automap.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    KINDS,
    NO_PROGRAM,
    SPLIT_KINDS,
    WEIGHT,
    WRITTEN_KINDS,
    arrange,
)


def run(kind, pp, m, seconds, send=None, kept=None, *, program=NO_PROGRAM):
    """Ends, seconds of work and peaks of the ranks; `seconds` is [words, chunks]."""
    seconds = np.array(seconds, dtype=float)
    chunks = seconds.shape[1]
    counts = np.empty((4, chunks))
    order = Order(KINDS[kind], m, program)
    count_actions(order, counts.shape[1], counts)
    busy, ends, peak = np.zeros(pp), np.zeros(pp), np.zeros(pp)
    for chunk in range(chunks):
        for word in range(4):
            busy[chunk % pp] += counts[word, chunk] * seconds[word, chunk]
    run_schedule(
        order,
        seconds,
        np.zeros(chunks) if send is None else np.array(send, dtype=float),
        np.ones(chunks) if kept is None else np.array(kept, dtype=float),
        busy,
        ends,
        peak,
    )
    return ends, busy, peak


def uniform(chunks, forward, backward_input, weight):
    return np.array([[forward], [backward_input + weight], [backward_input], [weight]]) * np.ones(chunks)


PART = st.floats(0.125, 4.0)


@settings(max_examples=60)
@given(
    kind=st.sampled_from(["gpipe", "1f1b", "eager-1f1b"]), pp=st.integers(1, 9), m=st.integers(1, 40), f=PART, b=PART
)
def test_uniform_stages_meet_the_closed_form(kind, pp, m, f, b):
    ends, _, peak = run(kind, pp, m, uniform(pp, f, b / 2, b / 2))
    assert ends.max() == pytest.approx((m + pp - 1) * (f + b))
    kept = {"gpipe": [m] * pp, "1f1b": [pp - r for r in range(pp)], "eager-1f1b": [2 * (pp - r) - 1 for r in range(pp)]}
    assert peak.tolist() == [min(m, most) for most in kept[kind]]


@settings(max_examples=60)
@given(pp=st.integers(1, 8), v=st.integers(1, 5), rounds=st.integers(2, 5), f=PART, b=PART)
def test_interleaving_divides_the_bubble_by_the_virtual_stages(pp, v, rounds, f, b):
    """Narayanan et al., 2021: (pp - 1) (F + B) / v, where F and B are those of a whole rank."""
    m = pp * rounds
    ends, busy, peak = run("interleaved", pp, m, uniform(pp * v, f, b / 2, b / 2))
    assert peak.tolist() == [min(m * v, pp * (v - 1) + 2 * (pp - r) - 1) for r in range(pp)]
    assert busy == pytest.approx(np.full(pp, m * v * (f + b)))
    assert ends.max() == pytest.approx(m * v * (f + b) + (pp - 1) * (f + b))


@pytest.mark.parametrize(("kind", "factor"), [("zb1p", 1), ("zb2p", 2)])
@settings(max_examples=80)
@given(pp=st.integers(1, 9), more=st.integers(0, 20), f=PART, i=PART, w=PART)
def test_zero_bubble_meets_the_closed_forms(kind, factor, pp, more, f, i, w):
    """Qi et al., 2024, table 2: bubbles of (pp - 1) (F + I - W) and (pp - 1) (F + I - 2 W)."""
    w = min(f, i, w)
    m = factor * pp + more
    ends, busy, peak = run(kind, pp, m, uniform(pp, f, i, w))
    assert ends.max() == pytest.approx(busy[0] + (pp - 1) * (f + i - factor * w))
    assert peak.tolist() == [factor * (pp - 1) + 1] * pp


def test_zero_bubble_at_equal_parts_needs_what_its_authors_say():
    """F = I = W, 8 ranks, 24 micro-batches: a third of 1F1B's bubble, and none."""
    ones = uniform(8, 1.0, 1.0, 1.0)
    bubbles = [run(kind, 8, 24, ones)[0].max() - 72.0 for kind in ("1f1b", "zb1p", "zb2p")]
    assert bubbles == [21.0, 7.0, 0.0]


@settings(max_examples=40)
@given(
    pp=st.integers(1, 8),
    m=st.integers(1, 30),
    kind=st.sampled_from(["1f1b", "eager-1f1b", "zb1p", "zb2p"]),
    data=st.data(),
)
def test_peaks_do_not_grow_with_the_micro_batches(pp, m, kind, data):
    kept = data.draw(st.lists(st.integers(0, 10**9), min_size=pp, max_size=pp))
    ones = uniform(pp, 1.0, 1.0, 1.0)
    enough = 2 * pp
    few, some, many = (run(kind, pp, n, ones, kept=kept)[2] for n in (m, enough, enough + m))
    assert some.tolist() == many.tolist()
    assert (few <= some).all()


# -- by events ----------------------------------------------------------------------------------------------------


def turns(kind, rank, pp, v, m):
    """Actions (word, chunk, micro-batch) of a rank, as the papers tell them."""
    total = v * m
    back = INPUT if kind in SPLIT_KINDS else BACKWARD
    if kind == "gpipe":
        return [(FORWARD, rank, j) for j in range(m)] + [(BACKWARD, rank, j) for j in reversed(range(m))]
    if kind == "interleaved":
        warm_up = total if m == pp else min(total, 2 * (pp - 1 - rank) + (v - 1) * pp)
    else:
        warm_up = min(total, (2 if kind in ("zb2p", "eager-1f1b") else 1) * (pp - 1 - rank))
    behind = {"zb1p": rank, "zb2p": 2 * rank}.get(kind, 0)
    rounds = [(g * pp + j, c) for g in range(-(-m // pp)) for c in range(v) for j in range(pp) if g * pp + j < m]
    forwards = [(FORWARD, c * pp + rank, j) for j, c in rounds]
    backwards = [(back, (v - 1 - c) * pp + rank, j) for j, c in rounds]
    found, waiting = forwards[:warm_up], []
    for number, action in enumerate(backwards):
        found += [*forwards[warm_up + number : warm_up + number + 1], action]
        waiting += [(WEIGHT, *action[1:])] if back == INPUT else []
        if len(waiting) > behind:
            found.append(waiting.pop(0))
    return found + waiting


def by_events(lists, pp, m, seconds, send, kept):
    """Serves every rank's list as inputs arrive, one action after the other."""
    chunks = len(send)
    done: dict[tuple[str, int, int], float] = {}
    ends, held, peak, cursor = [0.0] * pp, [0.0] * pp, [0.0] * pp, [0] * pp
    work = [[0] * chunks for _ in range(4)]
    while any(cursor[r] < len(lists[r]) for r in range(pp)):
        for rank in range(pp):
            while cursor[rank] < len(lists[rank]):
                word, chunk, micro = lists[rank][cursor[rank]]
                way, step = ("forward", -1) if word == FORWARD else ("back", 1)
                ready = 0.0
                if word != WEIGHT and 0 <= chunk + step < chunks:
                    if (way, chunk + step, micro) not in done:
                        break
                    ready = done[way, chunk + step, micro] + send[min(chunk, chunk + step)]
                ends[rank] = max(ready, ends[rank]) + seconds[word][chunk]
                if word != WEIGHT:
                    done[way, chunk, micro] = ends[rank]
                held[rank] += {FORWARD: kept[chunk], INPUT: 0.0}.get(word, -kept[chunk])
                peak[rank] = max(peak[rank], held[rank])
                work[word][chunk] += 1
                cursor[rank] += 1
    busy = [sum(work[w][c] * seconds[w][c] for c in range(r, chunks, pp) for w in range(4)) for r in range(pp)]
    return [min(end, max(ends[0], spent)) for end, spent in zip(ends, busy, strict=True)], peak


@st.composite
def pipelines(draw, kinds=WRITTEN_KINDS):
    """A kind, its size, and any durations and bytes."""
    kind = draw(st.sampled_from(kinds))
    pp = draw(st.integers(1, 6))
    v = draw(st.integers(1, 4)) if kind == "interleaved" else 1
    m = pp * draw(st.integers(1, 4)) if v > 1 else draw(st.integers(1, 14))
    # Sixteenths add up without rounding, in whatever order.
    sixteenths = st.lists(st.integers(0, 48).map(lambda x: x / 16), min_size=pp * v, max_size=pp * v)
    seconds = [draw(sixteenths) for _ in range(4)]
    kept = draw(st.lists(st.integers(0, 1000), min_size=pp * v, max_size=pp * v))
    return kind, pp, v, m, seconds, draw(sixteenths), kept


@settings(max_examples=50)
@given(pipelines())
def test_any_stages_meet_the_simulation_by_events(pipeline):
    kind, pp, v, m, seconds, send, kept = pipeline
    lists = [turns(kind, rank, pp, v, m) for rank in range(pp)]
    ends, _, peak = run(kind, pp, m, seconds, send, kept)
    assert (ends.tolist(), peak.tolist()) == by_events(lists, pp, m, seconds, send, kept)


@settings(max_examples=50)
@given(pipelines(), st.integers(0, 2**32 - 1))
def test_a_written_order_costs_the_same_floats_as_its_kind(pipeline, seed):
    kind, pp, v, m, _, _, kept = pipeline
    rng = np.random.default_rng(seed)
    seconds, send = rng.random((4, pp * v)), rng.random(pp * v)
    program = arrange(KINDS[kind], pp, pp * v, m)
    one = run(kind, pp, m, seconds, send, kept)
    other = run("explicit", pp, m, seconds, send, kept, program=program)
    assert [x.tolist() for x in one] == [x.tolist() for x in other]


@settings(max_examples=50)
@given(pipelines(), st.integers(0, 3), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_a_faster_part_never_slows_the_whole(pipeline, word, place, is_send, explicit):
    kind, pp, v, m, seconds, send, kept = pipeline
    program = arrange(KINDS[kind], pp, pp * v, m) if explicit else NO_PROGRAM
    kind = "explicit" if explicit else kind
    before, *_ = run(kind, pp, m, seconds, send, kept, program=program)
    part = send if is_send else seconds[word]
    part[place % (pp * v)] /= 2
    after, *_ = run(kind, pp, m, seconds, send, kept, program=program)
    assert (after <= before).all()


@settings(max_examples=60)
@given(pipelines())
def test_actions_begin_when_their_rank_and_their_inputs_are_ready(pipeline):
    kind, pp, v, m, seconds, send, kept = pipeline
    program = arrange(KINDS[kind], pp, pp * v, m)
    times, ends = np.empty((len(program), 2)), np.empty(pp)
    run_program(program, np.array(seconds), np.array(send), ends, times)
    free = [0.0] * pp
    for (rank, word, chunk, _, before), (start, end) in zip(program.tolist(), times.tolist(), strict=True):
        ready = times[before, 1] + send[min(chunk, int(program[before, 2]))] if before >= 0 else -math.inf
        assert start == max(free[rank], ready)
        assert end == start + seconds[word][chunk]
        free[rank] = end
    assert ends.tolist() == free
    assert run(kind, pp, m, seconds, send, kept)[0].max() == min(
        max(free), max(free[0], *run(kind, pp, m, seconds, send, kept)[1])
    )


def test_what_a_rank_behind_the_first_does_last_overlaps_with_the_next_step():
    """The last rank of ZB-2p is done later than the first, which has gone on by then."""
    ones = uniform(4, 1.0, 1.0, 1.0)
    program = arrange(KINDS["zb2p"], 4, 4, 12)
    ends, times = np.empty(4), np.empty((len(program), 2))
    run_program(program, ones, np.zeros(4), ends, times)
    assert ends.tolist() == [36.0, 37.0, 38.0, 39.0]
    assert run("zb2p", 4, 12, ones)[0].tolist() == [36.0] * 4
