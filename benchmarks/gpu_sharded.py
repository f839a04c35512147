"""Training steps under DDP, FSDP2 and torch.compile on one GPU of this host: time alone, memory of several ranks.

    python benchmarks/gpu_sharded.py measure FOLDER [--ranks 4] [--ways ddp ...] [--only NAME ...]
    python benchmarks/gpu_sharded.py report FOLDER [--cluster CLUSTER]
    python benchmarks/gpu_sharded.py all FOLDER                           makes the models as well

The models are those of `gpu_steps.py prepare FOLDER`. Ways: `ddp`, DistributedDataParallel under autocast;
`fsdp`, fully_shard of each block, eager, in bf16; `compiled`, the same with each block and the loss compiled and a
fused optimizer, as TorchTitan does it. With one rank the time of a step means something, and is priced; with more they
share the GPU (NCCL from 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1), and only the memory of a rank is compared: what
`torch.cuda` counts as allocated at the peak. The committed figures are in benchmarks/results/.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_steps import CASES, Case, built, counted, parts_of, prepare, timed, training_step

from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.estimate import price
from automap.price.evaluator import Evaluator
from automap.price.plan_writer import to_plan
from automap.problem import Problem
from automap.space.stated_strategy import Strategy, hand_made
from ir.loss import with_loss
from ir.onnx.load import load_model

WAYS: Mapping[str, tuple[str, int]] = {"ddp": ("ddp", 0), "fsdp": ("fsdp", 3), "compiled": ("torchtitan", 3)}
"""Way -> the trainer that prices it, and its ZeRO stage where there are several ranks."""
FEWEST_BLOCKS = 3
"""Least number of modules of a list that counts as the list of blocks."""
SMALLER = {"llama-1b": 1, "gpt2": 8, "bert-large": 8, "qwen2-0.5b": 2, "gpt2-xl": 2, "vit-large": 32}
"""Micro-batches where several ranks share the memory of the GPU."""


def case_of(name: str, ranks: int) -> Case:
    """The case, with a micro-batch that fits beside those of other ranks."""
    case = CASES[name]
    return case if ranks == 1 else replace(case, micro_batch=SMALLER.get(name, case.micro_batch))


def blocks_of(module: Any) -> list[Any]:
    """The repeated blocks of a model: the members of its outermost long lists of modules."""
    import torch

    if isinstance(module, torch.nn.ModuleList) and len(module) >= FEWEST_BLOCKS:
        return list(module)
    return [block for child in module.children() for block in blocks_of(child)]


def step_of(case: Case, way: str, folder: Path, device: Any) -> Callable[[], None]:
    """A training step of a case in one of the `WAYS`."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    module, drawn, labels, loss = built(case, folder, device)
    if case.recompute == "full":
        module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model, autocasts = module, way == "ddp"
    if way == "ddp":
        model = DistributedDataParallel(module)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks_of(module):
            if way == "compiled":
                block.compile()
            fully_shard(block, mp_policy=policy)
        fully_shard(module, mp_policy=policy)
    if way == "compiled":
        loss = torch.compile(loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, fused=way == "compiled" and device.type == "cuda")
    cast = torch.autocast(device.type, torch.bfloat16, enabled=autocasts)
    return training_step(model, parts_of(case, drawn, labels), loss, optimizer, cast)


