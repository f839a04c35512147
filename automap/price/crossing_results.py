"""Results that cross out of a unit and that its backward pass needs, such as those of a ReLU.

The next unit often saves them too, as operands, but they are in memory once. So the bytes of such a result count in the
unit that reads it, and not in the unit that makes it, unless a chunk ends between the two.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np

from automap.arrays import Ints
from automap.price.kernels.records import BOUNDARY, Arrays
from ir.blocks import Blocks


def leave_results_behind(arrays: Arrays, spans: Ints, boundary_out: Ints, blocks: Blocks) -> None:
    """Marks the results whose bytes count in the next unit, and the operands by which the next units count them.

    Args:
        arrays: the tables of the kernels; fields of operands are written.
        spans: [types + 1] first operator row of each unit type.
        boundary_out: [types] operand row whose tensor crosses out of a unit, or -1.
        blocks: the units of the model.
    """
    operands, tensors = arrays.operands, arrays.tensors
    root = tensors["root"][operands["tensor"]]
    bounds = np.append(arrays.operators["first_operand"], len(operands))[spans].tolist()
    is_saved_as_made = (operands["is_saved"] == 1) & (operands["copy_share"] == 0.0)
    results, incoming, keepers = dict[int, Ints](), dict[int, int](), set[int]()
    for unit_type, (first, last) in enumerate(itertools.pairwise(bounds)):
        made, own = boundary_out[unit_type], slice(first, last)
        kept = np.flatnonzero(is_saved_as_made[own] & (root[own] == root[made])) + first
        if made >= 0 and len(kept):
            results[unit_type] = kept
        read = np.flatnonzero(tensors["role"][operands["tensor"][own]] == BOUNDARY) + first
        if len(read):
            incoming[unit_type] = int(read[0])
            if np.any(is_saved_as_made[own] & (root[own] == root[read[0]])):
                keepers.add(unit_type)
    left, taken = _agreed(blocks, set(results), set(incoming), keepers)
    for unit_type in left:
        operands["is_saved"][results[unit_type]] = 0
        operands["is_kept_behind"][[*results[unit_type].tolist(), boundary_out[unit_type]]] = 1
    operands["is_held"][[incoming[unit_type] for unit_type in taken]] = 1


def _agreed(blocks: Blocks, makers: set[int], readers: set[int], keepers: set[int]) -> tuple[set[int], set[int]]:
    """Unit types whose results count in the next unit, and unit types that count the result of the unit before.

    Units of one type must agree. A type is in the first set if all types that follow it are in the second one, and in
    the second set if all types that precede it are in the first one. If a type saves what crosses into it by itself,
    such as a convolution does, one preceding type is enough: behind the others, the tensor counts once as well. The
    largest such sets are returned.

    Args:
        blocks: the units of the model.
        makers: types with a result that crosses out and that their backward pass needs.
        readers: types that read the tensor which crosses into them.
        keepers: readers whose own operators save this tensor as it is.
    """
    pairs = defaultdict[int, set[int]](set), defaultdict[int, set[int]](set)
    for unit, following in itertools.pairwise(blocks.units):
        pairs[0][unit.type].add(following.type)
        pairs[1][following.type].add(unit.type)
    while True:
        left = {one for one in makers if pairs[0][one] <= readers}
        taken = {one for one in readers if pairs[1][one] & left and (one in keepers or pairs[1][one] <= left)}
        if (left, taken) == (makers, readers):
            return left, taken
        makers, readers = left, taken
