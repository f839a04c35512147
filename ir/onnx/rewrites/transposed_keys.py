"""Keys that PyTorch's exporter turns for attention in three dims, turned in four.

Its scaled dot product attention views keys `[b, h, s, d]` as `[(b h), s, d]`, turns the last two dims, and views them
back as `[b, h, d, s]`. Heads that are merged with the batch could not be split, and where keys are repeated for groups
of queries a simplifier joins the first view with the one before it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from ir.onnx.readers.nodes import Node, Stored


def turned_apart(nodes: list[Node], stored: dict[str, Stored]) -> list[Node]:
    """Turns keys with the dims of batch and heads apart.

    Args:
        nodes: all nodes of a file; those that are kept are changed in place.
        stored: the constants of the file; the shapes of new views are added.

    Returns:
        the nodes without the views back.
    """
    uses = Counter(name for node in nodes for name in node.inputs)
    makers = {name: node for node in nodes for name in node.outputs}
    dropped: set[int] = set()
    for back in nodes:
        turn = makers.get(back.inputs[0]) if back.kind == "Reshape" else None
        view = makers.get(turn.inputs[0]) if turn is not None and turn.kind == "Transpose" else None
        if turn is None or view is None or view.kind != "Reshape":
            continue
        merged, whole = _shape(view, stored), _shape(back, stored)
        once = uses[turn.outputs[0]] == uses[view.outputs[0]] == 1
        if (
            once
            and len(merged) == 3
            and len(whole) == 4
            and tuple(turn.attributes.get("perm", ())) == (0, 2, 1)
            and min(*merged[1:], *whole) > 0
            and whole[2:] == merged[:0:-1]
        ):
            name = f"{view.outputs[0]}#shape"
            stored[name] = Stored((4,), "int64", np.array((*whole[:2], *merged[1:]), dtype=np.int64))
            view.inputs[1] = name
            turn.attributes["perm"] = (0, 1, 3, 2)
            turn.outputs[:] = back.outputs
            dropped.add(id(back))
    return [node for node in nodes if id(node) not in dropped]


def _shape(view: Node, stored: dict[str, Stored]) -> tuple[int, ...]:
    """The target of a Reshape; empty where it is no stored constant."""
    given = stored.get(view.inputs[1]) if len(view.inputs) > 1 else None
    value = None if given is None else given.value
    return () if value is None else tuple(int(size) for size in np.asarray(value).reshape(-1))
