"""Converts writes to a slice, `x[:, :, 1:] = y`, which are exported as a ScatterND with one index tuple per element.

Since the indices contain those of samples, such a ScatterND could not be split by samples. It is replaced by a Concat
of the updates and the rest of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ir.build import GraphBuilder
from ir.graph import Operator
from ir.onnx.readers.nodes import Node
from ir.operators import Value


class _Span(NamedTuple):
    """A part of one dim that is written."""

    dim: int
    start: int
    stop: int
    size: int
    """Size of the dim."""


def write_slice(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> bool:
    """Adds a write to a slice of every sample; returns whether `node` is one.

    `inputs` are the names of its operands in the builder.
    """
    if node.kind != "ScatterND" or node.attributes.get("reduction", "none") != "none":
        return False
    data, updates = (builder.tensors.get(inputs[i]) for i in (0, 2))
    if data is None or updates is None or data.batch_dim is None:
        return False
    places = _places(builder, inputs[1], len(data.shape))
    if not data.batch_dim < len(places):
        return False
    spans = []
    written = list(data.shape)
    for dim, place in enumerate(places):
        size = data.shape_at(builder.export_batch)[dim]
        start = int(place[0]) if place.size else 0
        if not place.size or start < 0 or not np.array_equal(place, np.arange(start, start + place.size)):
            return False
        if start + place.size > size:
            return False
        if place.size == size:
            continue
        if dim == data.batch_dim:
            return False
        spans.append(_Span(dim, start, start + place.size, size))
        written[dim] = place.size
    if updates.shape != tuple(written) or updates.batch_dim not in (None, data.batch_dim):
        return False
    _write(builder, node, inputs[0], inputs[2], spans, node.outputs[0])
    return True


def _places(builder: GraphBuilder, name: str, rank: int) -> list[Value]:
    """For each dim that the index tuples name, the places along it; none where they do not form a grid."""
    value = builder.values.get(name)
    if value is not None:
        if not 1 < value.ndim == value.shape[-1] + 1 <= rank + 1:
            return []
        parts: list[Value | None] = [value[..., i] for i in range(value.shape[-1])]
    else:
        makers = {output: op for op in builder.operators for output in op.outputs}
        maker = makers.get(name)
        if maker is None or maker.kind != "Concat" or not 1 < len(maker.inputs) <= rank:
            return []
        parts = [_part(builder, makers, part) for part in maker.inputs]
    places = [_along(part, dim, len(parts)) for dim, part in enumerate(parts)]
    known = [place for place in places if place is not None]
    return known if len(known) == len(places) else []


def _part(builder: GraphBuilder, makers: Mapping[str, Operator], name: str) -> Value | None:
    """The places along one dim after an Unsqueeze of the last dim and an Expand, before they are repeated."""
    value = builder.values.get(name)
    if value is not None:
        return value[..., 0] if value.ndim and value.shape[-1] == 1 else None
    maker = makers.get(name)
    if maker is None or maker.kind != "Unsqueeze":
        return None
    inner = makers.get(maker.inputs[0])
    is_last = dict(maker.attributes).get("axes") == (len(builder.tensors[name].shape) - 1,)
    source = inner.inputs[0] if inner is not None and inner.kind == "Expand" else maker.inputs[0]
    return builder.values.get(source) if is_last else None


def _along(part: Value | None, dim: int, rank: int) -> Value | None:
    """The places along `dim` of a grid of `rank` dims; None where they differ along another one."""
    if part is None or part.ndim > rank:
        return None
    grid = part.reshape((1,) * (rank - part.ndim) + part.shape)
    own = grid[tuple(slice(None) if d == dim else slice(0, 1) for d in range(rank))]
    return own.reshape(-1) if (grid == own).all() else None


def _write(builder: GraphBuilder, node: Node, data: str, updates: str, spans: Sequence[_Span], result: str) -> None:
    """Adds operators that give `data` with `updates` in some spans of its dims."""
    if not spans:
        builder.add("Identity", [updates], [result], name=node.name, scope=node.scope)
        return
    span = spans[0]
    middle = updates
    if len(spans) > 1:
        inside = _cut(builder, node, data, f"{result}#inside", span.dim, (span.start, span.stop))
        middle = f"{result}#written"
        _write(builder, node, inside, updates, spans[1:], middle)
    parts = [middle]
    if span.start > 0:
        parts.insert(0, _cut(builder, node, data, f"{result}#before", span.dim, (0, span.start)))
    if span.stop < span.size:
        parts.append(_cut(builder, node, data, f"{result}#behind", span.dim, (span.stop, span.size)))
    builder.add("Concat", parts, [result], name=node.name, scope=node.scope, attributes={"axis": span.dim})


def _cut(builder: GraphBuilder, node: Node, data: str, result: str, dim: int, span: tuple[int, int]) -> str:
    cut = {"axes": (dim,), "starts": span[:1], "ends": span[1:], "steps": (1,)}
    builder.add("Slice", [data], [result], name=f"{node.name}#slice", scope=node.scope, attributes=cut)
    return result
