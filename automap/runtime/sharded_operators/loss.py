"""Cross-entropy with split classes or split rows."""

from __future__ import annotations

import torch
from torch import Tensor

from automap.runtime.operators.loss import wide
from automap.runtime.sharded_operators.call import Call
from automap.runtime.split_cross_entropy import SplitScores
from ir.factors import BROADCAST, PARTIAL


def loss(call: Call) -> list[Tensor]:
    """The loss of scores or log-probabilities; a mean over split rows all-reduces their sum and their count."""
    operator, attributes, x = call.operator, call.operator.attributes, wide(call.x)
    dim = attributes.get("class_dim", 1 if x.ndim > 1 else 0)
    classes, rows = operator.axes("cross_entropy"), operator.axes("norm")
    scores = SplitScores(x, classes, dim=dim, first_class=call.start(0, dim), tag=call.tag)
    is_log = operator.op.kind == "NegativeLogLikelihoodLoss"
    labels, weight = call.operands[1].to(torch.int64), call.operands[2] if len(call.operands) > 2 else None
    kept = torch.ones_like(labels, dtype=torch.bool)
    if "ignore_index" in attributes:
        kept = labels != attributes["ignore_index"]
    labels = torch.where(kept, labels, torch.zeros_like(labels))
    share = kept.to(x.dtype)
    if weight is not None:
        index, mine = scores.local(labels)
        share = call.total(weight[index] * (mine & kept), classes, BROADCAST)
    losses = (-scores.of_labels(labels) if is_log else scores.cross_entropy(labels)) * share
    reduction = attributes.get("reduction", "mean")
    found = losses if reduction == "none" else losses.sum()
    if reduction == "mean":
        found = call.total(found, rows, BROADCAST) / call.total(share.sum(), rows, BROADCAST)
    if len(operator.shapes) == 1:
        return [found]
    return operator.results([found, x if is_log else x - scores.log_sum(PARTIAL)])
