"""Plans whose replicas are averaged, run by every rank, and what one process makes of the equations."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import rank_device
import torch
import torch.distributed as dist
from plan_cases import SAMPLES, SEQUENCE, TWO, plan_of, stage
from small_graphs import build_gpt
from stage_cases import VOCAB, one_process
from stage_programs import random_data, random_values
from torch.utils._python_dispatch import TorchDispatchMode

from automap.cluster import parse_cluster
from automap.plan import Sync
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.runtime.executor.replica_averaging import Replicas
from automap.runtime.executor.runner import join, replicas_of
from automap.runtime.mesh_groups import Axis, Groups
from automap.runtime.trial.peak_memory import PeakMemory

COUNT, TOKENS, STEPS, RATE = 2, 8, 7, 0.5
"""Micro-batches, tokens of a sample, optimizer steps, learning rate."""
PERIOD = 3
MODES = {
    "local, 1": Sync(kind="local_sgd", period=1),
    "local, 3": Sync(kind="local_sgd", period=PERIOD),
    **{f"corrected, {d}": Sync(kind="dasgd", period=PERIOD, delay=d, merge="corrected") for d in (1, 2, 3)},
    "mixing, 2": Sync(kind="dasgd", period=PERIOD, delay=2, merge="mixing", local_share=0.25),
}
PLANS = {
    "dp2": ([], [stage("0-1", dp=2)], "1f1b"),
    "dp2, 5:2": ([], [stage("0-1", dp=2, batch_shares=(5, 2))], "1f1b"),
    "tp2 x dp2": ([], [stage("0-3", dp=2, tp=2, how=SEQUENCE)], "1f1b"),
    "dp2 -> dp2 x tp2": (TWO, [stage("0-1", dp=2), stage("2-5", dp=2, tp=2)], "1f1b"),
    "dp2 -> dp2 turned round, zero-bubble": (TWO, [stage("0-1", dp=2), stage("3,2", dp=2)], "zb1p"),
}
SHARES = {"dp2, 5:2": (5, 2)}
EVEN = (4, 3)
"""Samples of a micro-batch for each replica."""
CASES = [
    *(("dp2", mode, "sgd") for mode in MODES),
    ("dp2, 5:2", "local, 1", "sgd"),
    *((plan, "corrected, 2", "sgd") for plan in PLANS if plan not in ("dp2", "dp2 -> dp2 x tp2")),
    ("dp2", "corrected, 1", "adam"),
]
"""Plan, mode, optimizer."""


def optimizer_of(kind, leaves):
    return torch.optim.SGD(leaves, lr=RATE) if kind == "sgd" else torch.optim.Adam(leaves, lr=1e-2)


class Setting:
    """A decoder with its embedding as its head, values and data, in float64."""

    def __init__(self, cluster="4xA100-80GB"):
        training = {"global_batch": COUNT * SAMPLES, "precision": "fp32"}
        self.problem = Problem.build(
            build_gpt(hidden=16, seq=TOKENS, vocab=VOCAB),
            parse_cluster(cluster),
            {**training, "sync_modes": ["synchronous", "local_sgd", "dasgd"]},
        )
        self.evaluator, self.graph = Evaluator(self.problem), self.problem.graph
        self.values = {n: v.double() if v.is_floating_point() else v for n, v in random_values(self.graph).items()}
        self.data = random_data(self.graph, SAMPLES, COUNT, VOCAB)

    def part(self, tensor, box, micro_batch):
        return self.data[micro_batch][tensor][tuple(slice(*span) for span in box)]

    def plan(self, name, sync):
        return replace(plan_of(PLANS[name], self.problem), num_micro_batches=COUNT, sync=sync)


def run_case(setting, case, rank, groups):
    """Loss of the first step, parameters after all steps, and those after the end, of this rank's stages."""
    name, mode, kind = case
    plan = setting.plan(name, MODES[mode])
    pipeline, executors = join(setting.evaluator, plan, rank, setting.values, groups, dtype=torch.float64)
    leaves = [leaf for executor in executors.values() for leaf in executor.parameters.values()]
    optimizer = optimizer_of(kind, leaves) if leaves else None
    replicas = replicas_of(plan, executors, leaves)
    losses, seen = [], []
    for _ in range(STEPS):
        losses.append(pipeline.step(setting.part))
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if replicas is not None:
            replicas.after_step()
        pipeline.refresh()
    for end in (False, True):
        if end and replicas is not None:
            replicas.finish()
        seen.append({k: v for executor in executors.values() for k, v in executor.whole_parameters().items()})
    mesh = next((executor.program.mesh for executor in executors.values()), None)
    return {"loss": losses[0], "steps": seen[0], "end": seen[1], "replica": mesh.here[0] if mesh else None}


