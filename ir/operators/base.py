"""The table of operator kinds and what an entry works with.

An entry is a function from `Context` (operands, attributes) to `Result` (factor rule, costs). It never sees a
batch size: tensors are kept at one sample, and the batch is a factor of size 1. Constants of a file that was
exported at `export_batch` samples are brought to one sample by the entry (`ir.batch`). Units: elements, bytes,
floating-point operations (2 a multiply-add).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ir.factors import Factor, FactorRule, InternalCollective, Passing
from ir.graph import DTYPE_BYTES, Amount, Operator, Tensor

MAX_ELEMENTS = 1 << 48
"""Of one result: no real tensor is that large, and sizes stay exact as floats."""
Dims = list[tuple[int, ...]]
"""Factors of each dim of one operand, major first."""
Value = npt.NDArray[Any]


class Unsupported(Exception):
    """An entry cannot express this use of its kind; the message says why."""


class BakedBatch(Exception):
    """Operand `index` holds the exported batch size in `dim` although nothing traces it to a data input."""

    def __init__(self, index: int, dim: int, size: int) -> None:
        super().__init__(f"operand {index} has the exported batch in dim {dim}")
        self.index = index
        self.dim = dim
        self.size = size


class MissingBatch(Exception):
    """Operand `index` lacks the batch, which its siblings carry in `dim` and which cannot be broadcast here."""

    def __init__(self, index: int, dim: int) -> None:
        super().__init__(f"operand {index} must be repeated over the batch in dim {dim}")
        self.index = index
        self.dim = dim


class Rule:
    """Collects the factors of one operator."""

    def __init__(self) -> None:
        self.factors: list[Factor] = []
        self._batch: int | None = None

    def factor(
        self,
        size: int,
        *,
        name: str = "",
        summed: bool = False,
        fixed: bool = False,
        collective: InternalCollective | None = None,
    ) -> int:
        """Adds a factor and returns its index."""
        index = len(self.factors)
        label = name or f"d{index}"
        self.factors.append(Factor(name=label, size=size, summed=summed, fixed=fixed, collective=collective))
        return index

    @property
    def has_batch(self) -> bool:
        """Whether some operand carries the batch."""
        return self._batch is not None

    def batch(self) -> int:
        """Index of the batch factor, added at first use."""
        if self._batch is None:
            self._batch = len(self.factors)
            self.factors.append(Factor(name="b", size=1, is_batch=True))
        return self._batch

    def mark(
        self,
        index: int,
        *,
        summed: bool = False,
        fixed: bool = False,
        collective: InternalCollective | None = None,
    ) -> None:
        """Sets the marks of an existing factor."""
        old = self.factors[index]
        self.factors[index] = Factor(
            name=old.name,
            size=old.size,
            is_batch=old.is_batch,
            summed=summed or old.summed,
            fixed=fixed or old.fixed,
            collective=collective or old.collective,
        )

    def dim(self, tensor: Tensor, dim: int, **marks: Any) -> tuple[int, ...]:
        """Fresh factors for one dim of `tensor`: the batch first where it carries it, none for a size of 1."""
        size = tensor.shape[dim]
        carries = tensor.batch_dim == dim
        if size == 1:
            return (self.batch(),) if carries else ()
        rest = self.factor(size, **marks)
        return (self.batch(), rest) if carries else (rest,)

    def dims(self, tensor: Tensor, **marks: Any) -> Dims:
        """Fresh factors for every dim of `tensor`."""
        return [self.dim(tensor, i, **marks) for i in range(len(tensor.shape))]

    def size(self, dims: Sequence[int]) -> int:
        """Extent at one sample of a dim made of these factors."""
        return prod(self.factors[i].size for i in dims)

    def fix(self, dims: Sequence[int]) -> None:
        """Forbids splitting these factors."""
        for index in dims:
            self.mark(index, fixed=True)

    def collect(self, dims: Sequence[int], collective: InternalCollective) -> None:
        """Makes these factors splittable at a price."""
        for index in dims:
            self.mark(index, collective=collective)

    def build(
        self, inputs: Sequence[Dims], outputs: Sequence[Dims], passing: Passing, linear: Sequence[int] = ()
    ) -> FactorRule:
        """The finished rule."""
        return FactorRule(
            factors=tuple(self.factors),
            inputs=tuple(tuple(d) for d in inputs),
            outputs=tuple(tuple(d) for d in outputs),
            passing=passing,
            linear=tuple(linear),
        )


@dataclass
class Context:
    """What an entry is told about one use of its kind."""

    kind: str
    inputs: Sequence[Tensor | None]
    """Operands by ONNX position; None where an optional one is absent."""
    num_outputs: int
    attributes: Mapping[str, Any]
    values: Sequence[Value | None]
    """Known values by position, in units of the export (`export_batch` samples)."""
    needs_gradient: Sequence[bool]
    opset: int = 0
    export_batch: int = 1
    hints: Sequence[tuple[tuple[int, ...], str] | None] = ()
    """Exported shape and dtype of each output where the file states them; only opaque kinds look."""
    rule: Rule = field(default_factory=Rule)

    def tensor(self, index: int) -> Tensor:
        """Operand `index`, which must be there."""
        tensor = self.inputs[index] if index < len(self.inputs) else None
        if tensor is None:
            raise Unsupported(f"operand {index} is missing")
        return tensor

    def has(self, index: int) -> bool:
        """Whether operand `index` was given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def value(self, index: int) -> Value | None:
        """The known value of operand `index`."""
        return self.values[index] if index < len(self.values) else None

    def keep_one_sample(self, index: int, dim: int = 0) -> None:
        """Asks for the first of `dim` where a known operand holds the same for each exported sample.

        To be called where the consumers of the result broadcast it again.

        Raises:
            BakedBatch: operand `index` is such a constant.
        """
        value = self.value(index)
        if value is None or value.ndim <= dim or not 1 < value.shape[dim] == self.export_batch:
            return
        if (value == value.take([0], dim)).all():
            raise BakedBatch(index, dim, 1)

    def ints(self, name: str, index: int | None = None) -> tuple[int, ...] | None:
        """Integers from attribute `name`, else from the value of operand `index`; None if neither was given.

        Raises:
            Unsupported: the operand is there but its value is unknown.
        """
        if name in self.attributes:
            given = self.attributes[name]
            return tuple(int(v) for v in given) if isinstance(given, (tuple, list)) else (int(given),)
        if index is not None and self.has(index):
            value = self.value(index)
            if value is None:
                raise Unsupported(f"operand {index} ({name}) depends on data")
            return tuple(int(v) for v in value.reshape(-1))
        return None

    def floats(self, name: str, index: int) -> tuple[float, ...] | None:
        """Likewise for floats."""
        if name in self.attributes:
            given = self.attributes[name]
            return tuple(float(v) for v in given) if isinstance(given, (tuple, list)) else (float(given),)
        if self.has(index):
            value = self.value(index)
            if value is None:
                raise Unsupported(f"operand {index} ({name}) depends on data")
            return tuple(float(v) for v in value.reshape(-1))
        return None

    def int_attribute(self, name: str, default: int) -> int:
        """An integer attribute."""
        return int(self.attributes.get(name, default))

    def axis(self, name: str, default: int, rank: int) -> int:
        """An axis attribute, made non-negative."""
        axis = self.int_attribute(name, default)
        if not -rank <= axis < max(rank, 1):
            raise Unsupported(f"{name}={axis} is outside a rank of {rank}")
        return axis % rank if rank else 0


