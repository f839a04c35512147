"""Published runs as problems and plans: the model, cluster, strategy and software of a run in the terms of the price.

Nothing is priced here. A run that cannot be expressed raises `Unpriced` with the reason. Units: seconds, bytes,
samples.
"""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from automap.arrays import Ints
from automap.cluster import Cluster, Node, parse_cluster
from automap.device_kinds import Device, Precision, known_devices, known_links
from automap.errors import UserError
from automap.links import Link
from automap.plan import ScheduleKind
from automap.price.evaluator import Evaluator
from automap.price.lowered_plan import LoweredPlan, Segment
from automap.problem import Problem
from automap.space.shape import Shape
from automap.space.stated_parts import (
    Axis,
    Unpriced,
    chunks,
    chunks_of_modules,
    mesh,
    recompute_masks,
    signatures,
)
from automap.trainers import trainers
from automap.validation.published_runs import Run
from ir import zoo
from ir.graph import Graph

PADDED_VOCABULARY = 128
"""Megatron and its descendants pad the vocabulary to a multiple of this times tp (default of its arguments)."""
SEQUENCE_PARALLEL = ("megatron-core", "torchtitan")
"""Trainers whose tensor parallelism always splits the sequence between its products (their documentation)."""
DROPOUT = {"megatron-lm": 10, "megatron-deepspeed": 10, "oneflow": 10, "deeplearningexamples": 10}
"""Trainer -> the per cent of activations that it drops by default (its documentation; BERT's and GPT-2's papers)."""
VOCABULARY = 50257
"""The vocabulary of GPT-2, for sources that do not state one."""
SCHEDULES = {"1f1b": "1f1b", "1f1b-i": "interleaved", "gpipe": "gpipe", "zb-1p": "zb1p", "zb-2p": "zb2p"}
RELEASES = {"torchtitan": {"2024": "torchtitan-2024", "2025": "torchtitan-2025", "": "torchtitan-2024"}}
"""Software -> the trainers of its published runs where today's release differs, by the year in the source of a run; of
a source without one that of most runs."""
CONTAINERS = {"megatron-core": ((26, 6), "megatron-core-26.06")}
"""Software -> the first container of NVIDIA, year and month, whose runs have a trainer of their own, and the trainer;
runs name it in their source, as in `26.06 NeMo Container`."""
OVERLAPPED = {"gpt-oss-120b": ("GB200", "GB300"), "qwen3-30b": ("GB200", "GB300", "B300")}
"""Models -> the devices for which Megatron-Bridge's recipes in mxfp8 set `moe_a2a_overlap` (from container 26.06 on:
src/megatron/bridge/perf_recipes/gpt_oss and qwen, a folder for each device)."""
LATENT = ("deepseek-v2", "deepseek-v3", "kimi-k2")
"""Models with multi-head latent attention (their papers)."""
LATENT_SIZES = {"head_dim": 128, "kv_rank": 512, "q_rank": 1536, "rope_dim": 64}
"""Its sizes, for sources that do not state them: those of DeepSeek-V2 and V3 (defaults of their configurations in
transformers), with which Kimi-K2 has the published number of parameters too (tested)."""
CLIPPED = "gpt-oss"
"""Models whose attention, router and experts have biases, and whose experts clip their gate (arXiv 2508.10925)."""

SIZED = {
    "amoebanetd": "amoebanet:layers={},width={}",
    "unet": "unet:convolutions={},width={},dropout_percent=10",
}
"""Networks that papers name by two sizes, as AmoebaNet-D(18,256) -> their specification in the zoo (GPipe; torchgpipe,
arXiv 2004.09910)."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run in the terms of the price."""

    problem: Problem
    lowered: LoweredPlan
    """The plan of the run in numbers."""
    evaluator: Evaluator
    assumed: tuple[str, ...]
    """The names of what the source does not state and is assumed."""


def case_of(run: Run) -> Case:
    """The problem and the plan of a run.

    Raises:
        Unpriced: names what cannot be expressed.
    """
    try:
        return _case(run)
    except UserError as fault:
        raise Unpriced(str(fault)) from None


