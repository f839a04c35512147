"""Undoes changes that PyTorch's exporters make to a model: they merge equal weights, fold, transpose and rename."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.onnx.readers.nodes import (
    CONTENT_KEY,
    FILLED_KEY,
    FOLDED_KEY,
    SIGNATURE_KEY,
    STATE_POSITIONS,
    TURNED_KEY,
    Declared,
    Node,
    Stored,
    has_data,
    is_common_buffer,
    metadata,
    text_list,
)

EXPORTERS_OWN = re.compile(r"val_\d+$|(c_)?_?(lifted_tensor|tensor_constant)")
"""Names that PyTorch's exporter gives to literals and to tensors that a module makes of them."""

_MOVED = re.compile(r"(expand|repeat|tile|transpose|permute|unsqueeze|squeeze|view|reshape|clone)(_\d+)?$")
"""Names of results of operators that only move or repeat numbers."""
_CREATED = re.compile(
    r"(new_)?(arange|full|zeros|ones|eye|linspace|logspace|scalar_tensor|empty|rand\w*)(_like)?(_\d+)?$"
)
"""Names of results of operators that make tensors of numbers alone."""
_BUFFER = re.compile(r": BUFFER target='([^']+)'")
"""A buffer among the inputs of an exported program, as the newer exporter writes them down."""


def folded_parameters(graph: Any, stored: dict[str, Stored], made: Collection[str]) -> list[Node]:
    """Marks weights that have lost their mark because the exporter's optimiser folded a transpose or look-up of them.

    Args:
        graph: protobuf; it declares inner tensors, and the newer exporter says which were buffers of the module.
        stored: the stored tensors by name.
        made: names of the inputs and of the results of all nodes.

    Returns:
        Transposes of parameters that are stored as well (a tied head), so that they count once.
    """
    nodes = []
    copies: dict[tuple[str, tuple[int, ...]], str] = {}
    values = [value for value in graph.value_info if value.name in stored]
    folded = {value.name: text_list(metadata(value).get(FOLDED_KEY, "")) for value in values}
    buffers = frozenset(_BUFFER.findall(metadata(graph).get(SIGNATURE_KEY, "")))
    same = {(names[0], stored[name].shape) for name, names in folded.items() if len(names) == 1}
    for name, names in folded.items():
        given = stored.get(name)
        sources = [each for each in _folded_sources(name, names) if each not in buffers]
        if any(each in made for each in sources):
            continue  # numbers alone, in the shape of a result
        if given is not None and not given.shape and not any("." in each for each in names):
            continue  # a literal of a function that torch writes by other operators, such as `min_val` of a ReLU6
        if given is None or given.kind or not sources or not given.dtype.startswith(("float", "bfloat")):
            continue
        source = stored.get(sources[0])
        if len(names) == 1 and source is not None and source.shape == given.shape[::-1] and len(given.shape) == 2:
            nodes.append(Node("Transpose", [sources[0]], [name], {"perm": (1, 0)}))
            del stored[name]
            continue
        if len(names) > 1 and (sources[0], given.shape) in same:
            continue  # computed from a weight that the file holds under another name, as `1 - weight` is
        if source is not None and (prod(source.shape) != prod(given.shape) or source.shape == given.shape):
            continue  # computed from a weight that the file still holds
        # If a layer is applied several times, its weight is transposed once for each application.
        original = copies.setdefault((",".join(names), given.shape), name)
        if original != name and len(names) == 1 and len(given.shape) == 2:
            nodes.append(Node("Identity", [original], [name], {}))
            del stored[name]
            continue
        # Scale and shift of a batch normalisation whose numbers are all fixed; one that is trained has an operator.
        norms = {each.rpartition(".")[0] for each in names if each.endswith(".running_var")}
        is_fixed = bool(norms) and {each.rpartition(".")[0] for each in sources} <= norms
        given.kind, given.value, given.origin = "BUFFER" if is_fixed else "PARAMETER", None, sources[0]
    return nodes


