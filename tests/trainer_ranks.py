"""What ranks do in the tests of the module trainer; imported once by the process that they are forked from."""

import collections
import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import traceback
import warnings
from pathlib import Path
from unittest import mock

import forked_ranks
import rank_device
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from automap.errors import PlanError
from automap.plan import Plan, parse_devices
from automap.runtime.trainer import IGNORED, entry, parallelize
from automap.runtime.trainer.role_reader import read_roles
from ir import zoo
from ir.factors import BROADCAST, PARTIAL
from ir.zoo.net import Net

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
SIZES = {"layers": 2, "hidden": 16, "heads": 4, "seq_len": 8, "vocab_size": 24}
MODEL = "gpt:" + ",".join(f"{key}={value}" for key, value in SIZES.items())
BATCH = 8


def build(**sizes):
    """The network of the example, with values far from any symmetry."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    gpt = module.Gpt(**{**SIZES, **sizes}).double()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return gpt


class Conv1D(nn.Module):
    """The linear layer of the transformers library: its weight is that of `nn.Linear` turned over."""

    def __init__(self, linear):
        super().__init__()
        self.weight, self.bias = nn.Parameter(linear.weight.detach().T.contiguous()), linear.bias

    def forward(self, x):
        return x @ self.weight + self.bias


OTHER = "Conv1D and RMSNorm"


FROZEN = "frozen"
"""Part of the name of a case whose embeddings and first block, except for its biases, are not trained."""
UNTRACED = "untraced"
COMPILED = "compiled"


def untraced(gpt):
    """The network with a forward that looks at its data, as those of transformers look at their arguments."""

    def forward(self, ids):
        if ids.min() < 0:
            raise ValueError
        return super(type(self), self).forward(ids)

    gpt.__class__ = type("Untraced", (type(gpt),), {"forward": forward})
    return gpt


def module_of(name):
    """The network of a case: with other layers, or another forward, where its name asks for them."""
    gpt = untraced(build()) if UNTRACED in name else build()
    if FROZEN in name:
        for path, parameter in gpt.named_parameters():
            parameter.requires_grad_(not path.startswith(("wte", "wpe", "h.0")) or path.endswith("bias"))
    if DROPOUT in name:
        dropping(gpt, by_hand=BY_HAND in name)
    if OTHER in name:
        for block in gpt.h:
            for part, layer in (
                (block.attn, "c_attn"),
                (block.attn, "c_proj"),
                (block.mlp, "c_fc"),
                (block.mlp, "c_proj"),
            ):
                setattr(part, layer, Conv1D(getattr(part, layer)))
        for part, layer in [(gpt, "ln_f"), *((block, f"ln_{i}") for block in gpt.h for i in (1, 2))]:
            norm = nn.RMSNorm(SIZES["hidden"], eps=1e-5).double()
            norm.weight = getattr(part, layer).weight
            setattr(part, layer, norm)
    return gpt


def graph_of(name):
    """The graph of the network of a case."""
    return _graph(OTHER in name)


@functools.cache
def _graph(is_other):
    with mock.patch.object(Net, "layer_norm", Net.rms_norm) if is_other else contextlib.nullcontext():
        return zoo.build(MODEL)


def count_heads(gpt, *, elsewhere=False):
    """The network with the number of heads in its code instead of their size: in attention, or in the block."""

    def forward(attention, holder, x):
        q, k, v = (y.unflatten(2, (holder.heads, -1)).transpose(1, 2) for y in attention.c_attn(x).chunk(3, dim=2))
        return attention.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    for block in gpt.h:
        holder = block if elsewhere else block.attn
        holder.heads = SIZES["heads"]
        block.attn.forward = functools.partial(forward, block.attn, holder)
    return gpt


def batch(seed=1):
    """Inputs and labels; samples have unequal numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SIZES["vocab_size"], (BATCH, SIZES["seq_len"]), generator=generator)
    labels = torch.randint(0, SIZES["vocab_size"], ids.shape, generator=generator)
    for sample in range(BATCH):
        labels[sample, : sample % 5] = IGNORED
    return ids, labels


GRAPH = "by the graph"
"""Part of the name of a plan that is finer than modules."""
DROPOUT = "dropout"
BY_HAND = "by hand"
"""Part of the name of a plan whose dropouts are written with functions that draw random numbers."""
SPLIT, WHOLE, CODE = "drop", "last", "kept"
"""The dropouts of `dropping`: on the features between the two layers of an MLP, on its result, and on the weights of
attention, by code of the module around."""


