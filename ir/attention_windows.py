"""The keys that the queries of each attention see: all, earlier ones, or those in a window around the own position.

Masks are written in many ways: as attributes, as stored triangles, as comparisons of positions, and together with masks
of padding. This module computes the mask of the first sample and head, as far as it does not depend on data; keys whose
mask depends on data count as seen. Units: positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ir.graph import Graph, Operator, once_per_graph
from ir.group_kinds import PRODUCTS
from ir.groups import fused_groups
from ir.known_values import FIRST, HIDING, Known, KnownValues

MAX_PAIRS = 1 << 17
"""Largest number of pairs of a query and a key that are computed (assumed); of larger masks only some queries are."""
MIN_ROWS = 5
"""Least number of queries that are computed, the first and the last among them (assumed)."""
_ORDERS = frozenset({"Less", "LessOrEqual", "Greater", "GreaterOrEqual"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The keys that a query sees, in the form of FlashAttention's windows: a band around the diagonal."""

    left: int | None = None
    """Keys before the query's own position that it sees; None = all."""
    right: int | None = None
    """Keys after the query's own position that it sees; None = all, 0 = a causal mask."""

    def __and__(self, other: Window) -> Window:
        """The keys that are in both windows."""
        left = [w.left for w in (self, other) if w.left is not None]
        right = [w.right for w in (self, other) if w.right is not None]
        return Window(left=min(left, default=None), right=min(right, default=None))

    def within(self, queries: int, keys: int) -> Window:
        """The window without those limits that hide no key from any query, for these numbers of queries and keys."""
        return Window(
            left=None if self.left is None or self.left >= queries - 1 else max(self.left, 0),
            right=None if self.right is None or self.right >= keys - 1 else max(self.right, 0),
        )


