"""Profiles: what a host was measured to be becomes a cluster that is read back and priced."""

import json
import statistics
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch
from made_up_host import FLOPS, STREAM, two_ranks
from small_graphs import build_mlp

from automap.cluster import LOCAL, local_profile, parse_cluster
from automap.errors import ClusterError
from automap.fitted_curves import COLLECTIVES
from automap.group_links import group_link
from automap.price.curves import attention_curve, gemm_curve, is_measured
from automap.price.estimate import price
from automap.price.kernels.collectives import collective_s
from automap.price.kernels.gemm import gemm_s
from automap.price.link_records import link_record
from automap.problem import Problem
from automap.runtime.profiler import measure_host as profiler
from automap.runtime.profiler.kernel_clock import KernelClock
from automap.space.space import PlanSpace


@pytest.fixture(scope="module")
def runs():
    return profiler.step_plans("cpu")


@pytest.fixture(scope="module")
def cluster(runs):
    return profiler.build_cluster("cpu", two_ranks(), runs)


@pytest.mark.slow
def test_a_profile_is_read_back_as_it_was_written(cluster):
    assert parse_cluster(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_rates_are_those_that_were_measured(cluster):
    (device,) = cluster.devices.values()
    assert (device.name, cluster.num_devices) == ("A-CPU-2", 2)
    assert device.memory_GiB == 4.0
    assert is_measured(device)
    vector = gemm_curve(device, "fp32")
    assert gemm_s(1000.0, 1000.0, 1000.0, 1.0, 4.0, 4.0, vector) == pytest.approx(2e9 / FLOPS, rel=0.05)
    fast, slow = (attention_curve(device, "fp32", rate=rate, portable=True) for rate in (1.0, 0.1))
    assert fast == slow, "what ran is what was measured, whatever the trainer's kernel reaches elsewhere"
    for number, size in ((number, 2.0**p) for number in range(len(COLLECTIVES)) for p in (12, 24)):
        link = link_record(group_link(cluster, (0, 1)), 1.0)
        share = {"all_reduce": 1.0, "send_recv": 1.0}.get(COLLECTIVES[number], 0.5)
        assert collective_s(number, 2.0, link, size) == pytest.approx(1e-4 + share * size / 1e9, rel=0.03)


@pytest.mark.slow
def test_steps_are_explained_by_the_constants(cluster, runs):
    """Steps that the price itself makes of known constants give these back."""
    known = replace(
        cluster.constants,
        host_us_per_operator=50.0,
        micro_batch_ms=0.7,
        step_overhead_ms=2.0,
        send_host_ms=0.3,
    )
    (device,) = cluster.devices.values()
    known = replace(
        known,
        optimizer_bytes=5e-9 * STREAM * 0.4,
        loss_passes=1e-3 / 2e6 * STREAM * 0.4,
    )
    link = cluster.links["local-gloo"]
    curves = {
        kind: replace(curve, latency_us=250.0, efficiency=curve.efficiency / 1.4)
        for kind, curve in link.collectives.items()
        if kind != "send_recv"
    }
    true = replace(
        cluster,
        devices={device.name: replace(device, memory_efficiency=0.4)},
        links={**cluster.links, link.name: replace(link, collectives={**link.collectives, **curves})},
        constants=known,
    )
    steps = []
    for run in runs:
        there = replace(true, nodes=(replace(true.nodes[0], num_devices=run.num_devices),))
        steps.append(price(replace(run.problem, cluster=there), run.plan).step_time_s)
    reports = two_ranks()
    for report in reports:
        report["steps"] = [*steps[:8], None, *steps[9:]]
    found = profiler.build_cluster("cpu", reports, runs)
    assert found.constants.host_us_per_operator == pytest.approx(50.0, rel=0.01)
    assert found.constants.micro_batch_ms == pytest.approx(0.7, rel=0.02)
    assert found.constants.step_overhead_ms == pytest.approx(2.0, rel=0.02)
    assert found.devices[device.name].memory_efficiency == pytest.approx(0.4, rel=0.02)
    assert found.constants.errors["steps"]["rows"] == 9
    for kind, curve in found.links[link.name].collectives.items():
        wanted = curves.get(kind, link.collectives[kind])
        assert curve.latency_us == pytest.approx(wanted.latency_us, rel=0.1)
        assert curve.efficiency == pytest.approx(wanted.efficiency, rel=0.1)
    assert found.constants.send_host_ms == pytest.approx(0.3, rel=0.1)
    assert found.constants.errors["steps of two"]["rows"] == 8


def test_a_plan_is_priced_with_the_hosts_own_constants(cluster):
    problem = Problem.build(build_mlp((64, 256, 32)), cluster, {"global_batch": 8}, {"fix": {"dp": 2}})
    assert problem.precision == "fp32", "the only one that was measured"
    assert problem.trainer.host_us_per_operator == cluster.constants.host_us_per_operator
    space = PlanSpace(problem)
    plan = space.decode(space.even_values(space.meshes.shapes[0], recompute="none", zero=0))
    slower = replace(cluster, constants=replace(cluster.constants, step_overhead_ms=1e3))
    first, second = (price(replace(problem, cluster=c), plan).step_time_s for c in (cluster, slower))
    assert second - first == pytest.approx(1.0 - cluster.constants.step_overhead_ms * 1e-3)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("constants", "host_us_per_operator"), -1.0, "cluster.constants.host_us_per_operator"),
        (("devices", "A-CPU-2", "kernels", "gemm", "fp32", "floor_us"), -0.5, "A-CPU-2.kernels.gemm.fp32.floor_us"),
        (("devices", "A-CPU-2", "kernels", "gemm", "fp32", "norm"), 0.5, "A-CPU-2.kernels.gemm.fp32.norm"),
        (("devices", "A-CPU-2", "kernels", "attention", "compute_efficiency"), 0, "attention.compute_efficiency"),
        (("devices", "A-CPU-2", "peak_TFLOPs", "bf16"), 1.0, "A-CPU-2.kernels.gemm"),
        (("links", "local-gloo", "collectives", "all_reduce", "latency_us"), -3, "collectives.all_reduce.latency_us"),
        (("links", "local-gloo", "collectives", "broadcast"), {}, "local-gloo.collectives"),
        (("constants", "speed"), 3, "cluster.constants.speed"),
    ],
)
def test_a_spoilt_file_is_refused_by_field_and_value(cluster, path, value, field):
    document = json.loads(json.dumps(cluster.to_json()))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = place["all_reduce"] if path[-1] == "broadcast" else value
    with pytest.raises(ClusterError) as caught:
        parse_cluster(document)
    assert caught.value.field.endswith(field) and caught.value.field.startswith("cluster.")
    assert caught.value.repair


