"""Synthetic values to run a model with: parameters of a usual scale, and data of the right types and ranges.

All values follow from a seed and the name of the tensor, so that every rank makes the same values by itself.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from automap.runtime.operators.base import torch_dtype
from automap.runtime.tensor_layout import Box
from ir.graph import Graph, Operator

PASSING = {"Cast", "Concat", "Expand", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Tile",
           "Transpose", "Unsqueeze"}  # fmt: skip
"""Kinds of operators whose results hold the values of their operands."""
SPREAD = 0.02
"""The standard deviation of biases, and of scales around 1 (assumed: usual at the start of a training)."""


def index_limits(graph: Graph) -> dict[str, int]:
    """Integer input that is used as an index -> the limit below which it stays: rows of a table, classes of a loss."""
    limits: dict[str, int] = {}
    for op in reversed(graph.operators):
        positions = dict(op.attributes).get("operands", tuple(range(len(op.inputs))))
        for name, position in zip(op.inputs, positions, strict=True):
            own = _limit(graph, op, position)
            behind = [limits[made] for made in op.outputs if made in limits] if op.kind in PASSING else []
            if own is not None:
                behind.append(own)
            if behind:
                limits[name] = min([*behind, limits.get(name, behind[0])])
    return {name: limit for name, limit in limits.items() if graph.tensors[name].role == "input"}


def _limit(graph: Graph, op: Operator, position: int) -> int | None:
    """The limit of an operand of an operator, if the operand is an index."""
    attributes, tensors = dict(op.attributes), graph.tensors
    if position != 1 or graph.tensors[op.inputs[0]].shape == ():
        return None
    first = tensors[op.inputs[0]].shape
    if op.kind in ("Gather", "GatherElements"):
        return first[int(attributes.get("axis", 0))]
    if op.kind in ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"):
        return first[int(attributes.get("class_dim", 1 if len(first) > 1 else 0))]
    return None


def _generator(name: str, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()) + (seed << 32))


class RandomValues(Mapping[str, Tensor]):
    """Parameters, buffers and stored constants of a graph, each made when it is read."""

    def __init__(self, graph: Graph, seed: int) -> None:
        """Takes the graph and the seed of the values; no value is made before it is read."""
        self._graph, self._seed = graph, seed
        self._names = [name for name, t in graph.tensors.items() if name not in graph.producer and t.role != "input"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._graph.tensors and name not in self._graph.producer

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise KeyError(name)
        tensor = self._graph.tensors[name]
        dtype = torch_dtype(tensor.dtype)
        if tensor.role != "parameter" or not tensor.is_float:
            # One suits the variance of a norm, the end of a mask, and factors; zero suits indices.
            return torch.full(tensor.shape, tensor.is_float or dtype == torch.bool, dtype=dtype)
        normal = torch.randn(tensor.shape, generator=_generator(name, self._seed))
        if self._is_scale(name):
            return (1.0 + SPREAD * normal).to(dtype)
        if len(tensor.shape) < 2:
            return (SPREAD * normal).to(dtype)
        is_kernel = len(tensor.shape) > 3
        fan_in = tensor.num_elements // tensor.shape[0] if is_kernel else min(tensor.shape[-2:])
        return (normal / math.sqrt(max(fan_in, 1))).to(dtype)

    def _is_scale(self, name: str) -> bool:
        """Whether a parameter is the scale of a normalisation."""
        for index in self._graph.consumers[name][:1]:
            op = self._graph.operators[index]
            return op.kind.endswith("Normalization") and list(op.inputs).index(name) == 1
        return False


class RandomData:
    """The micro-batches of a graph's inputs, made once and kept."""

    def __init__(self, graph: Graph, num_samples: int, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        """Takes what the micro-batches are made from; none is made before it is asked for.

        Args:
            graph: the graph whose inputs are made.
            num_samples: the samples of a micro-batch.
            dtype: the type of floating-point inputs.
        """
        self._graph, self._samples, self._seed = graph, num_samples, seed
        self._dtype, self._device = dtype, device
        self._limits = index_limits(graph)
        self._kept: dict[tuple[str, Box, int], Tensor] = {}

    def __call__(self, name: str, box: Box, micro_batch: int) -> Tensor:
        """The part of an input that a box describes."""
        key = name, box, micro_batch
        if key not in self._kept:
            part = self._whole(name, micro_batch)[tuple(slice(*span) for span in box)]
            self._kept[key] = part.clone().to(self._device)
        return self._kept[key]

    def _whole(self, name: str, micro_batch: int) -> Tensor:
        tensor = self._graph.tensors[name]
        shape, dtype = tensor.shape_at(self._samples), torch_dtype(tensor.dtype)
        generator = _generator(f"{name}@{micro_batch}", self._seed)
        if tensor.is_float:
            return torch.randn(shape, generator=generator).to(self._dtype)
        if name not in self._limits:
            return torch.ones(shape, dtype=dtype)
        return torch.randint(self._limits[name], shape, generator=generator).to(dtype)
