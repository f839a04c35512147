"""Recognises products with weights that a tool folded because both operands are constant.

Examples are the queries of DETR's first decoder layer, which are the same for all samples, and the position biases of
Swin V2, which a small network computes from a table of positions. The file then lacks the weights. For a product of a
table and one weight, the weight can be restored, since the product has the rank of the table; longer folded
computations are reported in a warning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
from onnx import numpy_helper

from ir.onnx.readers.nodes import (
    COMPUTED,
    FOLDED_KEY,
    RANK_KEY,
    Node,
    Stored,
    has_data,
    is_common_buffer,
    metadata,
    text_list,
)

MOST_RANK = 8
"""Columns of the widest table of places that is recognised (assumed; Swin V2's has two)."""
SAMPLED = 4 * MOST_RANK
"""Rows of a product that are looked at (assumed)."""
TOLERANCE = 1e-3
"""Length of a row that counts as zero, as a share of the longest (assumed; products are folded in float32)."""
SEVERAL = 3
"""Least number of weights in what is taken for a layer that was computed: a norm has two (counted)."""
_PRODUCTS = re.compile(r"(linear|addmm|matmul|mm|bmm|einsum|conv\w*)(_\d+)?$")
"""Names that PyTorch's newer exporter gives to results of products."""
_RESULT = re.compile(r"/(?P<module>.+)/(?!Constant)[A-Za-z]+(_\d+)?_output_\d+$")
"""Names that PyTorch's older exporter gives to results, after the path of the module."""
MOST_NAMED = 3
"""Modules that a warning names."""


def rank_of(tensor: Any) -> int:
    """The rank of a large stored matrix, `[..., n]`, if it is as small as that of a product with places; else 0.

    Args:
        tensor: protobuf; its metadata may say the rank.
    """
    shape = tuple(tensor.dims)
    if len(shape) < 2 or prod(shape[:-1]) < SAMPLED or shape[-1] < SAMPLED:
        return 0
    if not has_data(tensor):
        text = metadata(tensor).get(RANK_KEY, "")
        return int(text) if text.isdecimal() and int(text) <= MOST_RANK else 0
    matrix = np.asarray(numpy_helper.to_array(tensor)).reshape(-1, shape[-1])
    rows = matrix[np.linspace(0, len(matrix) - 1, SAMPLED).astype(int)].astype(np.float64)
    # The longest row is taken out of the others again and again: matrix libraries start threads, which the sandbox
    # forbids.
    rank, longest = 0, 0.0
    while rank <= MOST_RANK:
        lengths = np.sqrt((rows * rows).sum(axis=1))
        longest = max(longest, float(lengths.max()))
        if not lengths.max() > TOLERANCE * longest:
            break
        unit = rows[lengths.argmax()] / lengths.max()
        rows = rows - (rows * unit).sum(axis=1)[:, None] * unit
        rank += 1
    return rank if rank <= MOST_RANK else 0


def folded_sources(values: Iterable[Any]) -> dict[str, list[str]]:
    """Name of each inner tensor -> the names of all that it was computed from, as the newer exporter says.

    Args:
        values: declarations of inner tensors (protobuf).
    """
    return {v.name: text_list(text) for v in values if (text := metadata(v).get(FOLDED_KEY))}


def folded_products(
    sources: Mapping[str, Sequence[str]], stored: dict[str, Stored], tensors: Mapping[str, Any]
) -> list[Node]:
    """The products of a table and one weight, which become parameters; the products leave `stored`.

    Args:
        sources: see `folded_sources`.
        stored: the stored tensors by name.
        tensors: the same as protobuf.
    """
    made = []
    for name in sorted(sources.keys() & stored.keys() & tensors.keys()):
        dotted = [each for each in sources[name] if "." in each]
        weights = [each for each in dotted if not is_common_buffer(each)]
        rank = rank_of(tensors[name]) if len(weights) == 1 < len(dotted) and weights[0] not in stored else 0
        if rank:
            given = stored.pop(name)
            table = f"{name}#table"
            stored[table] = Stored((*given.shape[:-1], rank), given.dtype, None, "BUFFER")
            stored[weights[0]] = replace(given, shape=(rank, given.shape[-1]), kind="PARAMETER", value=None, periods=())
            made.append(Node("MatMul", [table, weights[0]], [name], {}))
    return made


def lost_layers(sources: Mapping[str, Sequence[str]], stored: Mapping[str, Stored]) -> tuple[str, ...]:
    """A warning if layers of weights were computed, by what the exporters say and by the names that they give.

    Args:
        sources: see `folded_sources`.
        stored: the stored tensors by name.
    """
    lost: dict[str, str] = {}
    for name in sorted(sources.keys() & stored.keys()):
        weights = [n for n in sources[name] if "." in n and not is_common_buffer(n) and n not in stored]
        if len(weights) >= SEVERAL and any(_PRODUCTS.match(n) for n in sources[name]):
            lost.setdefault(weights[0].rpartition(".")[0], weights[0])
    alike: dict[str, set[str]] = {}
    for name in stored:
        alike.setdefault(_without_numbers(name), set()).add(name)
    for name, given in stored.items():
        found = _RESULT.match(name)
        if found is None or given.kind == COMPUTED or not given.dtype.startswith(("float", "bfloat")):
            continue
        module = found["module"].replace("/", ".")
        beginning = f"{_without_numbers(module)}."
        for pattern in alike if "#" in beginning else ():
            if pattern.startswith(beginning) and not any(each.startswith(f"{module}.") for each in alike[pattern]):
                lost.setdefault(module, f"{module}.{pattern.removeprefix(beginning)}")
    if not lost:
        return ()
    modules = sorted(lost)
    named = ", ".join(modules[:MOST_NAMED]) + (f" and {len(modules) - MOST_NAMED} more" if modules[MOST_NAMED:] else "")
    return (
        f"the file holds results that a tool computed from parameters of {named}: those that it dropped then, such as "
        f"{lost[modules[0]]}, are missing here, and so is their work; hand in the file before that step, or export the "
        "module without weights (`automap export-onnx`)",
    )


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)
