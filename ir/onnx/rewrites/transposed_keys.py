"""Transposed keys of attention, with the batch and the heads as separate dims.

For scaled dot product attention PyTorch's exporter views keys `[b, h, s, d]` as `[(b h), s, d]`, transposes the last
two dims, and views the result as `[b, h, d, s]`. Heads that are merged with the batch could not be split. And where
keys are repeated for groups of queries, a simplifier joins the first view with the view before it. Here the two views
are replaced by a transpose of four dims.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ir.onnx.readers.nodes import Node, Stored


def separate_batch_and_heads(nodes: list[Node], stored: dict[str, Stored]) -> list[Node]:
    """Transposes keys with batch and heads as separate dims.

    Args:
        nodes: all nodes of a file; those that are kept are changed in place.
        stored: the constants of the file; the shapes of new views are added.

    Returns:
        The nodes without the second views.
    """
    uses = Counter(name for node in nodes for name in node.inputs)
    makers = {name: node for node in nodes for name in node.outputs}
    dropped: set[int] = set()
    for back in nodes:
        transpose = makers.get(back.inputs[0]) if back.kind == "Reshape" else None
        view = makers.get(transpose.inputs[0]) if transpose is not None and transpose.kind == "Transpose" else None
        if transpose is None or view is None or view.kind != "Reshape":
            continue
        merged, whole = _shape(view, stored), _shape(back, stored)
        have_one_reader = uses[transpose.outputs[0]] == uses[view.outputs[0]] == 1
        if (
            have_one_reader
            and len(merged) == 3
            and len(whole) == 4
            and tuple(transpose.attributes.get("perm", ())) == (0, 2, 1)
            and min(*merged[1:], *whole) > 0
            and whole[2:] == merged[:0:-1]
        ):
            name = f"{view.outputs[0]}#shape"
            stored[name] = Stored((4,), "int64", np.array((*whole[:2], *merged[1:]), dtype=np.int64))
            view.inputs[1] = name
            transpose.attributes["perm"] = (0, 1, 3, 2)
            transpose.outputs[:] = back.outputs
            dropped.add(id(back))
    return [node for node in nodes if id(node) not in dropped]


def _shape(view: Node, stored: dict[str, Stored]) -> tuple[int, ...]:
    """The target of a Reshape; empty where it is not a stored constant."""
    given = stored.get(view.inputs[1]) if len(view.inputs) > 1 else None
    value = None if given is None else given.value
    return () if value is None else tuple(int(size) for size in np.asarray(value).reshape(-1))
