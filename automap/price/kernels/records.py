"""The rows of a problem's tables: operators, tensors and signatures as the kernels read them.

`automap.price.tables` fills them; they belong to the problem and to no plan. Each table holds all unit types, one after
the other, and a *row* is an index into a table. Units: elements, bytes, FLOPs, seconds. Flags are 0 or 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import numpy as np

from automap.arrays import Floats, Ints
from automap.price.kernels.array_types import Rows, dtype_of, record_type, tuple_type

MAX_DIMS = 8
"""Dims of a tensor that are kept; no tensor of the operators known here has more."""

ACTIVATION, PARAMETER, OTHER, BOUNDARY, CARRIED = range(5)
"""Roles of a tensor in a unit. BOUNDARY: the tensor that crosses into the unit. CARRIED: a tensor that crosses many
units, such as an encoder's memory. OTHER: data, buffers and constants."""

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND_RECV = range(5)
"""Kinds of collectives, in the order of `automap.fitted_curves.COLLECTIVES`."""
NUM_COLLECTIVES = 5
NUM_BITS = 63
"""Bits of the sets of operators in `OperatorRow`."""

MEMORY, PRODUCT, BATCHED_PRODUCT, ATTENTION, ROOFLINE, MEASURED, INSIDE, CONVOLUTION = range(8)
"""What runs an operator. MEMORY: a kernel that is bound by memory; PRODUCT: a product with a weight; BATCHED_PRODUCT: a
product of two activations; ATTENTION: fused attention; ROOFLINE: other arithmetic; MEASURED: anything of which the user
measured the time; INSIDE: the kernel of another operator; CONVOLUTION: a convolution."""

BATCH, M, N, K, VALUES = range(5)
"""Classes of loops of a product, a convolution and attention, see `automap.price.kernel_shapes`."""
NUM_CLASSES = 5


@dataclass(kw_only=True, slots=True)
class OperatorRow:
    """One operator of a unit type."""

    first_operand: int
    """Row of `operands` with its first input."""
    first_output: int
    """Row of `operands` with its first output, one past its last input."""
    end: int
    """One past its last row of `operands`."""
    first_signature: int
    """Row of `signatures` with its first signature."""
    is_free: int
    """Whether it is a view or a constant, which cost nothing."""
    is_divisible: int
    """Whether some signature divides its work."""
    is_parametric: int
    """Whether it computes something from parameters alone, so that a partial gradient stays partial until the end of
    the step."""
    passes: int = -1
    """Of the first operator of a unit: row of `tensors` that stands for all tensors together which pass the unit by, to
    be read by later units; or -1."""
    hands_on: int = -1
    """Of the first operator of a unit: row of `operands` with the first result that later units read as a carried
    tensor, or -1."""
    neighbours: int = 0
    """Set of the operators of the unit on whose signatures its cost depends beside its own, as bits: bit i is that of
    operator i modulo NUM_BITS."""


