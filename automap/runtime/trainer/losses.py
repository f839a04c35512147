"""The loss that networks are trained with where the user gives no other."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

IGNORED = -100
"""The label of rows that are left out of the loss, as in torch."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) of some samples -> the sum of their losses."""


def summed_cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of [..., classes] scores and [...] labels, summed over labels that are not `IGNORED`."""
    return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED)


def count_labels(labels: Tensor) -> Tensor:
    """The number of labels that are not `IGNORED`."""
    return (labels != IGNORED).sum()
