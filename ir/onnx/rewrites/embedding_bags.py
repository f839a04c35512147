"""The loop of an `nn.EmbeddingBag`, read as one look-up and one reduction."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ir.build import GraphBuilder
from ir.errors import refuse
from ir.onnx.readers.nodes import Node


def add_bags(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds bags of equal size: `[(b rows), ...]` is viewed as `[b, rows, ...]` and reduced over the rows.

    Args:
        builder: builder of the graph.
        node: node of kind `BAGS` with the attribute `reduction`, the kind that reduces.
        inputs: names in the builder of rows, offsets and, where the rows are places to look up, the table.

    Raises:
        ModelError: the bags have different or unknown sizes.
    """
    rows, offsets = builder.tensors.get(inputs[0]), builder.values.get(inputs[1])
    starts = [] if offsets is None or rows is None else [int(v) for v in offsets.reshape(-1)]
    total = rows.shape_at(builder.export_batch)[0] if rows is not None and rows.shape else 0
    starts = [v for v in starts if v < total]
    size = total // len(starts) if starts else 0
    if rows is None or not starts or starts != list(range(0, total, size)) or size * len(starts) != total:
        repair = "Export with bags of equal size: `[batch, places]` without offsets."
        raise refuse("an embedding bag has bags of different or unknown sizes", node.name or node.outputs[0], repair)
    out, scope = node.outputs[0], node.scope
    entry = f"{out}#bags"
    builder.constant(f"{out}#shape", np.asarray([len(starts), size, *rows.shape[1:]]))
    builder.add("Reshape", [inputs[0], f"{out}#shape"], [entry], name=f"{node.name}#bags", scope=scope)
    if len(inputs) > 2:
        builder.add("Gather", [inputs[2], entry], [f"{out}#rows"], name=f"{node.name}#rows", scope=scope)
        entry = f"{out}#rows"
    kind = str(node.attributes["reduction"])
    builder.add(kind, [entry], [out], name=node.name, scope=scope, attributes={"axes": (1,), "keepdims": 0}, opset=18)
