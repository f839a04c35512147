"""Layers of experts in PyTorch, as people write them and as exporters can read them; `build` returns (module, inputs).

All have a router, `TOP` of `EXPERTS` experts a token, and residual layers between an embedding and a head.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, LENGTH, WIDTH, FFN, EXPERTS, TOP = 80, 12, 32, 48, 4, 2


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, EXPERTS, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = functional.softmax(self.linear(x), dim=-1)
        weights, chosen = torch.topk(scores, TOP, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen


class OneByOne(Router):
    """The second expert is the best of those that the first choice leaves; each weight is of its own softmax."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.linear(x)
        first = scores.argmax(-1, keepdim=True)
        rest = scores.scatter(-1, first, float("-inf"))
        second = rest.argmax(-1, keepdim=True)
        weights = [functional.softmax(s, -1).gather(-1, i) for s, i in ((scores, first), (rest, second))]
        return torch.cat(weights, -1), torch.cat((first, second), -1)


class Stacked(nn.Module):
    """All experts of a layer in three parameters."""

    def __init__(self, *, bias: bool = False, router: type[Router] = Router) -> None:
        super().__init__()
        self.router = router()
        self.gate_up = nn.Parameter(0.02 * torch.randn(EXPERTS, 2 * FFN, WIDTH))
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, WIDTH, FFN))
        self.bias = nn.Parameter(0.02 * torch.randn(EXPERTS, WIDTH)) if bias else None

    def flat(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens = x.reshape(-1, WIDTH)
        return (tokens, *self.router(tokens))


class LookedUp(Stacked):
    """transformers' `batched_mm`: each routed token with a copy of its expert's weights."""

    def forward(self, x: Tensor) -> Tensor:
        tokens, weights, chosen = self.flat(x)
        index = chosen.reshape(-1)
        repeated = tokens.repeat_interleave(TOP, dim=0)
        y = torch.bmm(self.gate_up[index], repeated.unsqueeze(-1)).squeeze(-1)
        gate, up = y.chunk(2, dim=-1)
        y = torch.bmm(self.down[index], (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        if self.bias is not None:
            y = y + self.bias[index]
        y = y * weights.reshape(-1, 1)
        return y.view(-1, TOP, WIDTH).sum(1).reshape(x.shape)


class Indexed(Stacked):
    """Tokens looked up by a list of indices, results added to them by the same."""

    def forward(self, x: Tensor) -> Tensor:
        tokens, weights, chosen = self.flat(x)
        rows = torch.arange(len(tokens), device=x.device).unsqueeze(1).expand(-1, TOP).reshape(-1)
        index = chosen.reshape(-1)
        y = torch.bmm(self.gate_up[index], tokens[rows].unsqueeze(-1)).squeeze(-1)
        gate, up = y.chunk(2, dim=-1)
        y = torch.bmm(self.down[index], (functional.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        y = torch.zeros_like(tokens).index_add(0, rows, y * weights.reshape(-1, 1))
        return y.reshape(x.shape)


class LookedUpTransposed(nn.Module):
    """The same with weights `[e, h, f]` to the right of their tokens, and one activation (gpt-oss writes so)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.up, self.up_bias = (
            nn.Parameter(0.02 * torch.randn(EXPERTS, WIDTH, FFN)),
            nn.Parameter(0.02 * torch.randn(EXPERTS, FFN)),
        )
        self.down = nn.Parameter(0.02 * torch.randn(EXPERTS, FFN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        y = x[:, :, None, None, :] @ self.up[chosen]
        y = functional.gelu(y + self.up_bias[chosen].unsqueeze(-2))
        y = (y @ self.down[chosen]).squeeze(-2)
        return (y * weights.unsqueeze(-1)).sum(2)


class LookedUpEinsum(nn.Module):
    """Weights looked up and multiplied by Einsum (gpt-fast writes so)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.w1, self.w3 = (nn.Parameter(0.02 * torch.randn(EXPERTS, FFN, WIDTH)) for _ in range(2))
        self.w2 = nn.Parameter(0.02 * torch.randn(EXPERTS, WIDTH, FFN))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens)
        gate = functional.silu(torch.einsum("ti,taoi->tao", tokens, self.w1[chosen]))
        up = torch.einsum("ti,taoi->tao", tokens, self.w3[chosen])
        y = torch.einsum("tao,taio->tai", gate * up, self.w2[chosen])
        return torch.einsum("tai,ta->ti", y, weights).reshape(x.shape)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN)
        self.down = nn.Linear(FFN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Loop(nn.Module):
    """Every expert sees every token; `scattered` weights are zero for most."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        scattered = torch.zeros(*x.shape[:-1], EXPERTS, device=x.device).scatter(-1, chosen, weights)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + scattered[..., i : i + 1] * expert(x)
        return y


class MaskedLoop(Loop):
    """The weight of an expert is picked by comparing indices, on merged tokens; a shared expert is added first."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Expert()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens)
        y = self.shared(tokens)
        for i, expert in enumerate(self.experts):
            y = y + (weights * (chosen == i)).sum(-1, keepdim=True) * expert(tokens)
        return y.reshape(x.shape)


class WhereLoop(Loop):
    """Likewise with a choice by condition."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        y = None
        for i, expert in enumerate(self.experts):
            own = torch.where(chosen == i, weights, torch.zeros_like(weights)).sum(-1)
            part = expert(x) * own.unsqueeze(-1)
            y = part if y is None else y + part
        return y


class RoutedLoop(Loop):
    """Each expert reads only the tokens that chose it, and its results are added to their rows (DeepSeek writes so)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens)
        y = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            rows, choices = torch.where(chosen == i)
            y[rows] += expert(tokens[rows]) * weights[rows, choices, None]
        return y.reshape(x.shape)


class RoutedByTable(Loop):
    """Likewise with one table of all masks, `[experts, choices, tokens]` (transformers' Mixtral wrote so)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens)
        y = torch.zeros_like(tokens)
        masks = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        for mask, expert in zip(masks, self.experts, strict=True):
            choices, rows = torch.where(mask)
            read = tokens[None, rows].reshape(-1, WIDTH)
            y.index_add_(0, rows, (expert(read) * weights[rows, choices, None]).to(y.dtype))
        return y.reshape(x.shape)


class StackedLoop(Loop):
    """Results of all experts stacked, times weights from a one-hot table, summed."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        table = (functional.one_hot(chosen, EXPERTS).to(x.dtype) * weights.unsqueeze(-1)).sum(-2)
        results = torch.stack([expert(x) for expert in self.experts], dim=-2)
        return (results * table.unsqueeze(-1)).sum(-2)


class RoutedByMask(Loop):
    """Each expert reads the tokens of a mask, and is weighted by its column of a table (makeMoE writes so)."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        table = torch.zeros(*x.shape[:-1], EXPERTS, device=x.device).scatter(-1, chosen, weights).view(-1, EXPERTS)
        y, tokens = torch.zeros_like(x), x.reshape(-1, WIDTH)
        for i, expert in enumerate(self.experts):
            own = (chosen == i).any(dim=-1)
            mask = own.view(-1)
            y[own] += expert(tokens[mask]) * table[mask, i].unsqueeze(1)
        return y


class RoutedByChoice(Loop):
    """Each expert is run once for the tokens of each choice, with the mask written out at every use."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens)
        y = torch.zeros_like(tokens)
        for k in range(TOP):
            for i, expert in enumerate(self.experts):
                part = weights[chosen[:, k] == i, k].unsqueeze(-1) * expert(tokens[chosen[:, k] == i])
                y[chosen[:, k] == i] = y[chosen[:, k] == i] + part
        return y.reshape(x.shape)


class RoutedCopies(Loop):
    """Experts compute copies of the tokens, one for each choice, which are weighted at last (Mixtral's first code)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.router(tokens)
        copies, flat = tokens.repeat_interleave(TOP, dim=0), chosen.view(-1)
        y = torch.zeros_like(copies)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(copies[flat == i])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).reshape(x.shape)


class RoutedOne(Loop):
    """The best expert of each token, with its weight (Switch Transformer writes so)."""

    top = 1

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = functional.softmax(self.router.linear(x), dim=-1).max(dim=-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            y[mask] = weights[mask].unsqueeze(-1) * expert(x[mask])
        return y


class RoutedOneUnweighted(RoutedOne):
    """Likewise, with the weights behind the sum."""

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = functional.softmax(self.router.linear(x), dim=-1).max(dim=-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y[chosen == i] = expert(x[chosen == i])
        return y * weights.unsqueeze(-1)


class NoisyLoop(Loop):
    """Scores of experts that were not chosen are minus infinity before the softmax (Shazeer et al. 2017)."""

    def forward(self, x: Tensor) -> Tensor:
        best, chosen = torch.topk(self.router.linear(x), TOP, dim=-1)
        low = torch.full((*x.shape[:-1], EXPERTS), float("-inf"), device=x.device)
        table = functional.softmax(low.scatter(-1, chosen, best), dim=-1)
        return sum(table[..., i].unsqueeze(-1) * expert(x) for i, expert in enumerate(self.experts))


class Dense(Stacked):
    """Every expert on every token in one batched product (gpt-oss writes so)."""

    def forward(self, x: Tensor) -> Tensor:
        tokens, weights, chosen = self.flat(x)
        table = torch.zeros(len(tokens), EXPERTS, device=x.device).scatter(1, chosen, weights)
        y = torch.bmm(tokens.expand(EXPERTS, -1, -1), self.gate_up.transpose(1, 2))
        gate, up = y.chunk(2, dim=-1)
        y = torch.bmm(functional.silu(gate) * up, self.down.transpose(1, 2))
        if self.bias is not None:
            y = y + self.bias[:, None]
        return (y * table.transpose(0, 1).unsqueeze(-1)).sum(0).reshape(x.shape)


class WeightedFirst(Stacked):
    """Every expert on a copy of every token, which is weighted in front of it by zero for most (Llama 4 writes so)."""

    top = 1

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        best, chosen = torch.topk(self.router.linear(tokens), self.top, dim=1)
        table = torch.full((len(tokens), EXPERTS), float("-inf"), device=x.device).scatter(1, chosen, best).sigmoid()
        copies = tokens.repeat(EXPERTS, 1) * table.transpose(0, 1).reshape(-1, 1)
        gate, up = torch.bmm(copies.view(EXPERTS, -1, WIDTH), self.gate_up.transpose(1, 2)).chunk(2, dim=-1)
        y = torch.bmm(functional.silu(gate) * up, self.down.transpose(1, 2)).view(-1, WIDTH)
        return y.view(EXPERTS, -1, WIDTH).sum(0).reshape(x.shape)


class WeightedFirstTwo(WeightedFirst):
    """Two experts a token: their weights differ, so that tokens cannot be weighted before they are sent."""

    top = 2


class Soft(Loop):
    """No token is routed: all experts count. This is no mixture to be dispatched."""

    def forward(self, x: Tensor) -> Tensor:
        scores = functional.softmax(self.router.linear(x), dim=-1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            y = y + scores[..., i : i + 1] * expert(x)
        return y


class Odd(LookedUp):
    """Results are sorted by feature: that has no meaning on slots that the rewrite knows of."""

    def forward(self, x: Tensor) -> Tensor:
        tokens, weights, chosen = self.flat(x)
        index = chosen.reshape(-1)
        y = torch.bmm(self.gate_up[index], tokens.repeat_interleave(TOP, dim=0).unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.down[index], y.topk(FFN, dim=-1).values.unsqueeze(-1)).squeeze(-1)
        return (y * weights.reshape(-1, 1)).view(-1, TOP, WIDTH).sum(1).reshape(x.shape)


LAYERS = {
    "looked_up": LookedUp,
    "looked_up_bias": lambda: LookedUp(bias=True),
    "looked_up_one_by_one": lambda: LookedUp(router=OneByOne),
    "looked_up_indexed": Indexed,
    "looked_up_transposed": LookedUpTransposed,
    "looked_up_einsum": LookedUpEinsum,
    "loop": Loop,
    "masked_loop": MaskedLoop,
    "where_loop": WhereLoop,
    "routed_loop": RoutedLoop,
    "routed_by_table": RoutedByTable,
    "routed_by_mask": RoutedByMask,
    "routed_by_choice": RoutedByChoice,
    "routed_copies": RoutedCopies,
    "routed_one": RoutedOne,
    "routed_one_unweighted": RoutedOneUnweighted,
    "noisy_loop": NoisyLoop,
    "stacked_loop": StackedLoop,
    "dense": lambda: Dense(bias=True),
    "weighted_first": WeightedFirst,
    "weighted_first_two": WeightedFirstTwo,
    "soft": Soft,
    "odd": Odd,
}


class Mixture(nn.Module):
    def __init__(self, name: str, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(layers)])
        self.layers = nn.ModuleList([LAYERS[name]() for _ in range(layers)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def build(name: str, batch: int = 1, layers: int = 2) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module with layers of the form `name`, and its inputs for `batch` samples."""
    return Mixture(name, layers), (torch.zeros(batch, LENGTH, dtype=torch.long),)
