"""Training losses."""

from __future__ import annotations

import torch
from torch import Tensor

from automap.runtime.operators.base import Use, function


def wide(scores: Tensor) -> Tensor:
    """The scores in float32 or wider, in which losses sum many rows."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


@function("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
def cross_entropy(use: Use) -> list[Tensor]:
    """The cross-entropy of scores or log-probabilities with integer labels; classes are in `class_dim` (default 1)."""
    scores, labels, weight = wide(use.x), use.operand(1).to(torch.int64), use.optional(2)
    dim = use.integer("class_dim", 1 if scores.ndim > 1 else 0)
    logs = torch.log_softmax(scores, dim) if use.kind == "SoftmaxCrossEntropyLoss" else scores
    kept = torch.ones_like(labels, dtype=torch.bool)
    if "ignore_index" in use.attributes:
        kept = labels != use.integer("ignore_index")
    labels = torch.where(kept, labels, torch.zeros_like(labels))
    share = kept.to(scores.dtype) if weight is None else weight[labels] * kept
    rows = -logs.gather(dim, labels.unsqueeze(dim)).squeeze(dim) * share
    reduction = use.text("reduction", "mean")
    if reduction == "none":
        return [rows, logs]
    return [rows.sum() / share.sum() if reduction == "mean" else rows.sum(), logs]


@function("MeanSquaredErrorLoss")
def mean_squared_error(use: Use) -> Tensor:
    """The squared error: the mean over the `elements` of a sample, summed over samples."""
    return ((wide(use.x) - wide(use.operand(1))) ** 2).sum() / use.integer("elements")
