"""Converts layers that read and write the rows that a mask selects, such as `y[mask] += expert(x[mask]) * w[mask]`.

`x[mask]` is exported with NonZero, whose result size depends on the data. If each row is computed from the same row,
all rows may be computed, and the results written where the mask is set, which gives the same tensor. Rows that are
added are multiplied by weights that are zero where the mask is not set, so that `ir.experts` recognises a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ir.build import GraphBuilder
from ir.onnx.readers.nodes import Node
from ir.onnx.rewrites.masked_writes import MASKED, Places, add_masked, without_unread
from ir.onnx.rewrites.routed_tokens import VIEWS, is_by_row, like

ROWS, WEIGHTS, SUM, CHOICE = "#MaskedRows", "#MaskedWeights", "#MaskedSum", "#MaskedChoice"
"""Kinds of the nodes that replace look-ups of rows, look-ups of their weights, and writes with and without a sum."""
_COMPARED = 8
"""Number of nodes behind which two masks still count as equal if all of these nodes are (assumed)."""
_MOST_OPERANDS = 3
"""Operands of the largest node that is compared (assumed): a mask is computed by comparisons, sums and products."""
_MOST_WRITES = 1024
"""Most writes into one tensor that are looked at (assumed): one for each expert of a layer."""


def all_rows(nodes: list[Node], places: Places, outputs: Sequence[str]) -> tuple[list[Node], tuple[str, ...]]:
    """The nodes with such layers computed on all rows, and a warning if their results are not a weighted sum.

    Args:
        nodes: nodes of the file, each after those that it reads.
        places: the places of masks among these nodes.
        outputs: names of the outputs.
    """
    changed = _Layers(nodes, places, outputs).changes()
    if not changed:
        return nodes, ()
    named = {node.scope or node.name for node in changed.values() if node.kind == CHOICE}
    warnings = (f"{', '.join(sorted(named)[:4])}: rows that a mask selects are priced as all rows",) if named else ()
    return without_unread(nodes, [changed.get(id(node), node) for node in nodes], outputs), warnings


@dataclass
class _Layers:
    """All rows that masks of a file select, and what is computed of them."""

    nodes: Sequence[Node]
    places: Places
    outputs: Sequence[str]
    readers: dict[str, list[Node]] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    """Tensor of selected rows -> key of its mask."""
    lookups: dict[int, tuple[Node, str]] = field(default_factory=dict)
    """Look-ups of rows, each with its mask."""
    writes: dict[int, tuple[Node, str]] = field(default_factory=dict)
    """Writes of rows, each with its mask, which has the dims of the look-ups."""
    refused: set[str] = field(default_factory=set)
    """Keys of masks of which a selected row is not computed from the same row only."""
    chained: set[int] = field(default_factory=set)
    """Writes into zeros at places of different masks, of which each place is of one mask at most."""
    keys: dict[tuple[str, int], str] = field(default_factory=dict)

    def changes(self) -> dict[int, Node]:
        """Replacements by the identity of their nodes."""
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                self.readers.setdefault(name, []).append(node)
        for node in self.nodes:
            self._sort(node)
        self.refused.update(self.masks[name] for name in self.outputs if name in self.masks)
        written = {self._key(mask) for _, mask in self.writes.values()} - self.refused
        for node, mask in self.writes.values():
            before = self._writes_before(node.inputs[0], mask)
            self.chained |= {id(node), *before} if before else set()
        found = {
            key: like(node, ROWS, [mask, node.inputs[0]])
            for key, (node, mask) in self.lookups.items()
            if self._key(mask) in written
        }
        for key, (node, mask) in self.writes.items():
            if self._key(mask) in written:
                choice = like(node, CHOICE, [mask, self._value(node), node.inputs[0]])
                found |= self._summed(node, mask) or {key: choice}
        return found

    def _sort(self, node: Node) -> None:
        """Follows selected rows through a node."""
        mask = self._selecting(node)
        rows = {self.masks[name] for name in node.inputs if name in self.masks}
        if mask is not None and node.kind in ("Gather", "GatherND"):
            self.refused |= rows
            self.lookups[id(node)] = node, mask
            self.masks[node.outputs[0]] = self._key(mask)
        elif mask is not None:
            key = self._key(mask)
            if rows == {key} and node.inputs[0] not in self.masks:
                self.writes[id(node)] = node, self._narrow(mask)
            else:
                self.refused |= rows | {key}
        elif rows and node.kind != "Shape":
            if len(rows) > 1 or not self._is_by_row(node):
                self.refused |= rows
            self.masks |= dict.fromkeys(node.outputs, next(iter(rows)))

    def _selecting(self, node: Node) -> str | None:
        """The mask that selects the rows that a node looks up or writes; None for any other node."""
        is_lookup = node.kind == "GatherND" and not node.attributes.get("batch_dims")
        is_lookup |= node.kind == "Gather" and not node.attributes.get("axis")
        reduction = node.attributes.get("reduction", "none")
        is_write = node.kind == "ScatterND" and reduction in ("none", b"none", "add", b"add")
        if not (is_lookup or is_write) or len(node.inputs) < 2:
            return None
        maker = self._behind(node.inputs[1], VIEWS)
        source = self._behind(maker.inputs[0], ("Cast", "Identity")) if maker and maker.kind == "Transpose" else None
        return source.inputs[0] if source is not None and source.kind == "NonZero" else None

    def _is_by_row(self, node: Node) -> bool:
        """Whether a node that reads selected rows computes each row from the same row."""
        if node.kind == "Slice":
            ends = self.places.value(node.inputs[2])
            if ends is None:  # the elements of all rows in front of a write, which the older exporter counts
                return all(reader.kind == "ScatterND" for reader in self.readers.get(node.outputs[0], ()))
            axes = self.places.value(node.inputs[3]) if len(node.inputs) > 3 else None
            return axes is not None and bool(np.all(axes))
        if node.kind in ("MatMul", "Gemm") and not self.masks.keys().isdisjoint(node.inputs[1:]):
            return False
        return is_by_row(node, self.places)

    # What is written

    def _summed(self, write: Node, mask: str) -> dict[int, Node]:
        """Replacements of a write of rows that are added, and of their weights; none if it is another write."""
        data, value = write.inputs[0], self._value(write)
        is_first = self.places.is_zero(data)
        total = self._behind(value, ("Cast", "Identity"))
        if _adds(write):
            term: str | None = value
        elif total is not None and total.kind == "Add":
            others = [name for name in total.inputs if not self._is_of(name, data, is_first)]
            term = others[0] if len(others) == 1 else None
        else:
            term = value if is_first or id(write) in self.chained else None
        weights = self._weights(term) if term is not None else None
        if term is None or (weights is None and not _adds(write) and id(write) not in self.chained):
            return {}
        given = [] if is_first else [data]
        if weights is None:
            return {id(write): like(write, SUM, [mask, term, *given], masked=True)}
        found = like(weights, WEIGHTS, [self.lookups[id(weights)][1], weights.inputs[0]])
        return {id(weights): found, id(write): like(write, SUM, [mask, term, *given])}

    def _writes_before(self, data: str, mask: str) -> list[int]:
        """All writes into zeros that give `data`, if each of them is where `mask` is not set; otherwise none."""
        found: list[int] = []
        while not self.places.is_zero(data):
            maker = self._behind(data, VIEWS)
            if maker is None or id(maker) not in self.writes or len(found) == _MOST_WRITES:
                return []
            if not self._is_apart(self.writes[id(maker)][1], mask):
                return []
            found.append(id(maker))
            data = maker.inputs[0]
        return found

    def _is_apart(self, *masks: str) -> bool:
        """Whether two masks are where one tensor has different values."""
        makers = [maker for mask in masks if (maker := self._behind(mask, VIEWS)) is not None]
        values = [self.places.value(maker.inputs[1]) for maker in makers if maker.kind == "Equal"]
        if len(values) < len(masks) or any(value is None or value.size != 1 for value in values):
            return False
        return self._key(makers[0].inputs[0]) == self._key(makers[1].inputs[0]) and values[0] != values[1]

    def _is_of(self, name: str, data: str, is_zero: bool) -> bool:
        """Whether a tensor holds the selected rows of `data`, or of zeros like it."""
        maker = self._behind(name, VIEWS)
        if maker is None or id(maker) not in self.lookups:
            return False
        same = self._plain(maker.inputs[0]) == self._plain(data)
        return same or (is_zero and self.places.is_zero(maker.inputs[0]))

    def _plain(self, name: str) -> str:
        """The name of a tensor in front of its copies."""
        while (maker := self.places.makers.get(name)) is not None and maker.kind == "Identity":
            name = maker.inputs[0]
        return name

    def _weights(self, name: str) -> Node | None:
        """The look-up of weights that multiply a tensor, which nothing else reads; None if there is none."""
        maker = self._behind(name, VIEWS)
        if maker is None or maker.kind != "Mul":
            return None
        for operand in maker.inputs:
            behind = self._behind(operand, VIEWS)
            if behind is not None and id(behind) in self.lookups and self._is_read_once(behind, maker):
                return behind
        return None

    def _is_read_once(self, node: Node, reader: Node) -> bool:
        """Whether only `reader` reads a node, maybe behind views."""
        while (readers := self.readers.get(node.outputs[0], [])) and len(readers) == 1:
            (node,) = readers
            if node is reader:
                return True
            if node.kind not in VIEWS:
                return False
        return False

    def _value(self, write: Node) -> str:
        """The rows that are written, in front of what gives them the shape of the selected elements."""
        name = write.inputs[2]
        while (maker := self.places.makers.get(name)) is not None and maker.kind in ("Reshape", "Slice", "Expand"):
            name = maker.inputs[0]
        return name

    # Masks

    def _narrow(self, mask: str) -> str:
        """A mask without the dims along which a write repeats it."""
        while (maker := self.places.makers.get(mask)) is not None and maker.kind in ("Expand", "Unsqueeze"):
            mask = maker.inputs[0]
        return mask

    def _key(self, name: str, depth: int = _COMPARED) -> str:
        """A text that is equal for masks that are computed in the same way, whatever their views."""
        if (name, depth) not in self.keys:
            self.keys[name, depth] = self._new_key(name, depth)
        return self.keys[name, depth]

    def _new_key(self, name: str, depth: int) -> str:
        maker = self.places.makers.get(name)
        while maker is not None and maker.kind in VIEWS:
            name = maker.inputs[0]
            maker = self.places.makers.get(name)
        value = self.places.value(name)
        if value is not None:
            return f"{value.tolist()}"
        if maker is None or not depth or not 0 < len(maker.inputs) <= _MOST_OPERANDS:
            return name
        attributes = sorted((k, str(v)) for k, v in maker.attributes.items())
        operands = [self._key(operand, depth - 1) for operand in maker.inputs]
        return f"{maker.kind}{maker.outputs.index(name)}{attributes}({', '.join(operands)})"

    def _behind(self, name: str, kinds: Sequence[str]) -> Node | None:
        maker = self.places.makers.get(name)
        while maker is not None and maker.kind in kinds and id(maker) not in self.lookups:
            maker = self.places.makers.get(maker.inputs[0])
        return maker


def _adds(node: Node) -> bool:
    return node.attributes.get("reduction") in ("add", b"add")


# Operators


def add_rows(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds the rows of a table at all places of a mask, `[rows, ...]`, for a node of kind `ROWS`."""
    mask, table = inputs
    _reshape(builder, node, table, node.outputs[0], _shape(builder, table, start=_rank(builder, mask), merged=True))


