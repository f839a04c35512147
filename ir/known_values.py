"""Values of tensors that do not depend on data: masks, and the positions from which they are computed.

An attention mask has millions of elements, so files do not store it but compute it from constants and positions. This
module computes only the requested elements. Elements that depend on data or parameters, or on an operator outside of
the tables below, are unknown; no graph raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ir.graph import Graph, Operator

HIDING = -1e4
"""Scores up to this number hide a key: BERT's mask has -10,000, others have lower numbers."""
MAX_ELEMENTS = 1 << 16
"""Elements of the largest tensor that is computed as a whole if a part of it does not suffice (assumed)."""
MAX_DEPTH = 64
"""Length of the longest chain of operators that is followed (assumed); a mask takes about twenty."""

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Places = tuple[npt.NDArray[np.int64], ...]
"""For each dim of a tensor, the requested indices; the requested part is their outer product."""
FIRST = np.zeros(1, dtype=np.int64)
"""The first index alone."""


class Known(NamedTuple):
    """A part of a tensor of which some elements are known."""

    values: Array
    """Its elements, 0 where they are not known; can be broadcast to the part."""
    known: Array
    """Whether each element is known; can be broadcast to the part."""


NOTHING = Known(np.zeros((), dtype=np.int64), np.zeros((), dtype=bool))
"""A part without known elements."""
_TRUE = np.ones((), dtype=bool)
ZERO = Known(np.zeros(()), _TRUE)
_DATA, _ZERO = 0, 1
"""The numbers, see `KnownValues.number`, of tensors without known elements, and of tensors that are 0."""
_DATA_KEY: tuple[Any, ...] = ("data",)
_ZERO_KEY: tuple[Any, ...] = ("zero",)


class KnownValues:
    """The known values of the tensors of a graph. Tensors that several layers make in the same way are computed once.

    Args:
        graph: the graph.
        zeros: names of tensors that count as 0 everywhere.
        followed: names of tensors that are computed although a part of them depends on parameters.
    """

    def __init__(self, graph: Graph, zeros: AbstractSet[str], followed: AbstractSet[str]) -> None:
        self.graph = graph
        self.zeros = zeros
        self.followed = graph.tensors.keys() - (graph.of_parameters - followed)
        self._numbers: dict[str, int] = {}
        self._alike: dict[Any, int] = {_DATA_KEY: _DATA, _ZERO_KEY: _ZERO}
        self._parts: dict[Any, Known] = {}

    def number(self, name: str, depth: int = 0) -> int:
        """A number that is equal for tensors which are computed in the same way from the same constants."""
        if name not in self._numbers:
            op, key = self.graph.maker(name), _DATA_KEY
            if name in self.zeros:
                key = _ZERO_KEY
            elif op is not None and op.kind in _RULES and name in self.followed and depth < MAX_DEPTH:
                inputs = tuple((self.number(n, depth + 1), self.shape(n)) for n in op.inputs)
                if not inputs or any(number != _DATA for number, _ in inputs):
                    key = (op.kind, op.attributes, inputs, self.shape(name))
            self._numbers[name] = self._alike.setdefault(key, len(self._alike))
        return self._numbers[name]

    def at(self, name: str, places: Places) -> Known:
        """The known elements of a part of a tensor."""
        number = self.number(name)
        if number in (_DATA, _ZERO):
            return NOTHING if number == _DATA else ZERO
        key = (number, *[p.tobytes() for p in places])
        if key not in self._parts:
            self._parts[key] = self._computed(name, places)
        return self._parts[key]

    def filled(self, name: str, places: Places) -> Known:
        """`at`, with one element for each place."""
        found, shape = self.at(name, places), tuple(map(len, places))
        return Known(np.broadcast_to(found.values, shape), np.broadcast_to(found.known, shape))

    def whole(self, name: str) -> Known:
        """The known elements of a whole tensor, in its shape; none for a tensor above `MAX_ELEMENTS`."""
        shape = self.graph.tensors[name].shape
        if math.prod(shape) > MAX_ELEMENTS:
            return Known(np.broadcast_to(NOTHING.values, shape), np.broadcast_to(NOTHING.known, shape))
        return self.filled(name, tuple(np.arange(size) for size in shape))

    def shape(self, name: str) -> Shape:
        """Sizes of a tensor's dims."""
        return self.graph.tensors[name].shape

    def _computed(self, name: str, places: Places) -> Known:
        op = self.graph.operators[self.graph.producer[name]]
        try:
            with np.errstate(all="ignore"):
                found = _RULES[op.kind](self, op, places)
        except (ValueError, IndexError, TypeError, KeyError, OverflowError):  # attributes that do not fit the operands
            return NOTHING
        known = found.known
        return Known(found.values if known.all() else np.where(known, found.values, found.values.dtype.type(0)), known)


Rule = Callable[[KnownValues, Operator, Places], Known]


def _typed(values: Array, dtype: str) -> Array:
    """Truth values, integers or floats, whatever their width."""
    return values.astype(bool if dtype == "bool" else np.int64 if dtype.startswith(("int", "uint")) else np.float64)


