"""price(problem, plan) -> Estimate: one plan through the Evaluator, with breakdown, band and reasons.

No cost is computed here: the figures are those of the compiled Evaluator. Units: seconds, bytes.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from automap.cluster import Cluster
from automap.device_kinds import Device
from automap.fitted_curves import COLLECTIVES
from automap.image_layouts import KINDS as CONVOLUTIONS
from automap.measured_blocks import device_seconds
from automap.memory_band import fit_probability
from automap.plan import DeviceMemory, Estimate, Plan, format_devices, parse_devices
from automap.price.curves import attention_curve, gemm_curve, shared, transfer_error
from automap.price.degrees import degrees_of, sequence_length
from automap.price.evaluator import Evaluator
from automap.price.explain import reasons
from automap.price.kernels.array_types import Record
from automap.price.kernels.attention import REFERENCE_HEAD
from automap.price.local_sgd import evaluate_plan
from automap.price.lowered_plan import LoweredPlan
from automap.price.outcome import Outcome
from automap.price.plan_reader import lower_plan
from automap.price.visible_keys import visible_shares
from automap.problem import Problem
from automap.schedule import of_ranks, words
from automap.targets import OWN
from ir.graph import Graph
from ir.operators.experts import PRODUCT

EXPERTS = (PRODUCT,)
"""Kinds of operators that compute with the weights of routed experts."""
EXAMPLE_MODEL = re.compile(r"gpt:(?:(?:layers|hidden|heads|seq_len|vocab_size)=\d+,?)+")
"""Models that `examples/train_gpt.py` builds, by the name that the zoo gives them."""


def price(problem: Problem, plan: Plan, evaluator: Evaluator | None = None, *, with_timeline: bool = False) -> Estimate:
    """The predicted time and memory of `plan`, with breakdown, error band and reasons.

    Args:
        problem: model, cluster and training.
        plan: the plan.
        evaluator: of `problem`, to save building its tables again.
        with_timeline: whether the estimate has the times at which every action of the pipeline begins and ends.

    Raises:
        PlanError: the plan is malformed, illegal, or for another model.
    """
    evaluator = evaluator or Evaluator(problem)
    lowered = lower_plan(plan, evaluator)
    estimate = _estimate(lowered, evaluator, evaluate_plan(plan, lowered, evaluator))
    return replace(estimate, timeline=timeline(lowered, evaluator)) if with_timeline else estimate


def timeline(lowered: LoweredPlan, evaluator: Evaluator) -> tuple[tuple[tuple[str, float, float], ...], ...]:
    """For each pipeline rank, its actions in order: torch's name for it, and the seconds when it begins and ends."""
    program, times = evaluator.timeline(lowered)
    found = []
    ranks = len(lowered.layout.stages)
    for names, places in zip(words(program, ranks), of_ranks(program, ranks), strict=True):
        starts, ends = times[places].T.tolist()
        found.append(tuple(zip(names, starts, ends, strict=True)))
    return tuple(found)


def estimate_lowered(lowered: LoweredPlan, evaluator: Evaluator) -> Estimate:
    """The estimate of a lowered plan whose replicas are synchronous."""
    return _estimate(lowered, evaluator, evaluator.evaluate(lowered))


