"""Planners of the literature: their programs against brute force, and their plans against what every plan must hold."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest

from agents import Budget, search
from agents.incumbent import Incumbent
from agents.planners.aceso import Primitives, relieve, starts
from agents.planners.alpa import least_sums
from agents.planners.galvatron import Option, add_kind
from agents.planners.linearization import worth_of
from agents.planners.piper import of_setting, piper_partitions
from agents.planners.stage_strategies import megatron_strategies
from agents.planners.submeshes import aligned_sizes, submeshes, tiles_suffice, untiled_sizes
from agents.planners.whale import balance
from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.estimate import price
from automap.problem import Problem
from automap.space.space import PlanSpace

NAMES = ("spp", "alpa", "piper", "galvatron", "aceso", "whale")


def random_table(rng, layers, devices):
    """Seconds of stages; some do not fit."""
    times = {}

    def seconds(behind, place, size):
        if (behind, place, size) not in times:
            ends = np.concatenate([[0.0], np.cumsum(rng.random(layers))]) / size
            span = ends[None, :] - ends[:, None] + 0.05 * rng.random()
            span[np.tril_indices(layers + 1)] = np.inf
            span[rng.random(span.shape) < 0.1] = np.inf
            times[behind, place, size] = span
        return times[behind, place, size]

    space = SimpleNamespace(
        num_units=layers, problem=SimpleNamespace(cluster=parse_cluster(f"{devices}x1xV100@10Gbit"))
    )
    return SimpleNamespace(space=space, order=tuple(range(devices)), seconds=seconds)


def submesh_rows(place, devices, sizes, most, *, tiled):
    """All rows of at most so many submeshes from a place on; `tiled`: each begins at a multiple of its size."""
    if place == devices:
        yield ()
    for size in sizes if most else ():
        if not (tiled and place % size) and place + size <= devices:
            yield from ((size, *more) for more in submesh_rows(place + size, devices, sizes, most - 1, tiled=tiled))


def stages_s(table, row, cuts):
    """Seconds of each stage: `row` has their devices, `cuts` the ends of the layers of all but the last."""
    at, places, count = (0, *cuts, table.space.num_units), np.cumsum([0, *row]).tolist(), len(row)
    return [table.seconds(count - n, places[n], size)[at[n], at[n + 1]] for n, size in enumerate(row)]


@pytest.mark.parametrize("tiled", [True, False])
def test_alpas_sums_are_brute_force(tiled):
    rng = np.random.default_rng(0)
    solved = 0
    for _ in range(25):
        layers, devices, sizes = int(rng.integers(2, 7)), 4, (1, 2, 4)
        table, limit = random_table(rng, layers, devices), float(rng.uniform(0.5, 2.0))
        found = {len(p.stages): (total, p) for total, p in least_sums(table, sizes, limit, tiled=tiled)}
        best = {}
        for row in submesh_rows(0, devices, sizes, layers, tiled=tiled):
            for cuts in itertools.combinations(range(1, layers), len(row) - 1):
                times = stages_s(table, row, cuts)
                if max(times) <= limit:
                    best[len(row)] = min(best.get(len(row), np.inf), sum(times))
        assert set(found) == set(best)
        for count, (total, partition) in found.items():
            assert total == pytest.approx(best[count])
            assert partition.load_s <= limit
            solved += 1
    assert solved > 25


def test_pipers_slowest_stages_are_brute_force_where_submeshes_tile_the_cluster_and_where_they_do_not():
    rng, devices, gains = np.random.default_rng(2), 20, 0
    sizes = submeshes(devices)
    assert tiles_suffice(devices, sizes)
    for _ in range(20):
        layers, least = int(rng.integers(3, 6)), {}
        table = random_table(rng, layers, devices)
        table.sizes, table.held = range(1, devices + 1), lambda behind, schedule: behind
        table.samples = devices
        # With 3 and with 7 devices, a replica has fewer of 20 samples than with one device less.
        assert untiled_sizes(table) == [1, 2, 3, 4, 5, 7, 10, 20]
        for tiled in (True, False):
            best = {}
            for row in submesh_rows(0, devices, sizes if tiled else untiled_sizes(table), layers, tiled=tiled):
                for cuts in itertools.combinations(range(1, layers), len(row) - 1):
                    best[len(row)] = min(best.get(len(row), np.inf), max(stages_s(table, row, cuts)))
            found = {len(p.stages): p.load_s for p in piper_partitions(table, tiled=tiled)}
            assert found == pytest.approx({count: s for count, s in best.items() if np.isfinite(s)})
            least[tiled] = min(found.values())
        gains += least[False] < 0.99 * least[True]
    assert gains > 2


@pytest.mark.parametrize(("devices", "samples"), [(512, 128), (1024, 4096), (97, 300)])
def test_stages_that_tile_nothing_have_sizes_with_fewer_samples(devices, samples):
    space = SimpleNamespace(problem=SimpleNamespace(cluster=parse_cluster(f"{devices}x1xV100@10Gbit")))
    sizes = range(1, min(samples, devices) + 1)
    table = SimpleNamespace(space=space, order=range(devices), sizes=sizes, samples=samples)
    tiles, found = aligned_sizes(table), untiled_sizes(table)
    step = min(found)
    assert set(tiles) <= set(found) and all(size % step == 0 for size in found)
    for size in set(found) - set(tiles):
        assert -(-samples // size) < -(-samples // (size - step))
    # 48 devices have 3 of 128 samples at most; 80 to 112 have 2, like 64.
    assert devices != 512 or set(found) - set(tiles) == {48}
    assert len(found) < 24


@pytest.mark.parametrize(
    ("cluster", "step"), [("10x16", 8), ("12x8", 4), ("3x24", 3), ("6x12", 3), ("5x6", 1), ("7x9", 3)]
)
def test_stages_that_tile_nothing_are_parts_of_hosts_or_whole_hosts(cluster, step):
    """On 10 hosts of 16 devices 32 submeshes have 5 devices each, which straddle hosts; the next size is 8."""
    space = SimpleNamespace(problem=SimpleNamespace(cluster=parse_cluster(f"{cluster}xV100@10Gbit")))
    devices = space.problem.cluster.num_devices
    table = SimpleNamespace(space=space, order=range(devices), sizes=range(1, devices + 1), samples=devices)
    found, host = untiled_sizes(table), space.problem.cluster.hosts[0].num_devices
    assert min(found) == step and all(size % step == 0 for size in found)
    assert step % host == 0 or host % step == 0
    assert set(found) >= {size for size in aligned_sizes(table) if size % step == 0}


def test_galvatrons_layers_are_brute_force():
    """Three kinds of layers, two strategies, conversions, and memory for some of the combinations."""
    rng = np.random.default_rng(1)
    fitting = 0
    for _ in range(20):
        levels = 12
        kinds = [
            [
                Option(strategy, 0, 0, float(rng.random()), int(rng.integers(1, 7)))
                for strategy in (0, 1)
                for _ in range(3)
            ]
            for _ in range(3)
        ]
        changes = [np.zeros((2, 2)), *(rng.random((2, 2)) * (1 - np.eye(2)) for _ in range(2))]
        worth = np.zeros((2, levels + 1))
        for options, change in zip(kinds, changes, strict=True):
            worth, _, _ = add_kind(worth, options, change)
        best = np.inf
        for picked in itertools.product(*kinds):
            if sum(option.level for option in picked) <= levels:
                moved = sum(changes[n][picked[n - 1].strategy, picked[n].strategy] for n in (1, 2))
                best = min(best, sum(option.seconds for option in picked) + moved)
        assert worth.min() == pytest.approx(best)
        fitting += np.isfinite(best)
    assert fitting > 10


def test_whales_balance_is_nearly_the_best_that_fits():
    """The slowest device has at most two samples more than in the best of all shares that fit."""
    rng = np.random.default_rng(2)
    for _ in range(60):
        count, samples = int(rng.integers(2, 4)), int(rng.integers(4, 13))
        rate, fixed = rng.uniform(1.0, 3.0, count), rng.uniform(0.0, 3.0, count)
        room, each = rng.uniform(4.0, 12.0, count), rng.uniform(0.5, 1.5, count)
        every = [
            shares
            for shares in itertools.product(range(1, samples + 1), repeat=count)
            if sum(shares) == samples and (fixed + np.array(shares) * each <= room).all()
        ]
        found = balance(samples, rate, room, fixed, each)
        if not every:
            assert found is None
            continue
        assert tuple(found) in every
        best = min((np.array(shares) / rate).max() for shares in every)
        assert (np.array(found) / rate).max() <= best + 2.0 / rate.min()


def test_whale_shares_in_proportion_where_all_have_room():
    assert balance(40, [3.0, 1.0], [1e3, 1e3], [0.0, 0.0], [1.0, 1.0]) == [30, 10]
    assert balance(40, [3.0, 1.0], [20.0, 1e3], [0.0, 0.0], [1.0, 1.0]) == [20, 20]


@pytest.fixture(scope="module")
def problem(gpt):
    graph = gpt(layers=4, hidden=64)
    return Problem.build(graph, parse_cluster("2xV100-16GB+2xP100-16GB@10Gbit"), {"global_batch": 16})


@pytest.mark.parametrize("name", NAMES)
def test_plans_are_verified_and_have_the_same_price_when_read_back(problem, name):
    """Verified (else the search fails), of the same price when read back, and the same again with the same budget."""
    found = search(problem, Budget.parse(40), searcher=name)
    assert found.plan.search.found_by == name
    assert found.plan.search.searchers[name] == found.step_time_s
    again = Plan.from_json(json.loads(json.dumps(found.plan.to_json())))
    assert price(problem, again) == found.plan.estimate
    assert search(problem, Budget.parse(40), searcher=name).step_time_s == found.step_time_s


def test_aceso_only_goes_to_better_plans(problem):
    space = PlanSpace(problem)
    incumbent = Incumbent(space, Budget(evaluations=2_000), searcher="aceso")
    primitives = Primitives(space)
    for start in starts(space):
        ((seconds, overflow),) = space.price(np.array([start])).tolist()
        end = relieve(incumbent, primitives, start, set())
        ((last_s, last_overflow),) = space.price(np.array([end])).tolist()
        assert worth_of(last_s, last_overflow) <= worth_of(seconds, overflow)
        # What is one primitive away is no better.
        near = space.price(np.array(primitives.of(end)))
        assert min(worth_of(*one) for one in near.tolist()) >= worth_of(last_s, last_overflow)


@pytest.mark.parametrize("fix", [{"pp": 8}, {"pp": 2}])
def test_piper_offers_only_what_is_fixed(gpt, fix):
    """Partitions of other degrees, which no verifier lets pass, do not stand in the way of those that are fixed."""
    problem = Problem.build(gpt(layers=10), parse_cluster("1x8xA100"), {"global_batch": 32}, {"fix": fix})
    space = PlanSpace(problem)
    offered = of_setting(Incumbent(space, Budget(evaluations=500), searcher="piper"), 8, 0, megatron_strategies(space))
    assert offered and {len(plan.stages) for plan in offered} == {fix["pp"]}


@pytest.mark.parametrize(("again", "scope"), [(True, "h.1"), (True, "h.*"), (False, "h.*")])
def test_piper_recomputes_what_the_user_asks_for(gpt, again, scope):
    """With room for everything, recomputation only costs time; without room, it is forbidden all the same."""
    hints = {"constraints": [{"scope": scope, "recompute": again}], "fix": {"pp": 2}}
    problem = Problem.build(gpt(layers=6), parse_cluster("4xV100-16GB@10Gbit"), {"global_batch": 32}, hints)
    found = search(problem, Budget.parse(100), searcher="piper").plan
    assert found.search.found_by == "piper"
    assert any(stage.recompute for stage in found.stages) == again
