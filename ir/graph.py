"""Graph, Operator, Tensor: the forward part of a model's training graph, kept for one sample.

Every size is `fixed + per_sample * n` for a batch of `n` samples (`Amount`). A tensor that carries the batch does so in
exactly one dim (`batch_dim`), whose size at `n` samples is `n` times the one kept here. The module is
independent of files, devices and plans. Units: elements, bytes, floating-point operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from math import prod
from typing import Any, Literal, TypeVar

from ir.factors import FactorRule
from ir.notebook import shown

T = TypeVar("T")

TensorRole = Literal["input", "parameter", "buffer", "constant", "activation"]

DTYPE_BYTES: Mapping[str, float] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8": 1,
    "float4": 0.5,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "int4": 0.5, "uint4": 0.5, "int2": 0.25, "uint2": 0.25, "bool": 1, "complex64": 8, "string": 0,
}  # fmt: skip
"""Bytes of one element by dtype."""

AS_ARGUMENT = ".argument"
"""Behind the name of an input that a parameter or a buffer of the module has as well: that of the other is its path. No
argument of Python has a dot in its name, so that `Tensor.argument` finds it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amount:
    """A quantity that is affine in the number of samples."""

    fixed: float = 0.0
    """Part that does not depend on the number of samples."""
    per_sample: float = 0.0
    """Part that each sample adds."""

    def at(self, num_samples: float) -> float:
        """The quantity for `num_samples` samples."""
        return self.fixed + self.per_sample * num_samples

    def __add__(self, other: Amount) -> Amount:
        return Amount(fixed=self.fixed + other.fixed, per_sample=self.per_sample + other.per_sample)

    def scaled(self, factor: float) -> Amount:
        """The quantity times `factor`."""
        return Amount(fixed=self.fixed * factor, per_sample=self.per_sample * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor of the graph, at one sample."""

    name: str
    shape: tuple[int, ...]
    """Sizes of the dims at one sample."""
    dtype: str
    """Key of `DTYPE_BYTES`, as the file states it; the precision of training is part of the problem."""
    role: TensorRole
    """`buffer` = state without gradient (running statistics); `constant` = known without data or parameters."""
    batch_dim: int | None = None
    """Dim that grows with the number of samples, or None."""
    frozen: bool = False
    """Whether a parameter is not trained: it lies in memory like any other, but has no gradient and no update."""

    @property
    def num_elements(self) -> int:
        """Number of elements at one sample."""
        return prod(self.shape)

    @property
    def elements(self) -> Amount:
        """Number of elements as a function of the number of samples."""
        count = float(self.num_elements)
        return Amount(fixed=count) if self.batch_dim is None else Amount(per_sample=count)

    @property
    def is_float(self) -> bool:
        """Whether the tensor can carry a gradient."""
        return self.dtype.startswith(("float", "bfloat"))

    @property
    def argument(self) -> str:
        """Name of the argument of the network's code that an input is."""
        return self.name.removesuffix(AS_ARGUMENT)

    def shape_at(self, num_samples: int) -> tuple[int, ...]:
        """Sizes of the dims for `num_samples` samples."""
        return tuple(s * num_samples if i == self.batch_dim else s for i, s in enumerate(self.shape))


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator: the tensors that it reads and writes, its costs, and its factor rule."""

    name: str
    """Unique name; `scope/Kind` when the exporter said which module the operator came from."""
    kind: str
    """ONNX operator type."""
    inputs: tuple[str, ...]
    """Names of the tensor operands; shape-like constants of the file have become `attributes`."""
    outputs: tuple[str, ...]
    """Names of the results."""
    rule: FactorRule
    """Loops of the operator, from which its shardings follow."""
    forward_flops: Amount = Amount()
    """FLOPs of the forward pass: 2 a multiply-add of matmul, convolution, attention and recurrent operators, else 0."""
    backward_flops: Amount = Amount()
    """FLOPs of the gradients of inputs and weights together, counted in the same way."""
    traffic: tuple[float, float] = (1.0, 2.0)
    """Bytes moved (forward, backward), in multiples of the bytes of all inputs and outputs; 0 for pure views."""
    saved: tuple[str, ...] = ()
    """Names of the inputs and outputs that the backward pass needs."""
    scope: str = ""
    """Dotted path of the module in the source program; empty when unknown."""
    is_view: bool = False
    """Whether the operator only re-arranges parameters, so that it costs nothing for a micro-batch."""
    is_constant: bool = False
    """Whether it depends on neither data nor parameters (masks, positions); duplicated where needed, never cut."""
    attributes: tuple[tuple[str, Any], ...] = ()
    """ONNX attributes and folded constant operands, sorted by name; numbers, strings and tuples of them."""
    opset: int = 0
    """Version of the operator set of its domain that the file declares."""
    measured_forward_s: float | None = None
    """Measured seconds of the forward pass of one sample, which replace the modelled time; None = not measured."""
    measured_backward_s: float | None = None
    """Measured seconds of the backward pass of one sample; None beside a measured forward pass = twice that."""
    stated_bytes: float | None = None
    """Bytes moved forward for one sample, as the file states them, which replace those of the operands."""
    annotations: tuple[tuple[str, int], ...] = ()
    """Annotations by the author of the file about plans, see `ir.onnx.readers.annotations`."""

    @property
    def is_live(self) -> bool:
        """Whether the operator computes something from data: it is neither a view of parameters nor a constant."""
        return not self.is_view and not self.is_constant

    @property
    def is_alias(self) -> bool:
        """Whether the result shares the memory of the first operand."""
        return self.traffic[0] == 0.0 and len(self.outputs) == 1 and len(self.inputs) >= 1

    @property
    def measured_s(self) -> tuple[float, float] | None:
        """Measured seconds of one sample (forward, backward), or None."""
        if self.measured_forward_s is None:
            return None
        backward = self.measured_backward_s
        return self.measured_forward_s, 2.0 * self.measured_forward_s if backward is None else backward

    def with_costs(self, costs: Mapping[str, float | None], *, backward: float = 2.0) -> Operator:
        """The operator with new stated costs of one sample, in place of all earlier ones.

        Args:
            costs: forward_s and backward_s in seconds; flops and bytes of the forward pass. Without flops, the
                operator keeps its FLOPs.
            backward: FLOPs of the backward pass over those of the forward pass.
        """
        op = replace(
            self,
            measured_forward_s=costs.get("forward_s"),
            measured_backward_s=costs.get("backward_s"),
            stated_bytes=costs.get("bytes"),
        )
        flops = costs.get("flops")
        if flops is None:
            return op
        return replace(op, forward_flops=Amount(per_sample=flops), backward_flops=Amount(per_sample=backward * flops))

    def renamed(self, names: Mapping[str, str], *, name: str | None = None, scope: str | None = None) -> Operator:
        """The operator with tensors renamed by `names`, old name -> new name; by default with the same name and
        scope."""
        get = names.get
        # Written out, as `replace` takes four times as long and deep models are built from copies of one layer.
        return Operator(
            name=self.name if name is None else name,
            kind=self.kind,
            inputs=tuple([get(n, n) for n in self.inputs]),
            outputs=tuple([get(n, n) for n in self.outputs]),
            rule=self.rule,
            forward_flops=self.forward_flops,
            backward_flops=self.backward_flops,
            traffic=self.traffic,
            saved=tuple(dict.fromkeys([get(n, n) for n in self.saved])),
            scope=self.scope if scope is None else scope,
            is_view=self.is_view,
            is_constant=self.is_constant,
            attributes=self.attributes,
            opset=self.opset,
            measured_forward_s=self.measured_forward_s,
            measured_backward_s=self.measured_backward_s,
            stated_bytes=self.stated_bytes,
            annotations=self.annotations,
        )


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model's forward graph with its loss, in canonical order (Kahn, ties by file position; see `ir.alike_order`).

    Operators with `is_constant` come first. Parameter views stand directly before their first consumer.
    """

    name: str
    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    """Names of the results; the last one is the scalar loss once `ir.loss.with_loss` has run."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user about assumptions, and about replicated operators by name."""
    pieces: Mapping[str, tuple[str, int, int, int]] = field(default_factory=dict)
    """Two kinds of entries. A parameter of the graph that is a piece of a fused parameter of the file, or a piece of
    such a piece -> (that parameter, dim, start, stop). A parameter of the file that belongs to one expert -> (the
    graph's parameter of all experts, 0, number, number + 1)."""
    sha256: str = field(default="", compare=False)
    """Digest of the file that the graph came from; empty for built graphs."""

    def __repr__(self) -> str:
        return f"Graph({self.name!r}: {len(self.operators):,} operators, {self.num_parameters / 1e6:,.1f} M parameters)"

    def _repr_html_(self) -> str | None:
        return shown(self)

    @cached_property
    def by_name(self) -> Mapping[str, Operator]:
        """Operators by name."""
        return {op.name: op for op in self.operators}

    @cached_property
    def producer(self) -> Mapping[str, int]:
        """Index of the operator that writes each tensor; inputs and parameters are not listed."""
        return {name: i for i, op in enumerate(self.operators) for name in op.outputs}

    @cached_property
    def data_inputs(self) -> tuple[Tensor, ...]:
        """The inputs of the network among those of a graph with a loss: all but the labels."""
        labels = set(self.operators[-1].inputs[1:])
        return tuple(t for t in self.tensors.values() if t.role == "input" and t.name not in labels)

    def place(self, op: Operator) -> str:
        """An operator in words for users: its kind and its module, or the next module that reads its results."""
        if op.scope:
            return f"{op.kind} in module {op.scope}"
        seen, ahead = set[int](), [op]
        while ahead:
            made = ahead.pop(0).outputs
            numbers = {number for name in made for number in self.consumers[name]} - seen
            seen |= numbers
            ahead += [self.operators[number] for number in sorted(numbers)]
            if scope := next((other.scope for other in ahead if other.scope), ""):
                return f"{op.kind} before module {scope}"
        return f"{op.kind} {op.name}"

    def maker(self, name: str) -> Operator | None:
        """The operator that writes a tensor; None for inputs, parameters and stored constants."""
        index = self.producer.get(name)
        return None if index is None else self.operators[index]

    def is_weight(self, name: str) -> bool:
        """Whether a tensor is a parameter, or is made by a view of one."""
        maker = self.maker(name)
        return self.tensors[name].role == "parameter" or (maker is not None and maker.is_view)

    def viewed(self, name: str) -> str:
        """The parameter that a tensor is a view of, or the tensor itself."""
        maker = self.maker(name)
        while maker is not None and maker.is_view:
            name = maker.inputs[0]
            maker = self.maker(name)
        return name

    def repeats(self, name: str, dim: int) -> bool:
        """Whether an operator makes all slices of a tensor along a dim alike, from tensors without this dim: zeros for
        every head of attention, for example, of which code makes as many as it has heads."""
        op = self.maker(name)
        if op is None or op.kind not in ("Expand", "Where"):
            return False
        factors = op.rule.outputs[op.outputs.index(name)][dim]
        return all(
            self.repeats(operand, place)
            for operand, dims in zip(op.inputs, op.rule.inputs, strict=True)
            for place, held in enumerate(dims)
            if not set(held).isdisjoint(factors)
        )

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """The tensors that may have a gradient: floats that depend on a parameter, frozen ones included.

        Masks that are computed from samples alone have none.
        """
        found = {tensor.name for tensor in self.tensors.values() if tensor.role == "parameter" and tensor.is_float}
        for op in self.operators:
            if not found.isdisjoint(op.inputs):
                found |= {name for name in op.outputs if self.tensors[name].is_float}
        return frozenset(found)

    def keeps_activations(self, op: Operator) -> bool:
        """Whether the backward pass of an operator needs some activation of the forward pass."""
        return any(self.tensors[name].role == "activation" for name in op.saved)

    @cached_property
    def expert_names(self) -> Mapping[str, tuple[str, ...]]:
        """Parameter of all experts of a layer -> the names of those of its experts in the file, see `pieces`."""
        wholes = {whole for whole, *_ in self.pieces.values()}
        found: dict[str, list[str]] = {}
        for name, (whole, *_) in self.pieces.items():
            # A piece is a tensor of the graph, or has pieces itself.
            if name not in self.tensors and name not in wholes:
                found.setdefault(whole, []).append(name)
        return {whole: tuple(names) for whole, names in found.items()}

    @cached_property
    def has_frozen(self) -> bool:
        """Whether some parameter is not trained."""
        return any(t.frozen for t in self.tensors.values())

    @cached_property
    def of_parameters(self) -> frozenset[str]:
        """Names of the parameters, trained or not, and of the float tensors that depend on them."""
        return self._behind({t.name for t in self.tensors.values() if t.role == "parameter"})

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that are trained, and of the float tensors that depend on them."""
        if not self.has_frozen:
            return self.of_parameters
        return self._behind({t.name for t in self.tensors.values() if t.role == "parameter" and not t.frozen})

    def _behind(self, found: set[str]) -> frozenset[str]:
        """Some tensors, and the float tensors that depend on them."""
        for op in self.operators:
            if any(name in found for name in op.inputs):
                found.update(name for name in op.outputs if self.tensors[name].is_float)
        return frozenset(found)

    def runs_backward(self, op: Operator) -> bool:
        """Whether some parameter at or before an operator is trained, so that it has a backward pass."""
        return not self.has_frozen or any(name in self.trained for name in op.outputs)

    @cached_property
    def consumers(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the operators that read each tensor, ascending, without repeats."""
        found: dict[str, list[int]] = {name: [] for name in self.tensors}
        for i, op in enumerate(self.operators):
            for name in dict.fromkeys(op.inputs):
                found[name].append(i)
        return {name: tuple(indices) for name, indices in found.items()}

    @cached_property
    def parameters(self) -> tuple[Tensor, ...]:
        """Parameters, trained or frozen, in order of first use."""
        seen: dict[str, Tensor] = {}
        for op in self.operators:
            for name in op.inputs:
                tensor = self.tensors[name]
                if tensor.role == "parameter":
                    seen.setdefault(name, tensor)
        return tuple(seen.values())

    @cached_property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, trained or frozen; a tied parameter counts once."""
        return sum(t.num_elements for t in self.parameters)

    @cached_property
    def num_trained(self) -> int:
        """Number of elements of the parameters that are trained."""
        return sum(t.num_elements for t in self.parameters if not t.frozen)

    @cached_property
    def forward_flops(self) -> float:
        """Floating-point operations of one sample's forward pass (2 a multiply-add)."""
        return sum(op.forward_flops.at(1) for op in self.operators)

    def __iter__(self) -> Iterator[Operator]:
        return iter(self.operators)


def once_per_graph(function: Callable[[Graph], T]) -> Callable[[Graph], T]:
    """Decorates a function of a graph alone, so that its result is computed once and kept with the graph."""
    key = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def kept(graph: Graph) -> T:
        known = vars(graph)
        if key not in known:
            known[key] = function(graph)
        found: T = known[key]
        return found

    return kept
