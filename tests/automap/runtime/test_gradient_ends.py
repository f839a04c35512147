"""Code whose gradients are not those of its graph is found, by what gradients of one process show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automap.runtime.trainer.gradient_ends import gradient_end


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def in_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 2


def shape_in_no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        positions = torch.arange(x.shape[1], dtype=x.dtype).sin() * (x.argmax() >= 0)
    return x + positions


class Around(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.function = nn.Linear(3, 3), nn.Linear(3, 2), function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.two(self.function(self.one(x)))
        return y


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: x + x.sin(), ""),
        (shape_in_no_grad, ""),
        (lambda x: x + x.detach(), "detach"),
        (lambda x: x * x.data, "data"),
        (in_no_grad, "mul under no_grad"),
        (Rounded.apply, "round under no_grad"),
        (Reversed.apply, "view_as under no_grad"),
    ],
)
def test_what_ends_a_gradient_is_named(function: Callable[[Tensor], Tensor], found: str) -> None:
    torch.manual_seed(0)
    module, x = Around(function), torch.randn(2, 3)
    assert gradient_end(module, [x], ()) == found
    # The gradient of the first bias, and its central difference: they agree where the graph has the same gradient.
    module.double()
    (gradient,) = torch.autograd.grad(module(x.double()).sum(), module.one.bias, allow_unused=True)
    sums = []
    for step in (1e-5, -2e-5):
        with torch.no_grad():
            module.one.bias[0] += step
            sums.append(float(module(x.double()).sum()))
    slope = (sums[0] - sums[1]) / 2e-5
    assert (gradient is not None and abs(float(gradient[0]) - slope) < 1e-6) == (not found)