EVERYTHING, CAUSAL = Window(), Window(right=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mask:
    """Which keys the queries of one attention see."""

    window: Window
    """The window, without limits that hide no key; if none is found, CAUSAL or EVERYTHING."""
    queries: int
    """Number of queries of a sample."""
    keys: int
    """Number of keys of a sample."""


@once_per_graph
def attention_masks(graph: Graph) -> Mapping[int, Mask]:
    """The mask of each attention, by the index of its `Softmax` or `Attention` operator."""
    finder = _Finder(graph)
    found = {}
    for group in fused_groups(graph):
        if group.kind == "attention":
            anchor = next(i for i in group.members if graph.operators[i].kind in ("Softmax", "Attention"))
            found[anchor] = finder.mask(anchor, [graph.operators[i] for i in group.members])
    for index, op in enumerate(graph.operators):
        if op.kind == "Attention" and index not in found:
            found[index] = finder.mask(index, [op])
    return found


class _Finder:
    """Finds the windows of one graph; attentions of all layers read the same mask."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        groups = [group for group in fused_groups(graph) if group.kind == "attention"]
        members = [graph.operators[i] for group in groups for i in group.members]
        scores = {name for op in members if op.kind in PRODUCTS for name in op.outputs}
        # The sum of a mask and a bias of parameters is not a window: kernels need such a sum as a tensor.
        self.values = KnownValues(graph, scores, {name for op in members for name in op.outputs})
        self._bands: dict[tuple[int, int, int], Window | None] = {}
        self._triangles: dict[str, bool] = {}

    def mask(self, anchor: int, members: Sequence[Operator]) -> Mask:
        """The mask of one attention.

        Args:
            anchor: index of its `Softmax` or `Attention` operator.
            members: its operators.
        """
        op, shapes = self.graph.operators[anchor], self.graph.tensors
        stated = EVERYTHING
        if op.kind == "Attention":
            queries, keys = (shapes[name].shape[-2] for name in op.inputs[:2])
            stated = _stated(op)
            found = self._band(op.inputs[3], queries, keys) if len(op.inputs) > 3 else EVERYTHING
        else:
            product = next(m for m in members if m.kind in PRODUCTS)
            queries, keys = (1, *shapes[op.inputs[0]].shape)[-2], (1, *shapes[product.outputs[0]].shape)[-1]
            found = self._band(op.inputs[0], queries, keys)
        if found is None:
            triangles = {name for m in members for name in m.inputs if self._is_triangle(name)}
            found = CAUSAL if any(self._band(name, queries, keys) is None for name in triangles) else EVERYTHING
        return Mask(window=(stated & found).within(queries, keys), queries=queries, keys=keys)

    def _band(self, name: str, queries: int, keys: int) -> Window | None:
        """The band of keys that a mask shows; None if it shows no band, or if data may hide further keys."""
        key = (self.values.number(name), queries, keys)
        if key not in self._bands:
            self._bands[key] = self._looked_at(name, queries, keys)
        return self._bands[key]

    def _is_triangle(self, name: str) -> bool:
        if name not in self._triangles:
            self._triangles[name] = _is_triangle(self.graph, name)
        return self._triangles[name]

    def _looked_at(self, name: str, queries: int, keys: int) -> Window | None:
        shape = self.graph.tensors[name].shape
        if len(shape) < 2 or min(queries, keys) < 2:
            return None
        rows = np.arange(queries)
        if queries * keys > MAX_PAIRS:
            rows = np.unique(np.linspace(0, queries - 1, max(MIN_ROWS, MAX_PAIRS // keys)).astype(np.int64))
        sides = [np.arange(keys) if shape[-1] > 1 else FIRST, rows if shape[-2] > 1 else FIRST]
        found = self.values.at(name, (*[FIRST] * (len(shape) - 2), *reversed(sides)))
        band = _band(_hidden(found, len(rows), keys), rows, queries)
        return None if band == EVERYTHING and not found.known.all() else band


def _stated(op: Operator) -> Window:
    """The window that the attributes of an `Attention` operator state."""
    given = dict(op.attributes)
    left, right = (given.get(f"{side}_window_size", -1) for side in ("left", "right"))
    right = 0 if given.get("is_causal") else right
    return Window(left=left if left >= 0 else None, right=right if right >= 0 else None)


def _hidden(found: Known, rows: int, keys: int) -> npt.NDArray[np.bool_]:
    """[rows, keys] whether a mask, of truth values or of scores, hides a key for any data."""
    hides = ~found.values if found.values.dtype == bool else found.values <= HIDING
    whole = np.broadcast_to(
        hides & found.known, np.broadcast_shapes(found.known.shape, found.values.shape, (rows, keys))
    )
    return np.asarray(whole.reshape(-1, rows, keys)[0])


def _band(hidden: npt.NDArray[np.bool_], rows: npt.NDArray[np.int64], queries: int) -> Window | None:
    """The band of keys that some rows of a mask show; None if they show no band.

    Args:
        hidden: [rows, keys] whether the mask hides a key.
        rows: the queries of the rows, the first and the last of all among them.
        queries: number of all queries.
    """
    keys = hidden.shape[1]
    first, last = np.argmin(hidden, axis=1), keys - 1 - np.argmin(hidden[:, ::-1], axis=1)
    left, right = int((rows - first).max()), int((last - rows).max())
    places = np.arange(keys) - rows[:, None]
    if not np.array_equal(hidden, (places < -left) | (places > right)):
        return None
    return Window(left=left, right=right).within(queries, keys)


def _is_triangle(graph: Graph, name: str) -> bool:
    """Whether a tensor is computed from a constant triangle, or from comparisons of positions."""
    pending, seen = [name], set[str]()
    while pending:
        index = graph.producer.get(pending.pop())
        if index is None or not graph.operators[index].is_constant:
            continue
        op = graph.operators[index]
        if op.kind == "Trilu" or (op.kind in _ORDERS and _is_outer(graph, op)) or _stores_triangle(op):
            return True
        fresh = [n for n in op.inputs if n not in seen]
        seen.update(fresh)
        pending += fresh
    return False


def _is_outer(graph: Graph, op: Operator) -> bool:
    """Whether an operator of two operands combines each element of a column with each of a row."""
    shape = graph.tensors[op.outputs[0]].shape
    sides = [(1, 1, *graph.tensors[n].shape)[-2:] for n in op.inputs]
    return len(shape) >= 2 and shape[-1] > 1 and sorted(sides) == sorted([(shape[-2], 1), (1, shape[-1])])


def _stores_triangle(op: Operator) -> bool:
    """Whether an operator is a constant matrix whose elements above the diagonal are equal, and not those below."""
    given = dict(op.attributes)
    shape, value = given.get("shape", ()), given.get("value")
    if op.kind != "Constant" or not isinstance(value, tuple) or len(shape) < 2 or shape[-1] != shape[-2]:
        return False
    matrix = np.asarray(value).reshape(-1, *shape[-2:])
    later = np.triu(np.ones(shape[-2:], dtype=bool), 1)
    hidden = matrix[:, later]
    return hidden.size > 0 and bool((hidden == hidden[0, 0]).all() and (matrix[:, ~later] != hidden[0, 0]).all())
