"""Plans on the network of the example, on real processes: losses, gradients and checkpoints of one process."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from runtime_ranks import expert_plan, make_problem
from trainer_ranks import BATCH, IGNORED, MODEL, batch, build, run_ranks

from automap.plan import Zero
from ir import zoo


def plan_of(devices, **how):
    problem = make_problem(zoo.build(MODEL), devices, BATCH, {"fix": {"pp": 1}})
    return expert_plan(problem, **how)


def pipeline(**changes):
    """Two stages of one device each."""
    plan = plan_of(1, count=4)
    first = replace(plan.stages[0], operators=("wte/Gather", "h.0/Add_1"))
    last = replace(plan.stages[0], operators=("h.1.ln_1/LayerNormalization", "loss"), devices="1")
    return replace(plan, stages=(first, last), **changes)


def shared(plan, *shares):
    return replace(plan, stages=tuple(replace(stage, batch_shares=shares) for stage in plan.stages))


def one_process():
    """Losses of two steps, and gradients of the first by name."""
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    losses, gradients = [], {}
    for number in (1, 2):
        ids, labels = batch(number)
        loss = F.cross_entropy(module(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients = gradients or {n: p.grad.clone() for n, p in module.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def saved_gradients(folder):
    """By the weights that plain SGD of rate 1 left."""
    before = {f"model.{n}": p.detach() for n, p in build().named_parameters()}
    after = {n: torch.full_like(p, torch.nan) for n, p in before.items()}
    dcp.load(after, checkpoint_id=folder, no_dist=True)
    return {n.removeprefix("model."): before[n] - after[n] for n in before}


def check(size, plans, folder, resumed=()):
    cases = [(name, plan.to_json(), str(folder), "") for name, plan in plans.items()]
    cases += [(f"{name} of {first}", plans[name].to_json(), str(folder), first) for name, first in resumed]
    ranks = run_ranks(size, cases, folder)
    losses, gradients = one_process()
    top = max(float(g.abs().max()) for g in gradients.values())
    for number, (name, *_, resume) in enumerate(cases):
        for found in ranks:
            assert not isinstance(found[number], str), f"{name}\n{found[number]}"
            assert found[number] == pytest.approx(losses[1:] if resume else losses, abs=1e-9), name
        if not resume:
            of_plan = saved_gradients(folder / name)
            for n, wanted in gradients.items():
                scale = max(float(wanted.abs().max()), 1e-3 * top)
                assert float((of_plan[n] - wanted).abs().max()) / scale < 1e-8, (name, n)


@pytest.mark.slow
def test_two_processes(tmp_path):
    dp = plan_of(2, count=2)
    plans = {
        "dp2": dp,
        "dp2, shares 3:1": shared(dp, 3, 1),
        **{f"dp2, ZeRO {zero}": plan_of(2, count=2, zero=zero) for zero in (1, 2, 3)},
        "tp2": plan_of(2, tp=2, count=2),
        "tp2, sequence parallel": plan_of(2, tp=2, count=2, sequence_parallel=True, recompute="full"),
        "pp2": pipeline(),
    }
    check(2, plans, tmp_path, [("dp2", "dp2"), ("pp2", "tp2"), ("tp2", "dp2, ZeRO 3"), ("dp2, ZeRO 1", "pp2")])


@pytest.mark.slow
def test_four_processes(tmp_path):
    plans = {
        "dp2 x tp2": plan_of(4, tp=2, count=2),
        "dp2 x tp2, ZeRO 1": plan_of(4, tp=2, count=2, zero=1),
        "dp2 x tp2, ZeRO 3": plan_of(4, tp=2, count=2, zero=3, sequence_parallel=True),
    }
    check(4, plans, tmp_path, [("dp2 x tp2", "dp2 x tp2, ZeRO 3"), ("dp2 x tp2, ZeRO 3", "dp2 x tp2")])
