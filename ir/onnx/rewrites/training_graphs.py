"""Takes the network out of a training graph, which also computes gradients and updates of weights.

Such files come from ONNX Runtime's training tools (`training_model.onnx`), or have operators of ONNX's preview of
training. AutoMAP derives the backward pass from the network, so that gradients in the file would count twice.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.errors import refuse
from ir.onnx.readers.nodes import Node

PREVIEW = "ai.onnx.preview.training."
"""Prefix of ONNX's operators for gradients and optimizers."""
CONTRIBUTED = "com.microsoft."
UPDATES = ("InPlaceAccumulator", "AdamOptimizer", "AdamWOptimizer", "LambOptimizer", "SGDOptimizer", "ZeroGradient",
           "LazyReset", "MixedPrecisionScale", "ReduceAllL2")  # fmt: skip
"""Beginnings of the names of ONNX Runtime's kinds that use gradients (orttraining's training_op_defs.cc, 1.19)."""


def without_gradients(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Removes gradients, and what is computed from them, from the outputs of a file.

    Args:
        nodes: the nodes of the file.
        outputs: names of its outputs.

    Returns:
        the outputs that the forward pass computes, and a warning; the outputs unchanged if no node computes gradients.

    Raises:
        ModelError: no output is computed by the forward pass.
    """
    if not any(map(_is_backward, nodes)):
        return list(outputs), ()
    backward = _behind_gradients(nodes)
    kept = [name for name in outputs if name not in backward]
    if not kept:
        raise refuse(
            "the file is a training graph whose outputs are all gradients or updates",
            outputs[0] if outputs else "no outputs",
            "Hand in the network itself, as the exporter wrote it before gradients were added.",
        )
    if len(kept) == len(outputs):
        return kept, ()
    text = "the file is a training graph: gradients and updates are left out, since the price adds the backward pass"
    return kept, (f"{text} to the network that computes {', '.join(kept[:3])}",)


def _is_backward(node: Node) -> bool:
    """Whether a node computes gradients or updates."""
    name = node.kind.removeprefix(CONTRIBUTED)
    is_contributed = name != node.kind and (name.endswith("Grad") or "Gradient" in name or name.startswith(UPDATES))
    return is_contributed or node.kind.startswith(PREVIEW)


def _behind_gradients(nodes: Sequence[Node]) -> set[str]:
    """The gradients and updates of a file, and all tensors that are computed from them."""
    readers: dict[str, list[Node]] = {}
    for node in nodes:
        for name in node.inputs:
            readers.setdefault(name, []).append(node)
    pending = [name for node in nodes if _is_backward(node) for name in node.outputs if name]
    found = set(pending)
    while pending:
        for node in readers.get(pending.pop(), ()):
            fresh = [name for name in node.outputs if name and name not in found]
            found.update(fresh)
            pending += fresh
    return found
