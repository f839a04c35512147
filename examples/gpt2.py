"""GPT-2 in plain PyTorch, to be exported to ONNX without its weights.

    automap export-onnx examples/gpt2.py:gpt2_xl -o gpt2-xl.onnx

The model has learned positions, a fused query-key-value projection and an output layer that shares the weight of the
embedding. The functions at the end return a module and example inputs. `automap export-onnx` calls them on torch's meta
device, where parameters take no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT-2."""

    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int = 50257
    sequence: int = 1024


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.c_attn = nn.Linear(config.hidden, 3 * config.hidden)
        self.c_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """Attends to earlier positions.

        Args:
            x: [batch, sequence, hidden].
            future: [sequence, sequence], true where the key comes after the query.

        Returns:
            [batch, sequence, hidden].
        """
        batch, sequence, hidden = x.shape
        heads = (batch, sequence, self.num_heads, hidden // self.num_heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(hidden, dim=2))
        scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[-1]))
        weights = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return self.c_proj((weights @ v).transpose(1, 2).reshape(batch, sequence, hidden))


class Mlp(nn.Module):
    """The two linear layers of a block, with GELU between them."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden, 4 * config.hidden)
        self.c_proj = nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer layer: attention and MLP, each after a layer norm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same shape."""
        x = x + self.attn(self.ln_1(x), future)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """The whole decoder."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.hidden)
        self.wpe = nn.Embedding(config.sequence, config.hidden)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] integers to [batch, sequence, vocabulary] logits."""
        sequence = tokens.shape[1]
        position = torch.arange(sequence, device=tokens.device)
        future = position[None, :] > position[:, None]
        x = self.wte(tokens) + self.wpe(position)
        for block in self.h:
            x = block(x, future)
        return self.lm_head(self.ln_f(x))


def _build(config: Config) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return GPT2(config), (torch.zeros(1, config.sequence, dtype=torch.int64),)


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """GPT-2 with 124,439,808 parameters."""
    return _build(Config(num_layers=12, hidden=768, num_heads=12))


def gpt2_xl() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """GPT-2 XL with 1,557,611,200 parameters."""
    return _build(Config(num_layers=48, hidden=1600, num_heads=25))
