"""Parameters that several units of a rank read, against the definition, recounted from the graph alone."""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from small_graphs import build_shared

from automap.cluster import parse_cluster
from automap.price.evaluator import Evaluator
from automap.price.kernels.tied_parameters import exchange_s
from automap.problem import Problem
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo
from ir.alike_order import alike_order

B, P = -1, -2


def readings(space, lowered):
    """(rank, parameter) -> of each reader, axis -> placement, and whether the reader leaves a sum of its gradient."""
    graph, blocks = space.problem.graph, space.evaluator.blocks
    signatures = {}
    for number, segments in enumerate(lowered.chunks):
        for segment in segments:
            unit = blocks.units[segment.unit]
            for k, index in enumerate(range(unit.start, unit.stop)):
                table = space.linkage.types[unit.type].signatures[k]
                signatures[index] = (number % len(lowered.layout.stages), [table[int(v)] for v in segment.chosen[k]])
    found = defaultdict(list)
    for tensor in graph.parameters:
        for index in graph.consumers[tensor.name]:
            user, name = index, tensor.name
            while graph.operators[user].is_view:
                name = graph.operators[user].outputs[0]
                user = graph.consumers[name][0]
            slot, used = graph.operators[index].inputs.index(tensor.name), graph.operators[user].inputs.index(name)
            rank, read = signatures[index]
            grads = [s.inputs[used] == B and s.input_gradients[used] == P for s in signatures[user][1]]
            found[rank, tensor.name].append(
                [(max(s.inputs[slot], B), grad) for s, grad in zip(read, grads, strict=True)]
            )
    return found


def counted(space, lowered, rank, name, readers):
    """Elements that a rank holds of a parameter, and those of its gradient that are reduced over each axis."""
    elements = space.problem.graph.tensors[name].num_elements
    sizes, reduced = lowered.layout.stages[rank].axes, [0.0] * len(lowered.axes)
    lies = [{reader[axis][0] for reader in readers} for axis in range(len(sizes))]
    for size, some in zip(sizes, lies, strict=True):
        elements /= size if len(some) == 1 and min(some) >= 0 else 1
    held = elements
    for axis in reversed(range(len(sizes))):
        if sizes[axis] > 1 and (len(lies[axis]) > 1 or any(reader[axis][1] for reader in readers)):
            reduced[axis] = elements
            elements /= sizes[axis]
    return np.array([held, *reduced])


@pytest.mark.parametrize("pp", [1, 2])
def test_a_weight_that_readers_split_differently_is_whole_and_its_gradient_reduced(pp, gpt, space):
    rng = np.random.default_rng(3)
    s = space(gpt(), "2x4xA100", 16, zero=0, pp=pp)
    unlike = 0
    for _ in range(60):
        lowered = s.lowered(s.random(rng))
        wanted = np.zeros((pp, 1 + len(lowered.axes)))
        for (rank, name), readers in readings(s, lowered).items():
            wanted[rank] += counted(s, lowered, rank, name, readers)
            unlike += any(len({reader[axis][0] for reader in readers}) > 1 for axis in range(len(lowered.axes)))
        priced = np.zeros_like(wanted)
        priced[:, 0] = s.evaluator.evaluate(lowered).ranks["parameter_bytes"] / s.problem.state_bytes[0]
        for number, segment, incoming in s.evaluator.surroundings(lowered):
            rank = number % pp
            row = s.evaluator.unit_cost(segment, incoming, lowered.stages[rank])
            priced[rank, 1:] += row.reduced[: len(lowered.axes)]
        for tie in s.evaluator.tied.rows(lowered):
            if tie.rank == tie.other_rank:
                priced[tie.rank, 1:] -= tie.excess.reduced[: len(lowered.axes)]
        assert priced == pytest.approx(wanted)
    assert unlike > 10 or pp > 1


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_three_readers_count_as_one(pp, space):
    """T5's table is read by the encoder, the decoder and the head."""
    rng = np.random.default_rng(3)
    graph = zoo.build("t5:layers=2,hidden=64,heads=4,seq_len=32,vocab_size=128")
    s = space(graph, "2x4xA100", 16, zero=0, pp=pp)
    name = max(graph.parameters, key=lambda tensor: len(graph.consumers[tensor.name])).name
    several = Counter()
    for _ in range(60):
        lowered = s.lowered(s.random(rng))
        ties = [tie for tie in s.evaluator.tied.ties(lowered) if tie.name == name]
        rows = s.evaluator.tied.rows(lowered, ties=ties)
        for rank in range(pp):
            readers = readings(s, lowered)[rank, name]
            several[len(readers)] += 1
            alone = sum(counted(s, lowered, rank, name, [reader]) for reader in readers)
            together = counted(s, lowered, rank, name, readers) if readers else 0.0
            mine = rows[(rows["rank"] == rank) & (rows["other_rank"] == rank)]["excess"]
            given = [mine["parameters"].sum(), *mine["reduced"][:, : len(lowered.axes)].sum(axis=0)]
            assert given == pytest.approx((alone - together).tolist() if readers else [0.0] * len(given))
    assert several[3] if pp == 1 else several[1] and several[2]


