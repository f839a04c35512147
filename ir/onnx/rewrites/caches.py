"""Removes caches of keys and values from decoders that were exported for generation.

Such files (of optimum and of ONNX Runtime's generative API) have the keys and values of earlier tokens as inputs, and
return them together with those of the new tokens. Training computes whole sequences without earlier tokens, so that
these inputs and outputs are removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ir.errors import refuse
from ir.onnx.readers.nodes import Declared, Node, Stored

FUSED: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Attention": ((4, 5), (1, 2)),
    "com.microsoft.Attention": ((4,), (1,)),
    "com.microsoft.GroupQueryAttention": ((3, 4), (1, 2)),
    "com.microsoft.MultiHeadAttention": ((6, 7), (1, 2)),
}
"""Kind of attention -> positions of the operands with cached keys and values, and of the results with the extended
caches (Operators.md of ONNX 1.19, ContribOperators.md of ONNX Runtime 1.23)."""

CACHE_FLAG = "use_cache_branch"
"""Input of optimum's merged decoders: whether keys and values of earlier tokens are given. One branch of an If reads
them, the other one computes all tokens (`merge_decoders` in optimum/onnx/graph_transformations.py)."""
LATER = "present"
"""Beginning of the names that optimum gives to the keys and values that a decoder returns."""


def without_cache_branch(
    nodes: Sequence[Node], inputs: Mapping[str, Declared], outputs: Sequence[str]
) -> tuple[list[Node], dict[str, Stored], list[str], tuple[str, ...]]:
    """Replaces the If of a merged decoder by the branch that computes all tokens without a cache.

    Args:
        nodes: the nodes of the file.
        inputs: the inputs that the user hands in.
        outputs: names of its outputs.

    Returns:
        the nodes, the stored tensors of the branch, the outputs and a warning; other files are returned unchanged.

    Raises:
        ModelError: there is no such branch, or it has other results.
    """
    merged = next((n for n in nodes if n.kind == "If" and n.inputs[0] == CACHE_FLAG and CACHE_FLAG in inputs), None)
    if merged is None:
        return list(nodes), {}, list(outputs), ()
    branch = merged.attributes.get("else_branch")
    if branch is None or len(branch.outputs) != len(merged.outputs):
        raise refuse("an If has no branch with its results", merged.name or CACHE_FLAG, "Send the whole graph.")
    inner, stored = branch.read()
    results = zip(branch.outputs, merged.outputs, strict=True)
    inner = [*inner, *[Node("Identity", [name], [result], {}) for name, result in results]]
    dropped = {name for name in merged.outputs if name.startswith(LATER)}
    warning = (
        f"the branch with a cache of keys and values for generation ({CACHE_FLAG}) is left out: the model is read as "
        "it is trained, on whole sequences without earlier tokens"
    )
    kept = [name for name in outputs if name not in dropped]
    return [each for node in nodes for each in (inner if node is merged else [node])], stored, kept, (warning,)


def without_caches(
    nodes: Sequence[Node], inputs: Mapping[str, Declared], outputs: Sequence[str]
) -> tuple[list[Node], list[str], tuple[str, ...]]:
    """Removes the caches of a file.

    Args:
        nodes: the nodes of the file.
        inputs: the inputs that the user hands in.
        outputs: names of its outputs.

    Returns:
        the nodes, the outputs and a warning that names the caches; a file without caches is returned unchanged.
    """
    nodes = _without_unread(nodes, outputs)
    read = _read_directly(nodes, inputs, outputs)
    readers: dict[str, list[Node]] = defaultdict(list)
    for node in read:
        for name in node.inputs:
            readers[name].append(node)
    lengths: dict[str, int] = {}
    given: dict[str, str] = {}
    dropped: set[str] = set()
    found: list[Node] = []
    for node in read:
        axis = _joined_axis(node, inputs, readers)
        if axis is not None and node.outputs[0] in outputs:
            lengths[node.inputs[0]] = axis
            given[node.outputs[0]] = node.inputs[1]
            dropped.add(node.outputs[0])
            continue
        returned = _returned(node, inputs, readers, outputs)
        if returned:
            dropped.update(returned)
            earlier = FUSED[node.kind][0]
            lengths |= {name: len(inputs[name].shape or ()) - 2 for name in node.inputs if name in inputs}
            kept = ["" if i in earlier else name for i, name in enumerate(node.inputs)]
            found.append(replace(node, inputs=kept, outputs=["" if n in returned else n for n in node.outputs]))
        else:
            found.append(node)
    if not dropped or dropped.issuperset(outputs):
        return list(nodes), list(outputs), ()
    whole: list[Node] = []
    for node in found:
        if node.kind == "Shape" and node.inputs[0] in lengths:
            whole += _shape_of_none(node, inputs, lengths)
        else:
            whole.append(replace(node, inputs=[given.get(name, name) for name in node.inputs]))
    names = sorted(dropped)
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    warning = (
        f"the cache of keys and values for generation ({names[0]}{others}) is left out: the model is read as it is "
        "trained, on whole sequences without earlier tokens"
    )
    return whole, [name for name in outputs if name not in dropped], (warning,)


def _without_unread(nodes: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    """The nodes, of which attentions return no keys and values that nothing reads: ONNX Runtime's always name them."""
    used = {*outputs, *(name for node in nodes for name in node.inputs)}
    found = []
    for node in nodes:
        unread = {n for i in FUSED.get(node.kind, ((), ()))[1] for n in node.outputs[i : i + 1] if n not in used}
        found.append(replace(node, outputs=["" if n in unread else n for n in node.outputs]) if unread else node)
    return found


