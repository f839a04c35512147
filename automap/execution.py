"""How a trainer runs a graph: which operators are one kernel, and how many bytes an element of each tensor takes.

A trainer with compilers or kernels written by hand runs every chain of `ir.groups` as one kernel, and all activations
have the number format of the training. PyTorch by itself runs operator after operator; only its own functions, such as
attention, layer norms, GELU, SiLU and the cross-entropy, are one kernel. Under `torch.autocast` weights stay in
float32; matrix products, convolutions and attention take copies of 16 bits of what they read; some functions compute in
float32; all others in the widest type that they read (documentation of `torch.amp`, "Autocast Op Reference"). Hence a
residual stream is in float32 there, and products convert what they read of it. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from automap.image_layouts import converted
from automap.problem import Problem
from ir.graph import Graph, Operator
from ir.group_kinds import PRODUCTS
from ir.groups import FusedGroup, fused_groups
from ir.operators.experts import COMBINE
from ir.operators.experts import PRODUCT as EXPERT_PRODUCT

FULL, HALF = 4.0, 2.0
"""Bytes of an element in float32, and in bf16 or fp16."""
PLACE = 8.0
"""Bytes of the place of a maximum: PyTorch's max_pool2d saves its operand and int64 indices, one for each result
(documentation of torch.nn.MaxPool2d, return_indices)."""
GATES = {"LSTM": 6.0, "GRU": 5.0}
"""What a recurrent layer keeps for each element of its states, beside its operands (counted: backpropagation through
time needs them; cuDNN does not document the size of its own buffer). An LSTM keeps the states, its four gates and the
states of its cell; a GRU the states, its three gates, and the product with the state that one of them multiplies."""
WIDENING = 2.0
"""Time of converting to a wider number format over that of other operators on as many bytes (measured on an H200: 2.1
of 4.2 TB/s, benchmarks/results/gpu_kernels-2026-11-27.txt)."""
MIXED = 1.6
"""Time of an operator that reads two number formats over that of others on as many bytes (the same: 2.6 TB/s)."""
ROTATION = 5.0
"""Time of a rotary embedding that runs operator after operator over that of one kernel. PyTorch has no function for
it, so every implementation is a chain, such as `x * cos + rotate_half(x) * sin`: counted, 10 elements read or written
for each element of x in each pass, where one kernel has 2."""
ROTATION_KERNELS = 5
"""Kernels of this chain in each pass: counted, a negation, a concatenation, two products and a sum."""
CLIPPING = {"Min", "Max", "Clip"}
"""Kinds that limit values."""
LAST_BIAS = (3.0, 8.0)
"""Time of adding the biases of the last products of experts over that of one addition, forward and backward, where
PyTorch's operators do it for one expert after another (Megatron-Core's TEGroupedMLP._apply_bias): counted. Forward, 6
elements are read or written for each element of the result, where an addition has 2: the biases times the tokens'
weights, the sum, and the concatenation of all experts. Backward, 8 where an addition has 1: two products and two sums
for the gradients of biases and weights, and the concatenation."""
NATIVE_BATCH_NORM, MEASURED_SHARE = 5.3, 4800 / 132
"""Time of PyTorch's own batch normalisation over that of its bytes, in bf16, which cuDNN's does not take (the same, a
step of ResNet-50: 31 ms for 23 GB), and the memory bandwidth of that H200 for each of its multiprocessors, in GB/s."""
IN_HALF = PRODUCTS | {
    EXPERT_PRODUCT, "Attention", "Conv", "ConvTranspose", "DeformConv", "FusedConv", "LSTM", "GRU", "RNN", "PRelu",
}  # fmt: skip
"""Kinds that take operands of 16 bits under autocast."""
IN_FULL = {
    "Pow", "Exp", "Log", "Reciprocal", "Softplus", "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization",
    "GroupNormalization", "LpNormalization", "ReduceSum", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceLogSumExp",
    "CumSum", "CumProd", "Acos", "Asin", "Cosh", "Sinh", "Tan", "Resize",
}  # fmt: skip
"""Kinds that compute in float32 under autocast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cast:
    """An operand of which an operator reads a copy in another number format."""

    tensor: str
    source: float
    """Bytes of an element of the tensor."""
    copy: float
    """Bytes of an element of the copy."""

    @property
    def moved(self) -> tuple[float, float]:
        """Bytes that are moved for an element, forward and, for the gradient, backward; at the usual rate."""
        moved = self.source + self.copy
        return (WIDENING * moved, moved) if self.copy > self.source else (moved, WIDENING * moved)


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """How a trainer runs the graph of a problem."""

    kernels: tuple[FusedGroup, ...]
    """Operators that run as one kernel."""
    widths: Mapping[str, float]
    """Bytes of an element of activations; those that are not in here have the format of the training."""
    casts: Mapping[int, tuple[Cast, ...]]
    """Operator -> what is converted for it, of a kernel all for the first product of it; copies are saved in place of
    the tensors."""
    slower: Mapping[int, tuple[float, float]]
    """Operator -> times of its kernels, forward and backward, over those that its traffic says, where they differ."""
    launches: Mapping[int, int]
    """Operator -> kernels that it launches in each pass, where it is a chain of the trainer's code."""
    kept_beside: Mapping[int, float]
    """Operator -> bytes that it keeps for its backward pass and that are no tensor of the graph, over those of its
    result: the places of a pooling of maxima, and states and gates of a recurrent
    layer."""
    conversions: Mapping[int, tuple[float, float]]
    """Convolution -> bytes that converting its images to another layout moves, forward and backward, for an element of
    its input."""


