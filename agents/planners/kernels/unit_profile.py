"""Memory of many units by the formulas of the price; compiled. Units: bytes."""

from __future__ import annotations

from numba import float64, void

from automap.jit import borrowing
from automap.price.kernels.cost_records import SETTINGS
from automap.price.kernels.memory import state_bytes, working_bytes


@borrowing(void(float64[:, ::1], SETTINGS, float64[::1]))
def states_of(parameters, settings, found):
    """`state_bytes` of many units, all kinds of state together.

    Args:
        parameters: [4, n] for each unit the parameters that a rank holds without ZeRO, those that it holds under ZeRO,
            the frozen ones of the former, and the frozen ones of the latter.
        settings: the settings of the price under a ZeRO stage.
        found: [n] bytes; written.
    """
    for i in range(found.shape[0]):
        every, frozen = (parameters[0, i], parameters[1, i]), (parameters[2, i], parameters[3, i])
        held, gradients, optimizer = state_bytes(every, frozen, settings)
        found[i] = held + gradients + optimizer


@borrowing(void(float64[:, ::1], SETTINGS, float64[::1]))
def working_of(units, settings, found):
    """`working_bytes` of many units.

    Args:
        units: [4, n] for each unit the bytes of its workspace, the parameters that a rank holds without ZeRO, the
            frozen ones of these, and the parameters that it holds under ZeRO.
        settings: the settings of the price under a ZeRO stage.
        found: [n] bytes; written.
    """
    for i in range(found.shape[0]):
        found[i] = working_bytes(units[0, i], (units[1, i], units[1, i] - units[2, i], units[3, i]), settings)
