"""Plans run on real processes and by one process: values, data, the reference, the launcher."""

import math
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import forked_ranks
import rank_device
import torch
import torch.distributed as dist

from automap.cluster import parse_cluster
from automap.plan import Plan
from automap.price.evaluator import Evaluator
from automap.price.plan_reader import lower_plan
from automap.problem import Problem
from automap.runtime.executor.optimizer import LEARNING_RATE, Optimizer
from automap.runtime.executor.runner import join
from automap.runtime.executor.stage_executor import loss_scale
from automap.runtime.executor.stage_program import stage_programs
from automap.runtime.mesh_groups import Groups, make_meshes
from automap.runtime.operators.apply import run
from automap.runtime.redistribute import Sent, record
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures

STEPS = 3
"""Optimizer steps that tests take, each with the state of the one before."""
FLOAT = torch.float64


@dataclass(frozen=True)
class Case:
    """A plan and how it is run."""

    name: str
    problem: Problem
    plan: Plan
    steps: int = 0
    """Optimizer steps before the last loss."""
    dtype: torch.dtype = torch.float64
    parts: tuple[int, ...] = ()
    """Samples of the parts of a micro-batch that are normalised apart; none = one part."""


@dataclass
class Outcome:
    """What one rank saw."""

    loss: float | None
    """Loss of the first step, on ranks that know it."""
    gradients: dict
    """Whole gradients of the parameters of its stages."""
    sent: list
    """Collectives of the first step."""
    last_loss: float | None = None


def make_problem(graph, cluster, batch, hints=None, **training):
    """A problem of fp32 on a cluster, or on so many devices of one host."""
    settings = {"global_batch": batch, "precision": "fp32", "batch_norm": "synchronized", **training}
    return Problem.build(
        graph, parse_cluster(f"1x{cluster}xA100" if isinstance(cluster, int) else cluster), settings, hints
    )


def expert_plan(
    problem,
    *,
    pp=1,
    tp=1,
    middle=1,
    virtual=1,
    count=2,
    stages=(),
    zero=0,
    recompute="none",
    sequence_parallel=False,
    experts="",
):
    """A plan in Megatron's manner; `stages` are values of the slots of schedule, order and devices."""
    space = PlanSpace(problem)
    wanted = (pp, tp, middle, virtual, count)
    shape = next(s for s in space.shapes if (s.pp, s.tp, s.middle, s.virtual, s.num_micro_batches) == wanted)
    prefix = space.even_values(shape, recompute=recompute, zero=zero, stages=stages)
    return space.decode(
        megatron_signatures(space, shape, prefix, sequence_parallel=sequence_parallel, expert_axis=experts)
    )


def with_stages(plan, **changes):
    """The plan with all its stages changed."""
    return replace(plan, stages=tuple(replace(stage, **changes) for stage in plan.stages))


def programs_of(plan, evaluator):
    """The programs of all stages of a plan, without processes."""
    lowered = lower_plan(plan, evaluator)
    return stage_programs(plan, lowered, evaluator, make_meshes(plan, lowered.axes), torch.float32)


