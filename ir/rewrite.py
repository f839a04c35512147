"""Rewrites of a graph: new operators in the places of old ones, applied together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ir.build import rebuilt
from ir.graph import Graph, Operator, Tensor
from ir.operators import Usage, make_operator


@dataclass
class Additions:
    """New operators and tensors of a graph."""

    graph: Graph
    """The graph before the changes."""
    made: dict[int, list[Operator]] = field(default_factory=dict)
    """Index of an operator -> the operators in its place; an empty list removes it."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """New tensors by name."""
    pieces: dict[str, tuple[str, int, int, int]] = field(default_factory=dict)
    """New entries of `Graph.pieces`."""

    def tensor(self, name: str) -> Tensor:
        """A new tensor, or one of the graph."""
        return self.tensors.get(name) or self.graph.tensors[name]

    def make(
        self,
        at: int,
        kind: str,
        name: str,
        inputs: Sequence[str],
        output: str,
        attributes: Mapping[str, Any],
        *,
        needs_gradient: Sequence[bool] | None = None,
        is_view: bool = False,
    ) -> None:
        """Adds one operator in the place of operator `at`, with its scope and version."""
        like = self.graph.operators[at]
        built = make_operator(
            kind,
            name=name,
            inputs=[self.tensor(n) for n in inputs],
            outputs=(output,),
            attributes=attributes,
            needs_gradient=needs_gradient,
            opset=like.opset,
            usage=Usage(scope=like.scope, is_view=is_view),
        )
        self.tensors[output] = built.outputs[0]
        self.made.setdefault(at, []).append(built.operator)


@dataclass
class Rewrite(Additions):
    """The changes to one graph, applied together."""

    renamed: dict[str, str] = field(default_factory=dict)
    """Name of a tensor -> name of the one that is read instead."""

    def finish(self) -> Graph:
        """The rewritten graph; the same one where nothing changed."""
        if not self.made and not self.renamed:
            return self.graph

        def final(name: str) -> str:
            while name in self.renamed:
                name = self.renamed[name]
            return name

        operators = [op for i, old in enumerate(self.graph.operators) for op in self.made.get(i, [old])]
        for i, op in enumerate(operators):
            # Results keep their names. The operator that made a renamed tensor has no reader any more, and is dropped.
            if any(n in self.renamed for n in op.inputs):
                inputs, saved = tuple(map(final, op.inputs)), tuple(map(final, op.saved))
                operators[i] = replace(op, inputs=inputs, saved=saved)
        outputs = tuple(map(final, self.graph.outputs))
        tensors, pieces = {**self.graph.tensors, **self.tensors}, {**self.graph.pieces, **self.pieces}
        return rebuilt(self.graph, operators, tensors, outputs, pieces=pieces)
