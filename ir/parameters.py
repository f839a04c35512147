"""Fused parameters are divided into named pieces.

A Split (or sibling Slices, or look-ups of one index each) directly after a linear operator is moved before it: the
weight and bias become pieces `W#q`, `W#k`, `W#v`, each with a sharding of its own. A contiguous split of the fused
`[q|k|v]` over ranks would not split heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod

from ir.batch import align
from ir.graph import Graph, Operator, Tensor
from ir.operators.experts import PRODUCT
from ir.rewrite import Additions, Rewrite


@dataclass(frozen=True)
class _Cut:
    """One piece of a tensor along a dim."""

    start: int
    stop: int
    output: str
    """Name of the tensor that holds the piece."""
    drops_dim: bool
    """Whether the dim is removed, as a look-up of one index does."""


@dataclass
class _Push(Additions):
    """The division of one fused tensor."""

    labels: list[str] = field(default_factory=list)
    """Names of the pieces: q, k and v for three of equal size, else numbers."""
    removed: set[int] = field(default_factory=set)
    """Indices of the operators that are replaced."""
    known: dict[tuple[str, int, tuple[tuple[int, int], ...]], list[str] | None] = field(default_factory=dict)
    """Pieces by tensor, dim and bounds: an operand may be read twice by one operator."""

    def piece(self, name: str, dim: int, bounds: Sequence[tuple[int, int]], reader: int) -> list[str] | None:
        """Names of the pieces of a tensor along a dim; None if its producers cannot compute them separately."""
        key = (name, dim, tuple(bounds))
        if key not in self.known:
            self.known[key] = self._piece(name, dim, bounds, reader)
        return self.known[key]

    def _piece(self, name: str, dim: int, bounds: Sequence[tuple[int, int]], reader: int) -> list[str] | None:
        graph = self.graph
        tensor = graph.tensors[name]
        if any(i != reader and i not in self.removed for i in graph.consumers[name]) or name in graph.outputs:
            return None
        if tensor.role == "parameter":
            found = []
            for label, (start, stop) in zip(self.labels, bounds, strict=True):
                shape = tuple(stop - start if i == dim else s for i, s in enumerate(tensor.shape))
                fresh = f"{name}#{label}"
                self.tensors[fresh] = Tensor(name=fresh, shape=shape, dtype=tensor.dtype, role="parameter")
                self.pieces[fresh] = (name, dim, start, stop)
                found.append(fresh)
            return found
        op = graph.maker(name)
        if op is None:
            return None
        index = graph.producer[name]
        self.removed.add(index)
        operands = self._operands(op, dim, bounds, index)
        if operands is None:
            return None
        outputs = []
        for number, label in enumerate(self.labels):
            out = f"{name}#{label}"
            attributes = dict(op.attributes)
            if op.kind == "Reshape":
                start, stop = bounds[number]
                attributes["shape"] = tuple(stop - start if i == dim else s for i, s in enumerate(tensor.shape))
            given = [parts[number] for parts in operands]
            self.make(index, op.kind, f"{op.name}#{label}", given, out, attributes, is_view=op.is_view)
            # A bias in the epilogue of a product keeps its memory traffic (`ir.canonical`).
            self.made[index][-1] = replace(self.made[index][-1], traffic=op.traffic)
            outputs.append(out)
        return outputs

    def _operands(
        self, op: Operator, dim: int, bounds: Sequence[tuple[int, int]], index: int
    ) -> list[list[str]] | None:
        """For each piece, the names of the operands of `op`; None if the operator cannot be divided."""
        graph = self.graph
        rank = len(graph.tensors[op.outputs[0]].shape)
        same = [[n] * len(bounds) for n in op.inputs]
        if op.kind == "MatMul" or (op.kind == "Gemm" and len(op.inputs) == 2):
            weight = graph.tensors[op.inputs[1]]
            if dim != rank - 1 or len(weight.shape) != 2 or not graph.is_weight(op.inputs[1]):
                return None
            side = 0 if dict(op.attributes).get("transB") else 1
            parts = self.piece(op.inputs[1], side, bounds, index)
            return None if parts is None else [same[0], parts]
        if op.kind == PRODUCT and dim == rank - 1 and graph.is_weight(op.inputs[1]):
            parts = self.piece(op.inputs[1], len(graph.tensors[op.inputs[1]].shape) - 1, bounds, index)
            return None if parts is None else [same[0], parts]
        if op.kind == "Add":
            found = []
            for position, name in enumerate(op.inputs):
                tensor = graph.tensors[name]
                own = dim - rank + len(tensor.shape)
                if own < 0 or tensor.shape[own] == 1:
                    found.append(same[position])
                    continue
                pieces = self.piece(name, own, bounds, index)
                if pieces is None:
                    return None
                found.append(pieces)
            return found
        if op.kind == "Transpose":
            pieces = self.piece(op.inputs[0], dict(op.attributes)["perm"][dim], bounds, index)
            return None if pieces is None else [pieces]
        if op.kind == "Reshape":
            return self._through_reshape(op, dim, bounds, index)
        if op.kind == "Squeeze" and op.is_view:
            gone = {axis % (rank + 1) for axis in dict(op.attributes).get("axes", ())}
            if len(gone) == 1:
                pieces = self.piece(op.inputs[0], dim + (min(gone) <= dim), bounds, index)
                return None if pieces is None else [pieces]
        return None

    def _through_reshape(
        self, op: Operator, dim: int, bounds: Sequence[tuple[int, int]], index: int
    ) -> list[list[str]] | None:
        source, target = self.graph.tensors[op.inputs[0]], self.graph.tensors[op.outputs[0]]
        for ins, outs, _ in align(source.shape, target.shape):
            if dim not in outs:
                continue
            if len(ins) != 1 or outs[0] != dim or source.batch_dim == ins[0] or target.batch_dim == dim:
                return None
            scale = prod(target.shape[d] for d in outs[1:])
            scaled = [(a * scale, b * scale) for a, b in bounds]
            pieces = self.piece(op.inputs[0], ins[0], scaled, index)
            return None if pieces is None else [pieces]
        return None


def _cuts(graph: Graph, name: str) -> tuple[int, list[_Cut], list[int]] | None:
    """The pieces into which operators divide a tensor: (dim, pieces in order, indices of these operators); None if they
    do not divide it."""
    readers = graph.consumers.get(name, ())
    if not readers or name in graph.outputs or graph.tensors[name].role != "activation":
        return None
    ops = [graph.operators[i] for i in readers]
    shape = graph.tensors[name].shape
    if any(not graph.consumers[n] and n not in graph.outputs for op in ops for n in op.outputs):
        return None  # an unused piece would be dropped, and with it parameters that the user counts
    if len(ops) == 1 and ops[0].kind == "Split":
        attributes = dict(ops[0].attributes)
        start, cuts = 0, []
        for size, out in zip(attributes["split"], ops[0].outputs, strict=True):
            cuts.append(_Cut(start, start + size, out, False))
            start += size
        return int(attributes["axis"]) % len(shape), cuts, list(readers)
    if len(ops) < 2 or any(op.inputs != (name,) for op in ops):
        return None
    found: list[tuple[int, _Cut]] = []
    for op in ops:
        attributes = dict(op.attributes)
        if op.kind == "Slice" and len(attributes["axes"]) == 1 and attributes["steps"] == (1,):
            cut = _Cut(attributes["starts"][0], attributes["ends"][0], op.outputs[0], False)
            found.append((attributes["axes"][0], cut))
        elif op.kind == "Gather" and "indices" in attributes:
            index = attributes["indices"]
            found.append((attributes["axis"], _Cut(index, index + 1, op.outputs[0], True)))
        else:
            return None
    dims = {d for d, _ in found}
    cuts = sorted((c for _, c in found), key=lambda c: c.start)
    dim = found[0][0]
    covers = cuts[0].start == 0 and cuts[-1].stop == shape[dim]
    meets = all(a.stop == b.start for a, b in pairwise(cuts))
    return (dim, cuts, list(readers)) if len(dims) == 1 and covers and meets else None


def split_fused(graph: Graph) -> Graph:
    """The graph in which every Split, group of Slices or of look-ups after a linear operator is moved into its
    parameters.

    The number of parameters stays the same; `Graph.pieces` lists the origin of each piece.
    """
    rewrite = Rewrite(graph)
    for name in graph.tensors:
        taken = _cuts(graph, name) if name in graph.producer else None
        if taken is None:
            continue
        dim, cuts, readers = taken
        is_qkv = len(cuts) == 3 and len({c.stop - c.start for c in cuts}) == 1
        push = _Push(graph, labels=["q", "k", "v"] if is_qkv else [str(i) for i in range(len(cuts))])
        push.removed.update(readers)
        parts = push.piece(name, dim, [(c.start, c.stop) for c in cuts], readers[0])
        if parts is None or not push.pieces or push.removed & rewrite.made.keys():
            continue
        renamed: dict[str, str] = {}
        for part, cut in zip(parts, cuts, strict=True):
            if cut.drops_dim:
                reader = graph.operators[graph.producer[cut.output]]
                push.make(readers[0], "Squeeze", reader.name, [part], cut.output, {"axes": (dim,)})
                made = push.made[readers[0]]
                made[-1] = made[-1].renamed({}, scope=reader.scope)
            else:
                renamed[part] = cut.output
        for index in push.removed:
            rewrite.made[index] = [op.renamed(renamed) for op in push.made.get(index, ())]
        for fresh, tensor in push.tensors.items():
            new = renamed.get(fresh, fresh)
            rewrite.tensors[new] = replace(tensor, name=new)
        rewrite.pieces.update(push.pieces)
    return rewrite.finish()
