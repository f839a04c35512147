"""Simulated steps of partitions beside prices of whole plans, and moves beside all ways to divide a small pipeline."""

import itertools

import numpy as np
import pytest
from small_clusters import cluster_with

from agents.planners.alpa import inter_operator
from agents.planners.device_partition import Partition, StageOf
from agents.planners.piper import piper_partitions
from agents.planners.promising_partitions import Division, Moves, promising
from agents.planners.simulated_steps import Places, SimulatedSteps
from agents.planners.stage_strategies import megatron_strategies
from agents.planners.stage_table import StageTable
from agents.planners.staged_plan import lower_staged
from automap.problem import Problem
from automap.space.space import PlanSpace
from ir import zoo
from ir.profile_import import load_profile

LAYERS = 10
FIX = {"schedule": "1f1b", "virtual_stages": 1}


def space_of(cluster, memory_gib, batch, seed=0):
    """The space of a chain of measured layers on devices with so much memory."""
    rng = np.random.default_rng(seed)
    nodes = [
        f"node{number} -- layer -- forward_compute_time={spent:.3f}, backward_compute_time={2 * spent:.3f}, "
        f"activation_size={kept:.0f}, parameter_size={state:.0f}"
        for number, (spent, kept, state) in enumerate(np.exp(rng.normal((0.5, 18.0, 17.5), 0.7, (LAYERS, 3))), 1)
    ]
    edges = [f"\tnode{number} -- node{number + 1}" for number in range(1, LAYERS)]
    graph = load_profile("\n".join([*nodes, *edges]) + "\n", name="chain", batch=8)
    problem = Problem.build(graph, cluster_with(memory_gib, cluster), {"global_batch": batch}, {"fix": FIX})
    return PlanSpace(problem)


def table_of(space, count, zero=0):
    strategies = [one for one in megatron_strategies(space) if one.tp == 1]
    return StageTable(space, tuple(range(space.meshes.devices)), count, strategies, zero=zero, partly=True)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("cluster", "memory_gib", "batch", "count"),
    [
        ("8x1xV100-16GB@25Gbit", 64.0, 64, 8),
        ("8x1xV100-16GB@25Gbit", 1.8, 64, 16),
        ("3x8xV100-16GB@25Gbit", 64.0, 96, 4),
        ("4x4xV100-16GB@120Gbit", 1.8, 96, 12),
    ],
)
def test_a_simulated_step_is_the_price_of_the_plan(cluster, memory_gib, batch, count, zero):
    """Stages of all sizes, also next to stages of other sizes, and with recomputation where memory is scarce."""
    space = space_of(cluster, memory_gib, batch)
    table, recomputing = table_of(space, count, zero), 0
    found = SimulatedSteps(table).ranked([*piper_partitions(table), *inter_operator(table, tiled=False)])
    assert len(found) > 5
    for step_s, partition in found:
        plan = table.staged(partition)
        outcome = space.evaluator.evaluate(lower_staged(space, plan))
        assert outcome.fits and step_s == pytest.approx(outcome.step_time_s, rel=1e-9)
        recomputing += any(stage.recompute != "none" for stage in plan.stages)
    assert (recomputing > 0) == (memory_gib < 4.0)


T5 = "t5:layers=4,hidden=512,heads=8,ffn=1024,seq_len=128,vocab_size=32128"
GPT = "gpt:layers=6,hidden=512,heads=8,seq_len=256,vocab_size=50304"


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("model", "cluster"),
    [(T5, "8x1xV100-16GB@25Gbit"), (T5, "3x8xV100-16GB@25Gbit"), (GPT, "8x1xV100-16GB@25Gbit"), (GPT, "2x4xA100")],
)
def test_a_simulated_step_counts_tied_parameters_as_the_price(model, cluster, tp, zero):
    """A stage holds a parameter that several of its units read once, and stages that hold the same one add up its
    gradient, also round the end of the pipeline. T5's embedding has three readers.

    With tensor parallelism an embedding leaves its sum to the next unit. A stage that ends with it does the sum in
    another way than a stage that goes on; only the price knows that, so such partitions are left out.
    """
    problem = Problem.build(zoo.build(model), cluster, {"global_batch": 96, "trainer": "megatron-core"}, {"fix": FIX})
    space = PlanSpace(problem)
    strategies = [one for one in megatron_strategies(space) if one.tp == tp and not one.splits_batch]
    readers, between, within = {}, 0, 0
    for name, one, other in space.evaluator.tied.parameters:
        readers.setdefault(name, {one}).add(other)
    embeddings = set(sorted(next(iter(readers.values())))[:-1])
    for strategy in strategies:
        table = StageTable(space, tuple(range(space.meshes.devices)), 12, [strategy], zero=zero, partly=True)
        found = SimulatedSteps(table).ranked([*piper_partitions(table), *inter_operator(table, tiled=False)])
        for step_s, partition in found:
            if tp > 1 and {stage.last - 1 for stage in partition.stages} & embeddings:
                continue
            outcome = space.evaluator.evaluate(lower_staged(space, table.staged(partition)))
            assert outcome.fits and step_s == pytest.approx(outcome.step_time_s, rel=1e-9)
            counts = [
                [sum(stage.first <= unit < stage.last for unit in units) for stage in partition.stages]
                for units in readers.values()
            ]
            between += any(sum(count > 0 for count in of) > 1 for of in counts)
            within += any(max(of) > 1 for of in counts)
    assert between > 5 and within > 0


