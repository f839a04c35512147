"""Converts experts that read only the tokens that chose them to experts that read all tokens.

`torch.where(chosen == expert)` is exported as NonZero, whose result size depends on the data: it holds the tokens that
chose an expert, and at which of their choices. What the expert computes of each token is multiplied by the token's
weight and added to the token's row of the result. Where the weights of the other tokens are zero, the expert may read
all tokens, which gives the same sum; `ir.experts` then recognises the mixture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ir.build import GraphBuilder
from ir.errors import refuse
from ir.onnx.readers.nodes import Node
from ir.onnx.rewrites.masked_writes import Places, without_unread

PLACES, WEIGHTS = "#RoutedPlaces", "#RoutedWeights"
"""Kinds of the nodes that replace a NonZero and a look-up of the tokens' weights."""
_INDICES = frozenset(
    {"Transpose", "Slice", "Split", "Squeeze", "Unsqueeze", "Expand", "Reshape", "Cast", "Identity", "Concat"}
)
"""Kinds that select and arrange places."""
VIEWS = ("Cast", "Identity", "Expand", "Reshape", "Unsqueeze", "Squeeze")
BY_ROW = frozenset(
    {
        "MatMul", "Gemm", "Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Sigmoid", "Relu", "Tanh", "Erf", "Gelu", "Swish",
        "Softplus", "LeakyRelu", "Elu", "Clip", "Min", "Max", "Cast", "Identity", "Dropout", "LayerNormalization",
        "RMSNormalization", "Split", "Squeeze", "Unsqueeze", "Expand", "Reshape", "ReduceMean", "Reciprocal", "Mish",
    }
)  # fmt: skip
"""Kinds that experts consist of, which compute each row from the same row."""


def all_tokens(nodes: list[Node], places: Places, outputs: Sequence[str]) -> list[Node]:
    """The nodes with such experts on all tokens; what is not wholly recognised remains as it is.

    Args:
        nodes: nodes of the file, each after those that it reads.
        places: the places of masks among these nodes.
        outputs: names of the outputs.
    """
    starts = [node for node in nodes if node.kind == "NonZero"]
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in dict.fromkeys(node.inputs):
            readers.setdefault(name, []).append(node)
    changed: dict[int, Node] = {}
    for start in starts:
        changed |= _Expert(start, places, readers).changes()
    found = [changed.get(id(node), node) for node in nodes]
    return without_unread(nodes, found, outputs) if changed else nodes


