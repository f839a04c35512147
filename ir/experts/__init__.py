"""Rewrites mixtures of experts of exported files into dispatch, grouped products and combine operators.

Three exported forms are recognised (the new operators are in `ir.operators.experts`):

1. *Looked-up weights* (transformers' `batched_mm`): for each routed token the weights of its expert are looked up
   (`[tokens * k, f, h]`, 30 GB for 1,024 tokens of Mixtral) and multiplied in a batched product.
2. *Dense loop*: every expert runs on every token, one by one or all in one batched product, and results are multiplied
   by the router's weights, which are zero for the experts that were not chosen. Experts that read only their tokens
   get this form where the file is read (`ir.onnx.rewrites.routed_tokens`). Since trainers run the routed tokens
   only, FLOPs are counted for `k` experts per token, not for all. Separate parameters of the experts are stacked into
   one; `Graph.pieces` then states which slice of it each parameter of the file is.

3. *Masks* that dispatch tokens to slots: the products with them are rewritten where the file is read
   (`ir.onnx.rewrites.dispatch_masks`); experts that are separate modules are merged here.

A layer is rewritten only if every operator up to the sum over a token's experts is recognised. New operators keep the
scopes of those that they replace.
"""

from __future__ import annotations

from ir.experts.dense import Dense
from ir.experts.emit import Layer, finished
from ir.experts.looked_up import LookedUp
from ir.experts.parted import Parted, joins
from ir.experts.routing import choice
from ir.graph import Graph
from ir.operators import BakedBatch, MissingBatch, Unsupported
from ir.rewrite import Rewrite

__all__ = ["recognise_experts"]


def recognise_experts(graph: Graph) -> Graph:
    """The graph with its mixtures of experts rewritten; the same graph if it has none."""
    rewrite = Rewrite(graph)
    for op in graph.operators:
        found = choice(graph, op)
        if found is not None and not _follow(LookedUp(Layer(rewrite, *found))):
            _follow(Dense(Layer(rewrite, *found)))
    for index in joins(graph):
        _follow(Parted(rewrite, index))
    return finished(rewrite)


def _follow(form: LookedUp | Dense) -> bool:
    """Rewrites a layer if possible, and returns whether it was; layers with inconsistent sizes are not rewritten."""
    try:
        return form.follow()
    except (Unsupported, BakedBatch, MissingBatch):
        return False
