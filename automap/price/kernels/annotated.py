"""Annotations of the fields of NamedTuples that kernels take: what they are for Python and for numba, said once.

A class states its fields as `degrees: Ints` or `axes: Floats2`, the digit being the number of dims, and `numba_type`
reads numba's type from them. All arrays are contiguous.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt
from numba import boolean, float64, int64, types

_Int: TypeAlias = npt.NDArray[np.int64]
_Float: TypeAlias = npt.NDArray[np.float64]
_Bool: TypeAlias = npt.NDArray[np.bool_]
Ints = Annotated[_Int, int64[::1]]
Ints2 = Annotated[_Int, int64[:, ::1]]
Ints3 = Annotated[_Int, int64[:, :, ::1]]
Ints4 = Annotated[_Int, int64[:, :, :, ::1]]
Ints5 = Annotated[_Int, int64[:, :, :, :, ::1]]
Floats = Annotated[_Float, float64[::1]]
Floats2 = Annotated[_Float, float64[:, ::1]]
Floats3 = Annotated[_Float, float64[:, :, ::1]]
Mask = Annotated[_Bool, boolean[::1]]
Mask2 = Annotated[_Bool, boolean[:, ::1]]
Mask5 = Annotated[_Bool, boolean[:, :, :, :, ::1]]
Records: TypeAlias = npt.NDArray[Any]

_KNOWN: dict[Any, Any] = {int: int64, float: float64, bool: boolean}


def rows_of(dtype: np.dtype[Any], ndim: int = 1) -> Any:
    """Numba's type of an array of records."""
    return types.Array(numba.from_dtype(dtype), ndim, "C")


def numba_type(cls: Any, **known: Any) -> Any:
    """Numba's type of a NamedTuple.

    Args:
        cls: class whose fields are annotated with numba's types, with numbers, or with other such classes.
        known: numba's types of the fields that are not.
    """
    if cls not in _KNOWN:
        hints = typing.get_type_hints(cls, include_extras=True)
        found = [known[name] if name in known else _type_of(hint) for name, hint in hints.items()]
        _KNOWN[cls] = types.BaseTuple.from_types(tuple(found), cls)
    return _KNOWN[cls]


def _type_of(hint: Any) -> Any:
    return hint.__metadata__[0] if hasattr(hint, "__metadata__") else numba_type(hint)
