"""Which tensors of a file are parameters, buffers or constants.

Exporters of PyTorch 2 mark them in metadata; elsewhere the operand positions in which a tensor is read decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from ir.graph import TensorRole
from ir.onnx.readers.nodes import Source, Stored

WEIGHT_POSITIONS: Mapping[str, Sequence[int]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (0, 1, 2), "MatMul": (0, 1), "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2), "GroupNormalization": (1, 2),
    "RMSNormalization": (1,), "SkipLayerNormalization": (2, 3, 4), "PRelu": (1,), "Gather": (0,), "LSTM": (1, 2, 3),
    "GRU": (1, 2, 3), "RNN": (1, 2, 3), "Mul": (0, 1), "Add": (0, 1), "Sub": (0, 1), "Div": (0, 1),
    "Unsqueeze": (0,), "Reshape": (0,), "Transpose": (0,), "Identity": (0,), "Concat": tuple(range(64)), "Cast": (0,),
    "Expand": (0,), "Slice": (0,), "Split": (0,), "Einsum": (0, 1),
    "#Bags": (2,),
}  # fmt: skip
"""Operand positions, by kind, in which a stored float tensor is taken for a parameter."""
RUNNING_STATISTICS = (3, 4)
"""Operand positions of BatchNormalization whose tensors are updated without a gradient."""


def roles_without_metadata(source: Source) -> dict[str, TensorRole]:
    """Roles of the stored tensors of a file whose exporter marked none.

    A float tensor of two or more elements in a weight position is a parameter; running statistics are buffers. A file
    that was stripped of its weights may hold each as a `ConstantOfShape` of a stored shape (the light models of the
    onnx package do), so that the results of such operators have roles too.

    Returns:
        tensor name -> role; a tensor that is not listed is a constant.
    """
    filled = {
        node.outputs[0]
        for node in source.nodes
        if node.kind == "ConstantOfShape"
        and node.inputs
        and node.inputs[0] in source.stored
        and ("value" not in node.attributes or node.attributes["value"].data_type in (1, 10, 11, 16))
    }
    roles: dict[str, TensorRole] = {}
    for node in source.nodes:
        for i, name in enumerate(node.inputs):
            stored = source.stored.get(name)
            is_float = name in filled or (stored is not None and stored.dtype.startswith(("float", "bfloat")))
            if not is_float:
                continue
            if node.kind == "BatchNormalization" and i in RUNNING_STATISTICS:
                roles[name] = "buffer"
            elif i in WEIGHT_POSITIONS.get(node.kind, ()) and (
                stored is None or prod(stored.shape) > 1 or (source.names_state and not name.startswith("onnx::"))
            ):
                roles.setdefault(name, "parameter")
    return roles


def stored_role(name: str, stored: Stored, guess: Mapping[str, TensorRole], parameters: Sequence[str]) -> TensorRole:
    """The role of one stored tensor.

    Args:
        name: name of the tensor.
        stored: its record.
        guess: result of `roles_without_metadata`; empty where the exporter marked the parameters.
        parameters: the user's globs over the names of parameters, which override everything else.
    """
    if any(fnmatchcase(name, pattern) for pattern in parameters) or stored.kind == "PARAMETER":
        return "parameter"
    return "buffer" if stored.kind == "BUFFER" else guess.get(name, "constant")
