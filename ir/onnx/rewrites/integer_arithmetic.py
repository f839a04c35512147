"""Replaces operators that compute with integers by those of the float model from which they were made.

ONNX Runtime's tools write them: `quantize_static` without QDQ (`QLinearConv`), `quantize_dynamic` (`MatMulInteger`
between `DynamicQuantizeLinear` and the product of the scales), its optimiser (`DynamicQuantizeMatMul`), and the
quantisation of weights in blocks (`MatMulNBits`, and `QMoE` for mixtures of experts), in which files of language models
are published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod

from ir.errors import refuse
from ir.onnx.readers.nodes import Node, Stored

FLOAT_KINDS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "QLinearConv": ("Conv", (0, 3, 8)), "QLinearMatMul": ("MatMul", (0, 3)), "MatMulInteger": ("MatMul", (0, 1)),
    "ConvInteger": ("Conv", (0, 1)), "QGemm": ("Gemm", (0, 3, 6)), "QLinearAdd": ("Add", (0, 3)),
    "QLinearMul": ("Mul", (0, 3)), "QLinearConvTranspose": ("ConvTranspose", (0, 3, 8)),
    "QLinearAveragePool": ("AveragePool", (0,)), "QLinearGlobalAveragePool": ("GlobalAveragePool", (0,)),
    "QLinearLeakyRelu": ("LeakyRelu", (0,)), "QLinearSigmoid": ("Sigmoid", (0,)), "QLinearSoftmax": ("Softmax", (0,)),
    "QLinearReduceMean": ("ReduceMean", (0,)), "QLinearWhere": ("Where", (0, 1, 4)),
    "MatMulIntegerToFloat": ("MatMul", (0, 1, 6)), "DynamicQuantizeMatMul": ("MatMul", (0, 1, 4)),
}  # fmt: skip
"""Kind -> the same on floats, and the positions of its operands (ONNX operator set 28, ONNX Runtime's contrib operators
1.23). The operands between are scales and zeros."""
IN_BLOCKS = ("MatMulNBits", "MatMulBnb4", "GatherBlockQuantized")
"""Kinds that read weights packed into bytes, with one scale per block."""
QUANTISED_EXPERTS = "QMoE"
"""The kind of a mixture of experts whose weights are packed into bytes."""
INTEGER_KINDS = frozenset({*FLOAT_KINDS, *IN_BLOCKS, QUANTISED_EXPERTS, "QLinearConcat", "DynamicQuantizeLinear"})
"""All kinds that this module replaces."""
INTEGERS_ALONE = ("channels_last", "expert_weight_bits", "block_size")
"""Attributes that the corresponding float kinds do not have."""


def on_floats(
    nodes: list[Node], stored: dict[str, Stored], origins: Callable[[str], set[str]], *, marked: bool
) -> tuple[list[Node], int]:
    """Puts operators on floats in place of those on integers.

    Args:
        nodes: nodes of the file.
        stored: stored tensors; weights of integers become floats.
        origins: name of a tensor -> the tensors whose numbers it holds, in front of operators that only move them.
        marked: whether the exporter marked parameters.

    Returns:
        the nodes, with an Identity in place of those that only round, convert or scale; and the number of weights.

    Raises:
        ModelError: an operator lacks an operand or an attribute, or has its channels last.
    """
    if not any(plain(node) in INTEGER_KINDS for node in nodes):
        return nodes, 0
    before = {name for name, given in stored.items() if _is_float(given)}
    kept, scales, counts = list[Node](), set[str](), set[str]()
    for node in nodes:
        kind = plain(node)
        if kind in INTEGER_KINDS and kind != "DynamicQuantizeLinear":
            made = _on_floats(node, kind, stored, origins, marked=marked)
            kept += made
            counts.update(node.outputs[:1] if kind in ("MatMulInteger", "ConvInteger") else ())
        elif kind == "DynamicQuantizeLinear":
            kept.append(left_out(node))
            scales.update(node.outputs[1:2])
        elif kind == "QuantizeLinear" or (kind == "DequantizeLinear" and not origins(node.inputs[0]) <= stored.keys()):
            kept.append(left_out(node))
        elif node.kind == "Cast" and node.inputs[0] in counts:
            kept.append(left_out(node))
            counts.update(node.outputs)
        elif node.kind == "Mul" and scales.intersection(node.inputs):
            # The scale of the result, or the result times it.
            scaled = [name for name in node.inputs if name in counts]
            kept += [replace(left_out(node), inputs=scaled)] if scaled else []
            scales.update(() if scaled else node.outputs)
        else:
            kept.append(node)
    return kept, sum(_is_float(given) for name, given in stored.items() if name not in before)


def plain(node: Node) -> str:
    """The kind of a node without the domain of ONNX Runtime's operators."""
    return node.kind.removeprefix("com.microsoft.")


def left_out(node: Node) -> Node:
    """An Identity of a node's first operand in place of the node."""
    return Node("Identity", node.inputs[:1], node.outputs[:1], {})


def _is_float(given: Stored) -> bool:
    return given.dtype.startswith(("float32", "float16", "bfloat", "float64"))


