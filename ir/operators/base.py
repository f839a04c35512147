"""The table of operator kinds, and the types that its entries read and return.

An entry is a function from `Context` (the operands and attributes of one use) to `Result` (factors and costs), declared
with its factor rule as one line:

    @kind("Softmax", rule="{rows axis@softmax} -> {rows axis}")
    def softmax(ctx: Context) -> Result: ...

Entries are independent of the batch size: tensor shapes are those of one sample, and the batch is a factor of size 1.
An entry reduces constants of a file that was exported at `export_batch` samples to one sample (see `ir.batch`). Units:
elements, bytes, floating-point operations (2 per multiply-add).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy.typing as npt

from ir.factors import InternalCollective, Passing
from ir.graph import DTYPE_BYTES, Tensor
from ir.operators.line import Line, parse
from ir.operators.line_factors import Follower, Unsupported
from ir.operators.rule import Dims, Rule

__all__ = [
    "KINDS", "AcrossSamples", "BakedBatch", "Context", "Dims", "Kind", "MissingBatch", "Result", "Rule",
    "SortedSamples", "Unsupported", "Usage", "Value", "all_reduce", "bytes_of", "kind", "statistics", "within",
]  # fmt: skip

Value = npt.NDArray[Any]
StatedShape = tuple[tuple[int, ...], str]
"""Shape and dtype of a result in the exported file."""


class AcrossSamples(Unsupported):
    """The operator would sum over the samples, which suggests that the batch is another dim of an input."""


class SortedSamples(Unsupported):
    """The operator puts rows of all samples in one order."""


class BakedBatch(Exception):
    """Operand `index` has the exported batch size in `dim`, although it does not depend on any data input."""

    def __init__(self, index: int, dim: int, size: int) -> None:
        super().__init__(f"operand {index} has the exported batch in dim {dim}")
        self.index = index
        self.dim = dim
        self.size = size


class MissingBatch(Exception):
    """Operand `index` lacks the batch, which other operands have in `dim`, and this operator cannot broadcast it."""

    def __init__(self, index: int, dim: int) -> None:
        super().__init__(f"operand {index} must be repeated over the batch in dim {dim}")
        self.index = index
        self.dim = dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """Information of the imported file about one use of a kind, in addition to its operands and attributes."""

    scope: str = ""
    """Dotted path of the module that the operator belongs to."""
    values: Sequence[Value | None] = ()
    """Known values of operands by ONNX position, at `export_batch` samples."""
    export_batch: int = 1
    """Number of samples that the values of the source were exported for."""
    stated: Sequence[StatedShape | None] = ()
    """Shape and dtype of each result where the source states them; read only for kinds that are not in the table."""
    is_view: bool = False
    """Whether the operator is a view of parameters, which only rearranges their elements."""
    is_constant: bool = False
    """Whether the operator depends on neither data nor parameters."""


@dataclass
class Context:
    """One use of a kind: the argument of its entry."""

    kind: str
    inputs: Sequence[Tensor | None]
    """Operands by ONNX position; None where an optional one is absent."""
    num_outputs: int
    attributes: Mapping[str, Any]
    needs_gradient: Sequence[bool]
    """Whether the backward pass needs the gradient of each operand."""
    opset: int = 0
    """Version of the operator set; 0 where it is not known."""
    usage: Usage = field(default_factory=Usage)
    rule: Rule = field(default_factory=Rule)
    """The factor rule, which is empty when the entry is called and which the entry builds."""

    @property
    def export_batch(self) -> int:
        """Number of samples that the values of the source were exported for."""
        return self.usage.export_batch

    def tensor(self, index: int) -> Tensor:
        """Operand `index`.

        Raises:
            Unsupported: the operand is absent.
        """
        tensor = self.inputs[index] if index < len(self.inputs) else None
        if tensor is None:
            raise Unsupported(f"operand {index} is missing")
        return tensor

    def has(self, index: int) -> bool:
        """Whether operand `index` was given."""
        return index < len(self.inputs) and self.inputs[index] is not None

    @property
    def present(self) -> list[tuple[int, Tensor]]:
        """ONNX positions and tensors of all operands that were given."""
        return [(i, t) for i, t in enumerate(self.inputs) if t is not None]

    def value(self, index: int) -> Value | None:
        """The value of operand `index` at `export_batch` samples; None if it is unknown."""
        return self.usage.values[index] if index < len(self.usage.values) else None

    def factors(
        self,
        *,
        where: Mapping[str, Collection[int]] | None = None,
        sizes: Mapping[str, Sequence[int]] | None = None,
        collectives: Mapping[str, InternalCollective] | None = None,
        line: int = 0,
    ) -> tuple[list[tuple[int, Dims]], list[Dims]]:
        """The factors of operands and results, according to a line of the kind's rule.

        Args:
            where: name in braces -> dims of the operand with that name; other dims have the first name in the braces.
            sizes: name -> sizes of the dims that only results have.
            collectives: `@name` -> the collective of this use.
            line: index of the line, for kinds with several.

        Returns:
            the ONNX position and the factors of each operand, and the factors of each result.

        Raises:
            Unsupported: an operand is missing, or its dims do not match the line.
        """
        follower = Follower(self.rule, where or {}, sizes or {}, collectives or {})
        return follower.follow(parse(KINDS[self.kind].rules[line]), self.inputs)

    def keep_one_sample(self, index: int, dim: int = 0) -> None:
        """Requires that a constant operand be reduced to one sample if its exported samples are all equal.

        To be called only where the consumers of the result broadcast it over the samples.

        Args:
            index: ONNX position of the operand.
            dim: the dim with the exported batch size.

        Raises:
            BakedBatch: operand `index` has the same values for each of several exported samples.
        """
        value = self.value(index)
        if value is None or value.ndim <= dim or not 1 < value.shape[dim] == self.export_batch:
            return
        if (value == value.take([0], dim)).all():
            raise BakedBatch(index, dim, 1)

    def ints(self, name: str, index: int | None = None) -> tuple[int, ...] | None:
        """Integers from attribute `name`, else from the value of operand `index`; None if neither was given.

        Raises:
            Unsupported: the operand is given but its value is unknown.
        """
        numbers = self._numbers(name, index)
        return None if numbers is None else tuple(int(v) for v in numbers)

    def floats(self, name: str, index: int) -> tuple[float, ...] | None:
        """Floats from attribute `name`, else from the value of operand `index`; None and errors as in `ints`."""
        numbers = self._numbers(name, index)
        return None if numbers is None else tuple(float(v) for v in numbers)

    def _numbers(self, name: str, index: int | None) -> Sequence[Any] | None:
        if name in self.attributes:
            given = self.attributes[name]
            return given if isinstance(given, (tuple, list)) else (given,)
        if index is None or not self.has(index):
            return None
        value = self.value(index)
        if value is None:
            raise Unsupported(f"operand {index} ({name}) depends on data")
        flat: list[Any] = value.reshape(-1).tolist()
        return flat

    def int_attribute(self, name: str, default: int) -> int:
        """The integer attribute `name`, or `default` if it is absent."""
        return int(self.attributes.get(name, default))

    def axis(self, name: str, default: int, rank: int) -> int:
        """The axis attribute `name`, or `default`; negative axes are converted to non-negative ones.

        Raises:
            Unsupported: the axis is out of range for `rank` dims.
        """
        return within(self.int_attribute(name, default), rank, name)


@dataclass
class Result:
    """The result of an entry: the factors of operands and results, and the costs of the operator."""

    operands: Sequence[tuple[int, Dims]]
    """ONNX position and factors of the operands that remain tensors; the others were turned into attributes."""
    outputs: Sequence[Dims]
    """Factors of each result."""
    dtypes: Sequence[str] = ()
    """Dtypes of the results; those that are not listed have the dtype of the first operand."""
    passing: Passing = "none"
    """Which partial operands (unreduced sums) yield partial results."""
    linear: Sequence[int] = ()
    """Positions of the operands that may be partial according to `passing`; empty: all."""
    forward_flops: float = 0.0
    """FLOPs of the forward pass at one sample."""
    gradient_flops: Mapping[int, float] = field(default_factory=dict)
    """Operand position -> FLOPs of its gradient at one sample."""
    traffic: tuple[float, float] = (1.0, 2.0)
    """Bytes moved forward and backward, in multiples of the bytes of all operands and results."""
    saved_inputs: Sequence[int] = ()
    """Positions of the operands that the backward pass needs."""
    saved_outputs: Sequence[int] = ()
    """Indices of the results that the backward pass needs."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that replace those of the file with the same name; None removes an attribute."""
    is_opaque: bool = False
    """Whether this use cannot be expressed, so that the operator is replicated."""
    replicated_because: str = ""
    """Reason, shown to the user, why the operator is replicated over samples; empty if samples can be split."""


