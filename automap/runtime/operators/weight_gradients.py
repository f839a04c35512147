"""Gradients of weights computed apart from those of inputs, as zero-bubble schedules require.

Products and convolutions with a weight have their own backward functions. Inside `splitting` with a store, a backward
pass computes the gradients of inputs (I) and puts off those of weights, which `Deferred.run` computes (W). All other
parameters (biases, norms, tables) get their gradients in I.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MAX_VIEWS = 8
"""The most operators between a parameter and a weight that is made of it (assumed)."""


class Deferred:
    """The gradients of weights that are still to be computed for one stage and micro-batch."""

    def __init__(self) -> None:
        self._thunks: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def add(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Keeps the function that computes the gradient of a weight, for `run`."""
        self._thunks.append((weight, gradient))

    def run(self) -> None:
        """Computes all gradients, in the order of the backward pass."""
        made = []
        for weight, gradient in self._thunks:
            if weight.grad_fn is None:
                torch.autograd.backward([weight], [gradient()])
            else:
                made.append((weight, gradient()))
        self._thunks.clear()
        if made:
            # From tensors made of parameters back to the parameters: together, since a gather of parameters reduces
            # all of its gradients at once.
            torch.autograd.backward([w for w, _ in made], [g for _, g in made], retain_graph=True)


class _State:
    weights: frozenset[int] = frozenset()
    """The ids of the parameters whose gradients may be put off; empty = none."""
    store: Deferred | None = None


@contextlib.contextmanager
def splitting(parameters: Iterable[Tensor], store: Deferred | None = None) -> Iterator[None]:
    """A context for a forward or backward pass in which products put off the gradients of some parameters.

    Args:
        parameters: leaves of autograd.
        store: the store of the gradients that a backward pass puts off; None = they are computed at once.
    """
    before = _State.weights, _State.store
    _State.weights, _State.store = frozenset(map(id, parameters)), store
    try:
        yield
    finally:
        _State.weights, _State.store = before


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The matrix product of `x` and `weight`, which need not be a parameter, plus a bias."""
    if x.ndim >= 2 and weight.ndim >= 2 and _is_weight(weight):
        made: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    elif bias is not None and bias.ndim == 1 and weight.ndim == 2 <= x.ndim:
        return torch.nn.functional.linear(x, weight.t(), bias)
    else:
        made = torch.matmul(x, weight)
    return made if bias is None else made + bias


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> Tensor:
    """The convolution of a padded tensor; see `torch.nn.functional.conv2d` for the arguments."""
    spatial = [0] * (x.ndim - 2)
    if not _is_weight(weight):
        return torch.convolution(x, weight, bias, stride, spatial, dilation, False, spatial, groups)
    made: Tensor = _Convolution.apply(x, weight, stride, dilation, groups)  # type: ignore[no-untyped-call]
    return made if bias is None else made + bias.reshape(-1, *[1] * (x.ndim - 2))


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter whose gradient may be put off, or is made of such parameters alone."""
    if not _State.weights or not tensor.requires_grad:
        return False
    if tensor.grad_fn is None:
        return id(tensor) in _State.weights
    nodes: list[Any] = [tensor.grad_fn]
    for node in nodes:
        variable = getattr(node, "variable", None)
        if len(nodes) > MAX_VIEWS or (variable is not None and id(variable) not in _State.weights):
            return False
        if variable is None:
            nodes += [source for source, _ in node.next_functions if source is not None]
    return True


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        # The weight is not saved like `x`: under recomputation, it would be another object than the parameter.
        ctx.save_for_backward(x)
        ctx.weight = weight
        return torch.matmul(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x,), weight, gradient = ctx.saved_tensors, ctx.weight, gradients[0]
        into = (gradient @ weight.mT).sum_to_size(x.shape) if ctx.needs_input_grad[0] else None

        def of_weight() -> Tensor:
            if weight.ndim == 2:
                found: Tensor = x.reshape(-1, x.shape[-1]).mT @ gradient.reshape(-1, gradient.shape[-1])
            else:
                found = (x.mT @ gradient).sum_to_size(weight.shape)
            return found

        if _State.store is None:
            return into, of_weight()
        _State.store.add(weight, of_weight)
        return into, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.how = weight, (stride, dilation, groups)
        spatial = [0] * (x.ndim - 2)
        return torch.convolution(x, weight, None, stride, spatial, dilation, False, spatial, groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), weight, gradient = ctx.saved_tensors, ctx.weight, gradients[0]
        stride, dilation, groups = ctx.how
        spatial = [0] * (x.ndim - 2)

        def of(index: int) -> Tensor:
            mask = [index == 0, index == 1, False]
            found: list[Tensor] = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, stride, spatial, dilation, False, spatial, groups, mask
            )
            return found[index]

        into = of(0) if ctx.needs_input_grad[0] else None
        if _State.store is None:
            return into, of(1), None, None, None
        _State.store.add(weight, lambda: of(1))
        return into, None, None, None, None
