"""Costs of spans of units: the compiled search for the fewest units that run again, against arrays of all spans."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.planners.device_partition import Partition, StageOf
from agents.planners.kernels.span_costs import ModePair, ModesOfSpans, fastest_modes, keep_faster, recompute_fewest
from agents.planners.span_costs import spans
from agents.planners.stage_strategies import megatron_strategies
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import data_parallel, lower_staged
from agents.planners.unit_profile import UnitsInOrder, needs, states
from automap.cluster import parse_cluster
from automap.price.kernels.memory import state_bytes, working_bytes
from automap.price.kernels.stage_records import Stage
from automap.price.lowered_plan import RECOMPUTE_MODES
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo


def by_arrays(pair: ModePair, alive: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`recompute_fewest` of all spans at once, by numpy."""
    ends = np.arange(len(pair.saved))

    def fits(until):
        kept = pair.kept - (pair.freed[until] - pair.freed[:, None])
        beyond = np.maximum(pair.heads[ends[:, None], until] + pair.freed[until] - pair.saved, pair.tails[until, ends])
        return pair.state + alive[:, None, None] * kept + beyond <= pair.capacity

    most = np.maximum(np.where(np.isfinite(pair.heads), pair.heads + pair.freed - pair.saved, 0.0), pair.tails)
    missing = pair.kept + (pair.state + most - pair.capacity) / alive[:, None, None]
    until = np.searchsorted(pair.freed, (pair.freed[:, None] + missing).ravel()).reshape(missing.shape)
    until = np.clip(until, ends[:, None], np.maximum(ends, ends[:, None]))
    is_possible = fits(until)
    while (is_fewer := is_possible & (until > ends[:, None]) & fits(np.maximum(until - 1, 0))).any():
        until -= is_fewer
    seconds = np.where(is_possible, pair.light_s + pair.more_s[until] - pair.more_s[:, None], np.inf)
    return seconds, until - ends[:, None]


def before(of_units: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(of_units)])


def most_between(of_units: np.ndarray) -> np.ndarray:
    """The most of the units from one to before another; -infinite where there is none."""
    found = np.full((len(of_units) + 1,) * 2, -np.inf)
    for first in range(len(of_units)):
        found[first, first + 1 :] = np.maximum.accumulate(of_units[first:])
    return found


def random_pair(rng: np.random.Generator, units: int) -> ModePair:
    light, share = rng.random(units), rng.choice([0.0, 0.3, 0.9], units)
    is_equal = rng.random() < 0.5
    if is_equal:
        light[:] = light[0]
        share[:] = share[-1]
    saved, freed, needed = before(light), before(light * share), 0.2 * rng.random((2, units))
    most = most_between(saved[1:] + needed[0])
    return ModePair(
        light_s=spans(rng.random(units)),
        state=spans(rng.random(units)),
        kept=spans(light),
        heads=most_between(saved[1:] - freed[1:] + needed[1]),
        tails=np.where(np.isfinite(most), most - saved, 0.0),
        saved=saved,
        freed=freed,
        more_s=before(rng.random(units) * (share > 0.0)),
        capacity=float(units * rng.random() * 3.0),
    )


@given(seed=st.integers(0, 2**32 - 1), units=st.integers(1, 12), first=st.sampled_from([1, 9, 33]))
def test_the_kernel_equals_arrays_of_all_spans(seed, units, first):
    pair, alive = random_pair(np.random.default_rng(seed), units), np.arange(first, first + 8)
    rng = np.random.default_rng(seed)
    legal = rng.random((units + 1, units + 1)) < 0.8
    known_s = rng.choice([0.5 * units, np.inf], (8, units + 1, units + 1))
    seconds, numbers = known_s.copy(), np.full(known_s.shape, -1)
    recompute_fewest(pair, legal, alive, 100, seconds, numbers)
    plain_s, plain = by_arrays(pair, alive)
    is_faster = legal & (plain_s < known_s)
    assert seconds.tobytes() == np.where(is_faster, plain_s, known_s).tobytes()
    assert np.array_equal(numbers, np.where(is_faster, 100 + plain, -1))


@given(seed=st.integers(0, 2**32 - 1), units=st.integers(1, 12), first=st.sampled_from([1, 9]))
def test_the_fastest_modes_equal_arrays_of_all_spans(seed, units, first):
    rng, alive = np.random.default_rng(seed), np.arange(first, first + 8)
    saved, needed, results = rng.random((3, 3, units))
    modes = ModesOfSpans(
        seconds=spans(rng.integers(1, 4, (3, units)).astype(np.float64)),
        state=spans(rng.random(units)),
        saved=spans(saved),
        beyond=np.stack([np.where(np.isfinite(most := most_between(row)), most, 0.0) for row in needed]),
        results=np.pad(results, ((0, 0), (1, 0))),
        legal=rng.random((3, units + 1, units + 1)) < 0.8,
        numbers=np.array([5, 7, 9]),
        capacity=float(units * rng.random() * first),
    )
    seconds = np.full((8, units + 1, units + 1), np.nan)
    numbers = np.full(seconds.shape, -1)
    fastest_modes(modes, alive, seconds, numbers)
    used = modes.state + alive[:, None, None, None] * modes.saved + modes.beyond
    used += (alive[:, None, None, None] - 1) * modes.results[:, None]
    times = np.where((used <= modes.capacity) & modes.legal, modes.seconds, np.inf)
    assert seconds.tobytes() == times.min(axis=1).tobytes()
    assert np.array_equal(numbers, np.where(np.isfinite(seconds), modes.numbers[times.argmin(axis=1)], 0))