def _estimate(lowered: LoweredPlan, evaluator: Evaluator, outcome: Outcome) -> Estimate:
    """The estimate of a plan with the time and memory `outcome`; its breakdown is that of the busiest rank."""
    problem = evaluator.problem
    step = outcome.step_time_s
    ranks = outcome.ranks
    busiest = outcome.busiest
    row = ranks[busiest]
    exposed = {name: seconds for name, seconds in zip(COLLECTIVES, row.comm_s.tolist(), strict=True) if seconds > 0.0}
    if float(row.zero_s) > 0.0:
        exposed["zero_collectives"] = float(row.zero_s)
    if float(row.exchange_s) > 0.0:
        exposed["pipeline"] = float(row.exchange_s)
    if float(row.sync_s) > 0.0:
        exposed["gradient_sync"] = float(row.sync_s)
    if outcome.averaging is not None:
        exposed["averaging"] = outcome.averaging.shown_s[busiest]
    batch = problem.training.global_batch
    used = {device for stage in lowered.layout.stages for device in stage.devices}
    flops = sum(op.forward_flops.at(1) + op.backward_flops.at(1) for op in problem.graph.operators) * batch
    peak = sum(problem.cluster.device(d).flops(problem.precision) for d in used)
    tokens = sequence_length(problem.graph)
    band = error_band(problem)
    memory = tuple(
        _memory(problem, devices, seen) for r in range(len(ranks)) for devices, seen in _by_kind(lowered, outcome, r)
    )
    return Estimate(
        step_time_s=step,
        error_band_s=(step * (1.0 - band), step * (1.0 + band)),
        samples_per_s=batch / step,
        tokens_per_s_per_device=None if tokens is None else batch * tokens / step / len(used),
        mfu=flops / (step * peak),
        memory_bytes=memory,
        breakdown_s={
            "compute": float(row.compute_s),
            "exposed_communication": exposed,
            "bubble": outcome.idle_s(busiest),
            "optimizer": float(row.optimizer_s),
            "overhead": float(row.overhead_s),
        },
        lower_bound_s=lower_bound_s(problem),
        # The error of predicted memory is common to all devices, so the fullest one decides.
        fit_probability=min(fit_probability(m.total, m.capacity, problem.trainer.memory_spread) for m in memory),
    )


def _memory(problem: Problem, devices: tuple[int, ...], seen: Record) -> DeviceMemory:
    """The memory of some devices, from their `RankCostRow`."""
    capacity = problem.capacity_bytes([problem.cluster.device(d) for d in devices])
    return DeviceMemory(
        devices=format_devices(devices),
        parameters=float(seen.parameter_bytes),
        gradients=float(seen.gradient_bytes),
        optimizer=float(seen.optimizer_bytes),
        activations=float(seen.activation_bytes),
        buffers=float(seen.buffer_bytes),
        capacity=capacity,
        reserve=capacity - float(seen.capacity_bytes),
    )


def _by_kind(lowered: LoweredPlan, outcome: Outcome, rank: int) -> Iterator[tuple[tuple[int, ...], Record]]:
    """Devices of a pipeline rank that have equal costs, with their `RankCostRow`."""
    stage = lowered.layout.stages[rank]
    if not (lowered.shares and lowered.shares[rank] and stage.kinds):
        yield stage.devices, outcome.ranks[rank]
        return
    places = np.array(stage.devices).reshape(int(stage.axes[0]), -1)
    found = [
        (tuple(sorted(places[list(kind.ranks)].reshape(-1).tolist())), outcome.of_views[view][rank])
        for view, kind in enumerate(stage.kinds)
    ]
    yield from sorted(found, key=lambda pair: pair[0])


def error_band(problem: Problem) -> float:
    """Half-width of the band around an estimate, as a share of it.

    It starts from the error of the trainer that a user on another cluster has to expect. Three independent errors are
    added: of devices whose own kernels were not measured, see `transfer_error`; of convolutions, none of which was
    measured separately; and of routed experts, whose kernels and exchanges differ between the releases of a trainer.
    The last two are the errors of published runs of such networks, times the share of such operators in the FLOPs.
    """
    convolved = shared("convolution_band") * share_of_flops(problem.graph, CONVOLUTIONS)
    routed = shared("expert_band") * share_of_flops(problem.graph, EXPERTS)
    cluster = problem.cluster
    used = [cluster.devices[name] for name in dict.fromkeys(node.device for node in cluster.nodes)]
    return math.hypot(problem.trainer.error_band, convolved, routed, transfer_error(used))


def share_of_flops(graph: Graph, kinds: Collection[str]) -> float:
    """Share of operators of some kinds in the FLOPs of a graph, forward and backward, 0 to 1; operators with a stated
    time do not count."""
    flops = [(op, op.forward_flops.at(1) + op.backward_flops.at(1)) for op in graph.operators]
    found = sum(amount for op, amount in flops if op.kind in kinds and op.measured_s is None)
    return found / max(1.0, sum(amount for _, amount in flops))


def _attention_rate(device: Device, problem: Problem) -> float:
    rate, portable = problem.trainer.attention_rate, problem.trainer.portable_attention
    curve = attention_curve(device, problem.base_precision, rate=rate, portable=portable)
    # Heads larger than the one at which the rate is stated take less time for each element.
    return float(curve.flops_per_s * (REFERENCE_HEAD + curve.small_head) / REFERENCE_HEAD)