def _folded_sources(value: str, names: list[str]) -> list[str]:
    """The names of parameters among those that a stored value with a name of its own was computed from.

    Parameters of modules have dotted names, the exporter's own values have not. A parameter of the outermost module has
    none either: it is what one operator was applied to, alone or with literals (`val_7`), or several operators that
    only move numbers, for a value that was computed before brings the names of its own sources along.
    """
    given = [n for n in names if not is_common_buffer(n) and not EXPORTERS_OWN.match(n.rpartition(".")[2])]
    sources = [n for n in given if "." in n]
    if not sources and not any("." in n for n in names):
        sources = given
        if len(names) > 2:
            sources = [n for n in sources if not _MOVED.match(n)] if _MOVED.match(value) else []
            if any(_CREATED.match(n) for n in sources):
                return []
    return sources if len(sources) == 1 or "." in "".join(sources) else []


def _is_sibling(a: str, b: str) -> bool:
    """Whether two module paths differ in numbers only, as do copies of a layer, whose initial weights may be equal."""
    return a != b and re.sub(r"\d+", "#", a) == re.sub(r"\d+", "#", b)


def _reader_scopes(nodes: Iterable[Node]) -> dict[str, str]:
    """The module of the first reader of each tensor."""
    found: dict[str, str] = {}
    for node in nodes:
        for name in node.inputs:
            found.setdefault(name, node.scope)
    return found


def unmerged(
    nodes: list[Node], stored: dict[str, Stored], inputs: dict[str, Declared], tensors: Mapping[str, Any]
) -> list[Node]:
    """Separates parameters that PyTorch's older exporter merged because their numbers were equal.

    It stores equal tensors once, and an Identity with the name of each other one. Since a tied parameter has only one
    name, each such Identity is a separate parameter (for instance one of two biases that are still zero).

    Returns:
        the nodes without these Identities; the parameters are added to `stored` or `inputs`.
    """
    kept = []
    scopes = _reader_scopes(n for n in nodes if not n.name.startswith("Identity_"))
    for node in nodes:
        source, name = node.inputs[0] if node.inputs else "", node.outputs[0] if node.outputs else ""
        # A transposed copy (`onnx::MatMul_7`) that equals another is the same weight again, unless it is fresh.
        is_copy = (
            name.startswith("onnx::")
            and source in tensors
            and not is_filled(tensors[source])
            and not _is_sibling(scopes.get(source, ""), scopes.get(name, ""))
        )
        if node.kind != "Identity" or node.scope or not node.name.startswith("Identity_") or is_copy:
            kept.append(node)
        elif source in stored:
            stored[name] = replace(stored[source])
        elif source in inputs:
            inputs[name] = replace(inputs[source])
        else:
            kept.append(node)
    return kept


def mark_weights(nodes: Iterable[Node], inputs: dict[str, Declared]) -> tuple[str, ...]:
    """Tells weights from data in a file of PyTorch's older exporter without stored parameters.

    It lists the data first, then the module's own parameters, whose names have no dot, then the parameters and buffers
    of the modules inside. The first input that is read as a weight and has a dot in its name ends the data; so does,
    before it, an input of floats that cannot be data of a sample, as its leading dim is not the batch.

    Returns:
        warnings about inputs without a dot that are parameters, or may be.
    """
    read: dict[str, set[tuple[str, int]]] = {}
    for node in nodes:
        for i, name in enumerate(node.inputs):
            if name in inputs:
                read.setdefault(name, set()).add((node.kind, i))
    names = list(inputs)
    inner = next(
        (
            k
            for k, name in enumerate(names)
            if inputs[name].dtype.startswith(("float", "bfloat"))
            and ("." in name or "::" in name)
            and any(i in STATE_POSITIONS.get(kind, ()) for kind, i in read.get(name, ()))
        ),
        len(names),
    )
    candidates = _own_candidates(names[:inner], inputs) if inner < len(names) else inner
    batch = (inputs[names[0]].shape or (None,))[0] if names else None
    first = next((k for k in range(candidates, inner) if (inputs[names[k]].shape or (batch,))[0] != batch), inner)
    for name in names[first:]:
        is_float = inputs[name].dtype.startswith(("float", "bfloat"))
        is_statistic = any(kind == "BatchNormalization" and i > 2 for kind, i in read.get(name, ()))
        inputs[name].kind = "PARAMETER" if is_float and not is_statistic else "BUFFER"
    if first < len(names):
        for name in names[:first]:
            inputs[name].kind = "USER_INPUT"
    own, unsure = (", ".join(part[:8]) for part in (names[first:inner], names[candidates:first]))
    warnings = [f"{own}: taken as parameters of the module itself, not as data"] if own else []
    if unsure and batch == 1:
        # At one sample, the leading dim does not tell a class token from data.
        repair = f"if they are parameters, name them, as in `--parameters {names[first - 1]}`"
        warnings.append(f"{unsure}: taken as data; {repair}")
    return tuple(warnings)