def test_local_is_the_profile_in_the_data_folder(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMAP_DATA_DIR", str(tmp_path))
    with pytest.raises(ClusterError, match="automap profile"):
        parse_cluster(LOCAL)
    local_profile().write_text(json.dumps(cluster.to_json()))
    assert parse_cluster(LOCAL) == cluster


@pytest.mark.slow
@pytest.mark.long
def test_this_host_is_measured_in_time_and_nothing_is_left():
    torch.set_num_threads(1)
    start, before = time.monotonic(), set(psutil.Process().children(recursive=True))
    found = profiler.profile_host(time_limit_s=40.0, num_devices=2)
    assert (found.outcome, found.message) == ("ok", "")
    assert time.monotonic() - start < 40.0
    assert set(psutil.Process().children(recursive=True)) == before
    assert parse_cluster(found.cluster.to_json()) == found.cluster
    assert found.cluster.num_devices == 2
    names = {name for name, *_ in profiler.residuals(found.cluster)}
    assert names - {"steps of two"} == {"products, fp32", "attention", "steps", *COLLECTIVES}
    (device,) = found.cluster.devices.values()
    curve, clock = gemm_curve(device, "fp32"), KernelClock(torch.device("cpu"))
    shapes = ((64, 64, 64), (128, 256, 128), (256, 256, 256), (512, 128, 64), (96, 384, 256))
    factors = {shape: (torch.ones(shape[0], shape[2]), torch.ones(shape[2], shape[1])) for shape in shapes}
    # In rounds over all shapes: whoever else uses the cores slows all shapes alike, now or while the host was measured.
    rounds = [[clock.kernel(partial(torch.mm, *factors[shape])) for shape in shapes] for _ in range(9)]
    off = [
        gemm_s(*shape, 1.0, 4.0, 4.0, curve) / statistics.median(times)
        for shape, times in zip(shapes, zip(*rounds, strict=True), strict=True)
    ]
    pace = statistics.median(off)
    assert 1 / 4 < pace < 4
    # How exact a profile is depends on how busy the host was; the work of these shapes differs by a factor of 64.
    assert statistics.median(abs(x / pace - 1.0) for x in off) < 0.5
