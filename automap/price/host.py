"""Host and device: how much longer both take together than the device alone."""

from __future__ import annotations

from numba import float64, njit, void

from automap.price.communication import KIND_COUNT
from automap.price.tables import ALL_TO_ALL
from automap.price.vectors import (
    C_BACKWARD,
    C_BACKWARD_COMM,
    C_BACKWARD_HOST,
    C_FORWARD,
    C_FORWARD_COMM,
    C_FORWARD_HOST,
    C_INPUT,
    C_INPUT_HOST,
    C_RECOMPUTE,
    C_RECOMPUTE_COMM,
    C_WEIGHT,
    C_WEIGHT_HOST,
    H_EXPOSED,
    H_EXPOSED_EXCHANGE,
    H_HOST_BACKWARD,
    H_HOST_COLLECTIVE_S,
    H_HOST_S,
    H_OVERLAP_EXPONENT,
)


@njit(float64(float64, float64, float64), cache=True)
def _overlapped(device_s, host_s, exponent):
    """Seconds of a device and its host that overlap: the larger, and more where they are alike."""
    larger = max(device_s, host_s)
    if larger <= 0.0:
        return 0.0
    smaller = min(device_s, host_s)
    return larger * (1.0 + (smaller / larger) ** exponent) ** (1.0 / exponent)


@njit(void(float64, float64, float64, float64[::1], float64[::1], float64[::1]), cache=True)
def host_wait(launched, relaunched, weighing, waits, hardware, out):
    """Writes how much longer host and device take together than the device alone.

    Args:
        launched: kernels of the forward pass.
        relaunched: those that recomputation launches again.
        weighing: those whose backward pass makes gradients of weights.
        waits: host time of collectives forward, backward and recomputed, in that of a group of two.
        hardware: see `unit_cost`.
        out: of `unit_cost`.
    """
    forward = out[C_FORWARD]
    others = out[C_RECOMPUTE]
    for kind in range(KIND_COUNT):
        exposed = hardware[H_EXPOSED_EXCHANGE] if kind == ALL_TO_ALL else hardware[H_EXPOSED]
        forward += exposed * out[C_FORWARD_COMM + kind]
        others += exposed * (out[C_BACKWARD_COMM + kind] + out[C_RECOMPUTE_COMM + kind])
    backward = out[C_BACKWARD] + others
    a_kernel, a_collective, p = hardware[H_HOST_S], hardware[H_HOST_COLLECTIVE_S], hardware[H_OVERLAP_EXPONENT]
    host = a_kernel * launched + a_collective * waits[0]
    out[C_FORWARD_HOST] = _overlapped(forward, host, p) - forward
    host = a_kernel * (hardware[H_HOST_BACKWARD] * launched + relaunched) + a_collective * (waits[1] + waits[2])
    out[C_BACKWARD_HOST] = _overlapped(backward, host, p) - backward
    # Run apart, each part waits for the launches of its own kernels.
    apart = a_kernel * hardware[H_HOST_BACKWARD] * weighing
    out[C_WEIGHT_HOST] = _overlapped(out[C_WEIGHT], apart, p) - out[C_WEIGHT]
    out[C_INPUT_HOST] = _overlapped(out[C_INPUT] + others, max(0.0, host - apart), p) - (out[C_INPUT] + others)
