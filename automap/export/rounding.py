"""What trainers do otherwise than a plan says, with its price: the same plan priced as the trainer runs it.

A plan that was searched for a target is rounded in nothing. In other plans a small vocabulary that tp does not divide
is padded, and gradients that are reduced inside groups of replicas first are reduced over all replicas at once.
Units: seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from automap.export.configuration import Note, Run
from automap.hints import Cost
from automap.price.evaluator import Evaluator
from automap.problem import Problem
from automap.space.simplified_axes import merges

LEVELS = ("megatron-core", "torchtitan", "deepspeed", "accelerate")
"""Targets whose trainers have one group of replicas."""
PADS = ("megatron-core",)
"""Targets whose trainers pad the vocabulary to a multiple of tp."""


def rounded(run: Run) -> Iterator[Note]:
    """The decisions of a plan that its export rounds."""
    groups = [axis for axis, use in run.degrees.axes.items() if use == "data" and axis not in run.degrees.expert_axes]
    if len(groups) > 1 and run.target.name in LEVELS:
        what = f"gradients are reduced over all {run.degrees.data} replicas at once, not inside groups of them first"
        yield Note(about="groups of replicas", kept="rounded", text=what, cost_s=_at_once_s(run))
    if run.whole_head is not None and run.target.name in PADS:
        what = "the vocabulary, which tp does not divide, is padded and split; the plan counts its product whole"
        yield Note(about="vocabulary", kept="rounded", text=what, cost_s=_padded_s(run, run.whole_head))


def _at_once_s(run: Run) -> float | None:
    """Seconds that a step takes more with one group of replicas; None where that cannot be priced."""
    one = next(merges(run.lowered, run.evaluator), None)
    return None if one is None else run.evaluator.evaluate(one).step_time_s - _step_s(run)


def _step_s(run: Run) -> float:
    return run.evaluator.evaluate(run.lowered).step_time_s


def _padded_s(run: Run, name: str) -> float:
    """Seconds that a step takes more with the product of the vocabulary padded and split over tp: fewer than 0.

    Args:
        name: the product.
    """
    graph, tp = run.problem.graph, run.degrees.tensor
    head = next(op for op in graph if op.name == name)
    size = graph.tensors[head.outputs[0]].shape[-1]
    share = math.ceil(size / tp) / size
    costs = {**run.problem.hints.costs, head.name: Cost(flops=share * head.forward_flops.at(1))}
    hints = replace(run.problem.hints, costs=costs, baseline=None)
    split = Problem.build(graph, run.problem.cluster, run.problem.training, hints)
    return Evaluator(split).evaluate(run.lowered).step_time_s - _step_s(run)
