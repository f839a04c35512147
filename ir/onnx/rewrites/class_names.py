"""Leaves out what names the classes of a classifier, as skl2onnx appends it to the networks of scikit-learn.

Such files return the name of the most probable class, looked up by operators of ai.onnx.ml, and the probabilities as a
map from names of classes (`ZipMap`). No gradient trains either of them: the network ends with the probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence

from ir.onnx.readers.nodes import Node
from ir.repairs import CLASSICAL

MAP_OF_CLASSES = f"{CLASSICAL}ZipMap"
NAMING = (f"{CLASSICAL}ArrayFeatureExtractor", f"{CLASSICAL}LabelEncoder", MAP_OF_CLASSES)
"""Kinds that look up the names of classes."""


def without_class_names(nodes: Sequence[Node], outputs: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Removes the names of classes from the outputs of a file.

    Args:
        nodes: the nodes of the file.
        outputs: names of its outputs.

    Returns:
        the outputs, with the probabilities in place of a map of them, and a warning that names those that were removed;
        the outputs unchanged if none of them names classes, or if nothing else would be left.
    """
    if not any(node.kind in NAMING for node in nodes):
        return list(outputs), ()
    made = {name: node for node in nodes for name in node.outputs}
    kept: dict[str, None] = {}
    removed: list[str] = []
    for name in outputs:
        node = made.get(name)
        if node is not None and node.kind == MAP_OF_CLASSES:
            kept[node.inputs[0]] = None
            removed.append(name)
        elif _is_name(name, made):
            removed.append(name)
        else:
            kept[name] = None
    if not removed or not kept:
        return list(outputs), ()
    text = f"what names the classes ({', '.join(removed[:3])}) is left out: the network ends with {next(iter(kept))}"
    return list(kept), (text,)


def _is_name(name: str, made: dict[str, Node]) -> bool:
    """Whether a tensor is the name of a class, through nodes of one operand that convert or view it."""
    seen = set[str]()
    while name in made and name not in seen:
        seen.add(name)
        node = made[name]
        if node.kind in NAMING:
            return True
        if node.kind not in ("Cast", "Reshape", "Identity", "Squeeze", "Unsqueeze", "Flatten"):
            return False
        name = node.inputs[0]
    return False
