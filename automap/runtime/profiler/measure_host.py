"""Measures this host with one process for each device, and describes it as a cluster that can be priced.

The ranks measure in `automap.runtime.profiler.rank`; `automap.runtime.profiler.fit` fits the constants. A device is a
GPU, or a core where there is none. This module does not import torch; the ranks do. Units: seconds, bytes, FLOP/s.
"""

from __future__ import annotations

import datetime
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import numpy as np

from automap.arrays import Floats
from automap.cluster import LOCAL, Cluster, Node, parse_cluster
from automap.device_kinds import GIB, Device, known_links
from automap.fitted_curves import COLLECTIVES, Constants, Kernels
from automap.links import Link
from automap.plan import Plan
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.price.tables import Tables
from automap.problem import Problem
from automap.runtime.launch.host import as_name, gpus
from automap.runtime.launch.launcher import Limits, OutcomeKind, launch
from automap.runtime.profiler.busy_host import conditions
from automap.runtime.profiler.fit import fit_attention, fit_collective, fit_gemm, fit_linear, rounded
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo

RANK = "automap.runtime.profiler.rank:run_rank"
TIME_LIMIT_S = 100.0
"""The default time of a profile (assumed)."""
STARTING_S = 30.0
"""The part of the time limit for starting the ranks (assumed)."""
FITTING_S = 10.0
"""The part for fitting (assumed); what is left is for measuring."""
LEAST_MEASURE_S = 1.0
"""The least time for measuring (assumed)."""
ELEMENT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp32": 4.0}
"""Precision of the operands of products that are timed -> bytes of an element."""
STEP_MODEL = "gpt:layers={},hidden={},heads=4,seq_len={},vocab_size=256"
Sizes = tuple[int, int, int, int]
"""(layers, width, positions, samples of a micro-batch)."""
STEPS: dict[str, tuple[tuple[Sizes, int], ...]] = {
    "cpu": (
        ((1, 16, 8, 2), 1), ((4, 16, 8, 2), 1), ((1, 128, 64, 2), 2), ((1, 256, 128, 8), 1), ((1, 16, 8, 2), 4),
        ((2, 64, 128, 2), 1), ((4, 16, 8, 2), 4), ((2, 128, 128, 8), 1), ((2, 256, 64, 2), 1), ((1, 256, 128, 2), 2),
    ),
    "cuda": (
        ((1, 16, 8, 2), 1), ((4, 16, 8, 2), 1), ((1, 1024, 2048, 32), 1), ((1, 16, 8, 2), 4), ((1, 2048, 1024, 32), 1),
        ((4, 16, 8, 2), 4), ((1, 512, 1024, 64), 1), ((1, 1024, 1024, 32), 2), ((1, 4096, 1024, 16), 1),
    ),
}  # fmt: skip
"""Kind of device -> (sizes, micro-batches) of the steps on one device that are timed, the most informative first. On a
CPU some have activations that caches hold, and some of a few MB, as models have; on a GPU some take longer than their
launches, in at most 9 GiB."""
TOGETHER: dict[str, tuple[tuple[Sizes, int, dict[str, int]], ...]] = {
    "cpu": (
        ((2, 16, 8, 2), 4, {"tp": 2}), ((2, 16, 8, 2), 4, {"pp": 2}), ((1, 256, 128, 2), 1, {"zero": 3}),
        ((2, 64, 64, 2), 2, {"tp": 2}), ((1, 256, 128, 8), 1, {"tp": 2}), ((2, 64, 64, 2), 4, {"pp": 2}),
        ((1, 256, 128, 16), 1, {}), ((2, 16, 8, 2), 4, {"zero": 3}),
    ),
    "cuda": (),
}  # fmt: skip
"""Kind of device -> (sizes, micro-batches, fields of `automap.space.stated_strategy.Strategy`) of the steps on two
devices that are timed; devices that no degree takes share the batch."""
AMOUNTS = {"host_us_per_operator": 20.0, "micro_batch_ms": 0.5, "step_overhead_ms": 1.0, "memory": 1.0}
"""Amounts that steps on one device determine -> usual sizes (assumed; the price is taken as linear between 0 and
there): constants, and the inverse of `memory_efficiency`."""
AMOUNTS_TOGETHER = {"latency_us": 100.0, "slowdown": 0.5, "send_host_ms": 0.2}
"""Amounts that steps on two devices determine -> their usual sizes (assumed): the latency that a collective inside a
step has beyond one alone, the relative excess of its transfer time, and a constant."""
NO_MEMORY = 1e-6
"""Value of the inverse of `memory_efficiency` that is practically 0 (assumed)."""
LEAST_MEMORY = 0.05
"""The inverse that is stated if steps do not depend on it (assumed: memory 20 times as fast as its datasheet)."""
COMPUTED: dict[str, Any] = {
    "overlap_exponent": 1.0,
    "kernel_us": 0.0,
    "misaligned": 1.0,
    "fallback_kernels": 0.0,
    "host_us_per_collective": 0.0,
    "elementwise_traffic": 1.0,
}
"""Constants where the CPU is the device: nothing overlaps with its own work, its part of a collective is in the
collective's own curve, no kernel uses tensor cores, and operators run one by one."""
CHOSEN = "assumed: the host itself computes"
"""The source that a cluster file states for the constants of `COMPUTED`."""
ROUNDS = 3
"""The number of linearisations of the fit to steps in which CPU and device overlap."""
BETWEEN_NODES = "ethernet-10"
"""The link that is stated between several hosts like this one; it is not measured."""
ALONE = "pcie3"
"""The link that is stated inside a host of one device; nothing uses it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A plan whose steps are timed."""

    model: str
    """The specification of the zoo's model."""
    problem: Problem
    plan: Plan
    num_devices: int
    """The number of devices of the plan: one or two."""
    tables: Tables
    """The tables of the problem, which do not depend on the cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The outcome of a profile."""

    outcome: OutcomeKind
    message: str
    """What went wrong, for a reader."""
    cluster: Cluster | None
    """The measured host, if the outcome is `ok`."""
    time_s: float
    """The wall-clock time of the measurement."""


