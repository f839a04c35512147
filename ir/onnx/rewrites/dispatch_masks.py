"""Converts GShard's mixtures of experts, in which one-hot masks dispatch the tokens of all samples in one product.

A mask `[s, e, c]` states which slot `c` of which expert `e` token `s` gets (arXiv 2006.16668, section 3.2). Its product
with the tokens, `sec,sm->ecm`, sums over the tokens of all samples and could not be split by samples. It is replaced by
`Dispatch`, whose slots belong to samples; the product that returns the results, `sec,ecm->sm`, is replaced by
`Combine`. Both products may also be written as matrix products, with `(e c)` merged. The slots of an expert are divided
evenly among samples, and the experts and weights of a token are computed from the scores of the router.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ir.batch import resolve
from ir.build import GraphBuilder
from ir.graph import Operator, Tensor
from ir.onnx.readers.nodes import Node
from ir.onnx.rewrites.merged_views import Merged, MergedViews
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT

DISPATCHES = "abc,ad->bcd"
"""Product of a mask with the tokens, as `_letters` writes it."""
PRODUCTS = "abc,acd->abd"
"""Product of the slots with the weights of their experts."""
COMBINES = "abc,bcd->ad"
"""Product of a mask with the results of the experts."""
MOST_SLOTS = 2.0
"""Largest number of slots per routed token without a warning: GShard's capacity factor is 2."""
_VIEWS = frozenset({"Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze", "Transpose"})
_ENDS = frozenset({"ArgMax", "TopK", "MatMul", "Gemm", "Softmax", "Sigmoid"})
"""Kinds that choose experts or compute the scores of a router; operators before them do not belong to its masks."""


class _Mask(NamedTuple):
    """A mask and the routing from which it was computed."""

    tensor: Tensor
    """The mask, `[s, e, c]`."""
    scores: str
    """Name of the router's scores, `[s, e]`."""
    k: int
    """Number of experts per token."""
    is_divided: bool
    """Whether the weights of a token are divided by their sum."""


