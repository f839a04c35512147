"""Differences between a plan and how a trainer runs it, each with its price.

A plan that was searched for a target has no such differences. In other plans, a small vocabulary that tp does not
divide is padded by the trainer; and gradients that the plan reduces first inside groups of replicas are reduced over
all replicas at once. Units: seconds.
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
"""Targets whose trainers reduce gradients over all replicas at once."""
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
    """Extra seconds of a step if gradients are reduced over all replicas at once; None where that cannot be priced."""
    one = next(merges(run.lowered, run.evaluator), None)
    return None if one is None else run.evaluator.evaluate(one).step_time_s - _step_s(run)


def _step_s(run: Run) -> float:
    return run.evaluator.evaluate(run.lowered).step_time_s


def _padded_s(run: Run, name: str) -> float:
    """Extra seconds of a step, below 0, if the product with the vocabulary is padded and split over tp.

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