def profile_host(*, time_limit_s: float = TIME_LIMIT_S, num_devices: int | None = None) -> Profile:
    """Measures this host.

    Args:
        time_limit_s: the time of the whole profile; what is not measured by then is left out, and ranks that hang are
            ended.
        num_devices: the number of processes on a host without GPUs; None = one for each core.
    """
    gpus = _num_gpus()
    device = "cuda" if gpus else "cpu"
    runs = step_plans(device)
    argument = {
        "device": device,
        "measure_s": max(LEAST_MEASURE_S, time_limit_s - STARTING_S - FITTING_S),
        "time_s": time_limit_s,
        "plans": [[run.model, run.plan.to_json(), run.num_devices] for run in runs],
    }
    limits = Limits(time_s=time_limit_s - FITTING_S)
    done = launch(RANK, argument, gpus or num_devices or len(os.sched_getaffinity(0)), limits)
    cluster = build_cluster(device, done.results, runs) if done.outcome == "ok" else None
    return Profile(outcome=done.outcome, message=done.message, cluster=cluster, time_s=done.time_s)


def _num_gpus() -> int:
    """The number of GPUs that torch could use, by its build and the driver, without importing it."""
    if "+cpu" in metadata.version("torch"):
        return 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(gpus().values())
    return there if named is None else min(there, len([name for name in named.split(",") if name.strip()]))


def step_plans(kind: str) -> list[Run]:
    """Small models with plans for one device and for two, whose steps are timed.

    Args:
        kind: the kind of the device, cuda or cpu.
    """
    alone = [_run(kind, sizes, count, 1, {}) for sizes, count in STEPS[kind]]
    return alone + [_run(kind, sizes, count, 2, degrees) for sizes, count, degrees in TOGETHER[kind]]


