"""Point-to-point transfers of parts of tensors between ranks, begun at once and waited for where they are used.

All ranks post the same routes in the same order; that order numbers the messages. A part that stays on its rank is not
sent.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automap.runtime.executor.routes import Route
from automap.runtime.executor.transfer_plan import extent, inside
from automap.runtime.tensor_layout import Box


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A part of a tensor that arrives on this rank, or that it had already."""

    box: Box
    tensor: Tensor
    work: dist.Work | None
    """The receive under way; None if the part was here."""


class PointToPoint:
    """The sends and receives of one rank."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """Takes the number of this process in the default group, and the device of its tensors."""
        self.rank = rank
        self.device = device
        self._tag = 0
        self._arrivals: dict[Hashable, list[_Arrival]] = {}
        self._sends: dict[Hashable, list[tuple[dist.Work, Tensor]]] = {}

    def post(self, route: Route, tensor: Tensor | None, *, under: Hashable, sent_under: Hashable) -> None:
        """Begins this rank's sends and receives of a route.

        Args:
            route: the pieces of a tensor for all ranks.
            tensor: this rank's part of the source layout; None if it has none.
            under: key with which `take` will read the received parts.
            sent_under: key with which `settle` will wait for the sends.
        """
        for piece in route.pieces:
            self._tag += 1
            if self.rank not in (piece.source, piece.target):
                continue
            if piece.source == self.rank:
                assert tensor is not None  # it is among the sources
                part = tensor.detach()[inside(piece.box, route.sources[self.rank])]
                if piece.target == self.rank:
                    self._arrivals.setdefault(under, []).append(_Arrival(piece.box, part, None))
                    continue
                part = part.contiguous()
                work = dist.isend(part, piece.target, tag=self._tag)
                assert work is not None  # this rank is in the default group
                self._sends.setdefault(sent_under, []).append((work, part))
            else:
                part = torch.empty(extent(piece.box), dtype=route.dtype, device=self.device)
                work = dist.irecv(part, piece.source, tag=self._tag)
                self._arrivals.setdefault(under, []).append(_Arrival(piece.box, part, work))

    def take(self, under: Hashable, box: Box, dtype: torch.dtype) -> Tensor:
        """Waits for the pieces of this rank's box of a tensor, and returns the box."""
        arrivals = self._arrivals.pop(under, [])
        for arrival in arrivals:
            if arrival.work is not None:
                arrival.work.wait()
        if len(arrivals) == 1 and arrivals[0].box == box:
            return arrivals[0].tensor
        whole = torch.empty(extent(box), dtype=dtype, device=self.device)
        for arrival in arrivals:
            whole[inside(arrival.box, box)] = arrival.tensor
        return whole

    def settle(self, sent_under: Hashable, left: int = 0) -> None:
        """Waits for the oldest sends until `left` of them are under way."""
        pending = self._sends.get(sent_under, [])
        while len(pending) > left:
            work, _ = pending[0]
            work.wait()
            del pending[0]
        if not pending:
            self._sends.pop(sent_under, None)

    def settle_all(self) -> None:
        """Waits for all sends; message numbers begin at 0 again."""
        for key in list(self._sends):
            self.settle(key)
        self._tag = 0