# Kinds without operands


def _constant(_values: KnownValues, op: Operator, places: Places) -> Known:
    given = dict(op.attributes)
    value = np.asarray(given["value"])
    if value.ndim:
        value = value.reshape(given["shape"])[np.ix_(*places)]
    return Known(_typed(value, given["dtype"]), _TRUE)


def _range(_values: KnownValues, op: Operator, places: Places) -> Known:
    given = dict(op.attributes)
    return Known(_typed(given["start"] + given["delta"] * places[0], given["dtype"]), _TRUE)


# Elementwise kinds


def _divided(a: Array, b: Array) -> Array:
    return np.trunc(a / b).astype(a.dtype) if a.dtype.kind in "iu" else a / b


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _divided, "Max": np.maximum, "Min": np.minimum,
    "Mod": np.mod, "Equal": np.equal, "Less": np.less, "LessOrEqual": np.less_equal, "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal, "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
    "BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "Not": np.logical_not, "Neg": np.negative, "Abs": np.abs,
    "Floor": np.floor, "Tanh": np.tanh, "Identity": np.asarray,
}  # fmt: skip
_DECIDED_BY_ONE: Mapping[str, Callable[[Array], Any]] = {
    "And": np.logical_not, "Mul": lambda a: a == 0, "Or": np.asarray, "BitwiseAnd": lambda a: a == 0,
    "Add": lambda a: a <= HIDING, "Min": lambda a: a <= HIDING, "Sub": lambda a: a <= HIDING,
}  # fmt: skip
"""Kinds whose result may be known from one operand (for `Sub` the first) -> whether a value of this operand suffices. A
score that hides a key still hides it after an addition."""


def _elementwise(values: KnownValues, op: Operator, places: Places) -> Known:
    parts = [values.at(name, _aligned(values.shape(name), places)) for name in op.inputs]
    known = np.asarray(np.logical_and.reduce(np.broadcast_arrays(*[part.known for part in parts])))
    if op.kind in _DECIDED_BY_ONE:
        for part in parts[:1] if op.kind == "Sub" else parts:
            known = known | (part.known & _DECIDED_BY_ONE[op.kind](part.values).astype(bool))
    found = np.asarray(parts[0].values)
    for part in parts[1:]:
        found = _FUNCTIONS[op.kind](found, part.values)
    return Known(found if len(parts) > 1 else np.asarray(_FUNCTIONS[op.kind](found)), known)


def _where(values: KnownValues, op: Operator, places: Places) -> Known:
    """The result of a Where. If the condition is unknown, elements are known where both sides are equal, or where both
    hide a key."""
    which, yes, no = (values.at(name, _aligned(values.shape(name), places)) for name in op.inputs)
    alike = (yes.values == no.values) | ((yes.values <= HIDING) & (no.values <= HIDING))
    either = np.where(which.values, yes.known, no.known)
    known = np.where(which.known, either, yes.known & no.known & alike)
    return Known(np.where(which.values, yes.values, no.values), known)


def _cast(values: KnownValues, op: Operator, places: Places) -> Known:
    found = values.at(op.inputs[0], places)
    return Known(_typed(found.values, dict(op.attributes)["to"]), found.known)


def _trilu(values: KnownValues, op: Operator, places: Places) -> Known:
    given, found = dict(op.attributes), values.at(op.inputs[0], places)
    above = places[-1] - places[-2][:, None] - int(given.get("k", 0))
    kept = above >= 0 if given.get("upper", 1) else above <= 0
    return Known(np.where(kept, found.values, found.values.dtype.type(0)), found.known | ~kept)


# Kinds that move elements


def _aligned(shape: Shape, places: Places) -> Places:
    """Places of an operand that is broadcast to the dims of `places`."""
    own = places[len(places) - len(shape) :]
    return tuple(FIRST if size == 1 else at for size, at in zip(shape, own, strict=True))


def _expand(values: KnownValues, op: Operator, places: Places) -> Known:
    return values.at(op.inputs[0], _aligned(values.shape(op.inputs[0]), places))


def _reshape(values: KnownValues, op: Operator, places: Places) -> Known:
    """Known if only dims of size 1 are added or removed, or if dims before the last two change and only their first
    index is requested."""
    source, target, sizes = values.shape(op.inputs[0]), values.shape(op.outputs[0]), tuple(map(len, places))
    long = [at for size, at in zip(target, places, strict=True) if size > 1]
    if [size for size in source if size > 1] == [size for size in target if size > 1]:
        left = iter(long)
        found = values.filled(op.inputs[0], tuple(next(left) if size > 1 else FIRST for size in source))
    elif source[-2:] == target[-2:] and all(len(at) == 1 and at[0] == 0 for at in places[:-2]):
        found = values.filled(op.inputs[0], (*[FIRST] * (len(source) - 2), *places[-2:]))
    else:
        found = values.whole(op.inputs[0])
        return Known(*[part.reshape(target)[np.ix_(*places)] for part in found])
    return Known(found.values.reshape(sizes), found.known.reshape(sizes))


