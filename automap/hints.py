"""Hints: measured costs, constraints and decisions of the user. They limit the plan space of every searcher.

Units: seconds, FLOPs, bytes. Scopes and operators are named by globs over operator names (`layers.*.mlp.*`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from automap.device_kinds import Count
from automap.errors import ProblemError
from automap.records import Items, Range
from ir.factors import parse_placement

Samples = Annotated[int, Range(1, 1 << 20)]
"""A number of samples; the largest is a million, ten times the largest batch that was ever reported."""
Seconds = Annotated[float, Range(0, 1e6, above=True)]
"""A time above 0 and of at most 11 days."""

MAX_CONSTRAINTS = 1_000
"""Largest number of constraints: each is compared with every operator."""
MAX_GLOBS = 1_000
"""Largest number of globs with wildcards in one table: each is compared with every operator (some thousands)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A measured or known cost of one operator for one sample on one device, which replaces the modelled cost."""

    forward_s: Annotated[float, Range(0, 1e6)] | None = None
    flops: Annotated[float, Range(0, 1e24)] | None = None
    bytes: Annotated[float, Range(0, 1e18)] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTime:
    """A measured time of one repeated block, which replaces the modelled time of its kernels.

    It applies to plans that divide the block's matrix products over `tp` devices and have this micro-batch; other
    plans are priced without it. The time includes the wait of the device for its host, but no collectives.
    """

    scope: str
    """Glob over modules, see `automap.globs`; every module that matches is one block."""
    tp: Count
    """Number of devices that the block was divided over."""
    samples: Samples
    """Samples of the micro-batch on one replica."""
    forward_s: Seconds
    backward_s: Seconds
    """Seconds of the backward pass without recomputation, which takes `forward_s` again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraint:
    """A requirement on the operators of a scope (Whale's annotations, arXiv 2011.09208)."""

    scope: str
    """Glob over operators and modules, see `automap.globs`."""
    replicate: bool | None = None
    """True: the operators are replicated on every device of the stage, or split along the batch only."""
    split: bool | None = None
    """True: the operators are divided over the inner mesh axis, along another dim than the batch."""
    stage: Annotated[int, Range(0, 65535)] | None = None
    """Number of the pipeline stage that holds the operators, from 0. It excludes virtual stages."""
    recompute: bool | None = None
    """Whether the backward pass computes the operators again. One mode holds for a whole pipeline rank: where a rank
    holds operators with True and with False, True wins."""
    sharding: Mapping[str, str] | None = None
    """Mesh axis -> placement of the first output, as in {"tp": "S(2)"}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """Decisions that the user has made; None leaves the decision to the search."""

    dp: Count | None = None
    """Number of replicas in each stage, without those of an ep axis."""
    tp: Count | None = None
    """Number of ranks that work on the same samples and split products with weights by the weights or not at all
    (tensor parallelism); 1 for none."""
    pp: Count | None = None
    cp: Count | None = None
    """Size of the axis between dp and tp that splits sequences and no weights of products (context parallelism); 1 for
    none."""
    ep: Count | None = None
    """Size of the axis between dp and tp that splits the experts of a layer, and the batch of all other operators
    (expert parallelism); 1 for none. Products of experts are split by experts over no other axis."""
    num_micro_batches: Samples | None = None
    virtual_stages: Annotated[int, Range(1, 65536)] | None = None
    batch_shares: Literal["even", "proportional"] | None = None
    """How the samples of a micro-batch are divided over devices of different kinds in a stage: as evenly as possible,
    or in proportion to their speed."""
    zero: Annotated[int, Range(0, 3)] | None = None
    """ZeRO stage of plans whose stages have replicas; with a stage of 1 or more only these are allowed, where there are
    any."""
    recompute: Literal["none", "selective", "full"] | None = None
    schedule: Literal["gpipe", "1f1b", "eager-1f1b", "interleaved", "zb1p", "zb2p"] | None = None

    def degrees(self) -> dict[str, int]:
        """The degrees of parallelism that are fixed, by name: a plan has their product of devices, or a multiple."""
        stated = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep}
        return {name: value for name, value in stated.items() if value is not None}

    def shares_experts(self, experts: int) -> bool:
        """Whether a layer with this number of experts divides its products by experts, over ep and no other axis."""
        return self.ep not in (None, 1) and experts > 0 and experts % (self.ep or 1) == 0

    def may_split_batch(self, axis: str) -> bool:
        """Whether operators may split their batch over a mesh axis of this name.

        An axis may be used for anything while no degree is fixed. A fixed degree of tp or cp is one of ranks that work
        on the same samples. With a fixed dp there are no other replicas than those of dp and ep, nor with a ZeRO stage,
        which shards over no other.
        """
        return axis in ("dp", "ep") or (self.dp is None and not self.zero and getattr(self, axis) is None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """All hints of a problem."""

    parameters: Annotated[tuple[str, ...], Items(10_000)] = ()
    """Globs over graph inputs that are parameters, for files without weights and without exporter metadata."""
    costs: Annotated[Mapping[str, Cost], Items(20_000)] = field(default_factory=dict)
    """Glob over operators -> cost; at most `MAX_GLOBS` with wildcards, the others are names."""
    measured_blocks: Annotated[tuple[BlockTime, ...], Items(1_000)] = ()
    constraints: Annotated[tuple[Constraint, ...], Items(MAX_CONSTRAINTS)] = ()
    fix: Fix = Fix()
    baseline: Mapping[str, Any] | None = None
    """What the user runs today: a plan as JSON, or the configuration of a trainer as {"file": its name, "text": its
    text} (`automap.export.baseline`). It is priced for comparison, and the search begins with it."""
    memory_reserve_bytes: Annotated[float, Range(0, 1e15)] = 0.0
    """Device memory that the plan must leave free."""

    def __post_init__(self) -> None:
        for index, constraint in enumerate(self.constraints):
            if constraint == Constraint(scope=constraint.scope):
                repair = "Give replicate, split, sharding, stage or recompute, or leave it out."
                raise ProblemError(
                    "an empty constraint", field=f"constraints[{index}]", value=constraint.scope, repair=repair
                )
            for axis, text in (constraint.sharding or {}).items():
                try:
                    parse_placement(text)
                except ValueError:
                    repair = "Use B, P or S(dim)."
                    raise ProblemError(
                        "no such placement", field=f"constraints[{index}].sharding.{axis}", value=text, repair=repair
                    ) from None
        for glob, cost in self.costs.items():
            if cost == Cost():
                repair = "Give forward_s, flops or bytes, or leave it out."
                raise ProblemError("an empty cost", field=f"costs.{glob}", value={}, repair=repair)
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
