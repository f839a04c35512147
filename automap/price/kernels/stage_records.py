"""The rows of a stage: its links, its hardware, and the unit that is priced on it.

`automap.price.stage_layout` fills them. Units: seconds, bytes, samples, FLOP/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt

from automap.price.kernels.array_types import Floats, Ints2, Mask, Record, Rows, dtype_of, record_type, tuple_type
from automap.price.kernels.records import NUM_COLLECTIVES

PerCollective = Annotated[npt.NDArray[np.float64], np.float64, NUM_COLLECTIVES]
"""One number for each kind of collective, see `automap.price.kernels.records.ALL_REDUCE`."""
PerPass = Annotated[npt.NDArray[np.float64], np.float64, 3]
"""One number for each pass of a convolution: forward, gradients of images, gradients of weights."""


@dataclass(kw_only=True, slots=True)
class LinkRow:
    """The link of one group of ranks, on which the time of its collectives depends, see `collective_s`."""

    latency_s: PerCollective
    """Seconds of a collective without data."""
    bytes_per_s: PerCollective
    """Bandwidth that large messages reach."""
    ramp: PerCollective
    """Factor of a square root of the time, which models messages of middle size."""
    gather_bytes_per_s: float
    """Bandwidth of ZeRO's gathers and scatters."""
    host_time: float
    """Host time of a collective over that of a collective of two ranks."""


@dataclass(kw_only=True, slots=True)
class GemmCurveRow:
    """The fitted curve of matrix products on a device, see `gemm_s`."""

    floor_s: float
    """Seconds of the smallest kernel."""
    flops_per_s: float
    """FLOP/s of large products."""
    bytes_per_s: float
    """Bandwidth that operands are read and written with."""
    norm: float
    """Exponent p of the p-norm that combines the seconds of arithmetic and of memory accesses, which overlap."""
    depth: float
    """Elements that are added to the summed dim for the cost of starting and ending a tile."""
    split: float
    """Share of idle multiprocessors that split-k uses below one wave, 0 to 1."""
    tail: float
    """Share of the last wave that is paid in full, 0 to 1."""
    multiprocessors: float
    """Number of multiprocessors."""
    cache_bytes: float
    """Bytes of operands that stay in the cache."""
    cache_speedup: float
    """Bandwidth of the cache over that of the memory."""
    quantise_s: float
    """Seconds to quantise one byte of the left operand."""
    grain: float
    """Rows and columns of the result are padded to multiples of this."""


@dataclass(kw_only=True, slots=True)
class AttentionCurveRow:
    """The fitted curve of fused attention on a device, see `attention_s`."""

    floor_s: float
    """Seconds of the smallest kernel."""
    flops_per_s: float
    """FLOP/s at a head size of 128."""
    bytes_per_s: float
    """Bandwidth that operands are read and written with."""
    tail: float
    """Share of the time of the longest block in which the other multiprocessors are idle, 0 to 1."""
    small_head: float
    """Elements that are added to the size of a head, for the lower rate of small heads, see `head_depth`."""
    multiprocessors: float
    """Number of multiprocessors."""
    backward: float
    """Arithmetic of the backward pass over that of the forward pass, both at their rates."""