def _on_floats(
    node: Node, kind: str, stored: dict[str, Stored], origins: Callable[[str], set[str]], *, marked: bool
) -> list[Node]:
    """The operators on floats in place of one on integers."""
    if node.attributes.get("channels_last"):
        repair = "Hand in the model as it was before it was quantised."
        raise refuse("an operator on integers has its channels last", node.name or node.outputs[0], repair)
    if kind in IN_BLOCKS:
        return _unpacked(node, kind, stored, origins, marked=marked)
    if kind == QUANTISED_EXPERTS:
        return [_float_experts(node, stored, origins, marked=marked)]
    if kind == "QLinearConcat":
        wanted, given = "Concat", node.inputs[2::3]
    else:
        wanted, places = FLOAT_KINDS[kind]
        given = [node.inputs[i] if i < len(node.inputs) else "" for i in places]
    if not all(given[: 1 if wanted != "MatMul" else 2]):
        raise refuse(f"an operand of {kind} is missing", node.name or node.outputs[0], "Export the model again.")
    while not given[-1]:
        given.pop()
    for name in given:
        for origin in origins(name) & stored.keys():
            _in_floats(origin, stored[origin].shape, stored, marked=marked)
    attributes = {name: value for name, value in node.attributes.items() if name not in INTEGERS_ALONE}
    made = replace(node, kind=wanted, inputs=given, attributes=attributes)
    return _with_bias(made) if wanted == "MatMul" else [made]


def _with_bias(node: Node) -> list[Node]:
    """A MatMul and, where it has a third operand, a sum with it."""
    if len(node.inputs) < 3:
        return [node]
    product, bias = f"{node.outputs[0]}#product", f"{node.name}#bias" if node.name else ""
    return [
        replace(node, inputs=node.inputs[:2], outputs=[product]),
        replace(node, kind="Add", inputs=[product, node.inputs[2]], attributes={}, name=bias),
    ]


def _unpacked(
    node: Node, kind: str, stored: dict[str, Stored], origins: Callable[[str], set[str]], *, marked: bool
) -> list[Node]:
    """A product or a look-up of a matrix `[rows, columns]` of floats in place of one of packed numbers."""
    places = (0, 2) if kind == "GatherBlockQuantized" else (1, 2)
    found = sorted(origins(node.inputs[places[0]])) if len(node.inputs) > 2 else []
    if len(found) != 1 or found[0] not in stored or node.inputs[places[1]] not in stored:
        raise refuse(f"the weight of a {kind} is not stored", node.name or node.outputs[0], "Export the model again.")
    (weight,), scale = found, stored[node.inputs[places[1]]]
    if kind == "GatherBlockQuantized":
        # Each row of the table has scales for its blocks.
        if node.attributes.get("gather_axis", 0) != 0 or len(scale.shape) != 2:
            repair = "Hand in the model as it was before it was quantised."
            raise refuse(
                "a GatherBlockQuantized does not look up rows of a matrix", node.name or node.outputs[0], repair
            )
        given, rows = stored[weight], scale.shape[0]
        per_byte = 8 // int(node.attributes.get("bits", 4)) if given.dtype == "uint8" else 1
        columns = prod(given.shape) * per_byte // rows if not _is_float(given) else given.shape[1]
        _in_floats(weight, (rows, columns), stored, marked=marked, dtype=scale.dtype)
        return [replace(node, kind="Gather", inputs=[weight, node.inputs[1]], attributes={"axis": 0})]
    sizes = [int(node.attributes.get(name, 0)) for name in ("N", "K")]
    if min(sizes) < 1:
        raise refuse(f"a {kind} has no sizes K and N", node.name or node.outputs[0], "Export the model again.")
    _in_floats(weight, (sizes[0], sizes[1]), stored, marked=marked, dtype=scale.dtype)
    turned = f"{node.outputs[0]}#turned"
    bias = [name for name in node.inputs[5:6] if name]
    for name in bias:
        _in_floats(name, stored[name].shape if name in stored else (), stored, marked=marked, dtype=scale.dtype)
    product = replace(node, kind="MatMul", inputs=[node.inputs[0], turned, *bias], attributes={})
    return [Node("Transpose", [weight], [turned], {"perm": (1, 0)}, scope=node.scope), *_with_bias(product)]


def _float_experts(node: Node, stored: dict[str, Stored], origins: Callable[[str], set[str]], *, marked: bool) -> Node:
    """Replaces a QMoE by a MoE, whose weights `[experts, outputs, inputs]` are floats."""
    per_byte = 8 // int(node.attributes.get("expert_weight_bits", 4))
    given = [*node.inputs, *[""] * 11][:11]
    kept = given[:2]
    # Up to three layers, each with weights, scales and a bias.
    for weight, scale, bias in (given[i : i + 3] for i in (2, 5, 8)):
        kept += [weight, bias]
        if not weight:
            continue
        found = sorted(origins(weight))
        if len(found) != 1 or found[0] not in stored or scale not in stored or len(stored[found[0]].shape) != 3:
            raise refuse(
                "the weights of a QMoE are not stored", node.name or node.outputs[0], "Export the model again."
            )
        packed = stored[found[0]].shape
        _in_floats(
            found[0], (*packed[:-1], packed[-1] * per_byte), stored, marked=marked, dtype=stored[scale].dtype
        )  # fmt: skip
    while not kept[-1]:
        kept.pop()
    attributes = {name: value for name, value in node.attributes.items() if name not in INTEGERS_ALONE}
    return replace(node, kind=node.kind.replace("QMoE", "MoE"), inputs=kept, attributes=attributes)


def _in_floats(
    name: str, shape: tuple[int, ...], stored: dict[str, Stored], *, marked: bool, dtype: str = "float32"
) -> None:
    """Makes a stored tensor of integers one of floats."""
    given = stored.get(name)
    if given is not None and not _is_float(given):
        kind = "PARAMETER" if marked and prod(shape) > 1 else given.kind
        stored[name] = replace(given, shape=shape, dtype=dtype, value=None, kind=kind)
