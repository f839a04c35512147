"""Hints: what the user already knows or insists on. They narrow the space of plans; every searcher obeys them.

Units: seconds, FLOPs, bytes. Scopes and operators are named by globs over operator names (`layers.*.mlp.*`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from automap.errors import ProblemError
from automap.order import WRITTEN_KINDS
from ir.factors import parse_placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A measured or known cost of an operator, in place of the model's, for one sample on one device."""

    forward_s: float | None = None
    flops: float | None = None
    bytes: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTime:
    """A measured time of one repeated block, in place of what its kernels would be priced at.

    It holds for plans with this tp and this micro-batch whose products are divided so; others are priced as ever.
    Width and sequence are the model's own. Collectives inside the block are not part of it; what the device waits for
    its host is.
    """

    scope: str
    """Glob over modules, see `automap.names`; each module that it names is one block."""
    tp: int
    """Devices that shared the block."""
    samples: int
    """Of the micro-batch on one replica."""
    forward_s: float
    backward_s: float
    """Without recomputation, which takes `forward_s` again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What the operators of a scope must or must not do (Whale's annotations)."""

    scope: str
    """Glob over operators and modules, see `automap.names`."""
    replicate: bool | None = None
    """True: whole on every device of the stage, or split by batch only."""
    split: bool | None = None
    """True: divided over the inner mesh axis by something else than the batch."""
    stage: int | None = None
    """Pipeline stage, from 0, that holds the operators; there are then no virtual stages."""
    recompute: bool | None = None
    """Whether the backward pass computes the operators again. One mode holds for a whole pipeline rank: where a rank
    holds operators with True and with False, True wins."""
    sharding: Mapping[str, str] | None = None
    """Mesh axis -> placement of the first output, as in {"tp": "S(2)"}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """Decisions that the user has already made; None = free."""

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    """Ranks that share a sequence, on an axis between dp and tp; 1: none do."""
    ep: int | None = None
    """Ranks that share the experts of a layer and split the batch of all else, on an axis between dp and tp; 1: none
    do."""
    num_micro_batches: int | None = None
    virtual_stages: int | None = None
    batch_shares: Literal["even", "proportional"] | None = None
    """How samples are spread over unlike devices of a stage: as evenly as they go, or by the speed of the devices."""
    zero: int | None = None
    recompute: str | None = None
    schedule: str | None = None
    """gpipe, 1f1b, interleaved, zb1p or zb2p."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """All hints of a problem."""

    parameters: tuple[str, ...] = ()
    """Globs over graph inputs that are parameters (weight-free files without exporter metadata)."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """Operator glob -> cost."""
    measured_blocks: tuple[BlockTime, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    fix: Fix = Fix()
    baseline: Mapping[str, Any] | None = None
    """The plan that the user runs today, priced beside the winner."""
    memory_reserve_bytes: float = 0.0
    """Device memory that the plan must leave free."""

    def __post_init__(self) -> None:
        for glob, cost in self.costs.items():
            for name in ("forward_s", "flops", "bytes"):
                value = getattr(cost, name)
                if value is not None and not (math.isfinite(value) and value >= 0):
                    raise ProblemError(
                        "must be a finite number, 0 or more",
                        field=f"hints.costs.{glob}.{name}",
                        value=value,
                        repair="Give the cost for one sample, or leave it out.",
                    )
        self._check_blocks()
        for index, constraint in enumerate(self.constraints):
            for axis, text in (constraint.sharding or {}).items():
                try:
                    parse_placement(text)
                except ValueError:
                    raise ProblemError(
                        "no such placement",
                        field=f"hints.constraints[{index}].sharding.{axis}",
                        value=text,
                        repair="Use B, P or S(dim).",
                    ) from None
            if constraint.stage is not None and constraint.stage < 0:
                raise ProblemError(
                    "negative",
                    field=f"hints.constraints[{index}].stage",
                    value=constraint.stage,
                    repair="Stages are counted from 0.",
                )
        for name in ("dp", "tp", "pp", "cp", "ep", "num_micro_batches", "virtual_stages"):
            value = getattr(self.fix, name)
            if value is not None and value < 1:
                raise ProblemError(
                    "must be positive",
                    field=f"hints.fix.{name}",
                    value=value,
                    repair="Give 1 or more, or leave it out.",
                )
        if self.fix.schedule not in (None, *WRITTEN_KINDS):
            raise ProblemError(
                "no such schedule, or none that can be fixed",
                field="hints.fix.schedule",
                value=self.fix.schedule,
                repair=f"Use one of {', '.join(WRITTEN_KINDS)}.",
            )
        if self.fix.zero is not None and not 0 <= self.fix.zero <= 3:
            raise ProblemError("no such ZeRO stage", field="hints.fix.zero", value=self.fix.zero, repair="Give 0 to 3.")
        if self.memory_reserve_bytes < 0:
            raise ProblemError(
                "negative",
                field="hints.memory_reserve_bytes",
                value=self.memory_reserve_bytes,
                repair="Give 0 or more bytes.",
            )

    def _check_blocks(self) -> None:
        seen = set()
        for index, block in enumerate(self.measured_blocks):
            path = f"hints.measured_blocks[{index}]"
            for name in ("tp", "samples"):
                value = getattr(block, name)
                if value < 1:
                    raise ProblemError(
                        "must be positive", field=f"{path}.{name}", value=value, repair="Give 1 or more."
                    )
            for name in ("forward_s", "backward_s"):
                value = getattr(block, name)
                if not (math.isfinite(value) and value > 0.0):
                    raise ProblemError(
                        "must be a finite number above 0",
                        field=f"{path}.{name}",
                        value=value,
                        repair="Give the seconds of one micro-batch on each device.",
                    )
            key = (block.scope, block.tp, block.samples)
            if key in seen:
                raise ProblemError(
                    f"measured twice at tp {block.tp} and {block.samples} samples",
                    field=f"{path}.scope",
                    value=block.scope,
                    repair="Keep one of them.",
                )
            seen.add(key)
