"""An encoder whose samples come with a mask of padding, and how ranks train it."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from automap.plan import Plan
from automap.runtime.trainer import parallelize

SIZE, HEADS, WORDS, TOKENS, BATCH, STEPS = 32, 4, 64, 8, 4, 3


class Layer(nn.Module):
    """Attention, whose scores are lowered where the mask is 0, and an MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE) for _ in range(4))
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x, mask):
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, SIZE // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (SIZE // HEADS) ** 0.5 + (1.0 - mask[:, None, None].float()) * -1e4
        x = x + self.o((torch.softmax(scores, -1) @ v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Embedding, layers and head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, WORDS)

    def forward(self, tokens, mask):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def build():
    """The network, with values far from any symmetry."""
    torch.manual_seed(0)
    network = Encoder()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return network


def batch(samples=BATCH):
    """Tokens, masks and labels; samples have unequal lengths."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(WORDS, (samples, TOKENS), generator=generator) for _ in range(2))
    lengths = torch.arange(TOKENS - samples, TOKENS) + 1
    return tokens, (torch.arange(TOKENS) < lengths[:, None]).long(), labels


def losses_of_one():
    """[steps] losses of one process."""
    network, (*inputs, labels) = build(), batch()
    optimizer, found = torch.optim.SGD(network.parameters(), lr=0.5), []
    for _ in range(STEPS):
        loss = F.cross_entropy(network(*inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def losses(folder):
    """[steps] losses by the plan in a folder, and 1 if modules are trained by it."""
    plan = Plan.from_json(json.loads((Path(folder) / "plan.json").read_text()))
    trainer = parallelize(build(), plan, Path(folder) / "model.onnx")
    optimizer, found = torch.optim.SGD([p for group in trainer.parameters() for p in group["params"]], lr=0.5), []
    for _ in range(STEPS):
        found.append(float(trainer.step(*(x[trainer.rows] for x in batch()))))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, float(type(trainer).__name__ == "ModuleTrainer")]