def execution(problem: Problem) -> Execution:
    """How the trainer of a problem runs its graph."""
    graph, kernels = problem.graph, tuple(_kernels(problem))
    widths: Mapping[str, float] = {}
    casts: Mapping[int, tuple[Cast, ...]] = {}
    if casts_weights(problem):
        widths = _widths(graph, kernels)
        casts = _casts(graph, kernels, widths)
    return Execution(
        kernels=kernels,
        widths=MappingProxyType(widths),
        casts=MappingProxyType(casts),
        slower=MappingProxyType(_slower(problem, widths)),
        launches=MappingProxyType(dict.fromkeys(_rotations(problem), ROTATION_KERNELS)),
        kept_beside=MappingProxyType(_kept_beside(problem, widths)),
        conversions=MappingProxyType(converted(problem)),
    )


def casts_weights(problem: Problem) -> bool:
    """Whether weights are in float32 and converted for each product: the trainer uses autocast, in 16 bits."""
    return problem.trainer.autocast and problem.activation_bytes == HALF


def _kernels(problem: Problem) -> Iterator[FusedGroup]:
    for group in fused_groups(problem.graph):
        if group.kind == "attention" and problem.trainer.fused_attention:
            yield group
            continue
        own = group.unfused if group.kind == "attention" else group
        if own is not None and not problem.trainer.fuses_chains:
            own = _function(problem.graph, own)
        elif own is not None and own.kind == "activation" and not problem.trainer.fuses_clipping:
            own = _after_clipping(problem.graph, own)
        if own is not None:
            yield own


def _after_clipping(graph: Graph, group: FusedGroup) -> FusedGroup | None:
    """The part of an activation that begins when its operands have been clipped; None where nothing is left."""
    members = tuple(i for i in group.members if graph.operators[i].kind not in CLIPPING)
    if len(members) == len(group.members):
        return group
    made, clipped = ({name for i in some for name in graph.operators[i].outputs} for some in (members, group.members))
    read = {name for i in members for name in graph.operators[i].inputs} - made
    kept = frozenset(read & (group.saved | clipped))
    return replace(group, members=members, internal=group.internal & made, saved=kept) if members else None


