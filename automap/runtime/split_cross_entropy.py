"""Cross-entropy of scores whose classes are split over ranks, for the plan executor and for the module trainer.

Three small all-reduces of one number a row replace a gather of all scores: the maximum, the sum of exponentials, and
the score of the label (vocabulary-parallel cross-entropy of Megatron-LM, arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from automap.runtime.mesh_groups import Axis
from automap.runtime.redistribute import NO_TAG, Tag, largest_over, sum_over
from ir.factors import BROADCAST, Placement


class SplitScores:
    """Scores of which each rank holds some classes.

    Rows are all positions of the scores without the class dim.
    """

    def __init__(self, scores: Tensor, axes: Sequence[Axis], *, dim: int, first_class: int, tag: Tag = NO_TAG) -> None:
        """Takes this rank's scores; communicates nothing yet.

        Args:
            scores: [..., classes of this rank, ...].
            axes: the mesh axes that split the classes; none = every rank holds all classes.
            dim: the class dim of `scores`.
            first_class: the number of this rank's first class among all classes.
            tag: the names for the record of collectives.
        """
        self.scores, self.axes, self.dim, self.first_class, self.tag = scores, axes, dim, first_class, tag
        self._top: Tensor | None = None
        self._powers: Tensor | None = None

    def log_sum(self, gradient: Placement) -> Tensor:
        """The logarithm of the sum of exponentials over all classes, of each row; the class dim is kept with size 1.

        Args:
            gradient: the placement in which the gradient of the result arrives, see `sum_over`.
        """
        if self._powers is None:
            self._top = largest_over(self.scores.amax(self.dim, keepdim=True), self.axes, self.tag)
            self._powers = torch.exp(self.scores - self._top).sum(self.dim, keepdim=True)
        assert self._top is not None
        return torch.log(sum_over(self._powers, self.axes, gradient, self.tag)) + self._top

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """[rows] the labels counted from this rank's first class, 0 for those of other ranks; and which are its own."""
        labels = labels - self.first_class
        mine = (labels >= 0) & (labels < self.scores.shape[self.dim])
        return torch.where(mine, labels, torch.zeros_like(labels)), mine

    def of_labels(self, labels: Tensor) -> Tensor:
        """[rows] the score of each row's label, on every rank."""
        index, mine = self.local(labels)
        own = self.scores.gather(self.dim, index.unsqueeze(self.dim)).squeeze(self.dim) * mine
        return sum_over(own, self.axes, BROADCAST, self.tag)

    def cross_entropy(self, labels: Tensor) -> Tensor:
        """[rows] the cross-entropy of each row, on every rank.

        Args:
            labels: [rows] class numbers among all classes.
        """
        return self.log_sum(BROADCAST).squeeze(self.dim) - self.of_labels(labels)
