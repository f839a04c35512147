"""What ranks do in the test of the loader of plain PyTorch; imported once by the process that they are forked from."""

import functools
import importlib.util
import os
import random
import sys
import traceback
from pathlib import Path

import forked_ranks
import numpy as np
import rank_device
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from trainer_ranks import EXAMPLE

SIZES = {"layers": 4, "hidden": 16, "heads": 4, "seq_len": 8, "vocab_size": 24}
MODEL = "gpt:" + ",".join(f"{key}={value}" for key, value in SIZES.items())
BATCH, STEPS = 8, 2
FROZEN = " with frozen layers"
"""End of the name of a case whose embeddings and first two layers are not trained: the first of two stages."""

TRANSPOSED = " as Conv1D"
"""End of the name of a case whose linear layers are modules as those of transformers' GPT-2."""


class Conv1D(torch.nn.Module):
    """A linear layer with its weight transposed: the class of transformers, which is known by its name."""

    def __init__(self, layer):
        super().__init__()
        self.nf, self.bias = layer.out_features, layer.bias
        self.weight = torch.nn.Parameter(layer.weight.detach().T.contiguous())

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


def build(**other):
    """The network of the example, with values far from any symmetry; `other` are other sizes."""
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    gpt = module.Gpt(**{**SIZES, **other})
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return gpt


def network(case):
    """The network of a case."""
    gpt = build()
    if case.endswith(FROZEN):
        for part in (gpt.wte, gpt.wpe, *gpt.h[:2]):
            part.requires_grad_(False)
    for block in gpt.h if case.endswith(TRANSPOSED) else ():
        for part in (block.attn, block.mlp):
            for name, layer in list(part.named_children()):
                if isinstance(layer, torch.nn.Linear):
                    setattr(part, name, Conv1D(layer))
    return gpt


def loss_of(scores, labels):
    return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def batch():
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, SIZES["vocab_size"], (BATCH, SIZES["seq_len"]), generator=generator) for _ in range(2)]


def losses_of_one(case=""):
    """[steps] losses of one process."""
    gpt, (ids, labels) = network(case), batch()
    optimizer = torch.optim.SGD(gpt.parameters(), lr=1.0)
    found = []
    for _ in range(STEPS):
        loss = loss_of(gpt(ids), labels)
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def loader_of(folder):
    """The loader in a folder, which finds the file beside it by its name."""
    sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location("plan_loader", Path(folder) / "plan_loader.py")
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    return loader


def train(folder):
    """[steps] losses by the plan in a folder, whose own loader is used."""
    training = loader_of(folder).Training(network(folder.name), loss_of)
    optimizer = torch.optim.SGD(training.parameters(), lr=1.0)
    mine = [some.chunk(training.replicas)[training.replica] for some in batch()]
    found = []
    for _ in range(STEPS):
        found.append(training.step(*mine))
        optimizer.step()
        optimizer.zero_grad()
    return found


def literal(gpt):
    """The network with numbers in its code where a rank has a part of them: of queries, keys and values."""

    def forward(attention, x):
        q, k, v = attention.c_attn(x).split(SIZES["hidden"], dim=2)
        q, k, v = (y.unflatten(2, (-1, SIZES["hidden"] // SIZES["heads"])).transpose(1, 2) for y in (q, k, v))
        return attention.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    for block in gpt.h:
        block.attn.forward = functools.partial(forward, block.attn)
    return gpt


def refusals(folder, small):
    """The errors by the plan in a folder, which splits weights: data, code and modules that do not fit it. The last one
    is of a plan for fewer processes, in another folder."""
    loader = loader_of(folder)
    other = build()
    if dist.get_rank():
        other.h[1].attn.c_proj.bias = None
    shifted = build()
    with torch.no_grad():
        shifted.h[2].mlp.c_fc.weight.add_(dist.get_rank())
    found = []
    for module, data, plan in (
        (build(), [x[: BATCH - 3] for x in batch()], folder),
        (literal(build()), batch(), folder),
        (other, batch(), folder),
        (shifted, batch(), folder),
        (build(), batch(), small),
    ):
        try:
            loader.Training(module, loss_of, Path(plan)).step(*data)
        except ValueError as refused:
            found.append(str(refused))
    return found


def numbers(folder):
    """For each folder in a folder, by its plan: what a process draws from torch, numpy and Python, each of which a
    script has seeded alike on all processes."""
    found = {}
    for plan in sorted(Path(folder).iterdir()):
        np.random.seed(0)
        random.seed(0)
        loader_of(plan).Training(build(), loss_of, plan)
        found[plan.name] = [torch.rand(8).tolist(), np.random.rand(8).tolist(), [random.random() for _ in range(8)]]
    return found


def _rank(rank, size, folder, cases):
    torch.set_num_threads(1)
    rank_device.meet(rank, size, folder)
    found = []
    for case in cases:
        try:
            found.append(train(folder / case))
        except Exception:
            found.append(traceback.format_exc())  # the parent judges it
            break
    torch.save(found, folder / f"{rank}.pt")
    os._exit(0)


def run_ranks(size, folder, cases):
    """[rank][case] losses, or a traceback, after which nothing more was run."""
    forked_ranks.start(_rank, size, Path(folder), cases)
    return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]
