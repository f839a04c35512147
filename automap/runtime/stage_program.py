"""What one rank runs of one stage of a plan, as the pipeline executor sees it.

`automap.runtime.executor.stage` builds such programs; the executor calls them in the order of the schedule and
carries tensors
between stages. A layout says which part of a tensor each rank of a stage holds. Units: samples, elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ir.factors import Placement

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dim of the whole tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossing:
    """A tensor that enters or leaves a stage, and how it lies there; also the layout of a parameter."""

    name: str
    placements: tuple[Placement, ...]
    """On each axis of the stage's mesh, S(i) or B: a partial tensor is summed before it leaves a stage."""
    shape: tuple[int, ...]
    """Of the whole, for one micro-batch."""
    dtype: torch.dtype
    carries_gradient: bool
    """Whether its gradient comes back; it does so in the same placements, whole on B axes."""
    boxes: tuple[Box, ...]
    """What each rank of the stage holds, in the order of `Stage.devices`; equal boxes are replicas."""


class StageProgram(Protocol):
    """One stage (chunk) of a plan on one rank.

    A step is: `forward` of every micro-batch, with `torch.autograd.backward` of its outputs in any order that the
    schedule allows; then `tied_gradients`, to which the executor adds what other stages have; then `finish`, the
    optimizer on `parameters`, and `refresh`.
    """

    inputs: tuple[Crossing, ...]
    """Tensors that other stages make. Those that carry a gradient are given as leaves that require it; after the
    backward pass their `grad` is what the maker needs of this stage."""
    outputs: tuple[Crossing, ...]
    """Tensors that later stages need."""
    data: tuple[Crossing, ...]
    """Inputs of the graph that this stage reads, never sent: each rank cuts its box out of the micro-batch."""
    loss: str | None
    """Name of the loss among the results of `forward`, if this stage makes it: backward starts from it with a one."""
    parameters: dict[str, torch.Tensor]
    """Leaves for the optimizer. Under ZeRO these are flat pieces, under names of their own."""
    layouts: dict[str, Crossing]
    """How each parameter of the graph that this stage reads lies here, by its name in the graph."""
    tied: tuple[str, ...]
    """Parameters that other stages hold as well."""

    def weights(self) -> Sequence[torch.Tensor]:
        """Leaves that `forward` reads and whose gradients a schedule may put off."""
        ...

    def forward(self, tensors: Mapping[str, torch.Tensor], micro_batch: int) -> dict[str, torch.Tensor]:
        """Runs one micro-batch.

        Args:
            tensors: the local part of each of `inputs` and `data`, by name.
            micro_batch: its number within the step.

        Returns:
            The local part of each of `outputs`, and the loss if there is one: this rank's part of the global loss,
            already divided by the global count.
        """
        ...

    def total_loss(self, losses: torch.Tensor) -> torch.Tensor:
        """The loss of the step, on every rank of the stage, from the sum of this rank's parts. A collective."""
        ...

    def tied_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of `tied`, complete within this stage, in their `layouts`; to be added to in place. A collective.

        To be called on every rank of the stage after the last backward pass and before `finish`.
        """
        ...

    def finish(self) -> None:
        """Reduces the gradients of the step to `parameters[...].grad`. A collective."""
        ...

    def refresh(self) -> None:
        """Brings the results of the optimizer to where the next step reads them (ZeRO). A collective."""
        ...

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Every parameter of the graph that this stage reads, put together on every rank. A collective."""
        ...

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        """Likewise its gradient, after `finish`. A collective."""
        ...