@functools.cache
def simulate(setting, sync, shares, kind):
    """The same by the equations, one replica after another; [replicas] of `run_case`."""
    graph = setting.graph
    names = [t.name for t in graph.parameters]
    models = [{n: setting.values[n].clone() for n in names} for _ in shares]
    optimizers = [optimizer_of(kind, list(model.values())) for model in models]
    ends = [sum(shares[:r]) for r in range(len(shares) + 1)]
    rows = [
        [{k: x[ends[r] : ends[r + 1]] for k, x in tensors.items()} for tensors in setting.data]
        for r in range(len(shares))
    ]
    first, sent = [None] * len(shares), {}

    def mean(some):
        return {n: sum(share / SAMPLES * model[n] for share, model in zip(shares, some, strict=True)) for n in names}

    def merge(step):
        average = mean(sent[step])
        for model, given in zip(models, sent[step], strict=True):
            for n in names:
                if sync.merge == "corrected":
                    model[n].copy_(average[n] + (model[n] - given[n]))
                else:
                    model[n].copy_(sync.local_share * model[n] + (1 - sync.local_share) * average[n])

    for step in range(1, STEPS + 1):
        for r, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            loss, gradients = one_process(graph, {**setting.values, **model}, rows[r], shares[r], TOKENS)
            first[r] = loss if step == 1 else first[r]
            for n in names:
                model[n].grad = gradients[n]
            optimizer.step()
        if sync.kind == "dasgd" and step - sync.delay in sent:
            merge(step - sync.delay)
        if sync.kind == "local_sgd" and step % sync.period == 0:
            average = mean(models)
            models = [model | {n: model[n].copy_(average[n]) for n in names} for model in models]
        if sync.kind == "dasgd" and step % sync.period == 0:
            sent[step] = [{n: model[n].clone() for n in names} for model in models]
    seen = [{n: model[n].clone() for n in names} for model in models]
    for step in sent:
        if step + sync.delay > STEPS:
            merge(step)
    end = mean(models)
    return [{"loss": first[r], "steps": seen[r], "end": end} for r in range(len(shares))]


def errors(setting, case, found):
    """Largest differences from `simulate`: of parameters, over the largest change of a parameter, and of losses."""
    name, mode, kind = case
    if mode == "local, 1":
        # Averaging every step is what one process does with the whole batch.
        wanted = simulate(setting, Sync(), (SAMPLES,), kind)
    else:
        wanted = simulate(setting, MODES[mode], SHARES.get(name, EVEN), kind)
    worst = {"loss": 0.0, "steps": 0.0, "end": 0.0}
    for mine in found:
        if mine["replica"] is None:
            continue
        theirs = wanted[mine["replica"] if len(wanted) > 1 else 0]
        if mine["loss"] is not None and mode != "local, 1":
            worst["loss"] = max(worst["loss"], abs(mine["loss"] - theirs["loss"]))
        for key in ("steps", "end"):
            way = max(float((theirs[key][n] - setting.values[n]).abs().max()) for n in mine[key])
            off = max(float((theirs[key][n] - x).abs().max()) for n, x in mine[key].items())
            worst[key] = max(worst[key], off / way)
    return worst


NUMBERS = 100_000
"""Parameters whose averaging is measured."""


class Made(PeakMemory):
    """Counts what is made in the block, and not what a thread of the library still holds from an averaging before."""

    def __enter__(self):
        return TorchDispatchMode.__enter__(self)


def memory(rank, groups):
    """Mode -> bytes a parameter that averaging takes at most."""
    axis = Axis(name="dp", number=0, size=2, index=rank, group=groups.of((0, 1)), is_apart=True)
    found = {}
    for mode, sync in MODES.items():
        with Made() as seen:
            parameters = [torch.zeros(NUMBERS // 2), torch.zeros(2, NUMBERS // 4)]
            before = seen.peak
            replicas = Replicas(sync, parameters, axis, 0.5)
            # One averaging: that thread may hold its memory when the next one begins.
            for _ in range(min(sync.period + (sync.delay or 0), 2 * sync.period - 1)):
                replicas.after_step()
        replicas.finish()
        found[mode] = (seen.peak - before) / NUMBERS
    return found


def compare(rank, num_ranks, folder):
    """Runs all cases; rank 0 writes "case" -> errors into `found.json` of a folder."""
    torch.set_num_threads(1)
    rank_device.meet(rank, num_ranks, folder)
    setting, groups, found = Setting(), Groups(), {}
    for case in CASES:
        mine = run_case(setting, case, rank, groups)
        every = [None] * num_ranks
        dist.gather_object(mine, every if rank == 0 else None)
        if rank == 0:
            found[", ".join(case)] = errors(setting, case, every)
    if rank < 2:
        found["memory"] = memory(rank, groups)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
