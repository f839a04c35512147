"""Mixtures of experts as exporters write them become dispatch, grouped products and combine.

Three forms are known (the operators they become are in `ir.operators.experts`):

1. *Looked-up weights* (transformers' `batched_mm`): for each routed token the weights of its expert are looked up
   (`[tokens * k, f, h]`, 30 GB for 1,024 tokens of Mixtral) and multiplied in a batched product.
2. *Dense loop*: every expert runs on every token and the router's weights, zero for most, pick what counts; or all of
   them run in one batched product. Trainers run the routed tokens only, and so they are priced: FLOPs are those of `k`
   experts a token, not of all. Separate parameters of the experts become one that stacks them; `Graph.pieces` then
   says which slice of it each parameter of the file is.

3. *Masks* that dispatch tokens to slots: the products with them are rewritten where the file is read
   (`ir.onnx.rewrites.dispatch_masks`); experts after them that are modules of their own become one here.

A layer that is not understood up to the sum over a token's experts is left as it is. New operators keep the scopes of
those they replace.
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
    """The graph with its mixtures of experts rewritten; unchanged where there are none. See the module."""
    rewrite = Rewrite(graph)
    for op in graph.operators:
        found = choice(graph, op)
        if found is not None and not _follow(LookedUp(Layer(rewrite, *found))):
            _follow(Dense(Layer(rewrite, *found)))
    for index in joins(graph):
        _follow(Parted(rewrite, index))
    return finished(rewrite)


def _follow(form: LookedUp | Dense) -> bool:
    """Whether the layer was rewritten; a layer whose sizes do not fit together is not."""
    try:
        return form.follow()
    except (Unsupported, BakedBatch, MissingBatch):
        return False
