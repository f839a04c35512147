"""Paths through schedules and micro-batches in flight, as bounds count them, against simulated schedules."""

import numpy as np
import pytest

from automap.cost_graph.paths import exchanged_s, least_in_flight, path_trips
from automap.cost_graph.virtual_stages import groups, paths
from automap.price.kernels.pipeline import run_schedule
from automap.price.kernels.step_records import Order
from automap.schedule import KINDS, NO_PROGRAM
from automap.space.shape import Shape

PIPELINES = [
    (2, 1, 1),
    (2, 1, 8),
    (4, 1, 2),
    (4, 1, 4),
    (4, 1, 10),
    (2, 2, 2),
    (2, 3, 6),
    (4, 2, 4),
    (4, 3, 8),
    (3, 4, 9),
]
"""Ranks, virtual stages and micro-batches."""


def shape_of(ranks, virtual, count):
    return Shape(pp=ranks, tp=1, dp=1, num_micro_batches=count, samples=1, virtual=virtual)


def simulated(kind, ranks, virtual, count, rng):
    """Seconds and saved bytes of each chunk, some of them tiny; the ends and the peaks of memory of all ranks."""
    chunks = ranks * virtual
    tiny = np.where(rng.random(chunks) < 0.4, 1e-3, 1.0)
    seconds = np.zeros((4, chunks))
    seconds[0], seconds[1] = rng.uniform(0.5, 1.0, chunks) * tiny, rng.uniform(0.5, 2.0, chunks) * tiny
    saved = np.where(rng.random(chunks) < 0.4, 0.0, rng.integers(1, 100, chunks)).astype(float)
    busy = count * seconds.sum(axis=0).reshape(virtual, ranks).sum(axis=0)
    ends, peak = np.empty(ranks), np.empty(ranks)
    order = Order(KINDS[kind], count, NO_PROGRAM)
    run_schedule(order, seconds, np.zeros(chunks), saved, busy, ends, peak)
    return seconds, saved, ends, peak


@pytest.mark.parametrize(("ranks", "virtual", "count"), PIPELINES)
def test_no_rank_holds_fewer_micro_batches(ranks, virtual, count):
    rng = np.random.default_rng(0)
    for kind in ("1f1b", "gpipe") if virtual == 1 else ("interleaved",):
        least = least_in_flight(shape_of(ranks, virtual, count), (kind,))
        for _ in range(20):
            _, saved, _, peak = simulated(kind, ranks, virtual, count, rng)
            assert (np.array(least) * saved.reshape(virtual, ranks).sum(axis=0) <= peak).all()
            if virtual == 1:
                assert (np.array(least) * saved == peak).all()


@pytest.mark.parametrize(("ranks", "virtual", "count"), [some for some in PIPELINES if some[1] > 1])
def test_no_path_through_chunks_is_longer_than_the_step(ranks, virtual, count):
    rng = np.random.default_rng(1)
    sizes = groups(ranks, virtual)
    assert sizes == [1] * virtual
    every, closest = list(paths(sizes, ranks, count)), []
    for _ in range(60):
        seconds, _, ends, _ = simulated("interleaved", ranks, virtual, count, rng)
        both = seconds.sum(axis=0).reshape(virtual, ranks)
        longest = max(float((often * both).sum()) for often in every)
        assert longest <= ends[0] * (1.0 + 1e-9)
        closest.append(longest / ends[0])
    assert max(closest) > 0.9


@pytest.mark.parametrize(("ranks", "count"), [(ranks, count) for ranks, virtual, count in PIPELINES if virtual == 1])
def test_no_path_to_a_rank_is_longer_than_its_work(ranks, count):
    rng = np.random.default_rng(2)
    for kind in ("1f1b", "gpipe"):
        before, own, behind = path_trips(shape_of(ranks, 1, count), (kind,))
        assert (own.forward, own.backward, own.gradients) == (behind.forward, behind.backward, 1.0)
        for _ in range(40):
            seconds, _, ends, _ = simulated(kind, ranks, 1, count, rng)
            for last in range(ranks):
                weights = [before if rank < last else behind for rank in range(ranks)]
                path_s = sum(w.forward * f + w.backward * b for w, f, b in zip(weights, *seconds[:2], strict=True))
                assert path_s <= ends[last] * (1.0 + 1e-9), (kind, last)


def test_chunks_exchange_with_those_around_them():
    assert exchanged_s([1.0, 2.0, 4.0], 1) == [1.0, 3.0, 2.0]
    assert exchanged_s([1.0, 5.0], 2) == [1.0, 5.0, 5.0, 1.0]
