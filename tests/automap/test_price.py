"""The price against closed forms and independent counts."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from collective_list import list_collectives
from crossing_graphs import GRAPHS
from price_cases import link_of, stage_of

from automap.cluster import parse_cluster
from automap.families import KERNELS
from automap.fitted_curves import fitted
from automap.group_links import group_link
from automap.price.curves import attention_curve, gemm_curve, shared
from automap.price.estimate import error_band, estimate_lowered, lower_bound_s
from automap.price.evaluator import Evaluator
from automap.price.kernels.attention import ALL_KEYS, AttentionShape, attention_s
from automap.price.kernels.collectives import RINGS, UNKNOWN, Reason, collective_s, convert
from automap.price.kernels.cost_records import COLLECTIVE_DTYPE, Recorder
from automap.price.kernels.gemm import gemm_s
from automap.price.kernels.operators import product_s
from automap.price.kernels.records import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    NUM_COLLECTIVES,
    REDUCE_SCATTER,
)
from automap.price.link_records import link_record
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.stated_strategy import Strategy, hand_made
from automap.space.templates import megatron_signatures
from automap.trainers import trainers
from ir import zoo
from ir.build import GraphBuilder

B, P = -1, -2


def template(space, *, pp=1, tp=1, micro=1, sequence_parallel=False, recompute="none", zero=0, virtual=1):
    shape = next(s for s in space.shapes if (s.pp, s.tp, s.num_micro_batches, s.virtual) == (pp, tp, micro, virtual))
    prefix = space.even_values(shape, recompute=recompute, zero=zero)
    return space.lowered(megatron_signatures(space, shape, prefix, sequence_parallel=sequence_parallel))


def converted(source, target, sizes, data=8e6, link=None):
    times, stage = np.zeros(NUM_COLLECTIVES), stage_of(sizes, link_of(1e-5, 1e9) if link is None else link)
    nobody = Recorder(np.empty(0, dtype=COLLECTIVE_DTYPE), np.zeros(1, np.int64))
    convert(data, np.array(source), np.array(target), 0, stage, times, Reason(0, 0, 0, 0.0), nobody)
    return times


@pytest.mark.parametrize(
    ("source", "target", "kind", "factor"),
    [
        (0, B, ALL_GATHER, 3 / 4),
        (P, B, ALL_REDUCE, 2 * 3 / 4),
        (P, 0, REDUCE_SCATTER, 3 / 4),
        (0, 1, ALL_TO_ALL, 3 / 4 / 4),
        (B, 0, None, 0),
        (B, P, None, 0),
        (0, 0, None, 0),
        (P, P, None, 0),
        (B, B, None, 0),
    ],
)
def test_one_axis_conversions_move_ring_volumes(source, target, kind, factor):
    times = converted([source], [target], [4])
    expected = np.zeros(NUM_COLLECTIVES)
    if kind is not None:
        expected[kind] = 1e-5 + factor * 8e6 / 1e9
    assert times == pytest.approx(expected)


@pytest.mark.parametrize(
    ("source", "target", "kind", "shown"),
    [
        (0, B, ALL_GATHER, 1.0),
        (P, 0, REDUCE_SCATTER, 1.0),
        (1, B, ALL_GATHER, 0.3),
        (P, 1, REDUCE_SCATTER, 0.3),
        (P, B, ALL_REDUCE, 0.3),
        (0, 1, ALL_TO_ALL, 0.9),
    ],
)
def test_products_hide_what_keeps_the_samples_apart(source, target, kind, shown):
    """Samples (dim 0) that are brought together, or summed up and handed out, wait for nobody's product."""
    stage = stage_of([4], link_of(1e-5, 1e9))
    recorder = Recorder(np.empty(1, dtype=COLLECTIVE_DTYPE), np.zeros(1, np.int64))
    whole, part = np.zeros(NUM_COLLECTIVES), np.zeros(NUM_COLLECTIVES)
    convert(8e6, np.array([source]), np.array([target]), 0, stage, whole, Reason(0, 0, 0, 0.0), recorder)
    stage.hardware.exposed, stage.hardware.exposed_exchange = 0.3, 0.9
    convert(8e6, np.array([source]), np.array([target]), 0, stage, part, Reason(0, 0, 0, 0.0), recorder)
    assert part[kind] == pytest.approx(shown * whole[kind]) and whole[kind] > 0.0
    assert recorder.rows[0].shown_s == recorder.rows[0].seconds == whole[kind]
    # Tokens on the way to or from experts wait whatever axis they come from.
    routed = np.zeros(NUM_COLLECTIVES)
    convert(8e6, np.array([source]), np.array([target]), 0, stage, routed, Reason(0, 0, 0, 1.0), recorder)
    assert routed[kind] == pytest.approx((0.9 if kind == ALL_TO_ALL else 1.0) * whole[kind])


def exchanged(ranks, copies, *, joins, once):
    """Bytes over the link at 1 B/s when tokens go to experts over axes with these ranks, of 8 MB in all."""
    stage, times = stage_of(ranks, link_of(0.0, 1.0)), np.zeros(NUM_COLLECTIVES)
    stage.hardware.joins_exchanges, stage.hardware.copies_once = float(joins), float(once)
    nobody = Recorder(np.empty(0, dtype=COLLECTIVE_DTYPE), np.zeros(1, np.int64))
    source, target = np.arange(len(ranks)), np.full(len(ranks), 2)
    convert(8e6, source, target, 0, stage, times, Reason(0, 0, 0, copies), nobody)
    return times[ALL_TO_ALL]