@dataclass
class Result:
    """What an entry answers."""

    operands: Sequence[tuple[int, Dims]]
    """(position, factors) of the operands that stay tensors; the others have become attributes."""
    outputs: Sequence[Dims]
    dtypes: Sequence[str] = ()
    """Of the outputs; missing ones are those of the first operand."""
    passing: Passing = "none"
    linear: Sequence[int] = ()
    """Positions of the operands that may be partial under `passing`; empty = all."""
    forward_flops: float = 0.0
    """At one sample."""
    gradient_flops: Mapping[int, float] = field(default_factory=dict)
    """Operand position -> FLOPs of its gradient."""
    traffic: tuple[float, float] = (1.0, 2.0)
    saved_inputs: Sequence[int] = ()
    saved_outputs: Sequence[int] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Replaces the file's attributes of the same name; None removes one."""
    is_opaque: bool = False
    replicated_because: str = ""
    """Why the samples stay together, for the user to read; empty where they are free."""


Entry = Callable[[Context], Result]
KINDS: dict[str, Entry] = {}
"""Kind -> entry; `domain.Kind` for operators outside the standard domain."""
VIEW_KINDS: set[str] = set()
"""Kinds that only re-arrange: on parameters they are views."""


def kind(*names: str, is_view: bool = False) -> Callable[[Entry], Entry]:
    """Registers an entry under `names`."""

    def register(entry: Entry) -> Entry:
        for name in names:
            KINDS[name] = entry
            if is_view:
                VIEW_KINDS.add(name)
        return entry

    return register


