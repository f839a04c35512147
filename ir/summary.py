"""What `inspect` says of a graph."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ir.blocks import find_units
from ir.graph import Graph
from ir.linkage import link
from ir.operators import KINDS


def summarize(graph: Graph) -> dict[str, Any]:
    """Counts as plain JSON values.

    Returns:
        num_parameters; forward_flops (one sample, 2 a multiply-add); num_operators and operators {kind: n}, without
        views of parameters and constants; num_units; num_blocks (units of repeated types); num_linkage_groups (over
        unit types); coverage: shares of operators whose kind is in the table (`modelled`) and not (`opaque`); warnings.
    """
    live = [op for op in graph.operators if not op.is_view and not op.is_constant]
    opaque = sum(op.kind not in KINDS for op in live)
    blocks = find_units(graph)
    kinds = Counter(op.kind for op in live)
    total = max(len(live), 1)
    return {
        "name": graph.name,
        "sha256": graph.sha256,
        "num_parameters": graph.num_parameters,
        "forward_flops": graph.forward_flops,
        "num_operators": len(live),
        "operators": dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        "num_units": len(blocks.units),
        "num_blocks": blocks.num_blocks,
        "num_linkage_groups": link(graph, blocks).num_groups,
        "coverage": {"modelled": 1 - opaque / total, "opaque": opaque / total},
        "warnings": list(graph.warnings),
    }
