"""Averages the parameters of replicas that are trained apart and synchronised periodically (`automap.plan.Sync`).

    local_sgd           every `period` steps                  w <- mean of w
    dasgd               every `period` steps, at step s, the average of w begins; at step s + delay
      corrected                                               w <- mean of w_s + (w - w_s)
      mixing                                                  w <- xi w + (1 - xi) mean of w_s,  xi = local_share

DaSGD: arXiv 2006.00441. In the mean, each replica is weighted by its samples, so that local SGD of period 1 with plain
SGD is the synchronous step. Moments of the optimizer are not averaged. Units: steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automap.plan import Sync
from automap.runtime.executor.stage_program import StageProgram
from automap.runtime.mesh_groups import Axis
from automap.runtime.redistribute import note


def replica_share(stage: StageProgram) -> float:
    """The samples of this rank's replica over those of all; 1 where no replicas are trained apart."""
    axis = stage.mesh.apart
    if axis is None:
        return 1.0
    placements = tuple(0 if other is axis else -1 for other in stage.mesh.axes)
    ((start, stop),) = stage.layouts.box(((1,), 0), placements, stage.mesh.here)
    return (stop - start) / stage.layouts.samples


@dataclass
class _Average:
    """An average of the parameters of all replicas, which has been started and is not merged yet."""

    due: int
    """The step after which it is merged."""
    average: Tensor
    """[all parameters] the weighted mean, once the all-reduce is complete."""
    snapshot: Tensor | None
    """[all parameters] what this replica gave, for the corrected merge."""
    local_share: float
    """The weight of the replica's own parameters in a merge without a snapshot."""
    handle: dist.Work


class Replicas:
    """The parameters of one rank, averaged periodically with those of the other replicas."""

    def __init__(self, sync: Sync, parameters: Sequence[Tensor], axis: Axis, share: float) -> None:
        """Takes parameters that are equal on all replicas.

        Args:
            sync: a mode that is not synchronous.
            parameters: the tensors that the optimizer updates, in the same order on all replicas; changed in place.
            axis: the axis of the replicas. Nothing else may run collectives on it while an average is under way.
            share: the weight of this replica, see `replica_share`.
        """
        assert sync.period is not None, "synchronous training has no replicas to average"
        self._sync, self._axis, self._share = sync, axis, share
        self._period = sync.period
        self._parameters = list(parameters)
        self._steps = 0
        self._under_way: _Average | None = None

    def after_step(self) -> bool:
        """To be called after every optimizer step, on all ranks; returns whether parameters have changed."""
        self._steps += 1
        merges = self._under_way is not None and self._steps == self._under_way.due
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
        """Merges the average under way and averages once more: all replicas are then equal."""
        if self._under_way is not None:
            self._merge()
        self._send(0, 0.0)
        self._merge()

    @torch.no_grad()
    def _send(self, delay: int, local_share: float | None) -> None:
        """Begins to average the present parameters.

        Args:
            delay: steps until the average is merged.
            local_share: the weight of the replica's own parameters then; None = a corrected merge.
        """
        flat = torch.cat([p.detach().reshape(-1) for p in self._parameters])
        snapshot = flat.clone() if local_share is None else None
        flat.mul_(self._share)
        note("all_reduce", self._axis, flat.nbytes, ("", "replicas"))
        handle = dist.all_reduce(flat, group=self._axis.group, async_op=True)
        assert handle is not None
        self._under_way = _Average(self._steps + delay, flat, snapshot, local_share or 0.0, handle)

    @torch.no_grad()
    def _merge(self) -> None:
        """Waits for the average under way and merges it."""
        sent, self._under_way = self._under_way, None
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
