"""Recognises stored float tensors that are not trained, but were computed by a tool that folds constants.

Attention masks, tables of rotary embeddings, sinusoidal positions and their frequencies are then stored like weights,
and can be distinguished from them only by their numbers. Stripped files mark them in metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.onnx.readers.nodes import COMPUTED_KEY, has_data, metadata
from ir.operators import Value

HIDDEN = -9_000.0
"""Largest number that a mask adds to masked scores (assumed; -10,000 is most common, also in fp16)."""
MAX_ELEMENTS = 1 << 24
"""Elements of the largest tensor that is examined (assumed): a mask or table of 4,096 positions."""
MAX_ALIKE = 8
"""Tensors of one shape that are compared with each other (assumed): models have one or two pairs of tables."""
POSITIONS: Mapping[str, tuple[int, ...]] = dict.fromkeys(("Add", "Sub", "Mul"), (0, 1)) | {
    "Gather": (0,), "Where": (1, 2), "MatMul": (0,), "Gemm": (0,),
}  # fmt: skip
"""Kind -> operand positions in which masks and tables are read: products project tables of relative positions."""
LEAST_TRIANGLE = 3
"""Sides of the largest triangle that may be a coincidence (assumed): three zeros."""
LEAST_FREQUENCIES = 8
"""Frequencies of the shortest table that is recognised (assumed)."""
TOLERANCE = 0.02
"""Largest relative spread of the sums of squares of cosines and sines, and of the steps between logarithms of
frequencies (assumed: squares of bfloat16 are 0.8 % off)."""


def computed_tables(reads: Iterable[tuple[str, int, str]], tensors: Mapping[str, Any]) -> set[str]:
    """Names of stored float tensors that are masks, tables of cosines and sines, or their frequencies.

    Args:
        reads: kind of a node, position, name of the operand there.
        tensors: stored tensors of the file (protobuf) by name.
    """
    names = dict.fromkeys(name for kind, at, name in reads if at in POSITIONS.get(kind, ()) and name in tensors)
    found: set[str] = set()
    alike: dict[tuple[int, ...], list[tuple[str, Value]]] = {}
    for name in names:
        tensor = tensors[name]
        shape = tuple(tensor.dims)
        if metadata(tensor).get(COMPUTED_KEY) == "1":
            found.add(name)
        if len(shape) < 1 or not 3 < prod(shape) <= MAX_ELEMENTS or not has_data(tensor):
            continue
        value = np.asarray(numpy_helper.to_array(tensor))
        if value.dtype.kind in "iub":
            continue
        value = value.astype(np.float32)
        if prod(shape) == shape[-1]:
            if _is_geometric(value.reshape(-1)):
                found.add(name)
            if len(shape) == 1:
                continue
        if (
            _is_mask(value)
            or _is_triangular(value)
            or _is_circular(value[..., ::2], value[..., 1::2])
            or _is_sinusoidal(value)
        ):
            found.add(name)
        elif np.abs(value).max() <= 2:
            alike.setdefault(shape, []).append((name, value))
    for group in alike.values():
        # Each layer may have its own copies.
        distinct: dict[bytes, tuple[Value, list[str]]] = {}
        for name, value in group:
            distinct.setdefault(value.tobytes(), (value, []))[1].append(name)
        for (one, its), (other, others) in combinations(list(distinct.values())[:MAX_ALIKE], 2):
            if _is_circular(one, other):
                found.update(its, others)
    return found


def _is_mask(value: Value) -> bool:
    """Whether a tensor is a mask: zeros and large negative numbers, zeros and ones, or only zeros for all heads."""
    low, high = value.min(), value.max()
    if low == high == 0:
        return value.ndim == 4 and value.shape[1] == 1 and min(value.shape[2:]) > 1
    return bool(low <= HIDDEN) or bool(low == 0 and high == 1 and ((value == 0) | (value == 1)).all())


def _is_triangular(value: Value) -> bool:
    """Whether the last two dims are triangles with zeros above the diagonal, as the decays of a retention (RetNet)."""
    size = value.shape[-1]
    is_square = size > LEAST_TRIANGLE and value.shape[-2] == size
    return is_square and bool(value.any()) and not np.triu(value, 1).any()


def _is_geometric(value: Value) -> bool:
    """Whether numbers are the frequencies of a sinusoidal embedding: a geometric sequence."""
    if len(value) < LEAST_FREQUENCIES or value.min() <= 0 or value[-1] >= value[0]:
        return False
    logarithms = np.log(value.astype(np.float64))
    steps = np.diff(logarithms)
    return float(np.ptp(steps)) <= TOLERANCE * abs(float(steps.mean()))


def _is_sinusoidal(value: Value) -> bool:
    """Whether the last dim has sines and cosines of one coordinate or, in two halves, of two coordinates."""
    half = value.shape[-1] // 2
    return _has_circular_halves(value) or (
        half % 2 == 0 and all(_has_circular_halves(each) for each in (value[..., :half], value[..., half:]))
    )


def _has_circular_halves(value: Value) -> bool:
    half = value.shape[-1] // 2
    return _is_circular(value[..., :half], value[..., half:])


def _is_circular(a: Value, b: Value) -> bool:
    """Whether two tensors are cosines and sines, or multiples of them: the sum of their squares is constant."""
    if a.shape != b.shape or a.size < 2:
        return False
    total = a * a + b * b
    high = float(total.max())
    spread = high - float(total.min())
    varies = float(np.ptp(a)) > 0 and float(np.ptp(b)) > 0
    return varies and np.isfinite(high) and spread <= TOLERANCE * high
