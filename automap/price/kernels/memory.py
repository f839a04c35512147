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
    (arXiv 1910.02054). A trainer that converts weights has no shards of them but their masters, which it converts as it
    gathers them (`MixedPrecisionPolicy` of torch.distributed.fsdp: parameters stay in their own type): these count as
    parameters then, and not as state of the optimizer.

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
    """Fewest micro-batches whose activations are alive on a rank at its peak, whatever the schedule.

    Under 1F1B they are exactly as many: a rank does a forward pass for itself and for every rank behind it before its
    first backward pass (DAPPLE, arXiv 2007.01045). With virtual stages at least one is.

    Args:
        num_chunks: chunks of all ranks.
        num_micro_batches: micro-batches of one step.
    """
    return min(num_ranks - rank, num_micro_batches) if num_chunks == num_ranks else 1


@borrowing(float64(float64, types.UniTuple(float64, 3), SETTINGS))
def working_bytes(workspace_bytes, of_unit, settings):
    """Bytes that a pass of one unit needs besides what is saved.

    They are the largest result of an operator and its gradient; under ZeRO 3 also the gathered weights of the unit and
    of the next one, and under ZeRO 2 its gradients until they are scattered. FSDP2 holds so much: a backward pass has
    the weights of its unit, and asks for those of the one before as it begins (`pre_backward` and `wait_for_unshard` of
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, torch 2.11). The other unit is taken to be as large. There
    is nothing to gather and to scatter on a rank that is alone, and of experts that are spread over all axes.

    Args:
        workspace_bytes: the most that one of its operators writes.
        of_unit: parameters of the unit, which ZeRO gathers, those of them that are trained, and this rank's share.
        settings: the trainer's.
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
    """Bytes of the buffers that a rank has all the time.

    Args:
        crossing_bytes: bytes of the largest tensors that cross into it or out of it for a micro-batch.
        num_ranks: pipeline ranks.
        num_micro_batches: micro-batches of one step.
        settings: the trainer's.
    """
    found = 1.0 * settings.reserved_bytes
    if num_ranks > 1:
        num_buffers = settings.crossing_buffers * num_micro_batches
        found += settings.pipeline_bytes + num_buffers * crossing_bytes
    return found


@borrowing(float64(types.UniTuple(float64, 2), types.UniTuple(float64, 2), SETTINGS))
def update_bytes(parameters, frozen, settings):
    """Bytes that the optimizer holds while it updates, beside its state; see `state_bytes` for the arguments."""
    at = 1 if settings.zero_stage >= 1.0 else 0
    return (parameters[at] - frozen[at]) * settings.held_update_bytes


@borrowing(float64(float64, float64, SETTINGS))
def bucket_bytes(replicas, parameters, settings):
    """Bytes of the buckets in which replicas reduce their gradients.

    Args:
        replicas: ranks of a stage that hold the same parameters, those of all axes but that of tensor parallelism.
        parameters: parameters that the rank trains.
        settings: the trainer's.
    """
    return parameters * settings.bucket_bytes if replicas > 1.0 and settings.zero_stage < 1.0 else 0.0


@borrowing(boolean(int64, SETTINGS))
def makes_gradients(num_micro_batches, settings):
    """Whether gradients take memory only as the backward pass makes them, while activations are freed.

    With more than one micro-batch those of the earlier ones are there all the time.
    """
    return num_micro_batches == 1 and settings.keeps_gradients == 0.0


@borrowing(void(types.UniTuple(float64, 3), float64, float64, MOMENT))
def add_to_moment(unit, gradient_bytes, times, moment):
    """Adds units, behind those that are there, to what is in memory in the fullest moment of a micro-batch's passes.

    While the backward pass of a unit runs, a rank holds what this unit and those before it have saved, what the pass
    needs besides, and the gradients of this unit and of those behind it, if the pass makes them. Of equal units one at
    either end is the fullest one, since both grow evenly.

    Args:
        unit: bytes that one of the units saves, that are alive besides while it is recomputed, and that its passes need
            besides, see `working_bytes`.
        gradient_bytes: bytes of the gradients that its backward pass makes; 0 where they are there all the time.
        times: number of the units, which are equal.
        moment: read and written.
    """
    saved, live, working = unit
    moment.gradients += times * gradient_bytes
    for at, behind in ((1.0, times), (times, 1.0)):
        activations, gradients = moment.saved + at * saved + live, behind * gradient_bytes
        if activations + gradients + working > moment.activations + moment.gradients + moment.working:
            moment.activations, moment.gradients, moment.working = activations, gradients, working
    moment.saved += times * saved