def _function(graph: Graph, group: FusedGroup) -> FusedGroup | None:
    """The part of a group that is one of PyTorch's functions, or None.

    Exporters write a layer norm as a chain that subtracts the mean, GELU as one with an error function, and SiLU as a
    sigmoid and a product. Root-mean-square norms, GELU by a tanh, rotary embeddings and masked softmaxes that were
    chains in a file were so in the code: PyTorch's own ones are exported as one operator.
    """
    kinds = [graph.operators[i].kind for i in group.members]
    if group.kind == "loss" or (group.kind == "norm" and "Sub" in kinds):
        return group
    if group.kind != "activation":
        return None
    members = [i for i in group.members if not _is_gate(graph, i, group)]
    kinds = [graph.operators[i].kind for i in members]
    if not {"Erf", "Erfc"} & set(kinds) and sorted(kinds) != ["Mul", "Sigmoid"]:
        return None
    if len(members) == len(group.members):
        return group
    (out,) = graph.operators[members[-1]].outputs
    made = {name for i in members for name in graph.operators[i].outputs}
    kept = {name for i in members for name in graph.operators[i].inputs if name in group.saved} - made
    return replace(group, members=tuple(members), internal=frozenset(made - {out}), saved=frozenset(kept))


def _is_gate(graph: Graph, index: int, group: FusedGroup) -> bool:
    """Whether an operator of an activation is the product of its result with another tensor."""
    op = graph.operators[index]
    if op.kind != "Mul" or index != group.members[-1]:
        return False
    made = {name for i in group.members for name in graph.operators[i].outputs}
    read = {name for i in group.members if i != index for name in graph.operators[i].inputs}
    return any(name in graph.of_parameters and name not in made and name not in read for name in op.inputs)


def _widths(graph: Graph, kernels: Sequence[FusedGroup]) -> dict[str, float]:
    """Bytes of an element of each activation under autocast."""
    inside = {i: kernel for kernel in kernels for i in kernel.members}
    found: dict[str, float] = {}
    for index, op in enumerate(graph.operators):
        width = _width(graph, index, op, inside.get(index), found)
        floats = [n for n in op.outputs if graph.tensors[n].is_float and n in graph.of_parameters]
        made = [n for n in floats if not graph.is_weight(n)]
        found.update(dict.fromkeys(made, width))
    return found


def _width(graph: Graph, index: int, op: Operator, kernel: FusedGroup | None, known: Mapping[str, float]) -> float:
    """Bytes of an element of what an operator makes."""
    if kernel is not None and kernel.kind in ("attention", "norm"):
        return HALF if kernel.kind == "attention" else FULL
    if op.kind in IN_HALF:
        return HALF
    if op.kind in IN_FULL:
        return FULL
    if op.kind == "Cast":
        return FULL if dict(op.attributes).get("to") == "float32" else HALF
    if op.inputs and op.inputs[0] in known and (op.traffic[0] == 0.0 or op.kind == "BatchNormalization"):
        return known[op.inputs[0]]  # views and cuDNN's norms
    if _is_bias(graph, op):
        return HALF  # added by the kernel of its product
    # Numbers, masks and positions take the type of what they meet.
    read = [name for name in op.inputs if graph.tensors[name].is_float and name in graph.of_parameters]
    return max((known.get(name, FULL) for name in read), default=FULL)


def _is_bias(graph: Graph, op: Operator) -> bool:
    """Whether an operator adds a bias to a product."""
    makers = [graph.maker(name) for name in op.inputs]
    follows = any(maker is not None and maker.kind in IN_HALF for maker in makers)
    return op.kind == "Add" and follows and any(graph.is_weight(name) for name in op.inputs)


def _casts(graph: Graph, kernels: Sequence[FusedGroup], widths: Mapping[str, float]) -> Mapping[int, tuple[Cast, ...]]:
    """What is converted for each operator; weights apart, which `HardwareRow.weight_cast_bytes` counts."""
    inside = {i: kernel for kernel in kernels for i in kernel.members}
    found: dict[int, tuple[Cast, ...]] = {}
    for index, op in enumerate(graph.operators):
        kernel = inside.get(index)
        if kernel is not None and kernel.kind not in ("attention", "norm"):
            continue
        wanted = HALF if op.kind in IN_HALF else FULL if op.kind in IN_FULL or kernel is not None else None
        if wanted is None or (kernel is not None and index != host_of(graph, kernel)):
            continue
        names = op.inputs if kernel is None else tuple(n for i in kernel.members for n in graph.operators[i].inputs)
        made = set() if kernel is None else {n for i in kernel.members for n in graph.operators[i].outputs}
        found[index] = tuple(
            Cast(tensor=name, source=widths[name], copy=wanted)
            for name in dict.fromkeys(names)
            if name in widths and name not in made and widths[name] != wanted
        )
    return {index: casts for index, casts in found.items() if casts}


