"""The losses that networks are trained with where the user gives no other."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ir.graph import Graph
from ir.loss import class_dim_of

IGNORED = -100
"""The label of rows that are left out of the loss, as in torch."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) of some samples -> the sum of their losses."""
CountFunction = Callable[[Tensor], Tensor]
"""labels of some samples -> the number that the sum over all samples is divided by."""


def loss_of(graph: Graph) -> tuple[LossFunction, CountFunction]:
    """The built-in loss of a plan's graph, and what it is divided by: the mean squared error, or cross-entropy."""
    if graph.operators[-1].kind == "MeanSquaredErrorLoss":
        return summed_squares, count_elements
    return summed_cross_entropy, count_labels


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of scores and labels without the dim of classes, summed over labels that are not `IGNORED`."""
    scores = classes_last(scores)
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def classes_last(scores: Tensor) -> Tensor:
    """The scores with their classes in the last dim; images have them in the second one, see `ir.loss`."""
    return scores.movedim(class_dim_of(scores.ndim), -1)


def count_labels(labels: Tensor) -> Tensor:
    """The number of labels that are not `IGNORED`."""
    return (labels != IGNORED).sum()


def summed_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """The squared errors of outputs, summed over all elements; targets have as many, in the same order.

    Samples whose targets are all NaN are left out, as those whose labels are `IGNORED`.
    """
    counts = _has_targets(targets).expand(targets.shape).reshape(outputs.shape)
    return torch.where(counts, outputs - targets.reshape(outputs.shape), 0.0).square().sum()


def count_elements(targets: Tensor) -> Tensor:
    """The number of elements that errors are taken of."""
    return _has_targets(targets).expand(targets.shape).sum()


def _has_targets(targets: Tensor) -> Tensor:
    """[samples, 1, ...] whether a sample has any target that is a number."""
    others = tuple(range(1, targets.dim()))
    is_number = ~targets.isnan()
    return is_number.any(others, keepdim=True) if others else is_number
