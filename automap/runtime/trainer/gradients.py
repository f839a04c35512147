"""Gradients summed over groups of ranks, in buckets: after the backward passes, or while the last of them runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

FIRST_BUCKET_BYTES = 2**20
"""Size of the first bucket, small so that communication begins early: torch's default in DistributedDataParallel."""
BUCKET_BYTES = 25 * 2**20
"""Size of the other buckets: the default there too."""


def local_of(value: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return value.to_local() if isinstance(value, DTensor) else value


class OverlappedSums:
    """Sums gradients over replicas: a bucket is sent as soon as the last backward pass of a step has completed it.

    All ranks send buckets in the same order, from the end of the network to its beginning.
    """

    def __init__(self, parameters: Mapping[nn.Parameter, int], group: dist.ProcessGroup) -> None:
        """Takes the parameters whose gradients are summed; there are no buckets yet.

        Args:
            parameters: parameter -> the number of backward passes of a step that reach it; in the same order on every
                rank.
            group: the replicas.
        """
        self._parameters, self._group = parameters, group
        self._trained: list[nn.Parameter] = []
        self._buckets: list[list[nn.Parameter]] = []
        self._hooked: set[int] = set()
        self._missing: list[int] = []
        self._passes: list[int] = []
        self._under_way: list[tuple[dist.Work, Tensor]] = []

    def begin(self) -> None:
        """To be called before the first backward pass of a step; users may freeze parameters between steps."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if list(map(id, trained)) != list(map(id, self._trained)):
            self._take(trained)
        self._missing = list(self._passes)

    def _take(self, trained: list[nn.Parameter]) -> None:
        """Fills buckets with the parameters that are trained now."""
        self._trained, self._buckets = trained, list(_buckets(reversed(trained)))
        self._passes = [sum(self._parameters[p] for p in bucket) for bucket in self._buckets]
        self._home = {id(p): number for number, bucket in enumerate(self._buckets) for p in bucket}
        for parameter in (p for p in trained if id(p) not in self._hooked):
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
            self._hooked.add(id(parameter))

    def _arrived(self, parameter: Tensor) -> None:
        if self._missing:
            self._missing[self._home[id(parameter)]] -= 1
            self._start(0)

    def _start(self, most_missing: int | None) -> None:
        """Sends the next buckets that lack at most this many gradients; None = all buckets."""
        while len(self._under_way) < len(self._buckets):
            number = len(self._under_way)
            if most_missing is not None and self._missing[number] > most_missing:
                break
            flat = _flat(self._buckets[number])
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._under_way.append((work, flat))

    def finish(self) -> None:
        """Completes the gradients after the last backward pass; those that this rank has not computed count as zero."""
        self._start(None)
        for (work, flat), bucket in zip(self._under_way, self._buckets, strict=True):
            work.wait()
            _give(flat, bucket)
        self._missing, self._under_way = [], []


class Earlier:
    """Gradients that exist before a step. Those of the step are added to them after they have been summed over ranks.

    The earlier gradients have been summed before, and must not be summed over ranks again.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """Takes the gradients away from the parameters, which have none afterwards."""
        self._held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in self._held:
            parameter.grad = None

    def add(self, *, to_all: bool) -> None:
        """Adds them to the gradients of the step.

        Args:
            to_all: whether they are kept; otherwise the step was skipped, and they are dropped too.
        """
        for parameter, gradient in self._held if to_all else ():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def square_of(gradients: Iterable[tuple[Tensor, float]], device: torch.device) -> Tensor:
    """The sum of the squares of this rank's gradients, each divided by the number of ranks that have it."""
    found = torch.zeros((), dtype=torch.float64, device=device)
    for gradient, copies in gradients:
        found += torch.linalg.vector_norm(gradient, dtype=torch.float64).square() / copies
    return found


EPSILON = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm before it divides by it."""


def shorten(gradients: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scales this rank's gradients, whose norm over all ranks is known, as `torch.nn.utils.clip_grad_norm_` does."""
    factor = max_norm / (norm + EPSILON)
    for gradient in gradients if factor < 1.0 else ():
        gradient.mul_(factor)


def sum_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sums gradients over the ranks of a group, one bucket after the other."""
    for bucket in _buckets(p for p in parameters if p.requires_grad):
        flat = _flat(bucket)
        dist.all_reduce(flat, group=group)
        _give(flat, bucket)


def tie_groups(
    ties: Mapping[str, str], stages: Sequence[nn.Module], num_ranks: int, columns: Sequence[Sequence[int]]
) -> list[tuple[set[str], dist.ProcessGroup]]:
    """The names of each weight that several stages hold, and the ranks that add up its gradients. A collective.

    Args:
        ties: the names of shared parameters -> the first name of each.
        stages: all stages of a pipeline, which ranks hold in turn.
        num_ranks: the number of pipeline ranks.
        columns: [pipelines][pipeline ranks] numbers of processes.
    """
    found = []
    names = [{name for name, _ in stage.named_parameters(remove_duplicate=False)} for stage in stages]
    for first in dict.fromkeys(ties.values()):
        aliases = {first, *(alias for alias, other in ties.items() if other == first)}
        holders = sorted({i % num_ranks for i, held in enumerate(names) if held & aliases})
        for column in columns if len(holders) > 1 else ():
            ranks = [column[i] for i in holders]
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                found.append((aliases, group))
    return found


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    held, most = 0, FIRST_BUCKET_BYTES
    for parameter in parameters:
        size = local_of(parameter).nbytes
        if bucket and (parameter.dtype != bucket[0].dtype or held + size > most):
            yield bucket
            bucket, held, most = [], 0, BUCKET_BYTES
        bucket.append(parameter)
        held += size
    if bucket:
        yield bucket


def _flat(bucket: Sequence[nn.Parameter]) -> Tensor:
    """The gradients of a bucket as one vector; missing ones are made as zeros."""
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return torch.cat([local_of(p.grad).reshape(-1) for p in bucket if p.grad is not None])


def _give(flat: Tensor, bucket: Sequence[nn.Parameter]) -> None:
    """Writes the parts of a vector to the gradients of a bucket."""
    for parameter, part in zip(bucket, torch.split(flat, [local_of(p).numel() for p in bucket]), strict=True):
        assert parameter.grad is not None
        if isinstance(parameter.grad, DTensor):
            parameter.grad.to_local().copy_(part.reshape(parameter.grad.to_local().shape))
        else:
            parameter.grad = part.reshape(parameter.shape)
