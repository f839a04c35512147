"""A network with batch normalisation, and what ranks do with it in tests."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from automap.plan import Plan
from automap.runtime.trainer import parallelize
from ir.zoo.net import Net

WIDTH, CLASSES, BATCH, STEPS = 8, 5, 8, 3
FIXED = "running statistics"
"""The case whose normalisations are in evaluation mode."""


class Block(nn.Module):
    """A layer with a normalisation."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.fc(x)))


class Network(nn.Module):
    """Blocks and a head."""

    def __init__(self):
        super().__init__()
        self.h, self.last = nn.ModuleList(Block() for _ in range(4)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.last(x)


def graph():
    """The graph of the network."""
    net = Net()
    x = net.builder.input("x", (1, WIDTH))
    for number in range(4):
        scope = f"h.{number}"
        more = [net.parameter(f"{scope}.norm.{name}", WIDTH) for name in ("weight", "bias")]
        more += [net.buffer(f"{scope}.norm.running_{name}", WIDTH) for name in ("mean", "var")]
        y = net.op("BatchNormalization", [net.linear(x, f"{scope}.fc", WIDTH), *more], f"{scope}.norm", epsilon=1e-5)
        x = net.add(x, net.op("Tanh", [y], scope), scope)
    return net.finish(net.linear(x, "last", CLASSES), loss="cross_entropy")


def network(case):
    """The network of a case, the same in every process."""
    torch.manual_seed(0)
    module = Network().double()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm1d):
            part.training = case != FIXED
    return module


def batch(step):
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def of_one_process(case, parts):
    """Losses of all steps, where a batch is normalised in `parts` parts, each by its own statistics."""
    module, found = network(case), []
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for step in range(STEPS):
        x, labels = batch(step)
        loss = F.cross_entropy(torch.cat([module(part) for part in x.chunk(parts)]), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train(documents, cases):
    """[plans][cases] the losses of `of_one_process` by each plan."""
    found = []
    for document in documents:
        for case in cases:
            trainer = parallelize(network(case), Plan.from_json(document), graph())
            assert not trainer.why
            optimizer, losses = torch.optim.SGD(trainer.parameters(), lr=1.0), []
            for step in range(STEPS):
                losses.append(trainer.step(*(x[trainer.rows] for x in batch(step))))
                optimizer.step()
                optimizer.zero_grad()
            found.append(losses)
    return found
