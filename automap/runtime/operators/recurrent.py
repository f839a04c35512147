"""LSTM, GRU and RNN as ONNX writes them, step by step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from automap.runtime.operators.base import Use, function, refuse

Activation = Callable[[Tensor], Tensor]
DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def _activation(name: str, alpha: float | None, beta: float | None) -> Activation:
    """The activation that ONNX calls `name`, case ignored; parameters that are None have the defaults of ONNX."""
    plain: dict[str, Activation] = {
        "relu": torch.relu,
        "tanh": torch.tanh,
        "sigmoid": torch.sigmoid,
        "softsign": functional.softsign,
        "softplus": functional.softplus,
        "affine": lambda x: (1.0 if alpha is None else alpha) * x + (beta or 0.0),
        "leakyrelu": lambda x: functional.leaky_relu(x, 0.01 if alpha is None else alpha),
        "thresholdedrelu": lambda x: torch.where(x > (1.0 if alpha is None else alpha), x, 0.0),
        "scaledtanh": lambda x: (1.0 if alpha is None else alpha) * torch.tanh((1.0 if beta is None else beta) * x),
        "hardsigmoid": lambda x: ((0.2 if alpha is None else alpha) * x + (0.5 if beta is None else beta)).clamp(0, 1),
        "elu": lambda x: functional.elu(x, 1.0 if alpha is None else alpha),
    }
    if name.lower() not in plain:
        raise refuse("unknown activation of a recurrent layer", name)
    return plain[name.lower()]


class _Direction:
    """One direction of a recurrent layer."""

    def __init__(self, use: Use, number: int, activations: list[Activation]) -> None:
        def part(index: int) -> Tensor | None:
            operand = use.optional(index)
            return None if operand is None else operand[number]

        self.use = use
        self.f = activations
        self.w, self.r = use.operand(1)[number], use.operand(2)[number]
        self.hidden = self.r.shape[-1]
        bias, peepholes = part(3), part(7)
        zero = self.w.new_zeros(self.w.shape[0])
        self.bias_w, self.bias_r = (zero, zero) if bias is None else bias.chunk(2)
        no_peepholes = self.w.new_zeros(3 * self.hidden)
        self.peepholes = (no_peepholes if peepholes is None else peepholes).chunk(3)

    def clipped(self, x: Tensor) -> Tensor:
        """The input of an activation, limited by the attribute `clip`."""
        bound = self.use.number("clip", 0.0)
        return x.clamp(-bound, bound) if bound else x

    def step(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """The next hidden and cell state, from an input `x` that W is applied to already."""
        if self.use.kind == "LSTM":
            return self._lstm(x, h, c)
        if self.use.kind == "GRU":
            return self._gru(x, h), c
        return self.f[0](self.clipped(x + h @ self.r.t() + self.bias_r)), c

    def _lstm(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, o, f, g = (x + h @ self.r.t() + self.bias_r).chunk(4, -1)
        p_i, p_o, p_f = self.peepholes
        i = self.f[0](self.clipped(i + p_i * c))
        f = 1 - i if self.use.integer("input_forget") else self.f[0](self.clipped(f + p_f * c))
        c = f * c + i * self.f[1](self.clipped(g))
        o = self.f[0](self.clipped(o + p_o * c))
        return o * self.f[2](c), c

    def _gru(self, x: Tensor, h: Tensor) -> Tensor:
        n = self.hidden
        gates = self.f[0](self.clipped(x[..., : 2 * n] + h @ self.r[: 2 * n].t() + self.bias_r[: 2 * n]))
        z, reset = gates.chunk(2, -1)
        if self.use.integer("linear_before_reset"):
            inner = reset * (h @ self.r[2 * n :].t() + self.bias_r[2 * n :])
        else:
            inner = (reset * h) @ self.r[2 * n :].t() + self.bias_r[2 * n :]
        return (1 - z) * self.f[1](self.clipped(x[..., 2 * n :] + inner)) + z * h


@function("LSTM", "GRU", "RNN")
def recurrent(use: Use) -> list[Tensor]:
    """All hidden states, the last one, and the last cell state; sequences may be shorter than the operand."""
    x = use.x.transpose(0, 1) if use.integer("layout") else use.x
    time, batch = x.shape[:2]
    directions, hidden = use.operand(1).shape[0], use.operand(2).shape[-1]
    lengths = use.optional(4)
    each = len(DEFAULTS[use.kind])
    names = use.texts("activations", DEFAULTS[use.kind] * directions)
    alphas, betas = use.floats("activation_alpha"), use.floats("activation_beta")
    functions = [
        _activation(n, alphas[i] if i < len(alphas) else None, betas[i] if i < len(betas) else None)
        for i, n in enumerate(names)
    ]

    def state(index: int, number: int) -> Tensor:
        given = use.optional(index)
        if given is None:
            return x.new_zeros(batch, hidden)
        # A state without the batch is the same for all samples.
        return (given[:, number] if use.integer("layout") else given[number]).expand(batch, hidden)

    all_y, last_h, last_c = [], [], []
    for number in range(directions):
        cell = _Direction(use, number, functions[each * number : each * (number + 1)])
        projected = x @ cell.w.t() + cell.bias_w
        h, c = state(5, number), state(6, number)
        backwards = use.text("direction", "forward") == "reverse" or number == 1
        y: list[Tensor] = [x.new_zeros(batch, hidden)] * time
        for t in reversed(range(time)) if backwards else range(time):
            new_h, new_c = cell.step(projected[t], h, c)
            if lengths is None:
                h, c = new_h, new_c
                y[t] = h
                continue
            inside = (t < lengths)[:, None]
            h, c = torch.where(inside, new_h, h), torch.where(inside, new_c, c)
            y[t] = torch.where(inside, new_h, torch.zeros_like(new_h))
        all_y.append(torch.stack(y))
        last_h.append(h)
        last_c.append(c)
    found = [torch.stack(all_y, 1), torch.stack(last_h), torch.stack(last_c)]
    if use.integer("layout"):
        return [found[0].permute(2, 0, 1, 3), found[1].transpose(0, 1), found[2].transpose(0, 1)]
    return found