def test_tokens_go_to_experts_over_several_axes_at_once():
    """All but its own part of what a rank has leaves it once; axis after axis, most of it would travel twice."""
    own = 8e6 / 8
    assert exchanged([4, 2], 2.0, joins=True, once=False) == pytest.approx(own * 7 / 8)
    assert exchanged([4, 2], 2.0, joins=False, once=False) == pytest.approx(own * (3 / 4 + 1 / 2))
    assert exchanged([4, 2], 0.0, joins=True, once=True) == pytest.approx(own * (3 / 4 + 1 / 2))
    assert exchanged([8], 2.0, joins=True, once=False) == exchanged([8], 2.0, joins=False, once=False)


@pytest.mark.parametrize(("ranks", "copies"), [(2, 2), (4, 2), (4, 3), (3, 4)])
def test_a_rank_with_several_experts_of_a_token_gets_it_once(ranks, copies):
    """Against all ways in which the experts of a token may be spread."""
    ways = list(itertools.product(range(ranks), repeat=copies))
    share = sum(len({*way}) for way in ways) / len(ways) / copies
    every = exchanged([ranks], float(copies), joins=True, once=False)
    assert exchanged([ranks], float(copies), joins=True, once=True) == pytest.approx(share * every)


@pytest.mark.parametrize(("joins", "once"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("latency", [0.0, 1e-3])
def test_conversions_cost_no_less_once_they_are_decided(joins, once, latency):
    """Each axis of a mesh in turn has an undecided source, target or both; every placement of it is tried."""
    nobody = Recorder(np.empty(0, dtype=COLLECTIVE_DTYPE), np.zeros(1, np.int64))
    # A reduce-scatter and a gather of all may be faster than an all-reduce on a link that was measured.
    rates = np.array([{ALL_REDUCE: 0.8e9}.get(kind, 1e9) for kind in range(NUM_COLLECTIVES)])
    stage = stage_of([2, 4], link_of(latency, rates))
    stage.hardware.joins_exchanges, stage.hardware.copies_once = float(joins), float(once)
    pairs = list(itertools.product((B, P, 0, 1), repeat=2))

    def cost(copies, first, second):
        times = np.zeros(NUM_COLLECTIVES)
        source, target = np.array([first, second]).T.copy()
        waited = convert(8e6, source, target, 0, stage, times, Reason(0, 0, 0, copies), nobody)
        return np.array([times.sum(), waited])

    for copies in (0.0, 8.0):
        every = np.array([[cost(copies, a, b) for b in pairs] for a in pairs])
        for i, known in enumerate(pairs):
            for source, target in itertools.product((UNKNOWN, B, P, 0, 1), repeat=2):
                fits = [source in (UNKNOWN, s) and target in (UNKNOWN, t) for s, t in pairs]
                for bound, decided in (
                    (cost(copies, known, (source, target)), every[i, fits]),
                    (cost(copies, (source, target), known), every[fits, i]),
                ):
                    assert (bound <= decided.min(axis=0) * (1 + 1e-12)).all(), (known, source, target, copies)


def test_two_axes_shrink_before_they_grow():
    # P -> S on the first axis halves what the second axis gathers.
    times = converted([P, 1], [0, B], [2, 4])
    assert times[REDUCE_SCATTER] == pytest.approx(1e-5 + 0.5 * (8e6 / 4) / 1e9)
    assert times[ALL_GATHER] == pytest.approx(1e-5 + 0.75 * (8e6 / 2) / 1e9)


GIB_PER_S = 87.7 * 2**30
DTENSOR = {
    (8, GIB_PER_S, 0.6): {"S0->R": 2505.099, "S0->S1": 323.587, "P->R": 5003.597, "P->S0": 2505.099},
    (16, 0.22 * GIB_PER_S, 2.7): {"S0->R": 12194.659, "S0->S1": 807.322, "P->R": 24382.718, "P->S0": 12194.659},
}
"""(ranks, bytes/s, microseconds a hop) -> microseconds, for float32 [8192, 8192] on one mesh axis, inside a host and on
two hosts. Origin: the cost model of torch.distributed.tensor, whose collectives wait 6.6 us and a hop for each step."""


@pytest.mark.parametrize("constants", DTENSOR)
@pytest.mark.parametrize("conversion", ["S0->R", "S0->S1", "P->R", "P->S0"])
def test_conversions_meet_those_of_dtensor(constants, conversion):
    """The same constants as a link: rings make one round of n - 1 hops, an all-reduce two.

    An all-to-all there is the all-gather's formula on the unscaled shard and a microsecond of penalty, for want of a
    real one: the bytes are ours, (n - 1) / n of the shard. Ours has the latency of an all-reduce, one round more.
    """
    ranks, rate, hop = constants
    words = {"S0": 0, "S1": 1, "R": B, "P": P}
    source, target = (words[word] for word in conversion.split("->"))
    rounds = np.array([1 if kind in RINGS else 2 for kind in range(NUM_COLLECTIVES)])
    link = link_of((6.6 + rounds * (ranks - 1) * hop) * 1e-6, rate)
    mine = converted([source], [target], [ranks], data=4.0 * 8192 * 8192, link=link).sum() * 1e6
    differs = (ranks - 1) * hop - 1.0 if conversion == "S0->S1" else 0.0
    assert mine - differs == pytest.approx(DTENSOR[constants][conversion], abs=0.01)


def test_a_collective_over_one_rank_is_free():
    assert collective_s(ALL_REDUCE, 1.0, link_of(1.0, 1.0), 1e9) == 0.0


def test_collectives_inside_a_host_and_between_hosts_take_what_the_formulas_say(mlp, space):
    """docs/cost-model-formulas.md: 8 ranks of one host, then two a host on four hosts."""
    s = space(mlp(), "4x8xA100", 64)
    links = {k.name: k.bytes_per_s for k in s.problem.cluster.links.values()}
    latency, ring, data = shared("node_latency_us") * 1e-6, shared("ring_us") * 1e-6, 3e7
    stage = s.evaluator.layout((1, 8), 4).stages[0]
    x = 2 * 7 / 8 * data / links["nvlink3"] * (1 + 0.3 / 8)
    inside = latency * (1 + 0.2 * 7) / 2.4 + x + 2.5 * (x * 1e-6) ** 0.5
    assert collective_s(ALL_REDUCE, 8.0, stage.links[1], data) == pytest.approx(inside)
    stage = s.evaluator.layout((8, 4), 1).stages[0]
    nics = links["infiniband-hdr"] * 8
    x = 7 / 8 * data / (nics * 2 / 8)
    assert collective_s(ALL_GATHER, 8.0, stage.links[0], data) == pytest.approx(latency + 7 * ring + x)
    assert collective_s(ALL_REDUCE, 8.0, stage.links[0], data) == pytest.approx(latency + 25e-6 * 2 + 2 * x)


def test_pairs_of_a_mesh_of_links_have_a_part_of_its_rate():
    """DGX-1: two of eight V100s share one or two of six links."""
    cluster = parse_cluster("8xV100")
    pair, whole = (link_record(group_link(cluster, range(n)), 1.0) for n in (2, 8))
    assert pair.bytes_per_s[ALL_REDUCE] * (1 + 0.3 / 2) == pytest.approx(
        0.18 * whole.bytes_per_s[ALL_REDUCE] * (1 + 0.3 / 8)
    )


def _is_attention(op, graph):
    made = [graph.tensors[n].role == "activation" and not graph.by_name.get(n, op).is_view for n in op.inputs]
    is_score = op.kind == "MatMul" and op.scope.endswith("attn") and all(made)
    return is_score or op.kind in ("Softmax", "Reshape") or (op.kind == "Transpose" and not op.is_view)


def test_one_device_is_the_sum_of_its_operators(gpt, space):
    """Kernels by their shapes, written down again here; host and device of a unit in the p-norm."""
    heads, seq, batch = 4, 32, 4
    s = space(gpt(heads=heads, seq=seq), "1xA100", batch)
    outcome = s.evaluator.evaluate(template(s))
    problem, graph = s.problem, s.problem.graph
    device, trainer = problem.cluster.device(0), problem.trainer
    curve = gemm_curve(device, "bf16")
    attention = attention_curve(device, "bf16", rate=trainer.attention_rate, portable=trainer.portable_attention)
    bandwidth = 2039e9 * device.memory_efficiency
    # Attention is one kernel: from where q, k and v are split into heads to where heads are merged.
    inside = {op.name for op in graph.operators if _is_attention(op, graph)}
    total, p = 0.0, shared("overlap_exponent")
    for unit in s.evaluator.blocks.units:
        forward = backward = kernels = 0.0
        for op in graph.operators[unit.start : unit.stop]:
            if op.is_view or op.is_constant or op.name in inside:
                if op.kind == "Softmax":
                    sizes = map(float, (1, batch * heads, batch * heads, seq, seq, 64 / heads, 64 / heads))
                    shape = AttentionShape(*sizes, ALL_KEYS, 2.0)
                    forward += attention_s(shape, attention, False)
                    backward += attention_s(shape, attention, True)
                    kernels += 1
                continue
            if op.forward_flops.at(1) > 0 and op.kind == "MatMul":
                left, weight = (graph.tensors[name].shape for name in op.inputs)
                m, k, n = float(batch * seq), float(left[-1]), float(weight[-1])
                forward += gemm_s(m, n, k, 1.0, 2.0, 2.0, curve)
                backward += gemm_s(m, k, n, 1.0, 2.0, 2.0, curve) + gemm_s(k, n, m, 1.0, 2.0, 4.0, curve)
                kernels += 1
                continue
            moved = 0.0
            for name in (*op.inputs, *op.outputs):
                t = graph.tensors[name]
                moved += t.elements.at(batch) * (2 if t.is_float else {"int64": 8, "bool": 1, "int32": 4}[t.dtype])
            moved *= trainer.elementwise_traffic * (trainer.loss_passes if "Loss" in op.kind else 1.0) / bandwidth
            forward += moved * op.traffic[0] + shared("kernel_us") * 1e-6
            backward += moved * op.traffic[1] + shared("kernel_us") * 1e-6
            kernels += any(op.traffic)
        host = trainer.host_us_per_operator * 1e-6 * kernels
        total += (forward**p + host**p) ** (1 / p)
        total += (backward**p + (shared("host_backward") * host) ** p) ** (1 / p)
    row = outcome.ranks[0]
    assert row["compute_s"] == pytest.approx(total, rel=1e-12)
    # Adam moves 14 bytes a parameter.
    assert row["optimizer_s"] == pytest.approx(graph.num_parameters * shared("optimizer_bytes") / bandwidth)
    overhead = (shared("micro_batch_ms") + trainer.step_overhead_ms) * 1e-3
    assert outcome.step_time_s == pytest.approx(total + overhead + row["optimizer_s"], rel=1e-12)
    parameter, gradient, state = problem.state_bytes
    assert row["parameter_bytes"] == graph.num_parameters * parameter
    assert row["gradient_bytes"] == graph.num_parameters * gradient
    assert row["optimizer_bytes"] == graph.num_parameters * state


@pytest.mark.parametrize("trainer", ["megatron-core", "fsdp", "generic"])
def test_a_matrix_of_what_links_achieve_has_their_price(trainer, gpt, space):
    """One device a host: rings and ZeRO's gathers between hosts take as long, however the rate is stated."""
    cluster = parse_cluster("4x1xA100@100Gbit")
    link = cluster.links[cluster.nodes[0].inter_node_link]
    rates = tuple(tuple(0.0 if i == j else link.bytes_per_s * 1e-9 for j in range(4)) for i in range(4))
    for zero in (0, 1, 3):
        seconds = []
        for stated in (cluster, dataclasses.replace(cluster, bandwidth_GBps=rates)):
            training = {"global_batch": 8, "precision": "bf16", "trainer": trainer}
            found = PlanSpace(Problem.build(gpt(hidden=256, layers=4), stated, training))
            seconds.append(found.evaluator.evaluate(template(found, micro=2, zero=zero)).step_time_s)
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-12), zero


@pytest.mark.parametrize("ranks", [1.0, 2.0])
def test_pieces_of_a_fused_weight_cost_what_one_product_costs(ranks, space):
    """Queries, keys and values from one linear layer, split over the ranks or not: one product of three times n."""
    s = space(zoo.build("gpt:layers=2,hidden=256,heads=4,seq_len=128,vocab_size=512"), "2xA100", 4, tp=2, pp=1)
    curve = gemm_curve(s.problem.cluster.device(0), "bf16")
    kernels = s.evaluator.tables.arrays.kernels
    rows = [i for i, kernel in enumerate(kernels) if 0.0 < kernel.share < 1.0]
    assert len(rows) % 3 == 0
    assert kernels["share"][rows].sum() == pytest.approx(len(rows) / 3)
    hardware, times = s.evaluator.layout((1, 2), 1).stages[0].hardware, np.empty(3)
    seconds = 0.0
    for i in rows[:3]:
        extents = kernels[i].extents * [1.0, 4.0, 1.0 / ranks, 1.0, 1.0]
        product_s(kernels[i], extents, hardware, times)
        seconds += times[0]
    assert seconds == pytest.approx(gemm_s(512.0, 768.0 / ranks, 256.0, 1.0, 2.0, 2.0, curve))


def test_pieces_of_a_fused_weight_are_together_one_parameter(space):
    """Trainers that gather one parameter at a time gather those that the model stores."""
    tables = space(
        zoo.build("gpt:layers=2,hidden=256,heads=4,seq_len=128,vocab_size=512"), "2xA100", 4
    ).evaluator.tables
    stored = dict.fromkeys((whole for whole, *_ in tables.graph.pieces.values()), 0.0)
    for name, row in zip(tables.names, tables.arrays.tensors, strict=True):
        if name in tables.graph.pieces:
            stored[tables.graph.pieces[name][0]] += row["num_parameters"]
        else:
            assert row["num_parameters"] == 1.0
    counted = [count for count in stored.values() if count]
    assert counted and counted == pytest.approx([1.0] * len(counted))


def test_the_weights_part_of_a_backward_pass_is_that_of_its_products(mlp, space):
    s = space(mlp((512, 2048, 512)), "1xA100", 64)
    lowered = template(s)
    curve = gemm_curve(s.problem.cluster.device(0), "bf16")
    expected = gemm_s(512.0, 2048.0, 64.0, 1.0, 2.0, 4.0, curve) + gemm_s(2048.0, 512.0, 64.0, 1.0, 2.0, 4.0, curve)
    found = sum(row["weight_s"] for row in s.evaluator.unit_costs(lowered, s.evaluator.distinct_units(lowered)[0]))
    assert found == pytest.approx(expected)


def test_the_parts_of_a_backward_pass_are_no_cheaper_apart(gpt, light_graph, space):
    rng = np.random.default_rng(3)
    for s in (space(gpt(), "2x2xA100", 8), space(light_graph("resnet50"), "4xV100", 8)):
        for _ in range(10):
            lowered = s.lowered(s.random(rng))
            for row in s.evaluator.unit_costs(lowered, s.evaluator.distinct_units(lowered)[0]):
                assert row["input_s"] + row["weight_s"] == pytest.approx(row["backward_s"])
                assert min(row["input_host_s"], row["weight_host_s"]) >= 0.0
                # Minkowski: each part waits for its own launches.
                assert row["input_host_s"] + row["weight_host_s"] >= row["backward_host_s"] - 1e-12 * row["backward_s"]


def test_split_schedules_have_smaller_bubbles_for_more_memory(gpt, space):
    """GPT of equal layers, big enough that the device and not its host is what takes time."""
    found = {}
    for kind in ("1f1b", "zb1p", "zb2p"):
        s = space(zoo.build("gpt:layers=16,hidden=2048,heads=16,seq_len=1024,vocab_size=512"), "8xA100", 32,
                  pp=8, schedule=kind)  # fmt: skip
        found[kind] = s.evaluator.evaluate(template(s, pp=8, micro=32))
    times = [o.step_time_s for o in found.values()]
    assert times[0] > times[1] > times[2]
    one, two, three = (o.ranks["activation_bytes"] for o in found.values())
    assert one[1:-1] / two[1:-1] == pytest.approx([(8 - r) / 8 for r in range(1, 7)])
    assert three[1:-1] / two[1:-1] == pytest.approx([15 / 8] * 6)


def test_megatron_has_two_all_reduces_a_layer_forward_and_two_backward(gpt, space):
    """Megatron-LM (arXiv 1909.08053): f and g; vocabulary split adds one behind the embedding and one at the head."""
    s = space(gpt(layers=3), "4xA100", 8, tp=4)
    found = list(list_collectives(template(s, tp=4), s.evaluator))
    count = {d: sum(x.kind == "all_reduce" and x.direction == d for x in found) for d in ("forward", "backward")}
    # The fourth exchange each way is that of the loss over the split classes, inside the operator.
    inside = sum(x.operator == "loss" for x in found)
    assert {x.kind for x in found} == {"all_reduce"}
    assert count["forward"] + count["backward"] == (2 * 3 + 1) * 2 + inside
    hidden = s.problem.graph.tensors["h.0.x1"]
    sizes = {x.bytes for x in found if x.operator != "loss"}
    assert sizes == {hidden.elements.at(8) * 2.0}


def test_sequence_parallelism_turns_them_into_gathers_and_scatters(gpt, space):
    """Korthikanti et al. (arXiv 2205.05198): every all-reduce becomes a reduce-scatter and an all-gather."""
    s = space(gpt(layers=3), "4xA100", 8, tp=4)
    found = [
        x for x in list_collectives(template(s, tp=4, sequence_parallel=True), s.evaluator) if x.operator != "loss"
    ]
    assert {x.kind for x in found} == {"all_gather", "reduce_scatter"}
    for direction in ("forward", "backward"):
        kinds = [x.kind for x in found if x.direction == direction]
        assert kinds.count("all_gather") >= 2 * 3
        assert kinds.count("reduce_scatter") >= 2 * 3


def test_the_list_of_collectives_adds_up_to_the_price(gpt, light_graph, space):
    rng = np.random.default_rng(5)
    for s in (space(gpt(), "2x2xA100", 8, recompute="none"), space(light_graph("shufflenet"), "4xV100", 8)):
        for _ in range(10):
            lowered = s.lowered(s.random(rng))
            ranks = len(lowered.layout.stages)
            listed = np.zeros(ranks)
            for x in list_collectives(lowered, s.evaluator):
                # A sum on its way out counts for the stage that takes it.
                listed[(x.stage + (not x.operator)) % ranks] += x.seconds
            outcome = s.evaluator.evaluate(dataclasses.replace(lowered, zero=0, chunks=without_recompute(lowered)))
            priced = outcome.ranks["comm_s"].sum(axis=1)
            assert priced == pytest.approx(listed * lowered.num_micro_batches, rel=1e-9, abs=1e-15)


def without_recompute(lowered):
    return tuple(
        tuple(dataclasses.replace(x, recomputed=np.zeros_like(x.recomputed)) for x in chunk) for chunk in lowered.chunks
    )


def test_a_sum_is_made_whole_before_it_leaves_its_stage(gpt, space):
    """An all-reduce of the tensor that crosses the cut makes it whole; its gradient comes back whole."""
    rng, found = np.random.default_rng(6), 0
    s = space(gpt(layers=4), "4xA100", 8, pp=2, tp=2, virtual_stages=1)
    graph = s.problem.graph
    for _ in range(60):
        lowered = s.lowered(s.random(rng))
        last = lowered.chunks[0][-1]
        made = s.evaluator.crossing_placement(last)
        leaving = [x for x in list_collectives(lowered, s.evaluator) if not x.operator]
        assert len(leaving) == (P in made[lowered.layout.stages[0].axes > 1])
        for one in leaving:
            assert (one.kind, one.direction, one.stage) == ("all_reduce", "forward", 0)
            elements = graph.tensors[one.tensor].elements.at(lowered.samples)
            split = lowered.layout.stages[0].axes[made >= 0].prod()
            assert one.bytes == elements * s.problem.activation_bytes / split
            assert one.tensor in graph.operators[s.evaluator.blocks.units[last.unit].stop - 1].outputs
            found += 1
    assert found > 5


@pytest.mark.parametrize("name", ["unet", "cells"])
def test_what_later_units_read_is_gathered_where_it_is_made(name, space):
    """A skip that is split by channels is handed on whole; one that is split by samples as it is."""
    rng, found = np.random.default_rng(7), 0
    s = space(GRAPHS[name](), "4xA100", 16, pp=1)
    graph, blocks = s.problem.graph, s.evaluator.blocks
    makers = {graph.operators[graph.producer[name]].name: name for name in blocks.carried}
    for _ in range(20):
        lowered = s.lowered(s.random(rng))
        sizes = lowered.layout.stages[0].axes
        listed = [x for x in list_collectives(lowered, s.evaluator) if makers.get(x.operator) == x.tensor]
        for segment in lowered.chunks[0]:
            unit = blocks.units[segment.unit]
            for offset, chosen in enumerate(segment.chosen):
                op = graph.operators[unit.start + offset]
                if op.name in makers:
                    table = s.linkage.types[unit.type].signatures[offset]
                    made = [table[value].outputs[0] for value in chosen]
                    expected = sum(p not in (B, 0) for p, size in zip(made, sizes, strict=True) if size > 1)
                    mine = [x for x in listed if x.operator == op.name]
                    assert len(mine) == expected and all(x.direction == "forward" for x in mine)
                    found += expected
    assert found > 5


@pytest.mark.parametrize("name", ["unet", "cells", "towers"])
def test_all_that_crosses_is_sent(name, space):
    """Replicas send their samples of every tensor that crosses behind a unit."""
    s = space(GRAPHS[name](), "4xA100", 16, pp=2, tp=1, virtual_stages=1)
    graph, blocks = s.problem.graph, s.evaluator.blocks
    lowered = template(s, pp=2, micro=2)
    rank = lowered.layout.stages[0]
    for number, segment, incoming in s.evaluator.surroundings(lowered):
        unit = blocks.units[segment.unit]
        crossing = [graph.tensors[name] for name in (unit.boundary, *unit.beside) if name]
        cost = s.evaluator.unit_cost(segment, incoming, lowered.stages[number])
        whole = sum(tensor.elements.at(lowered.samples) for tensor in crossing) * s.problem.activation_bytes
        assert cost.boundary_bytes == pytest.approx(whole / rank.axes.prod(), rel=1e-12), unit


def test_data_parallel_gradient_traffic(mlp, space):
    s = space(mlp(), "4xA100", 64, tp=1, pp=1)
    row = s.evaluator.evaluate(template(s)).ranks[0]
    stage = s.evaluator.layout((4, 1), 1).stages[0]
    data = s.problem.graph.num_parameters * s.problem.state_bytes[1]
    full = collective_s(ALL_REDUCE, 4.0, stage.links[0], data)
    assert 0.0 < row["sync_s"] <= full
    assert row["sync_s"] >= full * (1.0 - s.problem.trainer.gradient_overlap) - 1e-15


def test_the_gradient_of_positions_is_reduced_once_a_step(space):
    """Positions depend on no sample: their gradient is added up over the micro-batches like that of a weight."""
    graph = zoo.build("gpt:layers=2,hidden=256,heads=4,seq_len=128,vocab_size=512")
    s = space(graph, "4xA100", 16, tp=1, pp=1)
    lowered = template(s, micro=2)
    assert not list(list_collectives(lowered, s.evaluator))
    reduced = 0.0
    for _, segment, incoming in s.evaluator.surroundings(lowered):
        row = s.evaluator.unit_cost(segment, incoming, lowered.stages[0])
        reduced += row.reduced[0]
    tied = sum(graph.tensors[name].num_elements for name, _, _ in s.evaluator.tied.parameters)
    assert reduced == graph.num_parameters + tied


def test_a_parameter_that_two_units_of_a_rank_read_is_reduced_once(gpt, space):
    s = space(gpt(hidden=256, vocab=8192), "4xA100", 16, tp=1, pp=1)
    graph = s.problem.graph
    lowered = template(s, micro=4)
    row = s.evaluator.evaluate(lowered).ranks[0]
    link = s.evaluator.layout((4, 1), 1).stages[0].links[0]
    assert s.evaluator.tied.parameters
    whole = collective_s(ALL_REDUCE, 4.0, link, graph.num_parameters * s.problem.state_bytes[1])
    hidden = s.problem.trainer.gradient_overlap
    twice = graph.num_parameters + graph.tensors["wte"].num_elements
    # All of the overlap is hidden here: the backward pass takes longer.
    assert row["sync_s"] == pytest.approx(whole * (1 - hidden))
    assert collective_s(ALL_REDUCE, 4.0, link, twice * s.problem.state_bytes[1]) > 1.3 * whole


def test_zero_1_reduces_one_way_and_gathers_the_weights(mlp, space):
    """Half an all-reduce of gradients that the backward pass hides in part, then weights at the gathers' rate."""
    s = space(mlp((1024, 4096, 1024)), "2x8xA100", 64, tp=1, pp=1)
    row = s.evaluator.evaluate(template(s, zero=1)).ranks[0]
    plain = s.evaluator.evaluate(template(s, zero=0)).ranks[0]
    trainer, count = s.problem.trainer, s.problem.graph.num_parameters
    latency, ring = shared("node_latency_us") * 1e-6, shared("ring_us") * 1e-6
    rate = s.problem.cluster.links["infiniband-hdr"]
    parameter, gradient, _ = s.problem.state_bytes
    reduce = latency + 25e-6 + 2 * 15 / 16 * count * gradient / (rate.bytes_per_s * 8)
    spread = latency + 15 * ring + 15 / 16 * count * parameter / (200e9 * trainer.gather_bandwidth_share)
    hidden = trainer.gradient_overlap
    backward = plain["compute_s"] * 0.75

    def shown(seconds):
        return (1 - hidden) * seconds, (1 - hidden) * seconds + max(0.0, hidden * seconds - 0.3 * backward)

    low, high = shown(reduce)
    assert low - 1e-15 <= plain["sync_s"] <= high
    low, high = shown(reduce / 2)
    spread *= 1 - 0.8 * hidden
    assert low + spread - 1e-15 <= row["sync_s"] <= high + spread


def test_zero_3_shows_what_a_unit_does_not_hide_of_its_own_gathers(gpt, space):
    s = space(gpt(), "4xA100", 8, tp=1, pp=1)
    evaluator, trainer = s.evaluator, s.problem.trainer
    lowered = template(s, zero=3)
    link = evaluator.layout((4, 1), 1).stages[0].links[0]
    parameter, gradient, _ = s.problem.state_bytes
    expected = 0.0
    for _, segment, incoming in evaluator.surroundings(lowered):
        row = evaluator.unit_cost(segment, incoming, lowered.stages[0])
        forward = row["forward_s"] + row["forward_host_s"]
        backward = row["backward_s"] + row["backward_host_s"]
        gather = collective_s(ALL_GATHER, 4.0, link, row["parameters"] * parameter)
        scatter = collective_s(REDUCE_SCATTER, 4.0, link, row["parameters"] * gradient)
        for spent, moved in ((forward, gather), (backward, gather + scatter)):
            hidden = min(trainer.gradient_overlap * moved, spent)
            expected += moved - hidden
    rank = evaluator.evaluate(lowered).ranks[0]
    assert rank["zero_s"] == pytest.approx(expected)
    assert not rank["comm_s"].any()
    estimate = estimate_lowered(lowered, evaluator)
    assert estimate.breakdown_s["exposed_communication"] == {"zero_collectives": pytest.approx(expected)}


def test_a_rank_exchanges_once_with_each_neighbour(gpt, space):
    """Host time and transfer of one micro-batch's hidden states, both directions at once."""
    samples, micro, hidden = 2, 8, 64 * 32
    s = space(gpt(layers=4), "4xA100", samples * micro, pp=4)
    trainer = s.problem.trainer
    found = s.evaluator.evaluate(template(s, pp=4, micro=micro)).ranks["exchange_s"]
    rate = 0.6 * s.problem.cluster.links["nvlink3"].bytes_per_s
    one = trainer.send_host_ms * 1e-3 + (1 - trainer.send_overlap) * samples * hidden * 2.0 / rate
    assert found == pytest.approx(micro * one * np.array([1, 2, 2, 1]))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_shards_what_its_stage_says(gpt, space, zero):
    s = space(gpt(), "4xA100", 8, tp=1, pp=1)
    row = s.evaluator.evaluate(template(s, zero=zero)).ranks[0]
    count = s.problem.graph.num_parameters
    parameter, gradient, state = s.problem.state_bytes
    assert row["parameter_bytes"] == pytest.approx(count * parameter / (4 if zero >= 3 else 1))
    assert row["gradient_bytes"] == pytest.approx(count * gradient / (4 if zero >= 2 else 1))
    assert row["optimizer_bytes"] == pytest.approx(count * state / (4 if zero >= 1 else 1))


def test_1f1b_activations_do_not_grow_with_micro_batches_and_gpipe_ones_do(gpt, space):
    def peak(schedule, micro):
        s = space(gpt(layers=4), "4xA100", 4 * micro, pp=4, schedule=schedule)
        return s.evaluator.evaluate(template(s, pp=4, micro=micro)).ranks["activation_bytes"]

    assert peak("1f1b", 8) == pytest.approx(peak("1f1b", 32))
    assert peak("gpipe", 32)[0] == pytest.approx(4 * peak("gpipe", 8)[0])
    assert (peak("1f1b", 8) <= peak("gpipe", 8)).all()


def test_recomputation_trades_memory_for_time(gpt, space):
    s = space(gpt(layers=4, seq=256), "1xA100", 8, training={"trainer": "alpa"})
    none, selective, full = (s.evaluator.evaluate(template(s, recompute=m)) for m in ("none", "selective", "full"))
    memory = [o.ranks[0]["activation_bytes"] for o in (none, selective, full)]
    assert memory[0] > memory[1] > memory[2]
    assert none.step_time_s < selective.step_time_s < full.step_time_s


def test_attention_core_is_what_selective_recomputation_drops(gpt, space):
    """Without the core, a layer keeps no tensor of size sequence x sequence."""
    heads, seq, batch, layers = 4, 512, 2, 3
    # With so many words the loss is the fullest moment, in which all layers are saved.
    graph = gpt(layers=layers, heads=heads, seq=seq, vocab=4096)
    s = space(graph, "1xA100", batch, training={"trainer": "alpa"})
    kept = [s.evaluator.evaluate(template(s, recompute=m)).ranks[0]["activation_bytes"] for m in ("none", "selective")]
    square = batch * heads * seq * seq * 2.0
    assert kept[0] - kept[1] == pytest.approx(layers * square)  # softmax output; nothing masks it here
    fused = space(graph, "1xA100", batch)
    assert not fused.evaluator.has_core
    assert fused.evaluator.evaluate(template(fused)).ranks[0]["activation_bytes"] == pytest.approx(kept[1])


def test_breakdown_adds_up_and_nothing_beats_the_lower_bound(gpt, light_graph, space):
    rng = np.random.default_rng(2)
    for s in (space(gpt(), "2x4xA100", 16), space(light_graph("resnet50"), "2x2xV100@25Gbit", 16)):
        for _ in range(25):
            estimate = estimate_lowered(s.lowered(s.random(rng)), s.evaluator)
            parts = estimate.breakdown_s
            assert all(seconds > 0.0 for seconds in parts["exposed_communication"].values())
            total = parts["compute"] + sum(parts["exposed_communication"].values()) + parts["bubble"]
            assert total + parts["optimizer"] + parts["overhead"] == pytest.approx(estimate.step_time_s, rel=1e-9)
            assert estimate.step_time_s >= lower_bound_s(s.problem)
            assert 0.0 < estimate.mfu < 1.0


def test_a_vocabulary_that_ranks_share_unevenly_costs_what_the_next_even_one_does(space):
    """Of 2,051 words 4 ranks have 513, 513, 513 and 512; of 2,045 all ranks have all."""
    found = {}
    for size in (2051, 2052, 2045):
        graph = zoo.build(f"gpt:layers=1,hidden=64,heads=4,seq_len=64,vocab_size={size}")
        s = space(graph, "1x4xA100", 8)
        lowered = template(s, tp=4)
        found[size] = estimate_lowered(lowered, s.evaluator)
    odd, even, whole = found[2051], found[2052], found[2045]
    assert odd.step_time_s == pytest.approx(even.step_time_s, rel=1e-3)
    assert odd.memory_bytes[0].parameters == pytest.approx(even.memory_bytes[0].parameters, rel=1e-3)
    assert whole.memory_bytes[0].parameters > 2.0 * odd.memory_bytes[0].parameters


def test_tied_parameters_count_once_on_a_rank_and_on_each_of_two(gpt, space):
    s = space(gpt(layers=4), "2xA100", 4)
    tied = s.problem.graph.tensors["wte"].num_elements * s.problem.state_bytes[0]
    one = space(gpt(layers=4), "1xA100", 4)
    alone = one.evaluator.evaluate(template(one)).ranks[0]["parameter_bytes"]
    split = s.evaluator.evaluate(template(s, pp=2)).ranks["parameter_bytes"]
    assert split.sum() == pytest.approx(alone + tied)


def test_equal_signatures_on_swapped_axes_cost_the_same_inside_one_host(mlp, space):
    """No axis name is special: a 2 x 2 mesh priced both ways round."""
    s = space(mlp((64, 64)), "4xA100", 16, pp=1, tp=2)
    table = s.linkage.types[0].groups
    times = {}
    for one, other in itertools.product(range(3), repeat=2):
        values = list(s.even_values(s.shapes[0], recompute="none", zero=0))
        for _ in table:
            for value in (one, other):
                legal = np.flatnonzero(s.legal(values))
                values.append(int(legal[min(value, len(legal) - 1)]))
        times[one, other] = s.evaluator.evaluate(s.lowered(values)).ranks[0].comm_s.sum()
    assert times[0, 2] == pytest.approx(times[2, 0], rel=1e-9)


def test_a_device_that_nobody_measured_widens_the_band(mlp):
    """The less is known of its kernels the more, in squares; the device that is least sure counts."""
    error = fitted("gemm")["cross_validated"]["transfer"]
    assert list(error) == list(KERNELS[1:])
    assert 0.02 < error["alike"] < error["unlike"] < error["foreign"] < 0.5
    widest = {"2xA100": None, "2xV100": "alike", "1xA100+1xV100": "alike", "1xV100+1xP100": "unlike"}
    widest |= {"2xRTX4090": "unlike", "1xRTX4090+1xMI300X": "foreign", "2xcpu": "foreign"}
    trainer = trainers()["generic"].error_band
    for cluster, kernels in widest.items():
        problem = Problem.build(mlp(), cluster, {"global_batch": 8, "precision": "fp16"})
        assert error_band(problem) == pytest.approx(math.hypot(trainer, error[kernels] if kernels else 0.0)), cluster
        # What nobody knows may be of any vendor, whatever kernels it is said to run.
        devices = {name: dataclasses.replace(kind, name="novel") for name, kind in problem.cluster.devices.items()}
        novel = dataclasses.replace(problem.cluster, devices=devices)
        unknown = dataclasses.replace(problem, cluster=novel)
        assert error_band(unknown) == pytest.approx(math.hypot(trainer, error["foreign"]))


def test_convolutions_widen_the_band_by_their_share_of_the_arithmetic():
    """A network of little else has nearly the whole of it, a transformer with one a trace."""
    alone = trainers()["generic"].error_band
    for name, least, most in (("resnet50", 0.99, 1.0), ("vgg19", 0.95, 1.0), ("vit-b", 1e-4, 0.02), ("gpt2", 0.0, 0.0)):
        graph = zoo.build(name)
        problem = Problem.build(graph, parse_cluster("1xA100-80GB"), {"global_batch": 8})
        added = math.sqrt(max(0.0, error_band(problem) ** 2 - alone**2)) / shared("convolution_band")
        assert least <= added + 1e-9 and added <= most + 1e-9, name


def test_experts_widen_the_band_by_their_share_of_the_arithmetic():
    """The share is that of the closed form: top-k experts of three products each, beside attention and the head."""
    alone = trainers()["megatron-core"].error_band
    spec = "moe:layers=4,hidden=256,heads=4,ffn=512,experts=8,top_k=2,seq_len=128,vocab_size=1000"
    training = {"global_batch": 8, "trainer": "megatron-core"}
    problem = Problem.build(zoo.build(spec), parse_cluster("1xA100-80GB"), training)
    experts = 3 * 2 * 256 * 512
    others = 4 * 256 * 256 + 256 * 8 + 2 * 128 * 256 + 256 * 1000 / 4
    added = math.sqrt(error_band(problem) ** 2 - alone**2) / shared("expert_band")
    assert added == pytest.approx(experts / (experts + others), rel=0.02)
    dense = Problem.build(zoo.build("llama-7b"), parse_cluster("1xA100-80GB"), training)
    assert error_band(dense) == alone


@pytest.mark.parametrize("kind", ["LSTM", "RNN"])
def test_positions_of_a_recurrent_layer_wait_for_each_other(kind):
    """Positions cost a kernel forward and two backward, whatever their FLOPs."""

    def step_s(positions):
        builder = GraphBuilder()
        builder.input("x", (1, positions, 8))
        gates = {"LSTM": 32, "RNN": 8}[kind]
        for name, shape in (("w", (1, gates, 8)), ("r", (1, gates, 8)), ("head", (8, 10))):
            builder.parameter(name, shape)
        builder.add(kind, ["x", "w", "r"], ["y"], attributes={"layout": 1, "hidden_size": 8})
        builder.add("Reshape", ["y"], ["z"], attributes={"shape": (1, positions, 8)})
        builder.add("MatMul", ["z", "head"], ["scores"])
        evaluator = Evaluator(Problem.build(builder.finish(["scores"]), "1xA100", {"global_batch": 1}))
        return evaluator.evaluate(hand_made(evaluator, Strategy())).step_time_s

    assert step_s(300) - step_s(100) >= 200 * 3 * shared("kernel_us") * 1e-6
