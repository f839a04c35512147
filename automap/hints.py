"""Hints: what the user already knows or insists on. They narrow the space of plans; every searcher obeys them.

Units: seconds, FLOPs, bytes. Scopes and operators are named by globs over operator names (`layers.*.mlp.*`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from automap.cluster import Count
from automap.errors import ProblemError
from automap.records import Range
from ir.factors import parse_placement

Samples = Annotated[int, Range(1, 1 << 20)]
"""Of a step or a part of it, and their parts: a million is ten times the largest batch that anybody reported."""
Seconds = Annotated[float, Range(0, 1e6, above=True)]
"""Up to 11 days."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A measured or known cost of an operator, in place of the model's, for one sample on one device."""

    forward_s: Annotated[float, Range(0, 1e6)] | None = None
    flops: Annotated[float, Range(0, 1e24)] | None = None
    bytes: Annotated[float, Range(0, 1e18)] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTime:
    """A measured time of one repeated block, in place of what its kernels would be priced at.

    It holds for plans with this tp and this micro-batch whose products are divided so; others are priced as ever.
    Width and sequence are the model's own. Collectives inside the block are not part of it; what the device waits for
    its host is.
    """

    scope: str
    """Glob over modules, see `automap.globs`; each module that it names is one block."""
    tp: Count
    """Devices that shared the block."""
    samples: Samples
    """Of the micro-batch on one replica."""
    forward_s: Seconds
    backward_s: Seconds
    """Without recomputation, which takes `forward_s` again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """What the operators of a scope must or must not do (Whale's annotations)."""

    scope: str
    """Glob over operators and modules, see `automap.globs`."""
    replicate: bool | None = None
    """True: whole on every device of the stage, or split by batch only."""
    split: bool | None = None
    """True: divided over the inner mesh axis by something else than the batch."""
    stage: Annotated[int, Range(0, 65535)] | None = None
    """Pipeline stage, from 0, that holds the operators; there are then no virtual stages."""
    recompute: bool | None = None
    """Whether the backward pass computes the operators again. One mode holds for a whole pipeline rank: where a rank
    holds operators with True and with False, True wins."""
    sharding: Mapping[str, str] | None = None
    """Mesh axis -> placement of the first output, as in {"tp": "S(2)"}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """Decisions that the user has already made; None = free."""

    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    """Ranks that share a sequence, on an axis between dp and tp; 1: none do."""
    ep: Count | None = None
    """Ranks that share the experts of a layer and split the batch of all else, on an axis between dp and tp; 1: none
    do."""
    num_micro_batches: Samples | None = None
    virtual_stages: Annotated[int, Range(1, 65536)] | None = None
    batch_shares: Literal["even", "proportional"] | None = None
    """How samples are spread over unlike devices of a stage: as evenly as they go, or by the speed of the devices."""
    zero: Annotated[int, Range(0, 3)] | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb1p", "zb2p"] | None = None


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
    memory_reserve_bytes: Annotated[float, Range(0, 1e15)] = 0.0
    """Device memory that the plan must leave free."""

    def __post_init__(self) -> None:
        for index, constraint in enumerate(self.constraints):
            for axis, text in (constraint.sharding or {}).items():
                try:
                    parse_placement(text)
                except ValueError:
                    raise ProblemError(
                        "no such placement",
                        field=f"constraints[{index}].sharding.{axis}",
                        value=text,
                        repair="Use B, P or S(dim).",
                    ) from None
        seen = set()
        for index, block in enumerate(self.measured_blocks):
            key = (block.scope, block.tp, block.samples)
            if key in seen:
                raise ProblemError(
                    f"measured twice at tp {block.tp} and {block.samples} samples",
                    field=f"measured_blocks[{index}].scope",
                    value=block.scope,
                    repair="Keep one of them.",
                )
            seen.add(key)
