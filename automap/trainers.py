"""Trainers: how training software affects the price, a file of constants for each in `automap/data/trainers`.

Knows nothing of problems and plans. Units: as in the names of the fields; shares are 0..1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from automap.documents import read_document
from automap.errors import ProblemError
from automap.records import from_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Trainer:
    """How training software affects the price, read from a file of `automap/data/trainers`."""

    name: str
    about: str
    gradient_overlap: float
    """Share of the gradient reduction that hides under the backward pass, 0..1."""
    parameter_gather_overlap: float
    """Share of ZeRO's parameter gathers that hides under compute, 0..1."""
    tensor_overlap: float
    """Share of the collectives of tensor and sequence parallelism that hides under compute, 0..1."""
    dispatcher: Literal["axis", "expert", "rank"]
    """One copy of a token for each of its experts, exchanged over one mesh `axis` after another or among all ranks of
    the experts at once (`expert`); or one for each `rank` that has some of its experts (DeepEP, HybridEP)."""
    routing_passes: float
    """Bytes that moving tokens to experts, or back, reads and writes on a rank over those of one gather."""
    groups_experts: bool
    """Whether one kernel multiplies by all experts of a rank; otherwise the host launches product after product."""
    exchange_overlap: float
    """Share of the all-to-alls inside a stage that hides under compute, 0..1."""
    pairs_passes: bool
    """Whether it can run the forward pass of a micro-batch together with the backward pass of the one before, each
    under the all-to-alls of the other (`automap.problem.Training.overlap_expert_exchange`)."""
    ring_attention: bool
    """Whether keys and values of a split sequence travel in a ring under attention, if no window is skipped there."""
    gather_bandwidth_share: float
    """Share of a host's network rate that ZeRO's gathers and scatters reach, 0..1."""
    gathers_singly: bool
    """Whether ZeRO 3 gathers each parameter with a collective of its own; otherwise a block's parameters together."""
    most_gathered: float | None
    """Most parameters that ZeRO 3 holds gathered, or ZeRO 2 and 3 as whole gradients; None = two units', and one's."""
    keeps_gradients: bool
    """Whether gradients have memory for the whole training; otherwise the optimizer frees them, and with one
    micro-batch a step the backward pass makes them in the place of activations that it frees."""
    unused_share: float
    """Memory that the allocator holds and nothing uses, as a share of what is used in the fullest moment."""
    update_bytes: float
    """Bytes for each parameter that the optimizer holds while it updates, beside its state."""
    bucket_bytes: float
    """Bytes for each parameter that buckets hold beside the gradients, where replicas are trained without ZeRO."""
    host_us_per_operator: float
    """Host time to launch the kernels of one operator in the forward pass; it counts when the device is faster."""
    host_us_per_collective: float
    """Time of one collective inside a stage beside its transfer: host time and the wait for the slower of two ranks."""
    scattered_sends: bool
    """Whether a replicated tensor is sent to the next stage in parts, one from each rank, and gathered there."""
    schedules: tuple[Literal["gpipe", "1f1b", "zb1p", "zb2p"], ...]
    """Pipeline schedules without virtual stages that the software can run, its default first."""
    any_order: bool
    """Whether the software also runs whole forward and backward passes in the order that a plan lists."""
    regathers: bool
    """Whether gathered activations are saved as each rank's part and gathered again in the backward pass, hidden under
    a matrix product; otherwise they are saved whole."""
    keeps_results: bool
    """Whether a block that is recomputed in part keeps the results of all other operators, and recomputes what these
    read (selective activation checkpointing of PyTorch); otherwise it keeps what other operators need."""
    keeps_quantised: bool
    """Whether operands of low-precision products are saved for the backward pass in their quantised form."""
    send_host_ms: float
    """Host time of one exchange between pipeline ranks, including synchronisation of host and device."""
    send_overlap: float
    """Share of an exchange's transfer that hides under compute, 0..1."""
    step_overhead_ms: float
    """Host time of a step that does not depend on the number of micro-batches."""
    attention_rate: float
    """Speed of the fused attention kernel relative to the kernel measured on the device, 0..1."""
    portable_attention: bool
    """Whether the attention kernel uses only instructions that the A100 has (FlashAttention 2, Triton)."""
    bytes_per_parameter: Mapping[str, float]
    """Bytes of a parameter, its gradient and its optimizer state (master weights, Adam's moments) in mixed precision;
    keys `parameter`, `gradient` and `optimizer`; and `frozen`, bytes of a frozen parameter where it has a master as
    well, for the trainer converts weights that lie in float32. ZeRO 3 has shards of these masters alone."""
    reserved_GiB: float  # noqa: N815
    """Memory that the framework holds on every device."""
    pipeline_GiB: float  # noqa: N815
    """Further memory that the framework holds on every device of a pipeline."""
    crossing_buffers: float
    """Buffers that a pipeline rank holds for what crosses to or from another, for each micro-batch of a step."""
    fused_attention: bool
    """Whether attention runs as one kernel that keeps no scores (FlashAttention and its kin)."""
    fuses_chains: bool
    """Whether chains of small operators run as one kernel, compiled or written by hand; if not, only the functions of
    PyTorch itself do (`automap.execution`)."""
    fuses_clipping: bool
    """Whether kernels of gated activations clip, and products of experts add biases; if not, PyTorch's operators do."""
    pads_products: bool
    """Whether it pads dims to what tensor cores take, as Megatron pads vocabularies; if not, unpadded ones are slow."""
    optimizer_traffic: float
    """Bytes that the optimizer moves, relative to one fused kernel."""
    autocast: bool
    """Whether operators have the formats of `torch.autocast`, with weights in float32; if not, that of the training."""
    reduces_in_half: bool
    """Whether gradients of weights in 16 bits are sent in these 16 bits although they are added up in fp32."""
    skips_windows: bool
    """Whether the fused attention kernel leaves out the keys that a window hides; otherwise a window costs as much as
    none, and only a causal mask saves time."""
    elementwise_traffic: float
    """Bytes that memory-bound operators move, relative to execution operator by operator."""
    loss_passes: float
    """Bytes that the cross-entropy moves, relative to one pass over the logits."""
    loss_bytes: float
    """Bytes that the cross-entropy holds at its peak for each element of the scores, beside the scores."""
    error_band: float
    """Half-width of the band around an estimate, as a share of it."""
    memory_spread: float
    """Standard deviation of the logarithm of measured over predicted peak memory, see `automap.memory_band`."""
    schema: Literal["automap.trainer/1"] = "automap.trainer/1"
    source: Mapping[str, str] | None = None


@functools.cache
def trainers() -> Mapping[str, Trainer]:
    """Every trainer that has a data file, by name."""
    found = {}
    for entry in sorted(resources.files("automap").joinpath("data", "trainers").iterdir(), key=lambda e: e.name):
        trainer = from_json(Trainer, read_document(entry.read_bytes()), path=entry.name, error=ProblemError)
        found[trainer.name] = trainer
    return found
