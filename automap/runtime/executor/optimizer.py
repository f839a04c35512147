"""The optimizer of a training step over one rank's leaves, with float32 masters of leaves in less precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
"""Usual values (assumed): what is measured does not depend on them."""


class Masters:
    """The tensors that an optimizer updates: leaves themselves, or float32 copies of leaves in less precision.

    Attributes:
        masters: [leaves] what the optimizer updates.
    """

    def __init__(self, leaves: Mapping[str, Tensor]) -> None:
        """Takes trained tensors, of the same names on every rank that holds them."""
        self.leaves = list(leaves.values())
        self.masters = [leaf if leaf.dtype.itemsize >= 4 else leaf.detach().float() for leaf in self.leaves]

    def take_gradients(self) -> None:
        """Moves the gradients of leaves to their masters."""
        for leaf, master in zip(self.leaves, self.masters, strict=True):
            if master is not leaf and leaf.grad is not None:
                master.grad = leaf.grad.float()
                leaf.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copies the masters to the leaves."""
        for leaf, master in zip(self.leaves, self.masters, strict=True):
            if master is not leaf:
                leaf.copy_(master)


class Optimizer(Masters):
    """Adam, SGD with momentum, or SGD."""

    def __init__(self, leaves: Mapping[str, Tensor], kind: str) -> None:
        """Makes the optimizer state.

        Torch's fused kernels pass through memory once; its default on a CPU passes once for each operation and tensor,
        which takes three times as long (measured).

        Args:
            leaves: trained tensors, of the same names on every rank that holds them.
            kind: adam, momentum or sgd.
        """
        super().__init__(leaves)
        self._inner: torch.optim.Optimizer | None = None
        if self.masters:
            if kind == "adam":
                self._inner = torch.optim.Adam(self.masters, lr=LEARNING_RATE, fused=True)
            else:
                self._inner = torch.optim.SGD(
                    self.masters, lr=LEARNING_RATE, momentum=MOMENTUM if kind == "momentum" else 0.0, fused=True
                )

    @torch.no_grad()
    def step(self) -> None:
        """Applies the gradients of the leaves and frees them."""
        self.take_gradients()
        if self._inner is not None:
            self._inner.step()
            self._inner.zero_grad()
        self.publish()
