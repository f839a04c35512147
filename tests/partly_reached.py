"""A network of which no step reaches all parameters, and what ranks do with it in tests."""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from automap.plan import Plan
from automap.runtime.trainer import parallelize
from ir.zoo.net import Net

WIDTH, CLASSES, BATCH = 8, 5, 8
STEPS = 4


class Routed(nn.Module):
    """Two experts of which each sample sees one, a branch without gradient, and a parameter of a single number."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.still = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.rate = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        y = torch.zeros_like(x)
        for expert, chosen in ((self.left, x[:, 0] > 0), (self.right, x[:, 0] <= 0)):
            if chosen.any():
                y = y.index_put((chosen.nonzero()[:, 0],), expert(x[chosen]))
        return x + self.rate * y + self.still(x).detach()


class Partly(nn.Module):
    """A network with `Routed`, and a layer that nothing calls."""

    def __init__(self):
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, CLASSES)
        self.routed, self.behind = Routed(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        # The first feature, by which samples are routed, is that of the input.
        x = torch.cat([x[:, :1], self.first(x)[:, 1:]], dim=1)
        return self.last(self.behind(self.routed(x)))


def graph():
    """A graph of the parameters that the scores depend on: plans need their names and their order."""
    net = Net()
    x = net.linear(net.builder.input("x", (1, WIDTH)), "first", WIDTH)
    y = [net.linear(x, f"routed.{name}", WIDTH) for name in ("left", "right", "still")]
    y[0] = net.op("Mul", [y[0], net.parameter("routed.rate")], "routed")
    x = net.add(net.add(x, y[0], "routed"), net.add(y[1], y[2], "routed"), "routed")
    return net.finish(net.linear(net.linear(x, "behind", WIDTH), "last", CLASSES), loss="cross_entropy")


def network():
    """The network, the same in every process."""
    torch.manual_seed(0)
    return Partly().double()


def batch(step):
    """Inputs and labels; in step 1 the second half of the samples sees the left expert, in step 2 all see the right."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    sides = {1: torch.arange(BATCH) >= BATCH // 2, 2: torch.zeros(BATCH, dtype=torch.bool)}
    if step in sides:
        x[:, 0] = torch.where(sides[step], 1.0, -1.0) * x[:, 0].abs()
    return x, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def optimizer_of(parameters):
    """An optimizer that changes weights and moments also where gradients are zero."""
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)


def of_one_process():
    """Weights after all steps."""
    module = network()
    optimizer = optimizer_of(module.parameters())
    for step in range(STEPS):
        x, labels = batch(step)
        F.cross_entropy(module(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def train(documents, folder):
    """Trains by each plan, then its last step by each plan from the checkpoint of the one before it in the list."""
    every = range(len(documents))
    for number, resumed in (*((n, None) for n in every), *((n, n - 1) for n in every)):
        trainer = parallelize(network(), Plan.from_json(documents[number]), graph())
        assert not trainer.why
        optimizer = optimizer_of(trainer.parameters())
        first = 0
        if resumed is not None:
            first = trainer.load(f"{folder}/middle {resumed % len(documents)}", optimizer, step=0)["step"]
        for step in range(first, STEPS):
            trainer.step(*(x[trainer.rows] for x in batch(step)))
            optimizer.step()
            optimizer.zero_grad()
            if step == STEPS - 2:
                trainer.save(f"{folder}/middle {number}", optimizer, step=step + 1)
        trainer.save(f"{folder}/{'trained' if resumed is None else 'resumed'} {number}", optimizer)
    return []
