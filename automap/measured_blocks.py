"""Blocks whose time the user measured, and the units of the graph that they are. Units: seconds, samples of a
replica."""

from __future__ import annotations

from collections.abc import Sequence

from automap.errors import ProblemError
from automap.globs import matches, matches_operator
from automap.hints import Hints
from ir.graph import Graph
from ir.linkage import Linkage


def instance(scope: str, name: str) -> str | None:
    """The module that matches the glob `scope` and contains the operator `name`, or None."""
    if not matches(scope, name):
        return None
    path, _, _ = name.partition("/")
    ends = [i for i, letter in enumerate(path) if letter == "."] + [len(path)]
    return next((path[:end] for end in ends if matches_operator(scope, path[:end])), name)


def block_rows(graph: Graph, hints: Hints, linkage: Linkage, spans: Sequence[int]) -> list[list[float]]:
    """Rows of `Tables.blocks`: first and one past the last operator row, tp, samples, forward and backward seconds.

    Args:
        graph: graph of the problem.
        hints: hints with the `measured_blocks`.
        linkage: linkage of the graph.
        spans: first operator row of each unit type.

    Raises:
        ProblemError: a block is not a unit between two possible cuts, or only some of several equal units are named.
    """
    rows, kinds = [], dict[str, list[int]]()
    for number, block in enumerate(hints.measured_blocks):
        if block.scope not in kinds:
            kinds[block.scope] = _types(graph, linkage, block.scope, f"hints.measured_blocks[{number}].scope")
        times = [float(block.tp), float(block.samples), block.forward_s, block.backward_s]
        rows += [[float(spans[kind]), float(spans[kind + 1]), *times] for kind in kinds[block.scope]]
    return rows


def _types(graph: Graph, linkage: Linkage, scope: str, field: str) -> list[int]:
    """The unit types whose units are the modules that `scope` names."""
    units = linkage.blocks.units
    named: dict[int, set[str | None]] = {}
    blocks: dict[str, set[int]] = {}
    for index, unit in enumerate(units):
        products = [op for op in graph.operators[unit.start : unit.stop] if op.forward_flops.at(1) > 0.0]
        modules = {instance(scope, op.name) for op in products}
        for module in modules - {None}:
            blocks.setdefault(str(module), set()).add(index)
        if modules and modules != {None}:
            named[index] = modules
    if any(len(modules) != 1 for modules in named.values()) or any(len(found) != 1 for found in blocks.values()):
        raise ProblemError(
            "its modules are not blocks between two places where the graph can be cut",
            field=field,
            value=scope,
            repair=f"Name one module of each repeated block, as in {_example(graph, linkage)!r}.",
        )
    types = {units[index].type for index in named}
    if not types or any(unit.type in types and index not in named for index, unit in enumerate(units)):
        repair = f"Name all of them, as in {_example(graph, linkage)!r}."
        raise ProblemError(
            "names some of the equal blocks, and not all of them" if types else "names no product",
            field=field,
            value=scope,
            repair=repair,
        )
    return sorted(types)


def device_seconds(graph: Graph, hints: Hints) -> list[tuple[float, list[str]]]:
    """Least device-seconds of a sample, forward and backward, and the operators of each measured block."""
    found: list[tuple[float, list[str]]] = []
    for scope in dict.fromkeys(block.scope for block in hints.measured_blocks):
        least = min(b.tp * (b.forward_s + b.backward_s) / b.samples for b in hints.measured_blocks if b.scope == scope)
        names: dict[str, list[str]] = {}
        for op in graph.operators:
            module = instance(scope, op.name)
            if module is not None:
                names.setdefault(module, []).append(op.name)
        found += [(least, inside) for inside in names.values()]
    return found


def _example(graph: Graph, linkage: Linkage) -> str:
    kinds = [unit.type for unit in linkage.blocks.units]
    repeated = linkage.blocks.representative(max(set(kinds), key=kinds.count))
    paths = [
        op.scope.split(".") for op in graph.operators[repeated.start : repeated.stop] if op.forward_flops.at(1) > 0.0
    ]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append("*" if parts[0].isdigit() else parts[0])
    return ".".join(common) or "layers.*"
