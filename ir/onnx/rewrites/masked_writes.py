"""Converts writes under a mask, such as `x[mask] = 0`, which are exported with the positions at which the mask is set.

These positions are computed by NonZero, whose result size depends on the data, so that later shapes would be unknown. A
ScatterND at all positions of a mask is replaced by `Where(mask, value, x)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnx import numpy_helper

from ir.build import GraphBuilder
from ir.errors import refuse
from ir.onnx.readers.nodes import FILLED_KEY, Node, Stored, has_data, metadata, small_value

MASKED = "#Masked"
"""Kind of a write where a mask is set; its operands are the mask, the new value and the data."""
_SAME = ("Cast", "Identity", "Unsqueeze", "Squeeze", "Expand", "Reshape")
"""Kinds through which one column of places is followed, and a value that is repeated for all of them."""


def chosen_by_masks(nodes: list[Node], places: Places, outputs: Sequence[str]) -> list[Node]:
    """The nodes with such writes as `MASKED`, without what computed places that nothing reads any more."""
    found = [_chosen(node, places) or node for node in nodes]
    if all(new is old for new, old in zip(found, nodes, strict=True)):
        return nodes
    return without_unread(nodes, found, outputs)


def without_unread(nodes: Sequence[Node], changed: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    """The changed nodes without those that the outputs needed before the change, and do not need any more.

    Args:
        nodes: nodes of the file, each after those that it reads.
        changed: the nodes that replace them.
        outputs: names of the outputs.
    """
    read, still_read = _read(nodes, outputs), _read(changed, outputs)
    return [n for n in changed if read.isdisjoint(n.outputs) or not still_read.isdisjoint(n.outputs)]


def _read(nodes: Sequence[Node], outputs: Sequence[str]) -> set[str]:
    """Names that the outputs need, of nodes each after those that it reads."""
    needed = set(outputs)
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.inputs)
    return needed


def add_masked(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds the operators of a node of kind `MASKED`; `inputs` are the names of its operands in the builder."""
    mask, value, data = inputs
    rank, name = len(builder.operand(data).shape), node.outputs[0]
    count = len(builder.operand(mask).shape)
    if count != node.attributes["dims"] and node.attributes["dims"]:
        repair = "Write where a mask is set by torch.where."
        raise refuse(f"operator {node.name or name} (NonZero) names a part of the dims of its mask", mask, repair)
    if count < rank:
        axes = tuple(range(count, rank))
        builder.add("Unsqueeze", [mask], [f"{name}#mask"], scope=node.scope, attributes={"axes": axes})
        mask = f"{name}#mask"
    builder.add("Where", [mask, value, data], [name], name=node.name, scope=node.scope, opset=node.opset)


class Places:
    """Places of masks in a file, and which of its tensors are constants.

    Args:
        nodes: nodes of the file.
        stored: the stored tensors by name.
        tensors: the same as protobuf.
    """

    def __init__(self, nodes: Sequence[Node], stored: Mapping[str, Stored], tensors: Mapping[str, Any]) -> None:
        self.makers = {name: node for node in nodes for name in node.outputs}
        self.stored = stored
        self.tensors = tensors
        self._last = ""

    def mask(self, name: str) -> tuple[str, int] | None:
        """The mask that index tuples name all places of, with how many of its dims (0 = all); None for other ones."""
        maker = self._followed(name, ("Cast", "Identity"))
        if maker is None:
            return None
        if maker.kind == "Concat":
            columns = [self.column(operand) for operand in maker.inputs]
            masks = {column[0] for column in columns if column is not None}
            if len(masks) != 1 or [c and c[1] for c in columns] != list(range(len(columns))):
                return None
            return masks.pop(), len(columns)
        mask = self._tuples(name)
        return None if mask is None else (mask, 0)

    def scalar(self, name: str) -> str | None:
        """The stored scalar that a tensor repeats; None for any other tensor."""
        while True:
            value = self.value(name)
            if value is not None and value.size == 1:
                return name
            maker = self.makers.get(name)
            if maker is None or maker.kind not in _SAME:
                return None
            name = maker.inputs[0]

    def _tuples(self, name: str) -> str | None:
        """The mask whose places a tensor `[places, dims]` holds."""
        maker = self._followed(name, ("Cast", "Identity"))
        source = self._followed(maker.inputs[0], ("Cast", "Identity")) if maker and maker.kind == "Transpose" else None
        return source.inputs[0] if source is not None and source.kind == "NonZero" else None

    def column(self, name: str) -> tuple[str, int] | None:
        """The mask whose places along one dim a tensor holds, and the dim."""
        maker = self._followed(name, _SAME)
        if maker is None or maker.kind not in ("Slice", "Split", "Gather"):
            return None
        last, mask = self._last, self._tuples(maker.inputs[0])
        if mask is None:
            return None
        if maker.kind == "Split":
            return mask, maker.outputs.index(last)
        value = self.value(maker.inputs[1])
        return None if value is None or value.size != 1 else (mask, int(value.reshape(-1)[0]))

    def _followed(self, name: str, kinds: Sequence[str]) -> Node | None:
        """The node that made a tensor, in front of nodes of some kinds; `_last` is then the name of its result."""
        maker = self.makers.get(name)
        while maker is not None and maker.kind in kinds:
            name = maker.inputs[0]
            maker = self.makers.get(name)
        self._last = name
        return maker

    def value(self, name: str) -> Any:
        """The value of a small constant; None for any other tensor."""
        if name in self.stored:
            return self.stored[name].value
        maker = self.makers.get(name)
        given = maker.attributes.get("value") if maker is not None and maker.kind == "Constant" else None
        return None if given is None else small_value(given)

    def is_zero(self, name: str) -> bool:
        """Whether a tensor is a constant of zeros, maybe behind views."""
        maker = self._followed(name, _SAME)
        if maker is None:
            return self._last in self.tensors and _holds_zeros(self.tensors[self._last])
        given = maker.attributes.get("value")
        if maker.kind == "ConstantOfShape":
            return given is None or _holds_zeros(given)
        return maker.kind == "Constant" and given is not None and _holds_zeros(given)


def _holds_zeros(tensor: Any) -> bool:
    """Whether all elements of a tensor (protobuf) are zero; of a stripped one, whether they were equal."""
    if not has_data(tensor):
        return metadata(tensor).get(FILLED_KEY) == "1"
    return not numpy_helper.to_array(tensor).any()


def _chosen(node: Node, places: Places) -> Node | None:
    """A ScatterND at all places of a mask as a choice by the mask; None for any other node."""
    if node.kind != "ScatterND" or node.attributes.get("reduction", "none") not in ("none", b"none"):
        return None
    data, indices, updates = node.inputs
    found = places.mask(indices)
    if found is None:
        return None
    mask, dims = found
    value = places.scalar(updates)
    if value is None:
        return None
    inputs = [mask, value, data]
    return Node(MASKED, inputs, node.outputs, {"dims": dims}, node.name, node.scope, node.opset, label=node.label)