def trainer_of(run: Run) -> str:
    """The name of the trainer that a run is priced as."""
    container = re.search(r"(?<![\d.])(\d\d)\.(\d\d)(?:\.\d+)? NeMo", run.source)
    if container and run.stack in CONTAINERS:
        since, newer = CONTAINERS[run.stack]
        return newer if (int(container[1]), int(container[2])) >= since else run.stack
    year = re.search(r"(?<!\d)(20\d\d)-?\d\d(?!\d)", run.source)
    releases = RELEASES.get(run.stack, {})
    name = releases.get(year[1] if year else "", run.stack)
    return name if name in trainers() else "generic"


def _overlaps_exchange(run: Run) -> bool:
    """Whether the recipe of a run sets `overlap_moe_expert_parallel_comm`, see `OVERLAPPED`, and it is priced: without
    a pipeline."""
    if run.strategy.get("pp") != 1:
        return False
    name, gpu = str(run.model.get("name", "")).lower(), run.cluster.get("gpu")
    is_newer = trainer_of(run) == "megatron-core-26.06" and run.strategy.get("precision") == "mxfp8"
    return is_newer and any(name.startswith(model) and gpu in gpus for model, gpus in OVERLAPPED.items())


def _case(run: Run) -> Case:
    strategy = run.strategy
    degrees = {name: _count(strategy, name) for name in ("dp", "tp", "pp", "global_batch", "micro_batch")}
    cp, virtual = strategy.get("cp") or 1, strategy.get("vpp") or 1
    rows = degrees["dp"] * degrees["micro_batch"]
    if degrees["global_batch"] % rows:
        raise Unpriced(f"a global batch of {degrees['global_batch']} is not a multiple of dp * micro_batch = {rows}")
    kind = _schedule(strategy.get("schedule"), virtual)
    recompute = strategy.get("recompute")
    zero = (strategy.get("zero_stage") or 0) if degrees["dp"] * cp > 1 else 0
    along = bool(strategy.get("sequence_parallel")) or run.stack in SEQUENCE_PARALLEL
    axes = _axes(run, along)
    evaluator = _evaluator(_spec(run, along), json.dumps(_cluster(run).to_json()), json.dumps(_training(run)))
    shape = Shape(
        pp=degrees["pp"],
        tp=degrees["tp"],
        dp=degrees["dp"],
        num_micro_batches=degrees["global_batch"] // rows,
        samples=rows,
        middle=cp,
    )
    if shape.pp * shape.tp * shape.dp * cp != evaluator.problem.cluster.num_devices:
        raise Unpriced("dp * tp * pp * cp is not the number of devices")
    chosen = signatures(evaluator, shape, axes, sequence_parallel=along)
    lowered = LoweredPlan(
        axes=tuple(axis.name for axis in axes),
        layout=evaluator.layout([axis.size for axis in axes], shape.pp),
        num_micro_batches=shape.num_micro_batches,
        samples=rows,
        kind=kind,
        chunks=_chunks(run, evaluator, chosen, shape.pp * virtual),
        zero=zero,
        zero_axes=np.array([axis.size > 1 and axis.shards_states for axis in axes]),
    )
    return Case(
        problem=evaluator.problem, lowered=lowered, evaluator=evaluator, assumed=() if recompute else ("recompute",)
    )


def _chunks(run: Run, evaluator: Evaluator, chosen: Ints, count: int) -> tuple[tuple[Segment, ...], ...]:
    """The stages of a run, with what they recompute; `chosen` is [operator rows, axes]."""
    masks = recompute_masks(evaluator, run.stack, run.strategy.get("recompute") or "none")
    modules = run.strategy.get("balance")
    if not modules:
        return chunks(evaluator, chosen, count, masks)
    if len(modules) != count:
        raise Unpriced(f"balance = {modules} for {count} stages")
    return chunks_of_modules(evaluator, chosen, modules, masks)


def _count(strategy: Mapping[str, Any], name: str) -> int:
    value = strategy.get(name)
    if not isinstance(value, int | float) or value < 1 or value != int(value):
        raise Unpriced(f"{name} is not stated" if value is None else f"{name} = {value!r}")
    return int(value)


