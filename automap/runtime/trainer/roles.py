"""A plan in terms of modules: the role of each module on the sharding axis, its stage, and its recomputation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ir.factors import Placement, gradient_placement

RoleKind = Literal["column", "row", "vocabulary", "features", "along", "whole"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A change of placement at a border of a module; placements are numbered as in `ir.factors`."""

    given: Placement
    """The placement in which the tensor arrives."""
    wanted: Placement
    """The placement that is required after the border."""
    gradient: Placement
    """The placement in which the gradient arrives at the border in the backward pass."""

    @property
    def is_change(self) -> bool:
        """Whether the tensor or its gradient has another placement after the border."""
        return (self.given, gradient_placement(self.given)) != (self.wanted, self.gradient)


@dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """A change of placement of a tensor that a module takes, in front of all of its code."""

    name: str
    """The name of the tensor in the graph."""
    shape: tuple[int, ...]
    """Its whole shape for one sample."""
    batch_dim: int | None
    """The dim of the samples."""
    move: Move
    maker: str = ""
    """The path of the module in which the tensor is made; empty for the network itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """How one module runs on the sharding axis."""

    kind: RoleKind
    """column: weights are split by outputs; row: weights are split by inputs; vocabulary: the rows of an embedding are
    split; features: the normalised dim of a norm is split; along: weights are whole and data is split along another dim
    than the features; whole: all ranks compute the same."""
    enter: Move | None = None
    """The change of placement in front of the module."""
    leave: Move | None = None
    """The change of placement after the module."""
    pieces: tuple[int, ...] = ()
    """The outputs of each piece of a fused weight, which are split one by one; empty = one piece."""


@dataclass(kw_only=True)
class Roles:
    """A plan in terms of modules."""

    axis: str | None = None
    """The axis that splits weights, None where no axis does."""
    axis_size: int = 1
    modules: dict[str, Role] = field(default_factory=dict)
    """Path of a module -> its role; modules that are not named run unchanged."""
    borders: dict[str, list[Border]] = field(default_factory=dict)
    """Path of a module -> the changes of placement of its arguments."""
    sizes: dict[str, set[int]] = field(default_factory=dict)
    """Scope of operators that belong to no named module -> the sizes of dims that ranks hold a part of there."""
    summed: set[str] = field(default_factory=set)
    """Whole parameters whose gradients are sums over the sharding axis."""
    splits_classes: bool = False
    """Whether each rank computes the loss of its own classes."""
    stages: dict[str, int] = field(default_factory=dict)
    """Scope -> the first stage of its operators."""
    ends: dict[str, int] = field(default_factory=dict)
    """Scope -> the last stage of its operators."""
    recomputed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Path of a module that runs again in the backward pass, none inside another -> the paths of the modules inside of
    it that do not; `module_tree.LOSS` stands for the loss with its softmax."""
