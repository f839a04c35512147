"""Host overhead: how much longer a unit takes because the host launches its kernels and collectives.

A fast host launches kernels before the device needs them; a slow one lets the device wait. Units: seconds.
"""

from __future__ import annotations

from numba import boolean, float64, void

from automap.jit import borrowing
from automap.price.kernels.cost_records import UNIT_COST
from automap.price.kernels.records import NUM_COLLECTIVES
from automap.price.kernels.stage_records import HARDWARE


@borrowing(float64(float64, float64, float64), inner=True)
def _overlapped(device_s, host_s, exponent):
    """Seconds of a device and its host that work in parallel: the p-norm of both, with p the exponent."""
    larger = max(device_s, host_s)
    if larger <= 0.0:
        return 0.0
    smaller = min(device_s, host_s)
    return larger * (1.0 + (smaller / larger) ** exponent) ** (1.0 / exponent)


@borrowing(void(float64, boolean, HARDWARE, UNIT_COST), inner=True)
def add_host_waits(relaunched, apart, hardware, cost):
    """Writes the seconds that the device waits for its host in each pass of a unit.

    Args:
        relaunched: kernels that recomputation launches again.
        apart: whether gradients of inputs and of weights may be computed in separate passes; else the waits in these
            are left at 0.
        hardware: of the stage.
        cost: cost of a unit; `forward_host_s`, `backward_host_s`, `input_host_s` and `weight_host_s` are written.
    """
    forward = cost.forward_s
    others = cost.recompute_s
    for kind in range(NUM_COLLECTIVES):
        forward += cost.forward_comm_s[kind]
        others += cost.backward_comm_s[kind] + cost.recompute_comm_s[kind]
    backward = cost.backward_s + others
    kernel_s, exponent = hardware.host_kernel_s, hardware.overlap_exponent
    host = kernel_s * cost.launched + hardware.host_collective_s * cost.forward_waits
    cost.forward_host_s = _overlapped(forward, host, exponent) - forward
    launched = hardware.host_backward * (cost.launched - cost.unanswered) + relaunched
    host = kernel_s * launched + hardware.host_collective_s * cost.backward_waits
    cost.backward_host_s = _overlapped(backward, host, exponent) - backward
    if apart:
        # Each part waits for the launches of its own kernels.
        of_weights = kernel_s * hardware.host_backward * cost.weight_kernels
        cost.weight_host_s = _overlapped(cost.weight_s, of_weights, exponent) - cost.weight_s
        others += cost.input_s
        cost.input_host_s = _overlapped(others, max(0.0, host - of_weights), exponent) - others
