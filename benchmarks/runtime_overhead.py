"""What the runtime and the module trainer add to the step time of hand-written code of the same layout.

Each layout runs on two processes in three ways: written by hand (DistributedDataParallel, FSDP2's `fully_shard`,
DTensor's tensor parallelism with vocabulary-parallel loss), from a plan by `parallelize` on the same network, and from
the plan by the runtime on the graph of the same operators. The three take turns, step by step, in the same processes.
The script prints the median of the ratios of steps that followed each other, with their quartiles.

    python benchmarks/runtime_overhead.py [--model MODEL] [--rounds N]
"""

from __future__ import annotations

import argparse
import datetime
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.runtime.executor.runner import Runner
from automap.runtime.launch.launcher import Limits, launch
from automap.runtime.mesh_groups import meet
from automap.runtime.trainer import parallelize
from automap.runtime.trial.rank import Clock
from automap.space.stated_strategy import Strategy, hand_made
from ir import zoo

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_gpt import Attention, Gpt

MODEL = "gpt:layers=4,hidden=256,heads=4,seq_len=128,vocab_size=1024"
BATCH = 16
LAYOUTS = {
    "DDP": Strategy(micro_batch=BATCH // 2),
    "FSDP2": Strategy(micro_batch=BATCH // 2, zero=3),
    "tensor parallel": Strategy(tp=2, micro_batch=BATCH),
}
RANK = "runtime_overhead:run_rank"
WARM_UP = 3


class PlainAttention(Attention):
    """Attention in the operators of the graph, which the runtime executes one by one."""

    def forward(self, x: Tensor) -> Tensor:
        """Attention over hidden states [batch, positions, width]; the result has the same shape."""
        q, k, v = (y.unflatten(2, (-1, self.size)).transpose(1, 2) for y in self.c_attn(x).chunk(3, dim=2))
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(2, 3) / math.sqrt(self.size)).masked_fill(future, -1e9)
        return self.c_proj((F.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))


def network(sizes: Mapping[str, int]) -> Gpt:
    """The network of the example with `PlainAttention`."""
    torch.manual_seed(0)
    gpt = Gpt(**sizes)
    for block in gpt.h:
        block.attn.__class__ = PlainAttention
    return gpt


def by_hand(layout: str, module: Gpt, ids: Tensor, labels: Tensor) -> Callable[[], None]:
    """A step in hand-written code."""
    mesh = init_device_mesh("cpu", (2,))
    model: nn.Module = module
    if layout == "DDP":
        model = DistributedDataParallel(module)
    elif layout == "FSDP2":
        for block in module.h:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    else:
        styles = {
            "wte": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        for number in range(len(module.h)):
            for name in ("attn.c_attn", "mlp.c_fc"):
                styles[f"h.{number}.{name}"] = ColwiseParallel()
            for name in ("attn.c_proj", "mlp.c_proj"):
                styles[f"h.{number}.{name}"] = RowwiseParallel()
        parallelize_module(module, mesh, styles)
        module.lm_head.weight = module.wte.weight
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    optimizer = torch.optim.Adam([{"params": some} for some in (plain, split) if some], lr=1e-3, fused=True)
    if layout != "tensor parallel":
        mine = slice(dist.get_rank() * len(ids) // 2, (dist.get_rank() + 1) * len(ids) // 2)
        ids, labels = ids[mine], labels[mine]

    def step() -> None:
        with loss_parallel():
            F.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def from_plan(plan: Plan, module: Gpt, ids: Tensor, labels: Tensor) -> Callable[[], None]:
    """The same step by the module trainer."""
    trainer = parallelize(module, plan, zoo.build(plan.model.name))
    optimizer = torch.optim.Adam(trainer.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        trainer.step(ids[trainer.rows], labels[trainer.rows])
        optimizer.step()
        optimizer.zero_grad()

    return step


def problem_of(model: str) -> Problem:
    """The problem of a layout; the kind of its devices does not matter here."""
    training = {"global_batch": BATCH, "precision": "fp32", "trainer": "automap"}
    return Problem.build(zoo.build(model), parse_cluster("2xcpu"), training)


def run_rank(folder: Path, rank: int, num_ranks: int, argument: Mapping[str, Any]) -> dict[str, Any]:
    """One rank: layout -> [hand, trainer, runtime][rounds] seconds."""
    torch.set_num_threads(1)
    meet(folder, rank, num_ranks, torch.device("cpu"), limit_s=60.0)
    problem = problem_of(argument["model"])
    sizes = {key: int(value) for key, value in (pair.split("=") for pair in argument["model"].split(":")[1].split(","))}
    ids = torch.randint(sizes["vocab_size"], (BATCH, sizes["seq_len"]), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    found = {}
    for layout, document in argument["plans"].items():
        plan = Plan.from_json(document)
        steps = [
            by_hand(layout, network(sizes), ids, labels),
            from_plan(plan, network(sizes), ids, labels),
            Runner(problem, plan, rank, 0, torch.device("cpu")).step,
        ]
        clocks = [Clock(step, torch.device("cpu")) for step in steps]
        for clock in clocks:
            for _ in range(WARM_UP):
                clock.measure()
        times: list[list[float]] = [[] for _ in clocks]
        for _ in range(argument["rounds"]):
            for clock, mine in zip(clocks, times, strict=True):
                mine.append(clock.measure())
        found[layout] = times
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    evaluator = Evaluator(problem_of(options.model))
    plans = {name: to_plan(hand_made(evaluator, strategy), evaluator) for name, strategy in LAYOUTS.items()}
    argument = {
        "model": options.model,
        "plans": {name: replace(plan, why=()).to_json() for name, plan in plans.items()},
        "rounds": options.rounds,
    }
    done = launch(RANK, argument, 2, Limits(time_s=600.0))
    if done.outcome != "ok":
        raise SystemExit(f"{done.outcome}: {done.message}")
    print(f"{datetime.date.today()}: {options.model}, a batch of {BATCH}, 2 processes, {options.rounds} rounds")
    print(f"{'layout':18s}{'by hand':>10s}{'trainer':>10s}{'runtime':>10s}   trainer / hand       runtime / hand")
    for layout, times in done.results[0].items():
        hand, *others = (np.array(mine) for mine in times)
        line = f"{layout:18s}" + "".join(f"{1e3 * statistics.median(mine):7.0f} ms" for mine in times)
        for mine in others:
            low, middle, high = np.quantile(mine / hand, [0.25, 0.5, 0.75])
            line += f"   {middle:.3f} ({low:.2f}-{high:.2f})"
        print(line)
    print("times: medians; ratios: median and quartiles of steps that followed each other")


if __name__ == "__main__":
    main()
