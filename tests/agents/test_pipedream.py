"""PipeDream's optimizer against brute force over all pipelines of small profiles."""

import itertools
import math

import numpy as np
import pytest

from agents import Budget, search
from agents.planners.pipedream import Level, States, best_pipeline, states_of_layers
from automap.cluster import parse_cluster
from automap.problem import Problem
from ir.profile_text import parse

ROW = "node{} -- {} -- forward_compute_time={}, backward_compute_time={}, activation_size={}, parameter_size={}"


def profile(times, edges):
    """The text of a profile: layer number -> (forward ms, backward ms, output bytes, parameter bytes)."""
    rows = [ROW.format(number, f"Layer{number}", *row) for number, row in times.items()]
    return "\n".join(rows + [f"\tnode{a} -- node{b}" for a, b in edges])


def made_up(seed):
    """Two branches of two layers between three others, and a source that only a later layer reads."""
    rng = np.random.default_rng(seed)
    numbers = (1, 2, 3, 4, 5, 6, 7, 8)
    times = {n: (*(1.0 + 9.0 * rng.random(2)).round(3), *(1e6 * rng.integers(1, 9, 2))) for n in numbers}
    return parse(profile(times, [(1, 2), (2, 3), (1, 4), (4, 5), (3, 6), (5, 6), (8, 6), (6, 7)]))


def down_sets(layers):
    """All sets of layers that hold everything before each of their own and begin at layer 1; each source that layer 1
    does not lead to is there exactly if a reader of it is."""
    found = []
    for size in range(1, len(layers) + 1):
        for some in map(set, itertools.combinations(layers, size)):
            closed = all(set(layers[n].before) <= some for n in some)
            needed = 8 not in some or 6 in some
            if closed and needed and 1 in some:
                found.append(frozenset(some))
    return found


def brute_force(layers, workers, bandwidth, memory):
    """Least time of the slowest stage of all chains of down-sets with all replica counts."""
    sets = down_sets(layers)
    whole = frozenset(layers)

    def stage(inside, replicas, behind):
        nodes = [layers[n] for n in inside]
        weights = sum(n.parameters for n in nodes)
        held = weights + sum(n.sizes[0] for n in nodes)
        if math.ceil(behind / replicas) * held > memory:
            return math.inf
        spent = sum(n.forward_s + n.backward_s for n in nodes)
        return (spent + 4 * (replicas - 1) * weights / (replicas * bandwidth)) / replicas

    def least(done, left):
        """Least slowest time of the stages behind `done` on exactly so many workers."""
        if done == whole:
            return 0.0 if left == 0 else math.inf
        return min(
            (
                max(stage(after - done, mine, left - mine), least(after, left - mine))
                for after in sets
                if done < after
                for mine in range(1, left + 1)
            ),
            default=math.inf,
        )

    return least(frozenset(), workers)


@pytest.mark.parametrize(("seed", "memory"), [(0, math.inf), (1, math.inf), (2, 3e7), (3, 2e7)])
def test_no_pipeline_is_faster(seed, memory):
    layers = made_up(seed)
    found = best_pipeline(states_of_layers(layers), [Level(4, 1e9)], memory)
    assert found.seconds == pytest.approx(brute_force(layers, 4, 1e9, memory), rel=1e-12)
    assert sum(math.prod(stage.replicas) for stage in found.stages) == 4


def test_states_are_the_sets_that_a_stage_may_end_with():
    layers = made_up(0)
    sets = down_sets(layers)
    states = states_of_layers(layers)
    assert sorted(states.weight_bytes) == sorted(sum(layers[n].parameters for n in some) for some in sets)
    assert states.before.sum() == sum(one < other for one in sets for other in sets)


def chain(rng, count):
    return States(
        seconds=np.cumsum(rng.random(count)),
        weight_bytes=np.cumsum(1e8 * rng.random(count)),
        activation_bytes=np.cumsum(1e6 * rng.random(count)),
        crossing_bytes=1e8 * rng.random(count),
        before=np.triu(np.ones((count, count), dtype=np.bool_), 1),
    )


def test_two_levels_are_machines_whose_workers_share_stages():
    """Against brute force: the outer level divides layers among machines, the inner one each machine's workers."""
    states = chain(np.random.default_rng(4), 5)
    inner, outer = Level(2, 1e9), Level(3, 1e8)

    def span(of, a, b):
        return of[b] - (of[a - 1] if a else 0.0)

    def least(seconds, level, inside, a, b, workers):
        weights = span(states.weight_bytes, a, b) / inside
        best = (seconds(a, b) + 4 * (workers - 1) * weights / (workers * level.bytes_per_s)) / workers
        for cut in range(a, b):
            for mine in range(1, workers):
                sent = 2 * states.crossing_bytes[cut] / (mine * level.bytes_per_s)
                last_weights = span(states.weight_bytes, cut + 1, b) / inside
                sync = 4 * (mine - 1) * last_weights / (mine * level.bytes_per_s)
                last = (seconds(cut + 1, b) + sync) / mine
                best = min(best, max(least(seconds, level, inside, a, cut, workers - mine), sent, last))
        return best

    def machine(a, b):
        return least(lambda c, d: span(states.seconds, c, d), inner, 1, a, b, inner.workers)

    found = best_pipeline(states, [inner, outer])
    assert found.seconds == pytest.approx(least(machine, outer, 2, 0, 4, outer.workers), rel=1e-12)
    assert sum(math.prod(stage.replicas) for stage in found.stages) == 6
    assert [stage.end for stage in found.stages] == sorted({stage.end for stage in found.stages})


@pytest.mark.parametrize("cluster", ["4xV100", "2x2xV100@25Gbit"])
def test_a_plan_by_its_name(mlp, cluster):
    problem = Problem.build(mlp((512, 4096, 256, 2048, 512)), parse_cluster(cluster), {"global_batch": 64})
    found = search(problem, Budget.parse(60), searcher="pipedream")
    assert found.record.found_by == "pipedream"
    best = search(problem, Budget.parse(60), searcher="expert").step_time_s
    assert 0.5 * best < found.step_time_s < 2.0 * best
