"""Small PyTorch models of families other than the usual transformer; `build` returns (module, example inputs)."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, HEADS = 80, 12, 32, 4


class T5Norm(nn.Module):
    """Root mean square, decomposed as Hugging Face writes it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class T5Attention(nn.Module):
    def __init__(self, *, is_decoder: bool = False, has_bias: bool = False) -> None:
        super().__init__()
        self.is_decoder = is_decoder
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(8, HEADS) if has_bias else None

    def buckets(self, queries: int, keys: int, device: torch.device) -> Tensor:
        distance = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
        if self.is_decoder:
            base, num, distance = torch.zeros_like(distance), 8, -torch.min(distance, torch.zeros_like(distance))
        else:
            base, num, distance = (distance > 0).to(torch.long) * 4, 4, distance.abs()
        exact = num // 2
        far = exact + (torch.log(distance.float() / exact) / 2.0 * (num - exact)).to(torch.long)
        far = torch.min(far, torch.full_like(far, num - 1))
        return base + torch.where(distance < exact, distance, far)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        b, t, c = x.shape
        q = self.q(x).view(b, -1, HEADS, c // HEADS).transpose(1, 2)
        k, v = (f(source).view(b, -1, HEADS, c // HEADS).transpose(1, 2) for f in (self.k, self.v))
        scores = q @ k.transpose(3, 2)
        if self.relative_attention_bias is not None:
            places = self.buckets(t, source.shape[1], x.device)
            bias = self.relative_attention_bias(places).permute(2, 0, 1).unsqueeze(0)
            if self.is_decoder:
                mask = torch.full((t, t), torch.finfo(x.dtype).min, device=x.device).triu(1)
                bias = bias + mask[None, None]
        if bias is not None:
            scores = scores + bias
        weights = functional.softmax(scores.float(), dim=-1).type_as(scores)
        return self.o((weights @ v).transpose(1, 2).contiguous().view(b, -1, c)), bias


class T5Layer(nn.Module):
    def __init__(self, *, is_decoder: bool, is_first: bool) -> None:
        super().__init__()
        self.norm, self.attention = T5Norm(WIDTH), T5Attention(is_decoder=is_decoder, has_bias=is_first)
        if is_decoder:
            self.norm_cross, self.cross = T5Norm(WIDTH), T5Attention()
        self.norm_ff = T5Norm(WIDTH)
        self.wi, self.wo = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, memory: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        y = self.norm(x)
        y, bias = self.attention(y, y, bias)
        x = x + y
        if memory is not None:
            x = x + self.cross(self.norm_cross(x), memory, None)[0]
        return x + self.wo(functional.relu(self.wi(self.norm_ff(x)))), bias


class T5(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = (
            nn.ModuleList([T5Layer(is_decoder=d, is_first=i == 0) for i in range(2)]) for d in (False, True)
        )
        self.norm_encoder, self.norm_decoder = T5Norm(WIDTH), T5Norm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, ids: Tensor, decoder_ids: Tensor) -> Tensor:
        x, bias = self.shared(ids), None
        for layer in self.encoder:
            x, bias = layer(x, None, bias)
        memory, bias = self.norm_encoder(x), None
        x = self.shared(decoder_ids)
        for layer in self.decoder:
            x, bias = layer(x, memory, bias)
        return self.lm_head(self.norm_decoder(x) * WIDTH**-0.5)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(functional.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 4, 4), LayerNorm2d(16))
        self.first = nn.Sequential(ConvNextBlock(16), ConvNextBlock(16))
        self.down = nn.Sequential(LayerNorm2d(16), nn.Conv2d(16, 32, 2, 2))
        self.second = nn.Sequential(ConvNextBlock(32), ConvNextBlock(32))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.second(self.down(self.first(self.stem(image))))
        return self.head(self.norm(x.mean((-2, -1))))


def convolutions(width: int, out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in (width, out):
        layers += [nn.Conv2d(size, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Two ways up: a transposed convolution, and bilinear interpolation with a convolution behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.bottom = convolutions(3, 8), convolutions(8, 16), convolutions(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.up, self.left = nn.ConvTranspose2d(32, 16, 2, 2), convolutions(32, 16)
        self.resize = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.right, self.out = convolutions(24, 8), nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        a = self.enter(image)
        b = self.middle(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.left(torch.cat((self.up(c), b), 1))
        a = self.right(torch.cat((self.resize(b), a), 1))
        return self.out(functional.interpolate(a, scale_factor=2, mode="nearest"))


class Recurrent(nn.Module):
    def __init__(self, layer: type, *, batch_first: bool, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding, self.batch_first = nn.Embedding(VOCABULARY, 16), batch_first
        self.layers = layer(16, 24, num_layers=2, batch_first=batch_first, bidirectional=bidirectional)
        self.head = nn.Linear(24 * (1 + bidirectional), 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y, _ = self.layers(x if self.batch_first else x.transpose(0, 1))
        return self.head(y[:, -1] if self.batch_first else y[-1])


class Recommender(nn.Module):
    """DLRM without bags: tables, a bottom perceptron, pairwise dots, a top perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(n, 16) for n in (100, 50, 200, 30)])
        self.bottom = nn.Sequential(nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 10, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
        rows, columns = torch.tril_indices(5, 5, -1, device="cpu").tolist()
        self.rows, self.columns = rows, columns

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked = [table(sparse[:, i]) for i, table in enumerate(self.tables)]
        stacked = torch.cat([x, *looked], dim=1).view(x.shape[0], 5, 16)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.rows, self.columns]
        return self.top(torch.cat((x, dots), dim=1))


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm_tokens, self.norm_channels = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 24), nn.GELU(), nn.Linear(24, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm_tokens(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm_channels(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 20, 8, 8)
        self.blocks = nn.Sequential(MixerBlock(16, 20), MixerBlock(16, 20))
        self.norm, self.head = nn.LayerNorm(20), nn.Linear(20, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class Experts(nn.Module):
    """Mixture of experts as a dense loop: every expert sees every token, the router's weight is zero for most."""

    def __init__(self, num: int = 4, top: int = 2) -> None:
        super().__init__()
        self.top, self.gate = top, nn.Linear(WIDTH, num, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 48), nn.SiLU(), nn.Linear(48, WIDTH)) for _ in range(num)]
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = functional.softmax(self.gate(x), dim=-1)
        values, chosen = torch.topk(scores, self.top, dim=-1)
        values = values / values.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(-1, chosen, values)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + weights[..., i : i + 1] * expert(x)
        return y


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.layers = nn.ModuleList([Experts() for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def ids(batch: int) -> Tensor:
    return torch.zeros(batch, LENGTH, dtype=torch.long)


def image(batch: int) -> Tensor:
    return torch.zeros(batch, 3, 32, 32)


BUILDERS = {
    "t5": lambda n: (T5(), (ids(n), ids(n))),
    "convnext": lambda n: (ConvNext(), (image(n),)),
    "unet": lambda n: (UNet(), (image(n),)),
    "lstm": lambda n: (Recurrent(nn.LSTM, batch_first=True), (ids(n),)),
    "bilstm": lambda n: (Recurrent(nn.LSTM, batch_first=False, bidirectional=True), (ids(n),)),
    "gru": lambda n: (Recurrent(nn.GRU, batch_first=True), (ids(n),)),
    "recommender": lambda n: (Recommender(), (torch.zeros(n, 13), torch.zeros(n, 4, dtype=torch.long))),
    "mixer": lambda n: (Mixer(), (image(n),)),
    "experts": lambda n: (Mixture(), (ids(n),)),
}


def build(name: str, batch: int = 1) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module `name` with inputs of `batch` samples."""
    return BUILDERS[name](batch)