def all_partitions(space, devices):
    """All ways to give runs of layers to runs of devices."""
    for count in range(1, min(space.num_units, devices) + 1):
        for ends, places in itertools.product(
            itertools.combinations(range(1, space.num_units), count - 1),
            itertools.combinations(range(1, devices), count - 1),
        ):
            spans, runs = (
                [*itertools.pairwise((0, *inner, last))] for inner, last in ((ends, space.num_units), (places, devices))
            )
            yield Partition(
                0.0, tuple(StageOf(*span, begin, end - begin) for span, (begin, end) in zip(spans, runs, strict=True))
            )


@pytest.mark.parametrize("memory_gib", [64.0, 2.2])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_moves_end_near_the_best_of_all_partitions(seed, memory_gib):
    space = space_of("5x1xV100-16GB@25Gbit", memory_gib, 40, seed)
    table = table_of(space, 8)
    steps = SimulatedSteps(table)
    best_s, _ = steps.ranked(all_partitions(space, 5))[0]
    moves = Moves(space, lambda: False)
    begins = promising(table, np.inf, quick=False)[:8]
    assert begins[0][0] >= best_s * (1.0 - 1e-12)
    found = list(moves.improved([Division.of(table, *one) for one in begins], []))
    assert len(found) >= len(begins)
    reached = []
    for division in found:
        outcome = space.evaluator.evaluate(lower_staged(space, moves.staged(division)))
        assert outcome.fits and outcome.step_time_s == pytest.approx(division.step_s, rel=1e-9)
        reached.append(outcome.step_time_s)
    for one, before in zip(found, sorted(begins), strict=False):
        assert one.step_s <= before[0] * (1.0 + 1e-9)
    assert best_s * (1.0 - 1e-9) <= min(reached) <= best_s * 1.002
    assert moves.entries > 0


def test_after_moves_no_single_move_gains():
    """Of a unit, and of one or two devices, from any stage to any other, in any combination."""
    space = space_of("8x1xV100-16GB@25Gbit", 64.0, 64)
    table = table_of(space, 8)
    steps = SimulatedSteps(table)
    begin = Partition(0.0, tuple(StageOf(a, b, c, 2) for a, b, c in ((0, 2, 0), (2, 4, 2), (4, 6, 4), (6, 10, 6))))
    found = steps.moved(begin, [1, 2])
    (before_s,) = steps.seconds(Places.of([begin]), np.inf)
    (found_s,) = steps.seconds(Places.of([found]), np.inf)
    assert found_s < before_s
    lengths, widths = (np.array([getattr(stage, name) for stage in found.stages]) for name in ("last", "devices"))
    lengths = np.diff(lengths, prepend=0)
    tried = []
    for a, b in itertools.permutations(range(4), 2):
        for units, devices in itertools.product((-1, 0, 1), (0, 1, 2)):
            longer, wider = lengths.copy(), widths.copy()
            longer[a], longer[b] = longer[a] + units, longer[b] - units
            wider[a], wider[b] = wider[a] + devices, wider[b] - devices
            if min(*longer, *wider) > 0:
                tried.append((np.cumsum(longer)[:-1], np.cumsum(wider)[:-1]))
    ends, places = (np.array(of) for of in zip(*tried, strict=True))
    assert len(tried) > 30
    assert (steps.seconds(Places(ends, places), np.inf) >= found_s * (1.0 - 1e-5)).all()


def test_what_is_no_partition_takes_forever():
    space = space_of("8x1xV100-16GB@25Gbit", 64.0, 64)
    steps = SimulatedSteps(table_of(space, 16))
    # A stage without units, one without devices, one with more devices than a micro-batch has samples, and none of it.
    ends, places = np.array([[4, 4], [3, 6], [3, 6], [3, 6]]), np.array([[2, 4], [4, 4], [1, 6], [2, 4]])
    found = steps.seconds(Places(ends, places), np.inf)
    assert np.isinf(found).tolist() == [True, True, True, False]
