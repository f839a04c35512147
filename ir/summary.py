"""Counts and coverage of a graph, as `inspect` prints them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ir.blocks import find_units
from ir.graph import DTYPE_BYTES, Graph, Operator
from ir.groups import fused_groups
from ir.linkage import link
from ir.operators import KINDS

FLOPS_PER_BYTE = 100.0
"""FLOPs of a training device while it moves one byte: V100 139, A100 153, H100 148-295 (datasheets), rounded."""
NUM_HEAVIEST = 5
"""Number of operators that `heaviest` lists."""


def summarize(graph: Graph) -> dict[str, Any]:
    """Counts as plain JSON values.

    Returns:
        num_parameters; num_trained, where some are frozen; forward_flops (one sample, 2 a multiply-add); num_operators
        and operators {kind: n}, without views of parameters and constants; fused_groups {kind: n} (see `ir.groups`);
        num_units; num_blocks (units of repeated types); num_linkage_groups (over unit types); coverage and heaviest, of
        the weights of `weights_of`; warnings.
    """
    live = [op for op in graph.operators if op.is_live]
    weights = weights_of(graph, live)
    blocks = find_units(graph)
    kinds = Counter(op.kind for op in live)
    return {
        "name": graph.name,
        "sha256": graph.sha256,
        "num_parameters": graph.num_parameters,
        **({"num_trained": graph.num_trained} if graph.has_frozen else {}),
        "forward_flops": graph.forward_flops,
        "num_operators": len(live),
        "operators": dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        "num_units": len(blocks.units),
        "num_blocks": blocks.num_blocks,
        "fused_groups": dict(sorted(Counter(group.kind for group in fused_groups(graph)).items())),
        "num_linkage_groups": link(graph, blocks).num_groups,
        "coverage": coverage(live, weights),
        "heaviest": heaviest(live, weights),
        "warnings": list(graph.warnings),
    }


def coverage(operators: Sequence[Operator], weights: Sequence[float]) -> dict[str, float]:
    """How well the cost of a forward pass is known: shares of the total weight, which add up to 1.

    Args:
        operators: the operators.
        weights: [operators] see `weights_of`.

    Returns:
        Shares by name. `measured`: measured on a device, or with FLOPs from the user for a kind outside the table;
        `modelled`: of a kind in the table; `opaque`: of a kind outside the table.
    """
    found = {"measured": 0.0, "modelled": 0.0, "opaque": 0.0}
    if not any(weights):
        weights = [1.0] * len(operators)
    for op, weight in zip(operators, weights, strict=True):
        known = op.kind in KINDS
        if op.measured_s is not None or (not known and op.forward_flops.at(1) > 0):
            found["measured"] += weight
        else:
            found["modelled" if known else "opaque"] += weight
    total = sum(found.values()) or 1.0
    return {state: weight / total for state, weight in found.items()}


def heaviest(operators: Sequence[Operator], weights: Sequence[float]) -> list[dict[str, Any]]:
    """The operators with the largest shares of `weights`; numbers in names become `*`.

    Returns:
        at most `NUM_HEAVIEST` of {name, count, share}, largest first.
    """
    shares: dict[str, float] = {}
    counts: Counter[str] = Counter()
    total = sum(weights) or 1.0
    for op, weight in zip(operators, weights, strict=True):
        name = re.sub(r"\d+", "*", op.name)
        shares[name] = shares.get(name, 0.0) + weight / total
        counts[name] += 1
    ranked = sorted(shares.items(), key=lambda item: (-item[1], item[0]))[:NUM_HEAVIEST]
    return [{"name": name, "count": counts[name], "share": share} for name, share in ranked if share > 0.0]


def weights_of(graph: Graph, operators: Sequence[Operator]) -> list[float]:
    """The weight of each operator: its forward FLOPs of one sample, or in a profile its measured forward seconds.

    An operator of a kind outside the table without FLOPs from the user has the FLOPs that a device could compute while
    it moves the operator's bytes (`FLOPS_PER_BYTE`); its weight would be 0 otherwise.
    """
    if not graph.forward_flops and any(op.measured_s for op in operators):
        return [op.measured_s[0] if op.measured_s else 0.0 for op in operators]
    weights = []
    for op in operators:
        weight = op.forward_flops.at(1)
        if not weight and op.kind not in KINDS:
            tensors = [graph.tensors[name] for name in (*op.inputs, *op.outputs)]
            moved = op.traffic[0] * sum(t.elements.at(1) * DTYPE_BYTES.get(t.dtype, 4.0) for t in tensors)
            weight = FLOPS_PER_BYTE * moved
        weights.append(weight)
    return weights
