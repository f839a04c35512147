"""Plans of all kinds against one process: loss and gradients of the first step, loss after ten steps of the optimizer.

    python benchmarks/equality.py [WORD]

Each plan runs on one to four real processes (gloo) in float32; so does the same graph in one process, micro-batch by
micro-batch. The optimizer is Adam, or SGD for networks with batch normalisation. Errors are relative: the error of a
loss to the loss, the error of a gradient to the larger of its own maximum and 1e-3 of the largest gradient. None may
exceed 1e-4. Statistics of batch normalisation are those of a micro-batch (`synchronized`), or, in one process, those of
the same parts of it as on the ranks (`local`).

Plans in bf16 cannot be equal to one process: sums of eight bits depend on their order. Their losses may be off by 2e-2
from those of one process in float32. Their gradients may be at most twice as far from its gradients as those of one
process in bf16 are; that error is printed beside theirs. Plans in bf16 are counted apart. If WORD is given, only plans
with this word in their name are run. Fails if any plan is wrong.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
# The root comes before it: folders of tests are named after the packages.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from plan_cases import CASES, expert, random_plans, spatial, uneven, unlike
from runtime_ranks import difference, errors, expert_plan, make_problem, reference, run_ranks

LIMIT = 1e-4
BF16_LIMIT = 2e-2
"""Largest error of a loss in bf16: a number keeps eight bits, 4e-3, and errors of some hundred roundings add up."""
BF16_GRADIENTS = 2.0
"""Largest error of gradients in bf16, over that of one process in bf16: the roundings of both are about as large, and
independent."""
RANKS, STEPS = 4, 10
"""Processes, and optimizer steps before the last loss."""
ZB = (("schedule", "zb1p"),)


def cases():
    """The plans that run in float32."""
    mixed = "2xV100-16GB+2xP100"
    return [
        *(expert(f"dp2, ZeRO {zero}", "gpt", 2, zero=zero) for zero in range(4)),
        expert("1 process, 2 micro-batches, recomputed", "gpt", 1, recompute="full"),
        expert("dp4", "gpt", 4),
        expert("tp2", "gpt", 2, tp=2),
        expert("tp4", "gpt", 4, tp=4),
        expert("tp2, sequence-parallel, recomputed", "gpt", 2, tp=2, sequence_parallel=True, recompute="full"),
        expert("tp2, attention recomputed", "gpt", 2, tp=2, recompute="selective"),
        expert("dp2 x tp2", "gpt", 4, tp=2),
        expert("dp2 x tp2, ZeRO 3, sequence-parallel", "gpt", 4, tp=2, zero=3, sequence_parallel=True),
        expert("dp2, ZeRO 3, recomputed", "gpt", 2, zero=3, recompute="full"),
        expert("cp2", "gpt", 2, middle=2, fix=(("cp", 2),)),
        expert("cp2 x tp2", "gpt", 4, tp=2, middle=2, fix=(("cp", 2),)),
        expert("dp2 x cp2, ZeRO 2", "gpt", 4, middle=2, zero=2, fix=(("cp", 2),)),
        expert("pp2, 1F1B", "gpt", 2, pp=2, count=4),
        expert("pp2, GPipe", "gpt", 2, pp=2, count=4, fix=(("schedule", "gpipe"),)),
        expert("pp2, zero-bubble", "gpt", 2, pp=2, count=4, fix=ZB),
        expert("pp2, zero-bubble H2", "gpt", 2, pp=2, count=4, fix=(("schedule", "zb2p"),)),
        expert("pp2 x tp2, interleaved", "deep", 4, pp=2, tp=2, virtual=2, count=4, fix=(("virtual_stages", 2),)),
        expert("pp2 x tp2, sequence-parallel", "gpt", 4, pp=2, tp=2, count=4, sequence_parallel=True),
        expert("pp2 x dp2, ZeRO 1, recomputed", "gpt", 4, pp=2, zero=1, recompute="full"),
        expert("pp2 x dp2, ZeRO 3, zero-bubble", "gpt", 4, pp=2, zero=3, fix=ZB),
        expert("pp2 x cp2", "gpt", 4, pp=2, middle=2, fix=(("cp", 2),)),
        expert("pp4", "deep", 4, pp=4, count=4),
        expert("pp2 of 1 and 2 devices, ZeRO 1", "gpt", 3, pp=2, zero=1),
        expert("tp2", "odd", 2, tp=2),
        expert("tp4, sequence-parallel", "odd", 4, tp=4, sequence_parallel=True),
        expert("dp2 x tp2, ZeRO 3", "odd", 4, tp=2, zero=3),
        expert("pp2 x tp2, zero-bubble", "odd", 4, pp=2, tp=2, count=4, fix=ZB),
        *random_plans("odd", 4, 3, 2, fix=()),
        uneven(expert("dp2", "gpt", 2, batch=8, count=1), (5, 3)),
        uneven(expert("dp2 x tp2, ZeRO 1", "gpt", 4, batch=6, count=1, tp=2, zero=1), (1, 2)),
        uneven(expert("dp2, ZeRO 3", "gpt", 2, batch=8, count=1, zero=3), (3, 1)),
        uneven(expert("pp2 x dp2", "gpt", 4, batch=8, count=1, pp=2), (3, 1)),
        uneven(expert("dp3", "bert", 3, batch=12, count=1), (3, 1, 2)),
        *(unlike(name) for name in CASES),
        *random_plans("gpt", mixed, 2, 5, fix=()),
        expert("tp2", "bert", 2, tp=2),
        expert("dp2 x tp2, ZeRO 2", "bert", 4, tp=2, zero=2),
        expert("pp2 x tp2, zero-bubble", "bert", 4, pp=2, tp=2, count=4, fix=ZB),
        *random_plans("bert", 4, 2, 2, fix=()),
        expert("ep2", "moe", 2, middle=2, experts="ep"),
        expert("ep2 x tp2", "moe", 4, tp=2, middle=2, experts="ep"),
        expert("dp2 x ep2, ZeRO 1", "moe", 4, middle=2, experts="ep", zero=1),
        expert("pp2 x ep2", "moe", 4, pp=2, middle=2, experts="ep"),
        expert("experts on tp2", "moe", 2, tp=2, experts="tp"),
        *random_plans("moe", 4, 1, 3, fix=()),
        expert("dp2", "lstm", 2),
        expert("dp4, ZeRO 3", "lstm", 4, zero=3),
        uneven(expert("dp2", "lstm", 2, batch=8, count=1), (5, 3)),
        *random_plans("lstm", 2, 2, 0),
        expert("dp2, synchronized", "resnet", 2),
        uneven(expert("dp2, synchronized", "resnet", 2, batch=8, count=1), (5, 3)),
        expert("dp2, local", "resnet", 2, batch_norm="local"),
        uneven(expert("dp2, local", "resnet", 2, batch=8, count=1, batch_norm="local"), (5, 3)),
        spatial("dp2 x two halves of each image, synchronized", "resnet", 4, batch_norm="synchronized"),
        spatial("dp2 x two halves of each image, local", "resnet", 4, batch_norm="local"),
        *random_plans("resnet", 4, 2, 1, fix=()),
        expert("dp2, local, ZeRO 1", "resnet50", 2, batch=2, count=1, batch_norm="local", zero=1),
        expert("pp2, synchronized", "resnet50", 2, batch=2, count=1, pp=2),
    ]


def of_resnet50():
    """Samples of which two ranks share the statistics: the first step, and ten steps in float64.

    In float32 a change of 1e-7 in all weights is one of 1e-4 to 1e-3 in the loss ten steps later, in one process.
    """
    case = expert("dp2, synchronized", "resnet50", 2, batch=2, count=1)
    return [
        replace(case, name=f"{case.name}, first step", dtype=torch.float32),
        replace(case, name=f"{case.name}, float64", dtype=torch.float64, steps=STEPS),
    ]


def in_bf16():
    """Plans that are run in bf16, end to end."""
    return [
        replace(case, name=f"{case.name}, bf16", dtype=torch.bfloat16, steps=STEPS)
        for case in (
            expert("dp2 x tp2, ZeRO 3", "gpt", 4, tp=2, zero=3, sequence_parallel=True),
            expert("pp2 x dp2, zero-bubble", "gpt", 4, pp=2, fix=ZB),
            expert("ep2", "moe", 2, middle=2, experts="ep"),
            expert("dp2, synchronized", "resnet", 2),
        )
    ]


def by_one(case):
    """One step of the same micro-batches on one process."""
    problem = make_problem(case.problem.graph, 1, case.problem.training.global_batch)
    plan = expert_plan(problem, count=case.plan.num_micro_batches)
    return replace(case, problem=problem, plan=plan, parts=(), steps=0)


def checked(case, outcomes, known, alone):
    """Prints how far a plan is from one process, and returns whether that is near enough.

    Args:
        case: the plan.
        outcomes: results of its ranks.
        known: cache of the results of one process; it is filled.
        alone: gradients of one process in bf16, for a plan in bf16.
    """
    is_half = in_halves(case)
    one = replace(case, dtype=torch.float32 if is_half else case.dtype)
    shape = (case.plan.num_micro_batches, case.plan.samples_per_micro_batch)
    key = (case.plan.model.sha256, *shape, case.parts, one.dtype, case.steps)
    if key not in known:
        known[key] = reference(one)
    wanted = known[key]
    mesh = " -> ".join(f"{stage.devices} {dict(stage.mesh)}" for stage in case.plan.stages)
    try:
        found = errors(case, outcomes, wanted)
    except AssertionError as error:
        print(f"FAILED  {case.name} [{mesh}]: {error}", flush=True)
        return False
    limits, word, beside = dict.fromkeys(found, LIMIT), "equal", ""
    if is_half:
        own = difference(alone, wanted.gradients)[1]
        limits = {"loss": BF16_LIMIT, "gradients": BF16_GRADIENTS * own, "trained": BF16_LIMIT}
        word, beside = "near", f" (of one process in bf16 {own:.1e})"
    is_near = all(found[what] <= limit for what, limit in limits.items())
    figures = "  ".join(f"{what} {error:.1e}{beside if what == 'gradients' else ''}" for what, error in found.items())
    print(f"{word if is_near else 'WRONG':6}  {figures}  {case.name} [{mesh}]", flush=True)
    return is_near


def in_halves(case):
    """Whether a case runs in bf16."""
    return case.dtype == torch.bfloat16


def main():
    """Runs all plans in one set of processes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("word", nargs="?", default="", help="run only plans with this word in their name")
    word = parser.parse_args().word
    torch.set_num_threads(1)
    start = time.perf_counter()
    full = [replace(case, dtype=torch.float32, steps=STEPS) for case in cases()]
    chosen = [case for case in [*full, *of_resnet50(), *in_bf16()] if word in case.name]
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(RANKS, chosen, Path(folder), limit_s=600)
    halves = [case for case in chosen if in_halves(case)]
    with tempfile.TemporaryDirectory() as folder:
        one = run_ranks(1, [by_one(case) for case in halves], Path(folder)) if halves else []
    alone = {case.name: outcome.gradients for case, (outcome,) in zip(halves, one, strict=True)}
    known = {}
    right = [checked(case, outs, known, alone.get(case.name)) for case, outs in zip(chosen, found, strict=True)]
    for kind, said in (
        (False, "equal to one process"),
        (True, "in bf16 at most twice as far from float32 as one process in bf16"),
    ):
        held = [fine for case, fine in zip(chosen, right, strict=True) if in_halves(case) is kind]
        if held:
            print(f"{sum(held)} of {len(held)} plans {said}")
    print(f"{time.perf_counter() - start:.0f} s")
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())