def _slower(problem: Problem, widths: Mapping[str, float]) -> dict[int, tuple[float, float]]:
    """See `Execution.slower`."""
    graph, found = problem.graph, dict.fromkeys(_rotations(problem), (ROTATION, ROTATION))
    if problem.trainer.fuses_chains and not problem.trainer.fuses_clipping:
        found |= dict.fromkeys(_last_biases(graph), LAST_BIAS)
    native = _native_batch_norm(problem)
    for index, op in enumerate(graph.operators if not problem.trainer.fuses_chains else ()):
        if index in found:
            continue
        if op.kind == "BatchNormalization" and problem.trainer.autocast and problem.base_precision == "bf16":
            found[index] = (native, native)
        elif op.kind not in IN_HALF | IN_FULL and len({widths[name] for name in op.inputs if name in widths}) > 1:
            found[index] = (MIXED, MIXED)
        elif op.kind in ("Mul", "Div") and sum(graph.tensors[n].num_elements > 1 for n in op.inputs) == 1:
            # The gradient of a product with a number is the other gradient times the number.
            found[index] = (1.0, 1.0 / op.traffic[1]) if op.traffic[1] > 1.0 else (1.0, 1.0)
    return found


def _last_biases(graph: Graph) -> Iterator[int]:
    """Operators that add the biases of the last products of experts."""
    combined = {op.inputs[0] for op in graph.operators if op.kind == COMBINE}
    for index, op in enumerate(graph.operators):
        makers = [graph.maker(name) for name in op.inputs]
        if op.kind == "Add" and op.outputs[0] in combined and any(m and m.kind == EXPERT_PRODUCT for m in makers):
            yield index


def _native_batch_norm(problem: Problem) -> float:
    """Time of PyTorch's own batch normalisation over that of its bytes, on the slowest kind of device for it.

    The multiprocessors are taken to set its time, since it reaches a fifth of the measured device's bandwidth: where
    each of them has less bandwidth, memory is less idle. It takes no less than its bytes do, and no more than measured
    (assumed).
    """
    kinds = (problem.cluster.devices[node.device] for node in problem.cluster.nodes)
    shares = [kind.hbm_bandwidth_GBps / kind.num_multiprocessors / MEASURED_SHARE for kind in kinds]
    return min(NATIVE_BATCH_NORM, max(1.0, NATIVE_BATCH_NORM * max(shares)))


def _rotations(problem: Problem) -> list[int]:
    """Rotary embeddings that are one operator of the graph, and a chain in the trainer's code."""
    if problem.trainer.fuses_chains:
        return []
    return [index for index, op in enumerate(problem.graph.operators) if op.kind == "RotaryEmbedding"]


def _kept_beside(problem: Problem, widths: Mapping[str, float]) -> dict[int, float]:
    """See `Execution.kept_beside`."""
    found = {}
    for index, op in enumerate(problem.graph.operators):
        if op.kind == "MaxPool" and op.saved:
            found[index] = PLACE / widths.get(op.outputs[0], problem.activation_bytes)
        elif op.kind in GATES and op.saved:
            tensors, layout = problem.graph.tensors, int(dict(op.attributes).get("layout", 0))
            # A layer whose states at all positions nobody reads has the last one as its first result.
            is_last = len(tensors[op.outputs[0]].shape) == 3
            found[index] = GATES[op.kind] * (tensors[op.inputs[0]].shape[layout] if is_last else 1)
    return found


def host_of(graph: Graph, group: FusedGroup) -> int:
    """The member in whose place the kernel of a group is priced: of attention, the product that makes scores."""
    if group.kind == "attention":
        for index in group.members:
            op = graph.operators[index]
            if op.forward_flops.at(1) > 0 and (op.kind in PRODUCTS or op.kind == "Attention"):
                return index
    return group.members[0]
