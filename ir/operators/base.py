"""The table of operator kinds and what an entry works with.

An entry is a function from `Context` (the operands and attributes of one use) to `Result` (factors and costs), declared
with its factor rule as one line:

    @kind("Softmax", rule="{rows axis@softmax} -> {rows axis}")
    def softmax(ctx: Context) -> Result: ...

An entry never sees a batch size: tensors are kept at one sample, and the batch is a factor of size 1. Constants of a
file that was exported at `export_batch` samples are brought to one sample by the entry (`ir.batch`). Units: elements,
bytes, floating-point operations (2 a multiply-add).
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
"""Exported shape and dtype of a result."""


class AcrossSamples(Unsupported):
    """The operator would sum over the samples: another dim of an input may be the batch."""


class SortedSamples(Unsupported):
    """The operator puts rows of all samples in one order."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What the source of a graph says about one use of a kind, beside operands and attributes."""

    scope: str = ""
    """Dotted path of the module that the operator belongs to."""
    values: Sequence[Value | None] = ()
    """Known values of operands by ONNX position, at `export_batch` samples."""
    export_batch: int = 1
    """Number of samples that the values of the source were exported for."""
    stated: Sequence[StatedShape | None] = ()
    """Exported shape and dtype of each result, where the source states them; read for kinds outside the table only."""
    is_view: bool = False
    """Whether the operator only re-arranges parameters."""
    is_constant: bool = False
    """Whether the operator depends on neither data nor parameters."""


@dataclass
class Context:
    """One use of a kind, as its entry sees it."""

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
    """The factor rule, empty when the entry begins."""

    @property
    def export_batch(self) -> int:
        """Number of samples that the values of the source were exported for."""
        return self.usage.export_batch

    def tensor(self, index: int) -> Tensor:
        """Operand `index`, which must be there."""
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
        """The known value of operand `index`."""
        return self.usage.values[index] if index < len(self.usage.values) else None

    def factors(
        self,
        *,
        where: Mapping[str, Collection[int]] | None = None,
        sizes: Mapping[str, Sequence[int]] | None = None,
        collectives: Mapping[str, InternalCollective] | None = None,
        line: int = 0,
    ) -> tuple[list[tuple[int, Dims]], list[Dims]]:
        """The factors of operands and results that a line of the kind's rule describes.

        Args:
            where: name in braces -> dims of the operand that have it; other dims have the first name in the braces.
            sizes: name -> sizes of the dims that only results have.
            collectives: `@name` -> the exchange of this use.
            line: number of the line, for kinds with several.

        Raises:
            Unsupported: an operand is missing, or has other dims than the line says.
        """
        follower = Follower(self.rule, where or {}, sizes or {}, collectives or {})
        return follower.follow(parse(KINDS[self.kind].rules[line]), self.inputs)

    def keep_one_sample(self, index: int, dim: int = 0) -> None:
        """Requires the first of `dim` alone, where a known operand holds the same for each exported sample.

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
        """An integer attribute."""
        return int(self.attributes.get(name, default))

    def axis(self, name: str, default: int, rank: int) -> int:
        """An axis attribute, made non-negative.

        Raises:
            Unsupported: it is outside the rank.
        """
        return within(self.int_attribute(name, default), rank, name)


@dataclass
class Result:
    """The result of an entry: the factors of operands and results, and the costs of the operator."""

    operands: Sequence[tuple[int, Dims]]
    """ONNX position and factors of the operands that stay tensors; the others have become attributes."""
    outputs: Sequence[Dims]
    """Factors of each result."""
    dtypes: Sequence[str] = ()
    """Dtypes of the results; missing ones are those of the first operand."""
    passing: Passing = "none"
    """How partial operands pass to partial results."""
    linear: Sequence[int] = ()
    """Positions of the operands that may be partial under `passing`; empty = all."""
    forward_flops: float = 0.0
    """FLOPs of the forward pass at one sample."""
    gradient_flops: Mapping[int, float] = field(default_factory=dict)
    """Operand position -> FLOPs of its gradient at one sample."""
    traffic: tuple[float, float] = (1.0, 2.0)
    """Bytes moved forward and backward, in multiples of the bytes of all operands and results."""
    saved_inputs: Sequence[int] = ()
    """Positions of the operands that the backward pass needs."""
    saved_outputs: Sequence[int] = ()
    """Numbers of the results that the backward pass needs."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    """Attributes that replace those of the file of the same name; None removes one."""
    is_opaque: bool = False
    """Whether the use cannot be expressed, so that the operator is replicated."""
    replicated_because: str = ""
    """Why the samples stay together, for the user to read; empty where they are free."""


Entry = Callable[[Context], Result]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One entry of the table."""

    entry: Entry
    """The function that describes a use."""
    rules: tuple[str, ...]
    """Its factor rule as a line (see `ir.operators.line`), or lines where uses differ in form."""
    is_view: bool
    """Whether it only re-arranges elements: on parameters such an operator costs nothing."""

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
        rule: the factor rule as one line, see `ir.operators.line`; several lines where uses differ in form.
        is_view: whether it only re-arranges elements.
    """
    rules = (rule,) if isinstance(rule, str) else rule

    def register(entry: Entry) -> Entry:
        KINDS.update(dict.fromkeys(names, Kind(entry=entry, rules=rules, is_view=is_view)))
        return entry

    return register


def within(axis: int, rank: int, name: str = "axis") -> int:
    """An axis of a tensor with `rank` dims, made non-negative.

    Raises:
        Unsupported: it is outside the rank.
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
        shape: sizes of the dims that have statistics of their own, at one sample.
        floats: numbers for each element of `shape` that the forward pass exchanges.
        has_batch: whether each sample has statistics of its own.
        backward: numbers that the backward pass exchanges, as a share of those of the forward pass.
    """
    amount = 4.0 * floats * prod(shape)
    pair = (0.0, amount) if has_batch else (amount, 0.0)
    return InternalCollective(
        name=name, kind="all_reduce", forward_bytes=pair, backward_bytes=(pair[0] * backward, pair[1] * backward)
    )


def statistics(
    name: str, tensor: Tensor, axes: Collection[int], floats: float, *, backward: float = 1.0
) -> dict[str, InternalCollective]:
    """The all-reduce of `@name` marks on dims `axes` of `tensor`, with one row of statistics for each other element."""
    rows = [size for d, size in enumerate(tensor.shape) if d not in axes]
    has_batch = tensor.batch_dim is not None and tensor.batch_dim not in axes
    return {name: all_reduce(name, rows, floats, has_batch=has_batch, backward=backward)}