@dataclass(kw_only=True, slots=True)
class HardwareRow:
    """The slowest device of a stage and the kernels of the trainer, on which the time of operators depends."""

    products: GemmCurveRow
    """Curve of products of two activations."""
    misaligned: GemmCurveRow
    """Curve of products of two activations whose dims are not multiples of 8."""
    weights: GemmCurveRow
    """Curve of products with a weight."""
    attention: AttentionCurveRow
    """Curve of fused attention."""
    bytes_per_s: float
    """Bandwidth that kernels bound by memory reach."""
    elementwise_passes: float
    """How often kernels bound by memory move their bytes."""
    loss_passes: float
    """The same of the kernels of the loss, as a further factor."""
    loss_bytes: float
    """Bytes that a loss holds for each element of its scores, beside the scores."""
    kernel_s: float
    """Seconds of the smallest kernel."""
    element_bytes: float
    """Bytes of an element of an activation."""
    fallback_kernels: float
    """Further kernels of a softmax that the fused kernel does not support."""
    host_kernel_s: float
    """Seconds of the host to launch a kernel."""
    host_backward: float
    """Host time of a backward pass over that of its forward pass."""
    host_collective_s: float
    """Seconds of the host to launch a collective of two ranks."""
    overlap_exponent: float
    """Exponent p of the p-norm that combines the seconds of the host and of the device, which overlap."""
    exposed: float
    """Share of the collectives of tensor and sequence parallelism that is exposed."""
    scatters_sends: float
    """1 where each rank sends its part of a tensor that is whole on an axis."""
    regathers: float
    """1 where an operand that was gathered is saved as it was before, and gathered again in the backward pass."""
    weight_element_bytes: float
    """Bytes of an element of an operand of a product with a weight."""
    quantise_kernels: float
    """Kernels that quantise the operands of a product with a weight."""
    routing_passes: float
    """How often the bytes of tokens are moved in the dispatch to experts, and how often in the combination."""
    routing_kernels: float
    """Kernels of a dispatch to experts, and of a combination."""
    exposed_exchange: float
    """Share of all-to-alls that is exposed."""
    joins_exchanges: float
    """1 where one exchange sends the tokens that go to experts over several mesh axes."""
    copies_once: float
    """1 where a rank with several experts of a token gets one copy of it."""
    launches_singly: float
    """1 where the host launches the products of experts one by one."""
    ring: float
    """1 where keys and values are sent round a ring while attention is computed."""
    expert_rate: float
    """Rate of experts' products over that of other products."""
    saved_share: float
    """Bytes saved of an operand of a product with a weight over those of the activation."""
    keeps_results: float
    """1 where a unit that is recomputed in part saves the results of all operators that are not recomputed, and none
    of their operands that are."""
    other_rate: float
    """Rate of arithmetic that is not a product, attention or convolution, over that of large products."""
    convolution_rates: PerPass
    """Rates of convolutions over those of products: forward, gradients of images and of weights."""
    odd_first: PerPass
    """FLOP/s of convolutions whose channels are not a multiple of 16 bytes, and first in memory."""
    odd_last: PerPass
    """The same with channels last in memory."""
    grouped_first: PerPass
    """FLOP/s of convolutions in groups of few channels, which are first in memory."""
    grouped_last: PerPass
    """The same with channels last in memory."""
    short_rows: float
    """Time of a product with a weight whose rows are not a multiple of 16 bytes over that of others."""
    odd_rows: float
    """Time of a product with a weight whose rows are not a multiple of 4 bytes over that of others."""
    weight_cast_bytes: float
    """Bytes that each pass moves for an element of a weight to convert it to the format of products."""


LINK_DTYPE, HARDWARE_DTYPE = dtype_of(LinkRow), dtype_of(HardwareRow)
GEMM_CURVE_DTYPE, ATTENTION_CURVE_DTYPE = dtype_of(GemmCurveRow), dtype_of(AttentionCurveRow)
LINK, HARDWARE = record_type(LINK_DTYPE), record_type(HARDWARE_DTYPE)
GEMM_CURVE, ATTENTION_CURVE = record_type(GEMM_CURVE_DTYPE), record_type(ATTENTION_CURVE_DTYPE)


class Stage(NamedTuple):
    """All that the cost of a unit on one pipeline rank depends on besides the unit itself."""

    axes: Floats
    """[axes] ranks of each mesh axis."""
    links: Annotated[Rows, LINK[::1]]
    """[axes] link of a group of each mesh axis, see `LinkRow`."""
    hardware: Annotated[Record, HARDWARE]
    """See `HardwareRow`."""
    zero_axes: Mask
    """[axes] whether ZeRO shards over the axis."""
    samples: float
    """Samples of a micro-batch on all ranks of the mesh together that the rank is priced with."""


class Unit(NamedTuple):
    """Operators [first, last) of one unit and their signatures."""

    first: int
    """First operator row."""
    last: int
    """One past the last operator row."""
    chosen: Ints2
    """[last - first, axes] signature of each operator on each axis; -1 where it is undecided."""


STAGE, UNIT = tuple_type(Stage), tuple_type(Unit)
