"""Memory of a rank besides its units: state of the parameters under ZeRO, and micro-batches in flight.

Counted here for the price, for lower bounds and for planners alike. Units: bytes.
"""

from __future__ import annotations

from numba import float64, int64, types

from automap.jit import borrowing
from automap.price.kernels.cost_records import SETTINGS


@borrowing(types.UniTuple(float64, 3)(float64, float64, SETTINGS))
def state_bytes(parameters, zero_parameters, settings):
    """Bytes of the state of a rank's parameters.

    ZeRO 1 shards the state of the optimizer, ZeRO 2 the gradients as well, ZeRO 3 also the parameters
    (arXiv 1910.02054).

    Args:
        parameters: parameters that the rank holds without ZeRO.
        zero_parameters: parameters that the rank holds under ZeRO.
        settings: bytes of each state and stage of ZeRO.

    Returns:
        Bytes of parameters, of gradients and of the optimizer's state.
    """
    stage = settings.zero_stage
    return (
        (zero_parameters if stage >= 3.0 else parameters) * settings.parameter_bytes,
        (zero_parameters if stage >= 2.0 else parameters) * settings.gradient_bytes,
        (zero_parameters if stage >= 1.0 else parameters) * settings.optimizer_bytes,
    )


@borrowing(int64(int64, int64, int64, int64))
def in_flight(rank, num_ranks, num_chunks, num_micro_batches):
    """Fewest micro-batches whose activations are alive on a rank at its peak, whatever the schedule.

    Under 1F1B they are exactly as many: a rank does a forward pass for itself and for every rank behind it before its
    first backward pass (DAPPLE, arXiv 2007.01045). With virtual stages at least one is.

    Args:
        num_chunks: chunks of all ranks.
        num_micro_batches: micro-batches of one step.
    """
    return min(num_ranks - rank, num_micro_batches) if num_chunks == num_ranks else 1