def attend(attention, x):
    """Causal attention with dropout of its weights; their mask can be seen in a module behind it."""
    q, k, v = (y.unflatten(2, (-1, attention.size)).transpose(1, 2) for y in attention.c_attn(x).chunk(3, dim=2))
    scores = (q @ k.transpose(2, 3) / math.sqrt(attention.size)).masked_fill(attention.later, -math.inf)
    drop = attention.drop if attention.drops else torch.Tensor.clone
    return attention.c_proj((attention.kept(drop(scores.softmax(3))) @ v).transpose(1, 2).flatten(2))


def drop_by(kind, rate, x):
    """A dropout written by hand."""
    keep = torch.full_like(x, 1 - rate)
    mask = {
        "bernoulli": lambda: torch.bernoulli(keep),
        "rand": lambda: torch.rand(x.shape) < keep,
        "uniform_": lambda: torch.empty_like(x).uniform_() < keep,
    }[kind]()
    return x * mask / keep


class ByHand(nn.Dropout):
    def __init__(self, rate, kind):
        super().__init__(rate)
        self.kind = kind

    def forward(self, x):
        return drop_by(self.kind, self.p, x) if self.training else x


def dropping(gpt, *, by_hand=False):
    """The network with dropout inside of its attention and its MLPs, and behind them."""

    def in_code(attention, x):
        if not by_hand:
            return F.dropout(x, attention.drops, attention.training)
        return drop_by("bernoulli", attention.drops, x) if attention.training else x

    for block in gpt.h:
        later = torch.ones(SIZES["seq_len"], SIZES["seq_len"], dtype=torch.bool).triu(1)
        block.attn.register_buffer("later", later, persistent=False)
        block.attn.kept, block.attn.drops = nn.Identity(), 0.3
        block.attn.kept.p, block.attn.drop = block.attn.drops, functools.partial(in_code, block.attn)
        block.attn.forward = functools.partial(attend, block.attn)
        up, act, down = block.mlp.children()
        between = {SPLIT: ByHand(0.3, "rand"), WHOLE: ByHand(0.4, "uniform_")} if by_hand else {}
        between = between or {SPLIT: nn.Dropout(0.3), WHOLE: nn.Dropout(0.4)}
        layers = {"c_fc": up, "act": act, SPLIT: between[SPLIT], "c_proj": down, WHOLE: between[WHOLE]}
        block.mlp = nn.Sequential(collections.OrderedDict(layers))
    return gpt


def masks(gpt, seen):
    """Notes what each dropout of a network keeps in its first pass of training, by path."""

    def note(path, child, args, y):
        if child.training:
            seen.setdefault(path, y.detach() != 0)

    for path, child in gpt.named_modules():
        if isinstance(child, nn.Dropout) or path.endswith(CODE):
            child.register_forward_hook(functools.partial(note, path))


OVERFLOW, HALF = "after an overflow", "weights of 4 bytes"


def overflow(trainer, optimizer):
    """A step in which the gradients of the last rank alone are not finite."""
    scale, last = trainer.scaling.scale, dist.get_rank() == dist.get_world_size() - 1
    trainer.scaling.scale = math.inf if last else scale
    trainer.step(*(x[trainer.rows] for x in batch(2)))
    assert all(p.grad is None for group in trainer.parameters() for p in group["params"])
    optimizer.step()
    assert trainer.scaling.num_skipped == 1
    assert trainer.scaling.scale == (math.inf if last else scale / 2.0)
    trainer.scaling.scale = scale / 2.0


def refuse_outside(trainer, plan):
    """A class and a row of a table that are not there, in the samples of one rank, are refused by all ranks."""
    where = slice(0, 1 if plan.sync.kind == "synchronous" else None), -1
    for place, number, field in ((0, -1, "data.ids"), (1, SIZES["vocab_size"], "data.labels")):
        data = batch()
        data[place][where] = number
        try:
            trainer.step(*(x[trainer.rows] for x in data))
        except PlanError as refused:
            assert f"{refused.field} {refused.value}" == f"{field} {number}", refused
        else:
            raise AssertionError("was not refused")


def check_evaluation(name, trainer):
    """The loss of a batch in evaluation, and the scores of this rank's samples, are those of one process."""
    module, (ids, labels) = module_of(name).eval(), batch(3)
    with torch.no_grad():
        wanted = module(ids)
    loss, scores = trainer.evaluate(ids[trainer.rows], labels[trainer.rows])
    near = 4e-3 if HALF in name else 1e-9
    if trainer.plan.sync.kind == "synchronous":
        one = float(F.cross_entropy(wanted.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))
        assert abs(loss - one) < near, (loss, one)
    is_last = dist.get_rank() in parse_devices(trainer.plan.stages[-1].devices)
    assert (scores is not None) == is_last, "scores come from the last stage"
    if scores is not None:
        error = (scores.cpu().double() - wanted[trainer.rows]).abs().max() / wanted.abs().max()
        assert error < near, error
    return loss


