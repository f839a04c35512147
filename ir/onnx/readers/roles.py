"""Determines which tensors of a file are parameters, buffers or constants.

The exporters of PyTorch 2 mark them in metadata. In other files the role of a tensor follows from the operand positions
in which it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod

from ir.graph import TensorRole
from ir.onnx.readers.control_flow import LOOPS
from ir.onnx.readers.nodes import COMPUTED, Node, Source, Stored, dtype_name, is_common_buffer, small_value

WEIGHT_POSITIONS: Mapping[str, Sequence[int]] = {
    "Conv": (1, 2), "ConvTranspose": (1, 2), "Gemm": (0, 1, 2), "MatMul": (0, 1), "FusedMatMul": (0, 1),
    "BatchNormalization": (1, 2), "InstanceNormalization": (1, 2), "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "RMSNormalization": (1,), "SimplifiedLayerNormalization": (1,), "PRelu": (1,), "Gather": (0,), "LSTM": (1, 2, 3),
    "GRU": (1, 2, 3), "RNN": (1, 2, 3), "DeformConv": (1, 3), "Mul": (0, 1), "Add": (0, 1), "Sub": (0, 1),
    "Div": (0, 1), "Concat": tuple(range(64)), "Einsum": tuple(range(64)), "#Bags": (2,),
} | dict.fromkeys(
    ("Unsqueeze", "Reshape", "Transpose", "Identity", "Cast", "Expand", "Slice", "Split", "Squeeze", "Flatten", "Tile",
     "Exp", "Neg", "Log", "Abs", "Sqrt", "Sigmoid", "Tanh", "Softplus", "Relu", "Softmax", "Clip", "Pow", "ReduceSum",
     "ReduceMean", "ReduceL2", "LpNormalization", "GatherElements", "GatherND", "Resize"), (0,)
)  # fmt: skip
"""Kind -> operand positions in which a stored float tensor is assumed to be a parameter; for kinds outside the standard
domain, these are all positions."""
MATRIX_POSITIONS = {
    kind: WEIGHT_POSITIONS[kind]
    for kind in ("Conv", "ConvTranspose", "Gemm", "MatMul", "FusedMatMul", "LSTM", "GRU", "RNN")
}
"""Kind -> operand positions of weight matrices, of which every model has some."""
ALWAYS_WEIGHTS = frozenset(MATRIX_POSITIONS) | {
    "BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization", "PRelu", "DeformConv",
}  # fmt: skip
"""Kinds for which tensors of a single element in weight positions are weights as well, such as a bias of one channel.
For other kinds, such a tensor may be any constant."""
NORMS = frozenset({"LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization",
                   "SimplifiedLayerNormalization"})  # fmt: skip
"""Normalisations, whose operand 1 is a scale."""
LEARNED_DATA = NORMS | {"Conv", "ConvTranspose", "GridSample", "Gelu", "Swish", "Reciprocal", "LeakyRelu", "Elu",
                        "ReduceMax"}  # fmt: skip
"""Kinds whose operand 0, usually an activation, is a parameter if it is stored in the file: for instance DeBERTa's
embeddings of relative positions, which are normalised, the learned input of a generator, or feature planes."""
_MADE = re.compile(r"onnx::|/|_?val_\d+$|scalar_tensor")
"""Beginnings of the names that PyTorch's exporters give to results of operators. A stored tensor with such a name was
computed by another tool, and is not a parameter of the module."""
_NUMBERED = re.compile(r"_?val_\d+(_token_\d+|#\d+)*$")
"""Names that PyTorch's newer exporter gives to literals and to transposed weights. Scale and shift of a norm are never
transposed, so that tensors with such names there are the ones and zeros of a norm without parameters."""
_WRITTEN_OUT = re.compile(r"/(.*/)?Constant(_\d+)?_output_\d+(_quantized|_token_\d+|#\d+)*$")
"""Names of constants that PyTorch's older exporter writes as nodes and other tools store like weights: for instance the
ones of a norm without parameters, or the frequencies of a time embedding."""
WEIGHTS = re.compile(r"(?i)\.|weight|bias")
"""Pattern in the names of unmarked parameters of a file that marks others: dots as in module paths, or names that tools
give to converted weights, such as `NhwcConv_0_weight_NHWC`. Names of operator results do not match it."""
RUNNING_STATISTICS = (3, 4)
"""Operand positions of BatchNormalization whose tensors are updated without a gradient."""


def roles_without_metadata(source: Source) -> dict[str, TensorRole]:
    """Roles of the tensors of a file whose exporter marked no parameters.

    A stored float tensor in a weight position is a parameter if it has two or more elements, or if the kind is one of
    `ALWAYS_WEIGHTS`; running statistics are buffers. A file without weights may contain a `ConstantOfShape` in place of
    each (as do the light models of the onnx package), and then the results of these operators have roles, too. In files
    with weights, such results are constants.

    Returns:
        tensor name -> role; a tensor that is not listed is a constant.
    """
    nodes, held = _with_branches(source.nodes, source.stored)
    is_stored = holds_weights(nodes, held)
    filled = {
        node.outputs[0]
        for node in nodes
        if not is_stored
        and node.kind == "ConstantOfShape"
        and node.inputs
        and node.inputs[0] in source.stored
        and ("value" not in node.attributes or node.attributes["value"].data_type in (1, 10, 11, 16))
    }
    roles: dict[str, TensorRole] = {}
    # A module that was frozen before export has its weights in such constants, too.
    has_names = any(name in held and not _WRITTEN_OUT.match(name) for name in _matrices(nodes))
    # A quantised weight is read through an Identity, which replaces its dequantisation.
    same = {node.outputs[0]: node.inputs[0] for node in nodes if node.kind == "Identity" and node.inputs}
    for node in nodes:
        positions = WEIGHT_POSITIONS.get(node.kind, ())
        if "." in node.kind:
            positions = range(len(node.inputs))
        for i, given in enumerate(node.inputs):
            name = same.get(given, given)
            stored = held.get(name)
            if name not in filled and (stored is None or not _is_float(stored) or stored.kind == COMPUTED):
                continue
            if has_names and _WRITTEN_OUT.match(name):
                continue
            if i > 0 and node.kind in NORMS and source.names_state and _NUMBERED.match(name):
                continue
            is_state = (source.names_state or source.has_metadata) and is_common_buffer(name)
            if is_state or (node.kind == "BatchNormalization" and i in RUNNING_STATISTICS):
                roles[name] = "buffer"
            elif (i == 0 and node.kind in LEARNED_DATA and (stored is None or prod(stored.shape) > 1)) or (
                i in positions
                and (
                    stored is None
                    or prod(stored.shape) > 1
                    or (stored.shape and node.kind in ALWAYS_WEIGHTS)
                    or (source.names_state and not _MADE.match(name))
                )
            ):
                roles.setdefault(name, "parameter")
    return roles


def unmarked_roles(source: Source) -> dict[str, TensorRole]:
    """Roles of the tensors of a file that its exporter did not mark.

    In a file that marks parameters, these are stored tensors that the exporter's optimiser or another tool has
    converted, so that they have lost their mark.

    Returns:
        tensor name -> role; a tensor that is not listed has its mark, or is a constant.
    """
    roles = roles_without_metadata(source)
    if source.has_metadata:
        return {n: role for n, role in roles.items() if WEIGHTS.search(n) and n in source.stored}
    return roles


def _matrices(nodes: Iterable[Node]) -> set[str]:
    """Names of the tensors that are read in the positions of weight matrices."""
    return {node.inputs[i] for node in nodes for i in MATRIX_POSITIONS.get(node.kind, ()) if i < len(node.inputs)}


def holds_weights(nodes: Iterable[Node], stored: Mapping[str, Stored]) -> bool:
    """Whether a weight matrix is among the stored tensors."""
    given = [stored[name] for name in _matrices(nodes) & stored.keys()]
    return any(_is_float(each) and len(each.shape) > 1 for each in given)


def _is_float(stored: Stored) -> bool:
    return stored.dtype.startswith(("float", "bfloat"))


def _with_branches(nodes: Iterable[Node], stored: Mapping[str, Stored]) -> tuple[list[Node], dict[str, Stored]]:
    """The nodes and stored tensors, including those of all branches and of one iteration of each loop."""
    every, held = [], dict(stored)
    for node in nodes:
        every.append(node)
        for branch in node.attributes.values() if node.kind == "If" else ():
            inner, own = _with_branches(*branch.read())
            every += inner
            held |= own
        if node.kind in LOOPS:
            body = node.attributes["body"]
            inner, own = _with_branches(body.read(_handed(node), 0)[0], body.stored)
            every += inner
            held |= own
    return every, held


def _handed(node: Node) -> list[str]:
    """Names of the operands of a loop's body, through which it may read weights of the enclosing graph.

    Sliced operands and state that the body does not change have the names of the enclosing graph. State that changes
    has the names of the body, since its initial values are not weights.
    """
    body = node.attributes["body"]
    given = [outer or own for outer, own in zip(node.inputs, body.operands, strict=False)]
    nodes, results = body.read(given, 0)
    same = {each.outputs[0]: each.inputs[0] for each in nodes if each.kind == "Identity" and each.inputs}
    # The operands of a Loop are its trip count, its condition and the state; its body returns the condition first.
    first, skipped = (2, 1) if node.kind == "Loop" else (0, 0)
    num_states = len(given) - first - int(node.attributes.get("num_scan_inputs", 0))
    for i in range(first, first + num_states):
        result = results[i - first + skipped]
        while result in same and result != given[i]:
            result = same[result]
        if result != given[i]:
            given[i] = body.operands[i]
    return given


def with_stored_constants(nodes: list[Node], stored: dict[str, Stored]) -> list[Node]:
    """Moves the float tensors of Constant nodes to the stored tensors, if the weights of a file are in such nodes.

    Some exporters write no initializers, and a module that was frozen before its export has none. If initializers
    contain weights, Constant nodes are true constants.

    Args:
        nodes: the nodes of the file.
        stored: the stored tensors, to which those of the nodes are added.

    Returns:
        the remaining nodes.
    """
    held = {
        node.outputs[0]: node.attributes["value"]
        for node in nodes
        if node.kind == "Constant" and node.outputs and "value" in node.attributes
    }
    held = {n: t for n, t in held.items() if prod(t.dims) > 1 and dtype_name(t.data_type).startswith(("float", "bfl"))}
    if holds_weights(nodes, stored) or not any(len(held[n].dims) > 1 for n in _matrices(nodes) & held.keys()):
        return nodes
    for name, tensor in held.items():
        stored[name] = Stored(tuple(tensor.dims), dtype_name(tensor.data_type), small_value(tensor))
    return [node for node in nodes if not (node.kind == "Constant" and node.outputs and node.outputs[0] in held)]


def stored_role(name: str, stored: Stored, guess: Mapping[str, TensorRole], parameters: Sequence[str]) -> TensorRole:
    """The role of one stored tensor.

    Args:
        name: name of the tensor.
        stored: its record.
        guess: result of `roles_without_metadata`; empty if the exporter marked the parameters.
        parameters: the user's globs that match names of parameters, which override everything else.
    """
    if any(fnmatchcase(name, pattern) for pattern in parameters) or stored.kind == "PARAMETER":
        return "parameter"
    if stored.kind == "CONSTANT_TENSOR":
        return "constant"  # a plain tensor among the attributes of a module, whatever its name
    return "buffer" if stored.kind == "BUFFER" else guess.get(name, "constant")