def bytes_of(dtype: str) -> float:
    """Bytes of one element."""
    return DTYPE_BYTES.get(dtype, 4)


def all_reduce(
    name: str, shape: Sequence[int], floats: float, *, has_batch: bool, backward: float = 1.0
) -> InternalCollective:
    """An all-reduce of `floats` 4-byte statistics for each row of `shape` (statistics are kept in float32)."""
    amount = 4.0 * floats * prod(shape)
    pair = (0.0, amount) if has_batch else (amount, 0.0)
    return InternalCollective(
        name=name, kind="all_reduce", forward_bytes=pair, backward_bytes=(pair[0] * backward, pair[1] * backward)
    )


def opaque(ctx: Context) -> Result:
    """Any kind outside the table: replicated only; the shapes are those the file states."""
    rule = ctx.rule
    operands = [(i, rule.dims(t, fixed=True)) for i, t in enumerate(ctx.inputs) if t is not None]
    batched = next((t for t in ctx.inputs if t is not None and t.batch_dim is not None), None)
    outputs: list[Dims] = []
    dtypes: list[str] = []
    for i in range(ctx.num_outputs):
        hint = ctx.hints[i] if i < len(ctx.hints) else None
        if hint is None:
            raise Unsupported("this kind is unknown and the file does not state its output shape")
        shape, dtype = hint
        dims: Dims = []
        for d, size in enumerate(shape):
            in_batch = batched is not None and batched.batch_dim == d and size % ctx.export_batch == 0
            rest = size // ctx.export_batch if in_batch else size
            head = (rule.batch(),) if in_batch else ()
            dims.append((*head, rule.factor(rest, fixed=True)) if rest != 1 else head)
        outputs.append(dims)
        dtypes.append(dtype)
    if rule.has_batch:
        rule.mark(rule.batch(), fixed=True)
    everything = [i for i, t in enumerate(ctx.inputs) if t is not None]
    return Result(operands, outputs, dtypes, saved_inputs=everything, is_opaque=True)


@dataclass(frozen=True)
class Built:
    """An operator with the tensors it writes."""

    operator: Operator
    outputs: tuple[Tensor, ...]
    is_opaque: bool
    replicated_because: str = ""


