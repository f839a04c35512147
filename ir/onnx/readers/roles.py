"""Which tensors of a file are parameters, buffers or constants.

Exporters of PyTorch 2 mark them in metadata; elsewhere the operand positions in which a tensor is read decide.
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
"""Operand positions, by kind, in which a stored float tensor is taken for a parameter. Outside the standard
domain it is one in every position."""
MATRIX_POSITIONS = {
    kind: WEIGHT_POSITIONS[kind]
    for kind in ("Conv", "ConvTranspose", "Gemm", "MatMul", "FusedMatMul", "LSTM", "GRU", "RNN")
}
"""Positions that hold the weights of which every model has some."""
ALWAYS_WEIGHTS = frozenset(MATRIX_POSITIONS) | {
    "BatchNormalization", "InstanceNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization",
    "SimplifiedLayerNormalization", "PRelu", "DeformConv",
}  # fmt: skip
"""Kinds whose weight positions hold weights also where these are of one element, such as a bias of one channel; one
element in the position of another kind may be any number."""
NORMS = frozenset({"LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization",
                   "SimplifiedLayerNormalization"})  # fmt: skip
"""Kinds with a scale after their operand."""
LEARNED_DATA = NORMS | {"Conv", "ConvTranspose", "GridSample", "Gelu", "Swish", "Reciprocal", "LeakyRelu", "Elu",
                        "ReduceMax"}  # fmt: skip
"""Kinds whose operand 0, which is data otherwise, is a parameter where it is stored: DeBERTa's embeddings of relative
places, which are normalised, the image that a generator begins with, planes of features."""
_MADE = re.compile(r"onnx::|/|_?val_\d+$|scalar_tensor")
"""Beginnings of the names that PyTorch's exporters give to the results of operators: where a later tool stored such a
result in the file, it is no parameter of the module."""
_NUMBERED = re.compile(r"_?val_\d+(_token_\d+|#\d+)*$")
"""Names that PyTorch's newer exporter gives to literals, and to weights that it transposed for a product. The scale and
shift of a norm are never transposed: what has such a name there are the ones and zeros of a norm without parameters."""
_WRITTEN_OUT = re.compile(r"/(.*/)?Constant(_\d+)?_output_\d+(_quantized|_token_\d+|#\d+)*$")
"""Names of the constants that PyTorch's older exporter writes as nodes, and that later tools store beside the weights:
scales of ones of a norm without any, frequencies of an embedding of time."""
RUNNING_STATISTICS = (3, 4)
"""Operand positions of BatchNormalization whose tensors are updated without a gradient."""


def roles_without_metadata(source: Source) -> dict[str, TensorRole]:
    """Roles of the stored tensors of a file whose exporter marked none.

    A float tensor of two or more elements in a weight position is a parameter, and one of a single element where
    nothing but weights stand; running statistics are buffers. A file that was stripped of its weights may hold each as
    a `ConstantOfShape` of a stored shape (the light models of the onnx package do), so that the results of such
    operators have roles too. Where weights are stored, they are zeros.

    Returns:
        tensor name -> role; a tensor that is not listed is a constant.
    """
    nodes, held = _with_branches(source.nodes, source.stored)
    is_stored = _holds_weights(nodes, held)
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
    # A module that was frozen has its weights in such constants too.
    has_names = any(name in held and not _WRITTEN_OUT.match(name) for name in _matrices(nodes))
    # A quantised weight is read through an Identity, in place of the operator that makes it floats.
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


def _matrices(nodes: Iterable[Node]) -> set[str]:
    """Names of the tensors that are read as matrices of weights."""
    return {node.inputs[i] for node in nodes for i in MATRIX_POSITIONS.get(node.kind, ()) if i < len(node.inputs)}


def _holds_weights(nodes: Iterable[Node], stored: Mapping[str, Stored]) -> bool:
    """Whether a matrix of weights is among the stored tensors."""
    given = [stored[name] for name in _matrices(nodes) & stored.keys()]
    return any(_is_float(each) and len(each.shape) > 1 for each in given)


def _is_float(stored: Stored) -> bool:
    return stored.dtype.startswith(("float", "bfloat"))


def _with_branches(nodes: Iterable[Node], stored: Mapping[str, Stored]) -> tuple[list[Node], dict[str, Stored]]:
    """The nodes and stored tensors, with those of branches and of one iteration of loops among them."""
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
    """The operands of a loop's body as weights may be handed to it: what is sliced, and state that it leaves as it is.

    State that changes begins with numbers that are no weights; it has the names of the body.
    """
    body = node.attributes["body"]
    given = [outer or own for outer, own in zip(node.inputs, body.operands, strict=False)]
    nodes, results = body.read(given, 0)
    same = {each.outputs[0]: each.inputs[0] for each in nodes if each.kind == "Identity" and each.inputs}
    # A Loop has its number and its condition in front of the state, and the condition in front of the results.
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
    """Stores the float tensors of Constant nodes, where the weights of the file are such tensors.

    Some exporters write no initializers, and a module that was frozen before its export has none. Where initializers
    hold weights, Constant nodes hold true constants.

    Returns:
        the nodes without those; `stored` has their tensors.
    """
    held = {
        node.outputs[0]: node.attributes["value"]
        for node in nodes
        if node.kind == "Constant" and node.outputs and "value" in node.attributes
    }
    held = {n: t for n, t in held.items() if prod(t.dims) > 1 and dtype_name(t.data_type).startswith(("float", "bfl"))}
    if _holds_weights(nodes, stored) or not any(len(held[n].dims) > 1 for n in _matrices(nodes) & held.keys()):
        return nodes
    for name, tensor in held.items():
        stored[name] = Stored(tuple(tensor.dims), dtype_name(tensor.data_type), small_value(tensor))
    return [node for node in nodes if not (node.kind == "Constant" and node.outputs and node.outputs[0] in held)]


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
    if stored.kind == "CONSTANT_TENSOR":
        return "constant"  # a plain tensor among the attributes of a module, whatever its name
    return "buffer" if stored.kind == "BUFFER" else guess.get(name, "constant")
