"""Annotations: what the author of a model asks of a plan (Whale, arXiv 2011.09208), as constraints of a problem.

A file annotates operators one by one. Where all operators of a module have the same annotation, one constraint names
the module.
"""

from __future__ import annotations

from collections.abc import Sequence

from automap.errors import ProblemError
from automap.globs import matches
from automap.hints import MAX_CONSTRAINTS, Constraint
from ir.graph import Graph, Operator


def annotated(graph: Graph, constraints: Sequence[Constraint]) -> tuple[Constraint, ...]:
    """The constraints that a graph's annotations are.

    Args:
        graph: the model.
        constraints: those of the user; operators that they name keep none of their annotations.

    Raises:
        ProblemError: they are too many together.
    """
    live = [op for op in graph.operators if op.is_live]
    wanted = {op.name: op.annotations for op in live if op.annotations}
    if not wanted:
        return ()
    for constraint in constraints:
        wanted = {name: of for name, of in wanted.items() if not matches(constraint.scope, name)}
    inside: dict[str, set[tuple[tuple[str, int], ...]]] = {}
    for op in live:
        for scope in _scopes(op):
            inside.setdefault(scope, set()).add(wanted.get(op.name, ()))
    found: dict[str, tuple[tuple[str, int], ...]] = {}
    for op in live:
        if op.name in wanted:
            # The outermost module whose operators all want the same, or the operator by itself.
            scope = next((scope for scope in _scopes(op) if len(inside[scope]) == 1), op.name)
            found[scope] = wanted[op.name]
    if len(found) + len(constraints) > MAX_CONSTRAINTS:
        raise ProblemError(
            f"its annotations and the request's constraints are more than {MAX_CONSTRAINTS:,}",
            field="model",
            value=graph.name,
            repair="Give all operators of a module the same annotation: that counts as one constraint.",
        )
    return tuple(_constraint(scope, dict(values)) for scope, values in found.items())


def _scopes(op: Operator) -> list[str]:
    """The modules that an operator is in, the outermost first."""
    parts = op.scope.split(".") if op.scope else []
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _constraint(scope: str, values: dict[str, int]) -> Constraint:
    replicate, split = (bool(values[key]) if key in values else None for key in ("replicate", "split"))
    return Constraint(scope=scope, replicate=replicate, split=split, stage=values.get("stage"))
