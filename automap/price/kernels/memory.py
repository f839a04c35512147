"""Memory of a rank: state of the parameters under ZeRO, buffers, micro-batches in flight, and the fullest moment.

Counted here for the price, for lower bounds and for planners alike. Units: bytes.
"""

from __future__ import annotations

from numba import boolean, float64, int64, types, void

from automap.jit import borrowing
from automap.price.kernels.cost_records import MOMENT, SETTINGS


@borrowing(types.UniTuple(float64, 3)(types.UniTuple(float64, 2), types.UniTuple(float64, 2), SETTINGS))
def state_bytes(parameters, frozen, settings):
    """Bytes of the state of a rank's parameters.

    ZeRO 1 shards the state of the optimizer, ZeRO 2 the gradients as well, ZeRO 3 also the parameters
    (arXiv 1910.02054). Under ZeRO 3, a trainer that computes with converted weights shards the master copies alone and
    converts them when it gathers them (`MixedPrecisionPolicy` of torch.distributed.fsdp: parameters stay in their own
    type). The master copies then count as parameters and not as state of the optimizer.

    Args:
        parameters: parameters that the rank holds without ZeRO, and under ZeRO.
        frozen: those of both that are not trained.
        settings: bytes of each state and stage of ZeRO.

    Returns:
        Bytes of parameters, of gradients and of the optimizer's state.
    """
    stage = settings.zero_stage
    held, masters = parameters[0] * settings.parameter_bytes, 0.0
    if stage >= 3.0:
        masters = 1.0 * settings.frozen_bytes
        held = parameters[1] * (masters if masters > 0.0 else settings.parameter_bytes)
    return (
        held,
        (parameters[1] - frozen[1] if stage >= 2.0 else parameters[0] - frozen[0]) * settings.gradient_bytes,
        (parameters[1] - frozen[1] if stage >= 1.0 else parameters[0] - frozen[0])
        * (settings.optimizer_bytes - masters)
        + (frozen[1] if stage >= 1.0 else frozen[0]) * (settings.frozen_bytes - masters),
    )


@borrowing(int64(int64, int64, int64, int64))
def in_flight(rank, num_ranks, num_chunks, num_micro_batches):
    """Fewest micro-batches that a rank has in flight at its peak of memory, whatever the schedule.

    Under 1F1B it is exactly this number: before its first backward pass a rank runs one forward pass for itself and one
    for every rank after it (DAPPLE, arXiv 2007.01045). With virtual stages only one micro-batch is certain.

    Args:
        rank: the pipeline rank.
        num_ranks: pipeline ranks.
        num_chunks: chunks of all ranks.
        num_micro_batches: micro-batches of one step.
    """
    return min(num_ranks - rank, num_micro_batches) if num_chunks == num_ranks else 1


@borrowing(float64(float64, types.UniTuple(float64, 3), SETTINGS))
def working_bytes(workspace_bytes, of_unit, settings):
    """Bytes that a pass of one unit needs beside the saved activations.

    These are the largest result of an operator and its gradient. ZeRO 2 and 3 add the gradients of the unit until they
    are scattered, and ZeRO 3 the gathered weights of two units, as FSDP2 does: the backward pass of a unit has its
    weights, and starts to gather those of the next unit when it begins (`pre_backward` and `wait_for_unshard` of
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.11). The other unit is assumed to be as large. A
    unit whose shard is all of its parameters gathers nothing: on a single rank, or of experts that are spread over all
    axes.

    Args:
        workspace_bytes: bytes that the largest of its operators writes.
        of_unit: parameters of the unit, which ZeRO gathers; those of them that are trained; and this rank's shard.
        settings: stage of ZeRO, and what the trainer gathers.
    """
    found = 2.0 * workspace_bytes
    if of_unit[2] >= of_unit[0]:
        return found
    if settings.zero_stage >= 3.0:
        found += min(2.0 * of_unit[0], settings.most_gathered) * settings.parameter_bytes
    if settings.zero_stage >= 2.0:
        found += min(of_unit[1], settings.most_gathered) * settings.gradient_bytes
    return found


@borrowing(float64(float64, int64, int64, SETTINGS))
def standing_bytes(crossing_bytes, num_ranks, num_micro_batches, settings):
    """Bytes of the buffers that a rank holds during the whole training.

    Args:
        crossing_bytes: bytes of the largest tensor that the rank receives or sends for a micro-batch.
        num_ranks: pipeline ranks.
        num_micro_batches: micro-batches of one step.
        settings: what the trainer reserves.
    """
    found = 1.0 * settings.reserved_bytes
    if num_ranks > 1:
        num_buffers = settings.crossing_buffers * num_micro_batches
        found += settings.pipeline_bytes + num_buffers * crossing_bytes
    return found


@borrowing(float64(types.UniTuple(float64, 2), types.UniTuple(float64, 2), SETTINGS))
def update_bytes(parameters, frozen, settings):
    """Temporary bytes of the optimizer during the update, beside its state; see `state_bytes` for the arguments."""
    at = 1 if settings.zero_stage >= 1.0 else 0
    return (parameters[at] - frozen[at]) * settings.held_update_bytes


@borrowing(float64(float64, float64, SETTINGS))
def bucket_bytes(replicas, parameters, settings):
    """Bytes of the buckets in which replicas reduce their gradients.

    Args:
        replicas: ranks of a stage that hold the same parameters, the product of all axes but that of tensor
            parallelism.
        parameters: parameters that the rank trains.
        settings: stage of ZeRO, and bytes of the buckets.
    """
    return parameters * settings.bucket_bytes if replicas > 1.0 and settings.zero_stage < 1.0 else 0.0


@borrowing(boolean(int64, SETTINGS))
def makes_gradients(num_micro_batches, settings):
    """Whether the memory of gradients is allocated by the backward pass, while it frees activations.

    With more than one micro-batch, the gradients of the first one stay in memory during all others.
    """
    return num_micro_batches == 1 and settings.keeps_gradients == 0.0


@borrowing(void(types.UniTuple(float64, 3), float64, float64, MOMENT))
def add_to_moment(unit, gradient_bytes, times, moment):
    """Adds equal units, which follow those added before, to the fullest moment of the passes of a micro-batch.

    While the backward pass of a unit runs, a rank holds the activations that this unit and the units before it have
    saved, the bytes that the pass needs besides, and, if the backward pass allocates gradients, those of this unit and
    of the units after it. Among equal units the moment of the first or of the last one is the fullest, since
    activations and gradients change evenly from one to the next.

    Args:
        unit: three numbers of bytes for each unit: saved; in memory, beside these, while it is recomputed; and needed
            besides by its passes, see `working_bytes`.
        gradient_bytes: bytes of the gradients that the backward pass of a unit allocates; 0 where it allocates none.
        times: number of the units.
        moment: `MomentRow` of the units added before; written.
    """
    saved, live, working = unit
    moment.gradients += times * gradient_bytes
    for at, behind in ((1.0, times), (times, 1.0)):
        activations, gradients = moment.saved + at * saved + live, behind * gradient_bytes
        if activations + gradients + working > moment.activations + moment.gradients + moment.working:
            moment.activations, moment.gradients, moment.working = activations, gradients, working
    moment.saved += times * saved
