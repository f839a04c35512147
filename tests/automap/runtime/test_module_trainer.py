"""Plans on the network of the example, on real processes: losses, gradients and checkpoints of one process."""

import functools
import math
from dataclasses import astuple, replace

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F  # noqa: N812
from long_cases import long_but
from runtime_ranks import expert_plan, make_problem
from trainer_ranks import (
    BATCH,
    BY_HAND,
    CODE,
    COMPILED,
    DROPOUT,
    FROZEN,
    GRAPH,
    HALF,
    IGNORED,
    MODEL,
    OTHER,
    OVERFLOW,
    SIZES,
    SPLIT,
    UNTRACED,
    WHOLE,
    batch,
    build,
    dropping,
    graph_of,
    module_of,
    run_ranks,
)

from automap.cluster import parse_cluster
from automap.errors import PlanError
from automap.globs import matches
from automap.plan import Schedule, Sync, Zero, parse_devices
from automap.problem import Problem
from automap.runtime.trainer import GraphTrainer, entry, parallelize
from automap.runtime.trainer.graph_trainer import Whole, computes_alike
from automap.runtime.trainer.module_tree import LOSS
from automap.runtime.trainer.role_reader import read_roles
from automap.runtime.trainer.stage_modules import sent_on
from automap.runtime.trainer.supported_plans import FinerThanModules
from automap.schedule import write_order
from automap.space.target_limits import plan_space
from ir import zoo
from ir.factors import BROADCAST, PARTIAL


def plan_of(devices, name="", **how):
    problem = make_problem(graph_of(name), devices, BATCH, {"fix": {"pp": 1}})
    return expert_plan(problem, **how)


CORES = ("h.*.attn/*",)
ENDS = ("Add", "h.0/Add_1", "h.1/Add_1", "loss")
STARTS = ("wte/Gather", "h.0.ln_1/LayerNormalization", "h.1.ln_1/LayerNormalization", "ln_f/LayerNormalization")


def pipeline(plan, kind="1f1b", recompute=()):
    """The plan of one stage on two pipeline ranks, the second on the next devices."""
    stage = replace(plan.stages[0], recompute=recompute)
    size = math.prod(n for _, n in stage.mesh)
    devices = [f"{first}-{first + size - 1}" for first in (0, size)]
    cuts = [(0, 1), (2, 3)] if kind != "interleaved" else [(i, i) for i in range(4)]
    stages = []
    for number, (first, last) in enumerate(cuts):
        inside = {k: v for k, v in stage.shardings.items() if any(matches(k, n) for n in names(first, last))}
        stages.append(
            replace(stage, operators=(STARTS[first], ENDS[last]), devices=devices[number % 2], shardings=inside)
        )
    return replace(plan, stages=tuple(stages), schedule=Schedule(kind=kind))


def names(first, last):
    every = [op.name for op in zoo.build(MODEL)]
    return every[every.index(STARTS[first]) : every.index(ENDS[last]) + 1]


def changed(plan, **changes):
    return replace(plan, stages=tuple(replace(stage, **changes) for stage in plan.stages))


def shared(plan, *shares):
    return changed(plan, batch_shares=shares)


def repeated(plan, stage, *axes):
    """The plan with all work repeated on the axes that split none of its batch, and ZeRO over some axes."""
    batch = tuple(axis for axis in plan.stages[0].batch_axes if axis not in axes[:1])
    return changed(plan, batch_axes=batch, shardings={}, zero=Zero(stage=stage, axes=axes))


def in_order(plan, kind):
    """The plan with the order of a kind written out."""
    order = write_order(kind, 2, len(plan.stages), plan.num_micro_batches)
    return replace(plan, schedule=Schedule(kind="explicit", order=order))


def finer(plan):
    """The tensor-parallel plan with a softmax that all ranks compute whole."""
    left = {k: v for k, v in plan.stages[0].shardings.items() if k != "h.*.attn/Softmax"}
    return changed(plan, shardings=left)


def loss_alone(plan):
    """The pipeline with nothing but the loss in its second stage."""
    one, two = plan.stages
    before = [op.name for op in zoo.build(MODEL)][-2]
    stages = replace(one, operators=(one.operators[0], before)), replace(two, operators=("loss", "loss"))
    return replace(plan, stages=stages)