def _schedule(stated: str | None, virtual: int) -> str:
    kind = SCHEDULES.get((stated or ("1f1b-i" if virtual > 1 else "1f1b")).lower())
    if kind == "interleaved" and virtual == 1:
        kind = "1f1b"
    if kind is None or kind not in typing.get_args(ScheduleKind):
        raise Unpriced(f"the schedule {stated} is not priced yet")
    if virtual > 1 and kind != "interleaved":
        raise Unpriced(f"the schedule {stated} with virtual stages")
    return kind


def _training(run: Run) -> dict[str, Any]:
    """The training settings of a run, as `automap.problem.Training` takes them."""
    stated = run.strategy.get("precision")
    if stated not in typing.get_args(Precision):
        raise Unpriced(f"the precision {stated} is not priced yet")
    return {
        "global_batch": run.strategy["global_batch"],
        "precision": stated,
        "trainer": trainer_of(run),
        # Some sources tell the two kinds of fp8 scales apart in the names of their rows alone.
        "scaling": "row" if stated == "fp8" and "rowwise" in run.id else "tensor",
        "async_tensor_parallel": bool(run.strategy.get("async_tp")),
        "overlap_expert_exchange": _overlaps_exchange(run),
    }


@functools.lru_cache(maxsize=8)
def _evaluator(spec: str, cluster: str, training: str) -> Evaluator:
    return Evaluator(Problem.build(_build(spec), parse_cluster(json.loads(cluster)), json.loads(training)))


def _axes(run: Run, sequence_parallel: bool) -> list[Axis]:
    strategy, experts = run.strategy, (run.model.get("moe") or {}).get("experts", 0)
    dp, ep, states = _count(strategy, "dp"), strategy.get("ep") or 1, strategy.get("zero1_group")
    if experts % ep or (ep > 1 and not experts):
        raise Unpriced(f"ep = {ep} of {experts} experts")
    return mesh(
        dp=dp,
        tp=_count(strategy, "tp"),
        cp=strategy.get("cp") or 1,
        ep=ep,
        slices=strategy.get("etp"),
        states=states if states and states < dp else None,
        sequence_parallel=sequence_parallel,
    )


@functools.lru_cache(maxsize=32)
def _build(spec: str) -> Graph:
    return zoo.build(spec)


