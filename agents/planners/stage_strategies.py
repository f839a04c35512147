"""Strategies of stages: how the devices of one stage of a pipeline share its operators, and the usual strategies.

Which stages a plan has, and what they cost, is known to `agents.planners.stage_table`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.planners.staged_plan import data_parallel
from automap.arrays import Ints
from automap.price.lowered_plan import spread
from automap.space.space import PlanSpace
from automap.space.templates import megatron_signatures


@dataclass(frozen=True, kw_only=True, eq=False)
class Strategy:
    """How a stage spreads its operators over its devices."""

    tp: int
    """Size of the inner mesh axis; the outer axis has the other devices."""
    signatures: Ints
    """[operator rows, axes] signatures."""
    splits_batch: bool = False
    """Whether the inner axis splits the batch too, so that gradients are reduced in two levels. Then it must divide the
    samples of each index of the outer axis."""

    @staticmethod
    def of(space: PlanSpace, tp: int, signatures: Ints) -> Strategy:
        """The strategy with these signatures."""
        arrays = space.evaluator.tables.arrays
        inner = arrays.signatures[arrays.operators["first_signature"] + signatures[:, -1]]
        return Strategy(tp=tp, signatures=signatures, splits_batch=bool((inner["splits_batch"] == 1).any()))

    def fits(self, size: int, samples: int) -> bool:
        """Whether so many devices can share the samples of a micro-batch in this way: all have some, and what the inner
        axis splits divides over it."""
        replicas = size // self.tp
        if size % self.tp or not 0 < replicas <= samples:
            return False
        return not self.splits_batch or spread(samples, replicas) % size == 0

    def is_like(self, other: Strategy) -> bool:
        """Whether another strategy has the same inner axis and the same signatures."""
        return self.tp == other.tp and np.array_equal(self.signatures, other.signatures)


def megatron_strategies(space: PlanSpace) -> list[Strategy]:
    """The usual strategies for every size of the inner axis, without a middle axis.

    These are Megatron-LM's signatures, without and with sequence parallelism. If a size is that of a host and there are
    several hosts, the inner axis may also split the batch. No two strategies are alike: operators that no inner axis
    can split have the same signatures with and without sequence parallelism.
    """
    hosts, found = space.problem.cluster.hosts, list[Strategy]()
    sizes, tried = {host.num_devices for host in hosts if len(hosts) > 1}, set[tuple[int, bool, bool]]()
    for shape in space.shapes:
        if shape.middle > 1 or shape.virtual > 1:
            continue
        ways = [(False, False)]
        if shape.tp > 1:
            divides = shape.tp in sizes and shape.samples % (shape.dp * shape.tp) == 0
            ways += [(True, False), *([(False, True)] if divides else [])]
        for sequence_parallel, only_batch in ways:
            if (key := (shape.tp, sequence_parallel, only_batch)) not in tried:
                tried.add(key)
                prefix = space.even_values(shape, recompute="none", zero=0)
                values = megatron_signatures(
                    space, shape, prefix, sequence_parallel=sequence_parallel, only_batch=only_batch
                )
                strategy = Strategy.of(space, shape.tp, space.signatures(values))
                if not any(map(strategy.is_like, found)):
                    found.append(strategy)
    if all(one.tp > 1 for one in found) and space.problem.hints.fix.tp is None and space.problem.target is None:
        # The batch is smaller than the cluster, so no plan of the space has tp 1. A stage with few devices can.
        return [Strategy(tp=1, signatures=data_parallel(space.evaluator, len(space.axes))), *found]
    return found
