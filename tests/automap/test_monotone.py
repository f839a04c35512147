"""Better hardware never makes a plan slower, and one device is the sum of its operators: random models and plans."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automap.cluster import Cluster, parse_cluster
from automap.device_kinds import known_devices
from automap.fitted_curves import Constants
from automap.price.curves import shared
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures
from automap.trainers import trainers
from ir import zoo
from ir.graph import Graph

MODELS = (
    "gpt:layers=3,hidden=128,heads=4,seq_len=64,vocab_size=512",
    "llama:layers=2,hidden=256,heads=8,kv_heads=2,seq_len=128,vocab_size=512",
    "moe:layers=2,hidden=128,heads=4,kv_heads=4,ffn=256,experts=4,seq_len=64,vocab_size=512",
    "bert:layers=2,hidden=128,heads=4,seq_len=64",
    "vit:layers=2,hidden=128,heads=4",
    "t5:layers=2,hidden=128,heads=4,seq_len=64",
    "resnet:blocks=1-1",
)
CLUSTERS = st.one_of(
    st.builds(
        "{}x{}x{}{}".format,
        st.sampled_from([1, 2, 4]),
        st.sampled_from([1, 2, 4]),
        st.sampled_from(sorted(d.name for d in known_devices() if "fp16" in d.peak_TFLOPs)),
        st.sampled_from(["", "@25Gbit", "@100Gbit"]),
    ),
    st.sampled_from(["4xV100-32GB+4xP100", "2x2xH100+4xA100-40GB"]),
)
BETTER = ("peak", "hbm", "memory", "intra", "inter", "nics")
BATCH = 16


@functools.cache
def graph_of(spec: str) -> Graph:
    return zoo.build(spec)


def better(cluster: Cluster, what: str, factor: float) -> Cluster:
    """The cluster with one kind of part better everywhere."""
    devices: dict[str, Any] = dict(cluster.devices)
    links: dict[str, Any] = dict(cluster.links)
    nodes = cluster.nodes
    for name, device in devices.items():
        if what == "peak":
            devices[name] = replace(device, peak_TFLOPs={k: v * factor for k, v in device.peak_TFLOPs.items()})
        if what == "hbm":
            devices[name] = replace(device, hbm_bandwidth_GBps=device.hbm_bandwidth_GBps * factor)
        if what == "memory":
            devices[name] = replace(device, memory_GiB=device.memory_GiB * factor)
    for name, link in links.items():
        if what == link.scope:
            links[name] = replace(link, bandwidth_GBps=link.bandwidth_GBps * factor)
    if what == "nics":
        nodes = tuple(replace(node, nics=node.nics * 2) for node in nodes)
    return replace(cluster, devices=devices, links=links, nodes=nodes)


@functools.lru_cache(maxsize=64)
def space_of(model: str, cluster: str, trainer: str) -> PlanSpace:
    problem = Problem.build(
        graph_of(model), parse_cluster(cluster), {"global_batch": BATCH, "trainer": trainer, "precision": "fp16"}
    )
    return PlanSpace(problem)


def on(lowered: LoweredPlan, evaluator: Evaluator) -> LoweredPlan:
    """The same plan on another cluster of the same form."""
    stages = tuple((stage.devices, tuple(int(size) for size in stage.axes)) for stage in lowered.layout.stages)
    return replace(lowered, layout=evaluator.layout_of(stages))


CASES = {
    "model": st.sampled_from(MODELS),
    "cluster": CLUSTERS,
    "trainer": st.sampled_from(sorted(trainers())),
    "seed": st.integers(0, 2**20),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BETTER)
@settings(derandomize=True, max_examples=15)
@given(
    **CASES,
    factor=st.sampled_from([1.01, 1.3, 2.0, 10.0]),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb1p", "zb2p"]),
)
def test_better_parts_never_slow_a_plan(
    what: str, model: str, cluster: str, trainer: str, seed: int, factor: float, schedule: str
) -> None:
    space = space_of(model, cluster, trainer)
    problem = replace(space.problem, cluster=better(space.problem.cluster, what, factor))
    evaluator = Evaluator(problem, space.evaluator.tables)
    rng = np.random.default_rng(seed)
    for _ in range(8):
        lowered = space.lowered(space.random(rng))
        if lowered.kind != "interleaved":
            lowered = replace(lowered, kind=schedule)
        before, after = space.evaluator.evaluate(lowered), evaluator.evaluate(on(lowered, evaluator))
        assert after.step_time_s <= before.step_time_s * (1 + 1e-12)
        assert after.overflow <= before.overflow
        if what == "memory":
            assert after.step_time_s == before.step_time_s
            assert after.overflow < before.overflow


@pytest.mark.slow
@settings(derandomize=True, max_examples=30)
@given(**CASES, schedule=st.sampled_from(["1f1b", "gpipe", "zb1p", "zb2p"]))
def test_what_a_pipeline_waits_does_not_grow_with_its_micro_batches(
    model: str, cluster: str, trainer: str, seed: int, schedule: str
) -> None:
    """Filling and emptying a pipeline takes as long for any number of micro-batches: their share of it halves when
    these double."""
    space = space_of(model, cluster, trainer)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        lowered = space.lowered(space.random(rng))
        if lowered.kind != "interleaved":
            lowered = replace(lowered, kind=schedule)
        least = 8 * len(lowered.chunks)
        seconds = [
            space.evaluator.evaluate(replace(lowered, num_micro_batches=least * times)).step_time_s
            for times in (1, 2, 4)
        ]
        waits = [2.0 * seconds[0] - seconds[1], 2.0 * seconds[1] - seconds[2]]
        assert waits[0] >= 0.0 and waits[1] == pytest.approx(waits[0], rel=1e-3, abs=1e-6 * seconds[2])


@pytest.mark.slow
@settings(derandomize=True, max_examples=30)
@given(**CASES)
def test_what_runs_again_takes_time(model: str, cluster: str, trainer: str, seed: int) -> None:
    """Nothing again is fastest, everything again is slowest, whatever runs again in between."""
    space = space_of(model, cluster, trainer)
    rng = np.random.default_rng(seed)
    for _ in range(4):
        lowered = space.lowered(space.random(rng))
        found = [
            space.evaluator.evaluate(
                replace(
                    lowered,
                    chunks=tuple(
                        tuple(replace(s, recomputed=np.full(len(s.recomputed), again)) for s in chunk)
                        for chunk in lowered.chunks
                    ),
                )
            ).step_time_s
            for again in (False, True)
        ]
        step = space.evaluator.evaluate(lowered).step_time_s
        assert found[0] <= step * (1 + 1e-12) and step <= found[1] * (1 + 1e-12)


@pytest.mark.slow
@settings(derandomize=True, max_examples=30)
@given(**CASES)
def test_a_rank_that_is_alone_needs_as_much_memory_under_every_stage_of_zero(
    model: str, cluster: str, trainer: str, seed: int
) -> None:
    """It has nothing to shard, nothing to gather and nothing to scatter, beside ranks of other stages that have."""
    space = space_of(model, cluster, trainer)
    rng = np.random.default_rng(seed)
    for _ in range(8):
        lowered = space.lowered(space.random(rng))
        zero_axes = np.arange(len(lowered.axes)) < len(lowered.axes) - 1
        found = [space.evaluator.evaluate(replace(lowered, zero=zero, zero_axes=zero_axes)) for zero in (1, 2, 3)]
        for rank, stage in enumerate(lowered.layout.stages):
            if stage.axes[:-1].max(initial=1.0) == 1.0:
                buffers = [float(outcome.ranks[rank].buffer_bytes) for outcome in found]
                # Less where masters take the place of weights: the allocator then holds less that nothing uses.
                assert max(buffers) <= buffers[0] * (1 + 1e-12)


@settings(derandomize=True, max_examples=10, deadline=None)
@given(
    # Gaudi 3 has no higher rate in fp8.
    device=st.sampled_from(
        sorted(d.name for d in known_devices() if d.peak_TFLOPs.get("fp8", 0.0) > d.peak_TFLOPs.get("bf16", 0.0))
    ),
    trainer=CASES["trainer"],
    tp=st.sampled_from([1, 2]),
)
def test_low_precision_is_faster_where_products_are_large(device: str, trainer: str, tp: int) -> None:
    """16,384 tokens at a width of 4,096. Smaller products may take longer, for their operands are quantised first; and
    so may models whose kernels wait for the host, which launches more of them."""
    graph = graph_of("llama:layers=2,hidden=4096,heads=32,seq_len=4096,ffn=11008,vocab_size=32000")
    host = Constants(host_us_per_operator=0.0, host_us_per_collective=0.0)
    cluster = replace(parse_cluster(f"1x{tp}x{device}"), constants=host)
    seconds = {}
    for precision in ("bf16", "fp8", "mxfp8", "nvfp4"):
        if precision in cluster.device(0).peak_TFLOPs:
            training = {"global_batch": 4, "trainer": trainer, "precision": precision}
            space = PlanSpace(Problem.build(graph, cluster, training))
            shape = next(s for s in space.shapes if (s.pp, s.tp, s.num_micro_batches) == (1, tp, 1))
            prefix = space.even_values(shape, recompute="none", zero=0)
            values = megatron_signatures(space, shape, prefix, sequence_parallel=tp > 1)
            seconds[precision] = space.evaluator.evaluate(space.lowered(values)).step_time_s
    assert all(seconds["bf16"] > one for name, one in seconds.items() if name != "bf16")
    assert seconds.get("nvfp4", 0.0) <= seconds["fp8"]


@pytest.mark.parametrize("trainer", ["torchtitan", "torchtitan-2024"])
@pytest.mark.parametrize("schedule", ["zb1p", "zb2p"])
def test_a_faster_device_hides_less_but_ends_no_later(trainer: str, schedule: str) -> None:
    """Backward passes in two parts under ZeRO 3: what a part is too short to hide is no more than it became shorter."""
    graph = graph_of("gpt:layers=8,hidden=1024,heads=8,seq_len=256,vocab_size=512")
    training = {"global_batch": 16, "trainer": trainer, "precision": "bf16"}
    space = PlanSpace(Problem.build(graph, parse_cluster("4x1xA100"), training))
    shape = next(s for s in space.shapes if (s.pp, s.tp, s.num_micro_batches, s.virtual) == (2, 1, 4, 1))
    values = megatron_signatures(
        space, shape, space.even_values(shape, recompute="none", zero=3), sequence_parallel=False
    )
    lowered = replace(space.lowered(values), kind=schedule)
    seconds = []
    for factor in (1.0, 1.001, 1.01, 1.03, 1.1, 1.3, 2.0, 5.0):
        cluster = better(space.problem.cluster, "peak", factor)
        evaluator = Evaluator(replace(space.problem, cluster=cluster), space.evaluator.tables)
        seconds.append(evaluator.evaluate(on(lowered, evaluator)).step_time_s)
    assert (np.diff(seconds) <= 1e-12 * seconds[0]).all()


@settings(derandomize=True, max_examples=30)
@given(model=CASES["model"], trainer=CASES["trainer"], seed=CASES["seed"])
def test_one_device_is_the_sum_of_its_operators(model: str, trainer: str, seed: int) -> None:
    """Each operator priced alone; then what the host adds to each unit, a micro-batch and a step, and the optimizer."""
    space = space_of(model, "1xA100-80GB", trainer)
    evaluator = space.evaluator
    values = space.random(np.random.default_rng(seed))
    lowered = space.lowered(values)
    whole = lowered.chunks[0]
    kernels = waits = again = 0.0
    for _, segment, incoming in evaluator.surroundings(lowered):
        row = evaluator.unit_cost(segment, incoming, lowered.stages[0])
        waits += float(row["forward_host_s"] + row["backward_host_s"])
        assert row["forward_host_s"] >= 0.0 <= row["backward_host_s"]
        for k in range(segment.last - segment.first):
            at = segment.first + k
            one = replace(
                segment, first=at, last=at + 1, chosen=segment.chosen[k : k + 1], recomputed=np.zeros(1, dtype=np.bool_)
            )
            alone = evaluator.unit_cost(one, incoming, lowered.stages[0])
            kernels += float(alone["forward_s"] + alone["backward_s"])
            again += float(alone["forward_s"]) * bool(segment.recomputed[k])
    count, outcome = lowered.num_micro_batches, evaluator.evaluate(lowered)
    found = outcome.ranks[0]
    assert len(lowered.chunks) == 1
    assert len(whole) == len(evaluator.blocks.units)
    assert found["compute_s"] == pytest.approx(count * (kernels + again + waits), rel=1e-9)
    chosen = space.problem.trainer
    overhead = (count * shared("micro_batch_ms") + chosen.step_overhead_ms) * 1e-3
    assert outcome.step_time_s == pytest.approx(found["compute_s"] + overhead + found["optimizer_s"], rel=1e-9)
    for nothing in (found.bubble_s, found.sync_s, found.exchange_s, *found.comm_s):
        assert nothing == pytest.approx(0.0, abs=1e-12)
    hardware = lowered.layout.stages[0].hardware
    assert hardware.host_kernel_s == chosen.host_us_per_operator * 1e-6
    assert found["optimizer_s"] > 0.0 < hardware.bytes_per_s
