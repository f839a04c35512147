"""Types of numpy arrays, named once. A docstring beside a value says its shape and unit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def row_digests(rows: Ints, without: slice = slice(0)) -> Ints:
    """[n] digests of 64 bits of the rows of a table, [n, columns]; to sort whole rows takes ten times as long.

    That any two unlike rows of a million have the same digest has a probability of about 1e-7 (62 free bits).

    Args:
        without: columns that do not count.
    """
    factors = np.random.default_rng(0).integers(0, 1 << 63, (rows.shape[1],), dtype=np.int64) | 1
    factors[without] = 0
    found: Ints = np.einsum("ij,j->i", rows, factors)
    return found


def numbered(digests: Ints) -> tuple[Ints, Ints]:
    """Numbers distinct digests in the order in which they first occur.

    Returns:
        [n] number of each digest, [n], and [distinct ones] where each of them is first.
    """
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse.reshape(-1)], first[order]
