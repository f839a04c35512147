"""Random plans of a space, many in one compiled call."""

from __future__ import annotations

from numba import boolean, float64, int64, void

from automap.jit import borrowing, kernel
from automap.space.kernels.draft import DRAFT, new_draft
from automap.space.kernels.records import COMPILED
from automap.space.kernels.stepper import decide, is_idle, legal_values


@borrowing(int64(boolean[::1], float64), inner=True)
def _drawn(mask, number):
    """The index of a true entry of `mask`, chosen by `number` in [0, 1); all true entries have equal intervals."""
    legal = 0
    for value in range(mask.shape[0]):
        legal += mask[value]
    left = int64(number * legal)
    for value in range(mask.shape[0]):
        if mask[value]:
            if left == 0:
                return value
            left -= 1
    return -1


@borrowing(void(COMPILED, float64[:, ::1], int64[:, ::1], DRAFT), inner=True)
def _sample(compiled, numbers, values, draft):
    for plan in range(values.shape[0]):
        value = values[plan]
        for slot in range(compiled.space.first.schedule, values.shape[1]):
            if slot >= compiled.space.first.cut and is_idle(compiled.space, slot, draft.layout):
                value[slot] = 0
                continue
            num_values = legal_values(compiled, value, slot, draft)
            value[slot] = _drawn(draft.mask[:num_values], numbers[plan, slot])
            decide(compiled.space, value, slot, draft)


@kernel(void(COMPILED, float64[:, ::1], int64[:, ::1]))
def sample_many(compiled, numbers, values):
    """Completes plans whose shapes are decided, by uniform choices among the legal values of each slot.

    Args:
        numbers: [n, slots] random numbers in [0, 1) for the choices.
        values: [n, slots]; the values of the shape are read, all others are written.
    """
    _sample(compiled, numbers, values, new_draft(compiled))
