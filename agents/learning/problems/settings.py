"""How a random model is trained: batch, precision, optimizer, trainer; and the hints of a user."""

from __future__ import annotations

import re
from typing import Any

from agents.learning.problems.draw import Draw, divisors_up_to
from automap.cluster import Cluster
from automap.problem import Problem
from automap.trainers import trainers
from ir.graph import Graph

USUAL_TRAINERS = ("generic", "automap", "megatron-core", "torchtitan", "deepspeed")
"""Training software that is drawn more often than the rest."""
NOT_DRAWN = ("automap-modules", "fsdp", "megatron-core-26.06", "torchtitan-2024", "torchtitan-2025")
"""Software that other releases added: problems stay what they were, and so do the best plans known of them."""
MAX_BATCH = 1 << 17
"""Largest number of samples of a step (assumed)."""
LONG = 2048
"""Number of tokens above which a sample is long: batches then have fewer of them (assumed)."""


def draw_training(draw: Draw, cluster: Cluster, *, tokens: int) -> dict[str, Any]:
    """Settings that all devices of the cluster can run.

    Args:
        draw: random choices.
        cluster: the cluster.
        tokens: number of tokens of a sample; 0 for images and rows of features.

    Returns:
        fields of `automap.problem.Training`.
    """
    # Samples of each device: long sequences come in small batches.
    low, high = (0.25, max(1.0, 16.0 * min(1.0, LONG / tokens))) if tokens else (1.0, 256.0)
    wanted = cluster.num_devices * draw.log_between(low, high)
    found: dict[str, Any] = {"global_batch": _batch(draw, wanted, cluster.num_devices)}
    peaks = [set(kind.peak_TFLOPs) for kind in cluster.devices.values()]
    common = sorted(set.intersection(*peaks))
    if draw.chance(0.25) or not {"bf16", "fp16", "fp32"} & set(common):
        found["precision"] = draw.one(common)
    if found.get("precision") == "fp8" and draw.chance(0.3):
        found["scaling"] = "row"
    found["optimizer"] = draw.weighted({"adam": 8, "momentum": 2, "sgd": 1})
    drawn = tuple(name for name in trainers() if name not in NOT_DRAWN)
    found["trainer"] = draw.one(USUAL_TRAINERS) if draw.chance(0.7) else draw.one(drawn)
    if draw.chance(0.1):
        found["async_tensor_parallel"] = True
    if not tokens and draw.chance(0.2):
        found["batch_norm"] = "synchronized"
    return found


def _batch(draw: Draw, wanted: float, num_devices: int) -> int:
    """Samples of a step near a wanted number: a power of two, a multiple of the devices, round, or any number."""
    way = draw.weighted({"power": 5, "multiple": 3, "round": 1, "any": 1})
    count = max(1, round(wanted))
    if way == "power":
        count = 1 << max(0, count.bit_length() - draw.integer(0, 1))
    elif way == "multiple":
        count = max(1, round(count / num_devices)) * num_devices
    elif way == "round" and count > 10:
        count = round(count / 10) * 10
    return min(count, MAX_BATCH)


def draw_hints(draw: Draw, problem: Problem, *, is_tight: bool) -> dict[str, Any]:
    """What a user may state: memory to be left free, one degree, or how some operators are sharded.

    Args:
        draw: random choices.
        problem: the problem without hints.
        is_tight: whether the memory that is left is near to what the parameters and their state need.
    """
    found: dict[str, Any] = {}
    if is_tight:
        found["memory_reserve_bytes"] = _reserve(draw, problem)
    elif draw.chance(0.05):
        found["memory_reserve_bytes"] = float(f"{draw.log_between(1e8, 4e9):.2g}")
    if draw.chance(0.1):
        found["fix"] = _fix(draw, problem.cluster)
    if draw.chance(0.08):
        found["constraints"] = [_constraint(draw, problem.graph)]
    return {name: value for name, value in found.items() if value}


def _reserve(draw: Draw, problem: Problem) -> float:
    """Memory that leaves each device 1.3 to 8 times its even part of parameters, gradients and optimizer state."""
    cluster = problem.cluster
    state = problem.whole_state_bytes / cluster.num_devices
    least = min(kind.memory_bytes for kind in cluster.devices.values())
    framework = problem.trainer.reserved_GiB * (1 << 30)
    left = least - framework - state * draw.log_between(1.3, 8.0)
    return float(f"{min(max(0.0, left), 0.97 * least):.3g}")


def _fix(draw: Draw, cluster: Cluster) -> dict[str, Any]:
    devices = cluster.num_devices
    name = draw.one(("dp", "tp", "pp", "zero", "recompute", "schedule"))
    values: dict[str, list[Any]] = {
        "dp": divisors_up_to(devices, devices),
        "tp": divisors_up_to(devices, 16),
        "pp": divisors_up_to(devices, 8),
        "zero": [0, 1, 2, 3],
        "recompute": ["none", "selective", "full"],
        "schedule": ["gpipe", "1f1b"],
    }
    return {name: draw.one(values[name])}


def _constraint(draw: Draw, graph: Graph) -> dict[str, Any]:
    """A requirement on all operators that are called like a random one with a weight, in whatever layer."""
    heavy = [op for op in graph.operators if op.scope and op.forward_flops.at(1) > 0]
    if not heavy:
        return {}
    op = draw.one(heavy)
    numberless = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", op.scope)
    kind = draw.weighted({"replicate": 3, "split": 3, "recompute": 2, "spare": 1})
    if kind == "recompute":
        return {"scope": numberless, "recompute": True}
    if kind == "spare":
        return {"scope": numberless, "recompute": False}
    return {"scope": numberless + op.name[len(op.scope) :], kind: True}
