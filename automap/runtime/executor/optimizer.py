"""The optimizer of a training step over one rank's leaves, with float32 masters of leaves in less precision."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

LEARNING_RATE = 1e-3
MOMENTUM = 0.9
BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Usual values (assumed), those of torch: what is measured does not depend on them."""


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
        """Takes what is trained; the state of a leaf is made with its first gradient.

        Torch's fused kernels pass through memory once; its default on a CPU passes once for each operation and tensor,
        which takes three times as long (measured). They are called as functions: every optimizer class of torch imports
        its compiler, a second of processor time in each rank.

        Args:
            leaves: trained tensors, of the same names on every rank that holds them.
            kind: adam, momentum or sgd.
        """
        super().__init__(leaves)
        self._kind = kind
        self._moments: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Adam's state by the number of the master: means of gradients and of their squares, and steps taken."""
        self._buffers: dict[int, Tensor | None] = {}
        """The momentum by the number of the master; None where there is none."""

    @torch.no_grad()
    def step(self) -> None:
        """Applies the gradients of the leaves and frees them."""
        self.take_gradients()
        trained = {i: master.grad for i, master in enumerate(self.masters) if master.grad is not None}
        masters, gradients = [self.masters[i] for i in trained], list(trained.values())
        if self._kind == "adam":
            self._adam(list(trained), masters, gradients)
        else:
            buffers = [self._buffers.get(i) for i in trained]
            sgd(
                masters, gradients, buffers, fused=True, lr=LEARNING_RATE, weight_decay=0.0, dampening=0.0,
                momentum=MOMENTUM if self._kind == "momentum" else 0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            self._buffers.update(zip(trained, buffers, strict=True))
        for master in self.masters:
            master.grad = None
        self.publish()

    def _adam(self, numbers: list[int], masters: list[Tensor], gradients: list[Tensor]) -> None:
        for i, master in zip(numbers, masters, strict=True):
            if i not in self._moments:
                steps = torch.zeros((), device=master.device)
                self._moments[i] = torch.zeros_like(master), torch.zeros_like(master), steps
        means, squares, steps_taken = ([self._moments[i][part] for i in numbers] for part in range(3))
        adam(
            masters, gradients, means, squares, [], steps_taken, fused=True, amsgrad=False, beta1=BETAS[0],
            beta2=BETAS[1], lr=LEARNING_RATE, weight_decay=0.0, eps=EPSILON, maximize=False,
        )  # fmt: skip