def _transpose(values: KnownValues, op: Operator, places: Places) -> Known:
    given = dict(op.attributes).get("perm", tuple(reversed(range(len(places)))))
    found = values.filled(op.inputs[0], tuple(places[given.index(dim)] for dim in range(len(places))))
    return Known(found.values.transpose(given), found.known.transpose(given))


def _concat(values: KnownValues, op: Operator, places: Places) -> Known:
    axis, begin = int(dict(op.attributes)["axis"]) % len(places), 0
    pieces, order = [], []
    for name in op.inputs:
        size = values.shape(name)[axis]
        (inside,) = np.nonzero((places[axis] >= begin) & (places[axis] < begin + size))
        own = places[axis][inside] - begin
        pieces.append(values.filled(name, (*places[:axis], own, *places[axis + 1 :])))
        order.append(inside)
        begin += size
    back = np.argsort(np.concatenate(order))
    return Known(*[np.concatenate(parts, axis=axis).take(back, axis=axis) for parts in zip(*pieces, strict=True)])


def _pad(values: KnownValues, op: Operator, places: Places) -> Known:
    """Padding with one number."""
    given, sizes = dict(op.attributes), values.shape(op.inputs[0])
    if given.get("mode", "constant") != "constant":
        return NOTHING
    own = [at - before for at, before in zip(places, given["pads"], strict=False)]
    inside = [(at >= 0) & (at < size) for at, size in zip(own, sizes, strict=True)]
    found = values.filled(op.inputs[0], tuple(at[is_in] for at, is_in in zip(own, inside, strict=True)))
    shape = tuple(map(len, places))
    numbers, known = np.full(shape, float(given.get("value", 0.0))), np.ones(shape, dtype=bool)
    numbers[np.ix_(*inside)], known[np.ix_(*inside)] = found
    return Known(_typed(numbers, values.graph.tensors[op.outputs[0]].dtype), known)


def _slice(values: KnownValues, op: Operator, places: Places) -> Known:
    given, own = dict(op.attributes), list(places)
    for axis, start, step in zip(given["axes"], given["starts"], given["steps"], strict=True):
        own[axis] = start + step * places[axis]
    return values.at(op.inputs[0], tuple(own))


def _gather(values: KnownValues, op: Operator, places: Places) -> Known:
    given, rank = dict(op.attributes), len(values.shape(op.inputs[0]))
    axis = int(given.get("axis", 0)) % rank
    if len(op.inputs) == 1:
        chosen, behind = np.asarray(given["indices"]), places[axis:]
    else:
        width = len(values.shape(op.inputs[1]))
        found, behind = values.filled(op.inputs[1], places[axis : axis + width]), places[axis + width :]
        if not found.known.all():
            return NOTHING
        chosen = found.values
    rows, back = np.unique(chosen % values.shape(op.inputs[0])[axis], return_inverse=True)
    looked = values.filled(op.inputs[0], (*places[:axis], rows, *behind))
    return Known(*[np.take(part, back.reshape(chosen.shape), axis=axis) for part in looked])


def _gather_nd(values: KnownValues, op: Operator, places: Places) -> Known:
    shape, (*at, depth) = values.shape(op.inputs[0]), values.shape(op.inputs[1])
    found = values.filled(op.inputs[1], (*places[: len(at)], np.arange(depth)))
    if dict(op.attributes).get("batch_dims", 0) or not found.known.all():
        return NOTHING
    chosen = [np.unique(found.values[..., d] % shape[d], return_inverse=True) for d in range(depth)]
    rows = tuple(each for each, _ in chosen)
    if math.prod(map(len, rows)) > MAX_ELEMENTS:
        return NOTHING
    looked = values.filled(op.inputs[0], (*rows, *places[len(at) :]))
    back = tuple(order.reshape(found.values.shape[:-1]) for _, order in chosen)
    return Known(*[part[back] for part in looked])


def _cumsum(values: KnownValues, op: Operator, places: Places) -> Known:
    given, found = dict(op.attributes), values.whole(op.inputs[0])
    if given.get("exclusive") or given.get("reverse") or not found.known.all():
        return NOTHING
    axis = int(np.asarray(given["axis"]).reshape(-1)[0])
    return Known(np.cumsum(found.values, axis=axis)[np.ix_(*places)], _TRUE)


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_FUNCTIONS, _elementwise), "Reshape": _reshape, "Unsqueeze": _reshape, "Squeeze": _reshape,
    "Constant": _constant, "ConstantOfShape": _constant, "Range": _range, "Where": _where, "Cast": _cast,
    "Trilu": _trilu, "Expand": _expand, "Transpose": _transpose, "Concat": _concat, "Slice": _slice, "Gather": _gather,
    "GatherND": _gather_nd, "CumSum": _cumsum, "Pad": _pad,
}  # fmt: skip
"""Kind -> function that computes a part of its result."""
