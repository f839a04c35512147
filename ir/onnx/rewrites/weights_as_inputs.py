"""Tells weights from data in files that store no weights, and whose exporter did not mark them.

ONNX Runtime's training tools write such files: each parameter is an input of the graph. What is read where operators
have their weights is a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ir.onnx.readers.nodes import Declared, Node

WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (1, 2), "MatMul": (1,), "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2), "GroupNormalization": (1, 2),
    "RMSNormalization": (1,), "SimplifiedLayerNormalization": (1,), "PRelu": (1,), "LSTM": (1, 2, 3),
    "GRU": (1, 2, 3), "RNN": (1, 2, 3),
}  # fmt: skip
"""Kind -> positions of the operands that are weights in nearly every file."""
STATISTICS = (3, 4)
"""Positions of the running statistics of BatchNormalization, which are not trained."""
VECTORS: Mapping[str, tuple[int, ...]] = {"Add": (0, 1), "Mul": (0, 1)}
"""Kind -> positions in which an operand of one dim is a bias or a scale."""
VIEWS = ("Transpose", "Cast", "Identity")
"""Kinds through which weights are followed."""


def mark_read_weights(nodes: Iterable[Node], inputs: Mapping[str, Declared]) -> None:
    """Marks the inputs of a file that are read as weights.

    Args:
        nodes: nodes of a file without stored weight matrices.
        inputs: its inputs; the marks of those that are weights or statistics are set, unless no data would be left.
    """
    held = {
        name: declared.shape
        for name, declared in inputs.items()
        if declared.dtype.startswith(("float", "bfloat")) and declared.shape and all(map(_is_size, declared.shape))
    }
    same = {name: name for name in held}
    weights, statistics, vectors = dict[str, None](), set[str](), dict[str, None]()
    for node in nodes:
        if node.kind in VIEWS and node.inputs[0] in same:
            same[node.outputs[0]] = same[node.inputs[0]]
        for i, given in enumerate(node.inputs):
            name = same.get(given, "")
            if not name:
                continue
            if i in WEIGHTS.get(node.kind, ()) and (node.kind != "MatMul" or len(held[name]) == 2):
                weights[name] = None
            elif node.kind == "BatchNormalization" and i in STATISTICS:
                statistics.add(name)
            elif i in VECTORS.get(node.kind, ()) and len(held[name]) == 1:
                vectors[name] = None
            elif node.kind == "Gather" and i == 0 and len(held[name]) == 2:
                weights[name] = None
    found = weights | vectors
    if not any(len(held[name]) > 1 for name in weights) or found.keys() | statistics == inputs.keys():
        return
    for name in found.keys() | statistics:
        inputs[name].kind = "BUFFER" if name in statistics else "PARAMETER"
        inputs[name].is_read_as_weight = True


def _is_size(size: int | str) -> bool:
    return isinstance(size, int)