def _read_directly(nodes: Sequence[Node], inputs: Mapping[str, Declared], outputs: Sequence[str]) -> list[Node]:
    """The nodes without copies of inputs (Concats of one operand), whose readers then read the inputs directly."""
    copied: dict[str, str] = {}
    found: list[Node] = []
    for node in nodes:
        names = [copied.get(name, name) for name in node.inputs]
        is_copy = node.kind in ("Identity", "Concat") and len(names) == 1 and names[0] in inputs
        if is_copy and node.outputs[0] not in outputs:
            copied[node.outputs[0]] = names[0]
        else:
            found.append(replace(node, inputs=names))
    return found


def _joined_axis(node: Node, inputs: Mapping[str, Declared], readers: Mapping[str, list[Node]]) -> int | None:
    """The token dim of a node that appends new keys or values to those of an input; None for other nodes."""
    if node.kind != "Concat" or len(node.inputs) != 2 or node.inputs[0] not in inputs:
        return None
    past, shape = node.inputs[0], inputs[node.inputs[0]].shape
    axis = int(node.attributes.get("axis", 0))
    axis += len(shape or ()) if axis < 0 else 0
    if shape is None or not 0 < axis < len(shape) or not isinstance(shape[axis], str):
        return None
    return axis if all(reader is node or reader.kind == "Shape" for reader in readers[past]) else None


def _returned(
    node: Node, inputs: Mapping[str, Declared], readers: Mapping[str, list[Node]], outputs: Sequence[str]
) -> list[str]:
    """The results of an attention node that are used only as a returned cache; empty if there are none."""
    if node.kind not in FUSED:
        return []
    operands, results = FUSED[node.kind]
    earlier = [node.inputs[i] for i in operands if i < len(node.inputs) and node.inputs[i]]
    later = [node.outputs[i] for i in results if i < len(node.outputs) and node.outputs[i]]
    alone = all(name in inputs for name in earlier) and all(n in outputs and not readers[n] for n in later)
    return later if alone else []


def _shape_of_none(node: Node, inputs: Mapping[str, Declared], lengths: Mapping[str, int]) -> list[Node]:
    """Nodes that return the shape of an empty cache, in place of a Shape node that reads the cache.

    Symbolic sizes are taken from another input that has a dim of the same name, and are 1 if there is none.
    """
    past, out = node.inputs[0], node.outputs[0]
    sizes = [0 if i == lengths[past] else size for i, size in enumerate(inputs[past].shape or ())]
    sizes = sizes[slice(node.attributes.get("start", 0), node.attributes.get("end"))]
    found: list[Node] = []
    for i, size in enumerate(sizes):
        part = [f"{out}#{i}", f"{out}#{i}#sizes", f"{out}#{i}#place"]
        others = ((n, d.shape or ()) for n, d in inputs.items() if n not in lengths)
        places = ((n, shape.index(size)) for n, shape in others if size in shape)
        name, place = next(places, ("", 0)) if isinstance(size, str) else ("", 0)
        if name:
            found.append(Node("Shape", [name], part[1:2], {}, scope=node.scope, opset=node.opset))
            found.append(Node("Constant", [], part[2:], {"value_ints": (place,)}, opset=node.opset))
            found.append(Node("Gather", part[1:], part[:1], {"axis": 0}, scope=node.scope, opset=node.opset))
        else:
            known = size if isinstance(size, int) else 1
            found.append(Node("Constant", [], part[:1], {"value_ints": (known,)}, opset=node.opset))
    return [*found, Node("Concat", [f"{out}#{i}" for i in range(len(sizes))], [out], {"axis": 0}, opset=node.opset)]
