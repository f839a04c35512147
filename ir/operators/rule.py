"""Builds the factor rule of one operator: its loops, their marks, and the dims that consist of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ir.factors import Factor, FactorRule, InternalCollective, Passing
from ir.graph import Tensor

Dims = list[tuple[int, ...]]
"""For each dim of one operand, the indices of its factors, major first."""


class Rule:
    """The factors of one operator. A dim of size 1 has no factor, except the batch, whose factor has size 1."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []
        self._batch: int | None = None

    def factor(self, size: int, *, name: str = "", **marks: Any) -> int:
        """Adds a factor, with fields of `Factor` as `marks`, and returns its index; without a name it is `d{index}`."""
        index = len(self.factors)
        self.factors.append(Factor(name=name or f"d{index}", size=size, **marks))
        return index

    def loop(self, size: int, *, name: str = "", **marks: Any) -> tuple[int, ...]:
        """Adds the factor of a dim of `size` elements that does not hold samples; a dim of size 1 gets none."""
        return () if size == 1 else (self.factor(size, name=name, **marks),)

    @property
    def has_batch(self) -> bool:
        """Whether the rule has a batch factor."""
        return self._batch is not None

    def batch(self) -> int:
        """The index of the batch factor, which is added on the first call."""
        if self._batch is None:
            self._batch = len(self.factors)
            self.factors.append(Factor(name="b", size=1, is_batch=True))
        return self._batch

    def mark(
        self,
        indices: Iterable[int],
        *,
        summed: bool = False,
        fixed: bool = False,
        collective: InternalCollective | None = None,
    ) -> None:
        """Adds marks to existing factors."""
        for index in indices:
            old = self.factors[index]
            self.factors[index] = replace(
                old, summed=summed or old.summed, fixed=fixed or old.fixed, collective=collective or old.collective
            )

    def dim(self, tensor: Tensor, dim: int, **marks: Any) -> tuple[int, ...]:
        """Adds the factors of one dim of `tensor`; in the dim that holds the batch, the batch is first and unmarked."""
        rest = self.loop(tensor.shape[dim], **marks)
        return (self.batch(), *rest) if tensor.batch_dim == dim else rest

    def dims(self, tensor: Tensor, **marks: Any) -> Dims:
        """Adds the factors of every dim of `tensor`."""
        return [self.dim(tensor, i, **marks) for i in range(len(tensor.shape))]

    def size(self, dims: Sequence[int]) -> int:
        """The size, at one sample, of a dim that consists of these factors."""
        return prod(self.factors[i].size for i in dims)

    def build(
        self, inputs: Sequence[Dims], outputs: Sequence[Dims], passing: Passing, linear: Sequence[int] = ()
    ) -> FactorRule:
        """The rule of the operator, with the factors of its inputs and outputs.

        Args:
            inputs: the dims of each operand.
            outputs: the dims of each result.
            passing: which partial operands yield partial results.
            linear: positions of the operands that may be partial; empty: all.
        """
        return FactorRule(
            factors=tuple(self.factors),
            inputs=tuple(tuple(d) for d in inputs),
            outputs=tuple(tuple(d) for d in outputs),
            passing=passing,
            linear=tuple(linear),
        )
