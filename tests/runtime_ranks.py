"""Plans of one stage run on real processes and by one process: values, data, the reference, the launcher."""

import datetime
import multiprocessing
import os
import sys
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.runtime.convert import Sent, record
from automap.runtime.groups import Groups
from automap.runtime.interpreter import run
from automap.runtime.sharded import build_programs, loss_scale
from automap.space import PlanSpace
from automap.templates import megatron_signatures

OPTIMIZER_STEPS = 10
FLOAT = torch.float64


@dataclass(frozen=True)
class Case:
    """A plan of one stage."""

    name: str
    problem: Problem
    plan: Plan
    steps: bool = False
    """Whether the optimizer works as well."""


@dataclass
class Outcome:
    """What one rank saw."""

    loss: float
    gradients: dict
    passes: list
    """Collectives of the forward and backward passes."""
    ends: list
    """Those at the end of the step."""
    last_loss: float | None = None


def make_problem(graph, devices, batch, hints=None, **training):
    """A problem of fp32 on one host."""
    settings = {"global_batch": batch, "precision": "fp32", "batch_norm": "synchronized", **training}
    return Problem.build(graph, parse_cluster(f"1x{devices}xA100"), settings, hints)


def expert_plan(problem, *, tp=1, middle=1, count=2, zero=0, recompute="none", sequence_parallel=False, experts=""):
    """A plan of one stage in Megatron's manner."""
    space = PlanSpace(problem)
    shape = next(s for s in space.shapes if (s.pp, s.tp, s.middle, s.num_micro_batches) == (1, tp, middle, count))
    prefix = space.even_values(shape, recompute=recompute, zero=zero)
    return space.decode(
        megatron_signatures(space, shape, prefix, sequence_parallel=sequence_parallel, expert_axis=experts)
    )


def with_stage(plan, **changes):
    """The plan with its stage changed."""
    return replace(plan, stages=(replace(plan.stages[0], **changes),))


def whole_values(graph, seed=0):
    """Random parameters, buffers and stored constants."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for tensor in graph.tensors.values():
        if tensor.name in graph.producer or tensor.role not in ("parameter", "buffer", "constant"):
            continue
        if tensor.is_float:
            found[tensor.name] = 0.3 * torch.randn(tensor.shape, generator=generator, dtype=FLOAT)
        else:
            found[tensor.name] = torch.randint(0, _bound(graph, tensor.name), tensor.shape, generator=generator)
    return found


def _bound(graph, name):
    """One more than the largest integer that may stand there."""
    for index in graph.consumers[name]:
        op = graph.operators[index]
        if op.kind == "Gather":
            return graph.tensors[op.inputs[0]].shape[dict(op.attributes).get("axis", 0)]
        if op.kind == "SoftmaxCrossEntropyLoss":
            return graph.tensors[op.inputs[0]].shape[dict(op.attributes).get("class_dim", 1)]
    return 2


def micro_batches(graph, plan, seed=1):
    """Data of each micro-batch."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(plan.num_micro_batches):
        one = {}
        for tensor in graph.tensors.values():
            if tensor.role != "input":
                continue
            shape = tensor.shape_at(plan.samples_per_micro_batch)
            if tensor.is_float:
                one[tensor.name] = torch.randn(shape, generator=generator, dtype=FLOAT)
            else:
                one[tensor.name] = torch.randint(0, _bound(graph, tensor.name), shape, generator=generator)
        found.append(one)
    return found