def run(name, document, folder, resume):
    """Losses of a step and, after it, of one more; weights in between are saved."""
    plan = Plan.from_json(document)
    graph, module, per_rank = graph_of(name), module_of(name), ()
    if name == "heads are counted":
        module = count_heads(module)
    if name == "heads are counted elsewhere":
        with contextlib.suppress(PlanError):
            parallelize(count_heads(build(), elsewhere=True), plan, graph)
            raise AssertionError("was not refused")
        module, per_rank = count_heads(module, elsewhere=True), ("h.?.heads",)
    for block in module.h if COMPILED in name else ():
        block.compile(backend="aot_eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = parallelize(module.float() if HALF in name else module, plan, graph, per_rank=per_rank)
    assert bool(trainer.why) == (GRAPH in name.partition(" of ")[0]), trainer.why
    assert (dist.get_rank() == 0 and bool(trainer.why)) == any("in place of the module" in str(w.message) for w in told)
    refuse_outside(trainer, plan)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=1.0, momentum=0.9)
    if OVERFLOW in name:
        overflow(trainer, optimizer)
    seen = {}
    if DROPOUT in name:
        torch.manual_seed(dist.get_rank())
        masks(trainer.module, seen)
    before = check_evaluation(name, trainer)
    step = trainer.load(Path(folder) / resume, optimizer, step=0)["step"] if resume else 1
    losses = []
    for number in range(step, 3):
        is_known = number == 2 and DROPOUT not in name and plan.sync.kind == "synchronous"
        loss = trainer.evaluate(*(x[trainer.rows] for x in batch(number)))[0] if is_known else None
        held = [p for group in trainer.parameters() for p in group["params"] if number == 1]
        for parameter in held:
            parameter.grad = torch.ones_like(parameter)
        with mock.patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as scattered:
            losses.append(trainer.step(*(x[trainer.rows] for x in batch(number))))
        assert loss is None or abs(loss - losses[-1]) < 1e-9, "evaluation does not see the weights of now"
        if number == 1:
            again = trainer.evaluate(*(x[trainer.rows] for x in batch(3)))[0]
            assert abs(again - before) < 1e-9, "evaluation sees other weights before the optimizer's step"
        for parameter in held:
            parameter.grad.sub_(1.0)
        stage = plan.stages[0].zero.stage
        rounds = 0 if stage == 0 else 1 if stage == 1 else plan.num_micro_batches
        assert trainer.why or rounds <= scattered.call_count, "gradients are kept whole"
        if number == 1:
            torch.save(trainer.clip_gradients(math.inf), Path(folder) / f"{name}.{dist.get_rank()}.norm")
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            trainer.save(Path(folder) / name, optimizer, step=2)
            torch.save(rank_device.on_cpu(seen), Path(folder) / f"{name}.{dist.get_rank()}.masks")
    return losses


def _rank(rank, size, folder, cases):
    torch.set_num_threads(1)
    rank_device.meet(rank, size, folder)
    found = []
    for case in cases:
        try:
            found.append(run(*case))
        except Exception:
            found.append(traceback.format_exc())  # the parent judges it
            break
    torch.save(found, Path(folder) / f"{rank}.pt")
    if len(found) == len(cases) and not isinstance(found[-1], str):
        dist.destroy_process_group()
    os._exit(0)


def run_ranks(size, cases, folder):
    """[rank][case] what `run` returns, or a traceback, after which nothing more was run."""
    forked_ranks.start(_rank, size, str(folder), cases)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]


def refusals(document, spoilt):
    """What the trainer says to a plan of the network, whose layers are split, when one thing is wrong.

    Args:
        document: the plan.
        spoilt: what is wrong in each try: "summed", no gradient is summed over ranks; "moves", gradients of inputs
            lack the terms of other ranks; "nothing".
    """
    found, plan = [], Plan.from_json(document)
    for what in spoilt:
        with mock.patch.object(entry, "read_roles", functools.partial(spoilt_roles, what)):
            try:
                parallelize(build(), plan, zoo.build(MODEL))
                found.append([""])
            except PlanError as fault:
                found.append([str(fault)])
    return found


def spoilt_roles(what, *given):
    """The roles of modules, of which one thing is wrong that only gradients show."""
    roles = read_roles(*given)
    if what == "summed":
        roles.summed.clear()
    for path, role in roles.modules.items() if what == "moves" else ():
        if role.enter is not None and role.enter.gradient == PARTIAL:
            enter = dataclasses.replace(role.enter, gradient=BROADCAST)
            roles.modules[path] = dataclasses.replace(role, enter=enter)
    return roles
