"""Costs that a file states for its own operators, in `metadata_props` of a node: for kinds outside the table.

`automap.forward_s` is seconds of one sample's forward pass on the device where it was measured, `automap.backward_s`
likewise; `automap.flops` floating-point operations and `automap.bytes` bytes moved, both forward and for one sample.
A request's `hints.costs` override them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from ir.errors import refuse

COST_KEYS = ("automap.forward_s", "automap.backward_s", "automap.flops", "automap.bytes")


def stated_costs(metadata: Mapping[str, str], name: str) -> dict[str, float]:
    """The costs among a node's metadata, by key without `automap.`; `name` is of the node.

    Raises:
        ModelError: a cost is no number, or negative.
    """
    costs: dict[str, float] = {}
    for key in COST_KEYS:
        text = metadata.get(key)
        if text is None:
            continue
        try:
            cost = float(text)
        except (TypeError, ValueError):
            cost = -1.0
        if not (isfinite(cost) and cost >= 0):
            raise refuse(
                f"a node states a cost that is no cost ({key})",
                f"{name}: {text!r}",
                "Write a number, 0 or more, in seconds, FLOPs or bytes for one sample.",
            )
        costs[key.removeprefix("automap.")] = cost
    return costs
