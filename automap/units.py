"""The units of a problem: what its plans may cut apart and run again."""

from __future__ import annotations

from automap.problem import Problem
from automap.targets import Target
from ir.blocks import Blocks, find_units
from ir.graph import Graph

LARGEST = 0.5
"""Share of a model's forward FLOPs in one unit with which its pipelines are not worth having (assumed)."""


def units_of(problem: Problem) -> Blocks:
    """The units of a problem.

    Targets whose stages hand on one tensor have no pipelines of a model that is cut where several cross. Such models
    are cut there only if most of their work would be in one unit otherwise: then its parts can at least run again.
    """
    blocks = find_units(problem.graph)
    if hands_on_one(problem.target) and any(unit.beside for unit in blocks.units):
        alone = find_units(problem.graph, several=False)
        if _largest(problem.graph, alone) <= LARGEST:
            return alone
    return blocks


def hands_on_one(target: Target | None) -> bool:
    """Whether stages of a target hand on one tensor alone."""
    return target is not None and (target.grain != "operators" or target.stages_of_modules)


def _largest(graph: Graph, blocks: Blocks) -> float:
    """Share of the forward FLOPs that the largest unit has."""
    found = [sum(op.forward_flops.at(1) for op in graph.operators[unit.start : unit.stop]) for unit in blocks.units]
    return max(found) / max(1.0, sum(found))