def run_rank(rank: int, given: argparse.Namespace) -> None:
    """Takes the steps of all cases on one of the ranks; the first writes them to `sharded.json` after each."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(given.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT="29577")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    file = given.folder / "sharded.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"steps": {}}
    found.update(device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu", torch=torch.__version__)
    for way in given.ways:
        for name in given.only:
            started = time.perf_counter()
            torch._dynamo.reset()
            try:
                one = timed(step_of(case_of(name, given.ranks), way, given.folder / name, device), device)
            except Exception:
                one = {"failed": traceback.format_exc()}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            peaks: list[Any] = [None] * given.ranks
            dist.all_gather_object(peaks, one.get("peak_bytes"))
            if rank == 0:
                found["steps"][f"{name} {way} {given.ranks}"] = {**one, "peaks": peaks}
                file.write_text(json.dumps(found, indent=1))
                text = one.get("failed", "").strip().splitlines()[-1:] or [f"{1e3 * one['step_s']:8.1f} ms {peaks}"]
                print(f"{name:20} {way:8} {text[0][:300]}   ({time.perf_counter() - started:.0f} s)", flush=True)
    dist.destroy_process_group()


def measure(given: argparse.Namespace) -> None:
    """Starts the ranks."""
    import torch.multiprocessing as mp

    sys.path.insert(0, str(Path(__file__).parent))
    if given.ranks == 1:
        run_rank(0, given)
    else:
        mp.start_processes(run_rank, (given,), nprocs=given.ranks, start_method="spawn")


def priced(name: str, way: str, ranks: int, folder: Path, cluster: str) -> Plan:
    """The plan of a case on its ranks, with its price."""
    case, (trainer, zero) = case_of(name, ranks), WAYS[way]
    graph = with_loss(load_model((folder / name / "model.onnx").read_bytes(), name=name))
    samples = case.micro_batch * case.count * ranks
    training = {"global_batch": samples, "precision": case.precision, "trainer": trainer}
    device = cluster.rsplit("x", maxsplit=1)[-1]
    evaluator = Evaluator(Problem.build(graph, parse_cluster(f"{ranks}x{device}"), training))
    strategy = Strategy(dp=ranks, micro_batch=case.micro_batch, recompute=case.recompute, zero=zero if ranks > 1 else 0)
    plan = to_plan(hand_made(evaluator, strategy), evaluator)
    return replace(plan, estimate=price(evaluator.problem, plan, evaluator))


def report(folder: Path, cluster: str) -> None:
    """Prints measured and priced steps and peaks."""
    measured = json.loads((folder / "sharded.json").read_text())
    print(f"{measured['device']}, torch {measured['torch']}, priced on {cluster}")
    print(
        f"{'model':18} {'way':8} ranks {'step':>10} {'priced':>10} {'error':>7}"
        f"   {'peak':>6} {'priced':>6} {'error':>6}"
    )
    errors: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for key, one in measured["steps"].items():
        name, way, ranks = key.split(" ")
        if "failed" in one:
            print(f"{name:18} {way:8} {ranks:>5} {one['failed'].strip().splitlines()[-1][:80]}")
            continue
        estimate = priced(name, way, int(ranks), folder, cluster).estimate
        assert estimate is not None
        gib = max(peak or 0 for peak in one["peaks"]) / 2**30
        own = max(counted(rank, WAYS[way][0]) for rank in estimate.memory_bytes)
        step = estimate.step_time_s / one["step_s"] - 1.0 if ranks == "1" else float("nan")
        memory = own / gib - 1.0 if gib else 0.0
        errors.setdefault((way, int(ranks)), []).append((step, memory))
        times = f"{1e3 * one['step_s']:7.1f} ms {1e3 * estimate.step_time_s:7.1f} ms {step:+7.1%}"
        print(
            f"{name:18} {way:8} {ranks:>5} {times if ranks == '1' else ' ' * 29}   {gib:6.2f} {own:6.2f}"
            f" {memory:+6.1%}",
            flush=True,
        )
    for (way, count), pairs in errors.items():
        steps, memories = ([abs(pair[i]) for pair in pairs] for i in (0, 1))
        words = f"step off by {statistics.fmean(steps):.1%} in the mean; " if count == 1 else ""
        print(f"{way}, ranks {count}: {len(pairs)} models, {words}memory by {statistics.fmean(memories):.1%}")


def main(words: Sequence[str] | None = None) -> None:
    """Does what the first word says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "report", "all"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=["gpt2", "llama-1b"])
    parser.add_argument("--cluster", default="1xH100")
    given = parser.parse_args(words)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if given.what == "all":
        prepare({name: CASES[name] for name in given.only}, given.folder, given.cluster)
    if given.what in ("measure", "all"):
        measure(given)
    if given.what in ("report", "all"):
        report(given.folder, given.cluster)


if __name__ == "__main__":
    main()