Entry = Callable[[Context], Result]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One entry of the table."""

    entry: Entry
    """The function that describes a use."""
    rules: tuple[str, ...]
    """Its factor rule as a line (see `ir.operators.line`); several lines where uses have different operands."""
    is_view: bool
    """Whether it only rearranges elements; such an operator costs nothing when applied to parameters."""

    @property
    def lines(self) -> tuple[Line, ...]:
        """The rules, parsed."""
        return tuple(parse(rule) for rule in self.rules)


KINDS: dict[str, Kind] = {}
"""ONNX operator type (`domain.Type` outside the standard domain) -> its entry."""


def kind(*names: str, rule: str | tuple[str, ...], is_view: bool = False) -> Callable[[Entry], Entry]:
    """Registers an entry under `names`.

    Args:
        names: ONNX operator types, `domain.Type` outside the standard domain.
        rule: the factor rule as one line, see `ir.operators.line`; several lines where uses have different operands.
        is_view: whether the kind only rearranges elements.

    Returns:
        a decorator that adds the entry to `KINDS` and returns it unchanged.
    """
    rules = (rule,) if isinstance(rule, str) else rule

    def register(entry: Entry) -> Entry:
        KINDS.update(dict.fromkeys(names, Kind(entry=entry, rules=rules, is_view=is_view)))
        return entry

    return register


def within(axis: int, rank: int, name: str = "axis") -> int:
    """The non-negative equivalent of an axis of a tensor with `rank` dims.

    Raises:
        Unsupported: the axis is out of range.
    """
    if not -rank <= axis < max(rank, 1):
        raise Unsupported(f"{name}={axis} is outside a rank of {rank}")
    return axis % rank if rank else 0


def bytes_of(dtype: str) -> float:
    """Bytes of one element."""
    return DTYPE_BYTES.get(dtype, 4)


def all_reduce(
    name: str, shape: Sequence[int], floats: float, *, has_batch: bool, backward: float = 1.0
) -> InternalCollective:
    """An all-reduce of statistics, which are kept in float32.

    Args:
        name: name of the `@` mark.
        shape: sizes of the dims that are not reduced, at one sample; each of their elements has its own statistics.
        floats: numbers per element of `shape` that the forward pass exchanges.
        has_batch: whether each sample has its own statistics.
        backward: numbers that the backward pass exchanges, as a fraction of those of the forward pass.
    """
    amount = 4.0 * floats * prod(shape)
    pair = (0.0, amount) if has_batch else (amount, 0.0)
    return InternalCollective(
        name=name, kind="all_reduce", forward_bytes=pair, backward_bytes=(pair[0] * backward, pair[1] * backward)
    )


def statistics(
    name: str, tensor: Tensor, axes: Collection[int], floats: float, *, backward: float = 1.0
) -> dict[str, InternalCollective]:
    """The all-reduce behind mark `@name`: statistics over dims `axes`, one row for each element of the other dims.

    Args:
        name: name of the `@` mark.
        tensor: the tensor that is reduced.
        axes: the dims over which statistics are taken.
        floats: numbers per row that the forward pass exchanges.
        backward: numbers that the backward pass exchanges, as a fraction of those of the forward pass.

    Returns:
        `name` -> the collective.
    """
    rows = [size for d, size in enumerate(tensor.shape) if d not in axes]
    has_batch = tensor.batch_dim is not None and tensor.batch_dim not in axes
    return {name: all_reduce(name, rows, floats, has_batch=has_batch, backward=backward)}