def lower_bound_s(problem: Problem) -> float:
    """Lower bound on the step time of every plan, in seconds: the measured seconds, all other FLOPs at the rates of the
    largest kernels, divided among all devices, and the host time of a step."""
    graph, trainer, devices = problem.graph, problem.trainer, problem.cluster.num_devices
    kinds = problem.cluster.devices
    names = [host.device for host in problem.cluster.hosts for _ in range(host.num_devices)]
    product = {name: float(gemm_curve(kinds[name], problem.precision).flops_per_s) for name in {*names}}
    product_rate = sum(product[name] for name in names)
    attention = {name: _attention_rate(kinds[name], problem) for name in {*names}}
    attention_rate = sum(attention[name] for name in names)
    shares = visible_shares(problem)
    least: dict[str, float] = {}
    for index, op in enumerate(graph.operators):
        flops = op.forward_flops.at(1) + op.backward_flops.at(1)
        if op.measured_s is not None:
            least[op.name] = sum(op.measured_s) / devices
        elif op.kind == "Attention" or (trainer.fused_attention and index in shares):
            # A causal mask hides half of the keys, and a window more.
            least[op.name] = min(0.5, shares[index]) * flops / attention_rate
        else:
            least[op.name] = flops / product_rate
    total = sum(least.values())
    for seconds, inside in device_seconds(graph, problem.hints):
        total += min(0.0, seconds / devices - sum(least[name] for name in inside))
    return problem.training.global_batch * total + trainer.step_overhead_ms * 1e-3


def annotate(plan: Plan, lowered: LoweredPlan, evaluator: Evaluator) -> Plan:
    """The plan with degrees, estimate, launch line and reasons for its three largest costs.

    Args:
        plan: the plan document.
        lowered: the same plan, lowered.
        evaluator: of its problem.
    """
    outcome = evaluate_plan(plan, lowered, evaluator)
    return replace(
        _estimated(plan, lowered, evaluator, outcome),
        launch=launch_line(plan, evaluator.problem),
        why=reasons(lowered.views[outcome.view], evaluator, outcome),
    )


def estimated(plan: Plan, lowered: LoweredPlan, evaluator: Evaluator) -> Plan:
    """The plan with degrees and estimate alone, as for a list of plans; arguments as for `annotate`."""
    return _estimated(plan, lowered, evaluator, evaluate_plan(plan, lowered, evaluator))


def _estimated(plan: Plan, lowered: LoweredPlan, evaluator: Evaluator, outcome: Outcome) -> Plan:
    return replace(plan, degrees=degrees_of(lowered, evaluator), estimate=_estimate(lowered, evaluator, outcome))


def launch_line(plan: Plan, problem: Problem) -> str:
    """The command that starts a training by a plan.

    With a target that other software trains for, it writes the files of that software. Otherwise it starts one process
    for each device: the example for a decoder of the zoo, and a script of the user's own for any other model.
    """
    target = problem.target
    if target is not None and target.name != OWN:
        return f"automap export plan.json MODEL --target {target.name} -o FOLDER  # its last line is the command"
    start = torchrun(plan, problem.cluster)
    if EXAMPLE_MODEL.fullmatch(plan.model.name):
        return f"{start} examples/train_gpt.py plan.json checkpoint 100"
    begun = "automap export writes its beginning" if target is not None else "calls automap.runtime.trainer.parallelize"
    return f"{start} YOUR_TRAINING.py  # {begun}, see docs/training.md"


def processes(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """[hosts] devices that a plan has on each of its hosts, in the order of the cluster."""
    devices = {device for stage in plan.stages for device in parse_devices(stage.devices)}
    counts = Counter(int(cluster.node_of[device]) for device in devices)
    return tuple(counts[host] for host in sorted(counts))


def torchrun(plan: Plan, cluster: Cluster) -> str:
    """The beginning of a command that starts one process a device of a plan, on each of its hosts."""
    counts = processes(plan, cluster)
    several = f"--nnodes={len(counts)} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
    # If the numbers differ, each host starts one process for each of its own devices.
    each = str(counts[0]) if len({*counts}) == 1 else "auto"
    return f"torchrun {several if len(counts) > 1 else '--standalone'} --nproc-per-node={each}"