def test_zero_shards_once_a_weight_that_is_whole_because_readers_differ(gpt, space):
    rng = np.random.default_rng(4)
    s = space(gpt(), "4xA100", 16, zero=3, pp=1, tp=1)
    for _ in range(40):
        ranks = s.evaluator.evaluate(s.lowered(s.random(rng))).ranks
        # On its only axis of several ranks every parameter is split or sharded.
        assert ranks[0]["optimizer_bytes"] == pytest.approx(
            s.problem.graph.num_parameters / 4 * s.problem.state_bytes[2]
        )


def test_ranks_reduce_what_they_hold_in_one_ring_over_the_links_between_them(space):
    """Where one device is a stage and no axis has several ranks, nothing else is exchanged behind the passes.

    The oracle joins the ranks that hold a parameter in every order, by the links between the devices themselves.
    """
    rng = np.random.default_rng(5)
    graph = zoo.build("t5:layers=4,hidden=64,heads=4,seq_len=32,vocab_size=4096")
    s = space(graph, "2x4xA100@10Gbit", 16, pp=8, tp=1, zero=0)
    seen = set()
    for _ in range(40):
        lowered = s.lowered(s.random(rng))
        holders, elements = defaultdict(set), defaultdict(float)
        rows = s.evaluator.tied.rows(lowered)
        for tie, row in zip(s.evaluator.tied.ties(lowered), rows, strict=True):
            if row.rank != row.other_rank:
                holders[tie.name] |= set(tie.ranks)
                elements[tie.name] = max(elements[tie.name], float(row.exchanged))

        def link(one, other, lowered=lowered):
            """Seconds of latency and bytes/s between two ranks."""
            ends = [np.array([int(lowered.layout.stages[rank].devices[0])]) for rank in (one, other)]
            return s.evaluator.laid_out.sends.of(tuple(map(s.evaluator.laid_out.pattern, ends)), *ends)

        wanted = np.zeros(8)
        for name, ranks in holders.items():
            seen.add((len(ranks), len({rank // 4 for rank in ranks})))
            data = elements[name] * s.evaluator.settings(0)["sent_gradient_bytes"]
            share = (len(ranks) - 1) / len(ranks)
            ways = [[link(*pair) for pair in itertools.pairwise(way)] for way in itertools.permutations(ranks)]
            wanted[list(ranks)] += min(
                max(wait for wait, _ in way) * (len(ranks) - 1) + 2 * share * data / min(rate for _, rate in way)
                for way in ways
            )
        assert s.evaluator.evaluate(lowered).ranks["sync_s"] == pytest.approx(wanted)
    # Two ranks of a host; three and four on two hosts.
    assert seen >= {(2, 1), (3, 2), (4, 2)}


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize(("pp", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_a_weight_that_layers_read_through_one_view_costs_what_it_costs_without(pp, virtual, zero):
    """A Transpose of a parameter is free: each stage with such a layer holds the weight and reduces its gradient."""
    found = []
    for turned in (True, False):
        training = {"global_batch": 16, "trainer": "automap"}
        problem = Problem.build(
            alike_order(build_shared(6, turned=turned)), parse_cluster("2x4xV100-16GB@25Gbit"), training
        )
        evaluator = Evaluator(problem)
        strategy = Strategy(pp=pp, micro_batch=2, zero=zero, virtual=virtual)
        found.append(evaluator.evaluate(hand_made(evaluator, strategy)))
    turned, plain = found
    assert turned.step_time_s == pytest.approx(plain.step_time_s, rel=1e-12)
    for name in ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "buffer_bytes", "sync_s"):
        assert turned.ranks[name] == pytest.approx(plain.ranks[name], rel=1e-12)
    assert (turned.ranks["parameter_bytes"] > 0.0).all()


def test_an_exchange_runs_along_the_best_of_all_walks():
    """A walk begins at any rank that holds the parameter and goes on until it has met all of them. Some links are
    equal, and ranks use them in any order."""
    rng = np.random.default_rng(0)
    for ranks in [*range(2, 9)] * 60:
        holds = np.zeros(ranks, dtype=np.bool_)
        holds[rng.choice(ranks, rng.integers(2, ranks + 1), replace=False)] = True
        latency_s, bytes_per_s = rng.choice([0.0, 0.1, 0.5, 2.0], ranks), rng.choice([1.0, 3.0, 7.0, np.inf], ranks)
        boundaries, size, data = rng.permutation(ranks), int(holds.sum()), rng.choice([0.5, 4.0])
        spent = []
        for begin in np.flatnonzero(holds):
            steps = next(n for n in range(ranks) if holds[(begin + np.arange(n + 1)) % ranks].sum() == size)
            used = boundaries[(begin + np.arange(steps)) % ranks]
            rate = 2.0 * (size - 1) / size * data / bytes_per_s[used].min()
            spent.append((size - 1) * latency_s[used].max() + rate)
        found = exchange_s.py_func(float(size), data, holds, boundaries, (latency_s, bytes_per_s))
        assert found == pytest.approx(min(spent), rel=1e-12)
