"""Computes the size of a model with expanded local functions, without expanding them.

The expansion of functions that call each other twice at every level grows exponentially with their nesting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx

from ir.errors import refuse
from ir.onnx.readers.control_flow import all_nodes
from ir.onnx.readers.limits import Limits, too_large

FunctionKey = tuple[str, str, str]
"""Domain, name, overload."""


@dataclass
class _Expanded:
    """The size of a function in which every call is expanded."""

    nodes: int = 0
    items: int = 0
    """Operands, attributes and their values."""
    depth: int = 0
    """Nesting depth of calls."""


def _items(node: Any) -> int:
    values = sum(len(a.ints) + len(a.floats) + len(a.strings) for a in node.attribute)
    return len(node.input) + len(node.output) + len(node.attribute) + values


def check_functions(model: onnx.ModelProto, limits: Limits) -> None:
    """Checks that no function calls itself, and that the size of the expanded model is within the limits.

    The size of a function is that of its own nodes plus the sizes of the functions that it calls. Each is computed once
    and without recursion, so that the check takes time linear in the size of the file.

    Raises:
        ModelError: a function is recursive or defined twice.
        ModelTooExpensive: a limit is exceeded.
    """
    bodies: dict[FunctionKey, Any] = {}
    for function in model.functions:
        key = (function.domain, function.name, function.overload)
        if key in bodies:
            raise refuse("a function is defined twice", function.name, "Check the exporter: names must be unique.")
        bodies[key] = function
    known: dict[FunctionKey, _Expanded] = {}
    for root in bodies:
        for key in _callees_first(root, bodies, known):
            known[key] = _expand(all_nodes(bodies[key]), known, limits)
    _expand(all_nodes(model.graph), known, limits)


def _callees_first(
    root: FunctionKey, bodies: dict[FunctionKey, Any], known: dict[FunctionKey, _Expanded]
) -> Iterator[FunctionKey]:
    """Yields `root` and all functions that it calls, directly or not, callees first; skips those in `known`."""

    def calls(key: FunctionKey) -> Iterator[FunctionKey]:
        for node in all_nodes(bodies[key]):
            callee = (node.domain, node.op_type, node.overload)
            if callee in bodies:
                yield callee

    if root in known:
        return
    stack = [(root, calls(root))]
    is_open = {root}
    while stack:
        key, rest = stack[-1]
        step = next((c for c in rest if c not in known), None)
        if step is None:
            stack.pop()
            is_open.discard(key)
            yield key
        elif step in is_open:
            raise refuse("a function calls itself", step[1], "Export without recursive functions.")
        else:
            is_open.add(step)
            stack.append((step, calls(step)))


def _expand(nodes: Iterable[Any], known: dict[FunctionKey, _Expanded], limits: Limits) -> _Expanded:
    total, nothing = _Expanded(), _Expanded()
    for node in nodes:
        callee = known.get((node.domain, node.op_type, node.overload), nothing)
        total.nodes += 1 + callee.nodes
        total.items += _items(node) + callee.items
        total.depth = max(total.depth, 1 + callee.depth)
        if total.nodes > limits.max_nodes:
            raise too_large(f"more than {limits.max_nodes} nodes once its functions are expanded", "functions")
        if total.items > limits.max_items:
            raise too_large(f"more than {limits.max_items} operands once its functions are expanded", "functions")
        if total.depth > limits.max_calls:
            raise too_large(f"functions nested deeper than {limits.max_calls}", "functions")
    return total
