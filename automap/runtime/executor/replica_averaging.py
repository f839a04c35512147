"""Sync: replicas that take optimizer steps of their own and are averaged now and then (`automap.plan.Sync`).

    local_sgd           every `period` steps                  w <- mean of w
    dasgd               every `period` steps, at step s, w sets out to be averaged; at step s + delay
      corrected                                               w <- mean of w_s + (w - w_s)
      mixing                                                  w <- xi w + (1 - xi) mean of w_s,  xi = local_share

DaSGD: arXiv 2006.00441. In the mean each replica counts by its samples, so that local SGD of period 1 under plain SGD
is the synchronous step. Moments of the optimizer stay with their replica. Units: steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automap.plan import Sync
from automap.runtime.executor.stage_outline import Outline
from automap.runtime.mesh_groups import Axis
from automap.runtime.redistribute import note


def replica_share(stage: Outline) -> float:
    """Samples of this rank's replica over those of all; 1 where replicas are not apart."""
    axis = stage.mesh.apart
    if axis is None:
        return 1.0
    placements = tuple(0 if other is axis else -1 for other in stage.mesh.axes)
    ((start, stop),) = stage.layouts.box(((1,), 0), placements, stage.mesh.here)
    return (stop - start) / stage.layouts.samples


@dataclass
class _Sent:
    """An averaging under way."""

    due: int
    """Step behind which it is merged."""
    average: Tensor
    """All parameters in a row, once the sum is there."""
    snapshot: Tensor | None
    """What this replica gave, for the corrected merge."""
    local_share: float
    """What is kept of the parameters without one."""
    handle: dist.Work


class Replicas:
    """The parameters of one rank, kept near to those of the other replicas."""

    def __init__(self, sync: Sync, parameters: Sequence[Tensor], axis: Axis, share: float) -> None:
        """For parameters that begin equal.

        Args:
            sync: not synchronous.
            parameters: in the same order on all replicas; changed in place.
            axis: of the replicas, of which nothing else may run collectives meanwhile.
            share: see `replica_share`.
        """
        assert sync.period is not None, "synchronous training has no replicas to average"
        self._sync, self._axis, self._share = sync, axis, share
        self._period = sync.period
        self._parameters = list(parameters)
        self._steps = 0
        self._sent: _Sent | None = None

    def after_step(self) -> bool:
        """To be called behind every optimizer step, on all ranks; returns whether parameters have changed."""
        self._steps += 1
        merges = self._sent is not None and self._steps == self._sent.due
        if merges:
            self._merge()
        if self._steps % self._period:
            return merges
        if self._sync.delay is None:
            self._send(0, 0.0)
            self._merge()
            return True
        self._send(self._sync.delay, self._sync.local_share)
        return merges

    def finish(self) -> None:
        """Merges what is under way and averages once more: all replicas are then equal."""
        if self._sent is not None:
            self._merge()
        self._send(0, 0.0)
        self._merge()

    @torch.no_grad()
    def _send(self, delay: int, local_share: float | None) -> None:
        """Begins to average what is there now.

        Args:
            delay: steps until it is merged.
            local_share: of the parameters as they then are; None = they are corrected.
        """
        flat = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        snapshot = flat.clone() if local_share is None else None
        flat.mul_(self._share)
        note("all_reduce", self._axis, flat.nbytes, ("", "replicas"))
        handle = dist.all_reduce(flat, group=self._axis.group, async_op=True)
        assert handle is not None
        self._sent = _Sent(self._steps + delay, flat, snapshot, local_share or 0.0, handle)

    @torch.no_grad()
    def _merge(self) -> None:
        """Waits for the average and takes it in."""
        sent, self._sent = self._sent, None
        assert sent is not None
        sent.handle.wait()
        averages = self._views(sent.average)
        if sent.snapshot is not None:
            for parameter, given, average in zip(self._parameters, self._views(sent.snapshot), averages, strict=True):
                parameter.sub_(given).add_(average)
        else:
            for parameter, average in zip(self._parameters, averages, strict=True):
                parameter.lerp_(average, 1.0 - sent.local_share)

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        parts = torch.split(flat, [p.numel() for p in self._parameters])
        return (part.view_as(p) for part, p in zip(parts, self._parameters, strict=True))