def _own_candidates(names: Sequence[str], inputs: Mapping[str, Declared]) -> int:
    """Position of the first of the inputs before a module's inner weights that may be a weight of its own; the number
    of inputs where there is none. From it on all are floats of stated sizes without a dot in their names."""
    found = len(names)
    for k in range(len(names) - 1, 0, -1):
        given, name = inputs[names[k]], names[k]
        is_float = given.dtype.startswith(("float", "bfloat")) and "." not in name and "::" not in name
        if not is_float or given.shape is None or not all(isinstance(size, int) for size in given.shape):
            break
        found = k
    return found


def is_filled(tensor: Any) -> bool:
    """Whether all elements are equal (a fresh bias or scale); a stripped file says it in metadata."""
    if not has_data(tensor):
        return metadata(tensor).get(FILLED_KEY) == "1"
    raw = tensor.raw_data
    if not raw:
        value = numpy_helper.to_array(tensor).reshape(-1)
        return bool((value == value[:1]).all())
    width = len(raw) // max(prod(tensor.dims), 1)
    if raw == raw[:width] * (len(raw) // max(width, 1)):
        return True
    # Weights that a fresh scale of zero was folded into are zeros of both signs.
    if raw[:width].strip(b"\0\x80"):
        return False
    with np.errstate(invalid="ignore"):  # Weights that nobody filled may hold NaNs that signal.
        return not numpy_helper.to_array(tensor).any()


def content(tensor: Any, *, turned: bool = False) -> object:
    """A key that tensors of equal numbers share (of the transposed matrix, if `turned`); None where it is unknown."""
    if not has_data(tensor):
        return metadata(tensor).get(TURNED_KEY if turned else CONTENT_KEY)
    value = numpy_helper.to_array(tensor)
    return np.ascontiguousarray(value.T if turned else value).tobytes()


def separate(nodes: list[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> None:
    """Separates parameters that PyTorch's newer exporter merged because their numbers were equal.

    It stores equal tensors once, such as fresh scales and biases of several modules. A filled parameter that several
    modules read becomes one parameter for each of them; any other is separated for copies of the layer that it belongs
    to (`layers.0.fc`, `layers.1.fc`): a parameter that is really tied holds random numbers and has readers of different
    kinds, or is read by one module again, or has the name of the last of its readers.
    """
    readers: dict[str, list[tuple[Node, int]]] = {}
    for node in nodes:
        for i, name in enumerate(node.inputs):
            if name in stored and stored[name].kind == "PARAMETER":
                readers.setdefault(name, []).append((node, i))
    for name, places in readers.items():
        if len({node.scope for node, _ in places}) < 2 or name not in tensors:
            continue
        fresh = is_filled(tensors[name])
        owner, leaf = (stored[name].origin or name).rpartition(".")[0], name.rpartition(".")[2]
        if not fresh and owner == places[-1][0].scope != places[0][0].scope:
            continue  # one module under several names, of which the exporter takes the last, and of copies the first
        first = owner if any(node.scope == owner for node, _ in places) else places[0][0].scope
        for node, i in places:
            if node.scope != first and (fresh or _is_sibling(node.scope, first)):
                own = f"{node.scope}.{leaf}"
                while own in stored and stored[own].shape != stored[name].shape:
                    own += "_"
                stored.setdefault(own, replace(stored[name]))
                node.inputs[i] = own


def _alias_copies(nodes: list[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> None:
    """Merges copies of a weight that the exporter transposed once for each application of a layer."""
    first: dict[tuple[int, tuple[int, ...], object], str] = {}
    alias: dict[str, str] = {}
    scopes = _reader_scopes(nodes)
    for name, given in stored.items():
        if not name.startswith("onnx::") or len(given.shape) < 2 or name not in tensors:
            continue
        same = content(tensors[name])
        if same is None:
            continue
        key = (tensors[name].data_type, given.shape, same)
        other = first.setdefault(key, name)
        siblings = _is_sibling(scopes.get(name, ""), scopes.get(other, ""))
        if other != name and not siblings and not is_filled(tensors[name]):
            alias[name] = first[key]
    for node in nodes if alias else ():
        node.inputs[:] = [alias.get(n, n) for n in node.inputs]
    for name in alias:
        del stored[name]


def _channels(node: Node, weight: tuple[int | str, ...] | None) -> tuple[int | str, ...] | None:
    """The shape of a tensor with one number for each output channel of `node`."""
    if weight is None or len(weight) < 2:
        return None
    if node.kind == "ConvTranspose":
        return (int(weight[1]) * int(node.attributes.get("group", 1)),)
    return (weight[0] if node.kind == "Conv" or node.attributes.get("transB") else weight[1],)


def unfolded(nodes: list[Node], stored: dict[str, Stored], inputs: Mapping[str, Declared]) -> list[Node]:
    """Restores the batch normalisations that PyTorch's exporters fold into convolutions in evaluation mode.

    The older one renames weight and bias to `onnx::Conv_N` in this case only; whether the convolution had a bias of its
    own is not known, and none is assumed. The newer one leaves the name of the normalisation's operator on the node and
    calls a bias that was not there before `WEIGHT_bias`. It does not mark the weights that it computed, so that a file
    of convolutions and normalisations alone has no marks at all.
    """
    found = []
    for node in nodes:
        weight, bias = ([*node.inputs[1:], "", ""])[:2]
        is_named = "batch_norm" in node.label
        if is_named:
            is_folded = node.kind in ("Conv", "ConvTranspose", "Gemm")
            has_bias = bool(bias) and not bias.endswith("weight_bias")
        else:
            is_folded = node.kind == "Conv" and all(n.startswith("onnx::Conv_") for n in (weight, bias))
            has_bias = False
        # A bias of zeros is dropped: the channels are then those of the weight.
        known = bias or weight
        if not is_folded or not all(n in stored or n in inputs for n in (weight, known)):
            found.append(node)
            continue
        norm = node.scope if is_named else f"{weight}.norm"
        held = stored[known] if known in stored else inputs[known]
        shape = _channels(node, held.shape) if not bias else held.shape
        if shape is None or any(isinstance(s, str) for s in shape):
            found.append(node)
            continue
        names = [f"{norm}.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
        for name in names:
            kind = "BUFFER" if "running" in name else "PARAMETER"
            stored[name] = Stored(tuple(int(s) for s in shape), held.dtype, None, kind)
        for name in (weight, bias) if has_bias else (weight,):
            if name in stored:
                stored[name].kind, stored[name].value = "PARAMETER", None
        before = f"{node.outputs[0]}#folded"
        scope = weight.rpartition(".")[0] if is_named else node.scope
        found.append(
            replace(node, inputs=node.inputs[: 3 if has_bias else 2], outputs=[before], scope=scope or node.scope)
        )
        found.append(
            Node(
                "BatchNormalization",
                [before, *names],
                node.outputs[:1],
                {},
                f"{node.name}#norm",
                node.scope,
                node.opset,
            )
        )
    return found


def tied(nodes: list[Node], stored: dict[str, Stored], tensors: Mapping[str, Any]) -> list[Node]:
    """Weights that are stored once more, transposed (a tied head): PyTorch's older exporter does that.

    Returns:
        Transposes of the weights in place of the copies, which leave `stored`.
    """
    _alias_copies(nodes, stored, tensors)
    matrices = [n for n, s in stored.items() if len(s.shape) == 2 and s.dtype.startswith("float") and n in tensors]
    copies = {n: stored[n].shape for n in matrices if n.startswith("onnx::")}
    wanted = set(copies.values())
    originals: dict[tuple[tuple[int, ...], object], str] = {}
    for name in matrices:
        if name not in copies and stored[name].shape[::-1] in wanted and not is_filled(tensors[name]):
            turned = content(tensors[name], turned=True)
            if turned is not None:
                originals[(stored[name].shape[::-1], turned)] = name
    made: list[Node] = []
    for name, shape in copies.items() if originals else ():
        original = originals.get((shape, content(tensors[name])))
        if original is not None:
            made.append(Node("Transpose", [original], [name], {"perm": (1, 0)}))
            del stored[name]
    return made