@dataclass
class _Expert:
    """The nodes that read the places of one mask `[tokens, choices]` or `[choices, tokens]`."""

    start: Node
    places: Places
    readers: Mapping[str, Sequence[Node]]
    rows: dict[int, tuple[Node, int]] = field(default_factory=dict)
    """Look-ups of tokens, each with the dim of the mask that counts the tokens."""
    weights: dict[int, tuple[Node, str, tuple[int, ...]]] = field(default_factory=dict)
    """Look-ups of the weights of tokens, each with the table and the dims of the mask that its dims are."""
    sums: dict[int, Node] = field(default_factory=dict)
    """Writes of the results."""

    def changes(self) -> dict[int, Node]:
        """Replacements by the identity of their nodes; none if a node is not recognised."""
        if not self._sort():
            return {}
        (tokens, *others) = {dim for _, dim in self.rows.values()} or {-1}
        lookups = [node.outputs[0] for node, _ in self.rows.values()]
        if others or not self.sums or not self._is_by_row(lookups) or not all(map(self._adds, self.sums.values())):
            return {}
        mask = self.start.inputs[0]
        found = {id(self.start): like(self.start, PLACES, [mask], dim=tokens)}
        found |= {key: like(node, "Identity", node.inputs[:1]) for key, (node, _) in self.rows.items()}
        for node, _ in self.rows.values():
            found |= self._as_rows(node)
        chosen = self._chosen()
        for key, (node, table, dims) in self.weights.items():
            choices = 1 - dims.index(tokens)
            if chosen is None:
                found[key] = like(node, WEIGHTS, [mask, table], dims=dims, choices=choices)
            elif (tokens == 1) == chosen[2] and choices == 1:
                found[key] = like(node, WEIGHTS, [chosen[0], table], dims=(0, 1), choices=1, expert=chosen[1])
            else:
                return {}
        for key, node in self.sums.items():
            value = node.inputs[2]
            while value in self.places.makers and self.places.makers[value].kind in ("Expand", "Reshape"):
                value = self.places.makers[value].inputs[0]  # the older exporter gives it the shape that it has
            is_new = self._replaces(node) or self.places.is_zero(node.inputs[0])
            given = [value] if is_new else [node.inputs[0], value]
            found[key] = like(node, "Identity" if len(given) == 1 else "Add", given)
        return found

    def _as_rows(self, lookup: Node) -> dict[int, Node]:
        """Replaces the view as `[tokens, features]` behind a look-up in `[1, tokens, features]`: `x[None, tokens]`."""
        root, name = lookup.inputs[0], lookup.outputs[0]
        while (maker := self.places.makers.get(root)) is not None and maker.kind in ("Unsqueeze", "Transpose"):
            root = maker.inputs[0]
        readers = self.readers.get(name, ())
        while len(readers) == 1 and readers[0].kind == "Transpose":
            readers = self.readers.get(readers[0].outputs[0], ())
        view = readers[0] if len(readers) == 1 else lookup
        shape = self.places.value(view.inputs[1]) if view.kind == "Reshape" else None
        if root == lookup.inputs[0] or shape is None or len(shape) != 2 or shape[0] != -1:
            return {}
        return {id(view): like(view, "Reshape", [root, view.inputs[1]])}

    def _chosen(self) -> tuple[str, int, bool] | None:
        """The chosen experts, the number of this one, and whether its mask is `[choices, tokens]`.

        None for a mask that is not part of a transposed table of all masks, `[experts, tokens, choices]`.
        """
        makers = self.places.makers
        part = self._behind_views(self.start.inputs[0])
        turned = makers.get(part.inputs[0]) if part is not None else None
        if part is None or turned is None or turned.kind != "Transpose" or part.attributes.get("axis", 0):
            return None
        if part.kind == "Split":
            name = self.start.inputs[0]
            while name not in part.outputs:
                name = makers[name].inputs[0]
            number: Any = part.outputs.index(name)
        else:
            value = self.places.value(part.inputs[1]) if part.kind in ("Gather", "Slice") else None
            number = None if value is None or value.size != 1 else int(value.reshape(-1)[0])
        perm = tuple(turned.attributes.get("perm") or ())
        table = self._behind_views(turned.inputs[0])
        if number is None or number < 0 or perm not in ((2, 1, 0), (2, 0, 1)) or table is None:
            return None
        if table.kind == "OneHot" and table.attributes.get("axis", -1) in (-1, 2):
            return table.inputs[0], number, perm[1] == 1
        if table.kind != "Equal":
            return None
        counts = self.places.value(table.inputs[1])
        column = makers.get(table.inputs[0])
        is_table = counts is not None and np.array_equal(counts.reshape(-1), np.arange(counts.size))
        if column is None or column.kind != "Unsqueeze" or not is_table:
            return None
        return column.inputs[0], number, perm[1] == 1

    def _sort(self) -> bool:
        """Follows the places to all nodes that read them; returns whether all are of a known form."""
        queue, seen = list(self.start.outputs), set(self.start.outputs)
        while queue:
            name = queue.pop()
            for node in self.readers.get(name, ()):
                if node.kind == "Shape" or self._reads_places(node, name):
                    continue
                is_column = node.kind == "Gather" and node.inputs[0] == name
                is_number = node.kind in ("Add", "Mul")
                if not (node.kind in _INDICES or is_column or is_number):
                    return False
                for output in node.outputs:
                    if output not in seen:
                        seen.add(output)
                        queue.append(output)
        return True

    def _reads_places(self, node: Node, name: str) -> bool:
        """Sorts a node that looks up or writes at places; returns whether it is one."""
        if len(node.inputs) < 2 or node.inputs[1] != name or node.attributes.get("batch_dims"):
            return False
        column = self.places.column(name)
        if node.kind in ("ScatterND", "ScatterElements") and column is not None:
            self.sums[id(node)] = node
        elif node.kind in ("Gather", "GatherND") and column is not None:
            self.rows[id(node)] = node, column[1]
        elif node.kind in ("Gather", "GatherND") and (pair := self._pair(node, name)) is not None:
            self.weights[id(node)] = node, *pair
        else:
            return False
        return True

    def _pair(self, node: Node, name: str) -> tuple[str, tuple[int, ...]] | None:
        """The table in which weights are looked up, and the dims of the mask that its two first dims are."""
        makers = self.places.makers
        index = makers.get(name)
        if index is None or len(index.inputs) != 2:
            return None
        if node.kind == "GatherND" and index.kind == "Concat":
            table, operands = node.inputs[0], list(index.inputs)
        elif node.kind == "Gather" and index.kind == "Add":
            # The older exporter looks up in the merged dims, at `token * choices + choice`.
            flat = makers.get(node.inputs[0])
            scaled = [n for n in index.inputs if n in makers and makers[n].kind == "Mul"]
            if flat is None or flat.kind not in ("Flatten", "Reshape") or len(scaled) != 1:
                return None
            rest = [n for n in index.inputs if n != scaled[0]]
            first = [n for n in makers[scaled[0]].inputs if self.places.column(n) is not None]
            table, operands = flat.inputs[0], first + rest
        else:
            return None
        columns = [self.places.column(operand) for operand in operands]
        dims = tuple(column[1] for column in columns if column is not None)
        return (table, dims) if len(columns) == 2 and sorted(dims) == [0, 1] else None

    def _is_by_row(self, names: Sequence[str]) -> bool:
        """Whether all that is computed of the tokens that are looked up is computed row by row, up to the writes."""
        queue, seen = list(names), set(names)
        while queue:
            name = queue.pop()
            for node in self.readers.get(name, ()):
                if id(node) in self.sums or node.kind == "Shape":
                    continue
                if node.kind in ("MatMul", "Gemm") and name in node.inputs[1:]:
                    return False
                if not is_by_row(node, self.places):
                    return False
                fresh = [n for n in node.outputs if n not in seen]
                seen.update(fresh)
                queue.extend(fresh)
        return True

    def _adds(self, node: Node) -> bool:
        """Whether a write adds rows that are zero for the tokens that did not choose the expert."""
        reduction = node.attributes.get("reduction", "none")
        if reduction in ("add", b"add"):
            return self._is_weighted(node.inputs[2])
        return reduction in ("none", b"none") and self._replaces(node)

    def _replaces(self, node: Node) -> bool:
        """Whether a write without reduction gives the new rows: those before it are zero, or are summands of them."""
        if node.attributes.get("reduction", "none") not in ("none", b"none"):
            return False
        total, is_first = self._behind_views(node.inputs[2]), self.places.is_zero(node.inputs[0])
        if total is None or total.kind != "Add":
            return is_first and self._is_weighted(node.inputs[2])
        old = [n for n in total.inputs if self._is_row_of(n, node.inputs[0], is_first)]
        return len(old) == 1 and all(self._is_weighted(n) for n in total.inputs if n not in old)

    def _is_row_of(self, name: str, data: str, is_zero: bool) -> bool:
        """Whether a tensor holds the looked-up rows of `data`, or of zeros like it."""
        maker = self._behind_views(name)
        if maker is None or id(maker) not in self.rows:
            return False
        return maker.inputs[0] == data or (is_zero and self.places.is_zero(maker.inputs[0]))

    def _is_weighted(self, name: str) -> bool:
        """Whether a tensor is a product with the weights of tokens."""
        maker = self._behind_views(name)
        if maker is None or maker.kind != "Mul":
            return False
        behind = [self._behind_views(n) for n in maker.inputs]
        return any(m is not None and id(m) in self.weights for m in behind)

    def _behind_views(self, name: str) -> Node | None:
        maker = self.places.makers.get(name)
        while maker is not None and maker.kind in VIEWS and id(maker) not in self.rows:
            maker = self.places.makers.get(maker.inputs[0])
        return maker


