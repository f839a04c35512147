"""A network that leaves out whole blocks as its samples or random numbers say, and what ranks do with it in tests."""

import json
import random
from pathlib import Path

import one_process
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
import trainer_ranks
from torch import nn

from automap.export import plan_loader
from automap.plan import Plan
from automap.runtime.trainer import parallelize
from ir.zoo.net import Net

WIDTH, CLASSES, BATCH, BLOCKS = 8, 5, 8, 4
STEPS = 3


class Gated(nn.Module):
    """Blocks, in lists of lists, of which each sees some of the samples: none of those of some ranks, in some steps."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.h = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)) for _ in range(BLOCKS // 2))
        self.last, self.rate = nn.Linear(WIDTH, CLASSES), rate

    def forward(self, x):
        chosen = x[:, :BLOCKS] > 0
        for number, block in enumerate(block for some in self.h for block in some):
            some = chosen[:, number].nonzero()[:, 0]
            if len(some) and torch.rand([]) >= self.rate:
                x = x.index_add(0, some, block(x[some]).tanh())
        return self.last(x)


def graph():
    """A graph with the names and the order of the parameters: plans need no more of it."""
    net = Net()
    x = net.builder.input("x", (1, WIDTH))
    for number in range(BLOCKS):
        x = net.add(x, net.op("Tanh", [net.linear(x, f"h.{number // 2}.{number % 2}", WIDTH)]))
    return net.finish(net.linear(x, "last", CLASSES), loss="cross_entropy")


def network(rate=0.0):
    """The network, the same in every process."""
    torch.manual_seed(0)
    return Gated(rate).double()


def batch(step):
    """Inputs and labels; which blocks a sample sees is written on it, and nobody sees the last one in step 2."""
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(BATCH, WIDTH, generator=generator, dtype=torch.float64) + 0.1
    seen = torch.zeros(BATCH, BLOCKS, dtype=torch.bool)
    seen[: BATCH // 4, 0] = seen[BATCH // 2 :, 1] = seen[::4, 2] = True
    seen[-1, 3] = step != 2
    x[:, :BLOCKS] *= torch.where(seen, 1.0, -1.0)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def optimizer_of(parameters):
    """An optimizer that changes weights and moments also where gradients are zero."""
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def of_one_process():
    """Losses of all steps, and the loss of an evaluation."""
    module = network()
    return one_process.losses(module, optimizer_of(module.parameters()), batch, STEPS)


def train(documents):
    """[plans] losses as those of `of_one_process`; if blocks are left out at random, only those of the last step."""
    found = []
    for document in documents:
        for rate in (0.0, 0.5):
            trainer = parallelize(network(rate), Plan.from_json(document), graph())
            assert not trainer.why
            torch.manual_seed(dist.get_rank())
            optimizer, losses = optimizer_of(trainer.parameters()), []
            for step in range(STEPS):
                losses.append(trainer.step(*(x[trainer.rows] for x in batch(step))))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(trainer.evaluate(*(x[trainer.rows] for x in batch(STEPS)))[0])
            found.append(losses)
    return found


def train_split(documents):
    """[plans] losses, calls of blocks in each step, and a weight that all ranks hold whole, of layers that are split.

    Processes begin with random numbers of their own.
    """
    found = []
    for document in documents:
        gpt, called = trainer_ranks.build(), []
        trainer_ranks.dropping(gpt, by_hand=False)
        gpt.h.__class__ = LayerDrop
        for block in gpt.h:
            block.register_forward_pre_hook(lambda *unused, called=called: called.append(1))
        random.seed(dist.get_rank())
        trainer = parallelize(gpt, Plan.from_json(document), trainer_ranks.graph_of(""))
        assert not trainer.why
        optimizer, losses = optimizer_of(trainer.parameters()), []
        for step in range(STEPS):
            called.clear()
            losses.append(trainer.step(*(x[trainer.rows] for x in trainer_ranks.batch(step))))
            losses.append(float(len(called)))
            optimizer.step()
            optimizer.zero_grad()
        norm = dict(trainer.module.named_parameters())["ln_f.weight"]
        found.append([*losses, *norm.tolist()])
    return found


class LayerDrop(nn.Sequential):
    """Layers of which half are left out, by Python's random numbers as in MusicGen."""

    def forward(self, x):
        for block in self:
            if not self.training or random.uniform(0, 1) >= 0.5:
                x = block(x)
        return x


def load(folder):
    """[ZeRO 0, 2, 3] the same losses by the loader of plain PyTorch."""
    found = []
    for zero in (0, 2, 3):
        shape = [1, 1, 2, 1] if zero else [1, 2, 1, 1]
        plan = {
            "mesh": {"dim_names": ["pipe", "replicate", "shard", "tensor"], "shape": shape},
            "layers": [f"h.{number}" for number in range(BLOCKS // 2)],
            **{"global_batch": BATCH, "num_micro_batches": 2, "zero": zero, "precision": "fp32"},
            **{"recompute": [], "tensor_parallel": {}, "loss_parallel": False, "stages": [[]], "inputs": []},
        }
        if dist.get_rank() == 0:
            Path(folder, "pytorch.json").write_text(json.dumps(plan))
        dist.barrier()
        for rate in (0.0, 0.5):
            training = plan_loader.Training(network(rate), F.cross_entropy, Path(folder))
            torch.manual_seed(dist.get_rank())
            optimizer, losses = optimizer_of(training.parameters()), []
            for step in range(STEPS + 1):
                losses.append(training.step(*(x.chunk(2)[training.replica] for x in batch(step))))
                optimizer.step()
                optimizer.zero_grad()
            found.append(losses)
        dist.barrier()
    return found
