"""Bounds of families of plans against the price of the plans in them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from long_cases import long_but

from automap.bounds.enumeration import Enumeration
from automap.bounds.priced_templates import priced_templates
from automap.cost_graph.best_cuts import Cuts
from automap.cost_graph.families import families, parts, ways_to_share
from automap.cost_graph.family_bounds import FamilyBounds
from automap.cost_graph.group_costs import joint_values
from automap.cost_graph.open_costs import OpenCosts
from automap.cost_graph.paths import Passes
from automap.cost_graph.relaxation import PARAMETERS
from automap.cost_graph.stage_bounds import Level, least_crossing
from automap.cost_graph.stage_layouts import compositions
from automap.cost_graph.unlike_stages import RankBounds, Spreads, Weights, fastest_spread
from automap.cost_graph.virtual_stages import Interleaving, fastest_interleaving, groups
from automap.cost_graph.whole_units import WholeUnits
from automap.price.kernels.pipeline import run_program
from automap.schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B, arrange
from automap.space.space import PlanSpace
from ir import zoo

MOE = "moe:layers=2,hidden=64,heads=4,experts=4,seq_len=32,vocab_size=128"
T5 = "t5:layers=2,hidden=64,heads=4,head_size=16,ffn=256,seq_len=32,vocab_size=128"
CONVOLUTIONS = "vgg:convolutions=1-1-2,width=16,ffn=256,image_size=32,num_classes=10"
TIED = "gpt:layers=3,hidden=64,heads=4,seq_len=32,vocab_size=1024"


TRANSFORMERS = [
    ("2x2xV100@10Gbit", {}, {}),
    ("2xV100-16GB+2xP100-16GB", {"trainer": "alpa"}, {"pp": 2, "zero": 0}),
    ("2xV100-16GB+2xP100-16GB", {}, {"pp": 1}),
    ("4xA100", {}, {"schedule": "zb1p", "pp": 2}),
    ("2xV100-16GB+2xP100-16GB", {}, {"pp": 2, "tp": 1}),
    ("6xA100", {}, {"tp": 1, "zero": 1}),
    ("4xA100", {}, {"schedule": "eager-1f1b", "tp": 1}),
    ("2xV100-16GB+3xP100-16GB", {}, {"tp": 1, "zero": 1}),
    ("5xA100", {}, {"tp": 1, "pp": 2}),
]
"""Cluster, training, fixed decisions."""


def family_of(space, values):
    """The family of a plan, with its ZeRO stage alone."""
    shape = space.shape(values)
    zero = values[space.first.zero]
    is_unlike = any(values[space.first.devices : space.first.shares])
    way = 0 if is_unlike else values[space.first.shares]
    found = [
        family
        for family in families(space, space.shapes)
        if shape in family.shapes and zero in family.zeros and (family.way, family.is_unlike) == (way, is_unlike)
    ]
    assert len(found) == 1, "each plan stands in one family"
    return found[0]


def check(space, plans):
    """No plan is faster than the bound of its family, nor than that of the part with its ZeRO stage."""
    bounds, known, closest = FamilyBounds(space), {}, []
    for values, (seconds, over) in zip(plans.tolist(), space.price(plans).tolist(), strict=True):
        if over > 0.0:
            continue
        family = family_of(space, values)
        for each in (family, *parts(family)):
            if values[space.first.zero] in each.zeros:
                if each not in known:
                    known[each] = bounds.bound(each, np.inf)
                assert known[each] <= seconds * (1.0 + 1e-9), (each, known[each], seconds)
                closest.append(known[each] / seconds)
    return np.array(closest)


def some_plans(space, seed, count):
    """Random plans, and the templates, which are near the best ones."""
    return np.concatenate([space.random_batch(np.random.default_rng(seed), count), priced_templates(space)[0][::7]])


@pytest.mark.parametrize(
    ("cluster", "training", "fix"),
    long_but(TRANSFORMERS[1::4], TRANSFORMERS),
)
def test_no_plan_of_a_transformer_is_faster(gpt, space, cluster, training, fix):
    s = space(gpt(layers=3), cluster, 12, training=training, **fix)
    assert len(check(s, some_plans(s, 0, 100))) > 50


@pytest.mark.parametrize(("cluster", "pp"), [("2x2xV100-16GB@10Gbit", 2), ("4xA100-80GB", 4)])
def test_no_pipeline_of_convolutions_is_faster_and_the_best_cuts_are_near(space, cluster, pp):
    """Their tensors are large in front and small behind, so that it matters where a stage ends."""
    s = space(zoo.build(CONVOLUTIONS), cluster, 64, pp=pp, tp=1, zero=0)
    found = check(s, some_plans(s, 0, 50))
    assert len(found) > 50
    assert found.max() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("model", "fix"), [(T5, {"tp": 1}), (T5, {"pp": 1, "tp": 2}), (TIED, {"zero": 1})])
def test_no_plan_is_faster_where_units_share_parameters(space, model, fix):
    """T5's blocks read the same positions, and its head reads the embedding: most of their state is their own."""
    s = with_little_memory(space(zoo.build(model), "4xV100-16GB", 8, **fix), 0.5)
    found = check(s, some_plans(s, 0, 60))
    assert len(found) > 20
    assert found.max() > 0.6