def _spec(run: Run, sequence_parallel: bool) -> str:
    """The specification for `ir.zoo.build`, with the vocabulary padded as the run's trainer pads it."""
    model = run.model
    name = str(model.get("name", "")).lower()
    if "vision" in model:
        return _network(str(model.get("name")), (model["vision"] or {}).get("image"))
    keys: dict[str, int] = {}
    for key in ("layers", "hidden", "heads", "ffn", "seq_len", "vocab_size"):
        value = model.get(key) or (VOCABULARY if key == "vocab_size" else None)
        if not isinstance(value, int):
            raise Unpriced(f"model.{key} is not stated")
        keys[key] = value
    unit = (run.strategy.get("tp") or 1) * (PADDED_VOCABULARY if run.stack.startswith("megatron") else 1)
    keys["vocab_size"] = -(-keys["vocab_size"] // unit) * unit
    family = "gpt"
    if name.startswith("bert"):
        family = "bert"
    elif model.get("gated_mlp") or model.get("kv_heads") not in (None, model["heads"]):
        family = "llama"
        keys["kv_heads"] = model.get("kv_heads") or model["heads"]
        keys["mlp_matrices"] = 3 if model.get("gated_mlp") else 2
    if name.startswith(LATENT):
        family = "llama"
        keys |= LATENT_SIZES
    elif model.get("head_dim") not in (None, model["hidden"] // model["heads"]):
        if family != "llama":
            raise Unpriced("heads of another size than hidden / heads")
        keys["head_dim"] = model["head_dim"]
    if family in ("gpt", "bert") and run.stack in DROPOUT:
        keys["dropout_percent"] = DROPOUT[run.stack]
    experts = model.get("moe")
    if experts:
        family = "moe"
        keys.pop("mlp_matrices", None)
        keys["kv_heads"] = model.get("kv_heads") or model["heads"]
        width = experts.get("moe_ffn") or keys["ffn"]
        keys |= {"experts": experts["experts"], "top_k": experts["topk"], "moe_ffn": width}
        # Each rank routes its own part of a sequence.
        groups = (run.strategy.get("cp") or 1) * ((run.strategy.get("tp") or 1) if sequence_parallel else 1)
        optional = {
            "clipped": int(name.startswith(CLIPPED)),
            "dense_layers": experts.get("dense_layers"),
            "shared_ffn": (experts.get("shared") or 0) * width,
            "groups": groups if groups > 1 else 0,
        }
        keys |= {key: value for key, value in optional.items() if value}
    return f"{family}:" + ",".join(f"{k}={v}" for k, v in keys.items())


def _network(name: str, image_size: object) -> str:
    """The specification of a network for images: a family that papers name by two sizes, or the longest name in the
    zoo with which its own begins; ResNeXts say their groups, as in 32x4d."""
    keys = [f"image_size={image_size}"] if isinstance(image_size, int) else []
    sized = re.fullmatch(r"(.+?)\s*\((\d+),\s*(\d+)\)", name)
    family = SIZED.get(re.sub(r"[^a-z]", "", sized[1].lower())) if sized else None
    if sized and family:
        return ",".join([family.format(sized[2], sized[3]), *keys])
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    found = max((z for z in zoo.names() if wanted.startswith(z.replace("-", ""))), key=len, default=None)
    if found is None:
        raise Unpriced(f"the zoo has no {name}")
    groups = re.search(r"(\d+)x(\d+)d", name.lower())
    if groups:
        keys += [f"groups={groups[1]}", f"group_width={groups[2]}"]
    return ":".join([found, ",".join(keys)]).removesuffix(":")


_RATE = re.compile(r"(?:(\d+)\s*x\s*)?(\d+)\s*Gb(?:ps|/s|it/s)", re.IGNORECASE)
_FAMILIES = (("omni-path", "omni-path"), ("infiniband", "infiniband"), ("connectx", "infiniband"))


def _cluster(run: Run) -> Cluster:
    stated = run.cluster
    device = _device(str(stated.get("gpu")), stated.get("memory_GB"))
    total = _count(stated, "num_gpus")
    per_node = next(n for n in range(min(total, _count(stated, "gpus_per_node")), 0, -1) if total % n == 0)
    base = parse_cluster(f"{total // per_node}x{per_node}x{device.name}")
    inter, nics = base.links[device.inter_node_link], min(device.nics_per_node, per_node)
    text = str(stated.get("inter_link") or "")
    found = _RATE.search(text)
    if found:
        nics, rate = int(found[1] or 1), float(found[2]) / 8
        if "per gpu" in text.lower():
            nics = per_node
        elif rate * 8 > 800:
            nics, rate = per_node, rate / per_node
        inter = _link(text, rate)
    node = Node(
        device=device.name,
        num_devices=per_node,
        intra_node_link=device.intra_node_link,
        inter_node_link=inter.name,
        nics=nics,
        count=total // per_node,
    )
    intra = base.links[device.intra_node_link]
    return Cluster(name=base.name, nodes=(node,), devices=base.devices, links={intra.name: intra, inter.name: inter})


def _device(gpu: str, memory_gb: float | None) -> Device:
    """The device kind of a name whose memory is nearest to the stated one."""
    wanted = gpu.lower().removesuffix("-sxm")
    found = [d for d in known_devices() if any(n.lower().startswith(wanted) for n in (d.name, *d.aliases))]
    exact = [d for d in found if wanted in (n.lower() for n in d.aliases)]
    if not found:
        raise Unpriced(f"no data file for the device {gpu}")
    if memory_gb is None:
        return (exact or found)[0]
    return min(found, key=lambda d: (abs(d.memory_GiB - memory_gb), d not in exact))


def _link(text: str, rate: float) -> Link:
    """The known link of the family that a text names with the nearest bandwidth, at the stated GB/s."""
    family = next((kind for word, kind in _FAMILIES if word in text.lower()), "ethernet")
    nearest = min(
        (link for link in known_links() if link.name.startswith(family)), key=lambda k: abs(k.bandwidth_GBps - rate)
    )
    return replace(nearest, bandwidth_GBps=rate)
