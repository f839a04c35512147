"""An operator on one rank, and one call of it.

A sharded function gets a `Call` and returns the local results. Collectives inside it are differentiable sums and maxima
over the mesh axes that split the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from automap.runtime.mesh_groups import Axis
from automap.runtime.operators.apply import apply_local
from automap.runtime.operators.base import WHOLE_ROWS, Rows
from automap.runtime.redistribute import Tag, largest_over, sum_over
from automap.runtime.tensor_layout import Box
from ir.factors import Factor, Placement, Signature
from ir.graph import Operator

ShardedFunction = Callable[["Call"], Sequence[Tensor]]
"""What one rank runs for an operator: a call -> the local results, in the order of the operator's outputs."""


@dataclass(frozen=True, kw_only=True)
class AxisSplit:
    """How an operator is placed on one mesh axis of more than one rank."""

    axis: Axis
    signature: Signature
    factor: Factor | None
    """The factor that the axis splits; None where it splits none."""

    @property
    def exchange(self) -> str:
        """The name of the collective inside the operator, empty without one."""
        return self.factor.collective.name if self.factor and self.factor.collective else ""


@dataclass(frozen=True, kw_only=True)
class ShardedOperator:
    """An operator on one rank, as it is known when the stage is built."""

    op: Operator
    """The operator with its counts of heads and groups divided as the shard requires."""
    splits: tuple[AxisSplit, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the local results."""
    boxes: tuple[Box, ...]
    """The box of each operand that this rank holds."""
    result_boxes: tuple[Box, ...]
    """The box of each result that this rank makes."""
    whole: tuple[tuple[int, ...], ...]
    """The shapes of the whole operands."""
    device: torch.device

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the operator by name."""
        return dict(self.op.attributes)

    def axes(self, exchange: str) -> tuple[Axis, ...]:
        """The axes on which the operator has a collective of this name inside."""
        return tuple(s.axis for s in self.splits if s.exchange == exchange)

    def results(self, made: Sequence[Tensor]) -> list[Tensor]:
        """The results that this operator has, out of all results of its kind."""
        return [made[i] for i in self.attributes.get("results", range(len(self.shapes)))]


@dataclass(frozen=True)
class Call:
    """One call of an operator on one rank."""

    operator: ShardedOperator
    operands: Sequence[Tensor]
    step: tuple[int, int]
    """The number of the training step and of the micro-batch, on which random numbers depend."""

    @property
    def x(self) -> Tensor:
        """The first operand."""
        return self.operands[0]

    @property
    def tag(self) -> Tag:
        """The names that collectives of this call are recorded with."""
        return self.operator.op.name, self.operator.op.inputs[0]

    def start(self, slot: int, dim: int) -> int:
        """The position in the whole operand at which this rank's part begins."""
        return self.operator.boxes[slot][dim][0]

    def plain(
        self, op: Operator | None = None, operands: Sequence[Tensor] | None = None, rows: Rows = WHOLE_ROWS
    ) -> tuple[Tensor, ...]:
        """The results of the kernel of one process on the local operands, its statistics taken over `rows`."""
        operator = self.operator
        given = self.operands if operands is None else operands
        return apply_local(op or operator.op, given, operator.shapes, operator.device, rows)

    def total(self, x: Tensor, axes: Sequence[Axis], gradient: Placement) -> Tensor:
        """The sum over some axes, on all of their ranks; see `automap.runtime.redistribute.sum_over`."""
        return sum_over(x, axes, gradient, self.tag)

    def largest(self, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        """The elementwise maximum over some axes, without a gradient."""
        return largest_over(x, axes, self.tag)


def with_attributes(op: Operator, **changes: Any) -> Operator:
    """The operator with some attributes set, or removed where the value is None."""
    merged = {k: v for k, v in {**dict(op.attributes), **changes}.items() if v is not None}
    return replace(op, attributes=tuple(sorted(merged.items())))
