"""The torch functions of operator kinds, and the arguments of such a function.

Independent of ranks: a function computes from its operands. Where a kind states sizes in its attributes
(Reshape, Expand ...), the sizes come from `Use.shapes`, so that the same function serves a shard. Statistics of rows
are taken through `Use.rows`, so that the same function serves ranks that hold parts of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ir.errors import ModelError
from ir.factors import Placement

Function = Callable[["Use"], "torch.Tensor | Sequence[torch.Tensor]"]
FUNCTIONS: dict[str, Function] = {}
"""Kind -> the function that computes it."""

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64, "bool": torch.bool,
    "complex64": torch.complex64,
}  # fmt: skip


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of a name of `ir.graph.DTYPE_BYTES`.

    Raises:
        ModelError: torch computes with no such type (float8, strings).
    """
    if name not in DTYPES:
        raise refuse("cannot be computed with this type", name, "Export in float32 or bfloat16.")
    return DTYPES[name]


def refuse(what: str, value: object, repair: str = "Export the model without it.") -> ModelError:
    """The error for an operator that is deliberately not executed."""
    return ModelError(what, field="model", value=value, repair=repair)


class Rows:
    """The rows along which an operator takes sums and maxima; here one process has them whole."""

    is_split = False
    """Whether several ranks hold parts of a row."""

    def total(self, x: torch.Tensor, gradient: Placement) -> torch.Tensor:
        """The sum of `x` over the ranks of a row, see `automap.runtime.redistribute.sum_over`."""
        return x

    def largest(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum of `x` over the ranks of a row, without a gradient."""
        return x.detach()

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise product of `x` over the ranks of a row."""
        return x

    def mean(self, x: torch.Tensor, dims: tuple[int, ...], gradient: Placement, *, keep: bool = True) -> torch.Tensor:
        """The mean of each row over `dims` of `x`, which has the elements of the first operand; see `total`."""
        return x.mean(dims, keepdim=keep)

    def widened(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor in the type in which its statistics are summed, where the operator does not say."""
        return x

    def whole(self, x: torch.Tensor) -> Sequence[int]:
        """The shape of the first operand `x` on all ranks together."""
        return x.shape

    def start(self, slot: int, dim: int) -> int:
        """The position at which this rank's part of an operand begins in the whole."""
        return 0


WHOLE_ROWS = Rows()


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """One call of an operator."""

    name: str
    kind: str
    opset: int
    """Version of the operator set; 0 = the newest."""
    operands: Sequence[torch.Tensor | None]
    """The operands by ONNX position; None for an optional one that is absent."""
    shapes: Sequence[tuple[int, ...]]
    """The shapes of the results, in order; those of the shards where the operands are shards."""
    attributes: Mapping[str, Any]
    device: torch.device
    """The device of new tensors."""
    results: Sequence[int]
    """The positions of the results that are asked for, among all results of the kind."""
    rows: Rows = WHOLE_ROWS
    """The rows over which statistics are taken."""

    @property
    def x(self) -> torch.Tensor:
        """The first operand."""
        return self.operand(0)

    def operand(self, index: int) -> torch.Tensor:
        """Operand `index`, which must be present.

        Raises:
            ModelError: it is absent.
        """
        found = self.optional(index)
        if found is None:
            raise refuse(f"operator {self.name} ({self.kind}) lacks operand {index}", index, "Send a valid graph.")
        return found

    def optional(self, index: int) -> torch.Tensor | None:
        """Operand `index`, or None."""
        return self.operands[index] if index < len(self.operands) else None

    def given(self) -> list[torch.Tensor]:
        """All operands that are present."""
        return [t for t in self.operands if t is not None]

    def integer(self, name: str, default: int = 0) -> int:
        """An integer attribute."""
        value = self.attributes.get(name, default)
        return int(value[0] if isinstance(value, tuple) else value)

    def number(self, name: str, default: float = 0.0) -> float:
        """A number attribute."""
        value = self.attributes.get(name, default)
        return float(value[0] if isinstance(value, tuple) else value)

    def text(self, name: str, default: str = "") -> str:
        """A string attribute."""
        return str(self.attributes.get(name, default))

    def ints(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        """An attribute of integers."""
        value = self.attributes.get(name, default)
        return tuple(int(v) for v in value) if isinstance(value, (tuple, list)) else (int(value),)

    def texts(self, name: str, default: Sequence[str] = ()) -> tuple[str, ...]:
        """An attribute of strings."""
        value = self.attributes.get(name, default)
        return tuple(str(v) for v in value)

    def floats(self, name: str, default: Sequence[float] = ()) -> tuple[float, ...]:
        """An attribute of numbers."""
        value = self.attributes.get(name, default)
        return tuple(float(v) for v in value) if isinstance(value, (tuple, list)) else (float(value),)


def repeated_rows(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A tensor that broadcasts to a shape.

    A dim of a batch may hold the rows of all samples, one sample after the other. An operand whose rows are the same
    for all samples has them once, and they are repeated.
    """
    wanted = shape[len(shape) - x.dim() :]
    if all(size in (1, whole) for size, whole in zip(x.shape, wanted, strict=True)):
        return x
    return x.repeat([1 if size in (0, 1) else whole // size for size, whole in zip(x.shape, wanted, strict=True)])


def function(*kinds: str) -> Callable[[Function], Function]:
    """Registers a function for `kinds`."""

    def register(made: Function) -> Function:
        for kind in kinds:
            FUNCTIONS[kind] = made
        return made

    return register
