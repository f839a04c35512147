"""Loss scaling for training in fp16, whose smallest numbers are larger than many gradients.

The loss is multiplied by a scale before the backward pass, and gradients are divided by it afterwards. A scale that
makes any gradient of any rank infinite is halved, and this step is left out; after many good steps it is doubled.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from automap.runtime.trainer.gradients import local_of

FIRST_SCALE = 2.0**16
"""The scale at first; this and the next two are the defaults of `torch.amp.GradScaler`."""
GROWTH = 2.0
"""Factor by which the scale grows."""
GOOD_STEPS = 2000
"""Number of good steps before it grows."""


class LossScale:
    """The scale of the loss, which is the same on every rank.

    Attributes:
        scale: the factor of the loss in the next step.
        num_skipped: steps that were left out since the trainer was made.
    """

    def __init__(self, device: torch.device, *, on: bool) -> None:
        """Starts at `FIRST_SCALE`; where it is not `on`, the scale is 1 for ever and nothing is checked."""
        self._device, self._on = device, on
        self.scale = FIRST_SCALE if on else 1.0
        self.num_skipped = 0
        self._good_steps = 0

    def finish(self, parameters: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Divides gradients by the scale, or removes all of them where one of any rank is not finite.

        An optimizer changes neither parameters without gradients nor their state. All ranks must call this.

        Args:
            parameters: those of this rank.
            group: the ranks that train together; None = all.
        """
        if not self._on:
            return
        held = [parameter for parameter in parameters if parameter.grad is not None]
        gradients = [local_of(p.grad) for p in held if p.grad is not None]
        found = torch.zeros((), device=self._device)
        for gradient in gradients:
            found += (~torch.isfinite(gradient)).any()
        if dist.get_world_size() > 1:
            dist.all_reduce(found, group=group)
        if found:
            for parameter in held:
                parameter.grad = None
            self.scale /= GROWTH
            self._good_steps, self.num_skipped = 0, self.num_skipped + 1
            return
        for gradient in gradients:
            gradient.div_(self.scale)
        self._good_steps += 1
        if self._good_steps == GOOD_STEPS:
            self.scale *= GROWTH
            self._good_steps = 0

    def state(self) -> Tensor:
        """[2] what a checkpoint keeps: the scale, and the number of good steps since it last changed."""
        return torch.tensor([self.scale, self._good_steps], dtype=torch.float64)

    def restore(self, state: Tensor) -> None:
        """Continues from a checkpoint, unless that has no scale."""
        scale, good_steps = state.tolist()
        if self._on and scale > 1.0:
            self.scale, self._good_steps = scale, int(good_steps)