def is_by_row(node: Node, places: Places) -> bool:
    """Whether a node with one operand of rows `[rows, ...]` computes each row from the same row."""
    if node.kind == "ReduceMean":
        given = places.value(node.inputs[1]) if len(node.inputs) > 1 else node.attributes.get("axes")
        axes = [] if given is None else np.ravel(given).tolist()
        return bool(axes) and all(axis > 0 or axis == -1 for axis in axes)
    perm = tuple(node.attributes.get("perm") or ())
    return node.kind in BY_ROW or (node.kind == "Transpose" and perm[-1:] == (len(perm) - 1,))


def like(node: Node, kind: str, inputs: Sequence[str], **attributes: object) -> Node:
    """A node with the results of another one."""
    return Node(kind, list(inputs), node.outputs, attributes, node.name, node.scope, node.opset, label=node.label)


def add_places(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds the places of all tokens, `[dims of the mask, tokens]`, for a node of kind `PLACES`."""
    shape, dim = builder.operand(inputs[0]).shape_at(builder.export_batch), node.attributes["dim"]
    if len(shape) != 2:
        repair = "Compute every expert on every token, and multiply by weights that are zero for the others."
        raise refuse(f"operator {node.name} (NonZero) does not read a mask [tokens, choices]", inputs[0], repair)
    places = np.zeros((2, shape[dim]), np.int64)
    places[dim] = np.arange(shape[dim])
    builder.constant(node.outputs[0], places)


def add_weights(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds the weight of each token, zero for one that did not choose the expert, for a node of kind `WEIGHTS`."""
    (mask, table), name, dims = inputs, node.outputs[0], node.attributes["dims"]
    given, expert = builder.operand(table), node.attributes.get("expert")

    def add(kind: str, operands: Sequence[str], label: str, **attributes: object) -> str:
        result = f"{name}#{label}" if label else name
        builder.add(kind, operands, [result], scope=node.scope, attributes=attributes)
        return result

    if expert is not None:
        number = builder.constant(f"{name}#expert", np.asarray(expert, builder.operand(mask).dtype))
        mask = add("Equal", [mask, number], "mask")
    if dims != (0, 1):
        mask = add("Transpose", [mask], "turned", perm=dims)
    mask = add("Cast", [mask], "hot", to=given.dtype)
    if len(given.shape) > 2:
        mask = add("Unsqueeze", [mask], "wide", axes=tuple(range(2, len(given.shape))))
    product = add("Mul", [table, mask], "own")
    axes = builder.constant(f"{name}#axes", np.asarray([node.attributes["choices"]]))
    add("ReduceSum", [product, axes], "", keepdims=0)


ROUTED = {PLACES: add_places, WEIGHTS: add_weights}
"""Kind of a node that replaces another -> function that adds its operators to the builder."""
