"""Memory of a rank besides its units: state of the parameters under ZeRO, buffers, and micro-batches in flight.

Counted here for the price, for lower bounds and for planners alike. Units: bytes.
"""

from __future__ import annotations

from numba import float64, int64, types

from automap.jit import borrowing
from automap.price.kernels.cost_records import SETTINGS


@borrowing(types.UniTuple(float64, 3)(types.UniTuple(float64, 2), types.UniTuple(float64, 2), SETTINGS))
def state_bytes(parameters, frozen, settings):
    """Bytes of the state of a rank's parameters.

    ZeRO 1 shards the state of the optimizer, ZeRO 2 the gradients as well, ZeRO 3 also the parameters
    (arXiv 1910.02054).

    Args:
        parameters: parameters that the rank holds without ZeRO, and under ZeRO.
        frozen: those of both that are not trained.
        settings: bytes of each state and stage of ZeRO.

    Returns:
        Bytes of parameters, of gradients and of the optimizer's state.
    """
    stage = settings.zero_stage
    return (
        (parameters[1] if stage >= 3.0 else parameters[0]) * settings.parameter_bytes,
        (parameters[1] - frozen[1] if stage >= 2.0 else parameters[0] - frozen[0]) * settings.gradient_bytes,
        (parameters[1] - frozen[1] if stage >= 1.0 else parameters[0] - frozen[0]) * settings.optimizer_bytes
        + (frozen[1] if stage >= 1.0 else frozen[0]) * settings.frozen_bytes,
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


@borrowing(float64(float64, types.UniTuple(float64, 2), float64, int64, int64, SETTINGS))
def buffer_bytes(workspace_bytes, of_unit, crossing_bytes, num_ranks, num_micro_batches, settings):
    """Bytes of a rank's buffers.

    Args:
        workspace_bytes: largest work space of one of its units.
        of_unit: parameters of the largest of its units, which ZeRO gathers; most that are trained of a unit.
        crossing_bytes: bytes of the largest tensors that cross into it or out of it for a micro-batch.
        num_ranks: pipeline ranks.
        num_micro_batches: micro-batches of one step.
        settings: the trainer's.
    """
    found = 2.0 * workspace_bytes + settings.reserved_bytes
    if num_ranks > 1:
        num_buffers = settings.crossing_buffers * num_micro_batches
        found += settings.pipeline_bytes + num_buffers * crossing_bytes
    if settings.zero_stage >= 3.0:
        found += min(2.0 * of_unit[0], settings.most_gathered) * settings.parameter_bytes
    if settings.zero_stage >= 2.0:
        found += min(of_unit[1], settings.most_gathered) * settings.gradient_bytes
    return found
