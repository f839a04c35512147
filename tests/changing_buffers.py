"""A network whose code changes buffers in training and reads them, and what ranks do with it in tests."""

import warnings

import one_process
import torch
from torch import nn

from automap.plan import Plan
from automap.runtime.trainer import parallelize
from ir.zoo.net import Net

WIDTH, CLASSES, BATCH, BLOCKS, STEPS = 8, 5, 8, 4, 3


class Block(nn.Module):
    """A layer whose results are centred by a moving average of those of the steps before."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("fixed", torch.full((WIDTH,), 0.1))

    def forward(self, x):
        y = self.fc(x)
        x = x + torch.tanh(y - self.average * self.fixed)
        if self.training:
            self.average = 0.5 * self.average + 0.5 * y.detach().mean(0)
        return x


class Averaging(nn.Module):
    """Blocks with moving averages."""

    def __init__(self):
        super().__init__()
        self.h, self.last = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return self.last(x)


def graph():
    """The graph of the network, as an exporter sees it in evaluation mode."""
    net = Net()
    x = net.builder.input("x", (1, WIDTH))
    for number in range(BLOCKS):
        scope = f"h.{number}"
        fixed = net.op("Mul", [net.buffer(f"{scope}.{name}", WIDTH) for name in ("average", "fixed")], scope)
        y = net.op("Sub", [net.linear(x, f"{scope}.fc", WIDTH), fixed], scope)
        x = net.add(x, net.op("Tanh", [y], scope), scope)
    return net.finish(net.linear(x, "last", CLASSES), loss="cross_entropy")


def network():
    """The network, the same in every process."""
    torch.manual_seed(0)
    return Averaging().double()


def batch(step):
    """Inputs and labels."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def of_one_process():
    """Losses of all steps and of an evaluation."""
    module = network()
    return one_process.losses(module, torch.optim.SGD(module.parameters(), lr=1.0), batch, STEPS)


def train(documents):
    """[plans] the losses of `of_one_process` by each plan, and the warnings of all plans."""
    found = []
    for document in documents:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer = parallelize(network(), Plan.from_json(document), graph())
        assert not trainer.why
        assert not any("computes something else" in str(one.message) for one in told)
        optimizer, losses = torch.optim.SGD(trainer.parameters(), lr=1.0), []
        for step in range(STEPS):
            losses.append(trainer.step(*(x[trainer.rows] for x in batch(step))))
            optimizer.step()
            optimizer.zero_grad()
        losses.append(trainer.evaluate(*(x[trainer.rows] for x in batch(STEPS)))[0])
        found.append(losses)
    return found