@dataclass
class DispatchMasks:
    """The products with masks of one import."""

    builder: GraphBuilder
    merged: MergedViews
    chosen: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Scores of a router -> names of the weights and of the numbers of the chosen experts, `[s, k]` both."""

    def add(self, node: Node, inputs: Sequence[str], attributes: Mapping[str, Any]) -> bool:
        """Adds the product of a mask with tokens or with the results of experts; returns whether it did.

        The node comes with the names of its operands in the builder, and with attributes as the table of kinds reads
        them.
        """
        if node.kind == "Reshape" and self.chosen and len(inputs) == 2:
            return self._flatten(node, inputs)
        if len(inputs) != 2 or node.kind not in ("Einsum", "MatMul"):
            return False
        equation = _letters(str(attributes["equation"])) if node.kind == "Einsum" else ""
        tensors = [self.builder.tensors.get(name) for name in inputs]
        if tensors[0] is None or tensors[0].batch_dim is None:
            return False
        of_matrices = node.kind == "MatMul" and len(tensors[0].shape) == 2
        if tensors[1] is not None and tensors[1].batch_dim == 0 and len(tensors[1].shape) == 2:
            dispatches = equation == DISPATCHES or (of_matrices and tensors[0].batch_dim == 1)
            return dispatches and self._dispatch(node, inputs)
        if self.chosen and (equation == COMBINES or of_matrices):
            return self._combine(node, inputs)
        if self.chosen and (equation == PRODUCTS or (node.kind == "MatMul" and tensors[0].batch_dim == 1)):
            return self._product(node, inputs)
        return False

    def _dispatch(self, node: Node, inputs: Sequence[str]) -> bool:
        builder, mask, result = self.builder, self._mask(inputs[0]), node.outputs[0]
        if mask is None:
            return False
        tokens = builder.tensors[inputs[1]]
        _, experts, slots = mask.tensor.shape
        if mask.tensor.shape[0] != tokens.shape[0]:
            return False
        whole = result if node.kind == "Einsum" else f"{result}#slots"
        # The slots of an expert are for all samples of the export.
        attributes = {"num_experts": experts, "capacity": -(-slots // builder.export_batch)}
        if mask.scores not in self.chosen:
            self.chosen[mask.scores] = self._choose(node, mask)
            builder.warnings.extend([] if BALANCED_LOAD in builder.warnings else [BALANCED_LOAD])
        routed = tokens.shape[0] * mask.k
        places = experts * attributes["capacity"]
        if places > MOST_SLOTS * routed:
            builder.warnings.append(
                f"{node.outputs[0]}: experts have {places} slots for {routed} routed tokens of a sample: "
                "their capacity does not follow the batch of the file"
            )
        chosen = self.chosen[mask.scores][1]
        builder.add(DISPATCH, [inputs[1], chosen], [whole], name=node.name, scope=node.scope, attributes=attributes)
        if whole != result:
            rows = experts * attributes["capacity"] * builder.export_batch
            self.merged.views[result] = Merged(whole, 1, "left", (rows, tokens.shape[1]))
        return True

    def _choose(self, node: Node, mask: _Mask) -> tuple[str, str]:
        """Adds the choice of experts; returns the names of the weights and of the numbers of the experts."""
        builder, weights, chosen = self.builder, f"{mask.scores}#weights", f"{mask.scores}#chosen"
        rest: dict[str, Any] = {"scope": node.scope, "opset": 18}
        top = {"k": mask.k, "axis": -1, "largest": 1, "sorted": 1}
        builder.add("TopK", [mask.scores], [weights, chosen], name=weights, attributes=top, **rest)
        if mask.is_divided:
            total, divided = f"{weights}#sum", f"{weights}#divided"
            builder.add("ReduceSum", [weights], [total], name=total, attributes={"axes": (-1,), "keepdims": 1}, **rest)
            builder.add("Div", [weights, total], [divided], name=divided, **rest)
            weights = divided
        return weights, chosen

    def _product(self, node: Node, inputs: Sequence[str]) -> bool:
        """Adds slots `[e, (b c), m]` times weights `[e, m, n]`; all slots are computed, as in the file."""
        slots, weight = (self.builder.tensors[name] for name in inputs)
        is_product = (len(slots.shape), slots.batch_dim) == (3, 1) and len(weight.shape) == 3
        if not is_product or weight.batch_dim is not None or weight.shape[:2] != (slots.shape[0], slots.shape[2]):
            return False
        attributes = {"num_tokens": slots.shape[0] * slots.shape[1]}
        self.builder.add(PRODUCT, inputs, node.outputs[:1], name=node.name, scope=node.scope, attributes=attributes)
        return True

    def _flatten(self, node: Node, inputs: Sequence[str]) -> bool:
        """Defers a view of slots `[e, (b c), m]` as `[(e b c), m]`, which is the operand of a matrix product."""
        slots, shape = self.builder.tensors.get(inputs[0]), self.builder.values.get(inputs[1])
        if slots is None or shape is None or len(slots.shape) != 3 or slots.batch_dim != 1:
            return False
        experts, rows, width = slots.shape_at(self.builder.export_batch)
        if resolve((experts, rows, width), shape.reshape(-1).tolist(), allow_zero=False) != (experts * rows, width):
            return False
        self.merged.views[node.outputs[0]] = Merged(inputs[0], 1, "left", (experts * rows, width))
        return True

    def _combine(self, node: Node, inputs: Sequence[str]) -> bool:
        builder, view = self.builder, self.merged.views.get(inputs[1])
        name = inputs[1] if view is None else view.whole
        results = builder.tensors.get(name)
        if results is None or len(results.shape) != 3 or results.batch_dim != 1:
            return False
        mask = self._mask(inputs[0])
        if mask is None or mask.scores not in self.chosen or mask.tensor.shape[1] != results.shape[0]:
            return False
        weights, chosen = self.chosen[mask.scores]
        builder.add(COMBINE, [name, chosen, weights], [node.outputs[0]], name=node.name, scope=node.scope)
        return True

    def _mask(self, name: str) -> _Mask | None:
        """The mask that a tensor is, or is a view of; None if it is not computed by a router."""
        builder = self.builder
        number = {output: index for index, op in enumerate(builder.operators) for output in op.outputs}
        tensor = builder.tensors[name]
        while len(tensor.shape) != 3:
            maker = builder.operators[number[name]] if name in number else None
            if maker is None or maker.kind not in _VIEWS:
                return None
            name = maker.inputs[0]
            tensor = builder.tensors[name]
        if tensor.batch_dim != 0:
            return None
        makers = _makers(builder, number, name)
        choices = [op for op in makers if op.kind in ("ArgMax", "TopK")]
        if not choices or any(not self._is_table(op.inputs[0], tensor) for op in choices):
            return None
        k = sum(1 if op.kind == "ArgMax" else builder.tensors[op.outputs[0]].shape[-1] for op in choices)
        softmax = [op.outputs[0] for op in makers if op.kind == "Softmax" and self._is_table(op.outputs[0], tensor)]
        # The weights of two choices are divided by their sum (GShard, algorithm 1).
        is_divided = any(op.kind == "Div" for op in makers)
        return _Mask(tensor, [*softmax, choices[0].inputs[0]][0], k, is_divided) if k <= tensor.shape[1] else None

    def _is_table(self, name: str, mask: Tensor) -> bool:
        """Whether a tensor has one number for each token and expert."""
        table = self.builder.tensors[name]
        return (table.shape, table.batch_dim) == (mask.shape[:2], 0)


def _makers(builder: GraphBuilder, number: Mapping[str, int], name: str) -> list[Operator]:
    """The operators that compute a mask, in the order of the file, from the choice of experts or their scores on."""
    found: dict[int, Operator] = {}
    pending = [name]
    while pending:
        index = number.get(pending.pop())
        if index is None or index in found:
            continue
        found[index] = builder.operators[index]
        if found[index].kind not in _ENDS:
            pending.extend(found[index].inputs)
    return [found[index] for index in sorted(found)]


def _letters(equation: str) -> str:
    """An equation with its letters renamed to a, b, ... in the order of their first use."""
    equation = equation.replace(" ", "")
    order = dict.fromkeys(letter for letter in equation if letter.isalpha())
    names = {letter: chr(ord("a") + place) for place, letter in enumerate(order)}
    return "".join(names.get(letter, letter) for letter in equation)
