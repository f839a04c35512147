"""Creates the new operators of a mixture of experts: dispatch, grouped products and combination."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ir.graph import Graph, Operator, Tensor
from ir.operators import Usage, make_operator
from ir.operators.experts import BALANCED_LOAD, COMBINE, DISPATCH, PRODUCT
from ir.rewrite import Rewrite

VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity")
UNARY = (
    "Relu", "Sigmoid", "Tanh", "Exp", "Gelu", "Erf", "Softplus", "LeakyRelu", "Elu", "Celu", "Selu", "HardSwish",
    "HardSigmoid", "Swish", "Mish", "Softsign", "Neg", "Abs", "Sqrt", "Reciprocal", "Clip", "Cast", "ThresholdedRelu",
)  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Sum")


def finished(rewrite: Rewrite) -> Graph:
    """The graph with its new operators and a warning; the same graph if there are none."""
    if not rewrite.made:
        return rewrite.graph
    graph = rewrite.finish()
    return replace(
        graph, operators=_distinct(graph.operators), warnings=tuple(dict.fromkeys((*graph.warnings, BALANCED_LOAD)))
    )


def _distinct(operators: Sequence[Operator]) -> tuple[Operator, ...]:
    """The operators; repeated names get a number as suffix."""
    seen: dict[str, int] = {}
    found = []
    for op in operators:
        number = seen.get(op.name, 0)
        seen[op.name] = number + 1
        found.append(replace(op, name=f"{op.name}_{number}") if number else op)
    return tuple(found)


@dataclass
class Layer:
    """The new operators of one router and its experts.

    They are collected here, and replace the last operator of the layer (`put`) once all its operators are recognised.
    """

    rewrite: Rewrite
    chosen: Tensor
    """Indices of the chosen experts, `[tokens ..., k]`."""
    among: int
    """Number of scores per token among which its experts are chosen."""
    experts: int = 0
    """Number of experts; 0 while unknown."""
    operators: list[Operator] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    pieces: dict[str, tuple[str, int, int, int]] = field(default_factory=dict)
    dispatched: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph before the rewrite."""
        return self.rewrite.graph

    @property
    def k(self) -> int:
        """Number of experts per token."""
        return self.chosen.shape[-1]

    @property
    def tokens(self) -> int:
        """Number of tokens of one sample."""
        return prod(self.chosen.shape[:-1])

    @property
    def routed(self) -> int:
        """Number of routed tokens of one sample: each token counts `k` times."""
        return self.tokens * self.k

    def tensor(self, name: str) -> Tensor:
        """A tensor of the layer or of the graph."""
        return self.tensors.get(name) or self.rewrite.tensor(name)

    def make(
        self,
        kind: str,
        like: Operator,
        inputs: Sequence[str],
        outputs: Sequence[str],
        attributes: Mapping[str, Any] | None = None,
        *,
        is_view: bool = False,
        is_new: bool = False,
    ) -> tuple[str, ...]:
        """Adds one operator.

        Args:
            kind: its kind.
            like: the operator of the file whose scope, version and (unless `is_new`) name it gets.
            inputs: names of its operands.
            outputs: names of its results.
            attributes: its attributes.
            is_view: whether it only rearranges parameters.
            is_new: whether it gets a new name, because the file has no counterpart of it.

        Returns:
            names of its results.
        """
        base = f"{like.scope}/{kind}" if like.scope else f"{outputs[0]}"
        built = make_operator(
            kind,
            name=base if is_new else like.name,
            inputs=[self.tensor(n) for n in inputs],
            outputs=outputs,
            attributes=attributes,
            opset=like.opset,
            usage=Usage(scope=like.scope, is_view=is_view),
        )
        self.operators.append(built.operator)
        for tensor in built.outputs:
            self.tensors[tensor.name] = tensor
        return built.operator.outputs

    def put(self, at: int) -> None:
        """Replaces operator `at` by the operators of the layer."""
        self.rewrite.made[at] = self.operators
        self.rewrite.tensors.update(self.tensors)
        self.rewrite.pieces.update(self.pieces)

    def dispatch(self, like: Operator, source: str) -> str | None:
        """Name of the slots to which tokens `source`, `[..., h]`, are dispatched; None if their batch dim differs."""
        if source not in self.dispatched:
            x = self.reshaped(like, source, (*self.chosen.shape[:-1], self.tensor(source).shape[-1]), "tokens")
            if self.tensor(x).batch_dim != self.chosen.batch_dim:
                return None
            (self.dispatched[source],) = self.make(
                DISPATCH,
                like,
                [x, self.choices(like)],
                [f"{source}#slots"],
                {"num_experts": self.experts, "capacity": -(-self.routed // self.experts)},
                is_new=True,
            )
        return self.dispatched[source]

    def product(self, like: Operator, tokens: str, weight: str, *, transposed: bool) -> str | None:
        """Name of the product of slots and weights `[e, k, n]` (`[e, n, k]` if `transposed`); None if sizes differ."""
        shape = self.tensor(weight).shape
        if len(shape) != 3 or shape[2 if transposed else 1] != self.tensor(tokens).shape[2]:
            return None
        if transposed:
            source, weight = weight, f"{like.outputs[0]}#weight"
            self.make("Transpose", like, [source], [weight], {"perm": (0, 2, 1)}, is_view=True, is_new=True)
        outputs = [f"{like.outputs[0]}#experts"]
        return self.make(PRODUCT, like, [tokens, weight], outputs, {"num_tokens": self.routed}, is_new=True)[0]

    def bias(self, like: Operator, stack: str, features: int) -> str | None:
        """Name of a view `[e, 1, n]` of bias `stack`; None if that is not of shape `[e, n]`."""
        if self.tensor(stack).shape != (self.experts, features):
            return None
        name = f"{like.outputs[0]}#bias"
        return self.make("Unsqueeze", like, [stack], [name], {"axes": (1,)}, is_view=True, is_new=True)[0]

    def combine(self, like: Operator, slots: str, weights: str, result: Tensor) -> bool:
        """Adds the weighted sum over each token's experts, as tensor `result`.

        Args:
            like: the operator of the file whose scope the new operators get.
            slots: the results of the experts.
            weights: the routing weights, with one number per token and chosen expert.
            result: the tensor of the file that is replaced.

        Returns:
            whether the sum has the shape and the batch dim of `result`.
        """
        weights = self.reshaped(like, self._root(weights), self.chosen.shape, "weights")
        if self.tensor(weights).batch_dim != self.chosen.batch_dim:
            return False
        shape = (*self.chosen.shape[:-1], self.tensor(slots).shape[2])
        if prod(shape) != result.num_elements:
            return False
        is_whole = result.shape == shape and result.batch_dim == self.chosen.batch_dim
        name = result.name if is_whole else f"{result.name}#tokens"
        self.make(COMBINE, like, [slots, self.choices(like), weights], [name], is_new=True)
        if not is_whole:
            self.make("Reshape", like, [name], [result.name], {"shape": result.shape}, is_new=True)
        made = self.tensor(result.name)
        return made.shape == result.shape and made.batch_dim == result.batch_dim

    def reshaped(self, like: Operator, name: str, shape: tuple[int, ...], label: str) -> str:
        """Name of tensor `name` in `shape`; a reshape is added if it has another shape."""
        if self.tensor(name).shape == shape:
            return name
        result = f"{name}#{label}"
        if result not in self.tensors:
            self.make("Reshape", like, [name], [result], {"shape": shape}, is_new=True)
        return result

    def choices(self, like: Operator) -> str:
        """Name of the indices of the chosen experts, `[tokens ..., k]`."""
        return self.reshaped(like, self.chosen.name, self.chosen.shape, "choices")

    def _root(self, name: str) -> str:
        """The tensor of shape `[tokens ..., k]` of which `name` is a view; `name` if there is none."""
        root = name
        while self.tensor(root).shape != self.chosen.shape:
            op = self.graph.maker(root)
            if op is None or op.kind not in VIEWS:
                return name
            root = op.inputs[0]
        return root
