"""Published training runs as problems and plans: model fields, cluster, strategy and software of each run.

A run is a row of a file of the `published_runs` format: `stack`, `model`, `cluster`, `strategy`, `measured`. Nothing is
priced here. What cannot be expressed raises `Unpriced` with the reason. Units: seconds, bytes, samples.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from automap.cluster import Cluster, Device, Link, Node, known_devices, known_links, parse_cluster
from automap.errors import ProblemError, UserError
from automap.hints import Fix, Hints
from automap.meshes import Shape
from automap.plan import ScheduleKind
from automap.price.evaluator import Choice, Evaluator, Segment, by_type
from automap.problem import Precision, Problem, trainers
from automap.space import PlanSpace
from automap.templates import megatron_signatures
from ir import zoo
from ir.graph import Graph

Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

SECTIONS = ("model", "cluster", "strategy", "measured")
PADDED_VOCABULARY = 128
"""Megatron and its kin pad the vocabulary to a multiple of this times tp."""
SEQUENCE_PARALLEL = ("megatron-core", "torchtitan")
"""Trainers whose tensor parallelism always splits the sequence between its products (their documentation)."""
DROPOUT = {"megatron-lm": 10, "megatron-deepspeed": 10, "oneflow": 10, "deeplearningexamples": 10}
"""Per cent of activations that a trainer drops where nothing is said (its documented default, BERT's and GPT-2's)."""
VOCABULARY = 50257
"""Of GPT-2, where a source does not state it."""
SCHEDULES = {"1f1b": "1f1b", "1f1b-i": "interleaved", "gpipe": "gpipe", "zb-1p": "zb1p", "zb-2p": "zb2p"}
BLOCK_FP8 = {"mxfp8": "fp8"}


class Unpriced(Exception):
    """Why a run cannot be priced."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured run."""

    id: str
    group: str
    stack: str
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    strategy: Mapping[str, Any]
    iteration_s: float
    peak_memory_bytes: float | None

    @property
    def choice_group(self) -> tuple[Any, ...]:
        """Runs with equal keys differ in their plan alone."""
        model = tuple(sorted((k, str(v)) for k, v in self.model.items() if k != "params"))
        cluster = tuple(sorted((k, str(v)) for k, v in self.cluster.items()))
        return self.stack, model, cluster, self.strategy.get("global_batch"), self.strategy.get("precision")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run as the price sees it."""

    problem: Problem
    choice: Choice
    """The plan in numbers."""
    evaluator: Evaluator
    assumed: tuple[str, ...]
    """What the source does not state."""


def load_runs(path: Path) -> tuple[Run, ...]:
    """The runs of a file.

    Raises:
        ProblemError: the file is no list of runs.
    """
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as fault:
        raise ProblemError(
            f"cannot be read ({fault})", field="runs", value=str(path), repair="Name a readable JSON file."
        ) from None
    if not isinstance(document, list):
        raise ProblemError("not a list", field="runs", value=str(path), repair="Give a JSON list of runs.")
    return tuple(_run(item, f"runs[{i}]") for i, item in enumerate(document))


def _run(item: object, path: str) -> Run:
    if not isinstance(item, dict):
        raise ProblemError("not an object", field=path, value=item, repair="Give an object with id, group and so on.")
    for key, kind in (("id", str), ("group", str), ("stack", str), *((name, dict) for name in SECTIONS)):
        if not isinstance(item.get(key), kind):
            raise ProblemError(
                "missing or of the wrong type",
                field=f"{path}.{key}",
                value=item.get(key),
                repair=f"Give {'an object' if kind is dict else 'a string'}.",
            )
    seconds, peak = item["measured"].get("iteration_s"), item["measured"].get("peak_memory_GB")
    for name, value in (("iteration_s", seconds), ("peak_memory_GB", peak)):
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not number and not (name == "peak_memory_GB" and value is None):
            raise ProblemError(
                "not a positive number",
                field=f"{path}.measured.{name}",
                value=value,
                repair="Give a positive number.",
            )
    return Run(
        id=item["id"],
        group=item["group"],
        stack=item["stack"],
        model=item["model"],
        cluster=item["cluster"],
        strategy=item["strategy"],
        iteration_s=float(seconds),
        peak_memory_bytes=None if peak is None else float(peak) * 1e9,
    )


def case_of(run: Run) -> Case:
    """The problem and the plan of a run.

    Raises:
        Unpriced: says what cannot be expressed.
    """
    try:
        return _case(run)
    except UserError as fault:
        raise Unpriced(str(fault)) from None


def _case(run: Run) -> Case:
    strategy = run.strategy
    degrees = {name: _count(strategy, name) for name in ("dp", "tp", "pp", "global_batch", "micro_batch")}
    if strategy.get("ep") not in (None, 1):
        raise Unpriced(f"ep = {strategy['ep']}: no such axis in the space of plans yet")
    cp, virtual = strategy.get("cp") or 1, strategy.get("vpp") or 1
    rows = degrees["dp"] * degrees["micro_batch"]
    if degrees["global_batch"] % rows:
        raise Unpriced(f"a global batch of {degrees['global_batch']} is no multiple of dp * micro_batch = {rows}")
    kind = _schedule(strategy.get("schedule"), virtual)
    recompute = strategy.get("recompute")
    zero = (strategy.get("zero_stage") or 0) if degrees["dp"] * cp > 1 else 0
    evaluator = _evaluator(
        _spec(run), json.dumps(_cluster(run).to_json()), degrees["global_batch"], _precision(run), _trainer(run)
    )
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
    along = bool(strategy.get("sequence_parallel")) or run.stack in SEQUENCE_PARALLEL
    mesh = mesh_of(shape, "cp" if cp > 1 else "")
    chosen = signatures(evaluator, shape, mesh, sequence_parallel=along)
    choice = Choice(
        axes=tuple(mesh),
        layout=evaluator.layout(tuple(mesh.values()), shape.pp),
        num_micro_batches=shape.num_micro_batches,
        samples=rows,
        kind=kind,
        chunks=chunks(evaluator, chosen, shape.pp * virtual, _masks(evaluator, run.stack, recompute or "none")),
        zero=zero,
        zero_axes=np.array([size > 1 and axis != "tp" for axis, size in mesh.items()]),
    )
    return Case(
        problem=evaluator.problem, choice=choice, evaluator=evaluator, assumed=() if recompute else ("recompute",)
    )


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
    return kind


def _precision(run: Run) -> str:
    stated = run.strategy.get("precision")
    kind = BLOCK_FP8.get(str(stated), str(stated))
    if kind not in typing.get_args(Precision):
        raise Unpriced(f"the precision {stated} is not priced yet")
    return kind


def _trainer(run: Run) -> str:
    return run.stack if run.stack in trainers() else "generic"


@functools.lru_cache(maxsize=8)
def _evaluator(spec: str, cluster: str, global_batch: int, precision: str, trainer: str) -> Evaluator:
    training = {"global_batch": global_batch, "precision": precision, "trainer": trainer}
    return Evaluator(Problem.build(_build(spec), parse_cluster(json.loads(cluster)), training))


# -- models -------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=32)
def _build(spec: str) -> Graph:
    return zoo.build(spec)


def _spec(run: Run) -> str:
    """What `ir.zoo.build` takes, the vocabulary padded as the run's trainer pads it."""
    model = run.model
    name = str(model.get("name", "")).lower()
    if "vision" in model:
        known = next((z for z in zoo.names() if name.replace("-", "").startswith(z)), None)
        if known is None:
            raise Unpriced(f"the zoo has no {model.get('name')}")
        return known
    keys: dict[str, int] = {}
    for key in ("layers", "hidden", "heads", "ffn", "seq_len", "vocab_size"):
        value = model.get(key) or (VOCABULARY if key == "vocab_size" else None)
        if not isinstance(value, int):
            raise Unpriced(f"model.{key} is not stated")
        keys[key] = value
    if model.get("head_dim") not in (None, model["hidden"] // model["heads"]):
        raise Unpriced("heads of another size than hidden / heads")
    unit = (run.strategy.get("tp") or 1) * (PADDED_VOCABULARY if run.stack.startswith("megatron") else 1)
    keys["vocab_size"] = -(-keys["vocab_size"] // unit) * unit
    family = "gpt"
    if name.startswith("bert"):
        family = "bert"
    elif model.get("gated_mlp") or model.get("kv_heads") not in (None, model["heads"]):
        family = "llama"
        keys["kv_heads"] = model.get("kv_heads") or model["heads"]
        keys["mlp_matrices"] = 3 if model.get("gated_mlp") else 2
    if family in ("gpt", "bert") and run.stack in DROPOUT:
        keys["dropout_percent"] = DROPOUT[run.stack]
    experts = model.get("moe")
    if experts:
        if experts.get("dense_layers") or experts.get("shared"):
            raise Unpriced("dense layers or shared experts beside the experts")
        family = "moe"
        keys.pop("mlp_matrices", None)
        keys |= {"experts": experts["experts"], "top_k": experts["topk"], "ffn": experts.get("moe_ffn") or keys["ffn"]}
    return f"{family}:" + ",".join(f"{k}={v}" for k, v in keys.items())


# -- clusters -----------------------------------------------------------------------------------------------------

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
    """The device kind of that name, with the memory nearest to what is stated."""
    wanted = gpu.lower().removesuffix("-sxm")
    found = [d for d in known_devices() if any(n.lower().startswith(wanted) for n in (d.name, *d.aliases))]
    exact = [d for d in found if wanted in (n.lower() for n in d.aliases)]
    if not found:
        raise Unpriced(f"no data file for the device {gpu}")
    if memory_gb is None:
        return (exact or found)[0]
    return min(found, key=lambda d: (abs(d.memory_GiB - memory_gb), d not in exact))


def _link(text: str, rate: float) -> Link:
    """The known link of that family with the nearest rate, at the stated GB/s."""
    family = next((kind for word, kind in _FAMILIES if word in text.lower()), "ethernet")
    nearest = min(
        (link for link in known_links() if link.name.startswith(family)), key=lambda k: abs(k.bandwidth_GBps - rate)
    )
    return replace(nearest, bandwidth_GBps=rate)


# -- plans --------------------------------------------------------------------------------------------------------


def mesh_of(shape: Shape, middle: str) -> dict[str, int]:
    """Ranks of each mesh axis, outermost first; `middle` names the third one, "" = there is none."""
    return {"dp": shape.dp, "tp": shape.tp} if not middle else {"dp": shape.dp, middle: shape.middle, "tp": shape.tp}


def signatures(evaluator: Evaluator, shape: Shape, mesh: Mapping[str, int], *, sequence_parallel: bool) -> Ints:
    """[operator rows, axes] the template of a mesh: Megatron's pattern on tp, the sequence on cp, experts on ep."""
    problem = evaluator.problem
    # The pattern depends on the degrees alone: one stage of the plan is enough.
    node = replace(problem.cluster.nodes[0], num_devices=math.prod(mesh.values()), count=1)
    small = replace(problem, cluster=replace(problem.cluster, nodes=(node,), bandwidth_GBps=None))
    fix = Fix(
        dp=mesh["dp"],
        tp=mesh["tp"],
        pp=1,
        cp=mesh.get("cp", 1),
        ep=mesh.get("ep", 1),
        num_micro_batches=shape.num_micro_batches,
    )
    space = PlanSpace(replace(small, hints=Hints(fix=fix)), evaluator)
    prefix = space.even_values(space.shapes[0], recompute="none", zero=0)
    values = megatron_signatures(
        space,
        space.shapes[0],
        prefix,
        sequence_parallel=sequence_parallel,
        expert_axis="ep" if "ep" in mesh else "",
    )
    return space.signatures(values)


def _masks(evaluator: Evaluator, stack: str, recompute: str) -> Callable[[int], Mask]:
    """Unit type -> which of its operators are recomputed."""
    if (stack, recompute) != ("torchtitan", "selective"):
        return lambda kind: evaluator.masks(kind)[recompute]
    tables, units = evaluator.tables, evaluator.blocks
    graph = evaluator.problem.graph
    attention = {i for group in graph.fused if group.kind == "attention" for i in group.members}

    def mask(kind: int) -> Mask:
        # TorchTitan's selective option "op" keeps attention and every second matrix product.
        found = np.ones(len(tables.rows(kind)), dtype=np.bool_)
        start, products = units.representative(kind).start, 0
        for k in range(len(found)):
            if start + k in attention:
                found[k] = False
            elif graph.operators[start + k].kind in ("MatMul", "Gemm"):
                products += 1
                found[k] = products % 2 == 0
        return found

    return mask


def chunks(
    evaluator: Evaluator, signatures: Ints, num_chunks: int, masks: Callable[[int], Mask]
) -> tuple[tuple[Segment, ...], ...]:
    """The layers spread as evenly as they can be; the outer chunks, which hold embedding and head, get less."""
    units, spans = evaluator.blocks.units, evaluator.tables.spans
    kinds = [unit.type for unit in units]
    repeated = max(set(kinds), key=kinds.count)
    layers = [i for i, kind in enumerate(kinds) if kind == repeated]
    chosen = by_type(evaluator, signatures)
    segments = [
        Segment(
            unit=number,
            first=int(spans[kind]),
            last=int(spans[kind + 1]),
            chosen=np.ascontiguousarray(chosen[kind]),
            recomputed=masks(kind) if kind == repeated else evaluator.masks(kind)["none"],
        )
        for number, kind in enumerate(kinds)
    ]
    ends = [0, *_ends(layers, num_chunks), len(units)]
    if any(a >= b for a, b in itertools.pairwise(ends)):
        raise Unpriced(f"{len(layers)} layers cannot be cut into {num_chunks} stages")
    return tuple(tuple(segments[a:b]) for a, b in itertools.pairwise(ends))


def _ends(layers: list[int], chunks: int) -> list[int]:
    """Units before the end of each chunk but the last."""
    share, extra = divmod(len(layers), chunks)
    sizes = [share] * chunks
    for i in range(extra):
        sizes[(chunks - extra) // 2 + i] += 1
    ends = list(itertools.accumulate(sizes[:-1]))
    return [layers[0] + end for end in ends]
