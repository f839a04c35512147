"""Small PyTorch models in the styles that exporters meet; each builder returns (module, example inputs)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 96, 16, 32, 4, 2


class Conv1D(nn.Module):
    """A linear layer as GPT-2 of Hugging Face writes it: addmm on a merged (batch, position) dim."""

    def __init__(self, out: int, width: int) -> None:
        super().__init__()
        self.out = out
        self.weight = nn.Parameter(torch.randn(width, out) * 0.02)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        size = (*x.size()[:-1], self.out)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size)


class FusedAttention(nn.Module):
    def __init__(self, width: int, heads: int, linear: type) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.c_attn = Conv1D(3 * width, width) if linear is Conv1D else nn.Linear(width, 3 * width)
        self.c_proj = Conv1D(width, width) if linear is Conv1D else nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.c_attn(x).split(self.width, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class Mlp(nn.Module):
    def __init__(self, width: int, linear: type) -> None:
        super().__init__()
        self.c_fc = Conv1D(4 * width, width) if linear is Conv1D else nn.Linear(width, 4 * width)
        self.c_proj = Conv1D(width, 4 * width) if linear is Conv1D else nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(functional.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, linear: type) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), FusedAttention(width, heads, linear)
        self.ln_2, self.mlp = nn.LayerNorm(width), Mlp(width, linear)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(
        self,
        linear: type,
        *,
        layers: int = LAYERS,
        vocabulary: int = VOCABULARY,
        length: int = LENGTH,
        width: int = WIDTH,
        heads: int = HEADS,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList([Block(width, heads, linear) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1), device=ids.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(width), RmsNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape
        y = self.input_layernorm(x)
        q = self.q_proj(y).view(b, t, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(y).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        v = self.v_proj(y).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        q, k = q * cos + rotate(q) * sin, k * cos + rotate(k) * sin
        repeats = self.heads // self.kv_heads
        k, v = (
            z[:, :, None].expand(b, self.kv_heads, repeats, t, self.size).reshape(b, self.heads, t, self.size)
            for z in (k, v)
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(self.size)
        mask = torch.full((t, t), float("-inf"), device=x.device).triu(1)
        probabilities = functional.softmax(scores + mask, dim=-1, dtype=torch.float32).to(q.dtype)
        x = x + self.o_proj((probabilities @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.post_attention_layernorm(x))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(functional.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([LlamaLayer(WIDTH, HEADS, HEADS // 2) for _ in range(layers)])
        self.norm, self.lm_head = RmsNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("inv_freq", torch.ones(WIDTH // HEADS // 2), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        angles = (self.inv_freq[None, :, None].expand(1, -1, 1) @ positions[:, None, :].float()).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.intermediate, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm_out, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm(x + self.dropout(self.dense(y.transpose(1, 2).reshape(b, t, c))))
        return self.norm_out(x + self.dropout(self.output(functional.gelu(self.intermediate(x)))))


class Bert(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.types, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList([BertLayer(WIDTH, HEADS) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("position_ids", torch.arange(LENGTH)[None], persistent=False)
        self.register_buffer("token_type_ids", torch.zeros(1, LENGTH, dtype=torch.long), persistent=False)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        b, t = ids.shape
        kinds = self.token_type_ids[:, :t].expand(b, t)
        x = self.norm(self.words(ids) + self.positions(self.position_ids[:, :t]) + self.types(kinds))
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        mask = mask.expand(b, 1, t, t)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class VitAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        y = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class VitBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), VitAttention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), Mlp(width, nn.Linear)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos = nn.Parameter(torch.zeros(1, 17, WIDTH))
        self.blocks = nn.ModuleList([VitBlock(WIDTH, HEADS) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(x.shape[0], -1, -1), x), dim=1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Bottleneck(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.down = (
            nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))
            if stride != 1 or width != out
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(y)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.pool = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(Bottleneck(16, 16), Bottleneck(16, 16), Bottleneck(16, 32, 2), Bottleneck(32, 32))
        self.average, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.pool(functional.relu(self.bn(self.stem(image))))
        return self.fc(self.average(self.layers(x)).flatten(1))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def ids(batch: int) -> Tensor:
    return torch.zeros(batch, LENGTH, dtype=torch.long)


def build(name: str, batch: int = 1) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module `name` with inputs of `batch` samples."""
    if name == "gpt":
        return Gpt(Conv1D), (ids(batch),)
    if name == "gpt_linear":
        return Gpt(nn.Linear), (ids(batch),)
    if name == "llama":
        return Llama(), (ids(batch),)
    if name == "bert":
        return Bert(), (ids(batch), torch.ones(batch, LENGTH, dtype=torch.long))
    if name == "vit":
        return Vit(), (torch.zeros(batch, 3, 32, 32),)
    if name == "resnet":
        return ResNet(), (torch.zeros(batch, 3, 32, 32),)
    if name == "mlp":
        return Perceptron(), (torch.zeros(batch, 24),)
    raise KeyError(name)


NAMES = ("gpt", "gpt_linear", "llama", "bert", "vit", "resnet", "mlp")