def whole_values(graph, seed=0):
    """Random parameters, buffers and stored constants."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for tensor in graph.tensors.values():
        if tensor.name in graph.producer or tensor.role not in ("parameter", "buffer", "constant"):
            continue
        if tensor.is_float:
            fan_in = 1 if len(tensor.shape) < 2 else math.prod(tensor.shape) // tensor.shape[len(tensor.shape) == 2]
            scale = min(0.3, fan_in**-0.5)
            found[tensor.name] = scale * torch.randn(tensor.shape, generator=generator, dtype=FLOAT)
        else:
            found[tensor.name] = torch.randint(0, _bound(graph, tensor.name), tensor.shape, generator=generator)
    return found


def _bound(graph, name):
    """One more than the largest integer that a tensor of integers may hold."""
    for index in graph.consumers[name]:
        op = graph.operators[index]
        if op.kind == "Gather":
            return graph.tensors[op.inputs[0]].shape[dict(op.attributes).get("axis", 0)]
        if op.kind == "SoftmaxCrossEntropyLoss":
            return graph.tensors[op.inputs[0]].shape[dict(op.attributes).get("class_dim", 1)]
    return 2


def micro_batches(graph, plan, dtype, seed=1):
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
                one[tensor.name] = torch.randn(shape, generator=generator, dtype=FLOAT).to(dtype)
            else:
                one[tensor.name] = torch.randint(0, _bound(graph, tensor.name), shape, generator=generator)
        found.append(one)
    return found


def reference(case):
    """Outcome of one process, which computes the micro-batches of the plan one after the other."""
    graph, plan = case.problem.graph, case.plan
    values = {n: x.to(case.dtype) if x.is_floating_point() else x for n, x in whole_values(graph).items()}
    leaves = {t.name: values[t.name].requires_grad_() for t in graph.parameters if t.is_float and not t.frozen}
    parts = case.parts or (plan.samples_per_micro_batch,)
    scale = loss_scale(graph, plan.num_micro_batches, plan.samples_per_micro_batch)
    batch_dims = {t.name: t.batch_dim for t in graph.tensors.values()}
    if case.problem.training.optimizer == "adam":
        optimizer = torch.optim.Adam(leaves.values(), lr=LEARNING_RATE)
    else:
        optimizer = torch.optim.SGD(leaves.values(), lr=LEARNING_RATE)
    losses, first = [], {}
    for step in range(case.steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for data in micro_batches(graph, plan, case.dtype, seed=1 + step):
            cut = {n: x.split([k * x.shape[batch_dims[n]] // sum(parts) for k in parts], batch_dims[n])
                   for n, x in data.items()}  # fmt: skip
            for part, samples in enumerate(parts):
                rows = {n: x[part] for n, x in cut.items()}
                loss = run(graph, {**values, **rows}, samples)[graph.outputs[-1]].sum() * scale
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        first = first or {n: torch.zeros_like(v) if v.grad is None else v.grad.clone() for n, v in leaves.items()}
        optimizer.step()
    return Outcome(losses[0], first, [], losses[-1])


_evaluators = []


def evaluator_of(problem):
    """The evaluator of a problem, made once."""
    found = next((e for e in _evaluators if e.problem is problem), None)
    if found is None:
        found = Evaluator(problem)
        _evaluators.append(found)
    return found


def run_case(case, groups, device):
    """Outcome of this rank, None outside of the plan."""
    graph, plan, rank = case.problem.graph, case.plan, dist.get_rank()
    agreed = torch.ones(1, device=device)
    try:
        pipeline, executors = join(
            evaluator_of(case.problem), plan, rank, whole_values(graph), groups, dtype=case.dtype, device=device
        )
    except Exception:
        agreed.zero_()
        raise
    finally:
        dist.all_reduce(agreed, dist.ReduceOp.MIN)
    assert agreed, "another rank refused"
    if not executors:
        return None
    leaves = {f"{n}.{name}": leaf for n, p in executors.items() for name, leaf in p.parameters.items()}
    optimizer = Optimizer(leaves, case.problem.training.optimizer)
    outcome = None
    for step in range(case.steps + 1):
        data = micro_batches(graph, plan, case.dtype, seed=1 + step)
        with record() as sent:
            loss = pipeline.step(
                lambda name, box, m, data=data: data[m][name][tuple(slice(*span) for span in box)].to(device)
            )
        if outcome is None:
            gradients = {}
            for executor in executors.values():
                gradients.update(executor.whole_gradients())
            outcome = Outcome(loss, gradients, sent)
        outcome.last_loss = loss
        optimizer.step()
        with record() as gathered:
            pipeline.refresh()
        if step == 0:
            outcome.sent += gathered
    return outcome


def difference(found, wanted):
    """(tensor, largest difference), scaled by the larger of its own maximum and 1e-3 of the largest gradient.

    Gradients of stages that a rank has no part in are not looked for.
    """
    top = max(float(g.abs().max()) for g in wanted.values())
    scaled = {
        name: float((gradient - wanted[name]).abs().max()) / max(float(wanted[name].abs().max()), 1e-3 * top)
        for name, gradient in found.items()
    }
    return max(
        ((name, worse(0.0, error)) for name, error in scaled.items()), key=lambda item: item[1], default=("", 0.0)
    )


def errors(case, outcomes, wanted):
    """(what, largest relative error) of a case over all its ranks, against `reference`.

    Raises:
        AssertionError: a rank failed, or nobody has a gradient or the loss.
    """
    found, seen, losses = {"loss": 0.0, "gradients": 0.0, "trained": 0.0}, set(), 0
    for rank, outcome in enumerate(outcomes):
        assert not isinstance(outcome, str), f"{case.name}, rank {rank}: {outcome}"
        if outcome is None:
            continue
        seen.update(outcome.gradients)
        found["gradients"] = worse(found["gradients"], difference(outcome.gradients, wanted.gradients)[1])
        if outcome.loss is not None:
            losses += 1
            found["loss"] = worse(found["loss"], abs(outcome.loss - wanted.loss) / abs(wanted.loss))
            found["trained"] = worse(found["trained"], abs(outcome.last_loss / wanted.last_loss - 1.0))
    assert losses and seen == set(wanted.gradients), f"{case.name}: nobody has {set(wanted.gradients) - seen}"
    return found


def worse(one, other):
    """The larger of two errors; NaN counts as the worst."""
    return max(one, math.inf if math.isnan(other) else other)


def _rank(rank, size, folder, cases, work, limit_s):
    torch.set_num_threads(1)
    device = rank_device.meet(rank, size, folder, limit_s=limit_s)
    groups, found = Groups(), []
    for case in cases:
        try:
            outcome = work(case, groups, device)
            found.append(rank_device.on_cpu(asdict(outcome) if isinstance(outcome, Outcome) else outcome))
        except Exception:
            found.append(traceback.format_exc())  # the parent judges it
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(size, cases, folder, work=run_case, *, limit_s=60):
    """What `work(case, groups, device)` returns of each case, an `Outcome` or plain data, or a traceback.

    Processes are forked from one that has imported everything; none waits longer than `limit_s` for another.

    Returns:
        [case][rank]
    """
    forked_ranks.start(_rank, size, str(folder), cases, work, limit_s)
    ranks = [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]
    return [[_outcome(found) for found in of_case] for of_case in zip(*ranks, strict=True)]


def _outcome(found):
    if not isinstance(found, dict) or "sent" not in found:
        return found
    return Outcome(**{**found, "sent": [Sent(**one) for one in found["sent"]]})
