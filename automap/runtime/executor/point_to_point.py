"""Mail: parts of tensors on their way between ranks, begun at once and waited for where they are used.

All ranks post the same pieces in the same order; that order numbers the messages. A part that stays on its rank is not
sent. Knows no stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automap.runtime.executor.transfer_plan import Piece, TensorLayout, extent, inside
from automap.runtime.stage_program import Box


@dataclass(frozen=True, slots=True)
class _Arrival:
    box: Box
    tensor: Tensor
    work: dist.Work | None


class Mail:
    """Sends and receives of one rank."""

    def __init__(self, rank: int, device: torch.device) -> None:
        """For a rank of the default group, with tensors on `device`."""
        self.rank = rank
        self.device = device
        self._tag = 0
        self._arrivals: dict[Hashable, list[_Arrival]] = {}
        self._sends: dict[Hashable, list[tuple[dist.Work, Tensor]]] = {}

    def post(
        self, pieces: Sequence[Piece], sources: TensorLayout, tensor: Tensor | None, dtype: torch.dtype, *,
        under: Hashable, sent_under: Hashable,
    ) -> None:  # fmt: skip
        """Begins what this rank has to do with the pieces of a tensor.

        Args:
            pieces: of all ranks.
            sources: the layout of those who send.
            tensor: this rank's part of that layout; None where it has none.
            dtype: of the elements.
            under: what `take` will ask for.
            sent_under: what `settle` will ask for.
        """
        for piece in pieces:
            self._tag += 1
            if self.rank not in (piece.source, piece.target):
                continue
            if piece.source == self.rank:
                assert tensor is not None  # it is among the sources
                part = tensor.detach()[inside(piece.box, sources[self.rank])]
                if piece.target == self.rank:
                    self._arrivals.setdefault(under, []).append(_Arrival(piece.box, part, None))
                    continue
                part = part.contiguous()
                work = dist.isend(part, piece.target, tag=self._tag)
                assert work is not None  # this rank is in the default group
                self._sends.setdefault(sent_under, []).append((work, part))
            else:
                part = torch.empty(extent(piece.box), dtype=dtype, device=self.device)
                work = dist.irecv(part, piece.source, tag=self._tag)
                self._arrivals.setdefault(under, []).append(_Arrival(piece.box, part, work))

    def take(self, under: Hashable, box: Box, dtype: torch.dtype) -> Tensor:
        """This rank's part of a tensor, put together from its pieces; waits for them."""
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
        """Waits for the oldest sends until `left` of them are on their way."""
        pending = self._sends.get(sent_under, [])
        while len(pending) > left:
            work, _ = pending[0]
            work.wait()
            del pending[0]
        if not pending:
            self._sends.pop(sent_under, None)

    def settle_all(self) -> None:
        """Waits for all sends; message numbers begin anew."""
        for key in list(self._sends):
            self.settle(key)
        self._tag = 0
