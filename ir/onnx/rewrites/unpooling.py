"""Recognises max unpooling, which puts the elements of a pooled image back to where its windows had their maxima.

PyTorch's newer exporter writes `nn.MaxUnpool2d` as a `ScatterND` into zeros of all samples and channels in one dim, at
the indices that a `MaxPool` returns. These count the elements of all samples and channels, so that neither operator can
be split. If nothing but unpooling reads the indices, they are replaced by indices within one channel of one sample,
which are independent of all other channels and samples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ir.onnx.readers.nodes import Declared, Node, Stored
from ir.onnx.readers.order import needed

WITHIN = "within_channels"
"""Attribute of MaxPool and MaxUnpool: whether indices count the elements of one channel of one sample."""
ADDING = frozenset({"Add", "Sub", "Reshape", "Unsqueeze", "Cast", "Identity"})
"""Kinds that make indices of the whole image from those of a MaxPool."""


def with_unpooling(
    nodes: list[Node], stored: Mapping[str, Stored], declared: Mapping[str, Declared], outputs: Sequence[str]
) -> list[Node]:
    """The nodes with a MaxUnpool in place of each scatter that unpools, and with indices that count within channels.

    Args:
        nodes: nodes of the file.
        stored: stored tensors, among them the sizes of unpooled images.
        declared: declarations of inner tensors, which have these sizes where the file computes them.
        outputs: names of the outputs.
    """
    pools = {node.outputs[1]: node for node in nodes if node.kind == "MaxPool" and len(node.outputs) > 1}
    if not pools:
        return nodes
    made = {name: node for node in nodes for name in node.outputs}
    found = []
    for node in nodes:
        output, view = node.outputs[0], stored.get(node.inputs[1]) if node.kind == "Reshape" else None
        shape = declared[output].shape if output in declared else None
        if view is not None and view.value is not None:
            shape = tuple(int(size) for size in view.value.reshape(-1))
        found.append(_unpooled(node, shape or (), made, pools, stored) or node)
    found = found if all(a is b for a, b in zip(found, nodes, strict=True)) else needed(found, outputs)
    elsewhere = {
        name
        for node in found
        for i, name in enumerate(node.inputs)
        if name in pools and not (node.kind == "MaxUnpool" and i == 1)
    }
    own = {name for node in found if node.kind == "MaxUnpool" for name in node.inputs[1:2]}
    within = (own & pools.keys()) - elsewhere - set(outputs)
    return [
        replace(node, attributes=node.attributes | {WITHIN: 1})
        if (node.kind == "MaxUnpool" and node.inputs[1] in within) or not within.isdisjoint(node.outputs)
        else node
        for node in found
    ]


def _unpooled(
    node: Node, shape: Sequence[int | str], made: Mapping[str, Node], pools: Collection[str], stored: Collection[str]
) -> Node | None:
    """The MaxUnpool in place of a view of such a scatter; None for any other node.

    Args:
        node: the node.
        shape: shape of its result as far as it is known.
        made: name of a tensor -> the node that computes it.
        pools: names of the indices that MaxPools return.
        stored: names of the stored tensors.
    """
    scatter = made.get(node.inputs[0]) if node.kind == "Reshape" else None
    if scatter is None or scatter.kind != "ScatterND" or len(shape) < 3:
        return None
    zeros, places, values = scatter.inputs[:3]
    index, pooled = _index(places, made, pools), made.get(values)
    sizes = [size for size in shape[2:] if isinstance(size, int) and size > 0]
    if not index or pooled is None or pooled.kind != "Reshape" or len(sizes) < len(shape) - 2:
        return None
    if zeros in made and made[zeros].kind == "Reshape":
        zeros = made[zeros].inputs[0]
    # Tools that fold constants store the zeros.
    if zeros not in stored and (zeros not in made or made[zeros].kind != "ConstantOfShape"):
        return None
    return replace(
        scatter, kind="MaxUnpool", inputs=[pooled.inputs[0], index], outputs=node.outputs[:1],
        attributes={"target": tuple(sizes)},
    )  # fmt: skip


def _index(name: str, made: Mapping[str, Node], pools: Collection[str]) -> str:
    """The indices of a MaxPool from which those of a scatter are computed; empty if there are none."""
    pending, seen = [name], {name}
    while pending:
        current = pending.pop()
        if current in pools:
            return current
        node = made.get(current)
        if node is not None and node.kind in ADDING:
            before = node.inputs[1:2] * (node.kind == "Add") + node.inputs[:1]
            pending += [each for each in before if each not in seen]
            seen.update(before)
    return ""
