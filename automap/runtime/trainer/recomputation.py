"""The modules that run again in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from automap.globs import select
from automap.plan import Plan
from automap.runtime.trainer.module_tree import LOSS, unit_paths
from automap.runtime.trainer.supported_plans import INSTEAD, refuse
from ir.graph import Graph, Operator


def recomputed_modules(
    graph: Graph, plan: Plan, by_operator: Sequence[tuple[Operator, int]], module: nn.Module
) -> Iterator[str]:
    """The largest modules of one stage that are recomputed as a whole, blocks one by one, and `LOSS` if the loss is.

    Args:
        plan: the plan whose `recompute` is read.
        by_operator: operators with the numbers of their stages.

    Raises:
        PlanError: the plan recomputes a part of a module.
    """
    again: set[str] = set()
    for number, stage in enumerate(plan.stages):
        names = [op.name for op, n in by_operator if n == number]
        for glob in stage.recompute:
            again.update(select(glob, names))
    # An operator whose backward pass needs no activation need not run again.
    left = {
        op.name
        for op, _ in by_operator
        if op.name in again and any(graph.tensors[t].role == "activation" for t in op.saved)
    }
    inside: dict[str, list[str]] = {}
    stages: dict[str, set[int]] = {}
    for op, number in by_operator:
        parts = op.scope.split(".") if op.scope else []
        for depth in range(1, len(parts) + 1):
            inside.setdefault(".".join(parts[:depth]), []).append(op.name)
            stages.setdefault(".".join(parts[:depth]), set()).add(number)
    units = unit_paths(module)
    paths = [
        path
        for path, _ in module.named_modules()
        # Of a module that is cut each stage runs a part, and would run another one in the backward pass.
        if len(stages.get(path, ())) == 1 and not any(unit.startswith(f"{path}.") for unit in units)
    ]
    for path in sorted(paths, key=lambda path: path.count(".")):
        if again.issuperset(inside[path]) and not left.isdisjoint(inside[path]):
            left.difference_update(inside[path])
            yield path
    loss = next(op.name for op, _ in reversed(by_operator) if graph.outputs[-1] in op.outputs)
    if loss in left:
        left.discard(loss)
        yield LOSS
    if left:
        raise refuse("stages.recompute", min(left), "is finer than a module", f"Recompute whole modules. {INSTEAD}")