def reference(case, shards=1):
    """Outcome of one process; each micro-batch in `shards` equal parts that do not know of each other."""
    graph, plan = case.problem.graph, case.plan
    values = whole_values(graph)
    leaves = {t.name: values[t.name].requires_grad_() for t in graph.parameters if t.is_float}
    samples = plan.samples_per_micro_batch // shards
    scale = loss_scale(graph, plan.num_micro_batches, plan.samples_per_micro_batch)
    batch_dims = {t.name: t.batch_dim for t in graph.tensors.values()}
    optimizer = torch.optim.Adam(leaves.values(), lr=1e-2)
    losses, first = [], {}
    for step in range(OPTIMIZER_STEPS if case.steps else 1):
        optimizer.zero_grad()
        total = 0.0
        for data in micro_batches(graph, plan, seed=1 + step):
            for part in range(shards):
                rows = {
                    n: x.narrow(batch_dims[n], part * samples, samples) if shards > 1 else x for n, x in data.items()
                }
                loss = run(graph, {**values, **rows}, samples)[graph.outputs[-1]].sum() * scale
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        first = first or {n: torch.zeros_like(v) if v.grad is None else v.grad.clone() for n, v in leaves.items()}
        optimizer.step()
    return Outcome(losses[0], first, [], [], losses[-1])


_evaluators = []


def evaluator_of(problem):
    """Made once for a problem."""
    found = next((e for e in _evaluators if e.problem is problem), None)
    if found is None:
        found = Evaluator(problem)
        _evaluators.append(found)
    return found


def run_case(case, groups):
    """Outcome of this rank."""
    graph, plan = case.problem.graph, case.plan
    agreed = torch.ones(1)
    try:
        evaluator = evaluator_of(case.problem)
        _, programs = build_programs(plan, evaluator, dist.get_rank(), whole_values(graph), groups, dtype=FLOAT)
    except Exception:
        agreed.zero_()
        raise
    finally:
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
    assert agreed, "another rank refused"
    if not programs:
        return None
    program = programs[0]
    position = program.stage.mesh.devices.index(dist.get_rank())
    optimizer = torch.optim.Adam(program.parameters.values(), lr=1e-2)
    outcome = None
    for step in range(OPTIMIZER_STEPS if case.steps else 1):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=FLOAT)
        with record() as passes:
            for number, data in enumerate(micro_batches(graph, plan, seed=1 + step)):
                local = {c.name: data[c.name][tuple(slice(*span) for span in c.boxes[position])] for c in program.data}
                loss = program.forward(local, number)[program.loss]
                loss.backward()
                total += loss.detach()
        with record() as ends:
            program.finish()
        loss = float(program.total_loss(total))
        outcome = outcome or Outcome(loss, program.whole_gradients(), passes, ends)
        outcome.last_loss = loss
        optimizer.step()
        program.refresh()
    return outcome


def difference(found, wanted):
    """(tensor, largest difference), scaled by the larger of its own maximum and 1e-3 of the largest gradient."""
    top = max(float(g.abs().max()) for g in wanted.values())
    worst = ("", 0.0)
    for name, gradient in wanted.items():
        scale = max(float(gradient.abs().max()), 1e-3 * top)
        error = float((found[name] - gradient).abs().max()) / scale
        if not error <= worst[1]:
            worst = (name, error)
    return worst


def _rank(rank, size, folder, cases, work):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    groups, found = Groups(), []
    for case in cases:
        try:
            outcome = work(case, groups)
            found.append(None if outcome is None else asdict(outcome))
        except Exception:
            found.append(traceback.format_exc())  # the parent judges it
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(size, cases, folder, work=run_case):
    """What `work(case, groups)` returns for each case on each process, None outside of its plan, or a traceback.

    Processes are forked from one that has imported everything.

    Returns:
        [case][rank]
    """
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    multiprocessing.set_forkserver_preload(["runtime_preload"])
    try:
        mp.start_processes(_rank, (size, str(folder), cases, work), size, start_method="forkserver")
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
    ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]
    return [[_outcome(found) for found in of_case] for of_case in zip(*ranks, strict=True)]


def _outcome(found):
    if not isinstance(found, dict):
        return found
    passes, ends = ([Sent(**one) for one in found[name]] for name in ("passes", "ends"))
    return Outcome(**{**found, "passes": passes, "ends": ends})
