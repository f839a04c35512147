"""Host and device: how much longer both take together than the device alone.

The host launches kernels and collectives; it runs ahead of the device or holds it up. Units: seconds.
"""

from __future__ import annotations

from numba import float64, void

from automap.jit import borrowing
from automap.price.kernels.collectives import KIND_COUNT
from automap.price.kernels.columns import (
    C_BACKWARD,
    C_BACKWARD_COMM,
    C_BACKWARD_HOST,
    C_BACKWARD_WAITS,
    C_FORWARD,
    C_FORWARD_COMM,
    C_FORWARD_HOST,
    C_FORWARD_WAITS,
    C_INPUT,
    C_INPUT_HOST,
    C_LAUNCHED,
    C_RECOMPUTE,
    C_RECOMPUTE_COMM,
    C_WEIGHING,
    C_WEIGHT,
    C_WEIGHT_HOST,
    H_EXPOSED,
    H_EXPOSED_EXCHANGE,
    H_HOST_BACKWARD,
    H_HOST_COLLECTIVE_S,
    H_HOST_S,
    H_OVERLAP_EXPONENT,
)
from automap.price.tables import ALL_TO_ALL


@borrowing(float64(float64, float64, float64), inner=True)
def _overlapped(device_s, host_s, exponent):
    """Seconds of a device and its host that overlap: the larger, and more where they are alike."""
    larger = max(device_s, host_s)
    if larger <= 0.0:
        return 0.0
    smaller = min(device_s, host_s)
    return larger * (1.0 + (smaller / larger) ** exponent) ** (1.0 / exponent)


@borrowing(void(float64, float64[::1], float64[::1]), inner=True)
def host_wait(relaunched, hardware, out):
    """Writes how much longer host and device take together than the device alone.

    Args:
        relaunched: kernels that recomputation launches again.
        hardware: see the H_ constants.
        out: see the C_ constants; its waits for the host are written.
    """
    forward = out[C_FORWARD]
    others = out[C_RECOMPUTE]
    for kind in range(KIND_COUNT):
        exposed = hardware[H_EXPOSED_EXCHANGE] if kind == ALL_TO_ALL else hardware[H_EXPOSED]
        forward += exposed * out[C_FORWARD_COMM + kind]
        others += exposed * (out[C_BACKWARD_COMM + kind] + out[C_RECOMPUTE_COMM + kind])
    backward = out[C_BACKWARD] + others
    kernel_s, collective_s, exponent = hardware[H_HOST_S], hardware[H_HOST_COLLECTIVE_S], hardware[H_OVERLAP_EXPONENT]
    host = kernel_s * out[C_LAUNCHED] + collective_s * out[C_FORWARD_WAITS]
    out[C_FORWARD_HOST] = _overlapped(forward, host, exponent) - forward
    launched = hardware[H_HOST_BACKWARD] * out[C_LAUNCHED] + relaunched
    host = kernel_s * launched + collective_s * out[C_BACKWARD_WAITS]
    out[C_BACKWARD_HOST] = _overlapped(backward, host, exponent) - backward
    # Run apart, each part waits for the launches of its own kernels.
    apart = kernel_s * hardware[H_HOST_BACKWARD] * out[C_WEIGHING]
    out[C_WEIGHT_HOST] = _overlapped(out[C_WEIGHT], apart, exponent) - out[C_WEIGHT]
    others += out[C_INPUT]
    out[C_INPUT_HOST] = _overlapped(others, max(0.0, host - apart), exponent) - others
