"""Where convolutions find the channels of their images in memory: first, as PyTorch has them, or last.

Kernels on tensor cores want channels last, so images with channels first are converted. Fused implementations keep them
last in 16 bits; otherwise a layout comes from the graph: a transposition that makes the last dim the channels leaves
channels last in memory, and what follows keeps the layout of its first operand, as PyTorch's operators do.
"""

from __future__ import annotations

import math

from automap.problem import Problem
from ir.graph import Graph, Operator

KINDS = ("Conv", "ConvTranspose")
CONVERSIONS = (1.5, 2.8)
"""Conversions to channels last and back, forward and backward, in elements of the input: one of each operand, and some
of results (counted in a step of ResNet-50 on an H200, benchmarks/results/gpu_kernels-2026-11-27.txt)."""
PLAIN_POSITIONS = 8
"""A product of the channels of each position alone takes either layout where positions are a multiple of this many
(measured on an H200: benchmarks/results/gpu_convolutions-2026-11-27.txt)."""


def images_last(problem: Problem) -> frozenset[int]:
    """The convolutions of a problem whose images have their channels last in memory, as numbers of operators."""
    graph = problem.graph
    every = frozenset(index for index, op in enumerate(graph.operators) if op.kind in KINDS)
    if not every or (problem.trainer.fuses_chains and problem.activation_bytes < 4.0):
        return every
    last: set[str] = set()
    found = set()
    for index, op in enumerate(graph.operators):
        read = next((name for name in op.inputs if _is_image(graph, name)), None)
        if _moves_channels(op) or (read in last and op.kind != "Transpose"):
            last.update(op.outputs)
        if op.kind in KINDS and op.inputs[0] in last:
            found.add(index)
    return frozenset(found)


def converted(problem: Problem) -> dict[int, tuple[float, float]]:
    """Convolution -> bytes that converting its images moves, forward and backward, for an element of its input.

    Those of groups have kernels for both layouts, and without tensor cores nothing is converted.
    """
    if problem.base_precision == "fp32":
        return {}
    graph, last = problem.graph, images_last(problem)
    moved = tuple(2.0 * problem.activation_bytes * times for times in CONVERSIONS)
    return {
        index: (moved[0], moved[1])
        for index, op in enumerate(graph.operators)
        if op.kind in KINDS and index not in last and _converts(graph, op)
    }


def _converts(graph: Graph, op: Operator) -> bool:
    images, weight = (graph.tensors[name].shape for name in op.inputs[:2])
    if dict(op.attributes).get("group", 1) != 1 or len(images) != 4:
        return False
    positions = math.prod(graph.tensors[op.outputs[0]].shape[2:])
    is_plain = math.prod(weight[2:]) == 1 and positions == math.prod(images[2:]) and positions % PLAIN_POSITIONS == 0
    return not is_plain


def _is_image(graph: Graph, name: str) -> bool:
    return not graph.is_weight(name) and len(graph.tensors[name].shape) >= 3


def _moves_channels(op: Operator) -> bool:
    """Whether an operator is a view that makes the last dim the second, the others as they were."""
    order = dict(op.attributes).get("perm") if op.kind == "Transpose" else None
    if not isinstance(order, tuple | list) or len(order) < 3:
        return False
    return list(order) == [0, len(order) - 1, *range(1, len(order) - 1)]
