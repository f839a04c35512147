"""Checks of what a step of a training is given, before anything runs.

One process raises an error where it looks up a row or a class that is not there. Of ranks that have parts of a table or
of the classes, none would find it, and all would go on with zeros; of replicas, one would raise and the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from automap.errors import PlanError
from automap.runtime.executor.synthetic_data import index_limits
from automap.runtime.trainer.losses import IGNORED
from ir.graph import Graph

NOTHING = torch.iinfo(torch.int64).min
"""Stands for no number, where ranks look for the largest."""


def check_step(data: Sequence[object], graph: Graph, num_samples: int) -> None:
    """Refuses data that are not those of the network, and a step inside of `torch.autocast`.

    Around a step, autocast would change the number format of some of its passes, and leave that of others.

    Args:
        data: the inputs and the labels of the samples of this rank.
        graph: the graph of the network.
        num_samples: the number of samples of this rank.

    Raises:
        PlanError: names what differs.
    """
    if any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")):
        raise PlanError(
            "the precision of the plan decides the number formats of a step", field="training.precision",
            value="torch.autocast", repair="Call the step outside of it; search with --precision bf16 or fp16.",
        )  # fmt: skip
    names = [*(tensor.name for tensor in graph.data_inputs), "labels"]
    if len(data) != len(names):
        raise PlanError(
            f"a step takes {len(names)} tensors", field="data", value=len(data), repair=f"Give {', '.join(names)}."
        )
    for name, x in zip(names, data, strict=True):
        if not isinstance(x, Tensor):
            raise PlanError("not a tensor", field=f"data.{name}", value=type(x).__name__, repair="Give a torch.Tensor.")
    lengths = [len(x) if isinstance(x, Tensor) and x.dim() else 0 for x in data]
    if any(length != num_samples for length in lengths):
        raise PlanError(
            f"this rank reads {num_samples} samples", field="data", value=lengths,
            repair="Give the samples at `trainer.rows` of a global batch. Fill up a smaller one by samples that do not"
            f" count: their labels are all {IGNORED}, or their targets of the mean squared error are all NaN.",
        )  # fmt: skip


class Indices:
    """The inputs that are rows of tables, and the labels that are classes, with their limits."""

    def __init__(self, graph: Graph, *, has_classes: bool = True) -> None:
        """Finds the inputs and the labels whose values are limited.

        Args:
            graph: the graph of the network, with its loss.
            has_classes: whether labels are classes, which those of a loss of the user's need not be.
        """
        limits, labels = index_limits(graph), graph.operators[-1].inputs[1]
        names = [tensor.name for tensor in graph.data_inputs]
        self._limits = [(place, name, limits[name]) for place, name in enumerate(names) if name in limits]
        if has_classes and labels in limits:
            self._limits.append((len(names), "labels", limits[labels]))

    def _outside(self, data: Sequence[Tensor]) -> Tensor:
        """[inputs with a limit] the largest number of each that is neither a row nor a class, or `NOTHING`."""
        found = torch.full((len(self._limits),), NOTHING, device=data[-1].device)
        for number, (place, name, limit) in enumerate(self._limits):
            x = data[place].to(torch.int64).flatten()
            wrong = (x < 0) | (x >= limit)
            if name == "labels":
                wrong &= x != IGNORED
            if len(x):
                found[number] = torch.where(wrong, x, NOTHING).max()
        return found

    def count(self, labels: Tensor, data: Sequence[Tensor], group: dist.ProcessGroup | None) -> float:
        """The number of labels that the loss of a batch is divided by; a collective of all ranks that train together.

        Args:
            labels: the number of labels that this rank alone counts.
            data: the inputs and the labels of the samples of this rank.
            group: the ranks that train together; None = all.

        Raises:
            PlanError: no label counts, or a number is neither a row of its table nor a class: on all ranks alike.
        """
        outside = self._outside(data)
        found = torch.stack([labels.to(torch.float64), (outside != NOTHING).sum().to(torch.float64)])
        if dist.get_world_size() > 1:
            dist.all_reduce(found, group=group)
        count: float
        count, wrong = found.tolist()
        if wrong:
            if dist.get_world_size() > 1:
                dist.all_reduce(outside, dist.ReduceOp.MAX, group=group)
            raise self._refusal(outside.tolist())
        if not count:
            raise PlanError(
                "no label of the batch counts", field="data.labels", value=0, repair="Leave such a batch out.",
            )  # fmt: skip
        return count

    def _refusal(self, outside: Sequence[int]) -> PlanError:
        """The error for the first input of which some rank has a number outside."""
        value, (_, name, limit) = next(one for one in zip(outside, self._limits, strict=True) if one[0] != NOTHING)
        if name == "labels":
            repair = f"Give classes from 0 to {limit - 1}, and {IGNORED} where there is no label."
            return PlanError(f"the network has {limit} classes", field="data.labels", value=value, repair=repair)
        repair = f"Give numbers from 0 to {limit - 1}."
        return PlanError(f"the network looks up {limit} rows", field=f"data.{name}", value=value, repair=repair)