def _run(kind: str, sizes: Sizes, count: int, num_devices: int, degrees: Mapping[str, Any]) -> Run:
    """A plan of a small model to be timed; arguments as in `STEPS` and `TOGETHER`."""
    *shape, samples = sizes
    spec = STEP_MODEL.format(*shape)
    precision = "bf16" if kind == "cuda" else "fp32"
    training = {"global_batch": samples * count, "precision": precision, "trainer": "automap"}
    problem = Problem.build(zoo.build(spec), parse_cluster(f"{num_devices}xcpu"), training)
    evaluator = Evaluator(problem)
    replicas = num_devices // (degrees.get("tp", 1) * degrees.get("pp", 1))
    strategy = Strategy(micro_batch=samples // replicas, **degrees)
    plan = to_plan(hand_made(evaluator, strategy), evaluator)
    return Run(model=spec, problem=problem, plan=plan, num_devices=num_devices, tables=evaluator.tables)


def build_cluster(kind: str, results: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> Cluster:
    """The cluster that measurements describe.

    Args:
        kind: the kind of the devices, cuda or cpu.
        results: [ranks] what `automap.runtime.profiler.rank.run_rank` returns.
        runs: the plans whose steps were timed.
    """
    about = results[0]["device"]
    source = f"measured: automap profile, {datetime.datetime.now(tz=datetime.UTC).date().isoformat()}"
    stream = statistics.median(float(result["stream"]) for result in results)
    multiprocessors, cache = int(about["num_multiprocessors"]), float(about["cache_bytes"])
    gemms = {p: _rows(results, "gemm", p) for p in results[0]["gemm"]}
    peaks = {p: float(np.max(2.0 * np.prod(rows[:, :4], axis=1) / rows[:, 4])) for p, rows in gemms.items()}
    widest = next(iter(peaks))
    kernels = Kernels(
        gemm={
            p: fit_gemm(
                rows,
                flops=peaks[p],
                bytes_per_s=stream,
                element_bytes=ELEMENT_BYTES[p],
                num_multiprocessors=multiprocessors,
                cache_bytes=cache,
            )
            for p, rows in gemms.items()
        },
        attention=fit_attention(
            _rows(results, "attention"),
            flops=peaks[widest],
            bytes_per_s=stream,
            element_bytes=ELEMENT_BYTES[widest],
            num_multiprocessors=multiprocessors,
        ),
    )
    computed = COMPUTED if kind == "cpu" else {"elementwise_traffic": COMPUTED["elementwise_traffic"]}
    link = _link(kind, results, source)
    device = Device(
        name=as_name(str(about["name"])),
        peak_TFLOPs={p: rounded(peak / 1e12) for p, peak in peaks.items()},
        hbm_bandwidth_GBps=rounded(stream / 1e9),
        memory_GiB=rounded(min(float(result["device"]["memory_bytes"]) for result in results) / GIB),
        memory_efficiency=1.0,
        intra_node_link=link.name,
        inter_node_link=BETWEEN_NODES,
        nics_per_node=1,
        num_multiprocessors=multiprocessors,
        cache_MB=rounded(cache / 1e6),
        sustained_clock=1.0,
        kernels=kernels,
        source=dict.fromkeys(("peak_TFLOPs", "hbm_bandwidth_GBps", "memory_GiB", "memory_efficiency"), source),
    )
    constants = Constants(
        **computed,
        conditions=conditions(results),
        host_backward=rounded(_median(results, "backward_ratio")),
        reserved_GiB=rounded(about["reserved_bytes"] / GIB),
    )
    node = Node(device=device.name, num_devices=len(results), intra_node_link=link.name, inter_node_link=BETWEEN_NODES,
                nics=1)  # fmt: skip
    between = next(known for known in known_links() if known.name == BETWEEN_NODES)
    cluster = Cluster(
        name=LOCAL,
        nodes=(node,),
        devices={device.name: device},
        links={link.name: link, between.name: between},
        constants=constants,
    )
    found = _with_steps(cluster, results, runs, source)
    # A cluster is valid only if it can be read again; the error names a figure that is out of its range.
    return parse_cluster(found.to_json())


def _median(results: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.median(float(result[name]) for result in results)


def _rows(results: Sequence[Mapping[str, Any]], *path: str) -> Floats:
    """The rows of a section of all ranks together."""
    found = []
    for result in results:
        section: Any = result
        for name in path:
            section = section[name]
        found += section
    return np.array(found, dtype=float)


def _link(kind: str, results: Sequence[Mapping[str, Any]], source: str) -> Link:
    """The link between the devices of the host."""
    if len(results) == 1:
        return next(known for known in known_links() if known.name == ALONE)
    rows = {name: _rows(results, "collectives", name) for name in COLLECTIVES}
    best = float(np.max(rows["send_recv"][:, 1] / rows["send_recv"][:, 2]))
    curves = {name: fit_collective(name, found, best) for name, found in rows.items()}
    return Link(
        name="local-nccl" if kind == "cuda" else "local-gloo",
        scope="intra",
        bandwidth_GBps=rounded(best / 1e9),
        efficiency=curves["all_reduce"].efficiency,
        collectives=curves,
        source={"bandwidth_GBps": source, "collectives": source},
    )


def _with_steps(cluster: Cluster, results: Sequence[Mapping[str, Any]], runs: Sequence[Run], source: str) -> Cluster:
    """The cluster with the CPU times and the memory bandwidth that explain the steps of small models."""
    device, constants = next(iter(cluster.devices.values())), cluster.constants
    assert constants is not None
    stream = device.hbm_bandwidth_GBps * 1e9
    loss = np.median([result["loss"] for result in results], axis=0)
    passes_per_rate, update_s = loss[2] / loss[:2].sum(), _median(results, "adam_s_per_element")

    def at(amounts: Floats) -> Cluster:
        """The cluster with some amounts; optimizer and loss take their measured times at any memory bandwidth."""
        efficiency = 1.0 / max(NO_MEMORY, amounts[-1])
        stated: dict[str, Any] = {name: rounded(x) for name, x in zip(AMOUNTS, amounts[:-1], strict=False)}
        stated["loss_passes"] = rounded(passes_per_rate * stream * efficiency)
        stated["optimizer_bytes"] = rounded(update_s * stream * efficiency)
        own = replace(device, memory_efficiency=rounded(efficiency))
        return replace(cluster, devices={device.name: own}, constants=replace(constants, **stated))

    took = [[result["steps"][i] for result in results] for i in range(len(runs))]
    timed = [(run, statistics.median(s)) for run, s in zip(runs, took, strict=True) if None not in s]
    rounds = 1 if constants.overlap_exponent == 1.0 else ROUNDS
    amounts, alone = _explained(at, [(run, s) for run, s in timed if run.num_devices == 1], AMOUNTS, rounds)
    amounts[-1] = max(LEAST_MEMORY, amounts[-1])
    found, errors = at(amounts), {"steps": alone}

    def joined(amounts: Floats) -> Cluster:
        """The cluster in which each collective, and each transfer between stages, takes longer by some amounts."""
        assert found.constants is not None
        latency_us, slowdown, send_ms = amounts.tolist()
        link = found.links[device.intra_node_link]
        curves = {
            kind: replace(
                curve,
                latency_us=rounded(curve.latency_us + latency_us),
                efficiency=rounded(curve.efficiency / (1.0 + slowdown)),
            )
            for kind, curve in link.collectives.items()
            if kind != "send_recv"
        }
        links = {**found.links, link.name: replace(link, collectives={**link.collectives, **curves})}
        return replace(found, links=links, constants=replace(found.constants, send_host_ms=rounded(send_ms)))

    together = [(run, s) for run, s in timed if run.num_devices > 1]
    if len(together) > len(AMOUNTS_TOGETHER):
        amounts, errors["steps of two"] = _explained(joined, together, AMOUNTS_TOGETHER, ROUNDS)
        found = joined(amounts)
    assert found.constants is not None
    sources = dict.fromkeys(found.constants.stated(), source) | dict.fromkeys(COMPUTED, CHOSEN)
    return replace(found, constants=replace(found.constants, errors=errors, source=sources))


def _explained(
    at: Callable[[Floats], Cluster], timed: Sequence[tuple[Run, float]], usual: Mapping[str, float], rounds: int
) -> tuple[Floats, dict[str, float]]:
    """The amounts at which the prices of steps are nearest to their measured times, and the errors: `fit_linear`."""

    def priced(amounts: Floats) -> Floats:
        return np.array([_price(run, at(amounts)) for run, _ in timed])

    return fit_linear(priced, np.array([s for _, s in timed]), np.array(list(usual.values())), rounds)


def _price(run: Run, cluster: Cluster) -> float:
    """The priced step time of a plan on as many devices of a cluster as it needs."""
    node = replace(cluster.nodes[0], num_devices=run.num_devices)
    problem = replace(run.problem, cluster=replace(cluster, nodes=(node,)))
    return price(problem, run.plan, Evaluator(problem, run.tables)).step_time_s


def residuals(cluster: Cluster) -> Iterator[tuple[str, float, float, float]]:
    """The errors of each fit: (name, number of rows, median and 90th percentile of the absolute relative error)."""
    for device in cluster.devices.values():
        if device.kernels is not None:
            for precision, curve in device.kernels.gemm.items():
                yield (f"products, {precision}", curve.rows, *_both(curve.cross_validated))
            yield ("attention", device.kernels.attention.rows, *_both(device.kernels.attention.cross_validated))
    for link in cluster.links.values():
        for kind, own in link.collectives.items():
            yield (kind, own.rows, *_both(own.cross_validated))
    for name, found in (cluster.constants.errors if cluster.constants else {}).items():
        yield (name, found["rows"], *_both(found))


def _both(found: Mapping[str, float]) -> tuple[float, float]:
    return found["median_error"], found["p90_error"]