def cut_in_block(plan):
    """The pipeline with the attention of the last block in its first stage, and the MLP in the second."""
    one, two = plan.stages
    ends = one.operators[0], "h.1/Add"
    return replace(
        plan,
        stages=(
            replace(one, operators=ends),
            replace(two, operators=("h.1.ln_2/LayerNormalization", two.operators[1])),
        ),
    )


def unlike(plan, *devices):
    """The pipeline with other numbers of replicas in its stages."""
    sizes = [len(parse_devices(text)) for text in devices]
    stages = [
        replace(stage, devices=text, mesh=(("dp", size),), batch_axes=("dp",))
        for stage, text, size in zip(plan.stages, devices, sizes, strict=True)
    ]
    return replace(plan, stages=tuple(stages), cluster=parse_cluster(f"{sum(sizes)}xcpu").to_json())


def apart(plan, sync):
    return replace(plan, sync=sync, training=replace(plan.training, sync_modes=("synchronous", sync.kind)))


def in_fp16(plan):
    return replace(plan, training=replace(plan.training, precision="fp16"))


@functools.cache
def one_process(other=""):
    """Losses of two steps, and gradients of the first by name."""
    module = module_of(other)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9)
    losses, gradients = [], {}
    for number in (1, 2):
        ids, labels = batch(number)
        loss = F.cross_entropy(module(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        losses.append(float(loss.detach()))
        found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        gradients = gradients or found
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


APART = "local SGD"


@functools.cache
def two_replicas():
    """The losses of each of two replicas, whose weights are averaged after every step, and their mean gradients."""
    replicas = [module_of("") for _ in range(2)]
    optimizers = [torch.optim.SGD(replica.parameters(), lr=1.0, momentum=0.9) for replica in replicas]
    losses, gradients = [[], []], {}
    for number in (1, 2):
        ids, labels = batch(number)
        for i, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            rows = [first + 2 * i + k for first in (0, BATCH // 2) for k in range(2)]
            loss = F.cross_entropy(replica(ids[rows]).flatten(0, 1), labels[rows].flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            losses[i].append(float(loss.detach()))
            optimizer.step()
        for (name, one), (_, two) in zip(*(replica.named_parameters() for replica in replicas), strict=True):
            gradients.setdefault(name, (one.grad + two.grad) / 2)
            with torch.no_grad():
                one.copy_((one + two) / 2)
                two.copy_(one)
    return losses, gradients


def check_masks(folder, name):
    """What ranks hold alike is dropped alike, and one process that drops the same has the same loss and gradients."""
    of_ranks = [torch.load(folder / f"{name}.{rank}.masks") for rank in range(2)]
    module, (ids, labels) = module_of(name), batch(1)
    for path, child in module.named_modules():
        if path in of_ranks[0]:
            one, two = (masks[path] for masks in of_ranks)
            if path.endswith((SPLIT, CODE)) or "sequence" in name:
                assert 0.3 < (one != two)[one | two].double().mean() < 0.7, "parts are dropped alike"
                one = torch.cat([one, two], -1 if path.endswith(SPLIT) else 1)
            else:
                assert path.endswith(WHOLE)
                assert torch.equal(one, two), "what is whole is not dropped alike"
            child.forward = functools.partial(torch.mul, one.double() / (1 - child.p))
    for block in module.h:
        block.attn.drops = 0.0
    loss = F.cross_entropy(module(ids).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    return [loss.item()], {n: p.grad for n, p in module.named_parameters()}


def saved_gradients(folder):
    """Gradients, computed from the weights that plain SGD of rate 1 left."""
    before = {f"model.{n}": p.detach() for n, p in module_of(folder.name).named_parameters()}
    after = {n: torch.full_like(p, torch.nan) for n, p in before.items()}
    dcp.load(after, checkpoint_id=folder, no_dist=True)
    return {n.removeprefix("model."): before[n] - after[n] for n in before}


def check(size, plans, folder, resumed=()):
    cases = [(name, plan.to_json(), str(folder), "") for name, plan in plans.items()]
    cases += [(f"{name} of {first}", plans[name].to_json(), str(folder), first) for name, first in resumed]
    ranks = run_ranks(size, cases, folder)
    for number, (name, *_, resume) in enumerate(cases):
        losses, gradients = one_process(OTHER if OTHER in name else FROZEN if FROZEN in name else "")
        wanted = [losses[1:] if resume else losses] * size
        if APART in name:
            losses, gradients = two_replicas()
            wanted = [losses[rank % 2 if "pp2" in name else rank * 2 // size] for rank in range(size)]
        assert not any(isinstance(found[number], str) for found in ranks), f"{name}\n{ranks[0][number]}"
        if DROPOUT in name:
            first, gradients = check_masks(folder, name)
            wanted = [[*first, *found[number][1:]] for found in ranks]
        top = max(float(g.abs().max()) for g in gradients.values())
        for found, of_rank in zip(ranks, wanted, strict=True):
            near = 4e-3 if HALF in name else 1e-9
            assert found[number] == pytest.approx(of_rank, abs=near), name
        if not resume:
            of_plan = saved_gradients(folder / name)
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
            norms = [torch.load(folder / f"{name}.{rank}.norm") for rank in range(size)]
            assert APART in name or norms == pytest.approx([norm] * size, rel=1e-3 if HALF in name else 1e-8), name
            for n, wanted in gradients.items():
                scale = max(float(wanted.abs().max()), 1e-3 * top)
                near = 1e-2 if HALF in name else 1e-8
                assert float((of_plan[n] - wanted).abs().max()) / scale < near, (name, n)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("devices", long_but([2], [2, 4]))
def test_plans_for_the_target_automap_are_trained(devices, tmp_path):
    """Random ones of the plan space of the target: none is refused."""
    training = {"global_batch": BATCH, "target": "automap", "precision": "fp32"}
    space = plan_space(Problem.build(graph_of(""), parse_cluster(f"{devices}xcpu"), training))
    drawn = map(space.decode, space.random_batch(np.random.default_rng(devices), 8).tolist())
    check(devices, {f"plan {number}": plan for number, plan in enumerate(drawn)}, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_processes(tmp_path):
    dp = plan_of(2, count=2)
    plans = {
        "dp2": dp,
        "dp2, shares 3:1": shared(dp, 3, 1),
        **{f"dp2, ZeRO {zero}": plan_of(2, count=2, zero=zero) for zero in (1, 2, 3)},
        "tp2": plan_of(2, tp=2, count=2),
        "heads are counted": plan_of(2, tp=2, count=1),
        "heads are counted elsewhere": plan_of(2, tp=2, count=1),
        "tp2, sequence parallel": plan_of(2, tp=2, count=2, sequence_parallel=True, recompute="full"),
        "tp2, sequence parallel, cores again": changed(
            plan_of(2, tp=2, count=2, sequence_parallel=True), recompute=CORES
        ),
        f"tp2, cores again, {DROPOUT}": changed(plan_of(2, tp=2, count=1), recompute=CORES),
        "ZeRO 3, cores again": changed(plan_of(2, count=2, zero=3), recompute=CORES),
        "pp2, zb1p, cores again": pipeline(plan_of(1, count=4), "zb1p", recompute=CORES),
        f"tp2, {OTHER}": plan_of(2, OTHER, tp=2, count=2, sequence_parallel=True),
        "pp2": pipeline(plan_of(1, count=4)),
        "pp2, one micro-batch": pipeline(plan_of(1, count=1)),
        "pp2, loss alone": loss_alone(pipeline(plan_of(1, count=4))),
        "pp2, interleaved": pipeline(plan_of(1, count=4), "interleaved"),
        f"pp2, {UNTRACED}": pipeline(plan_of(1, count=4), recompute=("h.1*", "h.0.attn/Softmax")),
        "pp2, zb1p": pipeline(plan_of(1, count=4), "zb1p", recompute=("h.*",)),
        "pp2, eager-1f1b": pipeline(plan_of(1, count=4), "eager-1f1b", recompute=("h.1*",)),
        "pp2, zb2p": in_order(pipeline(plan_of(1, count=4)), "zb2p"),
        f"tp2, {OVERFLOW}": in_fp16(plan_of(2, tp=2, count=2, sequence_parallel=True)),
        f"tp2, {HALF}": in_fp16(plan_of(2, tp=2, count=2)),
        f"ZeRO 3, {HALF}": in_fp16(plan_of(2, count=2, zero=3)),
        f"tp2, {DROPOUT}": plan_of(2, tp=2, count=1, recompute="full"),
        f"tp2, sequence parallel, {DROPOUT} {BY_HAND}": plan_of(2, tp=2, count=1, sequence_parallel=True),
        f"softmax whole, {GRAPH}": finer(plan_of(2, tp=2, count=2)),
        f"ZeRO 1 over tp, {GRAPH}": changed(plan_of(2, tp=2, count=2), zero=Zero(stage=1, axes=("tp",))),
        APART: apart(dp, Sync(kind="local_sgd", period=1)),
        "all work repeated, ZeRO 1": repeated(dp, 1, "dp"),
    }
    resumed = [("tp2", f"softmax whole, {GRAPH}"), (f"ZeRO 1 over tp, {GRAPH}", "dp2, ZeRO 1")]
    check(
        2, plans, tmp_path, [*resumed, ("dp2", "dp2"), ("pp2", "tp2"), ("tp2", "dp2, ZeRO 3"), ("dp2, ZeRO 1", "pp2")]
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_two_processes_with_further_plans(tmp_path):
    dp = plan_of(2, count=2)
    plans = {
        f"ZeRO 2, cores again, {HALF}": in_fp16(changed(plan_of(2, count=2, zero=2), recompute=CORES)),
        f"pp2, loss alone, {UNTRACED}": loss_alone(pipeline(plan_of(1, count=2))),
        "pp2, gpipe": pipeline(plan_of(1, count=2), "gpipe", recompute=("h.*",)),
        f"pp2, interleaved, {UNTRACED}": pipeline(plan_of(1, count=4), "interleaved"),
        f"dp2, ZeRO 2, {OVERFLOW}": in_fp16(plan_of(2, count=2, zero=2)),
        f"pp2, {OVERFLOW}": in_fp16(pipeline(plan_of(1, count=2))),
        f"dp2, {HALF}": in_fp16(dp),
        f"pp2, {HALF}": in_fp16(pipeline(plan_of(1, count=2))),
        f"tp2, sequence parallel, {DROPOUT}": plan_of(2, tp=2, count=1, sequence_parallel=True),
        f"tp2, {DROPOUT} {BY_HAND}": plan_of(2, tp=2, count=1, recompute="full"),
        f"softmax whole, {GRAPH}, {OVERFLOW}": in_fp16(finer(plan_of(2, tp=2, count=2))),
        f"all work repeated, ZeRO 3, {HALF}": in_fp16(repeated(dp, 3, "dp")),
    }
    check(2, plans, tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_frozen_parameters_stay_as_they_are(tmp_path):
    """Nor do they hinder a checkpoint from being read under another plan."""
    plans = {
        f"dp2, {FROZEN}": plan_of(2, count=2),
        **{f"dp2, ZeRO {zero}, {FROZEN}": plan_of(2, count=2, zero=zero) for zero in (1, 2, 3)},
        f"tp2, {FROZEN}": plan_of(2, tp=2, count=2, sequence_parallel=True, recompute="full"),
        f"pp2, {FROZEN}": pipeline(plan_of(1, count=4)),
        f"pp2, zb1p, {FROZEN}": pipeline(plan_of(1, count=4), "zb1p"),
        f"pp2, interleaved, {UNTRACED}, {FROZEN}": pipeline(plan_of(1, count=4), "interleaved"),
    }
    check(2, plans, tmp_path, [(f"dp2, {FROZEN}", f"dp2, ZeRO 3, {FROZEN}"), (f"tp2, {FROZEN}", f"pp2, {FROZEN}")])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", long_but(["tp2", "pp2, zb1p"], ["tp2", "pp2, zb1p", "dp2, ZeRO 3"]))
def test_blocks_may_be_compiled(name, tmp_path):
    """Collectives stay outside of the compiled code, whose backward passes zero-bubble schedules cannot take apart."""
    plan = {
        "tp2": plan_of(2, tp=2, count=2, sequence_parallel=True),
        "pp2, zb1p": pipeline(plan_of(1, count=2), "zb1p"),
        "dp2, ZeRO 3": plan_of(2, count=2, zero=3),
    }[name]
    check(2, {f"{name}, {COMPILED}": plan}, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_four_processes(tmp_path):
    plans = {
        "dp2 x tp2": plan_of(4, tp=2, count=2),
        "dp2 x tp2, ZeRO 1": plan_of(4, tp=2, count=2, zero=1),
        "pp2 x tp2": pipeline(plan_of(2, tp=2, count=4)),
        "pp2 x dp2, ZeRO 1": pipeline(plan_of(2, count=4, zero=1)),
        "pp2 x dp2, shares 3:1": pipeline(shared(plan_of(2, count=2), 3, 1)),
        **{f"pp2 x dp2, ZeRO {zero}": pipeline(plan_of(2, count=4, zero=zero)) for zero in (2, 3)},
        **{f"pp2 x dp2, ZeRO {zero}, gpipe": pipeline(plan_of(2, count=2, zero=zero), "gpipe") for zero in (2, 3)},
        **{
            f"pp2 x dp2, ZeRO {zero}, interleaved": pipeline(plan_of(2, count=4, zero=zero), "interleaved")
            for zero in (1, 2, 3)
        },
        f"pp2 x dp2, ZeRO 3, {UNTRACED}": pipeline(plan_of(2, count=4, zero=3)),
        f"pp2 x tp2, {UNTRACED}": pipeline(plan_of(2, tp=2, count=4)),
        **{f"pp2 x dp2, ZeRO {zero}, zb1p": pipeline(plan_of(2, count=4, zero=zero), "zb1p") for zero in (1, 2)},
        "pp2 x dp2, ZeRO 3, zb2p": pipeline(plan_of(2, count=4, zero=3), "zb2p", recompute=("h.0*", *CORES)),
        "pp2 x dp2, ZeRO 2, eager-1f1b": pipeline(plan_of(2, count=4, zero=2), "eager-1f1b"),
        "pp2 x dp2, zb1p": pipeline(plan_of(2, count=4), "zb1p"),
        "dp2 x tp2, ZeRO 3": plan_of(4, tp=2, count=2, zero=3, sequence_parallel=True),
        **{
            f"pp2 x dp2, ZeRO {zero}, a block in two stages": cut_in_block(pipeline(plan_of(2, count=4, zero=zero)))
            for zero in (1, 3)
        },
        f"{APART}, tp2": apart(plan_of(4, tp=2, count=2, sequence_parallel=True), Sync(kind="local_sgd", period=1)),
        f"{APART}, pp2": apart(pipeline(plan_of(2, count=2)), Sync(kind="local_sgd", period=1)),
        "dp2, all work repeated by 2, ZeRO 2": repeated(plan_of(4, tp=2, count=2), 2, "tp", "dp"),
        "pp2, all work repeated by 2, ZeRO 1": repeated(pipeline(plan_of(2, count=4)), 1, "dp"),
        f"1 and 3 replicas, {GRAPH}": unlike(pipeline(plan_of(1, count=2)), "0", "1-3"),
    }
    check(4, plans, tmp_path, [("dp2 x tp2", "dp2 x tp2, ZeRO 3"), ("dp2 x tp2, ZeRO 3", "pp2 x tp2")])


def test_roles_of_a_tensor_parallel_plan():
    roles = read_roles(plan_of(2, tp=2), zoo.build(MODEL), build())
    kinds = {path: role.kind for path, role in roles.modules.items() if not path.startswith("h.1")}
    assert kinds == {
        "wte": "vocabulary", "wpe": "whole", "lm_head": "column", "ln_f": "whole", "h.0.ln_1": "whole",
        "h.0.ln_2": "whole", "h.0.attn.c_attn": "column", "h.0.attn.c_proj": "row", "h.0.mlp.c_fc": "column",
        "h.0.mlp.c_proj": "row",
    }  # fmt: skip
    assert roles.modules["h.1.attn.c_attn"].pieces == (16, 16, 16)
    assert roles.splits_classes and not roles.summed


def test_a_module_in_two_stages_runs_again_in_parts():
    plan = cut_in_block(pipeline(plan_of(1, count=2), recompute=("h.*",)))
    found = read_roles(plan, zoo.build(MODEL), build()).recomputed
    assert {*found} == {"h.0", *(f"h.1.{part}" for part in ("ln_1", "attn", "ln_2", "mlp"))}


def test_the_core_of_attention_runs_again_with_the_code_of_its_module():
    plan = changed(plan_of(1), recompute=("h.0.attn/Softmax", "h.1.attn/MatMul*", "h.1.ln_1", "loss"))
    layers = {path: (f"{path}.c_attn", f"{path}.c_proj") for path in ("h.0.attn", "h.1.attn")}
    assert read_roles(plan, zoo.build(MODEL), build()).recomputed == {**layers, "h.1.ln_1": (), LOSS: ()}
    block = changed(plan_of(1), recompute=("h.0.attn*", "h.0/Add"))
    assert read_roles(block, zoo.build(MODEL), build()).recomputed == {"h.0.attn": ()}, "sums keep nothing"


def test_a_stage_may_begin_with_a_view_of_a_weight():
    one, two = pipeline(plan_of(1)).stages
    every = [op.name for op in graph_of("")]
    begin = every.index("lm_head/Transpose")
    stages = replace(one, operators=(every[0], every[begin - 1])), replace(two, operators=(every[begin], every[-1]))
    found = read_roles(replace(pipeline(plan_of(1)), stages=stages), graph_of(""), build()).stages
    assert (found["ln_f"], found["lm_head"]) == (0, 1)


def test_sequence_parallelism_is_that_of_blocks():
    """Code around the blocks sees whole sequences, attention and MLP too; norms and sums have parts."""
    cluster = parse_cluster("2xA100")
    # Reading and writing norms is what the devices are slow at.
    devices = {name: replace(device, hbm_bandwidth_GBps=1e-3) for name, device in cluster.devices.items()}
    training = {"global_batch": BATCH, "target": "automap", "precision": "fp32"}
    problem = Problem.build(graph_of(""), replace(cluster, devices=devices), training, {"fix": {"tp": 2}})
    space = plan_space(problem)
    roles = read_roles(space.decode(space.random(np.random.default_rng(1))), graph_of(""), build())
    moves = {path: [tuple(astuple(border.move)) for border in borders] for path, borders in roles.borders.items()}
    inside = {f"h.{n}.{part}": [(1, BROADCAST, PARTIAL)] for n in (0, 1) for part in ("attn", "mlp")}
    assert moves == {"h.0": [(BROADCAST, 1, 1)], **inside}
    assert roles.modules["h.1.ln_2"].kind == "along"
    assert roles.modules["ln_f"].kind == "whole"
    assert roles.summed == {
        f"h.{n}.{part}" for n in (0, 1) for part in
        ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias", "attn.c_proj.bias", "mlp.c_proj.bias")
    }  # fmt: skip


def test_plans_that_modules_cannot_run_are_refused_by_field():
    graph, module, dp = zoo.build(MODEL), build(), plan_of(2)
    tp = plan_of(2, tp=2)
    pp = pipeline(plan_of(1, count=4))
    uneven = replace(pp, stages=(pp.stages[0], replace(pp.stages[1], batch_axes=())))
    for plan, field in (
        (finer(tp), "shardings"),
        (changed(tp, zero=Zero(stage=1, axes=("tp",))), "zero.axes"),
        (changed(dp, recompute=("h.*.mlp.c_fc/MatMul",)), "recompute"),
        (changed(apart(dp, Sync(kind="local_sgd", period=2)), zero=Zero(stage=1, axes=("dp",))), "sync"),
        (uneven, "batch_axes"),
        (replace(dp, model=replace(dp.model, sha256="0")), "sha256"),
        (replace(dp, training=replace(dp.training, global_batch=BATCH + 1)), "global_batch"),
        (replace(dp, num_micro_batches=3), "global_batch"),
    ):
        with pytest.raises(PlanError, match=field):
            read_roles(plan, graph, module)
    module.h[1].mlp.c_fc.bias = None
    with pytest.raises(PlanError, match=r"h\.1\.mlp\.c_fc\.bias"):
        read_roles(dp, graph, module)


def test_parts_of_unlike_sizes_are_finer_than_modules():
    sizes = {**SIZES, "vocab_size": 1027}
    graph = zoo.build("gpt:" + ",".join(f"{key}={value}" for key, value in sizes.items()))
    plan = expert_plan(make_problem(graph, 2, BATCH, {"fix": {"pp": 1}}), tp=2)
    with pytest.raises(FinerThanModules, match="parts of 1027, which ranks do not divide"):
        read_roles(plan, graph, build(vocab_size=1027))


def frozen(gpt):
    gpt.ln_f.weight.requires_grad_(False)
    return gpt


def test_what_the_graph_does_not_have_is_refused(monkeypatch):
    """The graph is trained in place of a module where a plan is finer than modules."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(entry, "announce", lambda: None)
    monkeypatch.setattr(entry, "agree", lambda *given: None)
    graph, plan, counting = zoo.build(MODEL), finer(plan_of(2, tp=2)), build()
    counting.h[1].register_buffer("calls", torch.zeros(()))
    counting.h[1].register_forward_hook(lambda module, args, y: [y, module.calls.add_(1)][0])
    for module, loss, what in (
        (dropping(build()), {}, r"graph cannot take their place: dropout .* Set it to 0"),
        (counting, {}, r"h\.1\.calls: .* keeps no buffers that code changes"),
        (frozen(build()), {}, r"ln_f\.weight: .* trains all weights"),
        (build(), {"loss": lambda scores, labels: scores.sum()}, "Search with --target automap"),
    ):
        with pytest.raises(PlanError, match=what):
            parallelize(module, plan, graph, **loss)


def test_a_network_that_trains_what_its_plan_freezes_is_refused():
    problem = make_problem(zoo.build(MODEL), 2, BATCH, {"fix": {"pp": 1}}, frozen=("wte*",))
    with pytest.raises(PlanError, match=r"frozen .*requires_grad_\(False\)") as fault:
        parallelize(build(), expert_plan(problem, tp=2), zoo.build(MODEL))
    assert fault.value.field == "module.wte.weight"


def test_constants_without_a_value_are_refused():
    """Exporters lose the values of tensors that code makes on the way."""
    graph, module = zoo.build(MODEL), build()
    lost = replace(graph.tensors["wpe.weight"], name="h.0.attn.lifted", role="buffer")
    holed = replace(graph, tensors={**graph.tensors, lost.name: lost})
    with pytest.raises(PlanError, match="no value of it") as fault:
        GraphTrainer(
            module, plan_of(2), holed, Whole.of(module, graph), FinerThanModules("", field="", value=0, repair="")
        )
    assert fault.value.field == "model.h.0.attn.lifted"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_and_evaluation_may_differ_by_rounding(dtype):
    """torch evaluates encoder layers by a kernel of its own; a dropout is more than that."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 16, dtype=dtype)
    for p, are_equal in ((0.0, True), (0.001, False)):
        layer = torch.nn.TransformerEncoderLayer(16, 2, 256, p, batch_first=True, dtype=dtype)
        with torch.no_grad():
            trained, scores = layer.train()(x), layer.eval()(x)
        assert computes_alike(trained, scores) == are_equal


def test_no_view_is_sent_to_the_next_stage():
    """Split backward passes detach what a stage sends in place, which torch refuses for views."""
    x = torch.randn(2, 3, 4, requires_grad=True)
    doubled = 2 * x
    for made in (doubled, doubled.flatten(1), doubled.transpose(1, 2)):
        sent = sent_on(made)
        assert torch.equal(sent, made) and sent.is_contiguous()
        (gradient,) = torch.autograd.grad(sent.sum(), x, retain_graph=True)
        assert torch.equal(gradient, torch.full_like(x, 2.0))
        sent.detach_()
    assert sent_on(doubled).data_ptr() == doubled.data_ptr()