@dataclass(kw_only=True, slots=True)
class KernelRow:
    """The kernel that runs an operator, and everything that its time depends on besides its signature."""

    kind: int
    """MEMORY, PRODUCT, BATCHED_PRODUCT, ATTENTION, ROOFLINE, MEASURED, INSIDE or CONVOLUTION."""
    extents: Annotated[Floats, np.float64, NUM_CLASSES] = field(default_factory=lambda: np.ones(NUM_CLASSES))
    """Extents of the loops of a product at one sample, by class of loop."""
    sampled: int = -1
    """Class of the loop that grows with the samples, or -1."""
    window: float = 1.0
    """Of a convolution: elements of its window."""
    images_last: int = 0
    """Of a convolution: whether the channels of its images are last in memory."""
    share: float = 1.0
    """Part of a product that is this operator's, where several operators make up one product."""
    left_gradient: int = 0
    """Whether the left operand needs a gradient."""
    right_gradient: int = 0
    """Whether the right operand needs a gradient; it is the weight, if there is one."""
    visible_share: float = 1.0
    """Of fused attention: `Visible.share` of `automap.price.kernels.attention`."""
    visible_edges: float = 0.0
    """Of fused attention: `Visible.edges`."""
    widest_share: float = 1.0
    """Of fused attention: `Visible.widest`."""
    kv_share: float = 1.0
    """Of fused attention: heads of keys and values over those of queries."""
    is_loss: int = 0
    """Whether it is part of the loss."""
    heads: int = -1
    """Of the softmax between the two products of an attention that is not fused: position of the operand whose dims,
    but for the last two, are samples and heads; else -1."""
    is_routed: int = 0
    """Whether it moves tokens to experts or back."""
    is_frozen: int = 0
    """Whether it has no backward pass, since nothing at or before it is trained."""
    weight_share: float = 0.0
    """Share of the backward pass for gradients of weights: of its time or, for products, of its kernels."""
    forward_flops: float = 0.0
    """FLOPs of the forward pass that do not depend on the samples."""
    forward_flops_per_sample: float = 0.0
    """FLOPs of the forward pass for each sample."""
    backward_flops: float = 0.0
    """FLOPs of the backward pass that do not depend on the samples."""
    backward_flops_per_sample: float = 0.0
    """FLOPs of the backward pass for each sample."""
    forward_traffic: float = 0.0
    """How often the forward pass moves the bytes of its operands."""
    backward_traffic: float = 0.0
    """How often the backward pass moves the bytes of its operands."""
    forward_kernels: float = 0.0
    """Kernels launched in the forward pass."""
    backward_kernels: float = 0.0
    """Kernels launched in the backward pass."""
    forward_cast_bytes: float = 0.0
    """Bytes moved to convert operands to another number format or layout, which do not depend on the samples."""
    forward_cast_bytes_per_sample: float = 0.0
    """The same for each sample."""
    backward_cast_bytes: float = 0.0
    """Bytes moved to convert gradients back, which do not depend on the samples."""
    backward_cast_bytes_per_sample: float = 0.0
    """The same for each sample."""
    casts: float = 0.0
    """Number of operands that are converted."""
    measured_forward_s: float = -1.0
    """Seconds of the forward pass of one sample as the user measured them, or -1."""
    measured_backward_s: float = -1.0
    """Seconds of the backward pass of one sample as the user measured them, or -1."""
    stated_bytes: float = -1.0
    """Bytes of one sample that the user states, or -1."""


@dataclass(kw_only=True, slots=True)
class OperandRow:
    """One input or output of an operator."""

    tensor: int
    """Row of `tensors`."""
    is_saved: int
    """Whether the backward pass of its operator needs it."""
    copy_share: float
    """Bytes of the copy in another number format that its operator reads and saves, or of the positions of maxima that
    it saves, over those of the operand itself; 0 if there is neither."""
    earlier: int
    """Row of the latest operand before it in the unit that reads the same tensor, or -1."""
    operator: int
    """Row of its operator."""
    is_moved: int
    """Whether its bytes are read from memory or written to it: not inside a fused kernel, and once if several operators
    of one kernel read it."""
    maker: int
    """Row of the output that makes the tensor; -1 for parameters, views and tensors of other units."""
    same_memory: int
    """Latest row before it that may save the same memory for the backward pass, or -1."""
    next_reader: int
    """First row that reads the result of its operator, if the operator is a view or reads parameters alone; else -1."""
    sibling: int
    """Next row of the unit that reads the same tensor, or -1."""
    is_scores: int
    """Whether it holds the scores of a loss, see `ir.loss.scores_of_losses`."""
    is_kept: int
    """Whether the backward pass of some operator of the unit needs its memory."""
    is_kept_behind: int
    """Whether the backward passes of this unit and of the next one need its memory, so that the cost of the next unit
    counts it."""
    is_held: int
    """Whether it reads the tensor that crosses into the unit, and the backward pass of the unit before needs that."""
    goes_on: int = 0
    """Whether it is the first row of a tensor that units after the next one read, so that it crosses out of the unit
    beside the boundary tensor."""
    next_handed_on: int = -1
    """Next row of the list that begins at `OperatorRow.hands_on`, or -1."""