def add_weights(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds the weight of each row, zero where the mask is not set, for a node of kind `WEIGHTS`."""
    mask, table = inputs
    name, rank = node.outputs[0], len(builder.operand(table).shape)
    builder.add("Cast", [mask], [f"{name}#hot"], scope=node.scope, attributes={"to": builder.operand(table).dtype})
    hot = _wide(builder, node, f"{name}#hot", rank)
    builder.add("Mul", [table, hot], [f"{name}#own"], scope=node.scope)
    _reshape(builder, node, f"{name}#own", name, _shape(builder, table, start=_rank(builder, mask), merged=True))


def add_sum(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds rows, zero where the mask is not set, to a tensor (absent: zeros), for a node of kind `SUM`."""
    mask, rows, *given = inputs
    name, is_masked = node.outputs[0], node.attributes.get("masked")
    whole = f"{name}#rows" if given or is_masked else name
    _reshape(builder, node, rows, whole, [*_shape(builder, mask), *_shape(builder, rows, start=1)])
    if is_masked:
        dtype, rank = builder.operand(rows).dtype, _rank(builder, whole)
        builder.add("Cast", [mask], [f"{name}#hot"], scope=node.scope, attributes={"to": dtype})
        own = f"{name}#own" if given else name
        builder.add("Mul", [whole, _wide(builder, node, f"{name}#hot", rank)], [own], scope=node.scope)
        whole = own
    if given:
        builder.add("Add", [*given, whole], [name], name=node.name, scope=node.scope)


def add_choice(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds the choice between rows and the tensor into which they are written, for a node of kind `CHOICE`."""
    mask, rows, data = inputs
    name, rank = node.outputs[0], len(builder.operand(data).shape)
    whole = f"{name}#rows"
    _reshape(builder, node, rows, whole, [*_shape(builder, mask), *_shape(builder, rows, start=1)])
    wide = _wide(builder, node, mask, rank)
    builder.add("Where", [wide, whole, data], [name], name=node.name, scope=node.scope)


def _rank(builder: GraphBuilder, name: str) -> int:
    return len(builder.operand(name).shape)


def _shape(builder: GraphBuilder, name: str, *, start: int = 0, merged: bool = False) -> list[int]:
    """The dims of a tensor from `start`, behind one for all dims in front of them with `merged`."""
    dims = list(builder.operand(name).shape_at(builder.export_batch))[start:]
    return [-1, *dims] if merged else dims


def _reshape(builder: GraphBuilder, node: Node, name: str, result: str, shape: Sequence[int]) -> None:
    """Adds a view; an Identity if the tensor has as many dims already."""
    if _rank(builder, name) == len(shape):
        builder.add("Identity", [name], [result], scope=node.scope)
        return
    dims = builder.constant(f"{result}#shape", np.asarray(shape, np.int64))
    builder.add("Reshape", [name, dims], [result], scope=node.scope, opset=node.opset)


def _wide(builder: GraphBuilder, node: Node, mask: str, rank: int) -> str:
    """A mask with dims of size 1 up to `rank`."""
    missing = tuple(range(_rank(builder, mask), rank))
    if not missing:
        return mask
    name = f"{node.outputs[0]}#mask"
    builder.add("Unsqueeze", [mask], [name], scope=node.scope, attributes={"axes": missing})
    return name


AT_MASKS = {MASKED: add_masked, ROWS: add_rows, WEIGHTS: add_weights, SUM: add_sum, CHOICE: add_choice}
"""Kind of a node that replaces another -> function that adds its operators to the builder."""