@given(seed=st.integers(0, 2**32 - 1), units=st.integers(1, 8))
def test_the_fastest_strategies_equal_arrays_of_all(seed, units):
    rng, size = np.random.default_rng(seed), (4, units + 1, units + 1)
    passes = np.where(np.isfinite(spans(np.ones(units))), rng.choice([1.0, 2.0, np.inf], size), np.inf)
    beside, again = rng.choice([0.0, 0.5], size), rng.integers(0, 9, size)
    seconds, which, recomputed = np.full(size[1:], np.inf), *np.zeros((2, *size[1:]), dtype=np.int64)
    for number in range(len(passes)):
        keep_faster(passes[number], again[number], beside[number], number, seconds, which, recomputed)
    total = passes + beside
    legal, best = np.isfinite(total.min(axis=0)), total.argmin(axis=0)
    assert np.array_equal(seconds[legal], total.min(axis=0)[legal]) and np.isinf(seconds[~legal]).all()
    assert np.array_equal(which[legal], best[legal])
    assert np.array_equal(recomputed[legal], np.take_along_axis(again, best[None], axis=0)[0][legal])


@pytest.mark.parametrize("units", [1, 6])
def test_random_pairs_are_of_all_kinds(units):
    """Spans that fit as they are, with some units that run again, and not at all."""
    found = [by_arrays(random_pair(np.random.default_rng(seed), units), np.arange(1, 9)) for seed in range(200)]
    fitting = [(counts[i][np.isfinite(of_spans[i])]) for of_spans, counts in found for i in range(8)]
    assert any((counts > 0).any() for counts in fitting) and any((counts == 0).any() for counts in fitting)
    spans_of_all = units * (units + 1) // 2
    assert any(len(counts) < spans_of_all for counts in fitting)


@pytest.mark.parametrize("zero", range(4))
def test_memory_of_many_units_is_that_of_each(zero):
    cluster, model = parse_cluster("4xA100"), zoo.build("gpt2")
    training = {"global_batch": 64, "frozen": ["wte*"]}
    evaluator = PlanSpace(Problem.build(model, cluster, training)).evaluator
    (layout,) = evaluator.layout_of([((0, 1, 2, 3), (4, 1))]).stages
    stage = Stage(layout.axes, layout.links, layout.hardware, np.array([True, False]), 4.0)
    costs, settings = UnitsInOrder.of(evaluator, data_parallel(evaluator, 2)).costs(stage), evaluator.settings(zero)
    for mode, of_mode, state, needed in zip(
        RECOMPUTE_MODES, costs, states(costs, settings), needs(costs, settings), strict=True
    ):
        for unit, own, need in zip(of_mode, state, needed, strict=True):
            every, frozen = (unit["parameters"], unit["zero_parameters"]), (unit["frozen"], unit["zero_frozen"])
            assert own == sum(state_bytes(every, frozen, settings))
            trained = unit["parameters"] - unit["frozen"]
            working = working_bytes(
                float(unit["workspace_bytes"]), (unit["parameters"], trained, unit["zero_parameters"]), settings
            )
            assert need == working + unit["result_bytes"] + (unit["live_bytes"] if mode == "full" else 0.0)


def test_two_stages_exchange_a_tied_embedding_as_long_as_in_the_price():
    """On stages of one device, which reduce nothing else. A stage with both readers exchanges nothing."""
    graph = zoo.build("gpt:layers=4,hidden=256,heads=4,seq_len=128,vocab_size=4096")
    space = PlanSpace(Problem.build(graph, parse_cluster("2x1xV100-16GB@25Gbit"), {"global_batch": 16}))
    ((_, first, last),) = space.evaluator.tied.parameters
    table = StageTable(space, (0, 1), 4, [one for one in megatron_strategies(space) if one.tp == 1])
    costs, units = table.spans(0, 1, table.strategies[0]), space.num_units
    for end in range(1, units):
        partition = Partition(0.0, (StageOf(0, end, 0, 1), StageOf(end, units, 1, 1)))
        lowered = lower_staged(space, table.staged(partition))
        found = space.evaluator.evaluate(lowered).ranks["sync_s"]
        latency_s, bytes_per_s = (
            float(of[0]) for of in (lowered.layout.send_latency_s, lowered.layout.send_bytes_per_s)
        )
        for span, sync_s in zip(((0, end), (end, units)), found.tolist(), strict=True):
            spent_s = float(costs.exchange_s(1.0 / bytes_per_s)[span])
            assert (spent_s > 0.0) == (first < end <= last) == (sync_s > 0.0)
            assert spent_s + latency_s * (spent_s > 0.0) == pytest.approx(sync_s, rel=1e-12)
    assert costs.exchange_s(1.0)[0, units] == 0.0