@dataclass(kw_only=True, slots=True)
class TensorRow:
    """One tensor of a unit type."""

    role: int
    """ACTIVATION, PARAMETER, OTHER, BOUNDARY or CARRIED."""
    producer: int
    """Row of the operator of this unit that makes it, or -1."""
    slot: int
    """Position among the outputs of its producer."""
    has_gradient: int
    """Whether a gradient of it is computed."""
    root: int
    """Row of the tensor whose memory it shares; its own row unless a view makes it."""
    batch_dim: int
    """Dim that holds the samples, or -1."""
    num_dims: int
    """Number of its dims."""
    dims: Annotated[Ints, np.int64, MAX_DIMS]
    """Sizes of its dims at one sample; 1 behind the last dim."""
    fixed_elements: float
    """Elements that do not depend on the samples."""
    elements_per_sample: float
    """Elements for each sample."""
    element_bytes: float
    """Bytes of an element. Of keys or values that are repeated for several heads inside fused attention, which reads
    them once: divided by the number of repetitions."""
    is_frozen: int
    """Whether it is a parameter that is not trained."""
    num_parameters: float
    """1, or for a piece of a fused parameter its part of the whole one, which is one parameter to the trainer."""
    copies: float
    """Copies of each token in a tensor that goes to or from experts: 1 before the dispatch and after the combination,
    and between them the number of experts of a token. 0 for all other tensors."""


@dataclass(kw_only=True, slots=True)
class SignatureRow:
    """One signature of an operator on one mesh axis."""

    first_placement: int
    """Row of `placements` for the operator's first operand."""
    divides_work: int
    """Whether the ranks of the axis divide the work."""
    factor: int
    """Number of the factor that it splits among those of the operator's rule, or -1."""
    extent: int
    """Size of the factor that it splits, at one sample; 1 where it splits none."""
    collective: int
    """Kind of the collective inside the operator, or -1."""
    splits_batch: int
    """Whether it splits the samples."""
    is_uneven: int
    """Whether the parts of the ranks may be of unlike sizes, see `ir.factors.may_be_uneven`."""
    loop_class: int
    """Class of loop that it splits, or -1."""
    forward_bytes: float
    """Bytes of the collective in the forward pass that do not depend on the samples."""
    forward_bytes_per_sample: float
    """Bytes of the collective in the forward pass for each sample."""
    backward_bytes: float
    """Bytes of the collective in the backward pass that do not depend on the samples."""
    backward_bytes_per_sample: float
    """Bytes of the collective in the backward pass for each sample."""


@dataclass(kw_only=True, slots=True)
class PlacementRow:
    """The placement of one operand and of its gradient under a signature, on one mesh axis."""

    placement: int
    """Placement of the tensor, see `ir.factors`."""
    gradient: int
    """Placement in which an input's gradient leaves the operator."""


@dataclass(kw_only=True, slots=True)
class MeasuredBlockRow:
    """Times of whole units that the user measured, see `automap.price.kernels.measured_blocks`."""

    first: int
    """First operator row."""
    last: int
    """One past the last operator row."""
    tp: float
    """Degree of tensor parallelism."""
    samples: float
    """Samples of a micro-batch on one replica."""
    forward_s: float
    """Seconds of the forward pass of a micro-batch."""
    backward_s: float
    """Seconds of the backward pass of a micro-batch."""


OPERATOR_DTYPE, KERNEL_DTYPE, OPERAND_DTYPE = dtype_of(OperatorRow), dtype_of(KernelRow), dtype_of(OperandRow)
TENSOR_DTYPE, SIGNATURE_DTYPE, PLACEMENT_DTYPE = dtype_of(TensorRow), dtype_of(SignatureRow), dtype_of(PlacementRow)
MEASURED_BLOCK_DTYPE = dtype_of(MeasuredBlockRow)
OPERATOR, KERNEL, OPERAND, TENSOR = map(record_type, (OPERATOR_DTYPE, KERNEL_DTYPE, OPERAND_DTYPE, TENSOR_DTYPE))


class Arrays(NamedTuple):
    """The tables of a problem as one argument of the kernels."""

    operators: Annotated[Rows, OPERATOR[::1]]
    kernels: Annotated[Rows, KERNEL[::1]]
    """One row for each row of `operators`."""
    operands: Annotated[Rows, OPERAND[::1]]
    tensors: Annotated[Rows, TENSOR[::1]]
    signatures: Annotated[Rows, record_type(SIGNATURE_DTYPE)[::1]]
    placements: Annotated[Rows, record_type(PLACEMENT_DTYPE)[::1]]
    blocks: Annotated[Rows, record_type(MEASURED_BLOCK_DTYPE)[::1]]
    """Empty unless the user measured blocks."""


TABLES = tuple_type(Arrays)
"""numba's type of `Arrays`."""
