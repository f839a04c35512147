"""Enumerable problems: what searchers are measured on, each with 10^3 to 10^7 plans and a known optimum.

    python benchmarks/problems.py

prints the problems with their optima, which are kept in `benchmarks/optima.json` and proven again where the problem or
its price has changed.

Small and real models of the zoo, and random graphs, on clusters with unlike links, in three kinds: `sharding` (the
shape is fixed), `pipeline` (the signatures are fixed), `hybrid` (some decisions of every kind are free). Decisions are
fixed by hints alone: the least influential linkage groups are constrained until the space is small enough. In some of
the problems memory is so short that it decides.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from agents.searcher import Budget, search
from automap.cluster import parse_cluster
from automap.problem import Problem
from automap.space.space import PlanSpace
from automap.space.templates import templates
from envs.pruning import influence
from ir import zoo
from ir.factors import placement_text, whole_signature
from ir.graph import Graph
from ir.zoo.net import Net

DIGESTED = 300
"""Number of random plans whose prices are digested."""
OPTIMA = Path(__file__).parent / "optima.json"
GIB = float(1 << 30)
Kind = Literal["sharding", "pipeline", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem: its model, cluster and hints."""

    kind: Kind
    model: str
    """Name of a model of the zoo, or `random:SEED,LAYERS,WIDTH`."""
    cluster: str
    global_batch: int
    fix: Mapping[str, Any] = field(default_factory=dict)
    decades: float = 6.0
    """log10 of the largest number of plans that constraints leave."""
    memory_GiB: float | None = None  # noqa: N815
    """Memory of a device that the plan may use; None = all."""
    training: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Seed of the random constraints."""

    @property
    def name(self) -> str:
        """The unique name of the problem, for people and files."""
        memory = "" if self.memory_GiB is None else f" {self.memory_GiB:g} GiB"
        fixed = ", ".join(f"{name} {value}" for name, value in self.fix.items())
        return f"{self.kind}: {self.model} on {self.cluster}{memory}, {fixed}"


def random_graph(seed: int, layers: int, width: int) -> Graph:
    """A DAG of products, norms, activations and branches that meet again; widths around `width`."""
    rng, net = np.random.default_rng(seed), Net()
    x = net.builder.input("x", (1, 32, width))
    for layer in range(layers):
        scope = f"layers.{layer}"
        y = net.layer_norm(x, f"{scope}.norm") if rng.random() < 0.5 else x
        wide = width * int(rng.choice([1, 2, 4]))
        kind = rng.choice(["plain", "gated", "branches"])
        if kind == "plain":
            y = net.op("Relu", [net.linear(y, f"{scope}.up", wide)], scope)
        elif kind == "gated":
            y = net.silu_gate(net.linear(y, f"{scope}.gate", wide), net.linear(y, f"{scope}.up", wide), scope)
        else:
            left = net.op("Relu", [net.linear(y, f"{scope}.left", wide, bias=False)], scope)
            y = net.add(left, net.linear(y, f"{scope}.right", wide), scope)
        y = net.linear(y, f"{scope}.down", width, bias=bool(rng.random() < 0.5))
        x = net.add(x, y, scope) if rng.random() < 0.7 else y
    return net.finish(net.linear(x, "head", int(rng.choice([256, 4096, 32768]))))


def graph_of(model: str) -> Graph:
    """The graph that a case names."""
    family, _, numbers = model.partition(":")
    if family != "random":
        return zoo.build(model)
    return random_graph(*(int(number) for number in numbers.split(",")))


def problem_of(case: Case) -> Problem:
    """The problem, constrained until its plans can be listed."""
    graph, cluster = graph_of(case.model), parse_cluster(case.cluster)
    # The memory of a case is all that a plan may be predicted to take.
    training = {"global_batch": case.global_batch, "memory_confidence": 0.5, **case.training}
    hints: dict[str, Any] = {"fix": dict(case.fix), "constraints": []}
    if case.memory_GiB is not None:
        least = min(device.memory_bytes for device in cluster.devices.values())
        hints["memory_reserve_bytes"] = least - case.memory_GiB * GIB
    wanted = list(_constraints(PlanSpace(Problem.build(graph, cluster, training, hints)), case))

    def constrained(count: int) -> Problem:
        # If two constraints are about one operator, the later one holds.
        constraints = list({constraint["scope"]: constraint for constraint in wanted[:count]}.values())
        return Problem.build(graph, cluster, training, {**hints, "constraints": constraints})

    # As few constraints as leave few enough plans.
    low, high = 0, len(wanted)
    while low < high:
        middle = (low + high) // 2
        is_small = PlanSpace(constrained(middle)).decades <= case.decades
        low, high = (low, middle) if is_small else (middle + 1, high)
    return constrained(low)


def _constraints(space: PlanSpace, case: Case) -> Iterator[dict[str, Any]]:
    """Constraints that may be added one after the other, those on the least influential groups first."""
    rng = np.random.default_rng(case.seed)
    weight = influence(space)
    ranked = sorted(weight, key=lambda key: (weight[key], key))
    if case.kind != "pipeline":
        # Whole or split by batch, as norms and sums are in most plans.
        for unit_type, group in ranked:
            yield {"scope": _leader(space, unit_type, group), "replicate": True}
    expert = next((values for shape, values in templates(space) if shape.tp > 1), None)
    for unit_type, group in ranked:
        leader = space.linkage.types[unit_type].groups[group].leader
        rule = space.operator(unit_type, leader).rule
        signatures = space.linkage.types[unit_type].signatures[leader]
        batch = [s for s in signatures if s.factor is not None and rule.factors[s.factor].is_batch]
        by_batch = batch[0] if batch else signatures[whole_signature(signatures)]
        chosen = dict.fromkeys(space.axes, by_batch)
        if expert is not None and (case.kind == "hybrid" or rng.random() < 0.5):
            slot = next(i for i, s in enumerate(space.slots) if (s.unit_type, s.group) == (unit_type, group))
            chosen["tp"] = signatures[expert[slot + len(space.axes) - 1]]
        placed = {axis: placement_text(signature.outputs[0]) for axis, signature in chosen.items()}
        yield {"scope": _leader(space, unit_type, group), "sharding": placed}


def _leader(space: PlanSpace, unit_type: int, group: int) -> str:
    return space.operator_name(unit_type, space.linkage.types[unit_type].groups[group].leader)


SMALL = "layers=4,hidden=1024,heads=16,seq_len=512,vocab_size=8192"
DEEPER = "gpt:layers=8,hidden=1024,heads=16,seq_len=512,vocab_size=8192"
EXPERTS = "layers=4,hidden=1024,heads=16,kv_heads=16,ffn=2048,experts=8,seq_len=512,vocab_size=8192"
ONE_STAGE = {"pp": 1, "num_micro_batches": 1, "recompute": "none"}


def _sharding() -> list[Case]:
    """Problems of one stage, on every mesh: a fixed degree would bind its axis to its name."""
    rows: list[tuple[str, str, int, dict[str, Any], float, float | None]] = [
        (f"gpt:{SMALL}", "1x4xV100", 32, {"zero": 0}, 6.0, None),
        (f"gpt:{SMALL}", "2x2xV100@10Gbit", 32, {"zero": 1}, 5.0, None),
        ("gpt2", "1x8xV100-16GB", 32, {"zero": 0}, 6.5, 6.2),
        ("gpt2", "2x4xV100-16GB@25Gbit", 32, {"zero": 1}, 6.0, None),
        (f"bert:{SMALL}", "1x4xP100", 32, {"zero": 0}, 5.0, None),
        ("bert-base", "1x8xV100-16GB", 64, {"zero": 0}, 6.0, None),
        ("bert-base", "2x4xV100-16GB@10Gbit", 64, {"zero": 2}, 5.0, 3.7),
        (f"llama:{SMALL}", "1x8xA100", 32, {"zero": 0}, 6.0, None),
        (f"t5:{SMALL}", "1x4xV100", 16, {"zero": 0}, 6.0, None),
        ("t5-small", "2x2xV100@25Gbit", 16, {"zero": 0}, 5.0, None),
        ("resnet:blocks=1-1-1-1,image_size=64", "1x4xV100", 64, {"zero": 0}, 6.0, None),
        ("resnet50", "2x2xV100@10Gbit", 64, {"zero": 0}, 5.0, None),
        ("vgg:convolutions=1-1-1,image_size=64", "1x4xV100", 64, {"zero": 0}, 7.0, None),
        ("vgg16", "1x4xV100", 64, {"zero": 0}, 6.5, None),
        ("vgg19", "4x1xV100@10Gbit", 64, {"zero": 0}, 6.5, 4.0),
        ("vgg:convolutions=1-1-1,image_size=64", "2x2xV100@10Gbit", 64, {"zero": 1}, 6.5, None),
        ("vit:layers=4,hidden=192,heads=4", "1x4xV100", 64, {"zero": 0}, 6.0, None),
        ("vit-b", "2x4xA100@25Gbit", 64, {"zero": 1}, 5.0, None),
        (f"moe:{EXPERTS}", "1x8xA100", 32, {"ep": 1, "zero": 0}, 5.0, None),
        (f"moe:{EXPERTS}", "2x4xA100@100Gbit", 32, {"ep": 4, "zero": 1}, 5.0, None),
        ("random:1,3,1024", "1x4xV100", 64, {"zero": 0}, 6.0, None),
        ("random:2,4,4096", "1x8xV100-16GB", 32, {"zero": 0}, 6.5, None),
        ("random:3,4,2048", "2x2xV100@25Gbit", 64, {"zero": 1}, 5.5, None),
        ("random:4,5,512", "4x1xP100@10Gbit", 128, {"zero": 0}, 6.0, None),
        ("random:5,3,8192", "2x4xA100@100Gbit", 64, {"zero": 2}, 5.0, None),
        ("random:6,6,1024", "1x4xV100", 256, {"zero": 0}, 7.0, None),
    ]
    return [
        Case(
            kind="sharding",
            model=model,
            cluster=cluster,
            global_batch=batch,
            fix={**ONE_STAGE, **fix},
            decades=decades,
            memory_GiB=memory,
        )
        for model, cluster, batch, fix, decades, memory in rows
    ]


def _pipeline() -> list[Case]:
    """Problems of data parallel stages: the cuts, the number of stages and recomputation are free."""
    rows: list[tuple[str, str, int, dict[str, Any], float | None]] = [
        (DEEPER, "4x1xV100@10Gbit", 32, {"pp": 4, "num_micro_batches": 8}, None),
        ("gpt2", "4x1xV100-16GB@10Gbit", 32, {"pp": 4, "zero": 0, "num_micro_batches": 16}, 3.2),
        (
            "gpt2",
            "2x4xV100@25Gbit",
            64,
            {"pp": 4, "num_micro_batches": 8, "schedule": "1f1b", "recompute": "none"},
            None,
        ),
        ("gpt2-medium", "2x4xV100-16GB@25Gbit", 32, {"pp": 4, "zero": 1, "schedule": "1f1b", "recompute": "none"}, 6.0),
        ("bert-base", "8x1xP100@10Gbit", 64, {"pp": 4, "schedule": "1f1b", "zero": 0, "recompute": "none"}, None),
        ("bert-base", "2x4xV100@25Gbit", 64, {"schedule": "1f1b", "zero": 1, "recompute": "none"}, None),
        ("bert-large", "2x1xV100-16GB@25Gbit", 32, {"pp": 2, "zero": 0, "schedule": "1f1b"}, 5.0),
        ("t5-small", "4x1xV100@25Gbit", 32, {"pp": 4, "schedule": "1f1b", "recompute": "none"}, None),
        ("t5-base", "2x1xV100-16GB@25Gbit", 32, {"pp": 2, "zero": 0, "schedule": "1f1b"}, 4.0),
        ("vgg16", "4x1xV100@10Gbit", 128, {"schedule": "1f1b", "zero": 0}, None),
        ("vgg19", "8x1xV100@25Gbit", 256, {"pp": 4, "schedule": "1f1b", "recompute": "none"}, None),
        ("vgg19", "2x4xV100@10Gbit", 256, {"schedule": "1f1b", "zero": 0, "recompute": "none"}, None),
        ("resnet50", "4x1xV100@10Gbit", 128, {"pp": 4, "schedule": "1f1b", "zero": 0, "recompute": "none"}, None),
        (
            "resnet50",
            "2x4xV100@25Gbit",
            256,
            {"pp": 4, "num_micro_batches": 8, "schedule": "1f1b", "recompute": "none"},
            None,
        ),
        ("vit-b", "4x1xA100@100Gbit", 64, {"pp": 4, "schedule": "1f1b"}, None),
        ("vit-l", "2x4xV100-16GB@25Gbit", 64, {"pp": 4, "recompute": "none", "schedule": "1f1b"}, 3.4),
        (f"moe:{EXPERTS}", "4x1xA100@100Gbit", 32, {"pp": 4, "ep": 1}, None),
        ("random:11,10,2048", "4x1xV100@25Gbit", 64, {"pp": 4, "schedule": "1f1b", "recompute": "none"}, None),
        ("random:12,16,1024", "2x2xV100@10Gbit", 64, {"schedule": "1f1b", "zero": 0, "recompute": "none"}, None),
        ("random:13,12,4096", "8x1xV100-16GB@25Gbit", 64, {"pp": 2, "zero": 1, "num_micro_batches": 8}, 6.5),
        (
            "random:14,14,2048",
            "4x1xV100+4x1xP100@25Gbit",
            64,
            {"pp": 4, "schedule": "1f1b", "recompute": "none", "num_micro_batches": 8},
            None,
        ),
        ("random:15,9,4096", "2x4xA100@100Gbit", 32, {"pp": 8, "schedule": "1f1b", "recompute": "none"}, None),
    ]
    return [
        Case(kind="pipeline", model=model, cluster=cluster, global_batch=batch, fix={"tp": 1, **fix}, memory_GiB=memory)
        for model, cluster, batch, fix, memory in rows
    ]


def _hybrid() -> list[Case]:
    """Problems in which meshes, cuts, recomputation, ZeRO, micro-batches and some signatures are free."""
    rows: list[tuple[str, str, int, dict[str, Any], float, float | None]] = [
        (f"gpt:{SMALL}", "2x2xV100@10Gbit", 16, {"schedule": "1f1b", "zero": 1}, 5.5, None),
        ("gpt2", "2x2xV100-16GB@25Gbit", 16, {"pp": 2, "zero": 1, "schedule": "1f1b"}, 6.5, 2.6),
        (
            "gpt2",
            "2x4xV100@25Gbit",
            32,
            {"num_micro_batches": 8, "zero": 0, "schedule": "1f1b", "recompute": "none"},
            6.5,
            None,
        ),
        ("gpt2-medium", "2x4xV100-16GB@25Gbit", 32, {"pp": 2, "zero": 1, "schedule": "1f1b"}, 6.5, 3.6),
        ("bert-base", "2x2xV100@25Gbit", 32, {"schedule": "1f1b", "zero": 0, "recompute": "none"}, 6.0, None),
        ("bert-large", "2x4xV100-16GB@25Gbit", 32, {"pp": 2, "num_micro_batches": 8, "schedule": "1f1b"}, 6.5, 3.0),
        (f"llama:{SMALL}", "2x4xA100@100Gbit", 32, {"schedule": "1f1b", "zero": 1, "recompute": "none"}, 6.5, None),
        ("t5-small", "2x2xV100@25Gbit", 16, {"pp": 2, "zero": 0, "schedule": "1f1b", "recompute": "none"}, 6.0, None),
        (
            "t5-base",
            "2x4xV100@25Gbit",
            32,
            {"num_micro_batches": 4, "pp": 2, "schedule": "1f1b", "recompute": "none"},
            6.0,
            None,
        ),
        ("vgg19", "2x2xV100@10Gbit", 64, {"recompute": "none", "schedule": "1f1b"}, 6.0, None),
        ("vgg16", "2x2xV100@25Gbit", 64, {"schedule": "1f1b", "zero": 0}, 6.5, None),
        ("vgg19", "2x4xV100@10Gbit", 128, {"pp": 2, "schedule": "1f1b", "recompute": "none"}, 6.5, 3.5),
        (
            "vit-b",
            "2x4xA100@25Gbit",
            64,
            {"zero": 1, "num_micro_batches": 8, "schedule": "1f1b", "recompute": "none"},
            6.5,
            None,
        ),
        (f"moe:{EXPERTS}", "2x4xA100@100Gbit", 32, {"pp": 2, "num_micro_batches": 4, "zero": 1}, 6.0, None),
        ("random:21,4,4096", "2x2xV100-16GB@25Gbit", 32, {"schedule": "1f1b"}, 6.0, 4.66),
        (
            "random:22,6,2048",
            "2x4xV100@25Gbit",
            64,
            {"zero": 1, "num_micro_batches": 8, "schedule": "1f1b", "recompute": "none"},
            6.5,
            None,
        ),
        (
            "random:23,8,1024",
            "2x2xV100@10Gbit",
            64,
            {"num_micro_batches": 4, "zero": 0, "schedule": "1f1b", "recompute": "none"},
            6.0,
            None,
        ),
        ("random:24,5,8192", "2x4xA100@100Gbit", 32, {"schedule": "1f1b", "num_micro_batches": 4}, 6.5, 9.55),
        (
            "random:25,5,2048",
            "1x4xV100+1x4xP100@25Gbit",
            64,
            {"zero": 0, "num_micro_batches": 8, "schedule": "1f1b", "recompute": "none"},
            6.0,
            None,
        ),
        ("random:26,6,4096", "4x2xV100-16GB@10Gbit", 64, {"pp": 4, "zero": 1, "recompute": "none"}, 6.5, 3.8),
    ]
    return [
        Case(
            kind="hybrid", model=model, cluster=cluster, global_batch=batch, fix=fix, decades=decades, memory_GiB=memory
        )
        for model, cluster, batch, fix, decades, memory in rows
    ]


CASES = (*_sharding(), *_pipeline(), *_hybrid())
QUICK = tuple(case for kind in ("sharding", "pipeline", "hybrid") for case in [c for c in CASES if c.kind == kind][:4])
"""Numbers of four problems of each kind, for quick runs."""


def digest(space: PlanSpace) -> str:
    """A digest of the prices of random plans, which changes with the problem or its price."""
    plans = space.random_batch(np.random.default_rng(0), DIGESTED)
    text = json.dumps([plans.tolist(), space.price(plans).tolist(), space.decades])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def optimum(case: Case) -> dict[str, Any]:
    """The proven optimum of a problem: from `OPTIMA`, else searched and kept there.

    Returns:
        decades of the space; step_time_s of the optimum; evaluations and seconds of the proof; digest.
    """
    known = json.loads(OPTIMA.read_text()) if OPTIMA.exists() else {}
    problem = problem_of(case)
    space = PlanSpace(problem)
    current = digest(space)
    if known.get(case.name, {}).get("digest") != current:
        found = search(problem, Budget(seconds=3600.0), searcher="exhaustive")
        assert found.proven and found.plan.estimate is not None, case.name
        known[case.name] = {
            "decades": round(space.decades, 2),
            "step_time_s": found.plan.estimate.step_time_s,
            "evaluations": found.evaluations,
            "seconds": round(found.seconds, 2),
            "digest": current,
        }
        known = {c.name: known[c.name] for c in CASES if c.name in known}
        OPTIMA.write_text(json.dumps(known, indent=1) + "\n")
    row: dict[str, Any] = known[case.name]
    return row


def main() -> None:
    """Prints the problems with their optima; proves the optima that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="only problems with this word in their name")
    word = parser.parse_args().word
    chosen = [(number, case) for number, case in enumerate(CASES) if word in case.name]
    total = 0.0
    for number, case in chosen:
        row = optimum(case)
        total += row["seconds"]
        print(
            f"{number:3} {case.name}: 10^{row['decades']} plans, optimum {1e3 * row['step_time_s']:.3f} ms "
            f"proven by {row['evaluations']} plans in {row['seconds']:.1f} s",
            flush=True,
        )
    seconds = [optimum(case)["seconds"] for _, case in chosen]
    print(f"{len(chosen)} proven in {total:.0f} s, median {statistics.median(seconds):.1f} s, most {max(seconds)} s")


if __name__ == "__main__":
    main()
