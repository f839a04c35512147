"""Networks of which a part is frozen, for tests that export them, price them and run them."""

import torch
from torch import nn
from torch.nn import functional

SIZE, HEADS, LAYERS, WORDS, TOKENS, RANK = 16, 2, 3, 64, 8, 4


class Adapter(nn.Module):
    """A linear layer with a product of two small matrices beside it (LoRA, arXiv 2106.09685)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a, self.lora_b = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


class Layer(nn.Module):
    """A layer of a transformer with adapters at queries and values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.q, self.v = Adapter(SIZE, SIZE), Adapter(SIZE, SIZE)
        self.k, self.o = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.up, self.down = nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        y = self.norm(x)
        q, k, v = (f(y).view(samples, tokens, HEADS, SIZE // HEADS).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / (SIZE // HEADS) ** 0.5
        mixed = torch.softmax(scores, -1) @ v
        x = x + self.o(mixed.transpose(1, 2).reshape(samples, tokens, SIZE))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A small transformer with adapters; `tied`: whether its head is its embedding."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, SIZE), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(SIZE), nn.Linear(SIZE, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Encoded(nn.Module):
    """An encoder of linear layers before a head of two."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


def freeze(module: nn.Module, *trained: str) -> nn.Module:
    """The module with all parameters frozen but those whose names hold one of some texts."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(text in name for text in trained))
    return module
