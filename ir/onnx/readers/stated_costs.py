"""Costs that a file states in `metadata_props` of a node, for operators whose kind is not in the table.

`automap.forward_s` is seconds of one sample's forward pass on the device where it was measured, `automap.backward_s`
seconds of its backward pass; `automap.flops` is floating-point operations and `automap.bytes` bytes moved, both of the
forward pass of one sample.
A request's `hints.costs` override them.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from ir.errors import refuse

COST_KEYS = ("automap.forward_s", "automap.backward_s", "automap.flops", "automap.bytes")


def stated_costs(metadata: Mapping[str, str], name: str) -> dict[str, float]:
    """The costs in the metadata of node `name`; keys are without `automap.`.

    Raises:
        ModelError: a cost is not a number, or negative.
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
            repair = "Write a number, 0 or more, in seconds, FLOPs or bytes for one sample."
            raise refuse(f"a node states a cost that is not a number of 0 or more ({key})", f"{name}: {text!r}", repair)
        costs[key.removeprefix("automap.")] = cost
    return costs
