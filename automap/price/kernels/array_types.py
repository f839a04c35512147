"""How rows and groups of arrays are declared once, for numpy, for numba and for mypy.

A *row* is a dataclass of numbers: `dtype_of` makes numpy's structured dtype of it, and kernels read its fields by name
(`operators[op].first_operand`). A *group of arrays* is a NamedTuple whose fields are annotated with the aliases below:
`tuple_type` makes numba's type of it. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Sequence
from typing import Annotated, Any

import numba
import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types

Ints = Annotated[npt.NDArray[np.int64], int64[::1]]
Ints2 = Annotated[npt.NDArray[np.int64], int64[:, ::1]]
Ints3 = Annotated[npt.NDArray[np.int64], int64[:, :, ::1]]
Ints4 = Annotated[npt.NDArray[np.int64], int64[:, :, :, ::1]]
Ints5 = Annotated[npt.NDArray[np.int64], int64[:, :, :, :, ::1]]
Floats = Annotated[npt.NDArray[np.float64], float64[::1]]
Floats2 = Annotated[npt.NDArray[np.float64], float64[:, ::1]]
Floats3 = Annotated[npt.NDArray[np.float64], float64[:, :, ::1]]
Mask = Annotated[npt.NDArray[np.bool_], boolean[::1]]
Mask2 = Annotated[npt.NDArray[np.bool_], boolean[:, ::1]]
Mask3 = Annotated[npt.NDArray[np.bool_], boolean[:, :, ::1]]
Mask5 = Annotated[npt.NDArray[np.bool_], boolean[:, :, :, :, ::1]]
Rows = npt.NDArray[Any]
"""An array of a structured dtype. As a field of a group of arrays, it is annotated with numba's type."""
Record = Any
"""One row of such an array, a `numpy.record`."""

_SCALARS = {int: (np.int64, int64), float: (np.float64, float64), bool: (np.bool_, boolean)}


@functools.cache
def dtype_of(row: type) -> np.dtype[Any]:
    """numpy's dtype of a row.

    Args:
        row: a dataclass whose fields are `int`, `float`, another row, or `Annotated[..., dtype, length]` for a short
            array of numbers.
    """
    fields: list[tuple[Any, ...]] = []
    for name, hint in typing.get_type_hints(row, include_extras=True).items():
        if typing.get_origin(hint) is Annotated:
            kind, length = hint.__metadata__
            fields.append((name, kind, (length,)))
        elif hint in _SCALARS:
            fields.append((name, _SCALARS[hint][0]))
        else:
            fields.append((name, dtype_of(hint)))
    return np.dtype((np.record, np.dtype(fields, align=True)))


def tuple_type(group: type) -> Any:
    """numba's type of a NamedTuple of arrays, numbers, records and other such NamedTuples."""
    members = []
    for hint in typing.get_type_hints(group, include_extras=True).values():
        if typing.get_origin(hint) is Annotated:
            members.append(hint.__metadata__[0])
        else:
            members.append(_SCALARS[hint][1] if hint in _SCALARS else tuple_type(hint))
    return types.BaseTuple.from_types(tuple(members), group)


def record_type(dtype: np.dtype[Any]) -> Any:
    """numba's type of one row of a structured dtype."""
    return numba.from_dtype(dtype)


def rows_type(dtype: np.dtype[Any], num_dims: int = 1) -> Any:
    """numba's type of a contiguous array of rows."""
    return types.Array(record_type(dtype), num_dims, "C")


def numbers_of(rows: Rows) -> npt.NDArray[np.float64]:
    """[..., fields] the same memory as rows whose fields are all floats, as an array of them."""
    return rows.view(np.float64).reshape(*rows.shape, rows.dtype.itemsize // 8)


def records_of(numbers: npt.NDArray[np.float64], dtype: np.dtype[Any]) -> Rows:
    """The inverse of `numbers_of`: [..., fields] the same memory as rows, if it is contiguous."""
    return np.ascontiguousarray(numbers).view(dtype).reshape(numbers.shape[:-1])


def columns_of(dtype: np.dtype[Any], *names: str) -> list[int]:
    """Columns of `numbers_of` that hold the named fields; a short array takes as many columns as it has numbers."""
    found: list[int] = []
    fields = dtype.fields
    assert fields is not None
    for name in names:
        kind, offset, *_ = fields[name]
        found += range(offset // 8, (offset + kind.itemsize) // 8)
    return found


def rows_of(rows: Sequence[Any], dtype: np.dtype[Any]) -> Rows:
    """The array of a list of dataclass instances."""
    names = dtype.names or ()
    return np.array([tuple(getattr(row, name) for name in names) for row in rows], dtype=dtype)


def record_of(row: Any) -> Record:
    """The record of one dataclass instance."""
    kind: Any = type(row)
    return rows_of([row], dtype_of(kind))[0]