def _plain(value: Any) -> Any:
    """Attribute values as numbers, strings and tuples."""
    if type(value) in (int, float, str):
        return value
    if isinstance(value, np.ndarray):
        return tuple(value.reshape(-1).tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return value


def make_operator(
    kind: str,
    *,
    name: str,
    inputs: Sequence[Tensor | None],
    outputs: Sequence[str],
    attributes: Mapping[str, Any] | None = None,
    values: Sequence[Value | None] = (),
    needs_gradient: Sequence[bool] | None = None,
    opset: int = 0,
    scope: str = "",
    export_batch: int = 1,
    hints: Sequence[tuple[tuple[int, ...], str] | None] = (),
    is_view: bool = False,
    is_constant: bool = False,
) -> Built:
    """One operator from its operands: rule, shapes, costs.

    Args:
        kind: ONNX operator type (`domain.Type` outside the standard domain).
        name: unique name.
        inputs: operands by ONNX position, at one sample; None = absent.
        outputs: names of the results, "" for an optional one that is not wanted.
        attributes: ONNX attributes; shape-like operands may be given here by their ONNX names, at one sample.
        values: known operand values by position, at `export_batch` samples.
        needs_gradient: by position; default: float parameters and activations.
        opset: version of the operator set.
        scope: module path.
        export_batch: samples that the values of the file were exported for.
        hints: exported output shapes for kinds outside the table.
        is_view: re-arranges parameters only.
        is_constant: depends on neither data nor parameters.

    Raises:
        Unsupported: this use cannot be expressed.
        BakedBatch: an operand holds the exported batch size untraced.
        MissingBatch: an operand must first be repeated over the batch.
    """
    attrs = dict(attributes or {})
    results = attrs.pop("results", None)
    if results is not None:
        outputs = [dict(zip(results, outputs, strict=True)).get(i, "") for i in range(max(results) + 1)]
    positions = attrs.pop("operands", None)
    if positions is not None:
        spread: list[Tensor | None] = [None] * (max(positions, default=-1) + 1)
        for position, tensor in zip(positions, inputs, strict=True):
            spread[position] = tensor
        if needs_gradient is not None:
            wide = [False] * len(spread)
            for position, flag in zip(positions, needs_gradient, strict=True):
                wide[position] = flag
            needs_gradient = wide
        inputs = spread
    if needs_gradient is None:
        needs_gradient = [t is not None and t.is_float and t.role in ("parameter", "activation") for t in inputs]
    ctx = Context(
        kind=kind,
        inputs=inputs,
        num_outputs=len(outputs),
        attributes=attrs,
        values=values,
        needs_gradient=needs_gradient,
        opset=opset,
        export_batch=export_batch,
        hints=hints,
    )
    try:
        result = KINDS.get(kind, opaque)(ctx)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise Unsupported(f"its attributes do not fit its operands ({type(error).__name__}: {error})") from error
    kept = [i for i, _ in result.operands]
    tensors = [ctx.tensor(i) for i in kept]
    wanted = [i for i, out in enumerate(outputs) if out]
    if len(result.outputs) < len(outputs):
        raise Unsupported(f"{len(outputs)} outputs, {len(result.outputs)} are modelled")
    rule = ctx.rule.build(
        [d for _, d in result.operands],
        [result.outputs[i] for i in wanted],
        result.passing,
        [kept.index(i) for i in result.linear],
    )
    role = "constant" if is_constant else "activation"
    batch = ctx.rule.batch() if ctx.rule.has_batch else None
    made: list[Tensor] = []
    for i in wanted:
        dims = result.outputs[i]
        dtype = result.dtypes[i] if i < len(result.dtypes) else (tensors[0].dtype if tensors else "float32")
        shape = tuple(ctx.rule.size(d) for d in dims)
        batch_dim = next((j for j, d in enumerate(dims) if batch is not None and batch in d), None)
        if prod(shape) > MAX_ELEMENTS or min(shape, default=1) < (0 if is_constant else 1):
            raise Unsupported(f"its result would be of shape {shape}")
        made.append(Tensor(name=outputs[i], shape=shape, dtype=dtype, role=role, batch_dim=batch_dim))  # type: ignore[arg-type]
    backward = sum(f for i, f in result.gradient_flops.items() if i < len(needs_gradient) and needs_gradient[i])
    grows = batch is not None

    def amount(flops: float) -> Amount:
        return Amount(per_sample=float(flops)) if grows else Amount(fixed=float(flops))

    for key, value in result.attributes.items():
        attrs[key] = value
    if kept != list(range(len(kept))):
        attrs["operands"] = tuple(kept)
    if wanted != list(range(len(wanted))):
        attrs["results"] = tuple(wanted)
    differentiable = any(needs_gradient[i] for i in kept if i < len(needs_gradient))
    saved: list[str] = []
    if differentiable and not is_constant:
        saved += [ctx.tensor(i).name for i in result.saved_inputs]
        saved += [outputs[i] for i in result.saved_outputs if i < len(outputs) and outputs[i]]
    traffic = (0.0, 0.0) if is_view else result.traffic
    if not differentiable:
        traffic = (traffic[0], 0.0)
    operator = Operator(
        name=name,
        kind=kind,
        inputs=tuple(t.name for t in tensors),
        outputs=tuple(outputs[i] for i in wanted),
        rule=rule,
        forward_flops=amount(result.forward_flops),
        backward_flops=amount(backward),
        traffic=traffic,
        saved=tuple(dict.fromkeys(saved)),
        scope=scope,
        is_view=is_view,
        is_constant=is_constant,
        attributes=tuple(sorted((k, _plain(v)) for k, v in attrs.items() if v is not None)),
        opset=opset,
    )
    return Built(operator, tuple(made), result.is_opaque, result.replicated_because)
