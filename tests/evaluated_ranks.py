"""A network with batch normalisation that ranks train and evaluate in tests."""

import torch
from torch import nn

from automap.plan import Plan
from automap.runtime.trainer import parallelize
from ir.zoo.net import Net

WIDTH, CLASSES, BATCH, STEPS = 8, 5, 8, 3


def network():
    """The network, the same in every process; its norm has no parameters, so that the graph can leave it out."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH, affine=False)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Dropout(0.5), nn.Linear(WIDTH, CLASSES)).double()


def graph():
    """The graph of the layers with parameters."""
    net = Net()
    x = net.linear(net.builder.input("x", (1, WIDTH)), "0", WIDTH)
    return net.finish(net.linear(x, "3", CLASSES), loss="cross_entropy")


def batch(number):
    """Inputs and labels; the two halves of the inputs have different means."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64) + torch.arange(BATCH)[:, None]
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def train(document, folder, *, often):
    """[loss, scores] of an evaluation after the training; with `often`, evaluations run between its steps as well."""
    torch.manual_seed(1)
    trainer = parallelize(network(), Plan.from_json(document), graph())
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.1)
    for step in range(STEPS):
        if often:
            trainer.evaluate(*(x[trainer.rows] for x in batch(10)))
        trainer.step(*(x[trainer.rows] for x in batch(step)))
        if often:
            trainer.evaluate(*(x[trainer.rows] for x in batch(11)))
        optimizer.step()
        optimizer.zero_grad()
    loss, scores = trainer.evaluate(*(x[trainer.rows] for x in batch(12)))
    trainer.save(folder, optimizer)
    assert trainer.module.training
    return [torch.tensor(loss, dtype=torch.float64), scores, trainer.rows]


def both(document, folder):
    """What `train` returns without and with evaluations between steps."""
    return [train(document, f"{folder}/{often}", often=often) for often in (False, True)]
