"""The mixture of experts of ONNX Runtime (com.microsoft.MoE) as router, dispatch, grouped products and combine.

Operand orders and attributes are those of ONNX Runtime's ContribOperators.md, version 1.23. Files of older versions
have the weights of the experts turned, `[experts, inputs, outputs]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ir.build import GraphBuilder
from ir.errors import refuse
from ir.onnx.readers.nodes import Node
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT

EXPERTS = "com.microsoft.MoE"
ACTIVATIONS = {"relu": "Relu", "gelu": "Gelu", "silu": "Swish", "swiglu": "Swish", "identity": "Identity"}
"""Value of `activation_type` -> the standard kind."""
INTERLEAVED = 1
"""Value of `swiglu_fusion` where gates and the values that they multiply take turns in the first weight; with 2, all
gates come first, and with 0 the third weight makes the values."""

OPSET = 24
"""Operator set of the standard operators that are written: the first with Swish (ONNX)."""


def add_experts(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
    """Adds the operators of a mixture.

    Args:
        builder: builder of the graph.
        node: node of the kind `EXPERTS`.
        inputs: names in the builder of tokens, scores of the router, and weight and bias of each of up to three layers
            of an expert.

    Raises:
        ModelError: sizes do not fit together, or the activation is not known.
    """
    _Experts(builder, node, [*inputs, *[""] * 8]).add()


class _Experts:
    """One node and the operators that stand for it."""

    def __init__(self, builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> None:
        self.builder, self.node = builder, node
        self.x, self.scores = inputs[:2]
        self.layers = [(inputs[i], inputs[i + 1]) for i in (2, 4, 6)]
        self.count = 0

    def add(self) -> None:
        """Adds all of them."""
        kind = str(self.node.attributes.get("activation_type", "relu"))
        shape = self.builder.operand(self.x).shape_at(self.builder.export_batch)
        experts, k = self.builder.operand(self.scores).shape[-1], int(self.node.attributes.get("k", 1))
        weights = [self.builder.operand(name).shape for name, _ in self.layers if name]
        if kind not in ACTIVATIONS or not 1 <= k <= experts or any(len(w) != 3 or w[0] != experts for w in weights):
            self._refuse(f"activation_type={kind}, k={k}, {experts} scores, weights {weights}")
        if len(shape) > 2:
            self.x = self._view(self.x, (-1, shape[-1]))
        tokens = self.builder.operand(self.x).shape[0]
        chosen, shares = self._choose(k)
        sizes: dict[str, Any] = {"num_experts": experts, "capacity": -(-tokens * k // experts)}
        (slots,) = self._op(DISPATCH, [self.x, chosen], **sizes)
        routed = tokens * k
        hidden = self._activated(kind, slots, routed)
        result = self._product(hidden, 1, routed)
        name = self.node.outputs[0]
        (merged,) = self._op(COMBINE, [result, chosen, shares], outputs=["" if len(shape) > 2 else name])
        if len(shape) > 2:
            self._view(merged, shape, name)
        if BALANCED_LOAD not in self.builder.warnings:
            self.builder.warnings.append(BALANCED_LOAD)

    def _choose(self, k: int) -> tuple[str, str]:
        """Names of the experts of each token and of their weights."""
        number = self._constant(np.asarray([k]))
        (shares,) = self._op("Softmax", [self.scores], axis=-1)
        shares, chosen = self._op("TopK", [shares, number], outputs=["", ""], axis=-1)
        if self.node.attributes.get("normalize_routing_weights"):
            (total,) = self._op("ReduceSum", [shares], axes=(-1,), keepdims=1)
            (shares,) = self._op("Div", [shares, total])
        return chosen, shares

    def _activated(self, kind: str, slots: str, routed: int) -> str:
        """Name of what the activation makes of the slots: of all of them, or of the gates, times the values."""
        first = self._product(slots, 0, routed)
        values = self._product(slots, 2, routed) if self.layers[2][0] else ""
        fusion = int(self.node.attributes.get("swiglu_fusion", 0))
        if kind == "swiglu" and not values:
            width = self.builder.operand(first).shape[-1]
            if fusion == INTERLEAVED:
                first, values = (
                    self._op("Slice", [first], axes=(2,), starts=(start,), ends=(width,), steps=(2,))[0]
                    for start in (0, 1)
                )
            else:
                first, values = self._op("Split", [first], outputs=["", ""], axis=2, num_outputs=2)
        scale = {"alpha": self.node.attributes.get("activation_alpha", 1.0)} if kind == "swiglu" else {}
        (active,) = self._op(ACTIVATIONS[kind], [first], **scale)
        return self._op("Mul", [active, values])[0] if values else active

    def _product(self, slots: str, layer: int, routed: int) -> str:
        """Name of the slots times the weights of a layer of their expert, with its bias."""
        weight, bias = self.layers[layer]
        inner, sizes = self.builder.operand(slots).shape[-1], self.builder.operand(weight).shape[1:]
        if inner not in sizes:
            self._refuse(f"{inner} features for weights of {sizes}")
        if sizes[1] == inner:
            (weight,) = self._op("Transpose", [weight], perm=(0, 2, 1))
        (result,) = self._op(PRODUCT, [slots, weight], num_tokens=routed)
        if not bias:
            return result
        (column,) = self._op("Unsqueeze", [bias], axes=(1,))
        return self._op("Add", [result, column])[0]

    def _view(self, name: str, shape: Sequence[int], result: str = "") -> str:
        return self._op("Reshape", [name, self._constant(np.asarray(shape))], outputs=[result])[0]

    def _constant(self, value: Any) -> str:
        self.count += 1
        return self.builder.constant(f"{self.node.outputs[0]}#{self.count}", value)

    def _op(
        self, kind: str, inputs: Sequence[str], *, outputs: Sequence[str] = ("",), **attributes: Any
    ) -> tuple[str, ...]:
        """Adds one operator; returns the names of its results, of which those that are empty are made up."""
        found = []
        for name in outputs:
            self.count += 1
            found.append(name or f"{self.node.outputs[0]}#{self.count}")
        label = f"{self.node.name}/{kind}" if self.node.name else ""
        return self.builder.add(
            kind, inputs, found, name=label, scope=self.node.scope, attributes=attributes, opset=OPSET
        )

    def _refuse(self, why: str) -> None:
        raise refuse(
            f"operator {self.node.name or self.node.outputs[0]} ({EXPERTS}) cannot be read: its sizes do not fit",
            why,
            "Hand in the file that the exporter wrote, before ONNX Runtime fused its experts.",
        )