@pytest.mark.parametrize(("model", "share"), [(T5, 0.9), (TIED, 0.6)])
def test_units_hold_no_more_than_their_rank_where_they_share_parameters(space, model, share):
    """Against the price, which counts a parameter once: all others count, of the shared ones the first reading."""
    s = space(zoo.build(model), "4xA100-80GB", 8, pp=1, tp=2, zero=0)
    begin, num_axes, (column,) = s.first.signature, len(s.axes), PARAMETERS
    known = {}
    for values in s.random_batch(np.random.default_rng(0), 30).tolist():
        lowered, shape = s.lowered(values).views[0], s.shape(values)
        if shape not in known:
            legal = joint_values(s, tuple(values[:begin]))
            known[shape] = legal, OpenCosts(s, lowered.stages[0], legal, with_conversions=False)
        legal, costs = known[shape]
        picked = [
            int(np.flatnonzero((some == values[begin + n * num_axes : begin + (n + 1) * num_axes]).all(axis=1))[0])
            for n, some in enumerate(legal)
        ]
        held = float(costs.times @ costs.unit_costs(picked)[:, column])
        priced = s.evaluator.evaluate(lowered).ranks[0]["parameter_bytes"] / s.problem.state_bytes[0]
        assert share * priced <= held <= priced * (1.0 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster", "pp"), [(MOE, "4xA100-80GB", 1), ("resnet50", "2xV100-16GB", 1)])
def test_no_plan_with_experts_or_convolutions_is_faster(space, model, cluster, pp):
    s = space(zoo.build(model), cluster, 16, pp=pp)
    assert len(check(s, some_plans(s, 1, 60)))


def test_no_plan_of_an_enumerable_space_is_faster_and_the_best_is_near(mlp, space):
    s = space(mlp((32, 64, 128)), "2xV100", 2, pp=1, zero=0, recompute="none", num_micro_batches=1)
    plans = np.concatenate(list(Enumeration(s).plans()))
    found = check(s, plans)
    best = plans[s.price(plans)[:, 0].argmin()]
    assert found.max() > 0.98
    bounds = FamilyBounds(s)
    of_families = [bounds.bound(family, np.inf) for family in families(s, s.shapes)]
    assert min(of_families) == pytest.approx(s.price(best[None])[0, 0], rel=0.02)


def with_little_memory(space, share, seed=0):
    """The space of a problem on devices with so little memory that a share of its random plans fits."""
    problem = space.problem
    plans = space.random_batch(np.random.default_rng(seed), 200)
    free = -np.quantile(space.price(plans)[:, 1], share) * problem.cluster.device(0).memory_bytes
    return PlanSpace(replace(problem, hints=replace(problem.hints, memory_reserve_bytes=free)))


@pytest.mark.parametrize(
    ("cluster", "fix"),
    [
        ("2xV100-16GB", {"pp": 1}),
        ("2x2xV100@10Gbit", {"tp": 1}),
        ("4xA100", {"pp": 2, "tp": 1, "zero": 1}),
        ("4xA100", {"pp": 4, "schedule": "gpipe"}),
    ],
)
def test_no_plan_is_faster_where_memory_is_short(gpt, space, cluster, fix):
    s = with_little_memory(space(gpt(layers=6, seq=256), cluster, 12, **fix), 0.3)
    found = check(s, some_plans(s, 0, 100))
    assert len(found) > 20
    assert found.max() > 0.6


def test_short_memory_raises_the_bound_of_an_enumerable_space(mlp, space):
    """Against full enumeration, where the fastest of all plans does not fit."""
    roomy = space(mlp((512, 512, 512, 512)), "2xV100", 4096, pp=1, zero=0, num_micro_batches=1)
    found = []
    for s in (roomy, with_little_memory(roomy, 0.02)):
        seconds, over = s.price(np.concatenate(list(Enumeration(s).plans()))).T
        bounds = FamilyBounds(s)
        bound = min(bounds.bound(family, np.inf) for family in families(s, s.shapes))
        assert bound <= seconds[over <= 0.0].min() * (1.0 + 1e-9)
        found.append(bound)
    assert found[0] < found[1]


def test_a_bound_is_not_raised_beyond_its_target(gpt, space):
    s = space(gpt(layers=3), "2x2xV100@10Gbit", 12)
    bounds = FamilyBounds(s)
    for family in families(s, s.shapes)[:6]:
        sharp = bounds.bound(family, np.inf)
        for share in (0.5, 0.9, 1.5):
            assert bounds.bound(family, share * sharp) <= max(1.0, share) * sharp * (1.0 + 1e-9)


def test_a_bound_to_a_target_is_the_least_of_layouts_that_reach_it_and_others(gpt, space):
    """Layouts that reach the target early still count: between two targets a bound does not pass the sharpest one."""
    s = space(gpt(layers=4), "4xV100-16GB+4xP100-16GB", 16, pp=2, tp=1, zero=0)
    family = next(family for family in families(s, s.shapes) if family.is_unlike)
    sharp = FamilyBounds(s).bound(family, np.inf)
    for share in (0.3, 0.6, 0.8, 0.95):
        assert FamilyBounds(s).bound(family, share * sharp) <= sharp * (1.0 + 1e-6)


def test_ways_to_share_are_those_that_plans_may_have(gpt, space):
    """Against the values that are legal where samples are shared out, over all orders of the devices."""
    s = space(gpt(layers=4), "4xV100-16GB+4xP100-16GB", 16)
    found = {}
    for values in s.random_batch(np.random.default_rng(0), 3000).tolist():
        if not any(values[s.first.devices : s.first.shares]):
            found.setdefault(s.shape(values), set()).add(values[s.first.shares])
    assert max(map(len, found.values())) > 2
    for shape, ways in found.items():
        assert ways <= set(ways_to_share(s, shape))
        if len(ways) < len(ways_to_share(s, shape)):
            continue
    assert all(ways_to_share(s, shape) == [0] for shape in s.shapes if shape.pp > 1)


@pytest.mark.parametrize("cluster", long_but(["2x2xV100@10Gbit"], ["2x2xV100@10Gbit", "2xV100-16GB+2xP100-16GB"]))
def test_each_level_of_a_bound_is_as_sharp_as_the_one_before(gpt, space, cluster):
    s = space(gpt(layers=3), cluster, 8, pp=2, tp=1)
    bounds, rises = FamilyBounds(s), 0
    for family in families(s, s.shapes):
        of_levels = [bounds.bound(family, np.inf, level) for level in Level]
        assert of_levels == sorted(of_levels)
        assert of_levels[-1] == FamilyBounds(s).bound(family, np.inf)
        rises += of_levels[0] < of_levels[-1]
    assert rises


def test_compositions_hold_all_sums():
    """Against all tuples of sizes."""
    for total, count, sizes in ((6, 2, (1, 2, 3, 5)), (8, 3, (1, 2, 4, 6)), (4, 4, (1, 2)), (5, 3, (2, 4))):
        expected = [some for some in itertools.product(sizes, repeat=count) if sum(some) == total]
        assert list(compositions(total, count, sizes)) == expected


def on(busy_s, passes_s, *, state=0.0, saved=None, room=1.0):
    """One type of units on a rank, in one mode unless it saves bytes in several."""
    saved = np.zeros((np.size(busy_s), 1)) if saved is None else np.array(saved)[:, None]
    return RankBounds(
        busy_s=np.reshape(busy_s, (-1, 1)).astype(float),
        passes_s=np.reshape(passes_s, (-1, np.size(busy_s), 1)).astype(float),
        state_bytes=np.full((np.size(busy_s), 1), state),
        saved_bytes=saved,
        room=room,
        crossing=np.zeros(0),
    )


TRIPS = (Passes(there=1.0), Passes(ended=1.0), Passes(both=1.0))
"""A path that goes through all ranks and back to its last one, with the gradients of this one."""


def test_the_fastest_spread_is_that_of_the_corners():
    """One type of units on two ranks: shares in inverse proportion to the seconds, unless a path is longer."""
    slow, fast = on(6.0, [0.0] * 4), on(3.0, [0.0] * 4)

    def seconds(ranks, besides_s, trip_s):
        return fastest_spread(ranks, besides_s, trip_s, [1] * len(ranks), trips=TRIPS)[0]

    assert seconds([[fast], [slow]], [1.0, 1.0], [0.0, 0.0]) == pytest.approx(3.0, rel=1e-5)
    assert seconds([[fast], [slow]], [1.0, 4.0], [0.0, 0.0]) == pytest.approx(4.0, rel=1e-5)
    longer = [[on(seconds, [5.0] * 4)] for seconds in (3.0, 6.0)]
    assert seconds(longer, [1.0, 1.0], [0.25, 0.5]) == pytest.approx(5.5, rel=1e-5)
    assert seconds([[on(3.0, [0.0] * 4)]], [1.0], []) == pytest.approx(4.0, rel=1e-5)


def test_a_path_ends_behind_the_passes_and_gradients_of_its_rank():
    """Passes of 2 s, 1 s without the last backward pass, and gradients of 4 s."""
    rank = on(1e-3, [2.0, 6.0, 1.0, 1.0])
    # On rank 0: 6 x + 2 (1 - x) for a share x there. On rank 1: x + 6 (1 - x).
    fastest_s, _ = fastest_spread([[rank]] * 2, [0.0, 0.0], [0.0, 0.0], [1, 1], trips=TRIPS)
    assert fastest_s == pytest.approx(2 + 4 * 4 / 9, rel=1e-5)
    bound = np.array([[0.75], [0.0]])
    fastest_s, _ = fastest_spread([[rank]] * 2, [0.0, 0.0], [0.0, 0.0], [1, 1], bound, TRIPS)
    assert fastest_s == pytest.approx(2 + 4 * 0.75, rel=1e-5)


def test_some_spreads_are_bounded_as_among_all():
    rng = np.random.default_rng(1)
    spreads = Spreads(
        busy_s=rng.uniform(1.0, 3.0, (5, 2, 3)),
        besides_s=rng.uniform(0.0, 1.0, (5, 2)),
        trip_s=rng.uniform(0.2, 1.5, (5, 2, 3, 3)),
        besides_trip_s=rng.uniform(0.0, 1.0, (5, 2)),
        bound=np.zeros((2, 3)),
    )
    weights = Weights(busy=np.array([0.2, 0.3]), paths=np.array([0.1, 0.4]), shares_s=np.zeros((2, 3)))
    at = np.array([3, 0])
    assert spreads.take(at).bounds(weights).tolist() == spreads.bounds(weights)[at].tolist()


def test_chunks_on_unlike_ranks():
    """Units of one type that take a second together on the first rank, and a second or three on the other one."""

    def seconds(first_s, second_s, times):
        ranks = [on(8 * each, [each, each, each / 3, 2 * each / 3]) for each in (first_s, second_s)]
        of = Interleaving(
            rank_bounds=ranks,
            times=np.array([float(times)]),
            ends=np.array([[1.0 / times], [1.0 / times]]),
            virtual=2,
            num_micro_batches=8,
            in_flight=[1, 1],
            besides_s=np.zeros((2, 4)),
            step_s=0.0,
        )
        return fastest_interleaving(of, np.inf)

    # A slower rank is no faster, and no spread is faster than all ranks together at work.
    alike, slower = seconds(1.0, 1.0, 40), seconds(1.0, 3.0, 40)
    assert alike < slower
    assert slower >= 8.0 / (1.0 + 1.0 / 3.0)
    # One unit of 1/4 s in each chunk: a rank works for 8 * 2 / 4 s, and the second one waits for the first chunk.
    assert seconds(1.0, 1.0, 4) == pytest.approx(4.0 + 0.25, rel=1e-4)


def of_units(cuts, forward_s, backward_s, gradient_s, ranks, num_micro_batches):
    """Seconds of an interleaved step by its simulated schedule, with so many units of a type in each chunk."""
    cuts = np.array(cuts)
    seconds = np.zeros((4, len(cuts)))
    seconds[:2] = [cuts @ forward_s, cuts @ backward_s]
    program = arrange(INTERLEAVED, ranks, len(cuts), num_micro_batches)
    ends, times = np.empty(ranks), np.empty((len(program), 2))
    run_program(program, seconds, np.zeros(len(cuts)), ends, times)
    of_ranks = cuts.reshape(-1, ranks, cuts.shape[1]).sum(axis=0) @ np.array(gradient_s)
    return float((ends + of_ranks).max())


@pytest.mark.parametrize(("ranks", "virtual", "number"), [(2, 2, 4), (2, 3, 6), (4, 2, 4), (4, 2, 8), (16, 8, 16)])
def test_no_division_into_chunks_is_faster_than_the_program_with_generated_paths(ranks, virtual, number):
    """Against the simulated schedule of random divisions of 2 and 3 units of two types a chunk, ends included."""
    rng = np.random.default_rng(ranks * virtual)
    forward_s, backward_s, gradient_s = (rng.uniform(0.5, 1.5, 2) * scale for scale in (1.0, 2.0, 3.0))
    kinds = np.repeat([0, 1], ranks * virtual + ranks)
    times = np.bincount(kinds).astype(float)
    both_s = forward_s + backward_s
    of_paths = np.array([both_s, both_s + gradient_s, forward_s, backward_s]) * times
    standing = on(1.0, [])
    standing = replace(
        standing,
        busy_s=((number * both_s + gradient_s) * times)[None],
        passes_s=of_paths[:, None],
        state_bytes=np.zeros((1, 2)),
        saved_bytes=np.zeros((1, 2)),
    )
    of = Interleaving(
        rank_bounds=[standing] * ranks,
        times=times,
        ends=np.eye(2) / times,
        virtual=virtual,
        num_micro_batches=number,
        in_flight=[1] * ranks,
        besides_s=np.zeros((2, ranks * virtual)),
        step_s=0.0,
    )
    found, best = fastest_interleaving(of, np.inf), np.inf
    for trial in range(60):
        inner = rng.choice(np.arange(1, len(kinds)), ranks * virtual - 1, replace=False)
        if not trial:
            inner = np.linspace(0, len(kinds), ranks * virtual + 1).astype(int)[1:-1]
        chunks = np.split(kinds, np.sort(inner))
        cuts = np.array([np.bincount(chunk, minlength=2) for chunk in chunks], dtype=float)
        best = min(best, of_units(cuts, forward_s, backward_s, gradient_s, ranks, number))
        assert found <= best * (1.0 + 1e-9)
    assert found > 0.7 * best


def test_groups_hold_all_chunks_and_the_first_and_the_last_are_alone():
    """The first micro-batch fills a pipeline through the first chunk of each rank, and no other one."""
    for ranks, virtual in itertools.product((2, 3, 8, 16, 64), (2, 3, 4, 24, 100)):
        found = groups(ranks, virtual)
        assert sum(found) == virtual
        assert found[0] == found[-1] == 1


def whole(busy_s, times, ends, *, least=1, room=1e9, saved=None, ranks=3):
    """Ranks that are alike, [ways, types] seconds of all units of a type, which save as much in the first way."""
    busy_s = np.array(busy_s, dtype=float)
    standing = RankBounds(
        busy_s=busy_s,
        passes_s=np.zeros((0, *busy_s.shape)),
        state_bytes=np.zeros_like(busy_s),
        saved_bytes=np.zeros_like(busy_s) if saved is None else np.array(saved, dtype=float),
        room=room,
        crossing=np.zeros(0),
    )
    return WholeUnits(
        rank_bounds=[standing] * ranks,
        times=np.array(times, dtype=float),
        ends=ends,
        least=least,
        in_flight=[1] * ranks,
        besides_s=[0.5 * rank for rank in range(ranks)],
    )


def longest_rank(of):
    """Seconds of the rank that works longest in the best of all ways to share out whole units, by trying them."""
    num_ranks, times = len(of.rank_bounds), of.times.astype(int).tolist()
    best = np.inf
    shares = [[some for some in itertools.product(range(n + 1), repeat=num_ranks) if sum(some) == n] for n in times]
    for counts in itertools.product(*shares):
        each = np.array(counts)
        is_whole = (each.sum(axis=0) >= of.least).all()
        if is_whole and each[of.ends[0], 0] and each[of.ends[1], -1]:
            best = min(best, max(seconds_on(of, rank, each[:, rank]) for rank in range(num_ranks)))
    return best


def seconds_on(of, rank, counts):
    """Seconds of a rank with so many units of each type, each in the best way for which there is room."""
    standing, found = of.rank_bounds[rank], np.inf
    ways = range(len(standing.busy_s))
    for picked in itertools.product(*(itertools.combinations_with_replacement(ways, n) for n in counts)):
        units = [(way, kind) for kind, some in enumerate(picked) for way in some]
        used = sum(standing.used_bytes(of.in_flight[rank])[unit] / of.times[unit[1]] for unit in units)
        if used <= standing.room:
            found = min(found, sum(standing.busy_s[unit] / of.times[unit[1]] for unit in units))
    return of.besides_s[rank] + found


@pytest.mark.parametrize(
    "of",
    [
        whole([[8.0, 1.0, 2.5]], [7, 1, 1], (1, 2)),
        whole([[8.0, 0.5]], [4, 1], (0, 1), ranks=2),
        whole([[5.0, 9.0, 0.0]], [4, 5, 1], (0, 2)),
        whole([[4.0, 9.0, 0.0]], [4, 4, 1], (2, 1), least=3),
        whole([[6.0, 0.1], [9.0, 0.1]], [6, 1], (0, 1), room=5.0, saved=[[12.0, 0.0], [0.0, 0.0]]),
        whole([[6.0, 6.0, 0.2], [7.0, 9.0, 0.2]], [3, 3, 1], (0, 2), room=4.0, saved=[[9.0, 6.0, 0.0], [0.0] * 3]),
    ],
)
def test_whole_units_take_no_less_than_counted(of):
    """Against all ways to share out the units; equal but for halvings where neither memory nor single units matter."""
    best = longest_rank(of)
    spread_s = float((of.rank_bounds[0].busy_s.min(axis=0)).sum()) / len(of.rank_bounds)
    found = of.bound(spread_s, np.inf)
    assert found <= best * (1.0 + 1e-9)
    assert found > spread_s
    assert of.bound(spread_s, 1.01 * spread_s) <= 1.01 * spread_s * (1.0 + 1e-9)
    if len(of.rank_bounds[0].busy_s) == 1 and of.ends[1] == len(of.times) - 1:
        assert found >= best * 0.99


@pytest.mark.parametrize("is_short", [False, True])
def test_the_best_cuts_are_those_of_all(is_short):
    """Against all cuts of seven units over three ranks that differ, the last of which is seen in two views."""
    rng = np.random.default_rng(3)
    units, ranks = np.array([0, 1, 1, 2, 1, 2, 0]), 3
    times = np.bincount(units)

    def standing():
        return RankBounds(
            busy_s=np.sort(rng.uniform(1.0, 9.0, (2, 3)), axis=0),
            passes_s=np.zeros((0, 2, 3)),
            state_bytes=np.zeros((2, 3)),
            saved_bytes=np.array([[8.0, 8.0, 8.0], [0.0, 0.0, 0.0]]),
            room=3.0 if is_short else 1e3,
            crossing=rng.uniform(0.0, 2.0, 6),
        )

    views = [[standing()], [standing()], [standing(), standing()]]
    rates = np.array([[2.0, 4.0, np.inf]])
    sent_s = [0.25 + 3.0 * some[0].crossing / rate for some, rate in zip(views, rates[0].tolist(), strict=True)]
    best = np.inf
    for first, second in itertools.combinations(range(1, 7), 2):
        ends, longest = (0, first, second, 7), 0.0
        for rank, some in enumerate(views):
            mine = units[ends[rank] : ends[rank + 1]]
            around = sum(sent_s[rank - 1 + side][ends[rank + side] - 1] for side in (0, 1) if 0 < rank + side < ranks)
            for view in some:
                longest = max(longest, 0.5 + around + _on_rank(view, mine, times))
        best = min(best, longest)
    cuts = Cuts(
        stages=views,
        units=units,
        in_flight=[1] * ranks,
        num_micro_batches=1,
        step_s=0.25,
        micro_batch_s=0.25,
        send_s=0.25,
        shown=3.0,
        has_paths=False,
    )
    (found,) = cuts.bounds(np.arange(ranks)[None], rates)
    assert found <= best * (1.0 + 1e-9)
    assert found >= best * (0.8 if is_short else 1.0 - 1e-9)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("are_alike", [False, True])
def test_no_cuts_are_faster_than_the_longest_path(count, are_alike):
    """Against the simulated schedules of all cuts of ten units over four ranks, with what is sent and gradients."""
    rng, ranks = np.random.default_rng(count), 4
    units = np.array([0, 1, 1, 2, 1, 2, 1, 1, 2, 0])
    times = np.bincount(units)

    def rank():
        there_s, back_s, gradients_s = (rng.uniform(low, 3.0 * low, 3) for low in (1.0, 2.0, 0.5))
        both_s = there_s + back_s
        return RankBounds(
            busy_s=(count * both_s + gradients_s)[None] * times,
            passes_s=np.array([both_s, both_s + gradients_s, there_s, back_s])[:, None] * times,
            state_bytes=np.zeros((1, 3)),
            saved_bytes=np.zeros((1, 3)),
            room=1.0,
            crossing=rng.uniform(0.0, 1.0, len(units) - 1),
        )

    stages = [[each] for each in ([rank()] * ranks if are_alike else [rank() for _ in range(ranks)])]
    cuts = Cuts(
        stages=stages,
        units=units,
        in_flight=[1] * ranks,
        num_micro_batches=count,
        step_s=0.5,
        micro_batch_s=0.1,
        send_s=0.05,
        shown=0.5,
        has_paths=True,
    )
    rates = np.array([[2.0, 4.0, 1.0, np.inf]])
    (found,) = cuts.bounds(np.arange(ranks)[None], rates)
    (busy,) = replace(cuts, has_paths=False).bounds(np.arange(ranks)[None], rates)
    best = min(
        simulated_s(cuts, rates[0], (0, *inner, len(units)), kind)
        for inner in itertools.combinations(range(1, len(units)), ranks - 1)
        for kind in (ONE_F_ONE_B, GPIPE)
    )
    assert busy < found <= best * (1.0 + 1e-9)
    assert found >= 0.93 * best


def simulated_s(cuts, rates, ends, kind):
    """Seconds of a step with some cuts and a schedule."""
    ranks, times = len(cuts.stages), np.bincount(cuts.units)
    sent_s = [
        0.0,
        *(cuts.send_s + cuts.shown * cuts.stages[r][0].crossing[ends[r + 1] - 1] / rates[r] for r in range(3)),
        0.0,
    ]
    seconds, behind_s = np.zeros((4, ranks)), np.zeros(ranks)
    for rank, (view,) in enumerate(cuts.stages):
        mine = cuts.units[ends[rank] : ends[rank + 1]]
        both_s, ended_s, there_s, back_s = (view.passes_s[:, 0] / times)[:, mine].sum(axis=1)
        exchange_s = sent_s[rank] + sent_s[rank + 1]
        seconds[:2, rank] = there_s + 0.5 * exchange_s + cuts.micro_batch_s, back_s + 0.5 * exchange_s
        behind_s[rank] = ended_s - both_s
    program = arrange(kind, ranks, ranks, cuts.num_micro_batches)
    end_s, at = np.empty(ranks), np.empty((len(program), 2))
    run_program(program, seconds, np.zeros(ranks), end_s, at)
    return float((end_s + behind_s).max()) + cuts.step_s


def _on_rank(view, units, times):
    """Seconds of some units in the best of their ways for which there is room."""
    best = np.inf
    for ways in itertools.product(range(2), repeat=len(units)):
        used = sum(view.used_bytes(1)[way, kind] / times[kind] for way, kind in zip(ways, units, strict=True))
        if used <= view.room:
            best = min(best, sum(view.busy_s[way, kind] / times[kind] for way, kind in zip(ways, units, strict=True)))
    return best


def test_what_crosses_is_that_of_places_where_a_chunk_may_end():
    """Five units: two ranks may be cut anywhere, five only after each unit; chunks of a rank are counted by hand."""
    crossing = np.array([4.0, 3.0, 2.0, 1.0])
    assert least_crossing([crossing] * 2, 1) == [1.0, 0.0]
    assert least_crossing([crossing] * 5, 1) == [4.0, 3.0, 2.0, 1.0, 0.0]
    # Chunks 0 and 2 end behind unit 1 or 2, and 3 or 4; chunk 1 ends behind unit 2 or 3.
    assert least_crossing([crossing] * 2, 2) == [1.0, 2.0]
    assert least_crossing([crossing[::-1]] * 2, 2) == [1.0, 2.0]


def test_weights_of_one_spread_bound_all():
    """Against the program of each of several spreads over three ranks."""
    rng = np.random.default_rng(0)
    busy_s, trip_s = rng.uniform(1.0, 3.0, (6, 3, 4)), rng.uniform(0.2, 1.5, (6, 3, 3, 4))
    besides_s, besides_trip_s = rng.uniform(0.0, 1.0, (6, 3)), rng.uniform(0.0, 1.0, (6, 3))
    bound = np.zeros((3, 4))
    bound[0, 0], bound[2, 3] = 1.0, 0.5
    spreads = Spreads(busy_s=busy_s, besides_s=besides_s, trip_s=trip_s, besides_trip_s=besides_trip_s, bound=bound)
    none = np.zeros((1, 4))
    found = [
        fastest_spread(
            [
                [
                    RankBounds(
                        busy_s=b[None],
                        passes_s=np.array([t[2], t[1], t[0], t[0]])[:, None],
                        state_bytes=none,
                        saved_bytes=none,
                        room=1.0,
                        crossing=np.zeros(0),
                    )
                ]
                for b, t in zip(busy_s[number], trip_s[number], strict=True)
            ],
            besides_s[number].tolist(),
            besides_trip_s[number].tolist(),
            [1, 1, 1],
            bound,
            TRIPS,
        )
        for number in range(6)
    ]
    fastest_s = np.array([seconds for seconds, _ in found])
    assert (spreads.quick() <= fastest_s * (1.0 + 1e-5)).all()
    for number, (_, weights) in enumerate(found):
        bounds = spreads.bounds(weights)
        assert (bounds <= fastest_s * (1.0 + 1e-5)).all()
        assert bounds[number] == pytest.approx(fastest_s[number], rel=1e-4)


def test_memory_forces_recomputation_or_another_spread():
    """Shares and modes by hand: units of 4 s, or of 5 s if they save nothing, of 8 bytes for each micro-batch held."""
    both = [4.0, 5.0]

    def spread(room, in_flight):
        rank = on(both, np.zeros((0, 2)), state=2.0, saved=[8.0, 0.0], room=room)
        return fastest_spread([[rank]] * len(in_flight), [0.0] * len(in_flight), [], in_flight)[0]

    assert spread(10.0, [1]) == pytest.approx(4.0, rel=1e-5)
    # Half of what is saved fits beside the state.
    assert spread(6.0, [1]) == pytest.approx(4.5, rel=1e-5)
    assert spread(1.0, [1]) == np.inf
    # Two ranks, of which the first holds two micro-batches: each has a half, and 1 + 8 bytes are saved there at most.
    assert spread(9.0, [2, 1]) == pytest.approx(2.0, rel=1e-5)
    assert spread(5.0, [2, 1]) == pytest.approx(_by_shares(5.0), rel=1e-3)


def _by_shares(room):
    """The same by trying shares of the first rank and of its units that save."""
    best = np.inf
    for share in np.linspace(0.0, 1.0, 2001):
        seconds = []
        for mine, count in ((share, 2), (1.0 - share, 1)):
            saving = min(1.0, max(0.0, room - 2.0 * mine) / max(8.0 * count * mine, 1e-30))
            seconds.append(mine * (5.0 - saving) if 2.0 * mine <= room else np.inf)
        best = min(best, max(seconds))
    return best
